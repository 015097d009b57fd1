"""KL control of one run: which KL is measured, what it says, and how the coefficient follows."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..controllers.base import BatchMeasurement, KLController
from ..controllers.stall import StallMonitor
from ..maths._tensors import wide_dtype
from ..maths.estimators import center_log_ratio, estimate_kl
from ..maths.totals import kl_totals, sum_kl_per_sequence
from ..references.base import KLReference
from .exact_kl import ExactPass, exact_kl_of_passes
from .rollout import Head, Pull, Rollout, Scored, TokenKL
from .steering import Steering


class KLControl(Steering):
    """
    Owns the controller, the reference, the statistic and the drift diagnostics of a run, and their state. It needs no
    trainer:

    ```python
    rollout = control.begin(at_once=True)
    kl = control.measure(policy, reference)                   # two forward passes in, the KL of each token out
    control.add(rollout, kl, mask)                            # once per micro-batch
    metrics = control.finish(rollout, reduce, train=True)     # updates the coefficient
    penalty = rollout.coef * kl.penalised
    ```

    With `at_once`, a controller that `acts_at_once` decides `rollout.coef` in `finish`. Without it, `rollout.coef` is
    known from the beginning, and the penalty can be entered before `finish`.

    Args:
        controller ([`KLController`]):
            Maps the measured KL to the next coefficient.
        reference ([`KLReference`]):
            The frozen policy that the KL is measured against.
        estimator (`str`, *optional*, defaults to `"k1"`):
            Estimator that is penalised.
        statistic (`str`, *optional*, defaults to `"k3"`):
            Estimator that is logged and that drives the controller.
        statistic_is_default (`bool`, *optional*, defaults to `False`):
            Whether nobody has chosen the statistic. Then `"k3"` takes its place where the exact KL cannot be
            computed, and a resumed run keeps the one that it began with.
        ignored (`tuple[int, ...]`, *optional*, defaults to `()`):
            Tokens whose KL neither counts nor pays.
        stall ([`StallMonitor`], *optional*):
            Says when the reference is to be reset.
        settings:
            Further arguments of [`Steering`].
    """

    def __init__(
        self,
        controller: KLController,
        reference: KLReference,
        *,
        estimator: str = "k1",
        statistic: str = "k3",
        statistic_is_default: bool = False,
        ignored: tuple[int, ...] = (),
        stall: StallMonitor | None = None,
        **settings: Any,
    ):
        super().__init__(controller, **settings)
        self.reference = reference
        self.estimator = estimator
        self.statistic = statistic
        self.statistic_is_default = statistic_is_default
        self.ignored = ignored
        self.stall = stall
        self._masked_before = False

    @property
    def needs_full(self) -> bool:
        """Whether the KL over the whole vocabulary is computed, to be penalised or to be the statistic."""
        return "full" in (self.estimator, self.statistic)

    def measure_by_k3(self, obstacle: str) -> None:
        """
        Measure by `k3` from here on, because the exact KL cannot be used with `obstacle`. Refused if the exact KL was
        asked for.
        """
        if not self.statistic_is_default:
            remedy = "Use 'k3' (`kl_estimator`, `kl_statistic`)."
            raise ValueError(f"The 'full' KL cannot be used with {obstacle}. {remedy}")
        self.statistic, self.statistic_is_default = "k3", False
        self.logger.warning(
            "`kl_statistic` is unset: the KL is measured by 'k3', which is noisier than 'full', because 'full' "
            f"cannot be used with {obstacle}."
        )

    # ---- One generation batch ----

    def begin(self, at_once: bool = False) -> Rollout:
        """
        Begin a generation batch, with the coefficient before its update.

        Args:
            at_once (`bool`, *optional*, defaults to `False`):
                Whether the penalty will be entered after [`~KLControl.finish`], so that a controller that
                `acts_at_once` can decide the coefficient there.
        """
        undecided = at_once and self.controller.acts_at_once
        return Rollout(coef=self.controller.value, undecided=undecided, resets=self.reference.resets)

    def mask(self, mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """
        The tokens whose KL counts.

        Args:
            mask (`torch.Tensor` of shape `(B, T)`):
                Boolean mask of the tokens that the policy generated.
            tokens (`torch.Tensor` of shape `(B, T)`):
                Their ids.
        """
        if not self.ignored:
            return mask
        return mask & ~torch.isin(tokens, torch.tensor(self.ignored, device=tokens.device))

    @torch.no_grad()
    def measure(
        self,
        policy: Scored,
        reference: Scored,
        heads: tuple[Head, Head] | None = None,
        tokens: torch.Tensor | None = None,
        exact: ExactPass | None = None,
    ) -> TokenKL:
        """
        The KL of each token from the passes of policy and reference.

        Args:
            policy ([`Scored`]):
                Pass of the policy, without dropout.
            reference ([`Scored`]):
                Pass of the reference.
            heads (`tuple`, *optional*):
                LM heads of policy and reference, for the exact KL.
            tokens (`torch.Tensor` of shape `(B, T)`, *optional*):
                Sampled tokens, needed where the reference's pass has no log-probs.
            exact (`tuple`, *optional*):
                What [`exact_kl_of_passes`] gives for these passes, if it is known already.
        """
        if exact is None and heads is not None:
            exact = exact_kl_of_passes(policy, reference, heads, tokens)
        full, policy_logps, reference_logps = (None, policy.logps, reference.logps) if exact is None else exact
        assert policy_logps is not None and reference_logps is not None

        @functools.cache
        def by(kind: str) -> torch.Tensor:
            if kind == "full":
                assert full is not None
                return full.detach()
            return estimate_kl(policy_logps, reference_logps, kind)

        # Over the whole vocabulary, the mean of `k1` is the exact KL. Ignored tokens pay nothing, and change the mean.
        knows_mean = full is not None and self.estimator == "k1" and not self.ignored
        expected = by("full" if knows_mean else self.estimator)
        return TokenKL(by(self.estimator), by(self.statistic), by("k1"), expected)

    @torch.no_grad()
    def add(
        self,
        rollout: Rollout,
        kl: TokenKL,
        mask: torch.Tensor,
        charge: torch.Tensor | None = None,
        pull: Pull | None = None,
    ) -> None:
        """
        Add a measured batch, or micro-batch, to the sums of a rollout.

        Args:
            rollout ([`Rollout`]):
                The generation batch.
            kl ([`TokenKL`]):
                KL of each token.
            mask (`torch.Tensor` of shape `(B, T)`):
                Tokens whose KL counts.
            charge (`torch.Tensor` of shape `(B, T)`, *optional*):
                What one unit of coefficient takes off the advantages.
            pull ([`Pull`], *optional*):
                What moves the policy along the KL.
        """
        sums, dtype = rollout.sums, wide_dtype(mask.device)
        sums.add("kl", *kl_totals(kl.statistic, mask))  # sum, tokens, completions with tokens
        sums.add("k1", kl_totals(kl.k1, mask)[0])
        sums.add("completions", torch.tensor(float(mask.size(0)), device=mask.device))
        # For the standard error of a ratio of sums: KL and size of each completion, squared and multiplied.
        totals = sum_kl_per_sequence(kl.statistic, mask).to(dtype)
        sizes = (mask.any(dim=1) if self.unit == "sequence" else mask.sum(dim=1)).to(dtype)
        sums.add("squares", totals.square().sum(), (totals * sizes).sum(), sizes.square().sum())
        if charge is not None:
            sums.add("charge", charge.abs().sum())
        if pull is not None:
            k1 = torch.where(mask, kl.k1.float(), 0.0).to(dtype)
            advantages, charged = (
                part.to(dtype).view(len(part), -1)
                for part in (pull.advantages, k1 if pull.charged is None else pull.charged)
            )
            along = center_log_ratio(k1)
            drives = (advantages * along).sum(dim=1)
            sums.add("drive", drives.sum(), drives.square().sum(), (charged * along).sum(), advantages.abs().sum())

    def add_reward(self, rollout: Rollout, reward: float, device: torch.device) -> None:
        """
        Add the mean reward of a batch, for the [`StallMonitor`].

        Args:
            rollout ([`Rollout`]):
                The generation batch.
            reward (`float`):
                Mean reward. Where processes differ, the mean over them counts.
            device (`torch.device`):
                Device of the rollout's sums.
        """
        rollout.sums.add("reward", *torch.tensor([reward, 1.0], dtype=wide_dtype(device), device=device))

    def finish(
        self,
        rollout: Rollout,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        train: bool,
        skipped_steps: Callable[[Mapping[str, list[float]]], int] | None = None,
    ) -> dict[str, float]:
        """
        Close a generation batch: take its sums over all processes and, in training, update coefficient and drift, and
        decide the coefficient of a batch that is undecided. This is the one wait for the device per generation batch.

        Args:
            rollout ([`Rollout`]):
                The generation batch.
            reduce (`Callable`):
                Sums a tensor over all processes.
            train (`bool`):
                Whether the batch is one of training.
            skipped_steps (`Callable`, *optional*):
                Reads from the sums how many of the optimizer steps that were counted were not taken.

        Returns:
            `dict[str, float]`: The metrics, without their prefix; empty if every completion is masked.
        """
        sums = rollout.totals = rollout.sums.pop(reduce)
        if skipped_steps is not None:
            self.clock.forget(skipped_steps(sums))
        kl_sum, tokens, sequences = sums["kl"]
        if tokens == 0:
            self._warn_masked()
            return {}
        per = sequences if self.unit == "sequence" else tokens
        kl = kl_sum / per
        # A KL to an earlier reference says nothing about the present one.
        if train and rollout.resets == self.reference.resets:
            # A KL that is not a number teaches nothing: the steps that led to it count towards the next one.
            steps = self.clock.pop() if math.isfinite(kl) else (0.0, None)
            applied = None if rollout.undecided else rollout.coef
            self.learn(_measurement(kl, per, sums, *steps, applied))
            if rollout.undecided:
                rollout.coef = self.controller.value
            if self.stall is not None:
                reward, processes = sums["reward"]
                self.stall.update(reward / processes, kl)
        coef = rollout.coef
        metrics = {"kl": kl, "kl_k1": sums["k1"][0] / per, "kl_per_token": kl_sum / tokens, "coef": coef}
        if self.target is not None:
            metrics |= {"target": self.target, "error": kl / self.target - 1.0}
        if self.penalises:
            metrics["saturated"] = float(self.controller.at_bound(coef))
        if self.guards_lr:
            metrics["lr_factor"] = self.clock.lr_factor
        if "charge" in sums:
            metrics["adjustment_abs_mean"] = coef * sums["charge"][0] / tokens if coef else 0.0
        if self.stall is not None or self.reference.resets:
            metrics["reference_resets"] = float(self.reference.resets)
        return metrics

    def _warn_masked(self) -> None:
        if not self._masked_before:
            self.logger.warning(
                "Every completion of a batch is masked: there is no KL to measure, and the coefficient stays as it "
                "is. This is said once."
            )
        self._masked_before = True

    # ---- A new reference ----

    @property
    def reset_due(self) -> bool:
        """Whether the reference is to be reset before the next batch."""
        return self.stall is not None and self.stall.stalled

    def reset_reference(self) -> None:
        """Make the policy, as it is now, the reference, and start over with everything that was measured."""
        self.reference.reset()
        self.start_over()

    def start_over(self) -> None:
        super().start_over()
        if self.stall is not None:
            self.stall.clear()

    # ---- State ----

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values. The reference is not loaded from it, but compared."""
        stall = None if self.stall is None else self.stall.state_dict()
        return super().state_dict() | {"reference": self.reference.description, "stall": stall}

    def load_state_dict(self, state: Mapping[str, Any], source: str) -> None:
        super().load_state_dict(state, source)
        if self.stall is not None and state.get("stall") is not None:
            try:
                self.stall.load_state_dict(state["stall"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"Cannot resume: the last batches in {source!r} are not valid ({error})") from error


def _measurement(
    kl: float,
    per: float,
    sums: Mapping[str, list[float]],
    steps: float,
    learning_rate: float | None,
    applied: float | None,
) -> BatchMeasurement:
    """What a controller may see of a batch, from the batch's sums."""
    squares, products, sizes = sums["squares"]
    completions = sums["completions"][0]
    seen: dict[str, float | None] = {}
    if "drive" in sums:
        drive, drive_squares, drag, size = sums["drive"]
        mean = drive / completions
        seen = {
            # Rewards that do not differ drive nothing; what is left of them is rounding.
            "drive": mean if size > 1e-6 * completions else 0.0,
            "drag": drag / completions,
            "drive_error": math.sqrt(max(drive_squares / completions - mean**2, 0.0) / completions),
        }
    return BatchMeasurement(
        kl=kl,
        completions=completions,
        optimizer_steps=steps,
        learning_rate=learning_rate,
        standard_error=math.sqrt(max(squares - 2.0 * kl * products + kl**2 * sizes, 0.0)) / per,
        applied=applied,
        **seen,
    )
