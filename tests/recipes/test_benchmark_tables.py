"""The benchmarks' summaries, verdicts and tables, on records made by hand. No benchmark is run."""

import json
import math
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import controllers  # noqa: E402
import estimators  # noqa: E402
import promise  # noqa: E402
import robustness  # noqa: E402

from trl_klx import get_kl_controller  # noqa: E402


def record(kl, coef=0.2, reward=1.0, perplexity=2.0, target=4.0, seed=0):
    length = len(kl)
    series = {"kl": kl, "coef": [coef] * length, "reward": [reward] * length}
    return series | {"target": target, "seed": seed, "perplexity": [[0, 1.0], [length, perplexity]]}


def summaries(**changes):
    groups = {
        "hold": [record([0.0, 4.0] + [4.2] * 18)],
        "free": [record([0.0, 4.0] + [9.0] * 18)],
        "adaptive 100": [record([0.0, 12.0] + [8.0] * 13 + [4.0] * 5)],
        "fixed 0.1": [record([9.0] * 20, reward=1.2, perplexity=3.0)],
        "fixed 1.0": [record([1.0] * 20, reward=0.6, perplexity=1.5)],
    } | changes
    return {label: controllers.summarise(records) for label, records in groups.items()}


def test_summary_of_a_controller():
    one = controllers.summarise([record([0.0, 6.0, 4.0, 5.0]), record([0.0, 5.0, 4.0, 4.0], seed=1)])
    # The second halves are (4, 5) and (4, 4): errors (0, 0.25) and (0, 0).
    assert one["rms_error"] == pytest.approx((0.25**2 / 2) ** 0.5 / 2)
    assert one["rms_error_worst"] == pytest.approx((0.25**2 / 2) ** 0.5)
    assert one["peak"] == pytest.approx((1.5 + 1.25) / 2) and one["peak_worst"] == 1.5
    # Four batches are fewer than a window: neither run has settled, so each counts with its length.
    assert (one["settled_at"], one["never_settled"], one["seeds"], one["batches"]) == (4, 2, 2, 4)
    assert one["kl"] == pytest.approx((4.5 + 4.0) / 2) and one["coef"] == pytest.approx(0.2)


def test_frontier_is_straight_in_the_root_of_the_kl():
    summary = summaries()
    # sqrt(1) = 1 and sqrt(9) = 3: at a KL of 4, halfway.
    assert controllers.interpolate_frontier(summary, 4.0, "reward") == pytest.approx(0.9)
    assert controllers.interpolate_frontier(summary, 9.5, "reward") is None


def test_verdict_says_yes_and_no():
    lines = controllers.verdict(summaries())
    assert [line[:3] for line in lines] == ["yes", "yes", "yes", "yes", "yes", "yes"], lines
    # A low reward for its KL, a peak of twice the target, and late.
    bad = controllers.verdict(summaries(hold=[record([0.0] * 8 + [8.0] * 12, reward=0.1, perplexity=9.0)]))
    assert [line[:3] for line in bad] == ["NO ", "NO ", "NO ", "NO ", "NO ", "NO "], bad


def test_table_goes_between_the_marks(tmp_path):
    page = tmp_path / "choosing.md"
    page.write_text("before\n<!-- controllers -->\nstale\n<!-- /controllers -->\nafter\n")
    controllers.write_tables({"stories-grpo": summaries()}, page)
    text = page.read_text()
    assert text.startswith("before\n<!-- controllers -->\n`stories-grpo`:\n\n| controller |") and text.endswith(
        "<!-- /controllers -->\nafter\n"
    )
    assert "stale" not in text and "| `hold` | 0.050 | 1.05 |" in text
    controllers.write_tables({"stories-grpo": summaries()}, page)
    assert page.read_text() == text


def test_the_docs_have_the_marks():
    text = (ROOT / "docs" / "choosing.md").read_text()
    assert text.count("<!-- controllers -->") == text.count("<!-- /controllers -->") == 1


