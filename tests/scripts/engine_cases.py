"""
Small trainings that every engine must run alike: each trainer with each kind of reference, on completions that depend
only on the prompt.
"""

import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed

from support.tiny import (
    RUN,
    ScriptedGeneration,
    build_dataset,
    build_model,
    build_tokenizer,
    scripted_rollout,
    trained_lora,
)
from support.tiny_ppo import build_scorer
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


class Momentum:
    """An optimizer with a state to save that, unlike Adam, does not turn a rounding error into a step."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.SGD, {"lr": args.learning_rate, "momentum": 0.5}


class EngineGRPOTrainer(Momentum, KLXGRPOTrainer):
    pass


class EnginePPOTrainer(Momentum, KLXPPOTrainer):
    pass


class EngineRLOOTrainer(Momentum, KLXRLOOTrainer):
    pass


class ScriptedRLOOTrainer(ScriptedGeneration, EngineRLOOTrainer):
    """TRL's RLOO takes no `rollout_func`."""


TRAINERS = {"grpo": EngineGRPOTrainer, "rloo": EngineRLOOTrainer, "ppo": EnginePPOTrainer}

# References, by name. `{adapter}` and `{other}` stand for a saved adapter and model; "passed" is that model as an
# argument of the trainer; step 1 is put into the output folder beforehand.
REFERENCES = {
    "base": {},
    "adapter": {"kl_ref_adapter_path": "{adapter}"},
    "start": {"kl_penalty_reference_step": 0},
    "step": {"kl_penalty_reference_step": 1},
    "model": {"kl_ref_model_path": "{other}"},
    "passed": {},
    "lag": {"kl_ref_lag": 1},
    "sync": {"kl_ref_sync_steps": 1, "kl_ref_mixup_alpha": 0.5},
    # The KL is above its target from the second step on, so that the reward alone decides on resets.
    "reset": {"kl_ref_reset_patience": 2, "kl_target": 1e-4},
}

# `trainer-policy-reference`, then, after another dash, what is special about the case.
CASES = {
    "grpo-lora-base": {},
    "grpo-lora-adapter": {"kl_placement": "loss"},
    "grpo-lora-start-exact": {"kl_statistic": "full"},
    "grpo-lora-step": {"kl_placement": "reward"},
    "grpo-lora-lag": {},
    "grpo-lora-sync": {"kl_centering": "group"},
    "grpo-lora-model-exact": {"kl_statistic": "full"},
    "grpo-full-model": {},
    "grpo-full-passed": {},
    "grpo-full-base-exact": {"kl_statistic": "full"},
    "grpo-full-step": {},
    "grpo-full-lag": {},
    "grpo-full-sync": {},
    "grpo-lora-reset": {},
    "grpo-full-reset-exact": {"kl_statistic": "full", "kl_ref_reset_optimizer": True},
    "rloo-lora-base": {},
    "rloo-lora-adapter": {"kl_placement": "reward"},
    "rloo-lora-model": {"kl_placement": "loss"},
    "rloo-lora-step": {"kl_placement": "loss"},
    "rloo-lora-lag": {},
    "rloo-full-lag": {},
    "rloo-lora-reset": {"kl_ref_reset_optimizer": True},
    "ppo-lora-base": {},
    "ppo-lora-adapter-value_model": {},
    "ppo-lora-start": {},
    "ppo-lora-lag": {"kl_placement": "advantage"},
    "ppo-full-base": {},
    "ppo-full-base-frozen": {"num_layers_unfrozen": 1, "kl_statistic": "full"},
    "ppo-full-lag": {},
    "ppo-full-reset": {"kl_ref_reset_optimizer": True, "learning_rate": 4e-3},
    # The engine brings its own sampler, which is deterministic here.
    "grpo-lora-adapter-sampled": {"top_k": 1},
    "rloo-lora-base-sampled": {"top_k": 1},
    "ppo-full-lag-sampled": {"top_k": 1},
    "ppo-lora-adapter-sampled": {"top_k": 1},
}


