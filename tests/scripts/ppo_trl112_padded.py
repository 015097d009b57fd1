"""
A PPO script modelled on TRL 1.12's example `ppo.py`: it adds a padding token to the tokenizer without resizing the
embeddings, so padding has no embedding. The tests change only its two imports.

    python ppo_trl112_padded.py --dataset_name folder --sft_model_path sft --reward_model_path reward
        --output_dir out ...
"""

import shutil

from accelerate import PartialState
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config
from trl.experimental.ppo import PPOConfig, PPOTrainer


HELD_OUT = 4


def main():
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()
    shutil.rmtree(training_args.output_dir, ignore_errors=True)

    loading = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        loading["quantization_config"] = quantization

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    if tokenizer.chat_template is None:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

    def load_scorer():
        path = training_args.reward_model_path
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **loading)

    value_model, reward_model = load_scorer(), load_scorer()
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **loading)
    peft_config = get_peft_config(model_args)
    ref_policy = None
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **loading)

    dataset = load_dataset(script_args.dataset_name, split=script_args.dataset_train_split)
    cut = len(dataset) - HELD_OUT

    def tokenize(rows):
        return {"input_ids": tokenizer(rows["prompt"], padding=False)["input_ids"]}

    def prepare(rows):
        return rows.map(
            tokenize, batched=True, remove_columns=rows.column_names, num_proc=training_args.dataset_num_proc
        )

    with PartialState().local_main_process_first():
        train_dataset = prepare(dataset.select(range(cut)))
        eval_dataset = prepare(dataset.select(range(cut, len(dataset))))

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
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.generate_completions()


if __name__ == "__main__":
    main()
