"""Checks for the tests of the value function."""

import pytest

from support.tiny import (
    lora,
)
from support.tiny_ppo import (
    build_scorer,
)


ADAPTERS = pytest.mark.parametrize("adapter", ["full", "lora"])


def parts(adapter: str, owner: str) -> dict:
    extras = {} if adapter == "full" else {"peft_config": lora()}
    return extras | ({"value_model": build_scorer(seed=3)} if owner == "model" else {})
