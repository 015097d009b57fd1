"""The same generation batches, split into micro-batches and over processes in several ways."""

from support.tiny import (
    ScriptedGeneration,
    build_trainer,
    logged,
    recording,
    reward_even_tokens,
    scripted_rollout,
    trained_lora,
)
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


HOLD = {"kl_horizon": 10000, "kl_target": 20.0}
# All have eight completions per generation batch.
CASES = {
    "grpo-batch": {"algorithm": "grpo", "kl_centering": "batch"},
    "grpo-batch-full": {"algorithm": "grpo", "kl_centering": "batch", "kl_statistic": "full", "kl_discount": 0.9},
    "grpo-batch-importance": {"algorithm": "grpo", "kl_centering": "batch", "kl_estimator": "importance"},
    "grpo-group": {"algorithm": "grpo", "kl_centering": "group"},
    # One group that spans all processes.
    "grpo-wide-group": {"algorithm": "grpo", "kl_centering": "group", "num_generations": 8},
    "grpo-reward": {"algorithm": "grpo", "kl_placement": "reward", "num_generations": 8},
    "grpo-loss": {"algorithm": "grpo", "kl_placement": "loss"},
    "grpo-loss-full": {"algorithm": "grpo", "kl_placement": "loss", "kl_estimator": "full"},
    "grpo-hold": {"algorithm": "grpo", **HOLD},
    "grpo-reward-hold": {"algorithm": "grpo", "kl_placement": "reward", "num_generations": 8, **HOLD},
    "rloo-batch": {"algorithm": "rloo", "kl_centering": "batch"},
    "rloo-loss": {"algorithm": "rloo", "kl_placement": "loss", "kl_ignore_tokens": ["eos"]},
    "rloo-reward": {"algorithm": "rloo", "kl_placement": "reward", "num_generations": 8},
    "rloo-reward-hold": {"algorithm": "rloo", "kl_placement": "reward", "num_generations": 8, **HOLD},
}


def uneven_reward(completion_ids, **kwargs) -> list[float | None]:
    """The share of even tokens, with no score for some completions."""
    rewards = reward_even_tokens(completion_ids)
    return [None if ids[0] % 5 == 0 else reward for ids, reward in zip(completion_ids, rewards, strict=True)]


def run_case(case: dict, output_dir: str, micro_batches: int, processes: int) -> dict:
    """Train for three steps. Returns the loss's advantages by prompt and completion, and the statistics."""
    fields = {"kl_penalty_coef": 0.2, "kl_target": 0.5, "kl_horizon": 40} | case
    grpo = fields.pop("algorithm") == "grpo"
    extras = {"rollout_func": scripted_rollout} if grpo else {}
    base = KLXGRPOTrainer if grpo else type("ScriptedRLOOTrainer", (ScriptedGeneration, KLXRLOOTrainer), {})
    trainer = build_trainer(
        recording(base),
        output_dir,
        model=trained_lora(1, scale=0.1),
        rewards=uneven_reward,
        extras=extras,
        per_device_train_batch_size=8 // micro_batches // processes,
        gradient_accumulation_steps=micro_batches,
        # Adam would turn the rounding of a gradient near zero into a whole step.
        optim="sgd",
        learning_rate=1e-3,
        **fields,
    )
    accelerator = trainer.accelerator
    trainer.train()
    rows = []
    for loss in trainer.losses:
        advantages = loss["advantages"] if loss["advantages"].ndim == 2 else loss["advantages"].unsqueeze(1)
        advantages = (advantages + loss.get("klx_adjustment", 0.0)).expand(loss["completion_ids"].shape)
        for row in range(len(advantages)):
            counts = loss["completion_mask"][row].bool()
            prompt = loss["prompt_ids"][row][loss["prompt_mask"][row].bool()].tolist()
            completion = loss["completion_ids"][row][counts].tolist()
            rows.append([[loss["rollout"], prompt, completion], advantages[row][counts].tolist()])
    return {
        "rows": rows,
        "kl": logged(trainer, "klx/kl"),
        "k1": logged(trainer, "klx/kl_k1"),
        "coef": [*logged(trainer, "klx/coef"), trainer.kl_controller.value],
        "controller": trainer.kl_controller.state_dict(),
        "grad_norm": logged(trainer, "grad_norm"),
        "adjustment": logged(trainer, "klx/adjustment_abs_mean"),
        "num_processes": accelerator.num_processes,
        "distributed_type": str(accelerator.distributed_type),
    }
