"""When a run has stalled: the rule, and the window that it is applied to."""

import json
import math

import pytest

from trl_klx.controllers.stall import StallMonitor, has_stalled


FAR, NEAR = 0.1, 6.0  # KLs, for a target of 6 nats


@pytest.mark.parametrize(
    ("rewards", "stalled"),
    [
        ([1.0, 1.0], True),
        ([1.0, 0.9], True),
        ([1.0, 1.1], False),
        # Means of the halves: 1.5 and 1.4, then 1.5 and 1.6.
        ([1.0, 2.0, 2.0, 0.8], True),
        ([1.0, 2.0, 0.0, 3.2], False),
        # The one in the middle is in neither half.
        ([1.0, 9.0, 1.0], True),
        ([1.0, -9.0, 1.1], False),
    ],
)
def test_the_second_half_is_compared_with_the_first(rewards, stalled):
    assert has_stalled(rewards, [NEAR] * len(rewards), 6.0) is stalled
    assert has_stalled(rewards, [FAR] * len(rewards)) is stalled
    assert not has_stalled(rewards, [FAR] * len(rewards), 6.0)


@pytest.mark.parametrize(
    ("kls", "there"),
    [([5.4, 5.4], True), ([5.39, 5.39], False), ([4.8, 6.0], True), ([20.0, 20.0], True), ([0.0, 10.0], False)],
)
def test_the_kl_is_there_from_nine_tenths_of_the_target(kls, there):
    assert has_stalled([1.0, 1.0], kls, 6.0) is there


@pytest.mark.parametrize(("rewards", "kls"), [([], []), ([1.0], [1.0]), ([1.0, 1.0], [1.0])])
def test_too_few_batches_are_refused(rewards, kls):
    with pytest.raises(ValueError, match="as many rewards as KLs, and two at least"):
        has_stalled(rewards, kls)


def verdicts(monitor: StallMonitor, *batches: tuple[float, float]) -> list[bool]:
    found = []
    for reward, kl in batches:
        monitor.update(reward, kl)
        found.append(monitor.stalled)
    return found


def test_there_is_no_verdict_before_the_window_is_full():
    assert verdicts(StallMonitor(4), *[(1.0, 1.0)] * 6) == [False, False, False, True, True, True]


def test_only_the_last_batches_count():
    monitor = StallMonitor(2, target=6.0)
    batches = [(5.0, NEAR), (1.0, NEAR), (2.0, NEAR), (2.0, FAR), (2.0, NEAR), (2.0, NEAR)]
    # Mean KLs of the last two: 6, 6, 3.05, 3.05, 6.
    assert verdicts(monitor, *batches) == [False, True, False, False, False, True]
    monitor.clear()
    assert verdicts(monitor, (1.0, NEAR), (0.0, NEAR)) == [False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_batch_that_is_not_finite_is_skipped(bad):
    monitor = StallMonitor(2)
    assert verdicts(monitor, (1.0, 1.0), (bad, 1.0), (1.0, bad), (1.0, 1.0)) == [False, False, False, True]
    assert monitor.state_dict() == {"rewards": [1.0, 1.0], "kls": [1.0, 1.0]}


@pytest.mark.parametrize("patience", [1, 0, -3])
def test_a_window_of_one_batch_is_refused(patience):
    with pytest.raises(ValueError, match="`patience` must be at least 2"):
        StallMonitor(patience)


def test_state_goes_through_json_and_the_newest_batches_are_kept():
    monitor = StallMonitor(3)
    verdicts(monitor, (0.1, 1.0), (0.2, 2.0), (0.3, 3.0), (0.4, 4.0))
    state = json.loads(json.dumps(monitor.state_dict(), allow_nan=False))
    assert state == monitor.state_dict() == {"rewards": [0.2, 0.3, 0.4], "kls": [2.0, 3.0, 4.0]}
    shorter = StallMonitor(2)
    shorter.load_state_dict(state)
    assert shorter.state_dict() == {"rewards": [0.3, 0.4], "kls": [3.0, 4.0]}


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"rewards": [1.0], "kls": [1.0], "more": 1},
        {"rewards": [1.0], "kls": []},
        {"rewards": [math.nan], "kls": [1.0]},
        {"rewards": ["1"], "kls": [1.0]},
        {"rewards": [1.0], "kls": [math.inf]},
        {"rewards": 1.0, "kls": [1.0]},
    ],
    ids=str,
)
def test_a_damaged_state_changes_nothing(state):
    monitor = StallMonitor(2)
    monitor.update(1.0, 2.0)
    with pytest.raises(ValueError, match="State of StallMonitor"):
        monitor.load_state_dict(state)
    assert monitor.state_dict() == {"rewards": [1.0], "kls": [2.0]}
