"""A sampler with wrong log-probs: the KL to the reference stays right, the other KL shows it, the target holds."""

import statistics
import types

import pytest
import torch

from support.oracle import kl_of_tokens, plain_model, sampled_logps
from support.tiny import build_model, build_trainer, logged, lora, recording
from trl_klx import KLXGRPOTrainer


TARGET = 0.5


def sample(trainer, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Completions that the policy draws, and what they need to be scored."""
    prompt_ids = trainer.processing_class(prompts, return_tensors="pt")["input_ids"]
    policy = trainer.accelerator.unwrap_model(trainer.model)
    training = policy.training
    policy.eval()
    with torch.no_grad():
        ids = policy.generate(
            prompt_ids, attention_mask=torch.ones_like(prompt_ids), do_sample=True, max_new_tokens=6, min_new_tokens=6
        )
    policy.train(training)
    completion_ids = ids[:, prompt_ids.size(1) :]
    batch = {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
    return batch | {name.replace("ids", "mask"): torch.ones_like(value) for name, value in batch.items()}


def off_by(low: float, high: float):
    """A `rollout_func` of the policy itself, whose log-probs are off by `low` to `high` nats, up or down."""
    generator = torch.Generator().manual_seed(0)

    def rollout(prompts, trainer):
        batch = sample(trainer, prompts)
        with torch.no_grad():
            logps = sampled_logps(plain_model(trainer.accelerator.unwrap_model(trainer.model)), batch)
        signs = torch.randint(0, 2, logps.shape, generator=generator) * 2 - 1
        errors = signs * (low + (high - low) * torch.rand(logps.shape, generator=generator))
        return {
            "prompt_ids": batch["prompt_ids"].tolist(),
            "completion_ids": batch["completion_ids"].tolist(),
            "logprobs": (logps + errors).tolist(),
        }

    return rollout


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high"), [(0.1, 0.1), (0.1, 1.0)])
def test_log_probs_of_the_sampler_that_are_off(low, high, tmp_path):
    fields = {
        "kl_target": TARGET,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 60,
        "per_device_train_batch_size": 32,
        "num_generations": 4,
        # By default TRL drops whole completions whose sampler is off, which is most of them.
        "vllm_importance_sampling_mode": "token_truncate",
    }
    extras = {"rollout_func": off_by(low, high), "peft_config": lora(target_modules="all-linear")}
    trainer = build_trainer(recording(KLXGRPOTrainer), tmp_path, extras=extras, **fields)
    # TRL's branch for vLLM, without vLLM.
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
    trainer.train()
    kls, reference = logged(trainer, "klx/kl"), build_model()
    for index in range(0, 60, 10):
        rollout = trainer.generated[index]
        expected = kl_of_tokens(rollout["policy"], reference, rollout, "full")
        assert kls[index] == pytest.approx(sum(map(sum, expected)) / len(expected), rel=1e-3, abs=1e-5)
    # `k3` of an error of d nats is about d^2 / 2 for each of the six tokens.
    squares = (low**2 + low * high + high**2) / 3
    assert statistics.mean(logged(trainer, "klx/sampler_kl")) == pytest.approx(6 * squares / 2, rel=0.2)
    assert max(logged(trainer, "klx/sampler_max")) == pytest.approx(high, rel=0.01)
    assert statistics.mean(kls[30:]) == pytest.approx(TARGET, rel=0.2)
