import math

import pytest
import torch

from support.adapter_checks import WEIGHTS, change_weights, make, save
from trl_klx.references.adapter_loading import load_reference_adapter
from trl_klx.references.finite import weight_fault, weights_fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_usual_weights_have_no_fault(dtype):
    assert weight_fault(torch.tensor([-240.0, 0.0, 240.0]).to(dtype)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_values_that_are_not_finite(value, place):
    weight = torch.zeros(3)
    weight[place] = value
    assert weight_fault(weight) == "holds NaN or infinite values"


@pytest.mark.parametrize("value", [1e38, -1e38, 1.1e15])
def test_values_that_no_product_survives(value):
    assert "holds values up to 1" in weight_fault(torch.tensor([0.0, value]))


def test_the_weight_is_named():
    assert weights_fault({"a": torch.zeros(1), "b": torch.tensor([math.nan])}).startswith("weight 'b' holds NaN")
    assert weights_fault({"a": torch.zeros(0), "b": torch.ones(2, dtype=torch.uint8)}) is None


def test_an_adapter_with_an_absurd_weight_is_refused(tmp_path):
    save(tmp_path)

    def spoil(weights):
        next(iter(weights.values())).view(-1)[0] = 1e38
        return weights

    change_weights(tmp_path, spoil)
    with pytest.raises(ValueError, match=r"weight '.*lora_.*' holds values up to 1\.0e\+38"):
        load_reference_adapter(make(0), str(tmp_path))
    assert (tmp_path / WEIGHTS).is_file()
