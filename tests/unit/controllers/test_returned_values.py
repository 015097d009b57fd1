import pytest

from trl_klx import KLController


def make(returned):
    class Odd(KLController):
        def _next(self, kl, n_steps):
            return returned

    return Odd(init_coef=0.1)


@pytest.mark.parametrize("returned", [None, "high", [0.1], {}, 10**400])
def test_a_rule_that_returns_no_number_is_named(returned):
    controller = make(returned)
    with pytest.raises(TypeError, match=r"Odd\._next\(1\.0, 4\.0\) returned .*, but must return the next coefficient"):
        controller.update(1.0, 4)
    assert controller.value == 0.1


def test_whatever_is_a_number_is_taken():
    import torch

    assert make(torch.tensor(0.25)).update(1.0, 4) == 0.25
