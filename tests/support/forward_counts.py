"""Count the rows that pass through policy and reference."""

import collections

from peft import PeftModel
from peft.tuners.lora import LoraLayer


def backbone(model):
    return (model.get_base_model() if isinstance(model, PeftModel) else model).model


def who(model) -> str:
    """Whether a forward pass is of the policy or of the reference: adapters may be off, or another one on."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers:
        return "policy"
    trained = not layers[0].disable_adapters and layers[0].active_adapters == ["default"]
    return "policy" if trained else "reference"


def count_rows(trainer) -> collections.Counter:
    """Rows scored by policy and reference, without generation."""
    rows = collections.Counter()

    def watch(model, owner):
        def hook(module, args, kwargs):
            if not kwargs.get("use_cache"):
                rows[owner()] += (args[0] if args else kwargs["input_ids"]).size(0)

        backbone(model).register_forward_pre_hook(hook, with_kwargs=True)

    watch(trainer.model, lambda: who(trainer.model))
    own_model = getattr(getattr(trainer, "kl_reference", None), "model", None)
    if own_model is not None:
        watch(own_model, lambda: "reference")
    return rows
