"""
What each kind of reference adds to the policy's memory and to the disk: the weights that it does not share, in MB.

```bash
python benchmarks/reference_memory.py
python benchmarks/reference_memory.py --hidden 768 --layers 12 --vocabulary 50304
```
"""

import argparse
import os
import tempfile


os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_klx import KLXPPOConfig, KLXPPOTrainer


CASES = {
    "full fine-tuning, initial weights": {},
    "full fine-tuning, the same model by path": {"kl_ref_model_path": "{model}"},
    "the same by path, in bf16": {"kl_ref_model_path": "{model}", "kl_ref_dtype": "bfloat16"},
    "LoRA, a model by path, in bf16": {"lora": True, "kl_ref_model_path": "{model}", "kl_ref_dtype": "bfloat16"},
    "full fine-tuning, num_layers_unfrozen=2": {"num_layers_unfrozen": 2},
    "LoRA, base model": {"lora": True},
    "LoRA, step 0": {"lora": True, "kl_penalty_reference_step": 0},
    "LoRA, lag 4": {"lora": True, "kl_ref_lag": 4},
    "LoRA, synced every 8 steps": {"lora": True, "kl_ref_sync_steps": 8},
}


def megabytes(parameters) -> float:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=288)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32000)
    options = parser.parse_args()
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=6,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    print(f"{'':42}{'policy MB':>12}{'reference adds MB':>20}{'on disk MB':>14}")
    for name, case in CASES.items():
        fields = dict(case)
        lora = fields.pop("lora", False)
        with tempfile.TemporaryDirectory() as folder:
            if "kl_ref_model_path" in fields:
                fields["kl_ref_model_path"] = os.path.join(folder, "model")
                LlamaForCausalLM(config).save_pretrained(fields["kl_ref_model_path"])
            args = KLXPPOConfig(folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], **fields)
            trainer = KLXPPOTrainer(
                args=args,
                processing_class=tokenizer,
                model=LlamaForCausalLM(config),
                reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
                train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
                peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
            )
        own = megabytes(trainer.kl_reference.weights().values())
        on_disk = own * (args.kl_ref_lag or 0)  # one copy per step of the lag
        policy = [weight for key, weight in trainer.model.named_parameters() if "klx_" not in key]
        print(f"{name:42}{megabytes(policy):>12.1f}{own:>20.1f}{on_disk:>14.1f}")


if __name__ == "__main__":
    main()
