"""
A typical PPO script for TRL 1.12. It runs there unchanged; the tests change only its two imports.

    python ppo_trl112_style.py --sft_model_path sft --reward_model_path reward --data prompts.json --output_dir out ...
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
)
from trl import ModelConfig, get_peft_config
from trl.experimental.ppo import PPOConfig, PPOTrainer


@dataclass
class PromptArguments:
    data: str = field(metadata={"help": "JSON file with a text per line, in `prompt`."})
    positional: bool = field(default=False, metadata={"help": "Pass the trainer's arguments by position."})


def main():
    parser = HfArgumentParser((PromptArguments, PPOConfig, ModelConfig))
    prompt_args, training_args, model_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(training_args.sft_model_path, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    peft_config = get_peft_config(model_args)
    # With an adapter, the policy with the adapter disabled is the reference.
    ref_policy = None
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)

    rows = load_dataset("json", data_files=prompt_args.data, split="train")

    def tokenize(row):
        ids = tokenizer(row["prompt"], padding=False)["input_ids"]
        return {"input_ids": ids, "lengths": len(ids)}

    rows = rows.map(tokenize, remove_columns=rows.column_names, num_proc=training_args.dataset_num_proc)
    rows = rows.filter(lambda row: row["lengths"] <= 16)
    train_dataset, eval_dataset = rows.select(range(len(rows) - 4)), rows.select(range(len(rows) - 4, len(rows)))

    if prompt_args.positional:
        trainer = PPOTrainer(
            training_args,
            tokenizer,
            policy,
            ref_policy,
            reward_model,
            train_dataset,
            value_model,
            DataCollatorWithPadding(tokenizer),
            eval_dataset,
            (None, None),
            None,
            peft_config,
        )
    else:
        trainer = PPOTrainer(
            args=training_args,
            processing_class=tokenizer,
            model=policy,
            ref_model=ref_policy,
            reward_model=reward_model,
            value_model=value_model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            peft_config=peft_config,
        )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.generate_completions()


if __name__ == "__main__":
    main()
