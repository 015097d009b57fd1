"""
Fetch the model and the text that the benchmarks with `--assets` use, and convert the model for transformers.

```bash
python benchmarks/fetch_stories.py stories                  # from the Hub, about 20 MB
python benchmarks/promise.py --assets stories --setups default --seeds 10
```

The model is `stories260K` of https://huggingface.co/karpathy/tinyllamas (MIT), in the format of llama2.c. The text is
the beginning of the validation split of https://huggingface.co/datasets/roneneldan/TinyStories. The docs' figures
were made with other stories of that dataset, so that yours will differ from them as those of another seed do.
"""

import argparse
import struct
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


CHARACTERS = 400_000
# The names that transformers gives to the weights, in the order of the file. Those of all layers lie together.
IN_LAYERS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.down_proj",
    "mlp.up_proj",
)


def read_model(path: Path) -> LlamaForCausalLM:
    """Read a model of llama2.c: seven integers, then the weights in fp32."""
    content = path.read_bytes()
    hidden, intermediate, layers, heads, kv_heads, vocabulary, length = struct.unpack("<7i", content[:28])
    if vocabulary < 0:
        raise ValueError(f"{path} has an LM head of its own, which is not read here.")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        # These models end a story with the token that begins one.
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    own, numbers, read = model.state_dict(), torch.frombuffer(bytearray(content), dtype=torch.float32, offset=28), 0

    def take(name: str) -> torch.Tensor:
        nonlocal read
        shape = own[name].shape
        read += shape.numel()
        return numbers[read - shape.numel() : read].view(shape)

    weights = {"model.embed_tokens.weight": take("model.embed_tokens.weight")}
    for part in IN_LAYERS:
        for layer in range(layers):
            name = f"model.layers.{layer}.{part}.weight"
            weight = take(name)
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                # llama2.c rotates neighbours, transformers the two halves of a head.
                pairs = weight.view(-1, hidden // heads // 2, 2, hidden)
                weight = pairs.transpose(1, 2).reshape(weight.shape)
            weights[name] = weight
    weights["model.norm.weight"] = take("model.norm.weight")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def read_tokenizer(path: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    """Read a tokenizer of llama2.c: for each token its score, its length in bytes and its text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    content, tokens, position = path.read_bytes(), [], 4  # after the length of the longest token
    for _ in range(vocabulary):
        _, length = struct.unpack("<fi", content[position : position + 8])
        position += 8 + length
        tokens.append(content[position - length : position].decode())
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    ids = {token.replace(" ", "▁"): index for index, token in enumerate(tokens)}
    merges = []
    for token in ids:
        if not token.startswith("<"):
            parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [pair for pair in parts if pair[0] in ids and pair[1] in ids]
            merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<unk>",
        bos_token="<s>",
        eos_token="<s>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def convert(model_file: Path, tokenizer_file: Path, folder: Path) -> None:
    """Write a model of llama2.c and its tokenizer as a transformers checkpoint."""
    model = read_model(model_file)
    model.save_pretrained(folder)
    read_tokenizer(tokenizer_file, model.config.vocab_size).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; the `--assets` of the benchmarks")
    options = parser.parse_args()
    from huggingface_hub import hf_hub_download

    def fetch(repo: str, name: str, **kwargs) -> Path:
        return Path(hf_hub_download(repo, name, **kwargs))

    text = fetch("roneneldan/TinyStories", "TinyStories-valid.txt", repo_type="dataset").read_text(encoding="utf-8")
    files = [fetch("karpathy/tinyllamas", f"stories260K/{name}") for name in ("stories260K.bin", "tok512.bin")]
    convert(*files, options.folder / "stories260K")
    (options.folder / "text").mkdir(exist_ok=True)
    (options.folder / "text" / "tinystories_400k.txt").write_text(text[:CHARACTERS], encoding="utf-8")
    print(f"{options.folder} is ready.")


if __name__ == "__main__":
    main()
