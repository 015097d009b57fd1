"""The whole config space: each draw is refused with a message that names a field, or trains two sound steps."""

import math
import os
import shutil
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import Qwen2ForCausalLM

from support.tiny import build_model, build_trainer, lora, trained_lora, weights
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


pytestmark = pytest.mark.slow


# Per trainer.
DRAWS = int(os.environ.get("KLX_FUZZ_DRAWS", "34"))
HOSTILE = [None, -1, -0.5, math.nan, math.inf, -math.inf, 10**400, True, "", "k9", [], {}, "0.1", b"x", "../.."]

# Valid values by field. One draw in eight takes a hostile value instead.
KL_FIELDS = {
    "kl_penalty_coef": [0.0, 1e-4, 0.05, 0.3, 5, 10.0, 1e3],
    "kl_penalty_reference_step": [0, 2, 7],
    "kl_ref_adapter_path": ["{adapter}", "{missing}"],
    "kl_ref_model_path": ["{teacher}", "{missing}"],
    "kl_ref_dtype": ["float32", "bfloat16"],
    "kl_ref_lag": [1, 2, 5],
    "kl_ref_sync_steps": [1, 2],
    "kl_ref_mixup_alpha": [0.3, 1.0],
    "kl_ref_reset_patience": [2, 50],
    "kl_ref_reset_optimizer": [True, False],
    "kl_placement": ["advantage", "reward", "loss"],
    "kl_estimator": ["k1", "k2", "k3", "abs", "full", "trlx", "importance"],
    "kl_centering": ["batch", "microbatch", "group", "sequence", "none"],
    "kl_discount": [0.0, 0.5, 1, 1.0],
    "kl_statistic": ["k3", "full"],
    "kl_ignore_tokens": [["eos"], [5], ["w3", 1], ["unknown word"], [10**6], ["7"]],
    "kl_update_target": [1e-9, 0.1, 5],
    "kl_controller": ["fixed", "adaptive", "exponential", "pid"],
    "kl_target": [1e-6, 0.2, 6, 1e6],
    "kl_target_unit": ["sequence", "token"],
    "kl_horizon": [1, 0.5, 50, 10000],
    "kl_coef_min": [1e-300, 1e-4, 0.05, 20.0],
    "kl_coef_max": [0.05, 1.0, 10.0, 1e3],
    "kl_controller_kwargs": [
        {},
        {"clip": 0.1},
        {"kp": 0.5, "ki": 0.1, "kd": 1.0},
        {"nonsense": 1},
        '{"clip": 0.1}',
        "{",
    ],
    "kl_monitor": [True, False],
    "kl_warn_window": [0, 1, 3, 100],
}
HOST_FIELDS = {
    "gradient_accumulation_steps": [1, 2],
    "steps_per_generation": [1, 2],
    "num_iterations": [1, 2],
    "num_generations": [2, 4],
    "temperature": [0.3, 1.0, 2.0],
    "mask_truncated_completions": [True, False],
    "learning_rate": [0.0, 1e-3, 0.1],
    "beta": [0.0, 0.1],
    "log_completions": [True],
    "top_p": [0.9],
    "top_k": [5],
}
PPO_FIELDS = {
    "num_generations": [1, 2],
    "num_iterations": [1],
    "num_ppo_epochs": [1, 2],
    "num_mini_batches": [1, 2],
    "gamma": [0.0, 0.9, 1.0],
    "lam": [0.0, 0.95, 1],
    "cliprange": [0.05, 1e6],
    "cliprange_value": [0.05, 1e6],
    "vf_coef": [0.0, 1.0],
    "whiten_advantages": [True, False],
    "whiten_rewards": [True, False],
    "missing_eos_penalty": [0.0, 1.0],
    "reward_scaling": ["none", "running", "ref"],
    "cliprange_reward": [0.5, 1e9],
    "num_layers_unfrozen": [1, 2, 50],
    "local_rollout_forward_batch_size": [1, 3],
}
TRAINERS = {
    "GRPO": (
        KLXGRPOTrainer,
        HOST_FIELDS
        | {
            "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"],
            "scale_rewards": ["none"],
            "importance_sampling_level": ["sequence"],
            "top_entropy_quantile": [0.5],
            "off_policy_mask_threshold": [0.1],
        },
    ),
    "RLOO": (KLXRLOOTrainer, HOST_FIELDS | {"normalize_advantages": [True]}),
    "PPO": (KLXPPOTrainer, HOST_FIELDS | PPO_FIELDS),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    trained_lora(2, scale=0.1).save_pretrained(folder / "adapter")
    build_model(seed=3).save_pretrained(folder / "teacher")
    # With `beta`, TRL loads its own reference from the policy's path.
    build_model().save_pretrained(folder / "base")
    return folder


