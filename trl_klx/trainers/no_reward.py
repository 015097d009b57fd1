"""Training without any reward function, where only the KL to a teacher trains the policy."""

from typing import Any

from torch import nn

from ..references.kinds import choose_reference_kind, chosen_reference_fields
from .config import KLXConfigMixin


def no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """The reward function of a run without one, since TRL needs one: every completion is worth the same."""
    return [0.0] * len(completions)


def check_teacher(args: KLXConfigMixin, ref_model: nn.Module | None) -> None:
    """
    Refuse to train without a reward function unless the KL alone can train the policy.

    Args:
        args ([`KLXConfigMixin`]):
            Config of the trainer, with a KL penalty.
        ref_model (`nn.Module`, *optional*):
            Reference that the user passed to the trainer.
    """
    kind, value = choose_reference_kind(args, ref_model)
    # Step 0 is the policy itself, and a moving reference begins as the policy.
    if kind.moves or value is None or value == 0:
        given = ", ".join(f"`{name}={chosen!r}`" for name, chosen in chosen_reference_fields(args).items())
        raise ValueError(
            "Without reward functions only the KL trains, and a policy that starts at its reference has none"
            f"{f' ({given})' if given else ''}. Pass `reward_funcs`, or choose a teacher with `kl_ref_model_path`, "
            "`kl_ref_adapter_path` or `ref_model`."
        )
    if args.kl_target is not None:
        raise ValueError(
            f"`kl_target={args.kl_target!r}` cannot be held without reward functions: nothing drives the policy away "
            "from the reference. Set `kl_penalty_coef=1.0` instead, or pass `reward_funcs`."
        )
    if args.kl_ref_reset_patience is not None:
        raise ValueError(
            f"`kl_ref_reset_patience={args.kl_ref_reset_patience!r}` cannot be used without reward functions: it "
            "waits for a reward that has stopped rising. Unset it, or pass `reward_funcs`."
        )


def check_groups(args: KLXConfigMixin) -> None:
    """Refuse one completion per prompt where there is a reward, and so a comparison to be made."""
    if args.num_generations == 1 and args._compares_completions:
        raise ValueError(
            "`num_generations=1` cannot be used with a reward, which counts by comparison of the completions of a "
            "prompt. Set `num_generations` to 2 or more. One is enough without reward functions, where only the KL to "
            "a teacher trains."
        )
