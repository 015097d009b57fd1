"""
A PPO script modelled on TRL 1.12's example `ppo_tldr.py`: a dataset with two splits, prompts filtered by length,
evaluation during training, and padding without an embedding. The tests change only its two imports.

    python ppo_trl112_tldr.py --dataset_name folder --dataset_test_split validation --sft_model_path sft
        --reward_model_path reward --output_dir out --stop_token eos --eval_strategy steps --eval_steps 8 ...
"""

import shutil

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import ModelConfig, ScriptArguments, get_peft_config
from trl.experimental.ppo import PPOConfig, PPOTrainer


LONGEST_PROMPT = 16


def main():
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()
    shutil.rmtree(training_args.output_dir, ignore_errors=True)

    dtype = model_args.dtype
    loading = {"dtype": dtype if dtype in (None, "auto") else getattr(torch, dtype)}
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})

    sft, reward = training_args.sft_model_path, training_args.reward_model_path
    value_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1, **loading)
    reward_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1, **loading)
    policy = AutoModelForCausalLM.from_pretrained(sft, **loading)
    peft_config = get_peft_config(model_args)
    ref_policy = AutoModelForCausalLM.from_pretrained(sft, **loading) if peft_config is None else None

    splits = load_dataset(script_args.dataset_name)
    train_dataset = splits[script_args.dataset_train_split]
    evaluates = training_args.eval_strategy != "no"
    eval_dataset = splits[script_args.dataset_test_split] if evaluates else None

    def tokenize(row):
        ids = tokenizer(row["prompt"], padding=False)["input_ids"]
        return {"input_ids": ids, "lengths": len(ids)}

    def prepare(rows):
        workers = training_args.dataset_num_proc
        rows = rows.map(tokenize, remove_columns=rows.column_names, num_proc=workers)
        return rows.filter(lambda row: row["lengths"] <= LONGEST_PROMPT, num_proc=workers)

    with PartialState().local_main_process_first():
        train_dataset = prepare(train_dataset)
        eval_dataset = prepare(eval_dataset) if evaluates else None
    assert train_dataset[0]["input_ids"][-1] != tokenizer.eos_token_id

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
