"""
Tiny models for the dialogues of `hh/dialogues.py`: a tokenizer, a policy (trained on good and bad answers alike, so it
is mediocre on purpose) and a reward model (trained on the preferences). They are trained once, in a few minutes on two
CPU cores, and then cached. Nothing is downloaded.

```python
from hh.bootstrap import prepare_default
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

assets = prepare_default("~/.cache/trl_klx")
policy = AutoModelForCausalLM.from_pretrained(assets.sft_path)
reward_model = AutoModelForSequenceClassification.from_pretrained(assets.reward_path)
```
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from hh.dialogues import make_preference_pairs
from hh.measures import heldout_perplexity, score_texts


# Part of the cache folder's name. Raise it when the training below changes in a way that the settings do not show.
VERSION = 2
# Written last, so a folder without it is incomplete.
METRICS_FILE = "metrics.json"
# Environment variables that a launcher sets for its processes.
LAUNCHED = re.compile(r"(ACCELERATE|FSDP|MASTER|LOCAL|TORCHELASTIC|GROUP|ROLE)_.*|WORLD_SIZE|RANK")


@dataclass(frozen=True)
class BootstrapSettings:
    """
    Sizes and steps of the tiny models.

    Args:
        n_train (`int`, *optional*, defaults to `2400`):
            Number of training pairs.
        n_heldout (`int`, *optional*, defaults to `300`):
            Number of held-out pairs.
        vocab_size (`int`, *optional*, defaults to `1200`):
            Maximum size of the vocabulary. The byte-pair merges may run out earlier.
        hidden_size (`int`, *optional*, defaults to `128`):
            Width of the Llama.
        num_layers (`int`, *optional*, defaults to `3`):
            Depth of the Llama.
        max_positions (`int`, *optional*, defaults to `512`):
            Longest sequence of the Llama.
        sft_steps (`int`, *optional*, defaults to `500`):
            Optimizer steps of the supervised training.
        sft_batch_size (`int`, *optional*, defaults to `16`):
            Dialogues per supervised step.
        sft_learning_rate (`float`, *optional*, defaults to `4e-3`):
            Peak learning rate of the supervised training.
        reward_steps (`int`, *optional*, defaults to `600`):
            Optimizer steps of the reward model.
        reward_batch_size (`int`, *optional*, defaults to `8`):
            Pairs per step of the reward model.
        reward_learning_rate (`float`, *optional*, defaults to `8e-4`):
            Peak learning rate of the reward model.
    """

    n_train: int = 2400
    n_heldout: int = 300
    vocab_size: int = 1200
    hidden_size: int = 128
    num_layers: int = 3
    max_positions: int = 512
    sft_steps: int = 500
    sft_batch_size: int = 16
    sft_learning_rate: float = 4e-3
    reward_steps: int = 600
    reward_batch_size: int = 8
    reward_learning_rate: float = 8e-4


DEFAULT_SETTINGS = BootstrapSettings()
QUICK_SETTINGS = BootstrapSettings(
    n_train=600,
    n_heldout=100,
    hidden_size=64,
    num_layers=2,
    sft_steps=80,
    sft_batch_size=16,
    reward_steps=80,
    reward_learning_rate=2e-3,
)


@dataclass
class DefaultAssets:
    """
    What [`prepare_default`] returns.

    Args:
        sft_path (`Path`):
            Folder with the policy and its tokenizer.
        reward_path (`Path`):
            Folder with the reward model and the same tokenizer.
        sft_perplexity_before (`float`):
            Perplexity of the held-out chosen answers under the untrained policy.
        sft_perplexity_after (`float`):
            The same after supervised training.
        reward_accuracy (`float`):
            Share of held-out pairs in which the reward model scores the chosen answer higher.
        mean_reward_chosen (`float`):
            Mean score of the held-out chosen answers.
        mean_reward_rejected (`float`):
            Mean score of the held-out rejected answers.
        seconds (`float`):
            Duration of the training.
        from_cache (`bool`):
            Whether this call found the trained models in the cache.
        train_rows (`list[dict[str, str]]`):
            Training rows, see [`~hh.dialogues.make_preference_pairs`].
        heldout_rows (`list[dict[str, str]]`):
            Held-out rows.
    """

    sft_path: Path
    reward_path: Path
    sft_perplexity_before: float
    sft_perplexity_after: float
    reward_accuracy: float
    mean_reward_chosen: float
    mean_reward_rejected: float
    seconds: float
    from_cache: bool
    train_rows: list[dict[str, str]] = field(repr=False)
    heldout_rows: list[dict[str, str]] = field(repr=False)


@contextlib.contextmanager
def _preserve_rng() -> Iterator[None]:
    """Restore the global generators, so that a run that trains and one that loads continue alike."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def train_tokenizer(rows: Sequence[dict[str, str]], vocab_size: int, max_positions: int) -> PreTrainedTokenizerFast:
    """
    Train a byte-level BPE tokenizer on the text of the rows.

    It adds no special tokens, and no merge crosses from the prompt's `"Assistant:"` into the answer's leading space,
    so tokenizing prompt and answer separately or together gives the same tokens.

    Args:
        rows (`Sequence[dict[str, str]]`):
            Rows with `"prompt"`, `"chosen"` and `"rejected"`.
        vocab_size (`int`):
            Maximum size of the vocabulary.
        max_positions (`int`):
            Longest sequence of the model.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]:
            Tokenizer that pads on the left, as generation requires.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (row["prompt"] + row[key] for row in rows for key in ("chosen", "rejected")), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def _grouping_argument() -> dict[str, Any]:
    """Batches of similar length waste less on padding. Transformers 5 renamed the argument."""
    if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__:
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}


def _training_arguments(
    output_dir: Path, steps: int, batch_size: int, learning_rate: float, seed: int
) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": steps // 20,
        "weight_decay": 0.01,
        "adam_beta2": 0.98,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": max(1, steps // 4),
        "disable_tqdm": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "max_length": None,
        "seed": seed,
        **_grouping_argument(),
    }


def train_policy(
    train_rows: list[dict[str, str]],
    heldout_rows: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    settings: BootstrapSettings,
    seed: int,
    folder: Path,
    work_dir: Path,
) -> tuple[float, float]:
    """Train a policy, save it with its tokenizer, and return the held-out perplexity before and after."""
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=True,
        # About 1 / sqrt(hidden_size). The usual 0.02 suits wide models; here it delays attention to the prompt.
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    before = heldout_perplexity(model, tokenizer, heldout_rows)
    # Good and bad answers in equal shares: the policy can produce both, and the reward has something to choose from.
    dataset = Dataset.from_list(
        [{"prompt": row["prompt"], "completion": row[key]} for row in train_rows for key in ("chosen", "rejected")]
    )
    arguments = _training_arguments(
        work_dir, settings.sft_steps, settings.sft_batch_size, settings.sft_learning_rate, seed
    )
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**arguments, completion_only_loss=True),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    after = heldout_perplexity(model, tokenizer, heldout_rows)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return before, after


def _swapped_rows(rows: Sequence[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """
    One more pair per prompt, in which the rejected answer is the chosen answer to another prompt.

    Whether an answer fits its question is the hardest part for a model this small: without these pairs it mostly
    judges the tone. They are for training only; the held-out pairs come from the grammar.
    """
    answers = [row["chosen"] for row in rows]
    random.Random(f"swaps-{seed}").shuffle(answers)
    return [
        {"prompt": row["prompt"], "chosen": row["chosen"], "rejected": answer}
        for row, answer in zip(rows, answers, strict=True)
        if answer != row["chosen"]
    ]


def _train_reward_model(
    train_rows: list[dict[str, str]],
    heldout_rows: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    settings: BootstrapSettings,
    seed: int,
    sft_folder: Path,
    folder: Path,
    work_dir: Path,
) -> tuple[float, float, float]:
    # RewardTrainer appends the end-of-sequence token to text, and reads the score there. The online trainers decode
    # completions without special tokens, so their reward model never sees it. Rows that are already tokenized are left
    # alone, so training and use agree.
    rows = []
    for row in [*train_rows, *_swapped_rows(train_rows, seed)]:
        chosen_ids, rejected_ids = (
            tokenizer(row["prompt"] + row[key], add_special_tokens=False)["input_ids"]
            for key in ("chosen", "rejected")
        )
        length = max(len(chosen_ids), len(rejected_ids))
        rows.append({"chosen_ids": chosen_ids, "rejected_ids": rejected_ids, "length": length})
    arguments = _training_arguments(
        work_dir, settings.reward_steps, settings.reward_batch_size, settings.reward_learning_rate, seed
    )
    trainer = RewardTrainer(
        model=str(sft_folder),
        # Grouping by length reads a column that the trainer would otherwise drop.
        args=RewardConfig(**arguments, center_rewards_coefficient=0.01, remove_unused_columns=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    chosen = score_texts(model, tokenizer, [row["prompt"] + row["chosen"] for row in heldout_rows])
    rejected = score_texts(model, tokenizer, [row["prompt"] + row["rejected"] for row in heldout_rows])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return (chosen > rejected).float().mean().item(), chosen.mean().item(), rejected.mean().item()


def _build(
    folder: Path,
    train_rows: list[dict[str, str]],
    heldout_rows: list[dict[str, str]],
    settings: BootstrapSettings,
    seed: int,
) -> None:
    start = time.time()
    print(f"[1/3] Training a tokenizer on {len(train_rows)} dialogues")
    tokenizer = train_tokenizer(train_rows, settings.vocab_size, settings.max_positions)
    print(f"[2/3] Supervised training of the policy: {settings.sft_steps} steps, vocabulary size {len(tokenizer)}")
    before, after = train_policy(
        train_rows, heldout_rows, tokenizer, settings, seed, folder / "sft", folder / "trainer"
    )
    print(f"      held-out perplexity of the chosen answers: {before:.1f} -> {after:.2f}")
    print(f"[3/3] Training the reward model: {settings.reward_steps} steps on preference pairs")
    accuracy, mean_chosen, mean_rejected = _train_reward_model(
        train_rows, heldout_rows, tokenizer, settings, seed, folder / "sft", folder / "reward", folder / "trainer"
    )
    print(f"      held-out accuracy of the reward model: {accuracy:.3f}")
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    metrics = {
        "sft_perplexity_before": before,
        "sft_perplexity_after": after,
        "reward_accuracy": accuracy,
        "mean_reward_chosen": mean_chosen,
        "mean_reward_rejected": mean_rejected,
        "seconds": time.time() - start,
    }
    (folder / METRICS_FILE).write_text(json.dumps(metrics, indent=2) + "\n")


def _publish(folder: Path, target: Path) -> None:
    """Rename a finished folder to its final name, unless another process was faster."""
    if target.exists() and not (target / METRICS_FILE).exists():
        shutil.rmtree(target)
    try:
        os.rename(folder, target)
    except OSError:
        if not (target / METRICS_FILE).exists():
            raise
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def outside_of_launch() -> Iterator[None]:
    """Child processes that start in here do not see the launcher's variables, or their trainers would join it."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if LAUNCHED.fullmatch(name)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _build_in_child(cache_dir: Path, seed: int, quick: bool) -> None:
    """Train the models in a child process."""
    command = [sys.executable, "-u", "-m", __name__, str(cache_dir), str(seed), *(["--quick"] if quick else [])]
    recipes = str(Path(__file__).resolve().parent.parent)
    with outside_of_launch():
        paths = os.pathsep.join(filter(None, (recipes, os.environ.get("PYTHONPATH"))))
        code = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}).returncode
    if code:
        raise RuntimeError(f"Training the tiny models failed: {command} exited with {code}.")


