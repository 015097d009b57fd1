"""How the engines are launched."""

import importlib.util
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed"
)


def by_accelerate(recipe: str, *flags: str) -> list[str]:
    return ["accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / "accelerate" / recipe), *flags]


# The recipe's settings with a threshold of 0, so that every weight is partitioned.
ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
