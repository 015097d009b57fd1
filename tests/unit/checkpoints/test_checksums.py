import json
import os

import pytest
import torch
from safetensors.torch import save_file

from trl_klx.checkpoints.checksums import CHECKSUM_FILE, checksum_fault, file_checksum, write_checksums
from trl_klx.checkpoints.integrity import content_fault, mark_unfinished
from trl_klx.checkpoints.kl_state import read_finite_weights, read_kl_state, write_kl_state


STATE = {
    "controller": {"name": "pid", "init_coef": 0.05, "state": {"value": 0.1, "integral": 1.09, "distance": None}},
    "drift": {"values": [1.0, 2.5], "side": "inside"},
    "reference": {"kind": "step", "step": 0, "hash": "abc"},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "global_step2").mkdir()
    contents = {"optimizer.pt": os.urandom(5000), "rng_state_1.pth": b"r", "global_step2/shard.pt": os.urandom(3)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    write_kl_state(str(tmp_path), STATE, {})
    (tmp_path / "README.md").write_text("words")
    write_checksums(str(tmp_path))
    return tmp_path


def flip(path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_nothing_changed(folder):
    assert checksum_fault(str(folder)) is None
    assert sorted(json.loads((folder / CHECKSUM_FILE).read_text())["files"]) == [
        "global_step2/shard.pt",
        "kl_state.json",
        "optimizer.pt",
        "rng_state_1.pth",
    ]


@pytest.mark.parametrize("name", ["optimizer.pt", "global_step2/shard.pt", "rng_state_1.pth"])
def test_every_flipped_bit_is_named(folder, name):
    size = (folder / name).stat().st_size
    for place in {0, size // 2, size - 1}:
        for bit in range(8):
            flip(folder / name, place, bit)
            assert f"`{name}` is not what was saved" in checksum_fault(str(folder))
            flip(folder / name, place, bit)
    assert checksum_fault(str(folder)) is None


def test_no_flipped_bit_of_the_state_is_taken(folder):
    path, content = folder / "kl_state.json", (folder / "kl_state.json").read_bytes()
    saved = read_kl_state(str(folder))
    taken = []
    for place in range(len(content)):
        for bit in range(8):
            flip(path, place, bit)
            try:
                if read_kl_state(str(folder)) != saved:
                    taken.append((place, bit))
            except ValueError as error:
                assert str(error).startswith("Cannot resume: ") and str(path) in str(error)
            path.write_bytes(content)
    assert taken == []


def test_no_flipped_bit_of_the_checksums_hides_anything(folder):
    path, content = folder / CHECKSUM_FILE, (folder / CHECKSUM_FILE).read_bytes()
    flip(folder / "optimizer.pt", 7)
    for place in range(len(content)):
        for bit in range(8):
            flip(path, place, bit)
            assert checksum_fault(str(folder)) is not None
            path.write_bytes(content)


def test_missing_files_are_named_and_new_ones_ignored(folder):
    (folder / "added_by_a_callback.bin").write_bytes(b"x")
    (folder / "README.md").write_text("other words")
    assert checksum_fault(str(folder)) is None
    (folder / "rng_state_1.pth").unlink()
    assert "it has no `rng_state_1.pth`, which was there" in checksum_fault(str(folder))


def test_what_messages_tell_to_delete_may_be_deleted(folder):
    (folder / "kl_state.json").unlink()
    assert checksum_fault(str(folder)) is None


def test_checkpoints_without_checksums_are_taken(folder):
    flip(folder / "optimizer.pt", 7)
    (folder / CHECKSUM_FILE).unlink()
    assert checksum_fault(str(folder)) is None
    (folder / "kl_state.json").write_text(json.dumps(STATE | {"version": 1}))
    assert read_kl_state(str(folder))["drift"] == STATE["drift"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "[" * 100_000], ids=["empty", "torn", "list", "dict", "nested"]
)
def test_damaged_checksums_are_named(folder, content):
    (folder / CHECKSUM_FILE).write_text(content)
    assert f"its `{CHECKSUM_FILE}` is" in checksum_fault(str(folder))


def test_old_checksums_go_before_new_files_come(folder):
    mark_unfinished(str(folder))
    assert not (folder / CHECKSUM_FILE).exists()


def test_links_are_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "optimizer.pt").write_text("precious")
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "optimizer.pt").symlink_to(outside / "optimizer.pt")
    (folder / "inner").symlink_to(outside)
    linked = tmp_path / "checkpoint-4"
    linked.symlink_to(outside)
    mark_unfinished(str(folder))
    mark_unfinished(str(linked))
    assert os.listdir(folder) == [] and not os.path.lexists(linked)
    assert (outside / "optimizer.pt").read_text() == "precious"


def test_files_larger_than_a_chunk(tmp_path):
    import zlib

    content = os.urandom(9_000_001)
    (tmp_path / "large").write_bytes(content)
    assert file_checksum(str(tmp_path / "large")) == f"{zlib.crc32(content):08x}"


# ---- Weights that no run can go on with ----


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "value_function.safetensors"])
def test_weights_that_are_not_finite_are_named(tmp_path, name, value):
    save_file({"good": torch.zeros(2), "bad": torch.tensor([0.0, value])}, tmp_path / name)
    assert f"its `{name}` cannot be used: weight 'bad' holds" in content_fault(str(tmp_path))
    with pytest.raises(ValueError, match=rf"weight 'bad' holds .* in '.*{name}'"):
        read_finite_weights(str(tmp_path / name))


def test_finite_weights_are_read(tmp_path):
    save_file({"good": torch.ones(2)}, tmp_path / "value_function.safetensors")
    assert content_fault(str(tmp_path)) is None
    assert torch.equal(read_finite_weights(str(tmp_path / "value_function.safetensors"))["good"], torch.ones(2))
