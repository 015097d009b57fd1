"""What KL control costs, counted in rows that pass through the models, not in time."""

import collections
import functools
import tempfile

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from support.forward_counts import backbone, count_rows, who
from support.tiny import build_dataset, build_trainer, lora, scripted_rollout, trained_lora
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer
from trl_klx.control.exact_kl import lm_head
from trl_klx.trainers import forward_passes


pytestmark = pytest.mark.slow


STEPS = 4
PAIRS = {"grpo": (GRPOTrainer, KLXGRPOTrainer), "rloo": (RLOOTrainer, KLXRLOOTrainer)}
ONE = {}
ACCUMULATED = {"gradient_accumulation_steps": 2}
# TRL scores the policy at generation whenever it uses a batch for more than one optimizer step.
TWICE = {"num_iterations": 2}
REUSED = {"steps_per_generation": 2}


def run(trainer_class, output_dir, **settings):
    # Scripted rollouts where TRL allows them, so that no forward pass comes from generation.
    if issubclass(trainer_class, GRPOTrainer):
        settings["extras"] = {"rollout_func": scripted_rollout} | settings.get("extras", {})
    trainer = build_trainer(trainer_class, output_dir, max_steps=STEPS, **settings)
    generation_batches = []
    inner = trainer._generate_and_score_completions

    def generate(inputs):
        batch = inner(inputs)
        generation_batches.append(batch["completion_ids"].size(0))
        return batch

    trainer._generate_and_score_completions = generate
    rows = count_rows(trainer)
    trainer.train()
    return rows, generation_batches


@functools.cache
def run_of_trl(algorithm, adapter, batching, dropout=0.0):
    """The counts of TRL's trainer. One run serves several tests."""
    extras = {"peft_config": lora(lora_dropout=dropout)} if adapter == "lora" else {}
    with tempfile.TemporaryDirectory() as folder:
        return run(PAIRS[algorithm][0], folder, beta=0.0, extras=extras, **dict(batching))


def check(algorithm, tmp_path, extra, batching, adapter="lora", dropout=0.0, **fields) -> None:
    """One reference pass per generation batch, and `extra` passes of the policy beyond TRL's own."""
    klx_class = PAIRS[algorithm][1]
    extras = {"peft_config": lora(lora_dropout=dropout)} if adapter == "lora" else {}
    theirs, batches = run_of_trl(algorithm, adapter, tuple(batching.items()), dropout)
    ours, same = run(klx_class, tmp_path, extras=extras, **({"beta": 0.0} | batching | fields))
    assert batches == same and batches
    assert theirs["policy"] >= STEPS * 4 and theirs["reference"] == 0
    assert ours["reference"] == sum(batches)
    assert ours["policy"] - theirs["policy"] == extra * sum(batches)


@pytest.mark.parametrize("batching", [ONE, TWICE, REUSED], ids=["one", "twice", "reused"])
@pytest.mark.parametrize("centering", ["batch", "microbatch", "group", "sequence", "none"])
@pytest.mark.parametrize("algorithm", PAIRS)
def test_advantages_cost_no_policy_pass(algorithm, centering, batching, tmp_path):
    check(algorithm, tmp_path, 0, batching, kl_penalty_coef=0.1, kl_centering=centering)


@pytest.mark.parametrize(
    ("centering", "extra"), [("batch", 1), ("group", 1), ("microbatch", 0), ("sequence", 0), ("none", 0)]
)
def test_advantages_over_several_micro_batches(centering, extra, tmp_path):
    check("grpo", tmp_path, extra, ACCUMULATED, kl_penalty_coef=0.1, kl_centering=centering)


@pytest.mark.parametrize("centering", ["batch", "microbatch", "group", "sequence", "none"])
def test_rloo_has_the_log_probs_anyway(centering, tmp_path):
    check("rloo", tmp_path, 0, ACCUMULATED, kl_penalty_coef=0.1, kl_centering=centering)


@pytest.mark.parametrize("batching", [ONE, ACCUMULATED, TWICE, REUSED], ids=["one", "accumulated", "twice", "reused"])
@pytest.mark.parametrize("algorithm", PAIRS)
def test_loss_placement_costs_no_policy_pass(algorithm, batching, tmp_path):
    check(algorithm, tmp_path, 0, batching, kl_penalty_coef=0.1, kl_placement="loss")


@pytest.mark.parametrize(
    ("batching", "extra"),
    [(ONE, 1), (ACCUMULATED, 1), (TWICE, 0), (REUSED, 0)],
    ids=["one", "accumulated", "twice", "reused"],
)
def test_reward_placement_of_grpo(batching, extra, tmp_path):
    # TRL computes the advantages before the loss, so the penalty cannot use the loss's own pass.
    check("grpo", tmp_path, extra, batching, kl_penalty_coef=0.1, kl_placement="reward")


def test_reward_placement_of_rloo(tmp_path):
    check("rloo", tmp_path, 0, ACCUMULATED, kl_penalty_coef=0.1, kl_placement="reward")


@pytest.mark.parametrize("batching", [ONE, ACCUMULATED], ids=["one", "accumulated"])
@pytest.mark.parametrize("algorithm", PAIRS)
def test_monitor_costs_no_policy_pass(algorithm, batching, tmp_path):
    check(algorithm, tmp_path, 0, batching, kl_monitor=True)


