"""Every recipe parses. The HH recipe runs on its default, on local files and directories, and refuses bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import ppo_hh
from hh import report as hh_report
from support.hh_models import ON_CPU, RECIPES, dialogue, save_models
from support.tiny import WORDS, build_tokenizer


ASSETS = Path(os.environ.get("KLX_ASSETS", "not-set"))
FAST = [
    *ON_CPU,
    "--disable_tqdm=True",
    "--max_steps=2",
    "--num_ppo_epochs=1",
    "--per_device_train_batch_size=4",
    "--max_completion_length=6",
]


def raw(row: dict[str, str]) -> dict[str, str]:
    """The form of Anthropic/hh-rlhf: whole transcripts."""
    return {key: row["prompt"] + row[key] for key in ("chosen", "rejected")}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(dialogue(index)) for index in range(60)))
    return path


def run(models, dataset, output, *flags):
    ppo_hh.main(
        *ppo_hh.parse(
            [
                f"--model_name_or_path={models / 'policy'}",
                f"--reward_model_path={models / 'reward'}",
                f"--dataset_name={dataset}",
                f"--output_dir={output}",
                *FAST,
                *flags,
            ]
        )
    )
    return json.loads((output / "report.json").read_text())


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("ppo_hh*.yaml")), ids=lambda path: path.name)
def test_every_ppo_config_parses(path):
    # The default recipe sets only a target; the others follow the published settings.
    target_alone = path.name == "ppo_hh.yaml"
    flags = [] if target_alone else ["--use_cpu", "--bf16=False"]
    script_args, training_args, model_args = ppo_hh.parse(["--config", str(path), *flags])
    content = yaml.safe_load(path.read_text())
    assert training_args.kl_target == content["kl_target"] and (target_alone or training_args.kl_target == 6.0)
    assert training_args.kl_penalty_coef == content.get("kl_penalty_coef") == (None if target_alone else 0.05)
    assert training_args.kl_controller_name == ("hold" if target_alone else "adaptive")
    assert model_args.model_name_or_path == content.get("model_name_or_path")


@pytest.mark.parametrize(
    ("size", "batch", "steps", "learning_rate", "rollouts", "epochs"),
    [
        ("125m", 32, 1500, 8e-6, 128, 4),
        ("1b", 8, 2500, 6e-6, 64, 4),
        ("6b", 4, 6000, 8e-6, 64, 4),
        ("20b", 1, 8000, 1e-6, 16, 2),
    ],
)
def test_published_settings_are_carried_over(size, batch, steps, learning_rate, rollouts, epochs):
    path = RECIPES / f"ppo_hh_{size}.yaml"
    script_args, args, _ = ppo_hh.parse(["--config", str(path), "--use_cpu", "--bf16=False"])
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == batch  # one optimizer step
    assert args.per_device_train_batch_size * args.steps_per_generation == rollouts
    assert (args.max_steps, args.learning_rate, args.num_ppo_epochs) == (steps, learning_rate, epochs)
    assert (args.kl_horizon, args.gamma, args.lam, args.vf_coef) == (10000, 1.0, 0.95, 1.0)
    assert (args.cliprange, args.cliprange_value, args.cliprange_reward) == (0.2, 0.2, 10.0)
    assert (args.reward_scaling, args.num_layers_unfrozen, args.max_completion_length) == ("running", 2, 128)
    assert script_args.delta_reward
    # Checkpoints fall between two rollouts, so that a resumed run continues exactly.
    assert args.save_steps % (epochs * rollouts // batch) == 0
    # The command in its header is the one for this file.
    assert f"--config recipes/{path.name}" in path.read_text()


def test_every_yaml_file_is_a_recipe_of_some_script():
    # A config that no test parses would rot unnoticed.
    known = {path.name for path in RECIPES.rglob("ppo_hh*.yaml")} | {
        path.name for path in (RECIPES / "accelerate").glob("*.yaml")
    }
    known |= {"distill.yaml"}  # see test_distill.py
    known |= {"compare_controllers.yaml", "sweep_kl_coef.yaml"}  # run by the tests of kl_lab
    known |= {path.name for path in RECIPES.glob("grpo_*b.yaml")}  # see test_minimal.py
    known |= {path.name for path in (RECIPES / "presets").glob("*.yaml")}  # see test_presets.py
    assert {path.name for path in RECIPES.rglob("*.yaml")} == known


@pytest.mark.slow
def test_default_runs_with_no_model_and_no_network(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    flags = ["--quick"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(RECIPES / "ppo_hh.py"), *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for stage in ("[1/4]", "[2/4]", "[3/4]", "[4/4]", "held-out reward", "held-out perplexity", "KL target"):
        assert stage in result.stdout
    assert re.search(r"reward model: \d+\.\d% of held-out preferences right", result.stdout)
    folder = tmp_path / "outputs" / "ppo_hh"
    assert (folder / "report.png").read_bytes()[:4] == b"\x89PNG"
    report = json.loads((folder / "report.json").read_text())
    kls = [entry["klx/kl"] for entry in report["history"] if "klx/kl" in entry]
    assert len(kls) == 8 and kls[0] < 1e-6 < min(kls[1:])  # the first rollout is of the reference
    assert len(report["perplexity"]) >= 8
    assert report["before"]["answers"] != report["after"]["answers"]


@pytest.mark.slow
def test_default_runs_on_several_processes_that_find_no_models(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = ["--quick", "--max_steps=4", "--per_device_train_batch_size=4", "--eval_prompts=4"]
    result = subprocess.run(
        [*launcher, str(RECIPES / "ppo_hh.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("Training the tiny models") == 1 and "held-out reward" in result.stdout
    assert (tmp_path / "outputs" / "ppo_hh" / "model.safetensors").exists()


def test_dataset_that_was_saved_to_disk(models, tmp_path, pairs):
    Dataset.from_list([dialogue(index) for index in range(60)]).save_to_disk(tmp_path / "saved")
    assert (
        run(models, tmp_path / "saved", tmp_path / "one")["before"] == run(models, pairs, tmp_path / "other")["before"]
    )


def test_an_error_while_it_trains_keeps_its_traceback(monkeypatch):
    def _inner_training_loop(arguments):
        raise ValueError("invalid literal")

    monkeypatch.setattr(sys, "argv", ["ppo_hh.py"])
    with pytest.raises(ValueError, match="invalid literal"):
        ppo_hh.exit_on_user_error(_inner_training_loop)
    with pytest.raises(SystemExit, match="error: a bad flag"):
        ppo_hh.exit_on_user_error(lambda arguments: (_ for _ in ()).throw(ValueError("a bad flag")))


def test_tokenizer_of_a_partitioned_model(models):
    tokenizer = ppo_hh.load_tokenizer(str(models / "policy"))
    # A weight under ZeRO-3.
    weight = SimpleNamespace(shape=torch.Size([0]), ds_shape=torch.Size([len(tokenizer), 8]))
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    ppo_hh.check_tokenizer(tokenizer, model, "policy")
    weight.ds_shape = torch.Size([len(tokenizer) - 1, 8])
    with pytest.raises(ValueError, match="do not belong"):
        ppo_hh.check_tokenizer(tokenizer, model, "policy")


def test_local_file_in_split_and_raw_form(models, tmp_path, pairs):
    report = run(models, pairs, tmp_path / "split")
    raw_path = tmp_path / "raw.jsonl"
    raw_path.write_text("\n".join(json.dumps(raw(dialogue(index))) for index in range(60)))
    again = run(models, raw_path, tmp_path / "raw")
    assert report["before"] == again["before"] and report["after"] == again["after"]  # the same dialogues
    assert report["after"]["reward"] != report["before"]["reward"]


@pytest.mark.slow
def test_a_run_without_a_penalty_beside_it(models, tmp_path, pairs):
    flags = ["--free_run=True", "--kl_target=0.01", "--learning_rate=0.01", "--max_steps=8", "--logging_steps=1"]
    report = run(models, pairs, tmp_path / "run", *flags)
    free = [entry for entry in report["free_run"] if "klx/kl" in entry]
    held = [entry for entry in report["history"] if "klx/kl" in entry]
    assert {entry["klx/coef"] for entry in free} == {0.0} and min(entry["klx/coef"] for entry in held) > 0
    # It stops at twice the target, and begins as the run beside it does.
    assert free[-1]["klx/kl"] >= 0.02 > max(entry["klx/kl"] for entry in free[:-1])
    assert free[0]["reward"] == held[0]["reward"] and len(held) == 8 > len(free)


def test_lora_delta_reward_and_stop(models, tmp_path, pairs):
    flags = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--delta_reward", "--stop_strings", WORDS[3]]
    run(models, pairs, tmp_path / "lora", *flags)
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "lora" / "model.safetensors").exists()


def test_delta_reward_is_the_difference_to_the_chosen_answer(models):
    model, tokenizer = ppo_hh.load_reward_model(str(models / "reward"), None, "cpu")
    rows = [dialogue(index) for index in range(4)]
    prompts, chosen = [row["prompt"] for row in rows], [row["chosen"] for row in rows]
    answers = [f" {WORDS[index]} {WORDS[7]}" for index in range(4)]
    score, absolute = ppo_hh.make_reward(model, tokenizer, [], delta=False)
    _, delta = ppo_hh.make_reward(model, tokenizer, [], delta=True)
    expected = [a - b for a, b in zip(score(prompts, answers), score(prompts, chosen), strict=True)]
    assert absolute(prompts, answers, chosen) == score(prompts, answers)
    assert delta(prompts, answers, chosen) == pytest.approx(expected, abs=1e-6)
    assert delta(prompts, chosen, chosen) == pytest.approx([0.0] * 4, abs=1e-6)


def test_answers_are_scored_up_to_the_stop(models):
    model, tokenizer = ppo_hh.load_reward_model(str(models / "reward"), None, "cpu")
    score, _ = ppo_hh.make_reward(model, tokenizer, ["Human:"], delta=False)
    prompt = dialogue(0)["prompt"]
    assert score([prompt], [" w1 w2 Human: w3"]) == score([prompt], [" w1 w2 "])
    assert hh_report.cut_at("a Human: b Assistant: c", ["Assistant:", "Human:"]) == "a "


def test_long_prompts_lose_their_beginning():
    tokenizer = build_tokenizer()  # one token per word
    (row,) = ppo_hh.truncate_prompts([{"prompt": "w1 w2 w3 w4 w5", "chosen": " w6"}], tokenizer, 3)
    assert row == {"prompt": "w3 w4 w5", "chosen": " w6"}


def test_bad_input_gives_one_clear_error_before_training(models, tmp_path, pairs):
    def refused(dataset=pairs, match="", policy="policy", reward="reward", flags=()):
        arguments = [f"--model_name_or_path={models / policy}", f"--dataset_name={dataset}", *FAST, *flags]
        if reward is not None:
            arguments.append(f"--reward_model_path={models / reward}")
        with pytest.raises(ValueError, match=match):
            ppo_hh.main(*ppo_hh.parse([*arguments, f"--output_dir={tmp_path / 'refused'}"]))

    empty, promptless, strange = tmp_path / "empty.jsonl", tmp_path / "promptless.jsonl", tmp_path / "data.xyz"
    empty.write_text("")
    promptless.write_text(json.dumps({"chosen": "no marker here", "rejected": "nor here"}))
    strange.write_text("x")
    refused(tmp_path / "nowhere.jsonl", match=r"nowhere\.jsonl' cannot be loaded")
    refused(empty, match=r"empty\.jsonl")
    refused(promptless, match="Assistant:")
    refused(strange, match=r"\.xyz")
    refused(reward="two_labels", match="has 2 labels")
    refused(policy="mismatch", match=r"has (\d+) tokens, but the model embeds only (\d+)")
    refused(reward=None, match="--reward_model_path together")
    refused(flags=["--dataset_train_split=nope"], match="has no split 'nope'")
    assert not (tmp_path / "refused").exists() or not any((tmp_path / "refused").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS.is_dir(), reason="KLX_ASSETS names no folder with real HH pairs and a model")
def test_real_pairs_and_real_model(tmp_path):
    config = AutoConfig.from_pretrained(ASSETS / "stories260K", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(ASSETS / "stories260K").save_pretrained(tmp_path / "reward")
    arguments = [
        f"--model_name_or_path={ASSETS / 'stories260K'}",
        f"--reward_model_path={tmp_path / 'reward'}",
        f"--dataset_name={ASSETS / 'hh' / 'harmless_train.jsonl.gz'}",
        f"--output_dir={tmp_path / 'out'}",
        *FAST,
        "--max_prompt_length=64",
        "--kl_target=6",
    ]
    ppo_hh.main(*ppo_hh.parse(arguments))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["before"]["perplexity"] > 1.0
    assert all(entry["klx/kl"] >= 0.0 for entry in report["history"] if "klx/kl" in entry)
