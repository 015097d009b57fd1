"""With default fields, and while it only measures, a KLX trainer equals its TRL parent to the bit."""

import functools

import pytest
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from support.tiny import RUN, assert_same_weights, build_model, history, logged, lora, train, weights
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


PAIRS = {"grpo": (GRPOTrainer, KLXGRPOTrainer), "rloo": (RLOOTrainer, KLXRLOOTrainer)}
# Defaults of TRL's configs, written out only so that runs can be shared.
DEFAULT_BETA = {name: {"beta": config(**RUN).beta} for name, config in (("grpo", GRPOConfig), ("rloo", RLOOConfig))}
# The generation batch in one micro-batch, split for accumulation, and used for two optimizer steps.
BATCHINGS = {
    "one": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "reused": {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A saved model. For full fine-tuning, TRL loads the reference from the policy's path."""
    path = tmp_path_factory.mktemp("model")
    build_model().save_pretrained(path)
    return str(path)


@functools.cache
def run_of_trl(algorithm, adapter, batching, model_path, beta=None):
    """The logs and weights of TRL's trainer. One run serves several tests."""
    fields = settings(adapter, model_path, **BATCHINGS[batching]) | ({} if beta is None else {"beta": beta})
    trainer = train(PAIRS[algorithm][0], model_path + "-run", **fields)
    return history(trainer), weights(trainer)


def settings(adapter, model_path, **fields):
    extras = {"peft_config": lora()} if adapter == "lora" else {}
    return {"model": model_path, "extras": extras, "max_steps": 5, **fields}


def assert_same_run(theirs, ours):
    their_history, their_weights = theirs
    assert history(ours, drop="klx/") == their_history
    assert len(logged(ours, "loss")) == 5
    assert_same_weights(their_weights, weights(ours))


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("algorithm", PAIRS)
def test_defaults_equal_trl(algorithm, adapter, batching, model_path, tmp_path):
    ours = train(PAIRS[algorithm][1], tmp_path, **settings(adapter, model_path, **BATCHINGS[batching]))
    # GRPO has no KL term by default, RLOO has one.
    theirs = run_of_trl(algorithm, adapter, batching, model_path, **DEFAULT_BETA[algorithm])
    assert_same_run(theirs, ours)
    assert not any(key.startswith("klx/") for entry in ours.state.log_history for key in entry)
    assert ours.kl_controller is None and ours.kl_reference is None


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("algorithm", PAIRS)
def test_monitor_only_measures(algorithm, adapter, batching, model_path, tmp_path):
    fields = settings(adapter, model_path, beta=0.0, **BATCHINGS[batching])
    ours = train(PAIRS[algorithm][1], tmp_path, kl_monitor=True, **fields)
    assert_same_run(run_of_trl(algorithm, adapter, batching, model_path, beta=0.0), ours)
    kl = logged(ours, "klx/kl")
    assert kl[0] == 0.0 and all(value > 1e-4 for value in kl[1:])


# TRL's own KL, with its own reference, is the same quantity: k3 per token in GRPO's loss, k1 per token in RLOO's
# reward. GRPO logs a mean of micro-batch means, so only a single micro-batch can be compared.
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize(
    ("algorithm", "metric", "batching"),
    [("grpo", "klx/kl", "one"), ("rloo", "klx/kl_k1", "one"), ("rloo", "klx/kl_k1", "accumulated")],
)
def test_monitor_beside_the_kl_of_trl(algorithm, metric, adapter, batching, model_path, tmp_path):
    fields = settings(adapter, model_path, beta=0.05, **BATCHINGS[batching])
    ours = train(PAIRS[algorithm][1], tmp_path, kl_monitor=True, kl_target_unit="token", **fields)
    theirs = run_of_trl(algorithm, adapter, batching, model_path, beta=0.05)
    assert_same_run(theirs, ours)
    assert logged(ours, metric) == pytest.approx([entry["kl"] for entry in theirs[0][:-1]], rel=1e-4, abs=1e-6)
    assert max(logged(ours, metric)) > 1e-3


@pytest.mark.parametrize("batching", BATCHINGS)
def test_monitor_beside_the_kl_of_trl_measures_the_policy(batching, tmp_path):
    # TRL scores its own reference through the same method and, with an adapter, through the same model.
    fields = settings("lora", None, **BATCHINGS[batching])
    alone = train(KLXGRPOTrainer, tmp_path, kl_monitor=True, **fields)
    beside = train(KLXGRPOTrainer, tmp_path, kl_monitor=True, beta=1e-12, **fields)
    assert logged(beside, "klx/kl") == pytest.approx(logged(alone, "klx/kl"), rel=1e-4)
    assert logged(alone, "klx/kl")[-1] > 1e-3
