"""`torch_compile=True` trains as without it, with the exact KL too, whatever else was compiled in the process."""

import pytest
import torch
from torch._dynamo.utils import counters

from support.tiny import assert_same_weights, history, lora, train, weights
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


EXACT = {"kl_statistic": "full"}
IN_LOSS = EXACT | {"kl_estimator": "full", "kl_placement": "loss"}
LORA = {"peft_config": lora()}
CASES = {
    "grpo, full fine-tuning": (KLXGRPOTrainer, {}, EXACT),
    "grpo, lora": (KLXGRPOTrainer, LORA, EXACT),
    "grpo, lora, in the loss": (KLXGRPOTrainer, LORA, IN_LOSS),
    "rloo, full fine-tuning": (KLXRLOOTrainer, {}, EXACT),
    "ppo, lora": (KLXPPOTrainer, LORA, EXACT | {"num_ppo_epochs": 2}),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_runs_are_the_same(case, tmp_path):
    trainer_class, extras, fields = CASES[case]
    # The backend changes no number, so that nothing but the way of the hidden states can make a difference.
    compiling = {"torch_compile": True, "torch_compile_backend": "eager"}
    # Another run compiles the model first, without keeping hidden states.
    train(trainer_class, tmp_path / "first", extras=extras, kl_penalty_coef=0.1, **compiling)
    plain = train(trainer_class, tmp_path / "plain", extras=extras, kl_penalty_coef=0.1, **fields)
    frames = counters["frames"]["ok"]
    compiled = train(trainer_class, tmp_path / "compiled", extras=extras, kl_penalty_coef=0.1, **fields, **compiling)
    assert counters["frames"]["ok"] > frames and hasattr(compiled.model_wrapped, "_orig_mod")
    assert history(compiled) == history(plain)
    assert_same_weights(weights(compiled), weights(plain))
