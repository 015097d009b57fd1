"""Model cards say how the KL was controlled."""

import pytest
from huggingface_hub import ModelCard

from support.tiny import build_trainer, logged, lora, trained_lora
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


def rows_of(card: ModelCard) -> dict[str, str]:
    """The table of the section on KL control."""
    section = card.text.split("### KL control")[1].split("### Framework versions")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return dict(tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines if line != "| | |")


def card_of(trainer, folder) -> ModelCard:
    trainer.create_model_card(model_name="tiny", dataset_name="user/prompts")
    card = ModelCard.load(folder / "README.md")
    # Parsed as the Hub's own check parses it.
    again = ModelCard(str(card))
    assert again.data.to_dict() == card.data.to_dict() and again.data.datasets == "user/prompts"
    assert card.text.count("### KL control") <= 1
    return card


def test_settings_reference_and_outcome(tmp_path):
    fields = {"kl_penalty_coef": 0.1, "kl_target": 0.5, "kl_controller": "pid", "kl_controller_kwargs": {"kp": 1.0}}
    extras = {"peft_config": lora()}
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, extras=extras, kl_penalty_reference_step=0, **fields)
    trainer.train()
    card = card_of(trainer, tmp_path)
    assert {"trl", "grpo", "trl-klx"} <= set(card.data.tags)
    identity = trainer.kl_reference.identity
    assert rows_of(card) == {
        "`kl_penalty_coef`": "`0.1`",
        "`kl_penalty_reference_step`": "`0`",
        "`kl_placement`": "`advantage`",
        "`kl_estimator`": "`k1`",
        "`kl_centering`": "`batch`",
        "`kl_statistic`": "`k3`",
        "`kl_controller`": "`pid`",
        "`kl_target`": "`0.5`",
        "`kl_controller_kwargs`": "`{'kp': 1.0}`",
        "reference": f"kind `step`, step `0`, hash `{identity['hash']}`",
        "KL at step 3": f"{logged(trainer, 'klx/kl')[-1]:.4g} nats per sequence",
        "KL coefficient at step 3": f"{logged(trainer, 'klx/coef')[-1]:.4g}",
    }
    # TRL's text is still there, in the same order.
    text = card.text
    assert text.index("# Model Card for tiny") < text.index("### KL control") < text.index("### Framework versions")
    assert "Cite TRL as:" in text


def test_a_kl_that_is_no_number_is_passed_over(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.1)
    trainer.train()
    # This is how TRL logs the mean of NaN only.
    trainer.state.log_history.append({"step": 4, "klx/kl": None, "klx/coef": 0.1})
    assert "KL at step 3" in rows_of(card_of(trainer, tmp_path))


def test_the_card_is_written_with_each_checkpoint(tmp_path):
    fields = {"kl_penalty_coef": 0.1, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = build_trainer(KLXRLOOTrainer, tmp_path, **fields)
    trainer.train()
    card = ModelCard.load(tmp_path / "README.md")
    assert "trl-klx" in card.data.tags and "KL at step 2" in rows_of(card)


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("a`b](x.html)", "``a`b](x.html)``"),
        ("``x`", "``` ``x` ```"),
        ("a|b\r\nc", "`a\\|b c`"),
    ],
)
def test_a_path_stays_inside_its_code_span(name, span, tmp_path):
    trained_lora(3).save_pretrained(tmp_path / name)
    fields = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": str(tmp_path / name)}
    trainer = build_trainer(KLXGRPOTrainer, tmp_path / "out", extras={"peft_config": lora()}, **fields)
    rows = rows_of(card_of(trainer, tmp_path / "out"))
    assert rows["`kl_ref_adapter_path`"] == span
    assert rows["reference"].startswith(f"kind `adapter`, path {span}, hash `")


def test_a_folder_of_the_user_is_named_but_not_located(tmp_path):
    trained_lora(3).save_pretrained(tmp_path / "sft-adapter")
    fields = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": str(tmp_path / "sft-adapter")}
    trainer = build_trainer(KLXGRPOTrainer, tmp_path / "out", extras={"peft_config": lora()}, **fields)
    card = card_of(trainer, tmp_path / "out")
    rows = rows_of(card)
    assert rows["`kl_ref_adapter_path`"] == "`sft-adapter`"
    assert rows["reference"].startswith("kind `adapter`, path `sft-adapter`, hash `")
    assert str(tmp_path) not in card.text
    assert not any("at step" in name for name in rows)  # it has not trained


def test_ppo(tmp_path):
    card = card_of(build_ppo(tmp_path), tmp_path)
    assert {"ppo", "trl-klx"} <= set(card.data.tags)
    rows = rows_of(card)
    assert rows.pop("reference").startswith("kind `step`, step `0`, hash `")
    # The main settings are listed even though they are PPO's defaults.
    assert rows == {
        "`kl_penalty_coef`": "`0.05`",
        "`kl_placement`": "`reward`",
        "`kl_estimator`": "`k1`",
        "`kl_statistic`": "`k3`",
        "`kl_controller`": "`fixed`",
    }


def test_a_run_that_only_measured(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, kl_monitor=True, kl_target=0.5, max_steps=1)
    trainer.train()
    rows = rows_of(card_of(trainer, tmp_path))
    del rows["reference"]
    assert list(rows) == ["`kl_target`", "`kl_statistic`", "`kl_monitor`", "KL at step 1", "KL coefficient at step 1"]


@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer])
def test_without_kl_control_there_is_no_section(trainer_class, tmp_path):
    fields = {"beta": 0.0} if trainer_class is KLXRLOOTrainer else {}
    card = card_of(build_trainer(trainer_class, tmp_path, **fields), tmp_path)
    assert "KL control" not in card.text
