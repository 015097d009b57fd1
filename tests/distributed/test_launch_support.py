"""The tests' own launcher of process groups: what it runs again, and what it reports."""

import sys

import pytest

from support.engines import TORCHRUN
from support.launch import run_group


pytestmark = pytest.mark.slow


@pytest.fixture
def script(tmp_path):
    """A script whose second process ends in a given way, as long as a file is there."""
    (tmp_path / "ill").touch()

    def write(end: str) -> list[str]:
        lines = ["import os", f"ill = os.path.exists({str(tmp_path / 'ill')!r})"]
        lines += [f"if ill and os.environ['RANK'] == '1': {end}"]
        (tmp_path / "script.py").write_text("\n".join(lines))
        return [sys.executable, "-m", *TORCHRUN, str(tmp_path / "script.py")]

    return write


def test_an_aborted_group_is_run_once_more(script, tmp_path):
    with pytest.warns(UserWarning, match="A worker was aborted.*\n.*Fatal Python error: Aborted"):
        run_group(script("os.abort()"), clean_up=(tmp_path / "ill").unlink)


def test_but_not_twice(script):
    with pytest.warns(UserWarning, match="A worker was aborted"), pytest.raises(AssertionError, match="Fatal Python"):
        run_group(script("os.abort()"), clean_up=lambda: None)


def test_an_error_fails_at_once(script, tmp_path):
    with pytest.raises(AssertionError, match="ValueError: 17"):
        run_group(script("raise ValueError(17)"), clean_up=(tmp_path / "ill").unlink)
    assert (tmp_path / "ill").exists()


def test_an_aborted_group_fails_without_a_clean_up(script):
    with pytest.raises(AssertionError, match="Fatal Python error: Aborted"):
        run_group(script("os.abort()"))