def draw_fields(data, host: dict) -> dict:
    pool = KL_FIELDS | host
    names = data.draw(st.lists(st.sampled_from(sorted(pool)), max_size=6, unique=True))
    fields = {"kl_penalty_coef": data.draw(st.sampled_from([0.05, 0.3, 1.0]))} if data.draw(st.booleans()) else {}
    for name in names:
        # The values of TRL's own fields are TRL's business.
        ours = name in KL_FIELDS or name in PPO_FIELDS.keys() - HOST_FIELDS.keys()
        hostile = ours and data.draw(st.integers(0, 7)) == 5  # 0 would be drawn more often than the others
        fields[name] = data.draw(st.sampled_from(HOSTILE if hostile else pool[name]))
    return fields


def check_trained(trainer, fields: dict) -> None:
    assert trainer.state.global_step == 2
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            assert not isinstance(value, float) or math.isfinite(value), (name, value, fields)
    assert all(torch.isfinite(weight).all() for weight in weights(trainer).values()), fields
    assert trainer.args.kl_enabled == (trainer.kl_controller is not None)
    if trainer.args.kl_enabled:
        value = trainer.kl_controller.value
        assert math.isfinite(value) and value >= 0.0
        if trainer.args.kl_controller_name != "fixed":
            assert trainer.args.kl_coef_min <= value <= trainer.args.kl_coef_max


@pytest.mark.parametrize("kind", TRAINERS)
def test_each_draw_is_refused_or_trains(kind, places):
    trainer_class, host = TRAINERS[kind]
    trained, refused = [], []

    @settings(
        max_examples=DRAWS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="KLX_FUZZ_DRAWS" not in os.environ,
        database=None,
        phases=[Phase.generate],  # shrinking an example would take too many trainings
        print_blob=False,
    )
    @given(data=st.data())
    def check(data):
        fields = draw_fields(data, host)
        policy = data.draw(st.sampled_from(["full", "fresh adapter", "trained adapter"]))
        settings_ = {"num_generations": 1 if kind == "PPO" else 2, "max_completion_length": 3, "max_steps": 2} | fields
        for name in ("kl_ref_adapter_path", "kl_ref_model_path"):
            if fields.get(name) in ("{adapter}", "{teacher}", "{missing}"):
                settings_[name] = str(places / fields[name].strip("{}"))
        output = places / "run"
        shutil.rmtree(output, ignore_errors=True)
        model = Qwen2ForCausalLM.from_pretrained(places / "base")
        if policy == "trained adapter":
            model = trained_lora(1, model=model, scale=0.1)
        extras = {"peft_config": lora()} if policy == "fresh adapter" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer = build_trainer(trainer_class, output, model=model, extras=extras, **settings_)
            except (ValueError, TypeError) as error:
                refused.append(fields)
                named = [*settings_, "kl_ref_adapter_path", "kl_ref_model_path"]
                assert any(name in str(error) for name in named), (fields, error)
                return
            trainer.train()
        trained.append(fields)
        check_trained(trainer, fields)

    check()
    print(f"\n{kind}: {len(trained)} configs trained, {len(refused)} refused")
    assert len(trained) >= DRAWS // 8 and len(refused) >= DRAWS // 8
