"""PPO resumes after `kill -9` as if nothing had happened, and two processes do the same as one."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support.launch import SCRIPTS, torchrun
from support.tiny import assert_same_weights, trained_lora
from support.tiny_ppo import RESUMED_RUNS, SPREAD_RUNS, build_resumed_run, ppo_outcome, run_spread


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ppo_resume")]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter")
    trained_lora(2).save_pretrained(path)
    return str(path)


# ---- kill -9 ----


@pytest.fixture(scope="module")
def killed(tmp_path_factory, adapter):
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(SCRIPTS / "ppo_killed_runs.py"), str(folder), adapter]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    ends = dict(line.split() for line in result.stdout.splitlines() if line.split()[0] in RESUMED_RUNS)
    assert ends == {name: str(int(signal.SIGKILL)) for name in RESUMED_RUNS}
    return folder


def check_same(resumed: dict, whole: dict) -> None:
    """Coefficients, KLs, values, losses and weights, including those of the value function, are equal to the bit."""
    assert resumed["history"] == whole["history"]
    assert len(whole["history"]) == 12
    for name in ("klx/coef", "klx/kl", "ppo/explained_variance", "ppo/score"):
        assert len({entry[name] for entry in whole["history"] if name in entry}) == 3, name
    assert all("ppo/value_loss" in entry for entry in whole["history"])
    assert_same_weights(resumed["weights"], whole["weights"])
    assert any("klx_value" in name for name in whole["weights"])
    assert resumed["scaling"] == whole["scaling"] and resumed["coef"] == whole["coef"]


@pytest.mark.parametrize("name", RESUMED_RUNS)
def test_killed_run_goes_on_as_if_nothing_had_happened(name, killed, adapter, tmp_path):
    whole = build_resumed_run(name, str(tmp_path), adapter)
    whole.train()
    resumed = build_resumed_run(name, str(killed / name), adapter)
    checkpoints = {path.name for path in (killed / name).glob("checkpoint-*")}
    assert checkpoints == {"checkpoint-4", "checkpoint-8"}
    resumed.train(resume_from_checkpoint=True)
    check_same(ppo_outcome(resumed), ppo_outcome(whole))
    assert ppo_outcome(whole)["scaling"]["count"] == 24


# ---- Two processes ----


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    torchrun("ppo_in_group.py", str(folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", SPREAD_RUNS)
def test_two_processes_do_what_one_does(name, ranks, tmp_path):
    alone = run_spread(name, str(tmp_path), processes=1)
    ranks = [rank["spread"][name] for rank in ranks]
    for rank in ranks:
        assert rank["num_processes"] == 2 and rank["distributed_type"] == "DistributedType.MULTI_CPU"
    assert_same_weights(ranks[0]["weights"], ranks[1]["weights"])
    # The trained weights and the value function have moved by more than the tolerance.
    moved = {n for n, weight in alone["weights"].items() if (weight - alone["start"][n]).abs().max() > 1e-3}
    trained = {"lora": "lora_", "frozen": "layers.1."}.get(name, "layers.")
    assert any(n.startswith("klx_value.") for n in moved) and any(trained in n for n in moved)
    for rank in ranks:
        for weight_name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][weight_name], weight, atol=1e-5, rtol=0)
        assert rank["scaling"] == pytest.approx(alone["scaling"], abs=1e-5)
        assert rank["coef"] == pytest.approx(alone["coef"], abs=1e-5)
        assert rank["controller"] == pytest.approx(alone["controller"], abs=1e-4)
        assert len(rank["history"]) == len(alone["history"]) == 3
        for entry, expected in zip(rank["history"], alone["history"], strict=True):
            names = [n for n in expected if n == "loss" or n.startswith(("klx/", "ppo/"))]
            assert len(names) >= 12
            for metric in names:
                # The error is the KL divided by the target, so a difference of 1e-5 nats is scaled likewise.
                tolerance = 1e-5 / expected["klx/target"] if metric == "klx/error" else 1e-5
                assert entry[metric] == pytest.approx(expected[metric], abs=tolerance), metric
    # Some completions had no score, on either process.
    assert alone["scaling"]["count"] < 24


@pytest.mark.parametrize("name", ["head", "lora"])
def test_two_processes_go_on_from_a_checkpoint(name, ranks):
    outcomes = [rank["resumed"][name] for rank in ranks]
    for outcome in outcomes:
        check_same(outcome["resumed"], outcome["whole"])
    assert_same_weights(outcomes[0]["resumed"]["weights"], outcomes[1]["resumed"]["weights"])


# ---- FSDP2 ----


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    settings = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        },
        "num_machines": 1,
        "num_processes": 2,
        "main_process_port": 0,
        "mixed_precision": "no",
        "use_cpu": True,
    }
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(SCRIPTS / "ppo_fsdp2.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", ["head", "lora", "value_model"])
def test_sharded_value_function_comes_back(name, sharded):
    folder, ranks = sharded
    saved = load_file(folder / name / "checkpoint-12" / "value_function.safetensors")
    for rank in ranks:
        whole, resumed = rank[name]["whole"], rank[name]["resumed"]
        assert whole["sharded"] and resumed["sharded"]
        assert len(whole["history"]) == 12 and resumed["history"] == whole["history"]
        assert_same_weights(resumed["values"], whole["values"])
        # The file holds the whole value function, not one process's part.
        assert_same_weights(saved, whole["values"])
    weights_file = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    loaded = load_file(folder / name / "checkpoint-12" / weights_file)
    assert loaded and not [key for key in loaded if "klx" in key]
