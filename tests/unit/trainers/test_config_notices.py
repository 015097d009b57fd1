"""What a config says of a run that is sound by its fields, but hardly meant as it stands."""

import shutil
import warnings

import pytest
from trl import GRPOTrainer, RLOOTrainer

from support.config_fields import both_configs, build
from support.tiny import RUN, build_dataset, build_model, build_tokenizer, lora, reward_even_tokens, train
from trl_klx import KLXCallback, KLXGRPOConfig, KLXGRPOTrainer, KLXPPOConfig, KLXRLOOConfig


SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}


# ---- Half a swap ----


def half_swapped(trainer_class, config_class, output_dir, peft_config=None, **fields):
    """TRL's trainer with our config."""
    args = config_class(output_dir=str(output_dir), **(RUN | {"max_steps": 1} | fields))
    return trainer_class(
        model=build_model(),
        reward_funcs=reward_even_tokens,
        args=args,
        train_dataset=build_dataset(),
        processing_class=build_tokenizer(),
        peft_config=peft_config,
    )


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "fields", "named"),
    [
        (GRPOTrainer, KLXGRPOConfig, {"kl_target": 6.0}, ("`kl_target=6.0`", "`KLXGRPOTrainer`")),
        (GRPOTrainer, KLXGRPOConfig, {"kl_penalty_coef": 0.1}, ("`kl_penalty_coef=0.1`", "`KLXGRPOTrainer`")),
        (GRPOTrainer, KLXGRPOConfig, {"kl_monitor": True}, ("`kl_monitor=True`", "`KLXGRPOTrainer`")),
        (RLOOTrainer, KLXRLOOConfig, {"kl_target": 6.0}, ("`kl_target=6.0`", "`KLXRLOOTrainer`")),
    ],
    ids=str,
)
def test_a_trainer_that_does_not_read_the_kl_fields_is_refused(trainer_class, config_class, fields, named, tmp_path):
    trainer = half_swapped(trainer_class, config_class, tmp_path, **fields)
    with pytest.raises(TypeError, match="does not read the KL fields") as caught:
        trainer.train()
    assert all(name in str(caught.value) for name in named)


def test_a_config_that_is_off_trains_with_any_trainer(tmp_path):
    half_swapped(GRPOTrainer, KLXGRPOConfig, tmp_path).train()


def test_the_callback_drives_a_trainer_whose_config_is_off(tmp_path):
    trainer = half_swapped(GRPOTrainer, KLXGRPOConfig, tmp_path, peft_config=lora(), beta=0.05)
    trainer.add_callback(KLXCallback(trainer, target=0.05))
    trainer.train()
    assert "klx/coef" in trainer.state.log_history[0]


def test_a_checked_config_is_not_yet_taken():
    args = build(kl_target=6.0)
    with pytest.raises(TypeError):
        args.get_warmup_steps(10)
    args.build_kl_controller()
    assert args.get_warmup_steps(10) == 0


# ---- A target in the other unit ----


@both_configs
@pytest.mark.parametrize(
    ("target", "unit", "other"),
    [(6.0, "token", "sequence"), (1.0, "token", "sequence"), (0.05, "sequence", "token"), (0.1, "sequence", "token")],
)
def test_a_target_in_the_other_unit_warns(config_class, target, unit, other):
    with pytest.warns(UserWarning, match=f"`kl_target={target}` looks like") as caught:
        build(config_class, kl_target=target, kl_target_unit=unit)
    (message,) = [str(warning.message) for warning in caught if "looks like" in str(warning.message)]
    assert f"Set `kl_target_unit='{other}'`" in message and "tokens x 0.1 = nats per sequence" in message


@pytest.mark.parametrize(
    ("target", "unit"), [(0.01, "token"), (0.5, "token"), (0.2, "sequence"), (6.0, "sequence"), (60.0, "sequence")]
)
def test_a_usual_target_does_not_warn(target, unit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(kl_target=target, kl_target_unit=unit)


def test_ppo_warns_too():
    with pytest.warns(UserWarning, match="looks like a mean per token"):
        build(KLXPPOConfig, kl_target=0.05)


# ---- An earlier run in the same folder ----


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier") / "run"
    train(KLXGRPOTrainer, folder, kl_penalty_coef=0.1, extras={"peft_config": lora()}, **SAVING)
    return folder


def lost(folder, **fields) -> list[str]:
    """The checkpoints that a config names as lost."""
    settings = SAVING | {"kl_penalty_coef": 0.1, "kl_penalty_reference_step": 2, "save_only_model": True} | fields
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        KLXGRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], **settings)
    messages = [str(warning.message) for warning in caught if "earlier run" in str(warning.message)]
    if not messages:
        return []
    (message,) = messages
    assert "kl_ref_adapter_path=" in message and "Only checkpoint-2" in message
    return message.partition("left there: ")[2].partition(". Only")[0].split(", ")


def test_checkpoints_of_an_earlier_run_that_are_overwritten_are_named(earlier):
    assert lost(earlier) == ["checkpoint-1", "checkpoint-3"]
    assert lost(earlier, max_steps=2) == ["checkpoint-1"]
    assert lost(earlier, save_steps=3) == ["checkpoint-3"]
    assert lost(earlier, save_steps=5, max_steps=-1) == []
    assert lost(earlier, save_steps=0.5) == ["checkpoint-1", "checkpoint-3"]
    assert lost(earlier, save_steps=5, save_total_limit=2) == ["checkpoint-1", "checkpoint-3"]
    assert lost(earlier, save_strategy="no") == []
    assert lost(earlier, kl_penalty_reference_step=0) == []
    assert lost(earlier.parent) == []


def test_a_resumed_run_does_not_warn_of_its_own_checkpoints(earlier, tmp_path):
    shutil.copytree(earlier, tmp_path / "run")
    settings = SAVING | {"kl_penalty_coef": 0.1, "kl_penalty_reference_step": 2, "extras": {"peft_config": lora()}}
    with pytest.warns(UserWarning, match="checkpoint-1, checkpoint-3"):
        train(KLXGRPOTrainer, tmp_path / "run", **settings)
    assert lost(tmp_path / "run") == []
