"""TRL sends vLLM the policy, and nothing of the reference or the value function."""

import types

import pytest
import torch
from trl.generation.vllm_generation import VLLMGeneration

from support.tiny import build_model, build_trainer, trained_lora
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


def generation_of(trainer) -> tuple[VLLMGeneration, dict[str, torch.Tensor]]:
    """TRL's own sender without a vLLM engine. It keeps what it would send."""
    sent: dict[str, torch.Tensor] = {}

    class Model:
        def load_weights(self, pairs):
            sent.update({name: weight.clone() for name, weight in pairs})

    model_runner = types.SimpleNamespace(model=Model())
    executor = types.SimpleNamespace(driver_worker=types.SimpleNamespace(model_runner=model_runner))
    engine = types.SimpleNamespace(model_executor=executor)
    generation = object.__new__(VLLMGeneration)
    generation.__dict__.update(
        model=trainer.model,
        accelerator=trainer.accelerator,
        mode="colocate",
        enable_sleep_mode=False,
        llm=types.SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None),
    )
    from trl.generation import vllm_generation

    generation._dist = vllm_generation.DistributedBackend(trainer.accelerator)
    return generation, sent


@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer, None], ids=["grpo", "rloo", "ppo"])
def test_reference_is_not_sent(trainer_class, tmp_path):
    policy = trained_lora(1, modules_to_save=["lm_head"])
    settings = {"model": policy, "kl_penalty_coef": 0.1, "kl_penalty_reference_step": 0}
    build = (
        build_ppo if trainer_class is None else lambda *args, **kwargs: build_trainer(trainer_class, *args, **kwargs)
    )
    trainer = build(tmp_path, **settings)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "modules_to_save.klx_ref" in name:
                weight.fill_(9.0)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    generation, sent = generation_of(trainer)
    trainer.kl_reference.keep_from_vllm(generation)
    if trainer_class is None:
        with trainer.value_function.hidden():
            generation.sync_weights()
    else:
        generation.sync_weights()
    assert sent.keys() == build_model().state_dict().keys()
    torch.testing.assert_close(
        sent["lm_head.weight"], before["base_model.model.lm_head.modules_to_save.default.weight"]
    )
    # The policy is unchanged, including its reference.
    after = policy.state_dict()
    assert list(after) == list(before)
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight)


def test_without_that_it_would_be_sent(tmp_path):
    policy = trained_lora(1, modules_to_save=["lm_head"])
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, model=policy, kl_penalty_coef=0.1, kl_penalty_reference_step=0)
    generation, sent = generation_of(trainer)
    generation.sync_weights()
    # If TRL leaves it out by itself one day, `keep_from_vllm` can be removed.
    assert [name for name in sent if "klx_ref" in name] == ["lm_head.modules_to_save.klx_ref.weight"]
