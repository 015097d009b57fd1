"""
No step waits for the device, except for one reduction of statistics per generation batch. This is counted on CPU,
where nothing waits but the same operations read a tensor's numbers.
"""

import collections
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
import trl
from torch.utils._python_dispatch import TorchDispatchMode

import trl_klx
from support.tiny import build_trainer, lora, scripted_rollout, trained_lora
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.control.metrics import Sums
from trl_klx.maths.advantages import (
    center_kl_advantages,
    discount_kl,
    group_means,
    masked_moments,
    sequence_means,
    whiten_with_moments,
)
from trl_klx.maths.estimators import KL_ESTIMATORS, estimate_kl, kl_totals
from trl_klx.maths.gae import clipped_value_loss, compute_gae, shape_rewards


OURS = str(Path(trl_klx.__file__).parent)
HOSTS = tuple(str(Path(module.__file__).parent) for module in (transformers, trl))
# Operations that hand a tensor's numbers to Python, or need them for the shape of their result.
WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select"}
# Called only for tensors on CPU, see `test_maths_does_not_wait`.
CPU_ONLY = {"selector", "has_no_holes"}


class Waits(TorchDispatchMode):
    """Counts waits for the device by the function of this package that waits."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def count(self) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if (
                name.startswith(OURS) and frame.f_code is not Sums.pop.__code__
            ):  # count the function that asks for the sums
                self.seen[frame.f_code.co_name] += 1
                return
            if name.startswith(HOSTS):
                return
            frame = frame.f_back

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in WAITING:
            self.count()
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        # These read a CPU tensor's memory without a visible operation.
        self.kept = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}
        for name, method in self.kept.items():
            setattr(torch.Tensor, name, self.counting(method))
        return super().__enter__()

    def __exit__(self, *exception):
        for name, method in self.kept.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*exception)

    def counting(self, method):
        def counted(tensor, *args, **kwargs):
            self.count()
            return method(tensor, *args, **kwargs)

        return counted


def waits(trainer) -> dict[str, int]:
    with Waits() as counter:
        trainer.train()
    assert trainer.state.global_step == 3
    return {name: count for name, count in counter.seen.items() if name not in CPU_ONLY}


def test_the_counter_sees_what_waits():
    numbers, scope = torch.arange(3.0), {"torch": torch}
    source = (
        "def f(x):\n    x.sum().item(); bool(x.any()); float(x[0]); x.tolist(); x[x > 1]; torch.unique(x); x.numpy()\n"
    )
    exec(compile(source, f"{OURS}/made_up.py", "exec"), scope)
    with Waits() as counter:
        scope["f"](numbers)
        numbers.sum().item()
    assert counter.seen["f"] >= 6 and set(counter.seen) == {"f"}


@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer])
def test_switched_off_nothing_waits(trainer_class, tmp_path):
    assert waits(build_trainer(trainer_class, tmp_path, beta=0.0)) == {}


CASES = {
    "batch": {},
    "group": {"kl_centering": "group", "gradient_accumulation_steps": 2},
    "microbatch": {"kl_centering": "microbatch", "gradient_accumulation_steps": 2, "kl_discount": 0.9},
    "loss": {"kl_placement": "loss"},
    "target": {"kl_target": 0.1, "kl_controller": "pid"},
    "sync": {"kl_ref_sync_steps": 1, "kl_ref_mixup_alpha": 0.5},
}


@pytest.mark.parametrize(
    ("trainer_class", "case"),
    [*((KLXGRPOTrainer, case) for case in CASES), (KLXRLOOTrainer, "batch"), (KLXRLOOTrainer, "loss")],
)
def test_once_per_generation_batch(trainer_class, case, tmp_path):
    extras = {"peft_config": lora()}
    if trainer_class is KLXGRPOTrainer:
        extras["rollout_func"] = scripted_rollout
    trainer = build_trainer(trainer_class, tmp_path, extras=extras, kl_penalty_coef=0.1, **CASES[case])
    assert waits(trainer) == {"finish": 3}


def test_ppo_also_waits_to_log(tmp_path):
    trainer = build_ppo(tmp_path, model=trained_lora(1), kl_penalty_coef=0.1, num_ppo_epochs=2, max_steps=3)
    # Three steps at two per rollout are two rollouts. All three steps are logged.
    assert waits(trainer) == {"finish": 2, "_klx_read_window": 3}


# ---- Maths ----


def maths(device):
    """Every function on the hot path, by name."""
    kl, values, returns = (torch.randn(4, 40, device=device) for _ in range(3))
    mask = torch.ones(4, 40, dtype=torch.long, device=device)
    row, coef = torch.ones(4, device=device), torch.tensor(0.1, device=device)
    yield "suffix", lambda: discount_kl(kl, mask, 0.9)
    yield "advantages", lambda: center_kl_advantages(row, kl, mask, coef, 0.9)
    yield "groups", lambda: group_means(row, row, torch.tensor([5, 5, 7, 7], device=device))
    yield "sequences", lambda: sequence_means(kl, mask)
    yield "whitening", lambda: whiten_with_moments(values, mask, masked_moments(values, mask))
    yield "totals", lambda: kl_totals(kl, mask)
    yield "rewards", lambda: shape_rewards(row, kl, mask, coef)
    yield "gae", lambda: compute_gae(kl, values, mask, 0.99, 0.95)
    yield "value loss", lambda: clipped_value_loss(values, kl, returns, mask, 0.2)
    for kind in KL_ESTIMATORS:
        if kind != "full":
            yield kind, lambda kind=kind: estimate_kl(kl, values, kind)


def test_maths_does_not_wait(monkeypatch):
    # Tensors without numbers, not on CPU: reading a number raises.
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # it does not support this device
    for name, call in maths("meta"):
        result = call()
        first = result if isinstance(result, torch.Tensor) else result[0]
        assert first.device.type == "meta", name


@pytest.mark.parametrize("ask", [lambda x: x.sum().item(), lambda x: bool(x.any()), torch.Tensor.tolist, torch.unique])
def test_such_tensors_refuse_to_be_asked(ask):
    with pytest.raises((RuntimeError, NotImplementedError)):
        ask(torch.ones(3, device="meta"))
