import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM
from trl import GRPOTrainer

from support.reference_checks import (
    FAST,
    MODELS,
    PENALTY,
    Watched,
    WatchedGRPOTrainer,
    assert_used,
    borrowed,
    differ,
    logps_of,
    made,
    rebuilt,
    run,
    save_adapter,
    save_checkpoints,
    trained_policy,
)
from support.tiny import build_model, build_trainer, lora
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.references.adapter_loading import REFERENCE_ADAPTER
from trl_klx.references.moving import LaggedReference, SyncedReference


# ---- Runs, and what is inspected in them ----


class WatchedRLOOTrainer(Watched, KLXRLOOTrainer):
    pass


def reference_tensors(trainer) -> dict[str, torch.Tensor]:
    """Every weight that belongs only to the reference."""
    reference = trainer.kl_reference
    with reference.active() as model:
        if model is trainer.model:
            return {n: p for n, p in model.named_parameters() if REFERENCE_ADAPTER in n.split(".")}
        return dict(model.named_parameters())


def saved_tensor_names(folder: Path) -> set[str]:
    return {name for file in Path(folder).rglob("*.safetensors") for name in load_file(file)}


@pytest.fixture(scope="module")
def adapter_path(tmp_path_factory) -> str:
    return save_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return save_checkpoints(tmp_path_factory.mktemp("checkpoints"))


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


INITIAL_POLICY = {"new lora, base", "new lora, step 0", "full, unset", "full, step 0", "trained lora, step 0"}


@pytest.mark.parametrize("case", FIXED)
def test_fixed_reference(case, tmp_path, adapter_path, checkpoints):
    output_dir, models, fields = settings_of(case, tmp_path, adapter_path, checkpoints)
    trainer = run(output_dir, **models, **fields, train=False)
    before = {name: weight.clone() for name, weight in reference_tensors(trainer).items()}
    trainer.train()
    oracle = FIXED[case][2](trainer, fields)

    # The log-probs match a model loaded without the package, while the policy has moved away.
    assert [seen["step"] for seen in trainer.seen] == [0, 1, 2, 3]
    for seen in trainer.seen:
        assert_used(seen, oracle)
    assert differ(rebuilt(trainer, 4), oracle, trainer.seen[-1])
    first, second = (entry for entry in trainer.state.log_history[:2] if "klx/kl" in entry)
    for name in ("klx/kl", "klx/kl_k1", "klx/kl_per_token"):
        assert (abs(first[name]) <= 1e-6) == (case in INITIAL_POLICY), name
    assert second["klx/kl"] > 1e-4

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
        # `Watched` also checks that no random number is drawn.
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
    # PEFT saves such an adapter in its own folder.
    assert (tmp_path / "checkpoint-2" / "mine" / "adapter_model.safetensors").is_file()
    fields = PENALTY | {"kl_penalty_reference_step": 2}
    two = run(tmp_path, model=trained_policy(name="mine"), **fields, max_steps=2)
    for seen in two.seen:
        assert_used(seen, rebuilt(one, 2))


# ---- Moving references ----


SAVED = {"save_strategy": "steps", "save_steps": 2}


def check_neither_trained_nor_saved(trainer, kind: str) -> None:
    """The weights of a moving reference are neither in the optimizer nor among the policy's in a checkpoint."""
    weights = reference_tensors(trainer)
    assert weights and not any(weight.requires_grad or weight.grad is not None for weight in weights.values())
    optimized = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert not optimized & {id(weight) for weight in weights.values()}
    folder = Path(trainer.args.output_dir) / "checkpoint-2"
    own = load_file(folder / ("model.safetensors" if kind == "full" else "adapter_model.safetensors"))
    assert not [name for name in own if "klx" in name]
    assert not [path for path in folder.rglob("*") if path.is_dir()]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_lag(tmp_path, kind, lag):
    trainer = run(tmp_path, **made(kind), **PENALTY, kl_ref_lag=lag, max_steps=5, **(SAVED if lag == 1 else {}))
    assert [seen["step"] for seen in trainer.seen] == [0, 1, 2, 3, 4]
    for seen in trainer.seen:
        assert_used(seen, rebuilt(trainer, max(0, seen["step"] - lag)))
    # The steps are far enough apart for the check above to tell them apart.
    for step in range(4):
        assert differ(rebuilt(trainer, step), rebuilt(trainer, step + 1), trainer.seen[-1])
    assert trainer.kl_reference.identity == {"kind": "lag", "lag": lag}
    # Only the steps in between are kept.
    assert trainer.kl_reference.mover.kept_steps == list(range(6 - lag, 6))
    if lag == 1:
        check_neither_trained_nor_saved(trainer, kind)


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
    fields = {"kl_ref_sync_steps": every, "kl_ref_mixup_alpha": alpha} | (SAVED if alpha == 0.3 else {})
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
    if alpha == 0.3:
        check_neither_trained_nor_saved(trainer, kind)


class HeadWatchingTrainer(KLXGRPOTrainer):
    """Compares the reference's head in each loss with the one that the reference had when the rollout was made."""

    def _generate_and_score_completions(self, inputs):
        self.head_of_rollout = self.kl_reference.model.lm_head.weight.detach().clone()
        return super()._generate_and_score_completions(inputs)

    def _klx_exact_kl(self, inputs, rollout, policy, reference):
        exact = super()._klx_exact_kl(inputs, rollout, policy, reference)
        logits = torch.nn.functional.linear(reference.hidden, self.head_of_rollout) / self.temperature
        moved = not torch.equal(self.kl_reference.model.lm_head.weight, self.head_of_rollout)
        self.compared.append((torch.equal(rollout.reference_head(reference.hidden), logits), moved))
        return exact


@pytest.mark.parametrize("fields", [{"kl_ref_lag": 1}, {"kl_ref_sync_steps": 1, "kl_ref_mixup_alpha": 0.3}], ids=str)
def test_the_head_of_a_moving_reference_stays_with_its_hidden_states(fields, tmp_path):
    exact = {"kl_penalty_coef": 0.5, "kl_placement": "loss", "kl_estimator": "full"}
    trainer = build_trainer(HeadWatchingTrainer, tmp_path, num_iterations=3, max_steps=6, **exact, **fields)
    trainer.compared = []
    trainer.train()
    same, moved = zip(*trainer.compared, strict=True)
    assert all(same) and any(moved)


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
    """The completions of TRL's own trainer for each kind of policy."""
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
