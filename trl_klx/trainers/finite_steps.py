"""No step is taken whose loss or gradient is not finite, and no checkpoint holds weights that are not."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..control.metrics import Sums
from ..control.placements import Batch
from ..control.rollout import Rollout, Scored
from ..maths.estimators import MAX_ABS_LOG_RATIO
from ..references.sharding import local_part
from .forward_passes import ForwardPassMixin, PassArgs, PassKwargs


logger = get_logger(__name__)

# What is looked at for the message, causes before what follows from them: how it is called, and what to do.
CAUSES = {
    "reference": (
        "log-probs of the reference",
        "Look at the reference: weights or a `lora_alpha` that are far too large, or a dtype in which it overflows.",
    ),
    "policy": ("log-probs of the policy", "Lower `learning_rate`, or train in a dtype with a wider range."),
    "returns": ("returns", "Bound the rewards, for example with `reward_scaling` or `cliprange_reward`."),
    "advantages": ("advantages", "Bound the rewards that the reward functions return."),
    "loss": ("losses", "Bound the rewards, or lower `learning_rate`."),
}
GRADIENT_ADVICE = "Bound the rewards, lower `learning_rate`, or train in a dtype with a wider range."
# Name among the sums of a rollout.
INFINITE_REFERENCE = "infinite_reference"


class FiniteSteps:
    """
    Remembers which optimizer steps were not taken and why, and stops the run when that goes on. What happens on the
    device stays there until somebody reads the sums, so the report may come one generation batch later than the step.

    Every process must call the methods alike.
    """

    LIMIT = 3  # generation batches in a row without a single step

    def __init__(self) -> None:
        self.sums = Sums()
        self.reference: torch.Tensor | None = None  # log-probs of the batch's reference that are not finite
        self.losses: torch.Tensor | None = None  # losses of the step at hand that are not finite
        self._open = Sums()  # of the step at hand
        self._batch = 0
        self._first_step = 0  # of the generation batch
        self._told_infinite = False
        self._steps: dict[int, int] = {}  # those in `sums`, each with its generation batch
        self._fruitless: set[int] = set()  # generation batches since the last step that was taken

    def begin(self, step: int) -> None:
        """Begin a generation batch, whose first optimizer step is `step`."""
        self._batch, self._first_step = self._batch + 1, step
        self.reference = None

    def watch(self, cause: str, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Count the values that are not finite, and return how many there are."""
        wrong = ~values.detach().isfinite()
        count = (wrong if mask is None else wrong & mask).sum()
        self._open.add(cause, count)
        return count

    def count(self, step: int, wrong: torch.Tensor) -> None:
        """Count an optimizer step, which is not taken if it is `wrong`."""
        self.losses = None
        self._steps[step] = self._batch
        self.sums.merge(self._open)
        self.sums.add("not_taken", wrong, torch.ones_like(wrong))
        if self.reference is not None:
            self.sums.add("reference", self.reference)

    def forget(self, grad_norm: float) -> None:
        """Forget the last step if it is the only unread one, and its logged gradient norm shows that it was taken."""
        if len(self._steps) == 1 and grad_norm - grad_norm == 0.0:
            self.sums, self._steps = Sums(), {}
            self._fruitless.clear()

    def read(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """
        Judge the steps since the last reading, and return how many were not taken. This waits for the device if there
        are any.
        """
        if not self._steps:
            return 0
        totals = self.sums.pop(reduce)
        skipped = self.skipped(totals)
        self.judge(totals)
        return skipped

    def skipped(self, totals: Mapping[str, list[float]]) -> int:
        """How many of the steps since the last reading were not taken, see [`~FiniteSteps.judge`]."""
        wrong, count = totals.get("not_taken", [0.0, 1.0])
        return round(len(self._steps) * wrong / count)

    def judge(self, totals: Mapping[str, list[float]]) -> None:
        """
        Warn of steps that were not taken, once per generation batch, and stop the run if there were only such steps in
        the last `LIMIT` batches.

        Args:
            totals (`Mapping[str, list[float]]`):
                What `sums` held, over all processes.
        """
        self._warn_of_infinite_reference(totals)
        steps, self._steps = self._steps, {}
        if not steps:
            return
        wrong, count = totals["not_taken"]
        if wrong < count:
            self._fruitless.clear()
        if wrong == 0:
            return
        known = self._fruitless | {0}
        if wrong == count:
            self._fruitless |= set(steps.values())
        found = {cause: int(totals[cause][0]) for cause in CAUSES if totals.get(cause, [0.0])[0] > 0}
        what = ", ".join(f"{CAUSES[cause][0]} ({number})" for cause, number in found.items()) or "the gradient alone"
        advice = CAUSES[next(iter(found))][1] if found else GRADIENT_ADVICE
        if len(self._fruitless) >= self.LIMIT:
            raise FloatingPointError(
                f"Training stops at step {max(steps)}: {len(self._fruitless)} generation batches in a row gave no "
                f"finite gradient. Not finite: {what}. The weights are those before these batches. {advice} Then go "
                "on with `resume_from_checkpoint=True`."
            )
        if wrong < count or max(known) < max(steps.values()):
            logger.warning(f"{_name_steps(steps, wrong / count)}: the gradient is not finite. Not finite: {what}.")

    def _warn_of_infinite_reference(self, totals: Mapping[str, list[float]]) -> None:
        """A token that the reference rules out has an infinite KL, which is bounded, so that the step can be taken."""
        number = int(totals.get(INFINITE_REFERENCE, [0.0])[0])
        if number and not self._told_infinite:
            self._told_infinite = True
            logger.warning(
                f"The batch of step {self._first_step} has {number} tokens to which the reference gives no "
                f"probability. The KL of each is taken as {MAX_ABS_LOG_RATIO:.0f} nats. Look at the reference: it "
                "must allow every token that the policy can sample. This is said once."
            )


def _name_steps(steps: Mapping[int, int], share: float) -> str:
    first, last = min(steps), max(steps)
    if share == 1.0:
        return f"Step {last} was not taken" if first == last else f"The steps {first} to {last} were not taken"
    return f"{round(share * len(steps))} of the steps {first} to {last} were not taken"


class FinishSteps(TrainerCallback):
    """Tells [`FiniteSteps`] what the log shows anyway, and reads it when training ends."""

    def __init__(self, steps: FiniteSteps, reduce: Callable[[torch.Tensor], torch.Tensor]):
        self.steps = steps
        self.reduce = reduce

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        vars(_innermost(kwargs["optimizer"])).pop("found_inf", None)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "grad_norm" in logs:
            self.steps.forget(float(logs["grad_norm"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.steps.read(self.reduce)


class FiniteStepsMixin(ForwardPassMixin):
    """
    Skips optimizer steps whose gradient is not finite. Weights and moments stay as they are, as if the batch had not
    been there. A loss that is not finite makes its gradient NaN, which the reduction over processes carries to all of
    them, so that all decide alike.
    """

    _klx_active: bool
    _klx_finite: FiniteSteps
    _klx_rollouts: dict[str, Rollout]

    def _klx_guard_steps(self) -> None:
        self._klx_finite = FiniteSteps()
        accelerator: Any = self.accelerator
        accelerator.clip_grad_norm_ = functools.partial(self._klx_clip_gradients, accelerator.clip_grad_norm_)
        self.add_callback(FinishSteps(self._klx_finite, self._klx_reduce))

    def _klx_clip_gradients(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients, and keep the optimizer from a step that is not finite."""
        norm: Any = clip(*args, **kwargs)
        wrong = self._klx_is_wrong(norm)
        self._klx_finite.count(self.state.global_step + 1, wrong)
        if self.is_deepspeed_enabled or self.accelerator.scaler is not None:
            return norm  # both look at the gradients themselves
        optimizer: Any = _innermost(self.optimizer)
        if _can_be_told(optimizer) and not self.is_fsdp_enabled:
            optimizer.found_inf = wrong.float()
        elif wrong.item():
            # Without gradients the optimizer leaves weights and moments as they are.
            assert self.optimizer is not None
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _klx_is_wrong(self, norm: Any) -> torch.Tensor:
        """Whether the step at hand has no finite gradient, as a flag on the device."""
        losses = self._klx_finite.losses
        if self.accelerator.mixed_precision == "fp16" and losses is not None:
            return losses > 0  # gradients in fp16 overflow now and then, until a smaller scale of the loss is found
        if self.is_deepspeed_enabled:
            # It has made its step by now, or not: nothing else can be reported.
            return torch.tensor(self.accelerator.optimizer_step_was_skipped, device=self.accelerator.device)
        finite: torch.Tensor = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).isfinite()
        return ~finite

    def _klx_score_reference(self, args: PassArgs, kwargs: PassKwargs) -> Scored:
        scored = super()._klx_score_reference(args, kwargs)
        if self._klx_mode == "train":
            mask, values = args[1][:, -args[2] :].bool(), scored.logps
            if values is None:
                assert scored.hidden is not None
                values = scored.hidden.abs().amax(dim=-1)
            self._klx_finite.reference = (~values.isfinite() & mask).sum()
            self._klx_rollouts["train"].sums.add(INFINITE_REFERENCE, (values.isinf() & mask).sum())
        return scored

    def _klx_watch_loss(self, loss: torch.Tensor, inputs: Batch, policy: Scored) -> torch.Tensor:
        """Look at a micro-batch. Its loss comes back as it is, or with a gradient of NaN if it is not finite."""
        if self._klx_mode == "eval":
            return loss
        mask, steps, advantages = self._klx_generated(inputs), self._klx_finite, inputs["advantages"]
        if policy.logps is not None:
            steps.watch("policy", policy.logps, mask)
        if "ppo_returns" in inputs:
            steps.watch("returns", inputs["ppo_returns"], inputs["ppo_mask"])
        steps.watch("advantages", advantages, mask if advantages.dim() > 1 else None)
        wrong = steps.watch("loss", loss)
        steps.losses = wrong if steps.losses is None else steps.losses + wrong
        return loss * torch.ones_like(loss).masked_fill(wrong > 0, torch.nan)

    # ---- Checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._klx_active:
            self._klx_check_weights()
            skipped = self._klx_finite.read(self._klx_reduce)
            if self.kl_control is not None:
                self.kl_control.clock.forget(skipped)  # a resumed run could not know
        super()._save_checkpoint(model, trial)

    def _klx_check_weights(self) -> None:
        """Refuse to save weights that are not finite. Every process must call this."""
        policy = self.accelerator.unwrap_model(self.model)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        counts = [(~local_part(parameter).isfinite()).sum() for parameter in trained]
        if not counts:
            return
        wrong = int(self._klx_reduce(torch.stack(counts).sum()).item())
        if wrong:
            raise FloatingPointError(
                f"No checkpoint is written at step {self.state.global_step}: {wrong} of the trained weights are not "
                "finite. Lower `learning_rate`, or train in a dtype with a wider range, and go on from the last "
                "checkpoint with `resume_from_checkpoint=True`."
            )


def _innermost(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _can_be_told(optimizer: Any) -> bool:
    """
    Whether the optimizer takes a flag on the device that makes its step do nothing, so that nobody has to wait for it.
    Torch's fused Adam does, for gradient scalers. Fused SGD would leave a momentum that was never written.
    """
    adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    return adam and all(group.get("fused") for group in optimizer.param_groups)
