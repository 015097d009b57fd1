"""`KLXCallback` drives the coefficient of TRL's own trainers, in real training runs."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from transformers import Trainer, TrainingArguments, set_seed
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOConfig, KTOTrainer, RLOOTrainer

from support import tiny
from support.tiny import (
    RUN,
    Recorder,
    assert_same_weights,
    build_dataset,
    build_model,
    build_tokenizer,
    history,
    logged,
    lora,
    reward_even_tokens,
    weights,
)
from trl_klx import KLController, KLXCallback, KLXGRPOTrainer, get_kl_controller
from trl_klx.trainers.callback import LOGGED_KLS, REFUSED_TRAINERS


class Listening(KLController):
    """Raises the coefficient by a tenth, and keeps its inputs."""

    def __init__(self, init_coef):
        super().__init__(init_coef)
        self.heard: list[tuple[float, float]] = []

    def _next(self, kl, n_steps):
        self.heard.append((kl, n_steps))
        return self.value * 1.1


class RecordingGRPO(Recorder, GRPOTrainer):
    """Keeps the inputs of the loss."""


def build_trainer(trainer_class, folder, extras=None, **fields):
    # With an adapter, whose reference is the base model. For a full model, TRL would load the reference from the Hub.
    return tiny.build_trainer(trainer_class, folder, extras={"peft_config": lora()} | (extras or {}), **fields)


def run(trainer, *args, resume=None, **kwargs):
    """Add the callback as a user would, in one line, and train."""
    trainer.add_callback(KLXCallback(trainer, *args, **kwargs))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def replay(name, kls, n_steps, **settings):
    """The coefficient at each log, from a controller that gets the logged KLs directly."""
    controller = get_kl_controller(name, **settings)
    values = []
    for kl in kls:
        values.append(controller.value)
        controller.update(max(kl, 0.0), n_steps)
    return values


def online_dpo(folder, **fields):
    online_dpo = pytest.importorskip("trl.experimental.online_dpo")

    class Recording(online_dpo.OnlineDPOTrainer):
        def training_step(self, *args, **kwargs):
            self.betas = [*getattr(self, "betas", []), self.beta]
            return super().training_step(*args, **kwargs)

    drop = {"num_generations", "max_completion_length"}
    settings = {key: value for key, value in RUN.items() if key not in drop} | {"max_new_tokens": 6, "max_length": 32}
    args = online_dpo.OnlineDPOConfig(output_dir=str(folder), **(settings | fields))
    set_seed(args.seed)
    return Recording(
        model=build_model(),
        reward_funcs=lambda prompts, completions, completion_ids, **kwargs: reward_even_tokens(completion_ids),
        args=args,
        train_dataset=build_dataset(),
        processing_class=build_tokenizer(),
    )


def gmpo(folder, trainer_class=None, **fields):
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    args = gmpo.GMPOConfig(output_dir=str(folder), **(RUN | fields))
    set_seed(args.seed)
    return (trainer_class or gmpo.GMPOTrainer)(
        model=build_model(),
        reward_funcs=reward_even_tokens,
        args=args,
        train_dataset=build_dataset(),
        processing_class=build_tokenizer(),
        peft_config=lora(),
    )


# Settings of trainers that learn from a dataset of completions.
OFFLINE = {key: RUN[key] for key in ("use_cpu", "bf16", "report_to", "logging_steps", "save_strategy", "disable_tqdm")}


def kto(folder, trainer_class=KTOTrainer, **fields):
    rows = {"prompt": ["w1 w2"] * 8, "completion": [" w3", " w4 w5"] * 4, "label": [True, False] * 4}
    args = KTOConfig(str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, **OFFLINE, **fields)
    return trainer_class(
        build_model(),
        args=args,
        train_dataset=Dataset.from_dict(rows),
        processing_class=build_tokenizer(),
        peft_config=lora(),
    )


# ---- The coefficient ----


def test_grpo(tmp_path):
    trainer = build_trainer(RecordingGRPO, tmp_path, beta=0.05, max_steps=5, gradient_accumulation_steps=2)
    run(trainer, "pid", target=0.01)
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "kl")
    assert coefs == replay("pid", kls, 8, init_coef=0.05, target=0.01)
    assert len(set(coefs[1:])) == 4 and kls[-1] > 0
    # Two micro-batches per step, whose losses read it.
    assert [loss["beta"] for loss in trainer.losses] == [coef for coef in coefs for _ in range(2)]
    assert logged(trainer, "klx/target") == [0.01] * 5


def test_rloo_with_the_penalty_in_the_reward(tmp_path):
    class Recording(RLOOTrainer):
        betas: list[float] = []

        def _generate_and_score_completions(self, inputs):
            self.betas = [*self.betas, self.beta]
            return super()._generate_and_score_completions(inputs)

    trainer = build_trainer(Recording, tmp_path, beta=0.05, max_steps=4)
    run(trainer, "adaptive", target=0.01, horizon=20)
    coefs = logged(trainer, "klx/coef")
    assert coefs == replay("adaptive", logged(trainer, "kl"), 4, init_coef=0.05, target=0.01, horizon=20)
    assert trainer.betas == coefs and len(set(coefs)) == 4


def test_online_dpo(tmp_path):
    trainer = run(online_dpo(tmp_path, max_steps=4), "adaptive", target=0.5, horizon=20, coef=0.2)
    coefs = logged(trainer, "klx/coef")
    # Two completions for each of the four prompts of a step.
    assert coefs == replay("adaptive", logged(trainer, "objective/kl"), 8, init_coef=0.2, target=0.5, horizon=20)
    assert trainer.betas == coefs == logged(trainer, "beta") and len(set(coefs)) == 4


def test_gmpo(tmp_path):
    gmpo_trainer = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer

    class Recording(Recorder, gmpo_trainer):
        """A user's subclass that keeps the inputs of the loss."""

    trainer = gmpo(tmp_path, Recording, beta=0.05, max_steps=5)
    run(trainer, "pid", target=0.01)
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "kl")
    assert coefs == replay("pid", kls, 4, init_coef=0.05, target=0.01)
    assert len(set(coefs[1:])) == 4 and kls[-1] > 0
    assert [loss["beta"] for loss in trainer.losses] == coefs


