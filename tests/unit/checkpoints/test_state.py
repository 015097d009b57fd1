import json
import math
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trl_klx.checkpoints.atomic_write import atomic_write
from trl_klx.checkpoints.kl_state import read_json, read_kl_reference, read_kl_state, write_json, write_kl_state


STATE = {
    "controller": {"name": "pid", "init_coef": 0.05, "state": {"value": 0.1, "integral": -0.3, "distance": None}},
    "drift": {"values": [1.0, 2.5]},
    "reference": {"kind": "step", "step": 0, "hash": "abc"},
}
FILE, REFERENCE = "kl_state.json", "kl_reference.safetensors"


def test_round_trip(tmp_path):
    write_kl_state(str(tmp_path), STATE, {})
    assert read_kl_state(str(tmp_path)) == STATE | {"version": 2}
    assert os.listdir(tmp_path) == [FILE]


def test_round_trip_with_the_weights_of_a_moving_reference(tmp_path):
    shared = torch.randn(6)
    weights = {
        "a|x.weight": torch.randn(3, 4).t(),  # not contiguous
        "b": shared[:3],
        "c": shared[3:],  # shares one storage
        "d": torch.randn(2).bfloat16(),
        "e": torch.nn.Parameter(torch.randn(2, 2)),
    }
    write_kl_state(str(tmp_path), STATE, weights)
    again = read_kl_reference(str(tmp_path))
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        assert again[name].dtype == weight.dtype and torch.equal(again[name], weight)
    assert sorted(os.listdir(tmp_path)) == sorted([FILE, REFERENCE])


def test_folder_is_made(tmp_path):
    write_kl_state(str(tmp_path / "run" / "checkpoint-3"), STATE, {"w": torch.zeros(1)})
    assert read_kl_state(str(tmp_path / "run" / "checkpoint-3"))["drift"] == STATE["drift"]


def test_writing_again_replaces(tmp_path):
    write_kl_state(str(tmp_path), STATE, {"w": torch.zeros(1)})
    write_kl_state(str(tmp_path), STATE | {"drift": None}, {"w": torch.ones(2)})
    assert read_kl_state(str(tmp_path))["drift"] is None
    assert torch.equal(read_kl_reference(str(tmp_path))["w"], torch.ones(2))


def test_floats_come_back_to_the_bit(tmp_path):
    values = [0.1, 1 / 3, math.pi, 5e-324, 1.7976931348623157e308, -0.0]
    write_kl_state(str(tmp_path), STATE | {"drift": {"values": values}}, {})
    again = read_kl_state(str(tmp_path))["drift"]["values"]
    assert [value.hex() for value in again] == [value.hex() for value in values]


def test_files_are_as_readable_as_any_other(tmp_path):
    (tmp_path / "other").touch()
    write_kl_state(str(tmp_path), STATE, {"w": torch.zeros(1)})
    usual = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == usual


# ---- All or nothing ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_nan_is_written(tmp_path, value):
    with pytest.raises(ValueError):
        write_kl_state(str(tmp_path), STATE | {"drift": {"values": [value]}}, {})
    assert os.listdir(tmp_path) == []


class Unwritable:
    """A value that cannot be written. It comes last, after much that can."""


@pytest.mark.parametrize("existing", [False, True])
def test_writer_that_fails_half_way_leaves_the_old_file(tmp_path, existing):
    if existing:
        write_kl_state(str(tmp_path), STATE, {})
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    spoiled = STATE | {"drift": {"values": [0.5] * 100_000, "last": Unwritable()}}
    with pytest.raises(TypeError):
        write_kl_state(str(tmp_path), spoiled, {})
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_weights_that_cannot_be_written_leave_the_old_file(tmp_path):
    write_kl_state(str(tmp_path), STATE, {"w": torch.zeros(1)})
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(Exception):  # noqa: B017
        write_kl_state(str(tmp_path), STATE | {"drift": None}, {"w": sparse})
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_interrupted_rename_leaves_the_old_file(tmp_path, monkeypatch):
    write_json(str(tmp_path / FILE), {"a": 1})

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_json(str(tmp_path / FILE), {"a": 2})
    assert read_json(str(tmp_path / FILE)) == {"a": 1} and os.listdir(tmp_path) == [FILE]


