"""Scripts for TRL 1.12's PPOTrainer run after changing two imports, and the migration guide is right."""

import dataclasses
import inspect
import json
import math
import re
import runpy
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from support.tiny import WORDS, build_dataset, build_tokenizer
from support.tiny_ppo import build_ppo, build_scorer, train_ppo
from trl_klx import KLXPPOConfig, KLXPPOTrainer


pytestmark = pytest.mark.slow


SCRIPTS = Path(__file__).parents[1] / "scripts"
GUIDE = Path(__file__).parents[2] / "docs" / "from_trl_ppo.md"
OLD_IMPORT = "from trl.experimental.ppo import PPOConfig, PPOTrainer\n"
NEW_IMPORT = "from trl_klx import KLXPPOConfig as PPOConfig, KLXPPOTrainer as PPOTrainer\n"
BARE = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": []}

# Every field of TRL 1.12's PPOConfig, with a value that was valid there.
FORMER_FIELDS = {
    "learning_rate": 1e-5,
    "dataset_num_proc": 2,
    "num_mini_batches": 2,
    "total_episodes": 100,
    "local_rollout_forward_batch_size": 64,
    "num_sample_generations": 10,
    "response_length": 24,
    "stop_token": "eos",
    "stop_token_id": 7,
    "temperature": 0.9,
    "missing_eos_penalty": 1.0,
    "sft_model_path": "some/policy",
    "world_size": 1,
    "num_total_batches": 4,
    "micro_batch_size": 4,
    "local_batch_size": 4,
    "batch_size": 4,
    "local_mini_batch_size": 4,
    "mini_batch_size": 4,
    "push_to_hub": True,
    "reward_model_path": "some/reward",
    "model_adapter_name": "policy",
    "ref_adapter_name": "sft",
    "num_ppo_epochs": 2,
    "whiten_rewards": True,
    "kl_coef": 0.1,
    "kl_estimator": "k1",
    "cliprange": 0.3,
    "vf_coef": 0.5,
    "cliprange_value": 0.3,
    "gamma": 0.99,
    "lam": 0.9,
    "ds3_gather_for_generation": False,
}
FORMER_ARGUMENTS = [
    "args",
    "processing_class",
    "model",
    "ref_model",
    "reward_model",
    "train_dataset",
    "value_model",
    "data_collator",
    "eval_dataset",
    "optimizers",
    "callbacks",
    "peft_config",
]


# ---- Scripts ----


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A policy, a reward model and prompts on disk."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "sft")
    build_scorer(seed=9).save_pretrained(tmp_path / "reward")
    for name in ("sft", "reward"):
        build_tokenizer().save_pretrained(tmp_path / name)
    rows = [json.dumps({"prompt": prompt}) for prompt in build_dataset(36)["prompt"]]
    (tmp_path / "prompts.json").write_text("\n".join(rows))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run_script(folder, monkeypatch, name: str, *flags: str, **arguments) -> list[str]:
    """Run a script with its imports changed. Returns its warnings about former names."""
    text = (SCRIPTS / name).read_text()
    assert text.count(OLD_IMPORT) == 1
    (folder / "script.py").write_text(text.replace(OLD_IMPORT, NEW_IMPORT))
    arguments = {
        "sft_model_path": folder / "sft",
        "reward_model_path": folder / "reward",
        "output_dir": folder / "out",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "total_episodes": 32,
        "response_length": 6,
        "kl_coef": 0.1,
        "stop_token": "eos",
        "missing_eos_penalty": 1.0,
        "learning_rate": 1e-3,
        "num_sample_generations": 2,
        "local_rollout_forward_batch_size": 64,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 16,
    } | arguments
    argv = ["script.py", *flags]
    for field, value in arguments.items():
        argv += [f"--{field}", str(value)]
    monkeypatch.setattr(sys, "argv", argv)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(str(folder / "script.py"), run_name="__main__")
    return [str(warning.message) for warning in caught if "is now" in str(warning.message)]


