"""The benchmarks' model, converted from the format of llama2.c."""

import struct
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fetch_stories import convert  # noqa: E402


HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, LENGTH = 16, 24, 2, 4, 2, 32
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [" t", "he", " the", " ", "t", "h", "e", "c", "a"]
TOKENS = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTES, *PIECES]


def write_files(folder):
    """A random model and a small tokenizer, as llama2.c writes them."""
    torch.manual_seed(0)
    head = HIDDEN // HEADS
    shapes = {
        "embedding": (len(TOKENS), HIDDEN),
        "attention_norm": (LAYERS, HIDDEN),
        "q": (LAYERS, HIDDEN, HIDDEN),
        "k": (LAYERS, KV_HEADS * head, HIDDEN),
        "v": (LAYERS, KV_HEADS * head, HIDDEN),
        "o": (LAYERS, HIDDEN, HIDDEN),
        "ffn_norm": (LAYERS, HIDDEN),
        "gate": (LAYERS, INTERMEDIATE, HIDDEN),
        "down": (LAYERS, HIDDEN, INTERMEDIATE),
        "up": (LAYERS, INTERMEDIATE, HIDDEN),
        "norm": (HIDDEN,),
        "unused rotations": (2, LENGTH, head // 2),
    }
    weights = {name: torch.randn(shape) * 0.4 + ("norm" in name) for name, shape in shapes.items()}
    header = struct.pack("<7i", HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, len(TOKENS), LENGTH)
    model, tokenizer = folder / "model.bin", folder / "tokenizer.bin"
    model.write_bytes(header + b"".join(weight.numpy().tobytes() for weight in weights.values()))
    pieces = [token.encode() for token in TOKENS]
    entries = [struct.pack("<fi", -float(index), len(piece)) + piece for index, piece in enumerate(pieces)]
    tokenizer.write_bytes(struct.pack("<i", max(map(len, pieces))) + b"".join(entries))
    return weights, model, tokenizer


def forward(weights, ids):
    """Logits by the definition of the model in llama2.c: neighbours are rotated as complex numbers."""
    head, length = HIDDEN // HEADS, len(ids)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head, 2) / head)
    turns = torch.polar(torch.tensor(1.0), torch.outer(torch.arange(length), frequencies).float())

    def normed(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def rotated(x):
        pairs = torch.view_as_complex(x.view(length, -1, head // 2, 2).contiguous())
        return torch.view_as_real(pairs * turns[:, None]).flatten(2)

    x = weights["embedding"][ids]
    for layer in range(LAYERS):
        w = {name: weight[layer] for name, weight in weights.items() if len(weight) == LAYERS}
        h = normed(x, w["attention_norm"])
        q, k, v = h @ w["q"].T, h @ w["k"].T, h @ w["v"].T
        q, k, v = rotated(q), rotated(k), v.view(length, KV_HEADS, head)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", scores, v).flatten(1) @ w["o"].T
        h = normed(x, w["ffn_norm"])
        x = x + (torch.nn.functional.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T
    return normed(x, weights["norm"]) @ weights["embedding"].T


def test_converted_model_computes_the_same(tmp_path):
    weights, model_file, tokenizer_file = write_files(tmp_path)
    convert(model_file, tokenizer_file, tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    ids = torch.tensor([1, 260, 263, 12, 267, 259])
    with torch.no_grad():
        torch.testing.assert_close(model(ids[None]).logits[0], forward(weights, ids), rtol=1e-4, atol=1e-4)


def test_converted_tokenizer_merges_and_falls_back_to_bytes(tmp_path):
    _, model_file, tokenizer_file = write_files(tmp_path)
    convert(model_file, tokenizer_file, tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    ids = tokenizer("the caté")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁the", "▁", "c", "a", "t", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the caté"
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0
