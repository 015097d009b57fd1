import pytest

from trl_klx.controllers.tracking_error import relative_rms_error, steps_to_settle


def test_relative_rms_error():
    # Errors -0.5, 0 and 1: sqrt((0.25 + 0 + 1) / 3).
    assert relative_rms_error([2.0, 4.0, 8.0], 4.0) == pytest.approx((1.25 / 3) ** 0.5)
    assert relative_rms_error([4.0], 4.0) == 0.0
    with pytest.raises(ValueError, match="`kls` is empty"):
        relative_rms_error([], 4.0)


@pytest.mark.parametrize(
    "kls, steps",
    [
        ([4.0] * 8, 0),
        # Means of two: 2, 4, 4, ... The first is outside.
        ([0.0, 4.0, 4.0, 4.0], 1),
        # It settles only after the last excursion: means 4, 6, 6, 4.
        ([4.0, 4.0, 8.0, 4.0, 4.0], 3),
        # One noisy batch does not count while the mean stays inside: (4 + 5.4) / 2 = 4.7.
        ([4.0, 5.4, 4.0, 4.0], 0),
        ([4.0, 4.0, 8.0], None),
        ([4.0], None),
        ([], None),
    ],
)
def test_steps_to_settle(kls, steps):
    assert steps_to_settle(kls, 4.0, band=0.2, window=2) == steps


def test_edge_of_the_band_is_inside():
    assert steps_to_settle([4.8] * 5, 4.0) == 0 and steps_to_settle([4.81] * 5, 4.0) is None
