"""The presets do what the formulas in their sources say, computed here with plain loops."""

from pathlib import Path

import pytest
import torch
import yaml
from trl import TrlParser

from support.oracle import sampled_logps
from support.tiny import build_model, build_trainer, recording
from trl_klx import KLXGRPOConfig, KLXGRPOTrainer


PRESETS = Path(__file__).parents[2] / "recipes" / "presets"
# Two micro-batches per generation batch, and a policy that leaves the one that sampled in the second pass.
RUN = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4, "learning_rate": 3e-2}


def settings(name: str) -> dict:
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text())


def run(name: str, tmp_path):
    trainer = build_trainer(recording(KLXGRPOTrainer), tmp_path, **RUN, **settings(name))
    trainer.train()
    return trainer


def log_ratios(trainer, loss) -> torch.Tensor:
    """Policy at generation minus reference, the initial policy."""
    policy = trainer.generated[loss["rollout"]]["policy"].eval()
    with torch.no_grad():
        return sampled_logps(policy, loss, 1.0) - sampled_logps(build_model().eval(), loss, 1.0)


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_preset_parses_and_names_its_source(path, tmp_path):
    flags = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False"]
    (config,) = TrlParser([KLXGRPOConfig]).parse_args_and_config(flags)
    for name, value in settings(path.stem).items():
        assert getattr(config, name) == value
    text = path.read_text()
    assert "https://" in text and "# Figures: " in text and f"--config recipes/presets/{path.name}" in text


def test_art(tmp_path):
    assert settings("art")["kl_penalty_coef"] == 1.0
    trainer = run("art", tmp_path)
    moved = 0.0
    for loss in trainer.losses:
        given = trainer.generated[loss["rollout"]]["advantages"]
        mask, ratios = loss["completion_mask"], log_ratios(trainer, loss)
        kl = ratios * mask
        average = kl.sum() / mask.sum()
        # The reward's advantage of each row, before the adjustment.
        expected = given[loss["row"]].unsqueeze(1) + 1.0 * (average - kl) * mask
        assert torch.allclose((loss["advantages"] * mask).double(), (expected * mask).double(), atol=1e-4)
        moved = max(moved, float(kl.abs().max()))
    assert moved > 0.01


def test_frpo(tmp_path):
    trainer = run("frpo", tmp_path)
    coef, moved = settings("frpo")["kl_penalty_coef"], 0.0
    for loss in trainer.losses:
        given = trainer.generated[loss["rollout"]]["advantages"]
        mask, ratios = loss["completion_mask"], log_ratios(trainer, loss)
        for row in range(len(mask)):
            length = int(mask[row].sum())
            for token in range(length):
                to_go = sum(float(ratios[row, later]) for later in range(token, length))
                expected = float(given[loss["row"][row]]) - coef * to_go
                assert float(loss["advantages"][row, token]) == pytest.approx(expected, abs=1e-4)
                moved = max(moved, abs(to_go))
    assert moved > 0.01


def test_deepseek(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, **RUN, **settings("deepseek_v3.2"))
    placement = trainer._klx_placement
    terms = []

    def keep(inputs, policy, coef, exact, inner=placement.loss_term):
        term = inner(inputs, policy, coef, exact)
        old = inputs.get("old_per_token_logps", policy.logps.detach())
        terms.append((term, policy.logps, old, inputs["klx_ref_logps"], inputs["completion_mask"].bool(), coef))
        return term

    placement.loss_term = keep
    trainer.train()
    off_policy = 0.0
    for term, logps, old, reference, mask, coef in terms:
        ratio, to_reference = (logps - old).exp(), reference - logps
        expected = coef * ratio * (to_reference.exp() - to_reference - 1)
        assert torch.allclose(term[mask], expected[mask], atol=1e-6)
        off_policy = max(off_policy, float((ratio[mask] - 1).abs().max()))
    assert off_policy > 0.01 and {coef for *_, coef in terms} == {0.05}


def test_distillation(tmp_path):
    preset = settings("distillation")
    assert (preset["kl_penalty_coef"], preset["kl_discount"], preset["kl_centering"]) == (1.0, 0.0, "none")
    teacher = build_model(seed=3)
    # TRL prepares the model that it is given, so the formula is computed with another copy.
    extras = {"ref_model": build_model(seed=3)}
    trainer = build_trainer(recording(KLXGRPOTrainer), tmp_path, rewards=None, extras=extras, **RUN, **preset)
    trainer.train()
    for loss in trainer.losses:
        policy = trainer.generated[loss["rollout"]]["policy"].eval()
        mask = loss["completion_mask"].bool()
        with torch.no_grad():
            reverse_kl = sampled_logps(policy, loss, 1.0) - sampled_logps(teacher.eval(), loss, 1.0)
        assert torch.allclose(loss["advantages"][mask].double(), -1.0 * reverse_kl[mask].double(), atol=1e-4)
        assert float(reverse_kl[mask].abs().max()) > 0.1


def falling_reward(completion_ids, trainer_state, **kwargs) -> list[float]:
    return [ids[0] / 32.0 - trainer_state.global_step for ids in completion_ids]


def test_prorl(tmp_path):
    preset = settings("prorl")
    assert (preset["epsilon"], preset["epsilon_high"]) == (0.2, 0.4)
    # A shorter patience: the reference is then the policy of step 2, and the optimizer has made one step since.
    preset |= {"kl_ref_reset_patience": 2}
    trainer = build_trainer(recording(KLXGRPOTrainer), tmp_path, rewards=falling_reward, **preset, max_steps=3)
    trainer.train()
    (policy,) = (rollout["policy"] for rollout in trainer.generated[2:])
    for name, weight in trainer.kl_reference.model.named_parameters():
        assert torch.equal(weight, dict(policy.named_parameters())[name])
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {1.0}
    assert trainer.kl_reference.resets == 1