@pytest.mark.parametrize("build", [lambda folder: build_trainer(GRPOTrainer, folder, beta=0.1), online_dpo])
def test_a_fixed_coefficient_changes_nothing(build, tmp_path):
    plain = build(tmp_path / "plain")
    plain.train()
    driven = run(build(tmp_path / "driven"), "fixed")
    assert history(plain) == history(driven, drop="klx/")
    assert logged(driven, "klx/coef") == [0.1] * 3 and not logged(driven, "klx/target")
    assert_same_weights(weights(plain), weights(driven))


# ---- What counts, and how often ----


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_one_update_per_generation_batch(trainer_class, tmp_path):
    # A generation batch of 4 completions is trained on in 2 micro-batches, twice: 4 steps.
    fields = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 8}
    controller = Listening(0.1)
    trainer = run(build_trainer(trainer_class, tmp_path, beta=0.1, **fields), controller)
    kls = logged(trainer, "kl")
    if trainer_class is GRPOTrainer:  # logged with each step
        expected = [sum(kls[:4]) / 4, sum(kls[4:]) / 4]
    else:  # logged with each generation
        expected = kls
    assert [kl for kl, _ in controller.heard] == pytest.approx([max(kl, 0.0) for kl in expected], rel=1e-12)
    assert [n for _, n in controller.heard] == [4, 4]
    assert logged(trainer, "klx/coef") == pytest.approx([0.1] * 4 + [0.11] * 4)


def test_only_training_logs_count(tmp_path):
    controller = Listening(0.1)
    extras = {"eval_dataset": build_dataset(4)}
    fields = {"logging_steps": 2, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 1}
    trainer = run(build_trainer(GRPOTrainer, tmp_path, beta=0.1, extras=extras, **fields), controller)
    trainer.log({"note": 1.0})
    assert len(logged(trainer, "eval_kl")) == 5
    # Steps 2 and 4. Step 5 is only in the final summary, after which there is nothing to control.
    assert [n for _, n in controller.heard] == [8, 8]
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [kl for kl, _ in controller.heard] == [entry["kl"] for entry in training]
    assert [entry["step"] for entry in trainer.state.log_history if "klx/coef" in entry] == [2, 4]


def test_a_kl_that_is_no_number_changes_nothing(tmp_path):
    class Broken(GRPOTrainer):
        def log(self, logs, start_time=None):
            if "loss" in logs and self.state.global_step == 2:
                self._metrics["train"]["kl"] = [float("inf")]
            super().log(logs, start_time)

    controller = Listening(0.1)
    trainer = build_trainer(Broken, tmp_path, beta=0.1)
    with pytest.warns(RuntimeWarning, match="got a KL of inf"):
        run(trainer, controller)
    kls = logged(trainer, "kl")
    # The step still counts towards the horizon, together with the next available KL.
    assert controller.heard == [(kls[0], 4), (kls[2], 8)]


# ---- Resumption ----


