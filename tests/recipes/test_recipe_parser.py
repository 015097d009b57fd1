"""The help of the recipes is short and grouped, and `--quick` is quick."""

import pytest

import compare_controllers
import kl_lab
import ppo_hh
import sweep_kl_coef
from recipe_parser import QUICK, with_quick


def helps(parse, capsys, flag: str) -> dict[str, str]:
    """The help by the titles of its groups; what follows the groups is under an empty title."""
    with pytest.raises(SystemExit) as stop:
        parse([flag])
    assert stop.value.code == 0
    parts: dict[str, str] = {}
    title = "head"
    for line in capsys.readouterr().out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line[:-1]
        elif not line:
            title = "" if len(parts) > 1 else title
        parts[title] = parts.get(title, "") + line + "\n"
    return parts


RECIPES = {
    "ppo_hh": (ppo_hh.parse, "--delta_reward", ["this recipe", "KL control", "PPO", "set most often"]),
    "compare_controllers": (
        lambda arguments: kl_lab.parse(arguments, compare_controllers.CompareArguments),
        "--controllers",
        ["this recipe", "KL control", "set most often"],
    ),
    "sweep_kl_coef": (
        lambda arguments: kl_lab.parse(arguments, sweep_kl_coef.SweepArguments),
        "--coefs",
        ["this recipe", "KL control", "set most often"],
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_help_shows_the_recipe_and_its_kl_control_first(name, capsys):
    parse, own, titles = RECIPES[name]
    short = helps(parse, capsys, "--help")
    assert [title for title in short if title not in ("head", "")] == titles
    assert own in short["this recipe"] and "--quick" in short["this recipe"]
    assert "--kl_target KL_TARGET" in short["KL control"] and "--kl-target" not in short["KL control"]
    assert "--model_name_or_path" in short["set most often"] and "--learning_rate" in short["set most often"]
    assert "--help-all shows the others" in short[""] and "--config" in short[""]
    assert sum(text.count("\n") for text in short.values()) < 300
    assert "--dataloader_num_workers" not in "".join(short.values())


@pytest.mark.parametrize("name", RECIPES)
def test_help_all_shows_every_field_once(name, capsys):
    parse, _, titles = RECIPES[name]
    shown = helps(parse, capsys, "--help-all")
    assert [title for title in shown if title not in ("head", "")][: len(titles)] == titles
    assert "--lora_r " in shown["model"] and "--dataloader_num_workers" in shown["training (transformers)"]
    words = " ".join(shown.values()).split()
    parser = kl_lab.RecipeParser(
        ppo_hh.HHScriptArguments if name == "ppo_hh" else kl_lab.LabArguments,
        kl_lab.ALGORITHMS["ppo" if name == "ppo_hh" else "grpo"][0],
    )
    for field in {action.dest for action in parser._actions} - {"help", "==SUPPRESS=="}:
        assert words.count(f"--{field}") == 1, field


def test_quick_is_quick_unless_told_otherwise():
    script_args, training_args, _ = ppo_hh.parse(["--quick"])
    assert (training_args.max_steps, training_args.per_device_train_batch_size) == (8, 16)
    assert script_args.quick and not script_args.free_run
    assert (script_args.samples, script_args.eval_prompts) == (0, 16)
    script_args, training_args, _ = ppo_hh.parse(["--quick", "True", "--max_steps=3", "--samples", "2"])
    assert (training_args.max_steps, training_args.per_device_train_batch_size, script_args.samples) == (3, 16, 2)
    for arguments in ([], ["--quick=False"], ["--quick", "false"]):
        script_args, training_args, _ = ppo_hh.parse(arguments)
        assert training_args.max_steps == 40 and script_args.samples == 3 and not script_args.quick
    script_args, training_args, _ = kl_lab.parse(
        kl_lab.with_defaults(["--quick", "--kl_penalty_coef=1"], sweep_kl_coef.DEFAULT_CONFIG),
        sweep_kl_coef.SweepArguments,
    )
    assert (training_args.max_steps, script_args.eval_prompts) == (8, 16)


def test_quick_flags_stand_between_the_config_and_the_others():
    flags = [word for name, value in QUICK.items() for word in (f"--{name}", value)]
    assert with_quick(["--seed", "1"]) == ["--seed", "1"]
    assert with_quick(["--config", "x.yaml", "--quick"]) == ["--config", "x.yaml", *flags, "--quick"]
    assert with_quick(["--quick"], a="1") == [*flags, "--a", "1", "--quick"]
