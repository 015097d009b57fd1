"""Runs whose references the tests inspect."""

import copy
import shutil
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from transformers import TrainerCallback

from support.tiny import build_model, build_trainer, lora
from trl_klx import KLXGRPOTrainer


PENALTY = {"kl_penalty_coef": 0.1}
# Large enough to tell one step's policy from the next at every tolerance below.
FAST = {"learning_rate": 3e-2, "max_steps": 4}


class Steps(TrainerCallback):
    """Keeps the policy's weights after each step."""

    def __init__(self):
        self.after: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, state, model):
        weights = model.state_dict().items()
        self.after[state.global_step] = {name: weight.clone() for name, weight in weights if "klx_ref" not in name}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.keep(state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.keep(state, model)


class Watched:
    """Keeps the reference log-probs that the trainer uses, with their tokens."""

    def __init__(self, *args, **kwargs):
        self.seen: list[dict] = []
        super().__init__(*args, **kwargs)

    def _klx_score_reference(self, args, kwargs):
        rng = torch.get_rng_state()
        scored = super()._klx_score_reference(args, kwargs)
        assert torch.equal(torch.get_rng_state(), rng)
        self.seen.append(
            {
                "step": self.state.global_step,
                "ids": args[0].clone(),
                "mask": args[1].clone(),
                "keep": args[2],
                "logps": scored.logps.clone(),
            }
        )
        return scored


class WatchedGRPOTrainer(Watched, KLXGRPOTrainer):
    pass


def run(output_dir, *, model=None, peft=None, trainer_class=WatchedGRPOTrainer, train=True, **fields):
    steps = Steps()
    extras = {"callbacks": [steps]} | ({} if peft is None else {"peft_config": peft})
    trainer = build_trainer(trainer_class, output_dir, model=model, extras=extras, **(FAST | fields))
    trainer.steps = steps
    if train:
        trainer.train()
    return trainer


def trained_policy(seed: int = 3, name: str = "default", model=None, **overrides) -> PeftModel:
    """A policy that comes with a trained adapter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = get_peft_model(build_model() if model is None else model, lora(**overrides), adapter_name=name)
        with torch.no_grad():
            for weight in policy.parameters():
                if weight.requires_grad:
                    weight.add_(0.2 * torch.randn_like(weight))
    return policy


@torch.no_grad()
def logps_of(model, seen: dict, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the completion tokens by a plain forward pass."""
    logits = model.eval()(input_ids=seen["ids"], attention_mask=seen["mask"]).logits.float() / temperature
    logps = torch.log_softmax(logits, dim=-1)[:, :-1].gather(2, seen["ids"][:, 1:].unsqueeze(2)).squeeze(2)
    return logps[:, -seen["keep"] :]


def assert_used(seen: dict, model, temperature: float = 1.0) -> None:
    """The log-probs that were used match those of `model` at every real token."""
    there = seen["mask"][:, -seen["keep"] :].bool()
    assert there.any()
    expected = logps_of(model, seen, temperature)
    torch.testing.assert_close(seen["logps"][there], expected[there], atol=1e-5, rtol=0)


def differ(one, other, seen: dict) -> bool:
    return (logps_of(one, seen) - logps_of(other, seen)).abs().max().item() > 1e-3


def rebuilt(trainer, step: int, **overrides):
    """The policy after a step, rebuilt from its kept weights on a model that the trainer has never seen."""
    model = build_model(**overrides)
    if isinstance(trainer.model, PeftModel):
        (name,) = trainer.model.active_adapters
        model = get_peft_model(model, copy.deepcopy(trainer.model.peft_config[name]), adapter_name=name)
    # A reference with its own targets wraps more modules, which then have longer names.
    kept = {name.replace(".base_layer", ""): weight for name, weight in trainer.steps.after[step].items()}
    model.load_state_dict({name: kept[name.replace(".base_layer", "")] for name in model.state_dict()})
    return model


def save_adapter(folder: Path) -> str:
    """An adapter whose rank and targets differ from those of the policies in these tests."""
    trained_policy(seed=5, r=6, target_modules=["k_proj", "down_proj", "q_proj"]).save_pretrained(folder)
    return str(folder)


def save_checkpoints(folder: Path) -> dict[str, Path]:
    """Output folders of a LoRA run and of a full one, each with checkpoints 1 and 2."""
    found = {kind: folder / kind for kind in ("lora", "full")}
    for kind, settings in {"lora": {"peft": lora()}, "full": {}}.items():
        run(found[kind], **settings, trainer_class=KLXGRPOTrainer, max_steps=2, save_strategy="steps", save_steps=1)
    return found


def borrowed(folder: Path, tmp_path: Path) -> Path:
    """Copy the checkpoints of another run into a new output folder."""
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run"


MODELS = {
    "new lora": {"peft": lora},
    "trained lora": {"model": trained_policy},
    "full": {},
}


def made(kind: str) -> dict:
    return {name: make() for name, make in MODELS[kind].items()}


@torch.no_grad()
def scored(trainer, seen: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's log-probs through TRL's own method, and its logits by a plain forward pass."""
    with trainer.kl_reference.active() as model:
        logps = trainer._get_per_token_logps_and_entropies(model, seen["ids"], seen["mask"], seen["keep"])[0]
        return logps, model(input_ids=seen["ids"], attention_mask=seen["mask"]).logits