def test_table_of_the_promise(capsys):
    """A single batch at twice the target is a peak of 2, but of three batches one of 4 / 3."""
    cases = [{"setup": "default", "controller": controller, "seed": 10} for controller in ("hold", "free")]
    results = promise.Results(None)
    results.add(cases[0], {"kl": [0.0, 2.0] + [4.0] * 7 + [8.0, 4.0, 4.0], "reward": [0.5] * 12})
    results.add(cases[1], {"kl": [0.0, 4.0, 8.0], "reward": [1.0] * 3})
    promise.show(["default", "by k3"], cases, results)
    # The second half is (4, 4, 4, 8, 4, 4): an error of sqrt(1 / 6), a mean of 7 / 6.
    assert capsys.readouterr().out.splitlines()[2:] == ["| default | 0.41 | 2.00 | 1.33 | 1.17 | 5; 3 | 0.500 |"]


def test_settings_of_every_task():
    for task in controllers.TASKS:
        labels = [setting.label for setting in controllers.list_settings(task)]
        assert labels[:3] == ["hold", "pid", "log-pid"] and labels[-1] == "free"
        # The horizon that its authors' ratio gives, and the usual one.
        assert [label for label in labels if label.startswith("adaptive")][1] == "adaptive 10000"
        assert sum(label.startswith("fixed") for label in labels) >= 3


def test_small_policy_learns_and_is_measured():
    case = robustness.Case(batch=32)
    free, measured, exact = robustness.Policy(0, case), [], []
    for _ in range(40):
        rollout = free.sample(0.0, 1)
        free.learn([rollout])
        measured.append(rollout.measured.kl)
        exact.append(rollout.exact)
    assert exact[0] == pytest.approx(0.0, abs=1e-12) and exact[-1] > 10.0
    # k3 is unbiased: over the run its sum matches the exact KL.
    assert sum(measured[5:25]) == pytest.approx(sum(exact[5:25]), rel=0.2)
    for name in ("hold", "pid"):
        held = robustness.follow(name, 0, case)
        assert max(held) < 1.4 and sum(held[75:]) / 75 == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("most", "changes"),
    [
        (0.5, {}),
        (0.5, {"batch": 256}),
        (0.5, {"batch": 16, "learning_rate": 0.05}),
        (0.5, {"learning_rate": 0.033}),
        # Nearly all of the KL is the walk of the noise there, and that is known to a factor of two.
        (math.log(2.0), {"learning_rate": 0.3}),
    ],
)
def test_hold_knows_its_coefficient_from_the_batch(most, changes):
    """
    Little is left to what only the KL teaches, bias and mobility: neither the size of a batch nor the learning rate
    misleads the law.
    """
    case = robustness.Case(**changes)
    policy, controller, learned = robustness.Policy(0, case), get_kl_controller("hold", target=case.target), []
    for batch in range(case.batches):
        rollout = policy.sample(controller.value, int(batch > 0))
        rollout.coef = controller.observe(rollout.measured)
        policy.learn([rollout])
        told = get_kl_controller("hold", target=case.target)
        told.load_state_dict(controller.state_dict() | {"bias": 0.0, "mobility": 1.0})
        learned.append(math.log(controller.hold / told.hold))
    assert abs(sum(learned[75:]) / 75) < most


def test_tables_of_the_estimators():
    row = {"kl_per_sequence": 2.0, "kl_per_token": 0.1, "bias": 0.5, "bias_error": 0.01}
    row |= {"token_variance": 0.2, "batch_variance": 0.3, "batch_noise": 0.04}
    table = estimators.format_statistics([{"estimator": name, **row} for name in estimators.KL_ESTIMATORS])
    assert "| `k1` | +50% ± 1 | 0.2 | 0.3 | 4% |" in table
    cost = estimators.measure_cost(48, 1, 500, "time")
    assert cost["forward"] > 0 and cost["full"] > 0
    assert estimators.measure_cost(48, 1, 500, "full").keys() == {"full", "memory"}
    assert json.loads(json.dumps(cost)) == cost
