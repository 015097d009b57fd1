import copy
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOTrainer

from tiny import build_model, build_trainer, lora
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.adapters import REFERENCE_ADAPTER, hash_tensors
from trl_klx.moving import LaggedReference, SyncedReference
from trl_klx.references import fingerprint, saved_steps


PENALTY = {"kl_penalty_coef": 0.1}
# Large enough that a few steps tell one step's policy from the next, at any tolerance below.
FAST = {"learning_rate": 3e-2, "max_steps": 4}


# ---- Runs, and what is looked at in them ----


class Steps(TrainerCallback):
    """Keeps the policy's weights as they were after each step."""

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
    """Keeps the log-probs that the trainer uses for its reference, with the tokens that they belong to."""

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


class WatchedRLOOTrainer(Watched, KLXRLOOTrainer):
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
    """A policy that arrives with an adapter that was trained before."""
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
    """The log-probs that were used are those of `model`, wherever there is a token."""
    there = seen["mask"][:, -seen["keep"] :].bool()
    assert there.any()
    expected = logps_of(model, seen, temperature)
    torch.testing.assert_close(seen["logps"][there], expected[there], atol=1e-5, rtol=0)


def differ(one, other, seen: dict) -> bool:
    return (logps_of(one, seen) - logps_of(other, seen)).abs().max().item() > 1e-3


def rebuilt(trainer, step: int, **overrides):
    """The policy after a step, from its kept weights, on a model that the trainer has never seen."""
    model = build_model(**overrides)
    if isinstance(trainer.model, PeftModel):
        (name,) = trainer.model.active_adapters
        model = get_peft_model(model, copy.deepcopy(trainer.model.peft_config[name]), adapter_name=name)
    # A reference with targets of its own wraps more modules, which then have longer names.
    kept = {name.replace(".base_layer", ""): weight for name, weight in trainer.steps.after[step].items()}
    model.load_state_dict({name: kept[name.replace(".base_layer", "")] for name in model.state_dict()})
    return model


def reference_tensors(trainer) -> dict[str, torch.Tensor]:
    """Every weight that belongs to the reference alone."""
    reference = trainer.kl_reference
    with reference.active() as model:
        if model is trainer.model:
            return {n: p for n, p in model.named_parameters() if REFERENCE_ADAPTER in n.split(".")}
        return dict(model.named_parameters())


def saved_tensor_names(folder: Path) -> set[str]:
    return {name for file in Path(folder).rglob("*.safetensors") for name in load_file(file)}


