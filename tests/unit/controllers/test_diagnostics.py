import json
import math

import pytest

from trl_klx.controllers.drift import DriftMonitor


def feed(monitor, *kls):
    """The warning after each value: 'above', 'below' or None."""
    names = {True: "above", False: "below"}
    return [None if text is None else names["more than twice" in text] for text in map(monitor.update, kls)]


class TestCrossing:
    def test_silent_until_the_window_is_full(self):
        assert feed(DriftMonitor(1.0, 3), 9.0, 9.0, 9.0) == [None, None, "above"]

    def test_once_per_crossing(self):
        assert feed(DriftMonitor(1.0, 1), 3.0, 3.0, 5.0, 1.0, 3.0, 3.0) == ["above", None, None, None, "above", None]

    def test_straight_to_the_other_side(self):
        assert feed(DriftMonitor(1.0, 1), 3.0, 0.1, 0.1, 3.0) == ["above", "below", None, "above"]

    def test_limits_are_inside(self):
        assert feed(DriftMonitor(1.0, 1), 2.0, 0.5, 2.001, 0.499) == [None, None, "above", "below"]

    def test_mean_over_the_window_decides(self):
        # Means of the last two: -, 2.5, 2.0, 1.25, 0.35. A single outlier in a calm window is not drift.
        assert feed(DriftMonitor(1.0, 2), 1.0, 4.0, 0.0, 2.5, -1.8) == [None, "above", None, None, "below"]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_non_finite_values_are_skipped(self, bad):
        monitor = DriftMonitor(1.0, 2)
        assert feed(monitor, 3.0, bad, 3.0) == [None, None, "above"]
        assert monitor.state_dict()["values"] == [3.0, 3.0]


class TestText:
    def test_above(self):
        text = DriftMonitor(6.0, 1).update(15.0)
        for part in (
            "15",
            "6",
            "last 1 batches",
            "kl_penalty_coef",
            "kl_controller='hold'",
            "5-6 nats",
        ):
            assert part in text
        assert "0.01-0.03" not in text

    def test_below(self):
        text = DriftMonitor(0.1, 2, unit="token")
        text.update(0.01)
        text = text.update(0.03)
        for part in (
            "0.02",
            "0.1",
            "last 2 batches",
            "kl_penalty_coef",
            "not learning",
            "0.01-0.03",
            "0.05-0.10",
            "0.10-0.20",
        ):
            assert part in text
        assert "per token" in text and "5-6" not in text


class TestState:
    def test_json_round_trip_goes_on_as_if_nothing_happened(self):
        kls = [1.0, 3.0, 4.0, 1.0, 0.1, 0.1, 0.1, 5.0, 5.0]
        expected = feed(DriftMonitor(1.0, 2), *kls)
        assert {"above", "below"} <= set(expected)
        for cut in range(len(kls) + 1):
            first, second = DriftMonitor(1.0, 2), DriftMonitor(1.0, 2)
            before = feed(first, *kls[:cut])
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert before + feed(second, *kls[cut:]) == expected

    def test_longer_saved_window_keeps_the_newest(self):
        monitor = DriftMonitor(1.0, 2)
        monitor.load_state_dict({"values": [1, 2, 3, 4], "side": "inside"})
        assert monitor.state_dict()["values"] == [3.0, 4.0]

    def test_shorter_saved_window_fills_up_first(self):
        monitor = DriftMonitor(1.0, 3)
        monitor.load_state_dict({"values": [9.0], "side": "inside"})
        assert feed(monitor, 9.0, 9.0) == [None, "above"]

    @pytest.mark.parametrize(
        "state, message",
        [
            ([], "'values' and 'side'"),
            ({"values": []}, "'values' and 'side'"),
            ({"values": [], "side": "inside", "more": 1}, "'values' and 'side'.*more"),
            ({"values": 3.0, "side": "inside"}, "'values' must be a list.*3.0"),
            ({"values": [1.0, math.nan], "side": "inside"}, "'values' holds nan"),
            ({"values": ["1"], "side": "inside"}, "'values' holds '1'"),
            ({"values": [], "side": "left"}, "'side' is 'left'.*inside, above, below"),
        ],
    )
    def test_invalid_state_is_refused_whole(self, state, message):
        monitor = DriftMonitor(1.0, 2)
        monitor.update(3.0)
        before = monitor.state_dict()
        with pytest.raises(ValueError, match=message):
            monitor.load_state_dict(state)
        assert monitor.state_dict() == before


class TestConstruction:
    @pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
    def test_bad_target(self, target):
        with pytest.raises(ValueError, match=f"`target`.*{target!r}"):
            DriftMonitor(target, 10)

    def test_bad_window_and_unit(self):
        with pytest.raises(ValueError, match="`window`.*0"):
            DriftMonitor(1.0, 0)
        with pytest.raises(ValueError, match="'batch'.*sequence, token"):
            DriftMonitor(1.0, 1, unit="batch")
