"""Which trainers of TRL log the KL that their `beta` penalises, and under which name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoggedKL:
    """
    How a trainer logs the KL between its policy and its reference.

    Attributes:
        key (`str`):
            Name in the training log.
        completions_per_row (`int`):
            Completions that the trainer samples for each row of its batch.
    """

    key: str
    completions_per_row: int = 1


# Both tables are keyed by class name, because importing TRL's experimental trainers just to recognise them is slow and
# prints warnings. A name that the installed TRL does not have matches nothing.

# Trainers that penalise KL(policy || reference) with `beta`, and log this KL on samples from the policy.
LOGGED_KLS = {
    "GRPOTrainer": LoggedKL("kl"),
    "GMPOTrainer": LoggedKL("kl"),
    "RLOOTrainer": LoggedKL("kl"),
    "OnlineDPOTrainer": LoggedKL("objective/kl", completions_per_row=2),
}

_PREFERENCES = "it logs no KL, because it learns from completions that the policy did not sample"
_DISTILLATION = "its `beta` chooses a divergence between student and teacher, and is no coefficient of a KL penalty"
_NO_REFERENCE = "its loss has no reference model from which a KL could be measured"

# Trainers that have a `beta` but log no such KL, each with the reason.
REFUSED_TRAINERS = {
    "KTOTrainer": (
        "its `kl` is not the policy's: it compares policy and reference on completions of the dataset that are paired "
        "with the wrong prompts, and is a baseline of the loss"
    ),
    "XPOTrainer": "half of the samples in its `objective/kl` come from the reference",
    "MiniLLMTrainer": "its loss does not use `beta`, and it logs no KL to a reference",
    "SDPOTrainer": "its loss does not use `beta`, and it logs no KL to a reference",
    "NashMDTrainer": "its log has another name for its KL: set `kl_key='loss/kl'`",
    "GRPOWithReplayBufferTrainer": "part of each batch is replayed, and was sampled by earlier policies",
    "BCOTrainer": _PREFERENCES,
    "DPOTrainer": _PREFERENCES,
    "CPOTrainer": _NO_REFERENCE,
    "ORPOTrainer": _NO_REFERENCE,
    "TPOTrainer": _NO_REFERENCE,
    "DistillationTrainer": _DISTILLATION,
    "GKDTrainer": _DISTILLATION,
    "GOLDTrainer": _DISTILLATION,
    "IWOPDTrainer": _DISTILLATION,
    "ServerDistillationTrainer": _DISTILLATION,
}
