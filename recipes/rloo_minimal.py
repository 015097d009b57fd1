"""
RLOO with KL control in one file: the reward asks for the letter "e", and the KL to the initial policy is held.

    python recipes/rloo_minimal.py                     # a tiny model that it builds: offline, on a CPU, a minute
    python recipes/rloo_minimal.py Qwen/Qwen3-0.6B     # a real one, from the Hub or a folder, with LoRA
"""

import string
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_klx import KLXRLOOConfig, KLXRLOOTrainer


def build_tiny():
    """A random Llama that writes letters, and its tokenizer."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *string.ascii_lowercase, " ", "?"])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **sizes)), tokenizer


def reward(completions, **kwargs):
    """The share of "e"."""
    return [text.count("e") / max(1, len(text)) for text in completions]


if __name__ == "__main__":
    torch.manual_seed(0)
    path, on_gpu = "".join(sys.argv[1:]), torch.cuda.is_available()
    if path:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    else:
        model, tokenizer = build_tiny()
        torch.set_num_threads(1)  # more are slower on a model this small
    prompts = Dataset.from_dict({"prompt": [f"write about {topic}" for topic in ("trees", "bread", "music", "rain")]})
    args = KLXRLOOConfig(
        output_dir="outputs/rloo_minimal",
        max_completion_length=32,
        kl_target=3.0,  # nats per completion: 32 tokens x 0.1
        num_generations=8,
        per_device_train_batch_size=32,
        max_steps=60,
        learning_rate=1e-5 if path else 1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=not on_gpu,
        bf16=on_gpu,
    )
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if path else None
    KLXRLOOTrainer(model, reward, args, prompts, processing_class=tokenizer, peft_config=lora).train()
