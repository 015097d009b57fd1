"""Runs that can be killed and resumed, the same in the tests' process and in the processes that they start."""

import os
import signal

from support.tiny import build_dataset, build_trainer, history, lora, reward_even_tokens, trained_lora, weights
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


STEPS, SAVE_STEPS = 6, 2

# By name: how the policy is trained, and its reference. `{adapter}` stands for a saved adapter.
RUNS = {
    "adapter": {"kl_ref_adapter_path": "{adapter}"},
    "adapter-rloo": {"algorithm": "rloo", "kl_ref_adapter_path": "{adapter}", "kl_placement": "reward"},
    "adapter-trained": {"policy": "trained", "kl_ref_adapter_path": "{adapter}", "kl_centering": "microbatch"},
    "base": {},
    "step": {"policy": "trained", "kl_penalty_reference_step": 0},
    "lag": {"kl_ref_lag": 2},
    "sync": {"algorithm": "rloo", "kl_ref_sync_steps": 3, "kl_ref_mixup_alpha": 0.6},
    # The KL is above its target from the first step on, so that the reward alone decides on resets.
    "reset": {"kl_ref_reset_patience": 2, "kl_target": 1e-3, "kl_ref_reset_optimizer": True},
    "reset-rloo": {"algorithm": "rloo", "policy": "trained", "kl_ref_reset_patience": 2, "kl_target": 1e-3},
    "full": {"policy": "full"},
    "full-reset": {"policy": "full", "kl_ref_reset_patience": 3, "kl_target": 1e-3},
    "full-sync": {"policy": "full", "kl_ref_sync_steps": 3, "kl_ref_mixup_alpha": 0.6},
}


def build_run(name: str, output_dir: str, adapter: str, **overrides):
    """A run whose controller and drift window have a lot of state."""
    fields = {
        "kl_penalty_coef": 0.2,
        "kl_controller": "pid",
        "kl_controller_kwargs": {"kp": 0.3, "kd": 0.3},
        "kl_target": 0.2,
        "kl_warn_window": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "learning_rate": 5e-3,
        **RUNS[name],
        **overrides,
    }
    if fields.get("kl_ref_adapter_path") == "{adapter}":
        fields["kl_ref_adapter_path"] = adapter
    trainer_class = KLXRLOOTrainer if fields.pop("algorithm", "grpo") == "rloo" else KLXGRPOTrainer
    policy = fields.pop("policy", "fresh")
    fields["extras"] = {"peft_config": lora()} if policy == "fresh" else {}
    # Longer than the run; test_epochs.py resumes over several epochs.
    fields.setdefault("dataset", build_dataset(64))
    if policy == "trained":
        fields["model"] = trained_lora(1, scale=0.1)
    return build_trainer(trainer_class, output_dir, **fields)


def outcome(trainer) -> tuple[list[dict], dict]:
    """All logs since the first step, and the final weights."""
    # The last entry summarises only the part of the run in this process.
    return history(trainer)[:-1], weights(trainer)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadly_reward(step: int):
    """A reward function that kills its process while scoring the batch after optimizer step `step`."""

    def reward(completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step == step:
            kill_self()
        return reward_even_tokens(completion_ids)

    # TRL logs rewards under the function's name.
    reward.__name__ = reward_even_tokens.__name__
    return reward
