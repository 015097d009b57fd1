"""The table of completions carries each completion's own KL."""

from collections import defaultdict, deque

import pandas
import pytest
import torch
from accelerate import Accelerator

from support.oracle import kl_of_tokens, plain_model
from support.tiny import build_dataset, build_trainer, logged, recording, trained_lora
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.trainers.completions_table import CompletionKLs


FIELDS = {"kl_penalty_coef": 0.1, "log_completions": True, "num_completions_to_print": 0, "max_steps": 2}
TWO_MICRO_BATCHES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CASES = {
    "in the loss": (KLXGRPOTrainer, {}),
    "one more forward": (KLXGRPOTrainer, TWO_MICRO_BATCHES),
    "in each loss": (KLXGRPOTrainer, TWO_MICRO_BATCHES | {"kl_centering": "microbatch"}),
    "twice in the loss": (KLXGRPOTrainer, {"kl_centering": "microbatch", "num_iterations": 2, "max_steps": 4}),
    "term of the loss": (KLXGRPOTrainer, TWO_MICRO_BATCHES | {"kl_placement": "loss"}),
    "reward": (KLXGRPOTrainer, {"kl_placement": "reward"}),
    "full": (KLXGRPOTrainer, {"kl_penalty_coef": 0.0, "kl_monitor": True, "kl_estimator": "full"}),
    "rloo": (KLXRLOOTrainer, TWO_MICRO_BATCHES),
}


def expected_kls(trainer, estimator="k3"):
    """The KL of each completion in the last generation batch, computed from scratch."""
    batch = trainer.generated[-1]
    reference = plain_model(trainer.accelerator.unwrap_model(trainer.model), adapter=None)
    return [sum(row) for row in kl_of_tokens(batch["policy"], reference, batch, estimator)]


@pytest.mark.parametrize("case", CASES)
def test_each_completion_has_its_own_kl(case, tmp_path):
    trainer_class, fields = CASES[case]
    model = trained_lora(1, scale=0.1)
    trainer = build_trainer(recording(trainer_class), tmp_path, model=model, **(FIELDS | fields))
    trainer.train()
    found = list(trainer._logs["extra"]["klx/kl"])
    assert found == pytest.approx(expected_kls(trainer, fields.get("kl_estimator", "k3")), rel=1e-5, abs=1e-5)
    assert sum(found) / 4 == pytest.approx(logged(trainer, "klx/kl")[-1], rel=1e-6)
    assert len(set(found)) == 4 and min(found) > 1e-3
    if trainer_class is KLXGRPOTrainer:  # which writes the table to a file
        table = pandas.read_parquet(tmp_path / "completions" / f"completions_{trainer.state.global_step:05d}.parquet")
        assert table["klx/kl"].tolist() == found
        assert table["completion"].tolist() == [
            trainer.processing_class.decode(ids[mask.bool()], skip_special_tokens=True)
            for ids, mask in zip(
                trainer.generated[-1]["completion_ids"], trainer.generated[-1]["completion_mask"], strict=True
            )
        ]


def test_ppo(tmp_path):
    trainer = build_ppo(tmp_path, model=trained_lora(1, scale=0.1), **FIELDS)
    trainer.train()
    found = list(trainer._logs["extra"]["klx/kl"])
    assert len(found) == len(trainer._logs["completion"]) and len(set(found)) > 1
    assert sum(found) / len(found) == pytest.approx(logged(trainer, "klx/kl")[-1], rel=1e-6)


def test_a_completion_that_does_not_count_has_none(tmp_path):
    fields = FIELDS | {"mask_truncated_completions": True, "max_steps": 4}
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, model=trained_lora(1, scale=0.1), **fields)
    trainer.train()
    tables = [pandas.read_parquet(path) for path in sorted((tmp_path / "completions").iterdir())]
    masked = 0
    for table, entry in zip(tables, trainer.state.log_history, strict=False):
        masked += table["klx/kl"].isna().sum()
        if "klx/kl" in entry:
            assert table["klx/kl"].mean() == pytest.approx(entry["klx/kl"], rel=1e-6)
    assert 0 < masked < 16


def test_rows_that_are_still_to_be_trained_on(tmp_path):
    # Two optimizer steps per generation batch, whose losses measure the KL.
    fields = FIELDS | {"per_device_train_batch_size": 2, "steps_per_generation": 2, "kl_centering": "microbatch"}
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, model=trained_lora(1, scale=0.1), **fields)
    trainer.train()
    first, second = (pandas.read_parquet(tmp_path / "completions" / f"completions_0000{i}.parquet") for i in (1, 2))
    assert first["completion"].tolist() == second["completion"].tolist()
    assert first["klx/kl"].isna().sum() == 2 and second["klx/kl"].notna().all()
    assert first["klx/kl"].dropna().tolist() == second["klx/kl"][first["klx/kl"].notna()].tolist()
    assert second["klx/kl"].mean() == pytest.approx(logged(trainer, "klx/kl")[0], rel=1e-6)


def test_evaluation_has_the_column_too(tmp_path):
    extras = {"eval_dataset": build_dataset(2)}
    model = trained_lora(1, scale=0.1)
    fields = FIELDS | {"per_device_eval_batch_size": 4}
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, model=model, extras=extras, **fields)
    trainer.evaluate()
    found = list(trainer._logs["extra"]["klx/kl"])
    assert len(found) == len(trainer._logs["completion"]) == 4
    assert sum(found) / 4 == pytest.approx(logged(trainer, "eval_klx/kl")[-1], rel=1e-6)


def test_rows_keep_their_place_as_the_table_moves_on():
    columns = defaultdict(lambda: deque(maxlen=4))
    kls = CompletionKLs(columns, Accelerator(cpu=True))
    training, evaluation = {"completion_ids": torch.zeros(4, 1)}, {"completion_ids": torch.zeros(2, 1)}
    kls.add(training)
    kls.add(evaluation)  # pushes out the first two, while the others wait for their loss
    kls.fill(evaluation, torch.tensor([[5.0], [6.0]]), torch.ones(2, 1))
    shuffled = {"klx_row": training["klx_row"][[3, 0, 2, 1]]}
    kls.fill(shuffled, torch.tensor([[4.0], [1.0], [3.0], [2.0]]), torch.ones(4, 1))
    assert list(columns["klx/kl"]) == [3.0, 4.0, 5.0, 6.0]


def test_switched_on_in_the_middle(tmp_path):
    fields = FIELDS | {"log_completions": False, "max_steps": 1, "per_device_eval_batch_size": 2}
    extras = {"eval_dataset": build_dataset(1)}
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, model=trained_lora(1, scale=0.1), extras=extras, **fields)
    trainer.train()
    assert list(trainer._logs["extra"]["klx/kl"]) == [None] * 4  # nothing was gathered
    trainer.log_completions = True
    (tmp_path / "completions").mkdir()
    trainer.evaluate()
    # Two completions from training, then the two that were measured and logged.
    found = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")["klx/kl"].tolist()
    assert pandas.isna(found[:2]).all()
    assert sum(found[2:]) / 2 == pytest.approx(logged(trainer, "eval_klx/kl")[-1], rel=1e-6)


def test_nothing_is_added_without_kl_control(tmp_path):
    fields = {"max_steps": 1, "log_completions": True, "num_completions_to_print": 0}
    trainer = build_trainer(recording(KLXGRPOTrainer), tmp_path, **fields)
    trainer.train()
    assert not trainer._logs["extra"] and "klx_row" not in trainer.losses[0]