# Cases that are also resumed from a checkpoint in the middle: after a reset, where there is one.
RESUMED = {
    "grpo-lora-lag": 2,
    "grpo-full-model": 2,
    "grpo-lora-start-exact": 2,
    "grpo-full-sync": 2,
    "grpo-lora-reset": 3,
    "grpo-full-reset-exact": 3,
    "ppo-full-lag": 2,
}


def prepare(folder: Path) -> None:
    """Save the inputs of the cases: a model, two adapters, a second model, and a value model."""
    build_model().save_pretrained(folder / "base")
    torch.save(build_model().state_dict(), folder / "base.pt")
    build_tokenizer().save_pretrained(folder / "base")
    trained_lora(seed=1, scale=0.03).save_pretrained(folder / "policy_adapter")
    trained_lora(seed=5, scale=0.05).save_pretrained(folder / "adapter")
    other = build_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    other.save_pretrained(folder / "other")
    build_scorer(seed=3).save_pretrained(folder / "value")


def reward(completion_ids, **kwargs) -> list[float]:
    """A reward that differs between completions."""
    return [len(ids) / 3.0 + ids[0] / 20.0 for ids in completion_ids]


def falling_reward(completion_ids, trainer_state, **kwargs) -> list[float]:
    """The same reward, less and less of it, so that a run stalls."""
    return [score - trainer_state.global_step / 2.0 for score in reward(completion_ids)]


def build_case(name: str, folder: Path, output: Path, processes: int, rows: int = 32, **overrides):
    """
    The trainer of a case. Models are loaded after the config is built, as in users' scripts, because ZeRO-3 then
    shards them while they load.
    """
    kind, policy, reference, *special = name.split("-")
    trainer_class = TRAINERS[kind]
    fields = REFERENCES[reference] | CASES[name] | overrides
    if reference == "adapter":
        fields["kl_ref_adapter_path"] = str(folder / "adapter")
    if reference == "model":
        fields["kl_ref_model_path"] = str(folder / "other")
    if reference == "step":
        source = folder / ("adapter" if policy == "lora" else "other")
        shutil.copytree(source, output / "checkpoint-1", dirs_exist_ok=True)
    defaults = RUN | {
        "output_dir": str(output),
        "per_device_train_batch_size": 8 // processes,
        "num_generations": 4,
        "max_steps": 4,
        "learning_rate": 0.2 if policy == "lora" else 0.05,
        "kl_penalty_coef": 0.2,
        "kl_target": 0.05,
        "kl_horizon": 50,
    }
    if kind == "ppo":
        # DeepSpeed clips policy and value function together, the other engines separately, so clipping is off here.
        rate = defaults["learning_rate"] / 5
        defaults |= {"num_generations": 1, "num_ppo_epochs": 1, "max_grad_norm": 1e3, "learning_rate": rate}
    args = trainer_class._config_class(**(defaults | fields))
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    if policy == "lora":
        model = PeftModel.from_pretrained(model, folder / "policy_adapter", is_trainable=True)
    extras = {}
    if "sampled" not in special and kind == "rloo":
        trainer_class = ScriptedRLOOTrainer
    elif "sampled" not in special:
        extras["rollout_func"] = scripted_rollout
    if reference == "passed":
        extras["ref_model"] = AutoModelForCausalLM.from_pretrained(folder / "other")
    if "value_model" in special:
        extras["value_model"] = AutoModelForSequenceClassification.from_pretrained(folder / "value", num_labels=1)
    return trainer_class(
        model=model,
        reward_funcs=falling_reward if reference == "reset" else reward,
        args=args,
        train_dataset=build_dataset(rows),
        processing_class=build_tokenizer(),
        **extras,
    )


def series(trainer) -> list[dict[str, float]]:
    """The logged KL, coefficient, gradient norm and value metrics of each step."""
    kept = ("klx/kl", "klx/coef", "klx/adjustment", "klx/reference_resets", "ppo/", "grad_norm", "reward")
    entries = [entry for entry in trainer.state.log_history if "klx/kl" in entry]
    return [{key: value for key, value in entry.items() if key.startswith(kept)} for entry in entries]
