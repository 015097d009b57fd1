"""The commands that train through accelerate's launcher, and the references that a run leaves behind."""

import json
from pathlib import Path

import pytest
import torch
import trl
import yaml
from accelerate.commands.launch import launch_command_parser
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from support.cli_command import command, start
from support.tiny import build_dataset, build_tokenizer, build_trainer, lora, train
from support.tiny_ppo import build_scorer
from trl_klx import KLXGRPOTrainer
from trl_klx.cli import script
from trl_klx.cli import train as train_command
from trl_klx.cli.algorithms import make_parser
from trl_klx.cli.main import main
from trl_klx.cli.runs import read_run


RECIPE = {
    "model_name_or_path": "policy",
    "dataset_name": "data",
    "reward_funcs": ["my_rewards.even"],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "learning_rate": 0.01,
    "kl_penalty_coef": 0.1,
    "kl_target": 0.5,
    # Launcher flags, including a switch.
    "cpu": True,
    "num_processes": 1,
}
REWARD = """
def even(completion_ids, **kwargs):
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's folder: a policy, a reward model, prompts, a reward function and a recipe."""
    root = tmp_path_factory.mktemp("project")
    tokenizer = build_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Not the Qwen2 of the other tests: its tokenizer cannot be loaded as it was saved.
        policy = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=128,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=2,
                initializer_range=0.3,
            )
        )
    for name, model in (("policy", policy), ("scorer", build_scorer(seed=1))):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "data").mkdir()
    build_dataset().to_json(root / "data" / "train.jsonl")
    (root / "my_rewards.py").write_text(REWARD)
    (root / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return root


@pytest.fixture
def in_project(project, monkeypatch):
    monkeypatch.chdir(project)
    return project


def rewrite(project: Path, name: str, **changes) -> str:
    """Write a changed recipe. `None` removes a field."""
    recipe = {key: value for key, value in (RECIPE | changes).items() if value is not None}
    (project / name).write_text(yaml.safe_dump(recipe))
    return name


# ---- Training ----


@pytest.mark.slow
def test_grpo_trains_while_it_is_followed(project):
    follow = start("plot", "--follow", "--interval", "0.2", "grpo", "--metrics", "klx/kl", cwd=project)
    try:
        done = command("grpo", "--config", "recipe.yaml", "--output_dir", "grpo", "--use_peft", cwd=project)
        assert done.returncode == 0, done.stderr
        # No checkpoint is saved, so this can only come from the live log.
        shown, _ = follow.communicate(timeout=300)
        assert follow.returncode == 0 and shown.endswith("grpo step 2 of 2\n")
    finally:
        follow.kill()
        follow.communicate()
    assert (project / "grpo" / "curves.png").is_file()
    assert (project / "grpo" / "adapter_model.safetensors").is_file()
    run = read_run(str(project / "grpo"))
    assert run.done and len(run.values("klx/kl")) == 2
    assert run.target == 0.5 and run.values("klx/coef")[0] == 0.1
    assert run.values("rewards/even/mean") == run.values("reward")


@pytest.mark.slow
def test_ppo_trains_with_a_reward_model_on_a_file(project):
    recipe = rewrite(project, "ppo.yaml", reward_funcs=None, num_generations=None, reward_model_path="scorer")
    arguments = ["--num_ppo_epochs", "1", "--dataset_name", "data/train.jsonl", "--output_dir", "ppo"]
    done = command("ppo", f"--config={recipe}", *arguments, cwd=project)
    assert done.returncode == 0, done.stderr
    run = read_run(str(project / "ppo"))
    assert len(run.values("ppo/score")) == len(run.values("klx/kl")) == 2
    # Two means of the same scores, added up in different orders.
    assert run.values("rewards/scorer/mean") == pytest.approx(run.values("ppo/score"), rel=1e-6)
    before, after = (load_file(project / name / "model.safetensors") for name in ("policy", "ppo"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_rloo_trains_from_flags_that_override_the_recipe(in_project):
    arguments = ["--config", "recipe.yaml", "--output_dir", "rloo", "--max_steps", "1", "--kl_target", "0.7"]
    assert main(["rloo", *arguments, "--num_machines", "1"]) == 0
    run = read_run("rloo")
    assert run.done and run.step == 1 and run.target == 0.7
    assert run.values("klx/kl")


def test_training_fails_with_one_line(in_project, capsys):
    """Run in this process what accelerate would run in another."""
    arguments = ["--config", "recipe.yaml", "--output_dir", "failed"]
    ours = [*arguments, "--reward_funcs", "my_rewards.odd"]
    before = trl.GRPOTrainer
    assert script.main("grpo", ours) == 1
    error = capsys.readouterr().err
    assert "trl-klx grpo: error: AttributeError: module 'my_rewards' has no attribute 'odd'" in error
    assert "Traceback" not in error
    # A refused config counts as wrong usage.
    assert script.main("grpo", [*arguments, "--beta", "0.1"]) == 2
    assert "would penalise the KL twice" in capsys.readouterr().err
    assert script.main("grpo", [*arguments, "--kl_penalty_reference_step", "7"]) == 1
    assert "`kl_penalty_reference_step=7` was never saved" in capsys.readouterr().err
    assert script.main("grpo", [*arguments, "--dataset_name", "my_rewards.py"]) == 1
    assert "is a file of an unknown type. Use one of .json" in capsys.readouterr().err
    assert script.main("grpo", [*arguments, "--resume_from_checkpoint", "nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert trl.GRPOTrainer is before


def test_a_fault_during_training_keeps_its_traceback(in_project, monkeypatch):
    (in_project / "faulty.py").write_text("def reward(**kwargs):\n    raise ValueError('of the reward itself')\n")
    arguments = ["--config", "recipe.yaml", "--output_dir", "failed", "--reward_funcs", "faulty.reward"]
    with pytest.raises(ValueError, match="of the reward itself"):
        script.main("grpo", arguments)
    monkeypatch.setenv("TRL_KLX_TRACEBACK", "1")
    with pytest.raises(AttributeError, match="no attribute 'odd'"):
        script.main("grpo", [*arguments, "--reward_funcs", "my_rewards.odd"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "missing.yaml"], "the config file 'missing.yaml' does not exist"),
        (["--config"], "--config needs a value"),
        (["--kl_tarket", "6"], "unknown field '--kl_tarket'. Did you mean --kl_target?"),
        (["--kl_target", "-1"], "`kl_target` must be a finite number > 0 (nats), got -1.0"),
        (["stray"], "unexpected argument 'stray'"),
        (["--accelerate_config", "zero9"], "Accelerate config zero9 is neither a file nor"),
        (["--accelerate_config=zero9"], "Accelerate config zero9 is neither a file nor"),
        (["--model_name_or_path", ""], "there is no model. Set --model_name_or_path"),
        (["--dataset_name", ""], "there are no prompts. Set --dataset_name"),
        (["--config", "no_reward.yaml"], "there is no reward. Set --reward_model_name_or_path or --reward_funcs"),
        (["--config", "unknown.yaml"], "unknown field '--kl_goal'"),
        (["--config", "list.yaml"], "must contain a YAML mapping"),
    ],
)
def test_wrong_usage_is_refused_before_the_launch(in_project, capsys, arguments, message):
    rewrite(in_project, "no_reward.yaml", reward_funcs=None)
    rewrite(in_project, "unknown.yaml", kl_goal=6)
    (in_project / "list.yaml").write_text("- 1\n")
    if "--config" not in arguments:
        arguments = ["--config", "recipe.yaml", *arguments]
    assert main(["grpo", *arguments, *([] if arguments == ["--config"] else ["--output_dir", "refused"])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-klx grpo: error: ") and message in error and error.count("\n") == 1
    assert not (in_project / "refused").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sft_model_path", "policy"], "--model_name_or_path and --sft_model_path mean the same"),
        (["--reward_model_path", "scorer"], "--reward_model_path is ignored if --reward_funcs is set"),
    ],
)
def test_of_two_names_for_one_thing_ppo_takes_one(in_project, capsys, arguments, message):
    assert main(["ppo", "--config", "recipe.yaml", "--output_dir", "refused", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_launcher_settings_from_a_recipe():
    launcher = launch_command_parser()
    words = ["--cpu", "True", "--multi_gpu", "False", "--num_processes", "2", "--accelerate_config", "zero2"]
    words = train_command._without_booleans(launcher, words)
    assert words == ["--cpu", "--num_processes", "2", "--accelerate_config", "zero2"]
    flag, file, *rest = train_command._accelerate_config(words)
    assert (flag, Path(file).name, rest) == ("--config_file", "zero2.yaml", ["--cpu", "--num_processes", "2"])
    assert Path(file).is_file()


def test_batch_sizes_are_left_to_the_processes_that_train(in_project, monkeypatch):
    """One completion on each of two processes makes a group of two. In the launching process alone it would not."""
    launched = []
    monkeypatch.setattr(train_command, "launch_command", launched.append)
    flags = ["--multi_gpu", "--num_processes", "2", "--per_device_train_batch_size", "1", "--seed", "2"]
    recipe = rewrite(in_project, "two.yaml", cpu=None, num_processes=None)
    assert main(["grpo", "--config", recipe, "--output_dir", "two", *flags]) == 0
    (launch,) = launched
    assert launch.multi_gpu and launch.num_processes == 2 and launch.module
    assert launch.training_script == "trl_klx.cli.script"
    left = ["grpo", "--config", recipe, "--output_dir", "two", "--per_device_train_batch_size", "1", "--seed", "2"]
    assert launch.training_script_args == left


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_help_is_grouped_with_our_fields_first(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "KL control" and titles[-1] == "launcher"
    assert ("PPO" in titles) == (name == "ppo")
    sections = dict(zip(titles, shown.split("\n\n")[-len(titles) :], strict=True))
    words = {title: text.replace(",", " ").split() for title, text in sections.items()}
    assert "--kl_target" in words["KL control"] and "--learning_rate" not in words["KL control"]
    assert "--reward_funcs" in sections["data and rewards"] and "--use_peft" in sections["model"]
    assert "--learning_rate" in sections["training (transformers)"]
    # Every flag is in exactly one group.
    for action in make_parser(name)._actions:
        assert sum(action.option_strings[0] in text for text in words.values()) == 1, action.option_strings


def test_flags_are_those_of_trl_and_ours():
    ours = set(make_parser("grpo")._option_string_actions)
    theirs = set(
        trl.TrlParser(
            (script.ALGORITHMS["grpo"].script_arguments, trl.GRPOConfig, trl.ModelConfig)
        )._option_string_actions
    )
    assert theirs <= ours
    added = {flag for flag in ours - theirs if "-" not in flag[2:]}
    mixture = {field for field in added if not field.startswith("--kl_")}
    assert mixture == {"--datasets", "--streaming", "--test_split_size"}
    assert "--kl_target" in added


# ---- References ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Output folders of a full run and a LoRA run, with two checkpoints each."""
    root = tmp_path_factory.mktemp("trained")
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "kl_penalty_coef": 0.1}
    train(KLXGRPOTrainer, root / "full", **settings).save_model(root / "full")
    train(KLXGRPOTrainer, root / "lora", extras={"peft_config": lora()}, **settings).save_model(root / "lora")
    return root


def parse_references(shown: str) -> dict[str, dict[str, str]]:
    """By candidate: its hash and config lines, or why it cannot be used."""
    found = {}
    for block in shown.strip().split("\n\n"):
        name, *lines = block.split("\n")
        found[name.split(":")[0]] = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line[:2] == "  "}
    return found


def test_references_have_the_hashes_that_trainers_store(trained, capsys):
    for kind, extras in (("full", {}), ("lora", {"peft_config": lora()})):
        assert main(["references", str(trained / kind)]) == 0
        listed = parse_references(capsys.readouterr().out)
        line = listed["checkpoint-1"]["use"].split("#")[0]
        settings = yaml.safe_load(line)
        assert settings == {"kl_penalty_reference_step": 1}
        trainer = build_trainer(KLXGRPOTrainer, trained / kind, extras=extras, kl_penalty_coef=0.1, **settings)
        assert trainer.kl_reference.identity["hash"] == listed["checkpoint-1"]["hash"]
        assert listed["checkpoint-1"]["hash"] != listed["checkpoint-2"]["hash"]
        assert listed["step 0"] == {"use": "kl_penalty_reference_step: 0"}
        if kind == "full":
            assert listed["checkpoint-2"]["or"] == f"kl_ref_model_path: {trained / 'full' / 'checkpoint-2'}"
            for name in ("checkpoint-2", "the folder itself"):
                settings = yaml.safe_load(listed[name]["or" if name == "checkpoint-2" else "use"])
                trainer = build_trainer(KLXGRPOTrainer, trained / "x", kl_penalty_coef=0.1, **settings)
                assert trainer.kl_reference.identity["hash"] == listed[name]["hash"]
    settings = yaml.safe_load(listed["the folder itself"]["use"])
    assert settings == {"kl_ref_adapter_path": str(trained / "lora")}
    trainer = build_trainer(KLXGRPOTrainer, trained / "x", extras=extras, kl_penalty_coef=0.1, **settings)
    assert trainer.kl_reference.identity["hash"] == listed["the folder itself"]["hash"]


@pytest.mark.slow
def test_references_command(trained):
    done = command("references", "full", cwd=trained)
    assert done.returncode == 0, done.stderr
    listed = parse_references(done.stdout)
    assert listed["the folder itself"]["use"] == "kl_ref_model_path: full"
    state = json.loads((trained / "full" / "checkpoint-2" / "kl_state.json").read_text())
    last = done.stdout.strip().split("\n")[-1]
    assert last == f"checkpoint-1, checkpoint-2: trained against: kind step, step 0, hash {state['reference']['hash']}"


def test_references_says_what_is_wrong(trained, tmp_path, capsys):
    good = trained / "lora" / "checkpoint-1"
    weights = load_file(good / "adapter_model.safetensors")
    config = json.loads((good / "adapter_config.json").read_text())

    def adapter(name: str, tensors=weights, **settings) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(config | settings))
        if tensors:
            save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    adapter("sound")
    adapter("checkpoint-9/named")
    adapter("biased", bias="all")
    adapter("empty", tensors=None)
    (adapter("pickled", tensors=None) / "adapter_model.bin").write_bytes(b"not even a pickle")
    adapter("nan", tensors={name: torch.full_like(weight, float("nan")) for name, weight in weights.items()})
    torn = adapter("torn") / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    for step, file in ((1, None), (2, "pytorch_model.bin"), (3, "model.safetensors"), (4, "kl_state.json")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if file:
            (tmp_path / f"checkpoint-{step}" / file).write_bytes(b"no such thing")
    sharded = tmp_path / "checkpoint-5"
    sharded.mkdir()
    save_file({"a": torch.ones(2)}, sharded / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))

    assert main(["references", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    listed = parse_references(shown)
    assert listed["sound"]["use"] == f"kl_ref_adapter_path: {tmp_path / 'sound'}"
    assert listed["checkpoint-9/named"]["use"].startswith("kl_penalty_reference_step: 9")
    assert "adapter called 'named'" in listed["checkpoint-9/named"]["use"]
    assert "checkpoint-9" not in listed
    for name, why in {
        "biased": "it trains biases",
        "empty": "it has no `adapter_model.safetensors`",
        "pickled": "a pickle, which is never loaded",
        "nan": "holds NaN or infinite values",
        "torn": "`adapter_model.safetensors` cannot be read",
        "checkpoint-1": "it has neither an adapter nor a `model.safetensors`",
        "checkpoint-2": "only `pytorch_model.bin`: a pickle, which is never loaded",
        "checkpoint-3": "its `model.safetensors` cannot be read",
        "checkpoint-5": "`model-00002-of-00002.safetensors`, which its index names, is missing",
    }.items():
        assert why in listed[name]["why"], name
    assert "checkpoint-4: its kl_state.json cannot be read" in shown


def test_references_need_something_to_look_at(tmp_path, capsys):
    assert main(["references", str(tmp_path / "missing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["references", str(tmp_path)]) == 1
    assert "holds neither a `checkpoint-N` nor an adapter" in capsys.readouterr().err