def test_two_writers_at_once_do_not_share_a_temporary_file(tmp_path):
    path = tmp_path / FILE
    with atomic_write(path) as first, atomic_write(path) as second:
        assert first != second
        for temporary in (first, second):
            Path(temporary).write_text(json.dumps({"from": temporary}))
    assert read_json(str(path)) == {"from": first} and os.listdir(tmp_path) == [FILE]


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        write_kl_state(str(tmp_path / "file" / "checkpoint-1"), STATE, {})


# ---- Files that are refused ----


def test_no_state_is_none(tmp_path):
    assert read_kl_state(str(tmp_path)) is None
    assert read_kl_state(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize("content", [b"", b"{", b"{'a': 1}", b"\xff\xfe", b"[1]", b"null", b"3"])
def test_invalid_json(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match="Cannot resume: .*cannot be read.*Resume from another checkpoint") as caught:
        read_kl_state(str(tmp_path))
    assert str(tmp_path / FILE) in str(caught.value)


def test_truncated_state(tmp_path):
    write_kl_state(str(tmp_path), STATE, {})
    content = (tmp_path / FILE).read_bytes()
    for length in range(len(content)):
        (tmp_path / FILE).write_bytes(content[:length])
        with pytest.raises(ValueError, match="Cannot resume"):
            read_kl_state(str(tmp_path))


@pytest.mark.parametrize("version", [0, 3, "2", True, None, [1]])
def test_wrong_version(tmp_path, version):
    (tmp_path / FILE).write_text(json.dumps(STATE | {"version": version}))
    with pytest.raises(
        ValueError, match=r"Cannot resume: .*has version .*, expected 2\. Resume from another"
    ) as caught:
        read_kl_state(str(tmp_path))
    assert repr(version) in str(caught.value) and str(tmp_path / FILE) in str(caught.value)


def test_no_version(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(STATE))
    with pytest.raises(ValueError, match="has version None, expected 2"):
        read_kl_state(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("controller", "reference") for value in (None, 3, "fixed", [1])),
        *(("drift", value) for value in (3, "fixed", [1])),
    ],
)
def test_wrong_types(tmp_path, key, value):
    (tmp_path / FILE).write_text(json.dumps(STATE | {"version": 1, key: value}))
    with pytest.raises(ValueError, match=f"Cannot resume: .*has no valid '{key}', got") as caught:
        read_kl_state(str(tmp_path))
    assert repr(value) in str(caught.value) and str(tmp_path / FILE) in str(caught.value)


@pytest.mark.parametrize("key", ["controller", "reference"])
def test_missing_keys(tmp_path, key):
    content = {name: value for name, value in STATE.items() if name != key}
    (tmp_path / FILE).write_text(json.dumps(content | {"version": 1}))
    with pytest.raises(ValueError, match=f"has no valid '{key}', got None"):
        read_kl_state(str(tmp_path))


def test_missing_weights_of_a_moving_reference(tmp_path):
    write_kl_state(str(tmp_path), STATE, {})
    with pytest.raises(ValueError, match="Cannot resume: the weights of the reference in .* cannot be read"):
        read_kl_reference(str(tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.99])
def test_truncated_weights_of_a_moving_reference(tmp_path, share):
    write_kl_state(str(tmp_path), STATE, {"w": torch.randn(100)})
    file = tmp_path / REFERENCE
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="Cannot resume: the weights of the reference") as caught:
        read_kl_reference(str(tmp_path))
    assert str(file) in str(caught.value) and "Resume from another checkpoint" in str(caught.value)


def test_weights_are_plain_safetensors(tmp_path):
    write_kl_state(str(tmp_path), STATE, {"w": torch.arange(3.0)})
    assert torch.equal(load_file(tmp_path / REFERENCE)["w"], torch.arange(3.0))
