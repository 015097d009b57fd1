"""What the tests of GRPO expect of a run, computed independently."""

import pytest
import torch

from support.oracle import centered, centering_sets, counting, discounted, kl_of_tokens
from support.tiny import build_model, logged, lora, scripted_rollout


# Estimators that can be penalised through rewards and advantages, and in the loss.
ESTIMATORS = ("k1", "importance")
LOSS_ESTIMATORS = ("k3", "k2", "full")
LORA = {"peft_config": lora()}
# Four groups of two in two micro-batches.
ACCUMULATED = {"gradient_accumulation_steps": 2}


def check_advantages(trainer, reference, estimator="k1", discount=0.0, coefs=None, apart=False) -> None:
    """
    Every advantage that TRL's loss saw is TRL's own plus the centered adjustment, to 1e-5. With `apart`, TRL's
    advantages are unchanged, and the adjustment is a separate term of the loss.
    """
    centering, temperature = trainer.args.kl_centering, trainer.args.temperature
    coefs = logged(trainer, "klx/coef") if coefs is None else coefs
    largest = 0.0
    for loss in trainer.losses:
        batch, rows = trainer.generated[loss["rollout"]], loss["row"].tolist()
        counts = counting(batch)
        kl = discounted(kl_of_tokens(batch["policy"], reference, batch, estimator, temperature), counts, discount)
        sets = centering_sets(centering, len(kl), trainer.num_generations, rows)
        adjustment = centered(kl, counts, coefs[loss["rollout"]], sets)[rows]
        expected = batch["advantages"][rows].unsqueeze(1) + adjustment
        found = loss["advantages"]
        assert ("klx_adjustment" in loss) == apart
        if apart:
            assert torch.equal(found, batch["advantages"][rows])
            found = found.unsqueeze(1) + loss["klx_adjustment"]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        largest = max(largest, adjustment.abs().max().item())
    assert largest > 1e-3, "the policy never left the reference, so nothing was checked"


def check_statistic(trainer, batches: list[dict], name: str, reference=None) -> None:
    """The logged KL is the mean over completions of the summed KL, computed independently."""
    kls, reference = logged(trainer, "klx/kl"), build_model() if reference is None else reference
    for batch, kl in zip(batches, kls, strict=True):
        expected = kl_of_tokens(batch["policy"], reference, batch, name, trainer.args.temperature)
        assert kl == pytest.approx(sum(map(sum, expected)) / len(counting(batch)), rel=1e-4, abs=1e-6)
    assert kls[-1] > 1e-4


def rollout_with_tools(prompts, trainer):
    """Completions whose second token came from a tool."""
    output = scripted_rollout(prompts, trainer)
    return output | {"env_mask": [[0 if i == 1 else 1 for i in range(len(c))] for c in output["completion_ids"]]}


def check_adaptive_trace(trainer, completions: int, horizon: float = 100.0, clip: float = 0.2) -> None:
    """Each batch's coefficient follows from the previous one by Ziegler's rule."""
    coefs, kls, target = logged(trainer, "klx/coef"), logged(trainer, "klx/kl"), trainer.args.kl_target
    assert coefs[0] == trainer.args.kl_penalty_coef
    for now, after, kl in zip(coefs, [*coefs[1:], trainer.kl_controller.value], kls, strict=True):
        error = min(max(kl / target - 1, -clip), clip)
        assert after == pytest.approx(now * (1 + error * completions / horizon), rel=1e-9)
    assert len(set(coefs)) == len(coefs) > 1
