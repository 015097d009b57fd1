"""
Training with a real vLLM in the trainer's process: vLLM samples from the policy and receives nothing else, and the KL
comes from the trainer's own log-probs. `make test-vllm` builds the environment for these tests.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from colocate_cases import CASES, FROM_THE_START, STEPS


pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run `make test-vllm`"),
]
SCRIPT = Path(__file__).parent / "colocate_run.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs each case once, in its own process, when it is first needed."""
    done = {}

    def run(name: str) -> tuple[dict, Path]:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            command = [sys.executable, str(SCRIPT), name, str(folder)]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)
            assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
            done[name] = json.loads((folder / "result.json").read_text()), folder
        return done[name]

    yield run
    for name, (result, _) in done.items():
        close, far = result["logps_apart"]["policy"], result["logps_apart"]["reference"]
        print(
            f"\n{name}: {result['seconds']['all']:.0f} s, {result['seconds']['start']:.0f} s of them to start; ",
            end="",
        )
        print(f"vLLM's log-probs {close:.1e} from the policy's, {far:.1e} from the reference's", end="")
    if done:
        print(f"\n{result['versions']}", end="")


@pytest.mark.parametrize("name", CASES)
def test_kl_comes_from_the_trainers_log_probs(name, runs):
    result, _ = runs(name)
    assert (result["num_processes"], result["distributed_type"]) == (1, "NO")
    assert len(result["logged_kl"]) == len(result["kl"]) == STEPS
    assert result["logged_kl"] == pytest.approx(result["kl"], abs=1e-4)
    # vLLM computes in half precision, so a KL from its log-probs would differ.
    assert result["dtype"] == "torch.bfloat16"
    assert len(result["sampler"]) == (0 if name.startswith("rloo") else STEPS)  # RLOO does not request its log-probs
    assert all(to_policy > 1e-3 for to_policy, _ in result["sampler"])
    if name in FROM_THE_START:
        assert result["logged_kl"][0] == pytest.approx(0.0, abs=1e-5)
    else:
        assert result["logged_kl"][0] > 0.1
    # The check is not vacuous at the end.
    assert abs(result["logged_kl"][-1]) > 0.1


@pytest.mark.parametrize("name", CASES)
def test_vllm_has_the_policy_and_not_the_reference(name, runs):
    result, _ = runs(name)
    # Before each rollout, and once after training: every weight of the policy, and nothing else.
    assert len(result["syncs"]) == STEPS + 1
    assert all(sorted(sent) == sorted(result["names"]) for sent in result["syncs"])
    # The reference is unchanged, although TRL merges the policy's adapter into the shared weights and unmerges it.
    assert result["logps_apart"]["reference_now"] == pytest.approx(result["logps_apart"]["reference"], abs=1e-5)
    assert result["weights_apart"]["reference_now"] == result["weights_apart"]["reference"]
    # vLLM's weights and log-probs match the policy's within bfloat16 rounding.
    to_policy, to_reference = result["weights_apart"]["policy"], result["weights_apart"]["reference"]
    assert max(to_policy.values()) < 0.01 < 0.03 < max(to_reference.values())
    if "modules" in name:
        assert to_reference["lm_head.weight"] > 0.03
    assert 5 * result["logps_apart"]["policy"] < result["logps_apart"]["reference"]
    for to_policy, to_reference in result["sampler"][-1:]:
        assert 3 * to_policy < to_reference


def test_what_trl_would_send_beside_the_policy(runs):
    modules = "lm_head.modules_to_save.klx_ref.weight"
    assert runs("grpo-lora-adapter")[0]["unguarded"] == []
    assert runs("grpo-lora-adapter-modules")[0]["unguarded"] == [modules]
    value = ["klx_value.inner.weight", "klx_value.inner.bias", "klx_value.outer.weight", "klx_value.outer.bias"]
    assert runs("ppo-full-base")[0]["unguarded"] == value
    assert runs("ppo-lora-start-modules")[0]["unguarded"] == [modules, *value]


@pytest.mark.parametrize("name", CASES)
def test_saved_policy_loads(name, runs):
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    _, folder = runs(name)
    if "-lora-" in name:
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        model = PeftModel.from_pretrained(model, folder / "saved")
        assert list(model.peft_config) == ["default"]
        model = model.merge_and_unload()
    else:
        model, info = AutoModelForCausalLM.from_pretrained(folder / "saved", output_loading_info=True)
        assert not any(info.values()), info
    found, expected = model.state_dict(), load_file(folder / "policy.safetensors")
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, atol=1e-5, rtol=0.0)
    for file in (folder / "saved").rglob("*.safetensors"):
        assert not [key for key in load_file(file) if "klx" in key]