@pytest.fixture(scope="module")
def adapter_path(tmp_path_factory) -> str:
    """An adapter with another rank and other targets than the policies here have."""
    folder = tmp_path_factory.mktemp("adapter")
    trained_policy(seed=5, r=6, target_modules=["k_proj", "down_proj", "q_proj"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Output folders of a LoRA run and of a full one, each with checkpoints 1 and 2."""
    found = {}
    for kind, settings in {"lora": {"peft": lora()}, "full": {}}.items():
        found[kind] = tmp_path_factory.mktemp(f"{kind}-run")
        run(found[kind], **settings, trainer_class=KLXGRPOTrainer, max_steps=2, save_strategy="steps", save_steps=1)
    return found


def borrowed(folder: Path, tmp_path: Path) -> Path:
    """The checkpoints of another run, in an output folder of one's own."""
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run"


# ---- Fixed references ----


def base_model(trainer, settings):
    return build_model()


def initial_policy(trainer, settings):
    return rebuilt(trainer, 0)


def adapter_at_path(trainer, settings):
    return PeftModel.from_pretrained(build_model(), settings["kl_ref_adapter_path"])


def adapter_checkpoint(trainer, settings):
    return PeftModel.from_pretrained(build_model(), Path(trainer.args.output_dir) / "checkpoint-2")


def full_checkpoint(trainer, settings):
    return Qwen2ForCausalLM.from_pretrained(Path(trainer.args.output_dir) / "checkpoint-2")


FIXED = {
    "new lora, base": ({"peft": lora}, {}, base_model),
    "new lora, step 0": ({"peft": lora}, {"kl_penalty_reference_step": 0}, base_model),
    "new lora, adapter": ({"peft": lora}, {"kl_ref_adapter_path": "adapter_path"}, adapter_at_path),
    "new lora, checkpoint": ({"peft": lora}, {"kl_penalty_reference_step": 2}, adapter_checkpoint),
    "trained lora, base": ({"model": trained_policy}, {}, base_model),
    "trained lora, step 0": ({"model": trained_policy}, {"kl_penalty_reference_step": 0}, initial_policy),
    "trained lora, adapter": ({"model": trained_policy}, {"kl_ref_adapter_path": "adapter_path"}, adapter_at_path),
    "trained lora, checkpoint": ({"model": trained_policy}, {"kl_penalty_reference_step": 2}, adapter_checkpoint),
    "full, unset": ({}, {}, base_model),
    "full, step 0": ({}, {"kl_penalty_reference_step": 0}, base_model),
    "full, checkpoint": ({}, {"kl_penalty_reference_step": 2}, full_checkpoint),
}


def settings_of(case: str, tmp_path, adapter_path, checkpoints) -> tuple[Path, dict, dict]:
    makers, fields, _ = FIXED[case]
    fields = PENALTY | fields
    if "kl_ref_adapter_path" in fields:
        fields["kl_ref_adapter_path"] = adapter_path
    output_dir = tmp_path / "run"
    if fields.get("kl_penalty_reference_step"):
        output_dir = borrowed(checkpoints["full" if case.startswith("full") else "lora"], tmp_path)
    return output_dir, {name: make() for name, make in makers.items()}, fields


@pytest.mark.parametrize("case", FIXED)
def test_fixed_reference(case, tmp_path, adapter_path, checkpoints):
    output_dir, models, fields = settings_of(case, tmp_path, adapter_path, checkpoints)
    trainer = run(output_dir, **models, **fields, train=False)
    before = {name: weight.clone() for name, weight in reference_tensors(trainer).items()}
    trainer.train()
    oracle = FIXED[case][2](trainer, fields)

    # The log-probs used are those of a model loaded without the package, and the policy has long gone elsewhere.
    assert [seen["step"] for seen in trainer.seen] == [0, 1, 2, 3]
    for seen in trainer.seen:
        assert_used(seen, oracle)
    assert differ(rebuilt(trainer, 4), oracle, trainer.seen[-1])

    # It is frozen.
    after = reference_tensors(trainer)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert not any(weight.requires_grad or weight.grad is not None for weight in after.values())
    optimized = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert optimized == {id(weight) for weight in trainer.model.parameters() if weight.requires_grad}
    assert not optimized & {id(weight) for weight in after.values()}

    # It is in no saved file.
    trainer.save_model(str(tmp_path / "saved"))
    assert not [path for path in (tmp_path / "saved").rglob("*") if "klx" in path.name]
    if "full" in case:
        assert saved_tensor_names(tmp_path / "saved") == set(build_model().state_dict())
        saved = Qwen2ForCausalLM.from_pretrained(tmp_path / "saved")
    else:
        names = {name for name in trainer.steps.after[0] if "lora_" in name}
        assert saved_tensor_names(tmp_path / "saved") == {name.replace(".default", "") for name in names}
        saved = PeftModel.from_pretrained(build_model(), tmp_path / "saved")
    last = trainer.seen[-1]
    torch.testing.assert_close(logps_of(saved, last), logps_of(rebuilt(trainer, 4), last), atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", ["new lora, base", "new lora, step 0", "full, unset", "trained lora, step 0"])
def test_kl_to_the_initial_policy_is_zero_at_the_first_batch(case, tmp_path, adapter_path, checkpoints):
    output_dir, models, fields = settings_of(case, tmp_path, adapter_path, checkpoints)
    trainer = run(output_dir, **models, **fields, max_steps=2)
    first, second = (entry for entry in trainer.state.log_history if "klx/kl" in entry)
    for name in ("klx/kl", "klx/kl_k1", "klx/kl_per_token"):
        assert abs(first[name]) <= 1e-6
    assert second["klx/kl"] > 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("peft", [None, lora()], ids=["full", "lora"])
def test_reference_is_measured_at_the_sampling_temperature(tmp_path, temperature, peft):
    trainer = run(tmp_path, peft=peft, **PENALTY, temperature=temperature, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, build_model(), temperature)


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
@pytest.mark.parametrize("trainer_class", [WatchedGRPOTrainer, WatchedRLOOTrainer])
def test_every_placement_uses_the_reference(tmp_path, adapter_path, placement, trainer_class):
    fields = PENALTY | {"kl_placement": placement, "kl_ref_adapter_path": adapter_path}
    trainer = run(tmp_path, peft=lora(), trainer_class=trainer_class, **fields, max_steps=2)
    assert len(trainer.seen) == 2
    for seen in trainer.seen:
        assert_used(seen, PeftModel.from_pretrained(build_model(), adapter_path))


def test_kl_monitor_measures_against_the_chosen_reference(tmp_path, adapter_path):
    trainer = run(tmp_path, peft=lora(), kl_monitor=True, kl_ref_adapter_path=adapter_path, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, PeftModel.from_pretrained(build_model(), adapter_path))
    assert trainer.state.log_history[0]["klx/kl"] > 0.1


def test_no_reference_while_kl_control_is_off(tmp_path):
    trainer = run(tmp_path, peft=lora(), max_steps=1)
    assert trainer.kl_reference is None and trainer.seen == []
    assert list(trainer.model.peft_config) == ["default"]


def test_dropout_does_not_reach_the_reference(tmp_path, adapter_path):
    peft = lora(lora_dropout=0.5)
    for fields in ({}, {"kl_ref_adapter_path": adapter_path}, {"kl_penalty_reference_step": 0}):
        # `Watched` also sees to it that no random number is drawn.
        trainer = run(tmp_path, peft=copy.deepcopy(peft), **PENALTY, **fields, disable_dropout=False, max_steps=2)
        oracle = (
            PeftModel.from_pretrained(build_model(), adapter_path)
            if "kl_ref_adapter_path" in fields
            else build_model()
        )
        for seen in trainer.seen:
            assert_used(seen, oracle)
        assert trainer.model.training


def test_adapter_with_modules_to_save(tmp_path):
    trained_policy(seed=5, modules_to_save=["norm"]).save_pretrained(tmp_path / "adapter")
    fields = PENALTY | {"kl_ref_adapter_path": str(tmp_path / "adapter")}
    trainer = run(tmp_path / "run", model=trained_policy(modules_to_save=["lm_head"]), **fields)
    for seen in trainer.seen:
        assert_used(seen, PeftModel.from_pretrained(build_model(), tmp_path / "adapter"))


def test_policy_whose_adapter_is_not_called_default(tmp_path):
    one = run(tmp_path, model=trained_policy(name="mine"), **PENALTY, save_strategy="steps", save_steps=2, max_steps=2)
    # PEFT puts such an adapter into a folder of its own.
    assert (tmp_path / "checkpoint-2" / "mine" / "adapter_model.safetensors").is_file()
    fields = PENALTY | {"kl_penalty_reference_step": 2}
    two = run(tmp_path, model=trained_policy(name="mine"), **fields, max_steps=2)
    for seen in two.seen:
        assert_used(seen, rebuilt(one, 2))


# ---- Moving references ----

MODELS = {
    "new lora": {"peft": lora},
    "trained lora": {"model": trained_policy},
    "full": {},
}


def made(kind: str) -> dict:
    return {name: make() for name, make in MODELS[kind].items()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_lag(tmp_path, kind, lag):
    trainer = run(tmp_path, **made(kind), **PENALTY, kl_ref_lag=lag, max_steps=5)
    assert [seen["step"] for seen in trainer.seen] == [0, 1, 2, 3, 4]
    for seen in trainer.seen:
        assert_used(seen, rebuilt(trainer, max(0, seen["step"] - lag)))
    # The steps lie far enough apart for the check above to tell them.
    for step in range(4):
        assert differ(rebuilt(trainer, step), rebuilt(trainer, step + 1), trainer.seen[-1])
    assert trainer.kl_reference.identity == {"kind": "lag", "lag": lag}
    # No more than the steps in between are kept.
    assert trainer.kl_reference.mover.kept_steps == list(range(6 - lag, 6))


def test_lag_counts_optimizer_steps_where_a_batch_serves_several(tmp_path):
    trainer = run(tmp_path, **PENALTY, kl_ref_lag=2, max_steps=6, num_iterations=2, steps_per_generation=1)
    assert [seen["step"] for seen in trainer.seen] == [0, 2, 4]
    for seen in trainer.seen:
        assert_used(seen, rebuilt(trainer, max(0, seen["step"] - 2)))


def test_lag_with_accumulated_gradients(tmp_path):
    trainer = run(tmp_path, **PENALTY, kl_ref_lag=1, max_steps=3, gradient_accumulation_steps=2)
    assert [seen["step"] for seen in trainer.seen] == [0, 1, 2]
    for seen in trainer.seen:
        assert_used(seen, rebuilt(trainer, max(0, seen["step"] - 1)))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("every", "alpha"), [(1, None), (2, None), (1, 0.3), (2, 0.5), (3, 1.0)])
def test_sync(tmp_path, kind, every, alpha):
    fields = {"kl_ref_sync_steps": every, "kl_ref_mixup_alpha": alpha}
    trainer = run(tmp_path, **made(kind), **PENALTY, **fields, max_steps=5)
    weight = 1.0 if alpha is None else alpha
    reference = trainer.steps.after[0]
    for step, seen in enumerate(trainer.seen):
        if step > 0 and step % every == 0:
            policy = trainer.steps.after[step]
            reference = {name: (1 - weight) * reference[name] + weight * policy[name] for name in reference}
        assert seen["step"] == step
        model = rebuilt(trainer, 0)
        model.load_state_dict(reference)
        assert_used(seen, model)
    assert differ(rebuilt(trainer, 0), rebuilt(trainer, 4), trainer.seen[-1])
    assert trainer.kl_reference.identity == {"kind": "sync", "sync_steps": every, "mixup_alpha": weight}


@pytest.mark.parametrize("fields", [{"kl_ref_lag": 1}, {"kl_ref_sync_steps": 1, "kl_ref_mixup_alpha": 0.3}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_moving_reference_is_not_trained_and_not_saved(tmp_path, kind, fields):
    trainer = run(tmp_path, **made(kind), **PENALTY, **fields, save_strategy="steps", save_steps=2)
    weights = reference_tensors(trainer)
    assert weights and not any(weight.requires_grad or weight.grad is not None for weight in weights.values())
    optimized = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert not optimized & {id(weight) for weight in weights.values()}
    folder = tmp_path / "checkpoint-2"
    own = load_file(folder / ("model.safetensors" if kind == "full" else "adapter_model.safetensors"))
    assert not [name for name in own if "klx" in name]
    assert not [path for path in folder.rglob("*") if path.is_dir()]


@pytest.mark.parametrize(
    "overrides",
    [{"modules_to_save": ["norm"]}, {"use_dora": True}, {"target_modules": ["embed_tokens", "v_proj"]}],
    ids=["modules_to_save", "dora", "embeddings"],
)
def test_moving_reference_of_other_adapters(tmp_path, overrides):
    trainer = run(tmp_path, model=trained_policy(**overrides), **PENALTY, kl_ref_lag=1, max_steps=3)
    for seen in trainer.seen:
        assert_used(seen, rebuilt(trainer, max(0, seen["step"] - 1)))


def weights_at(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 2), float(step)), "b": torch.full((3,), 10.0 * step)}


@pytest.mark.parametrize(
    "make",
    [lambda folder: LaggedReference(3, folder), lambda _: SyncedReference(2, 0.3), lambda _: SyncedReference(2)],
)
@pytest.mark.parametrize("stop", range(7))
def test_moving_reference_goes_on_from_its_state(make, stop, tmp_path):
    through, reference = make(tmp_path), weights_at(0)
    history = []
    for step in range(1, 9):
        if step == stop + 1:
            state = {name: weight.clone() for name, weight in through.state(reference).items()}
        through.step(step, weights_at(step), reference)
        history.append({name: weight.clone() for name, weight in reference.items()})
    again, resumed = make(tmp_path), weights_at(99)
    again.load_state(state, resumed)
    for step in range(stop + 1, 9):
        again.step(step, weights_at(step), resumed)
        assert all(torch.equal(resumed[name], history[step - 1][name]) for name in resumed)


def test_moving_reference_by_hand(tmp_path):
    lagged, reference = LaggedReference(2, tmp_path), weights_at(0)
    seen = []
    for step in range(1, 6):
        lagged.step(step, weights_at(step), reference)
        seen.append(reference["a"][0, 0].item())
    assert seen == [0, 0, 1, 2, 3]
    # ref = 0.75 ref + 0.25 policy at steps 2 and 4: 0.5, then 0.375 + 1 = 1.375
    synced, reference = SyncedReference(2, 0.25), weights_at(0)
    seen = []
    for step in range(1, 6):
        synced.step(step, weights_at(step), reference)
        seen.append(reference["a"][0, 0].item())
    assert seen == [0, 0.5, 0.5, 1.375, 1.375]


# ---- Loading a reference does not touch the run ----


def completions_of(output_dir, trainer_class=KLXGRPOTrainer, models=None, **fields) -> list[list[int]]:
    completions = []

    def reward(completion_ids, **kwargs):
        completions.extend(list(ids) for ids in completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    fields = FAST | {"learning_rate": 0.0, "max_steps": 3} | fields
    models = models or {}
    extras = {"peft_config": models["peft"]} if "peft" in models else {}
    trainer = build_trainer(
        trainer_class, output_dir, model=models.get("model"), rewards=reward, extras=extras, **fields
    )
    trainer.train()
    return completions


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> dict[str, list[list[int]]]:
    """What TRL's own trainer generates, for each kind of policy."""
    folder = tmp_path_factory.mktemp("rollouts")
    return {kind: completions_of(folder / kind, GRPOTrainer, made(kind)) for kind in MODELS}


@pytest.mark.parametrize("case", FIXED)
def test_loading_a_fixed_reference_does_not_change_the_rollouts(case, tmp_path, adapter_path, checkpoints, rollouts):
    output_dir, models, fields = settings_of(case, tmp_path, adapter_path, checkpoints)
    completions = completions_of(output_dir, models=models, **fields)
    assert len(completions) == 12 and completions == rollouts[case.split(",")[0]]


@pytest.mark.parametrize("fields", [{"kl_ref_lag": 1}, {"kl_ref_sync_steps": 1, "kl_ref_mixup_alpha": 0.3}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_loading_a_moving_reference_does_not_change_the_rollouts(kind, fields, tmp_path, rollouts):
    assert completions_of(tmp_path, models=made(kind), **PENALTY, **fields) == rollouts[kind]


# ---- References that are refused ----


def refusal(output_dir, *, model=None, peft=None, **fields) -> str:
    model = build_model() if model is None else model
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError) as caught:
        run(output_dir, model=model, peft=peft, train=False, **PENALTY, **fields)
    if peft is None:
        assert [name for name, _ in model.named_parameters()] == names
    return str(caught.value)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_step_that_was_never_saved(tmp_path, checkpoints, kind):
    output_dir = borrowed(checkpoints[kind], tmp_path)
    (output_dir / "checkpoint-11").mkdir()
    (output_dir / "checkpoint-x").mkdir()
    (output_dir / "checkpoint-7").write_text("a file")
    peft = lora() if kind == "lora" else None
    message = refusal(output_dir, peft=peft, kl_penalty_reference_step=7)
    assert message == (
        f"`kl_penalty_reference_step=7` was never saved: there is no `checkpoint-7` in {str(output_dir)!r}. Saved steps: "
        "1, 2, 11. Choose one of them, 0 for the initial policy, or leave the field unset."
    )


def test_step_when_nothing_was_saved(tmp_path):
    assert "Saved steps: none." in refusal(tmp_path / "nowhere", kl_penalty_reference_step=3)
    assert saved_steps(str(tmp_path / "nowhere")) == []


def test_full_policy_and_a_checkpoint_with_an_adapter(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["lora"], tmp_path)
    message = refusal(output_dir, kl_penalty_reference_step=2)
    assert f"Cannot use {str(output_dir / 'checkpoint-2')!r} as KL reference: it has no `model.safetensors`" in message
    assert "It holds an adapter, but the policy has none" in message


def test_adapter_policy_and_a_full_checkpoint(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    message = refusal(output_dir, peft=lora(), kl_penalty_reference_step=2)
    assert f"Cannot use the adapter at {str(output_dir / 'checkpoint-2')!r} as KL reference" in message
    assert "it has no `adapter_config.json`. It holds a full model." in message


def test_adapter_without_a_peft_model(tmp_path, adapter_path):
    message = refusal(tmp_path, kl_ref_adapter_path=adapter_path)
    assert f"`kl_ref_adapter_path={adapter_path!r}` needs a PEFT policy" in message
    assert "got Qwen2ForCausalLM" in message and "Pass a `peft_config` or a `PeftModel`" in message


def test_missing_adapter(tmp_path):
    message = refusal(tmp_path, peft=lora(), kl_ref_adapter_path=str(tmp_path / "nothing"))
    assert f"Cannot use the adapter at {str(tmp_path / 'nothing')!r} as KL reference" in message


def spoil(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = change(load_file(file))
    save_file(weights, file, metadata={"format": "pt"})


def drop(weights):
    return {name: weight for name, weight in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}


def add(weights):
    return weights | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}


def reshape(weights):
    return weights | {"model.norm.weight": torch.zeros(7)}


def nan(weights):
    weights["model.norm.weight"][3] = float("nan")
    return weights


def infinite(weights):
    weights["model.norm.weight"][3] = float("inf")
    return weights


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop, "'model.layers.1.mlp.up_proj.weight' is missing"),
        (add, "'model.layers.7.mlp.up_proj.weight' is missing, or has no place in the model"),
        (reshape, "its weights cannot be loaded"),
        (nan, "its weights hold NaN or infinite values"),
        (infinite, "its weights hold NaN or infinite values"),
    ],
)
def test_full_checkpoint_that_does_not_fit(tmp_path, checkpoints, change, reason):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    spoil(output_dir / "checkpoint-2", change)
    message = refusal(output_dir, kl_penalty_reference_step=2)
    assert message.startswith(f"Cannot use {str(output_dir / 'checkpoint-2')!r} as KL reference: ")
    assert reason in message


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_truncated_full_checkpoint(tmp_path, checkpoints, share):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    file = output_dir / "checkpoint-2" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    message = refusal(output_dir, kl_penalty_reference_step=2)
    assert f"Cannot use {str(output_dir / 'checkpoint-2')!r} as KL reference: its weights cannot be loaded" in message


def test_missing_shard(tmp_path, checkpoints):
    folder = shard(borrowed(checkpoints["full"], tmp_path) / "checkpoint-2")
    os.unlink(sorted(folder.glob("model-*.safetensors"))[1])
    message = refusal(folder.parent, kl_penalty_reference_step=2)
    assert message.startswith(f"Cannot use {str(folder)!r} as KL reference: its weights cannot be loaded")


def test_torn_adapter_checkpoint(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["lora"], tmp_path)
    file = output_dir / "checkpoint-2" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    message = refusal(output_dir, model=trained_policy(), kl_penalty_reference_step=2)
    assert "its `adapter_model.safetensors` cannot be read" in message


class Hostile:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_pickled_checkpoint_is_never_loaded(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    os.unlink(output_dir / "checkpoint-2" / "model.safetensors")
    marker = tmp_path / "ran"
    with open(output_dir / "checkpoint-2" / "pytorch_model.bin", "wb") as stream:
        pickle.dump(Hostile(marker), stream)
    assert "it has no `model.safetensors`" in refusal(output_dir, kl_penalty_reference_step=2)
    assert not marker.exists()


@pytest.mark.parametrize("fields", [{}, {"kl_penalty_reference_step": 0}, {"kl_ref_lag": 1}], ids=str)
def test_policy_that_trains_the_base_weights_which_the_reference_shares(tmp_path, fields):
    message = refusal(tmp_path, model=trained_policy(bias="all"), **fields)
    assert "The policy trains 'base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias'" in message
    assert "which the KL reference shares" in message and "`bias='none'`" in message
    thawed = trained_policy()
    thawed.get_base_model().lm_head.weight.requires_grad_(True)
    assert "The policy trains 'base_model.model.lm_head.weight'" in refusal(tmp_path, model=thawed, **fields)


def test_a_second_trainer_on_the_same_policy(tmp_path):
    policy = trained_policy()
    run(tmp_path, model=policy, **PENALTY, kl_penalty_reference_step=0, train=False)
    message = refusal(tmp_path, model=policy, kl_penalty_reference_step=0)
    assert "already has an adapter 'klx_ref'" in message and "delete_adapter('klx_ref')" in message


# ---- Full models of every kind ----


def shard(folder: Path) -> Path:
    Qwen2ForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def test_sharded_checkpoint(tmp_path, checkpoints):
    folder = shard(borrowed(checkpoints["full"], tmp_path) / "checkpoint-2")
    trainer = run(folder.parent, **PENALTY, kl_penalty_reference_step=2, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, Qwen2ForCausalLM.from_pretrained(checkpoints["full"] / "checkpoint-2"))


@pytest.mark.parametrize(
    "fields", [{}, {"kl_ref_lag": 1}, {"kl_ref_sync_steps": 1, "kl_ref_mixup_alpha": 0.3}], ids=str
)
def test_tied_embeddings(tmp_path, fields):
    tied = {"tie_word_embeddings": True}
    trainer = run(tmp_path, model=build_model(**tied), **PENALTY, **fields, max_steps=3)
    reference = trainer.steps.after[0]
    for step, seen in enumerate(trainer.seen):
        if "kl_ref_lag" in fields:
            reference = trainer.steps.after[max(0, step - 1)]
        elif fields and step > 0:
            reference = {name: 0.7 * reference[name] + 0.3 * trainer.steps.after[step][name] for name in reference}
        model = build_model(**tied)
        model.load_state_dict(reference)
        assert_used(seen, model)
    with trainer.kl_reference.active() as model:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_tied_embeddings_from_a_checkpoint(tmp_path):
    tied = {"tie_word_embeddings": True}
    one = run(tmp_path, model=build_model(**tied), **PENALTY, max_steps=2, save_strategy="steps", save_steps=2)
    assert "lm_head.weight" not in load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    fields = PENALTY | {"kl_penalty_reference_step": 2}
    trainer = run(tmp_path, model=build_model(**tied), **fields, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, rebuilt(one, 2, **tied))


def test_checkpoint_whose_names_are_not_those_of_the_modules(tmp_path):
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        num_local_experts=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, saved = MixtralForCausalLM(config), MixtralForCausalLM(config)
    saved.save_pretrained(tmp_path / "checkpoint-2")
    assert set(load_file(tmp_path / "checkpoint-2" / "model.safetensors")) != set(saved.state_dict())
    trainer = run(tmp_path, model=model, **PENALTY, kl_penalty_reference_step=2, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, saved)


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "model.layers.0"])
def test_policy_with_frozen_layers(tmp_path, frozen):
    model = build_model()
    model.get_submodule(frozen).requires_grad_(False)
    trainer = run(tmp_path, model=model, **PENALTY)
    for seen in trainer.seen:
        assert_used(seen, build_model())
    assert differ(rebuilt(trainer, 4), build_model(), trainer.seen[-1])


@torch.no_grad()
def scored(trainer, seen: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's log-probs through TRL's own method, and its logits by a plain forward pass."""
    with trainer.kl_reference.active() as model:
        logps = trainer._get_per_token_logps_and_entropies(model, seen["ids"], seen["mask"], seen["keep"])[0]
        return logps, model(input_ids=seen["ids"], attention_mask=seen["mask"]).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("fields", [{}, {"kl_penalty_reference_step": 2}], ids=["initial", "checkpoint"])
def test_fp32_lm_head_does_not_tie_the_reference_to_the_policy(tmp_path, tied, fields):
    # TRL makes the head's forward a closure over the policy's head.
    settings = {"cast_lm_head_to_fp32": True, "learning_rate": 0.3} | PENALTY
    model = {"tie_word_embeddings": tied}
    if fields:
        first = build_model(**model).to(torch.bfloat16)
        run(tmp_path, model=first, **settings, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = run(tmp_path, model=build_model(**model).to(torch.bfloat16), **settings, **fields, train=False)
    seen = {"ids": torch.arange(4, 28).reshape(2, 12), "mask": torch.ones(2, 12, dtype=torch.long), "keep": 6}
    before = scored(trainer, seen)
    policy = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    after = scored(trainer, seen)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    moved = [(new - old).abs().max() for new, old in zip(trainer.model.parameters(), policy, strict=True)]
    assert min(moved) > 0.01

    # The same as a copy that no trainer has ever touched.
    if fields:
        untouched = Qwen2ForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
        weights = {
            n: w.bfloat16() if "lm_head" not in n and not tied else w for n, w in untouched.state_dict().items()
        }
        untouched = build_model(**model).to(torch.bfloat16)
        head = weights["lm_head.weight"].float()
        untouched.load_state_dict(weights)
    else:
        untouched = build_model(**model).to(torch.bfloat16)
        head = untouched.lm_head.weight.float()
    with torch.no_grad():
        hidden = untouched.model(input_ids=seen["ids"], attention_mask=seen["mask"]).last_hidden_state
        logits = hidden.float() @ head.T
    torch.testing.assert_close(after[1], logits, atol=1e-5, rtol=0)
    logps = torch.log_softmax(logits, dim=-1)[:, :-1].gather(2, seen["ids"][:, 1:, None]).squeeze(2)[:, -6:]
    torch.testing.assert_close(after[0], logps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_plain_forward_pass_through_the_reference_is_the_references(tmp_path, kind):
    # TRL's patched forward falls back on a bound method of the model it was made for.
    trainer = run(tmp_path, **made(kind), **PENALTY)
    seen = trainer.seen[-1]
    with trainer.kl_reference.active() as model, torch.no_grad():
        logits = model(input_ids=seen["ids"], attention_mask=seen["mask"]).logits
    with torch.no_grad():
        expected = build_model().eval()(input_ids=seen["ids"], attention_mask=seen["mask"]).logits
    there = seen["mask"].bool()
    torch.testing.assert_close(logits[there], expected[there], atol=1e-4, rtol=0)


def test_reference_keeps_the_policy_in_training_mode_and_the_adapter_active(tmp_path):
    trainer = run(tmp_path, peft=lora(), **PENALTY, kl_penalty_reference_step=0, train=False)
    trainer.model.train()
    with pytest.raises(KeyError), trainer.kl_reference.active() as model:
        assert not model.training and model.active_adapters == [REFERENCE_ADAPTER]
        raise KeyError("in the middle of it")
    assert all(module.training for module in trainer.model.modules())
    assert trainer.model.active_adapters == ["default"]


# ---- Identity ----


def identity(tmp_path, **settings) -> dict:
    trainer = run(tmp_path, **settings, **PENALTY, train=False)
    assert json.loads(json.dumps(trainer.kl_reference.identity)) == trainer.kl_reference.identity
    return trainer.kl_reference.identity


def test_fingerprint_tells_models_apart():
    assert fingerprint(build_model()) == fingerprint(build_model()) == fingerprint(copy.deepcopy(build_model()))
    assert fingerprint(build_model(0)) != fingerprint(build_model(1))
    assert fingerprint(build_model()) != fingerprint(build_model(num_hidden_layers=1))
    # One step of training is another model, in whichever weight it was.
    prints = set()
    for name, _ in build_model().named_parameters():
        model = build_model()
        with torch.no_grad():
            model.get_parameter(name).add_(1e-4)
        prints.add(fingerprint(model))
    assert len(prints | {fingerprint(build_model())}) == len(list(build_model().parameters())) + 1


def test_fingerprint_is_that_of_a_sample():
    large = torch.nn.Linear(1000, 1000, bias=False)
    one = fingerprint(large)
    with torch.no_grad():
        large.weight[0, 0] += 1.0
    assert fingerprint(large) != one


def test_identity_of_the_base_model_does_not_depend_on_the_adapter(tmp_path):
    identities = [
        identity(tmp_path, peft=lora()),
        identity(tmp_path, peft=lora(init_lora_weights="gaussian")),
        identity(tmp_path, model=trained_policy()),
    ]
    assert identities[0] == identities[1] == identities[2]
    assert identities[0]["kind"] == "base"
    assert identity(tmp_path, model=build_model(1), peft=lora())["hash"] != identities[0]["hash"]


def test_identity_of_the_other_references(tmp_path, adapter_path, checkpoints):
    policy = trained_policy()
    first = identity(tmp_path, model=policy, kl_penalty_reference_step=0)
    assert (first["kind"], first["step"]) == ("step", 0)
    assert first == identity(tmp_path, model=trained_policy(), kl_penalty_reference_step=0)
    assert first != identity(tmp_path, model=trained_policy(seed=4), kl_penalty_reference_step=0)

    at_path = identity(tmp_path, peft=lora(), kl_ref_adapter_path=adapter_path)
    assert (at_path["kind"], at_path["path"]) == ("adapter", adapter_path)
    assert at_path["hash"] == hash_tensors(load_file(Path(adapter_path) / "adapter_model.safetensors"))

    for kind, models in (("lora", {"peft": lora()}), ("full", {})):
        output_dir = borrowed(checkpoints[kind], tmp_path / kind)
        one, two = (identity(output_dir, **copy.deepcopy(models), kl_penalty_reference_step=step) for step in (1, 2))
        assert (one["kind"], one["step"], two["step"]) == ("step", 1, 2) and one["hash"] != two["hash"]

    # In full fine-tuning the initial policy is the default.
    assert identity(tmp_path) == identity(tmp_path, kl_penalty_reference_step=0)