def prepare_default(
    cache_dir: str | os.PathLike[str], seed: int = 0, quick: bool = False, in_child: bool = False
) -> DefaultAssets:
    """
    Train the tiny tokenizer, policy and reward model, or load them if an earlier call has done so.

    Args:
        cache_dir (`str` or `os.PathLike`):
            Where to keep the models. Each combination of seed, settings and dialogues has its own folder, which gets
            its final name only when it is complete.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the dialogues and of the training.
        quick (`bool`, *optional*, defaults to `False`):
            Train smaller models on fewer pairs, for tests. The models are poor.
        in_child (`bool`, *optional*, defaults to `False`):
            Train in a child process.

    Returns:
        [`DefaultAssets`]:
            Paths, measurements and rows.
    """
    settings = QUICK_SETTINGS if quick else DEFAULT_SETTINGS
    pairs = make_preference_pairs(n_train=settings.n_train, n_heldout=settings.n_heldout, seed=seed)
    identity = json.dumps({"version": VERSION, "seed": seed, **asdict(settings), "pairs": pairs}, sort_keys=True)
    cache_dir = Path(cache_dir).expanduser()
    target = cache_dir / f"hh_default_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    from_cache = (target / METRICS_FILE).exists()
    if from_cache:
        print(f"Using the tiny models in {target}")
    elif in_child:
        _build_in_child(cache_dir, seed, quick)
    else:
        print(f"Training the tiny models for {target}; this is done once")
        cache_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".unfinished_", dir=cache_dir))
        try:
            with _preserve_rng():
                _build(folder, pairs["train"], pairs["heldout"], settings, seed)
            _publish(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return DefaultAssets(
        sft_path=target / "sft",
        reward_path=target / "reward",
        from_cache=from_cache,
        train_rows=pairs["train"],
        heldout_rows=pairs["heldout"],
        **json.loads((target / METRICS_FILE).read_text()),
    )


def prepare_default_for_launch(cache_dir: str | os.PathLike[str], quick: bool = False) -> DefaultAssets:
    """Call [`prepare_default`] on each process of a launch. Only the main process trains, in a child process."""
    with PartialState().main_process_first():
        return prepare_default(cache_dir, quick=quick, in_child=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # more are slower on models this small
    prepare_default(sys.argv[1], seed=int(sys.argv[2]), quick="--quick" in sys.argv[3:])