ADAPTERS = pytest.mark.parametrize(
    "adapter", [[], ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"]], ids=["full", "lora"]
)


def saved_policy(folder, adapter: list[str]):
    """The policy that the script saved. Checks that it loads and differs from the initial one."""
    initial = AutoModelForCausalLM.from_pretrained(folder / "sft")
    if adapter:
        model = PeftModel.from_pretrained(initial, folder / "out")
        assert any(weight.any() for name, weight in model.named_parameters() if "lora_B" in name)
        return model
    model, report = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert any(
        not torch.equal(one, other) for one, other in zip(model.parameters(), initial.parameters(), strict=True)
    )
    return model


@pytest.mark.parametrize("flags", [[], ["--positional"]], ids=["keywords", "positional"])
@ADAPTERS
def test_script_runs_with_its_imports_changed(adapter, flags, folder, monkeypatch):
    messages = run_script(folder, monkeypatch, "ppo_trl112_style.py", *adapter, *flags, data=folder / "prompts.json")
    # One warning per former name.
    assert sorted(re.findall(r"`(\w+)", message)[0] for message in messages) == [
        "generate_completions",
        "kl_coef",
        "num_sample_generations",
        "response_length",
    ]
    out = folder / "out"
    state = json.loads((out / "checkpoint-16" / "trainer_state.json").read_text())
    # 32 episodes are 4 rollouts of 8, each used for two epochs of two mini-batches.
    assert state["global_step"] == state["max_steps"] == 16
    logs = [entry for entry in state["log_history"] if "reward" in entry]
    assert len(logs) == 4 and all(entry["klx/coef"] == 0.1 for entry in logs)
    assert all(0 < entry["completions/max_length"] <= 6 for entry in logs)
    assert (out / "checkpoint-16" / "value_function.safetensors").is_file()
    saved_policy(folder, adapter)
    # The last line of the script completed the four prompts of the evaluation data.
    tables = sorted((out / "completions").glob("*.parquet"))
    assert len(pd.read_parquet(tables[-1])) == 8
    assert set(pd.read_parquet(tables[-1])["prompt"][-4:]) == set(build_dataset(36)["prompt"][-4:])


def test_value_model_of_a_script_is_trained(folder, monkeypatch):
    run_script(folder, monkeypatch, "ppo_trl112_style.py", data=folder / "prompts.json")
    trained = load_file(folder / "out" / "checkpoint-16" / "value_function.safetensors")
    initial = load_file(folder / "reward" / "model.safetensors")
    assert trained.keys() == {f"model.{name}" for name in initial}
    assert any(not torch.equal(trained[f"model.{name}"], weight) for name, weight in initial.items())


def write_prompts(folder) -> dict[str, list[str]]:
    """Write a dataset with two splits. The prompts differ in length, so that batches are padded."""
    splits = {"train": 36, "validation": 8}
    words = WORDS * 2
    prompts = {name: [" ".join(words[i : i + 1 + i % 5]) for i in range(rows)] for name, rows in splits.items()}
    (folder / "data").mkdir()
    for name, texts in prompts.items():
        rows = [json.dumps({"prompt": text}) for text in texts]
        (folder / "data" / f"{name}.json").write_text("\n".join(rows))
    return prompts


@ADAPTERS
@pytest.mark.parametrize("name", ["ppo_trl112_padded.py", "ppo_trl112_tldr.py"])
def test_script_whose_padding_has_no_embedding(name, adapter, folder, monkeypatch):
    prompts = write_prompts(folder)
    arguments = {"dataset_name": folder / "data", "model_name_or_path": folder / "sft"}
    if name == "ppo_trl112_tldr.py":
        arguments |= {"dataset_test_split": "validation", "eval_strategy": "steps", "eval_steps": 8}
    run_script(folder, monkeypatch, name, *adapter, **arguments)
    out = folder / "out"
    state = json.loads((out / "checkpoint-16" / "trainer_state.json").read_text())
    assert state["global_step"] == 16
    logs = [entry for entry in state["log_history"] if "reward" in entry]
    assert len(logs) == 4 and logs[-1]["klx/kl"] > 0
    assert all(math.isfinite(value) for entry in state["log_history"] for value in entry.values())
    # Some completions ended early and were padded.
    assert any(entry["completions/min_length"] < entry["completions/max_length"] for entry in logs)
    assert len([entry for entry in state["log_history"] if "eval_reward" in entry]) == (2 if "tldr" in name else 0)
    # Tokenizer and model are saved unchanged: the tokenizer has one token more than the model has embeddings.
    assert AutoTokenizer.from_pretrained(out).pad_token_id == 32
    model = saved_policy(folder, adapter)
    assert model.get_input_embeddings().num_embeddings == 32
    assert model.config.pad_token_id == 0
    table = pd.read_parquet(sorted((out / "completions").glob("*.parquet"))[-1])
    shown = prompts["validation"] if "tldr" in name else prompts["train"][-4:]
    assert set(table["prompt"][-len(shown) :]) == set(shown)
    assert not table["completion"].str.contains("[PAD]", regex=False).any()


@pytest.mark.parametrize("sampling", [False, True])
def test_generate_completions(sampling, tmp_path, capsys):
    trainer = build_ppo(tmp_path, per_device_eval_batch_size=2, extras={"eval_dataset": build_dataset(4)})
    with pytest.warns(FutureWarning, match="`generate_completions` is now `evaluate`"):
        trainer.generate_completions(sampling=sampling)
    (table,) = (pd.read_parquet(path) for path in (tmp_path / "completions").glob("*.parquet"))
    assert set(table["prompt"]) <= set(build_dataset(4)["prompt"]) and len(table) == (2 if sampling else 4)
    assert not trainer.log_completions


def test_generate_completions_without_evaluation_data_does_nothing(tmp_path):
    trainer = build_ppo(tmp_path)
    with pytest.warns(FutureWarning):
        assert trainer.generate_completions() is None
    assert not (tmp_path / "completions").exists()


# ---- The guide ----


def table_rows(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its header."""
    section = GUIDE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


CONFIG_ROWS = table_rows("Config fields")


def test_guide_shows_the_change_of_imports():
    assert f"-{OLD_IMPORT}+{NEW_IMPORT}" in GUIDE.read_text()


def test_guide_names_every_field_of_the_former_config():
    assert [row[0].strip("`") for row in CONFIG_ROWS] == list(FORMER_FIELDS)


def test_guide_names_every_argument_of_the_former_constructor():
    assert [row[0].strip("`") for row in table_rows("Constructor arguments")] == FORMER_ARGUMENTS


def test_constructor_takes_the_former_arguments_in_their_order():
    names = list(inspect.signature(KLXPPOTrainer.__init__).parameters)
    assert names[1 : len(FORMER_ARGUMENTS) + 1] == FORMER_ARGUMENTS


@pytest.mark.parametrize(("name", "fate", "today"), [(row[0].strip("`"), *row[1:]) for row in CONFIG_ROWS])
def test_guide_is_right_about_every_field(name, fate, today):
    value = FORMER_FIELDS[name]
    if fate == "refused":
        with pytest.raises(ValueError, match=f"`{name}={value}` cannot be set: it is .*Leave it out"):
            KLXPPOConfig(**BARE, **{name: value})
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = KLXPPOConfig(**BARE, **{name: value})
    changes = [str(warning.message) for warning in caught if warning.category is FutureWarning]
    if fate == "renamed":
        new = re.match(r"`(\w+)`", today).group(1)
        assert len(changes) == 1 and f"`{name}`" in changes[0] and new in changes[0]
        assert getattr(config, new) == (True if new == "log_completions" else value)
    else:
        assert fate == "same" and changes == []
        assert getattr(config, name) == value


def test_k3_in_the_reward_is_refused_with_what_the_guide_says():
    with pytest.raises(ValueError, match=r"`kl_estimator='k3'` cannot be used with `kl_placement='reward'`.*'k1'"):
        KLXPPOConfig(**BARE, kl_estimator="k3")
    assert KLXPPOConfig(**BARE, kl_estimator="k3", kl_placement="loss").kl_estimator == "k3"


# Defaults of TRL 1.12 that are unchanged, and given in the guide.
FORMER_DEFAULTS = {
    "learning_rate": 3e-6,
    "temperature": 0.7,
    "num_ppo_epochs": 4,
    "kl_coef": 0.05,
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
}


def test_defaults_are_what_the_guide_says():
    today = {row[0].strip("`"): row[2] for row in CONFIG_ROWS}
    config = KLXPPOConfig(**BARE)
    for name, default in FORMER_DEFAULTS.items():
        assert default in map(float, re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?", today[name])), name
        assert default == getattr(config, "kl_init_coef" if name == "kl_coef" else name), name
    assert config.max_completion_length == 53 and config.num_mini_batches == 1


def test_log_names_of_the_guide_are_logged(tmp_path):
    trainer = train_ppo(tmp_path, kl_target=1.0, max_steps=2)
    logged = {name for entry in trainer.state.log_history for name in entry}
    section = GUIDE.read_text().split("## Log names\n")[1]
    new = [line for line in section.splitlines() if not line.startswith("|")]
    today = [cells[1] for cells in table_rows("Log names")] + new
    named = {name for text in today for name in re.findall(r"`([\w/]+)`", text)} - {"full"}
    assert len(named) > 15 and named <= logged, named - logged


def test_steps_are_counted_as_the_guide_says():
    fields = {"per_device_train_batch_size": 4, "num_ppo_epochs": 3, "num_mini_batches": 2, "total_episodes": 20}
    # 20 episodes are 5 rollouts of 4.
    assert KLXPPOConfig(**BARE, **fields).max_steps == 5 * 3 * 2


def test_fields_of_the_guide_exist():
    known = {field.name for field in dataclasses.fields(KLXPPOConfig)} | FORMER_FIELDS.keys()
    text = GUIDE.read_text().split("## Log names")[0]
    named = set(re.findall(r"`(?:kl|num|max|per_device|local|stop|save|log|eval)_\w+`", text))
    assert len(named) > 15 and {name.strip("`") for name in named} - {"eval_dataset"} <= known