@pytest.mark.parametrize("restore", [False, True])
def test_resumption(restore, tmp_path):
    def build(folder, **fields):
        # A window of two steps, of which the checkpoint has seen one.
        fields = {"max_steps": 6, "steps_per_generation": 2, "per_device_train_batch_size": 2} | fields
        fields["restore_callback_states_from_checkpoint"] = restore
        return build_trainer(GRPOTrainer, tmp_path / folder, beta=0.05, **fields)

    whole = run(build("whole", save_strategy="steps", save_steps=4), "pid", target=0.01)
    elsewhere = tmp_path / "moved"
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", elsewhere)
    resumed = run(build("resumed"), "pid", target=0.01, resume=str(elsewhere))
    assert history(resumed)[:-1] == history(whole)[:-1]  # the last entry is the mean loss of the session
    assert_same_weights(weights(whole), weights(resumed))
    assert len(set(logged(whole, "klx/coef"))) == 3


def test_a_pending_window_is_resumed(tmp_path):
    fields = {"max_steps": 4, "steps_per_generation": 4, "per_device_train_batch_size": 2}
    first = run(
        build_trainer(GRPOTrainer, tmp_path, beta=0.1, save_strategy="steps", save_steps=3, **fields), Listening(0.1)
    )
    controller = Listening(0.1)
    second = run(
        build_trainer(GRPOTrainer, tmp_path, beta=0.1, **fields), controller, resume=str(tmp_path / "checkpoint-3")
    )
    kls = logged(second, "kl")
    assert kls[:3] == logged(first, "kl")[:3]
    assert controller.heard == [(pytest.approx(sum(kls) / 4), 8)]


def test_resumption_with_another_controller_or_none(tmp_path):
    fields = {"beta": 0.05, "save_strategy": "steps", "save_steps": 3}
    build_trainer(GRPOTrainer, tmp_path, **fields).train()
    longer = {"beta": 0.05, "max_steps": 4}
    with pytest.warns(UserWarning, match="holds no state of a `KLXCallback`. The coefficient starts from 0.05"):
        trainer = run(build_trainer(GRPOTrainer, tmp_path, **longer), "pid", target=0.01, resume=True)
    assert logged(trainer, "klx/coef") == [0.05]
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    state["stateful_callbacks"]["klx"] = trainer.state.stateful_callbacks["klx"]
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
    with pytest.warns(UserWarning, match="'name': 'pid'.* then, .*'name': 'fixed', 'init_coef': 0.05.* now"):
        trainer = run(build_trainer(GRPOTrainer, tmp_path, **longer), "fixed", resume=True)
    assert logged(trainer, "klx/coef") == [0.05]


# ---- Refusals ----


