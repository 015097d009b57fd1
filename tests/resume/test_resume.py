"""Checkpoints and what is restored from them, also after `kill -9`."""

import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments
from trl import RLOOTrainer

from support.launch import SCRIPTS, torchrun
from support.oracle import plain_model
from support.resumption import RUNS, build_run, outcome
from support.tiny import assert_same_weights, build_model, build_trainer, logged, lora, trained_lora, weights
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.checkpoints.integrity import consistency_fault, content_fault


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter")
    trained_lora(2, scale=0.1).save_pretrained(path)
    return str(path)


def checkpoints(folder) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))


def assert_same_outcome(one, other):
    (one_history, one_weights), (other_history, other_weights) = one, other
    assert one_history == other_history
    assert_same_weights(one_weights, other_weights)
    # The controller had something to do; a reset takes it back to its first coefficient.
    coefs = [entry["klx/coef"] for entry in one_history if "klx/coef" in entry]
    resets = one_history[-1].get("klx/reference_resets")
    assert len(coefs) == 6 and len(set(coefs)) >= (6 if resets is None else 2)
    assert resets is None or resets >= 1
    assert one_history[-1]["klx/kl"] > 1e-4


# ---- kill -9 ----


@pytest.fixture(scope="module")
def killed(tmp_path_factory, adapter):
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(SCRIPTS / "killed_runs.py"), str(folder), adapter]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    ends = dict(line.split() for line in result.stdout.splitlines() if line.split()[0] in RUNS)
    assert ends == {name: str(int(signal.SIGKILL)) for name in RUNS}
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("killed")
@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_equals_the_uninterrupted_one(name, killed, adapter, tmp_path):
    assert checkpoints(killed / name) == [2, 4]
    whole = build_run(name, str(tmp_path), adapter)
    whole.train()
    resumed = build_run(name, str(killed / name), adapter)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same_outcome(outcome(whole), outcome(resumed))
    assert resumed.kl_controller.state_dict() == whole.kl_controller.state_dict()
    assert resumed.kl_control.drift.state_dict() == whole.kl_control.drift.state_dict()
    reference, expected = resumed.kl_reference.weights(), whole.kl_reference.weights()
    assert_same_weights(reference, expected)


@pytest.mark.slow
def test_two_processes_resume(tmp_path, adapter):
    with pytest.raises(AssertionError, match="Signal 9"):
        torchrun("run_in_group.py", "kill", str(tmp_path), adapter)
    assert checkpoints(tmp_path / "killed") == [2, 4]
    saved = Path(shutil.copytree(tmp_path / "killed" / "checkpoint-4", tmp_path / "copy" / "checkpoint-4"))
    assert consistency_fault(str(saved)) is None and content_fault(str(saved)) is None
    (saved / "rng_state_1.pth").unlink()
    assert "rng_state_1.pth" in consistency_fault(str(saved)) and "rng_state_1.pth" in content_fault(str(saved))
    torchrun("run_in_group.py", "compare", str(tmp_path), adapter)
    for name in ("adapter", "lag", "reset"):
        ranks = [torch.load(tmp_path / f"{name}-rank{rank}.pt") for rank in range(2)]
        for rank in ranks:
            assert_same_weights(rank["whole"][1], rank["resumed"][1])
        assert_same_weights(ranks[0]["resumed"][1], ranks[1]["resumed"][1])
        # Only the main process logs.
        assert_same_outcome(ranks[0]["whole"], ranks[0]["resumed"])