KINDS = {
    "batch": {"kl_penalty_coef": 0.1},
    "microbatch": {"kl_penalty_coef": 0.1, "kl_centering": "microbatch"},
    "reward": {"kl_penalty_coef": 0.1, "kl_placement": "reward"},
    "loss": {"kl_penalty_coef": 0.1, "kl_placement": "loss"},
    "full": {"kl_penalty_coef": 0.1, "kl_statistic": "full"},
    "monitor": {"kl_monitor": True},
}


@pytest.mark.parametrize("batching", [ONE, ACCUMULATED, TWICE, REUSED], ids=["one", "accumulated", "twice", "reused"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", PAIRS)
def test_dropout_costs_one_policy_pass(algorithm, kind, batching, tmp_path):
    # Once per generation batch without dropout, whatever TRL has scored with dropout.
    check(algorithm, tmp_path, 1, batching, dropout=0.1, **KINDS[kind])


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "microbatch"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_dropout_costs_ppo_one_policy_pass(epochs, kind, tmp_path):
    counted = []
    for dropout in (0.0, 0.1):
        fields = {"num_generations": 1, "num_ppo_epochs": epochs, "disable_dropout": False, "kl_penalty_coef": 0.0}
        extras = {"rollout_func": scripted_rollout, "peft_config": lora(lora_dropout=dropout)}
        counted.append(run(KLXPPOTrainer, tmp_path, extras=extras, **(fields | KINDS[kind])))
    (without, batches), (with_it, same) = counted
    assert batches == same and batches
    assert with_it["reference"] == without["reference"] == sum(batches)
    assert with_it["policy"] - without["policy"] == sum(batches)


def test_dropout_without_kl_control_costs_nothing(tmp_path):
    theirs, batches = run_of_trl("grpo", "lora", tuple(ACCUMULATED.items()), 0.1)
    extras = {"peft_config": lora(lora_dropout=0.1)}
    assert run(KLXGRPOTrainer, tmp_path, extras=extras, **ACCUMULATED) == (theirs, batches)


@pytest.mark.parametrize(("batching", "extra"), [(ONE, 0), (ACCUMULATED, 1)], ids=["one", "accumulated"])
@pytest.mark.parametrize(
    "fields",
    [{"kl_penalty_reference_step": 0}, {"kl_ref_lag": 1}, {"kl_ref_sync_steps": 2}, {"kl_statistic": "full"}],
    ids=["step", "lag", "sync", "full"],
)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_every_reference_costs_one_pass(adapter, fields, batching, extra, tmp_path):
    check("grpo", tmp_path, extra, batching, adapter, kl_penalty_coef=0.1, **fields)


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("algorithm", PAIRS)
def test_switched_off_costs_nothing(algorithm, adapter, tmp_path):
    klx_class = PAIRS[algorithm][1]
    extras = {"peft_config": lora()} if adapter == "lora" else {}
    theirs, batches = run_of_trl(algorithm, adapter, tuple(ACCUMULATED.items()))
    ours, same = run(klx_class, tmp_path, beta=0.0, extras=extras, **ACCUMULATED)
    assert ours == theirs and batches == same
    assert ours["reference"] == 0


def test_no_gradient_is_kept_for_the_reference(tmp_path):
    # Our additional passes build no graph: the loss needs every forward pass with gradients.
    trainer = build_trainer(
        KLXGRPOTrainer,
        tmp_path,
        model=trained_lora(1),
        kl_penalty_coef=0.1,
        extras={"rollout_func": scripted_rollout},
        **ACCUMULATED,
    )
    grads = collections.Counter()
    hook = lambda module, args, kwargs: grads.update([(who(trainer.model), torch.is_grad_enabled())])  # noqa: E731
    backbone(trainer.model).register_forward_pre_hook(hook, with_kwargs=True)
    trainer.train()
    # 3 steps of 2 micro-batches. The extra policy pass and the reference pass run one micro-batch at a time.
    assert grads == {("policy", True): 6, ("policy", False): 6, ("reference", False): 6}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_evaluation_costs_one_reference_pass(dropout, tmp_path):
    # Evaluation has no dropout to avoid.
    trainer = build_trainer(
        KLXGRPOTrainer,
        tmp_path,
        model=trained_lora(1, lora_dropout=dropout),
        kl_penalty_coef=0.1,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        extras={"rollout_func": scripted_rollout, "eval_dataset": build_dataset(4)},
    )
    rows = count_rows(trainer)
    trainer.evaluate()
    assert rows == {"policy": 8, "reference": 8}


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("centering", ["batch", "sequence"])
def test_lm_heads_are_joined_once_per_generation_batch(adapter, centering, tmp_path, monkeypatch):
    joined = []

    def count(model, temperature, copied=False):
        joined.append(model)
        return lm_head(model, temperature, copied)

    extras = {"peft_config": lora()} if adapter == "lora" else {}
    settings = {"kl_target": 1.0, "kl_statistic": "full", "kl_centering": centering, "extras": extras}
    monkeypatch.setattr(forward_passes, "lm_head", count)
    _, batches = run(KLXGRPOTrainer, tmp_path, **ACCUMULATED, **settings)
    # Measured per micro-batch, a head that is trained is another one for each.
    policy = ACCUMULATED["gradient_accumulation_steps"] if adapter == "full" and centering == "sequence" else 1
    assert len(joined) == len(batches) * (policy + 1)