def test_refused_trainers(tmp_path):
    with pytest.raises(TypeError, match="`trainer` must be a `Trainer`, got 'pid'. Build the trainer first"):
        KLXCallback("pid", target=1.0)
    ours = build_trainer(KLXGRPOTrainer, tmp_path)
    with pytest.raises(ValueError, match="KLXGRPOTrainer has a KL controller of its own. Set `kl_penalty_coef`"):
        KLXCallback(ours, target=1.0)
    plain = Trainer(build_model(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(ValueError, match="Trainer has no coefficient `beta`"):
        KLXCallback(plain, target=1.0)
    with pytest.raises(ValueError, match="`beta=0.0`: TRL then has no reference"):
        KLXCallback(build_trainer(GRPOTrainer, tmp_path), target=1.0)
    with pytest.raises(ValueError, match=r"`beta=\[0.1, 0.2\]` is a schedule"):
        KLXCallback(online_dpo(tmp_path, beta=[0.1, 0.2]), target=1.0)


def test_refused_settings(tmp_path):
    trainer = build_trainer(GRPOTrainer, tmp_path, beta=0.1)
    with pytest.raises(ValueError, match="HoldKLController needs `target`"):
        KLXCallback(trainer)
    with pytest.raises(ValueError, match="Unknown KL controller 'pdi'. Choose one of adaptive"):
        KLXCallback(trainer, "pdi", target=1.0)
    with pytest.raises(ValueError, match=r"`horizon=5` has no effect with `controller='pid'`"):
        KLXCallback(trainer, "pid", target=1.0, horizon=5)
    with pytest.raises(ValueError, match=r"\{'target': 1.0, 'coef': 0.2\} would be ignored"):
        KLXCallback(trainer, Listening(0.1), target=1.0, coef=0.2)
    with pytest.raises(ValueError, match="takes no argument 'gain'"):
        KLXCallback(trainer, "pid", target=1.0, gain=2.0)


def test_refused_when_training_begins(tmp_path):
    trainer, other = (build_trainer(GRPOTrainer, tmp_path, beta=0.1) for _ in range(2))
    other.add_callback(KLXCallback(trainer, "fixed"))
    with pytest.raises(ValueError, match="added to another trainer than the one it was built for"):
        other.train()
    trainer.add_callback(KLXCallback(trainer, "fixed"))
    with pytest.raises(ValueError, match="more than one `KLXCallback`"):
        run(trainer, "fixed")


def test_a_trainer_that_logs_no_such_kl_is_refused(tmp_path):
    with pytest.raises(ValueError, match="logs no 'kl_div' from which to drive its `beta`. It logs .* kl, .*`kl_key`"):
        run(build_trainer(GRPOTrainer, tmp_path, beta=0.1), "fixed", kl_key="kl_div")


# ---- Whose KL is logged ----


def test_kto_is_refused(tmp_path):
    trainer = kto(tmp_path)
    reason = (
        "KTOTrainer cannot be driven by a `KLXCallback`: its `kl` is not the policy's: .*paired with the wrong prompts"
    )
    with pytest.raises(ValueError, match=f"{reason}.*Use `GRPOTrainer`, .*subclass.*name the metric in `kl_key`"):
        KLXCallback(trainer, target=1.0)


def test_kl_key_overrules_the_refusal(tmp_path):
    trainer = run(kto(tmp_path), "adaptive", target=0.5, horizon=20, kl_key="kl")
    coefs = logged(trainer, "klx/coef")
    assert coefs == replay("adaptive", logged(trainer, "kl"), 4, init_coef=0.1, target=0.5, horizon=20)


def test_dpo_is_refused(tmp_path):
    pairs = Dataset.from_dict({"prompt": ["w1 w2"] * 4, "chosen": [" w3"] * 4, "rejected": [" w4"] * 4})
    trainer = DPOTrainer(
        build_model(),
        args=DPOConfig(str(tmp_path), **OFFLINE),
        train_dataset=pairs,
        processing_class=build_tokenizer(),
        peft_config=lora(),
    )
    with pytest.raises(ValueError, match="DPOTrainer cannot be driven by a `KLXCallback`: it logs no KL"):
        KLXCallback(trainer, target=1.0)


def test_subclasses(tmp_path):
    class MyGRPO(GRPOTrainer):
        pass

    class MyKTO(KTOTrainer):
        pass

    class XPOTrainer(type(online_dpo(tmp_path))):
        """Like a former TRL trainer: derived from a trainer that logs the policy's KL, but it logs another KL."""

    trainer = build_trainer(MyGRPO, tmp_path, beta=0.1)
    assert KLXCallback(trainer, target=1.0).kl_key == "kl"
    with pytest.raises(ValueError, match="MyKTO, a KTOTrainer, cannot be driven"):
        KLXCallback(kto(tmp_path, MyKTO), target=1.0)
    trainer = online_dpo(tmp_path)
    trainer.__class__ = XPOTrainer
    with pytest.raises(ValueError, match="XPOTrainer cannot be driven .* half of the samples"):
        KLXCallback(trainer, target=1.0)
    assert KLXCallback(trainer, target=1.0, kl_key="mine").kl_key == "mine"


def test_an_unknown_trainer_needs_a_key(tmp_path):
    class Penalised(Trainer):
        beta = 0.1

    trainer = Penalised(build_model(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(
        ValueError, match="Penalised cannot be driven by a `KLXCallback`: nothing is known about what it"
    ):
        KLXCallback(trainer, target=1.0)
    assert KLXCallback(trainer, target=1.0, kl_key="my_kl").kl_key == "my_kl"


def trainers_with_beta() -> set[str]:
    """Names of the installed TRL's trainers that set a `beta`, and of their subclasses."""
    parents, names = {}, set()
    for path in Path(trl.__file__).parent.glob("**/*_trainer.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer"):
                parents[node.name] = {ast.unparse(base).removeprefix("_") for base in node.bases}
                targets = [
                    ast.unparse(t) for each in ast.walk(node) if isinstance(each, ast.Assign) for t in each.targets
                ]
                if {"self.beta", "self._beta"} & set(targets):
                    names.add(node.name)
    while more := {name for name, bases in parents.items() if bases & names} - names:
        names |= more
    return names


def test_every_trainer_of_trl_with_a_beta_is_known():
    names = trainers_with_beta()
    assert {"GRPOTrainer", "RLOOTrainer", "KTOTrainer", "DPOTrainer"} <= names
    # A new trainer must be read, to see which KL it logs.
    assert names <= LOGGED_KLS.keys() | REFUSED_TRAINERS.keys()
    assert not LOGGED_KLS.keys() & REFUSED_TRAINERS.keys()