# ---- What a checkpoint holds ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory, adapter):
    """A finished run with an adapter reference."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = build_run("adapter", str(folder), adapter)
    trainer.train()
    return trainer, folder / "checkpoint-6"


def test_state_file(saved, adapter):
    trainer, checkpoint = saved
    state = json.loads((checkpoint / "kl_state.json").read_text())
    assert state["controller"] == {"name": "pid", "init_coef": 0.2, "state": trainer.kl_controller.state_dict()}
    assert state["controller"]["state"]["value"] != 0.2
    assert len(state["drift"]["values"]) == 3
    assert state["reference"]["kind"] == "adapter" and state["reference"]["path"] == adapter


def test_reference_is_in_no_saved_file(saved, tmp_path):
    trainer, checkpoint = saved
    trainer.save_model(str(tmp_path))
    for folder in (checkpoint, tmp_path):
        assert not [path for path in folder.iterdir() if path.is_dir()]
        assert not (folder / "kl_reference.safetensors").exists()
        names = load_file(folder / "adapter_model.safetensors").keys()
        assert names and not any("klx_ref" in name for name in names)
        assert "klx_ref" not in (folder / "adapter_config.json").read_text()


def test_optimizer_knows_the_trained_adapter_only(saved):
    trainer, checkpoint = saved
    trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert trained and all(".default." in name for name in trained)
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert len(state["state"]) == len(trained) == sum(len(group["params"]) for group in state["param_groups"])
    assert any("klx_ref" in name for name, _ in trainer.model.named_parameters())


def test_saved_adapter_is_the_policy(saved):
    trainer, checkpoint = saved
    loaded = PeftModel.from_pretrained(build_model(), checkpoint).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        found = torch.log_softmax(loaded(input_ids=ids).logits, dim=-1)
        expected = torch.log_softmax(plain_model(trainer.model)(input_ids=ids).logits, dim=-1)
        base = torch.log_softmax(build_model().eval()(input_ids=ids).logits, dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - base).abs().max() > 1e-2


def test_moving_reference_is_in_a_file_of_its_own(adapter, tmp_path):
    trainer = build_run("sync", str(tmp_path), adapter, max_steps=4)
    trainer.train()
    names = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors").keys()
    assert not any("klx_ref" in name for name in names)
    kept = load_file(tmp_path / "checkpoint-4" / "kl_reference.safetensors")
    assert_same_weights(kept, {name: weight.detach() for name, weight in trainer.kl_reference.weights().items()})


# ---- save_total_limit ----


@pytest.mark.parametrize("limit", [1, 2])
def test_limit_spares_the_reference(limit, adapter, tmp_path):
    build_run("base", str(tmp_path), adapter, max_steps=2).train()
    # Resuming with another reference restarts KL control.
    (tmp_path / "checkpoint-2" / "kl_state.json").unlink()
    fields = {"kl_penalty_reference_step": 2, "save_total_limit": limit}
    trainer = build_run("base", str(tmp_path), adapter, max_steps=8, **fields)
    with pytest.warns(UserWarning, match="holds no KL-control state"):
        trainer.train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path) == ([2, 8] if limit == 1 else [2, 6, 8])
    assert trainer.kl_reference.identity["step"] == 2
    assert trainer.args.save_total_limit == limit
    arguments = torch.load(tmp_path / "checkpoint-8" / "training_args.bin", weights_only=False)
    assert isinstance(arguments, TrainingArguments) and arguments.save_total_limit == limit
    # So the run can be resumed.
    again = build_run("base", str(tmp_path), adapter, max_steps=10, **fields)
    again.train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path) == ([2, 10] if limit == 1 else [2, 8, 10])


def test_limit_spares_the_best_checkpoint_too(adapter, tmp_path):
    trainer = build_run("base", str(tmp_path), adapter, max_steps=2)
    trainer.train()
    trainer = build_run("base", str(tmp_path), adapter, kl_penalty_reference_step=2, save_total_limit=2)
    for step in (3, 4, 5, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    trainer.state.global_step = 6
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-3")
    trainer._klx_rotate_checkpoints(str(tmp_path), 2, 2)
    # As in transformers, the limit counts the best checkpoint too.
    assert checkpoints(tmp_path) == [2, 3, 6]


def test_limit_takes_later_steps_for_an_earlier_run(adapter, tmp_path):
    # A new run in an old run's folder: its first checkpoint is the newest, although its number is the lowest.
    build_run("base", str(tmp_path), adapter, save_steps=2, max_steps=6).train()
    build_run(
        "base", str(tmp_path), adapter, kl_penalty_reference_step=6, save_total_limit=1, save_steps=3, max_steps=3
    ).train()
    assert checkpoints(tmp_path) == [3, 6]


def test_limit_without_a_reference_step_is_that_of_the_host(adapter, tmp_path):
    build_run("adapter", str(tmp_path), adapter, save_total_limit=1).train()
    assert checkpoints(tmp_path) == [6]


def test_a_new_run_does_not_write_over_its_reference(adapter, tmp_path):
    build_run("base", str(tmp_path), adapter).train()
    before = (tmp_path / "checkpoint-2" / "adapter_model.safetensors").read_bytes()
    trainer = build_run("base", str(tmp_path), adapter, kl_penalty_reference_step=2, seed=1)
    with pytest.warns(UserWarning, match="checkpoint-2.*is the KL reference"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").read_bytes() == before
    assert checkpoints(tmp_path) == [2, 4, 6]


# ---- What is refused, what warns ----


@pytest.fixture
def folder(saved, tmp_path):
    """The checkpoint of a finished run, resumed for two more steps."""
    shutil.copytree(saved[1], tmp_path / "run" / "checkpoint-6")
    return tmp_path / "run"


def resume(folder, adapter, **overrides):
    name = overrides.pop("name", "adapter")
    trainer = build_run(name, str(folder), adapter, **({"max_steps": 8, "save_strategy": "no"} | overrides))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    return trainer


def test_without_state_it_warns_and_starts_from_the_config(folder, adapter):
    (folder / "checkpoint-6" / "kl_state.json").unlink()
    with pytest.warns(
        UserWarning, match="holds no KL-control state: the coefficient starts from `kl_penalty_coef=0.2`"
    ):
        trainer = resume(folder, adapter)
    assert logged(trainer, "klx/coef")[6] == 0.2


@pytest.mark.parametrize("fields", [{"kl_ref_lag": 4}, {"kl_ref_sync_steps": 5, "kl_ref_mixup_alpha": 0.6}], ids=str)
def test_without_state_a_moving_reference_starts_from_the_policy_as_it_is(fields, folder, adapter):
    (folder / "checkpoint-6" / "kl_state.json").unlink()
    with pytest.warns(UserWarning, match="a moving reference starts from the policy as it is now"):
        trainer = resume(folder, adapter, name="base", **fields)
    # The first batch afterwards is on the reference. The run's initial policy is some nats away.
    assert logged(trainer, "klx/kl")[6] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer])
def test_checkpoints_inside_a_rollout_warn(trainer_class, tmp_path):
    fields = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    with pytest.warns(UserWarning, match=r"`save_steps=3` puts checkpoints inside a rollout.* multiple of 2"):
        build_trainer(trainer_class, tmp_path, kl_penalty_coef=0.1, **fields)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*inside a rollout.*")
        build_trainer(trainer_class, tmp_path, kl_penalty_coef=0.1, **(fields | {"save_steps": 4}))
        build_trainer(trainer_class, tmp_path, beta=0.0, **fields)


def test_nothing_warns_when_nothing_changed(folder, adapter):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*KL.*")
        trainer = resume(folder, adapter)
    assert logged(trainer, "klx/coef")[6] != 0.2


@pytest.mark.parametrize(
    "overrides",
    [
        {"name": "base"},
        {"name": "step", "policy": "fresh"},
        {"name": "lag"},
        {"kl_ref_adapter_path": "other"},
    ],
    ids=["base", "step", "lag", "other weights"],
)
def test_another_reference_is_refused(overrides, folder, adapter, tmp_path):
    if "kl_ref_adapter_path" in overrides:
        trained_lora(9, scale=0.1).save_pretrained(tmp_path / "other")
        overrides = {"kl_ref_adapter_path": str(tmp_path / "other")}
    with pytest.raises(
        ValueError, match="KL reference is not the one that the checkpoint .*checkpoint-6.* was trained"
    ):
        resume(folder, adapter, **overrides)


def test_the_same_reference_in_another_folder_is_accepted(folder, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "moved")
    trainer = resume(folder, adapter, kl_ref_adapter_path=str(tmp_path / "moved"))
    assert logged(trainer, "klx/coef")[6] != 0.2


@pytest.mark.parametrize(
    "overrides",
    [{"kl_penalty_coef": 0.4}, {"kl_controller": "exponential", "kl_controller_kwargs": None}],
    ids=["coefficient", "controller"],
)
def test_a_changed_controller_warns_and_starts_from_the_config(overrides, folder, adapter):
    with pytest.warns(UserWarning, match="The KL controller was changed since the checkpoint"):
        trainer = resume(folder, adapter, **overrides)
    assert logged(trainer, "klx/coef")[6] == overrides.get("kl_penalty_coef", 0.2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "kl_state.json"),
        ('{"version": 99}', "version 99"),
        ('{"version": 1}', "no valid 'controller'"),
        ("controller", "the controller state in .*checkpoint-6.* is not valid"),
        ("drift", "the drift window in .*checkpoint-6.* is not valid"),
    ],
)
def test_a_corrupt_state_is_refused(content, message, folder, adapter):
    path = folder / "checkpoint-6" / "kl_state.json"
    if content in ("controller", "drift"):
        state = json.loads(path.read_text())
        if content == "controller":
            state["controller"]["state"] = {"value": "high"}
        else:
            state["drift"]["values"] = [None]
        # A state of version 1 has no checksum.
        content = json.dumps(state | {"version": 1})
    path.write_text(content)
    with pytest.raises(ValueError, match=f"Cannot resume.*{message}"):
        resume(folder, adapter)


def test_a_lost_moving_reference_is_refused(adapter, tmp_path):
    build_run("sync", str(tmp_path), adapter).train()
    (tmp_path / "checkpoint-6" / "kl_reference.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="Cannot resume: the weights of the reference in .*cannot be read"):
        resume(tmp_path, adapter, name="sync")


# ---- Adapters ----


@pytest.mark.parametrize("fields", [{}, {"kl_penalty_reference_step": 0}], ids=["base", "step"])
def test_a_new_adapter_need_not_start_from_the_same_noise(fields, tmp_path):
    # Nobody seeds an adapter that the user adds, and TRL 1.14 seeds none. Resuming overwrites its initial weights.
    def build(seed):
        torch.manual_seed(seed)
        return build_trainer(
            KLXGRPOTrainer,
            tmp_path,
            model=get_peft_model(build_model(), lora()),
            kl_penalty_coef=0.2,
            save_strategy="steps",
            save_steps=2,
            max_steps=4,
            **fields,
        )

    first = build(1)
    first.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    second = build(2)
    second.train(resume_from_checkpoint=True)
    assert_same_weights(weights(first), weights(second))
    assert logged(first, "klx/kl") == logged(second, "klx/kl")
    assert_same_weights(first.kl_reference.weights(), second.kl_reference.weights())


def test_checkpoint_of_trl_with_a_second_adapter(tmp_path):
    # TRL's RLOO keeps a copy of a given adapter, and saves it in a subfolder.
    def build(trainer_class, **fields):
        return build_trainer(
            trainer_class, tmp_path, model=trained_lora(1, scale=0.1), save_strategy="steps", save_steps=3, **fields
        )

    first = build(RLOOTrainer, max_steps=3)
    first.train()
    checkpoint = tmp_path / "checkpoint-3"
    assert (checkpoint / "ref" / "adapter_model.safetensors").is_file()
    trained = {name: weight.clone() for name, weight in weights(first).items() if ".default." in name}
    second = build(KLXRLOOTrainer, kl_penalty_coef=0.2, max_steps=4, kl_penalty_reference_step=0)
    start = {name: weight.clone() for name, weight in weights(second).items() if ".default." in name}
    assert any(not torch.equal(start[name], weight) for name, weight in trained.items())
    restored = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            restored.update({name: weight.clone() for name, weight in weights(second).items() if ".default." in name})

    second.add_callback(Look())
    with pytest.warns(UserWarning, match="holds no KL-control state"):
        second.train(resume_from_checkpoint=str(checkpoint))
    assert_same_weights(trained, restored)
    # The trained adapter is active, and is the one that is saved.
    assert second.model.active_adapters == ["default"]
    assert not [path for path in (tmp_path / "checkpoint-4").iterdir() if path.is_dir()]
