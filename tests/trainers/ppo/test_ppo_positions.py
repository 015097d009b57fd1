"""A value model with absolute positions reads a prompt the same however it is padded."""

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from support.tiny import SPECIALS, WORDS, logged
from support.tiny_ppo import build_ppo, build_scorer
from trl_klx.ppo.value_function import ValueModel


def absolute() -> GPT2ForSequenceClassification:
    config = GPT2Config(
        vocab_size=len(SPECIALS) + len(WORDS),
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        pad_token_id=0,
        num_labels=1,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2ForSequenceClassification(config).eval()


@pytest.mark.parametrize("build", [absolute, build_scorer], ids=["absolute", "rotary"])
def test_padding_does_not_change_the_values(build):
    value_model = ValueModel(build())
    tokens = torch.tensor([[7, 9, 11, 5]])
    padded = torch.tensor([[0, 0, 0, 7, 9, 11, 5, 0]])
    with torch.no_grad():
        plain = value_model(tokens, torch.ones_like(tokens))
        values = value_model(padded, (padded != 0).long())
    assert torch.allclose(values[:, 3:7], plain, atol=1e-5)


def test_it_trains(tmp_path):
    trainer = build_ppo(tmp_path, max_steps=2, kl_penalty_coef=0.1, extras={"value_model": absolute()})
    trainer.train()
    assert len(logged(trainer, "ppo/value_loss")) == 2
