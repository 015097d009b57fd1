"""Untrusted adapters: each is refused with one clear error and without touching the policy, or it is sound."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from support.damage import FUZZ, changed, damaged_bytes, damaged_header
from support.tiny import trained_lora
from trl_klx.references.adapter_loading import REFERENCE_ADAPTER, load_reference_adapter
from trl_klx.references.fingerprint import hash_tensors
from trl_klx.references.peft_adapters import adapter_active


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENS = torch.tensor([[5, 6, 7, 8]])


class Opened:
    """Records the files that Python opens, deletes or runs while active. Audit hooks cannot be removed."""

    def __init__(self):
        self.paths: list[str] | None = None
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if self.paths is None:
            return
        if event == "subprocess.Popen" and list(arguments[1][1:3]) == ["-I", "-S"]:
            return  # the process in which patterns are tried
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            self.paths.append(os.fsdecode(arguments[0]))
        elif event in (
            "os.system",
            "subprocess.Popen",
            "os.remove",
            "os.rename",
            "pickle.find_class",
            "socket.connect",
        ):
            self.paths.append(f"{event} {arguments[0]}")


@pytest.fixture(scope="module")
def opened():
    return Opened()


@pytest.fixture(scope="module")
def policy():
    return trained_lora(1, scale=0.1).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    trained_lora(2, scale=0.1).save_pretrained(folder)
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def check_refused_or_sound(policy, place: Path, files: dict, opened) -> bool:
    folder = place / "adapter"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    before, names = hash_tensors(dict(policy.named_parameters())), list(policy.peft_config)
    modules = len(list(policy.modules()))
    opened.paths = []
    try:
        load_reference_adapter(policy, str(folder))
        loaded = True
    except ValueError as error:
        loaded = False
        assert str(error).startswith(f"Cannot use the adapter at {str(folder)!r} as KL reference: "), error
    finally:
        heard, opened.paths = opened.paths, None
    elsewhere = [path for path in heard if not path.startswith((str(folder), sys.prefix, sys.base_prefix))]
    assert elsewhere == [], elsewhere
    if loaded:
        with torch.no_grad(), adapter_active(policy, REFERENCE_ADAPTER):
            # A flipped bit may make a weight huge, and its logits need not be finite.
            assert policy(TOKENS).logits.shape == (1, 4, 32)
        policy.delete_adapter(REFERENCE_ADAPTER)
    assert hash_tensors(dict(policy.named_parameters())) == before
    assert list(policy.peft_config) == names and len(list(policy.modules())) == modules
    assert sorted(os.listdir(place)) == ["adapter"] and sorted(os.listdir(folder)) == sorted(files)
    return loaded


@FUZZ
@given(data=st.data())
def test_damaged_files(policy, place, files, opened, data):
    name = data.draw(st.sampled_from([CONFIG, WEIGHTS]))
    check_refused_or_sound(policy, place, files | {name: damaged_bytes(data, files[name])}, opened)


@FUZZ
@given(data=st.data())
def test_changed_config(policy, place, files, opened, data):
    content = changed(data, json.loads(files[CONFIG]))
    if data.draw(st.booleans()):
        content = changed(data, content)
    check_refused_or_sound(policy, place, files | {CONFIG: json.dumps(content).encode()}, opened)


@FUZZ
@given(data=st.data())
def test_changed_header_of_the_weights(policy, place, files, opened, data):
    check_refused_or_sound(policy, place, files | {WEIGHTS: damaged_header(data, files[WEIGHTS])}, opened)


def test_good_files_are_loaded(policy, place, files, opened):
    assert check_refused_or_sound(policy, place, files, opened)


def test_pickles_are_not_opened(policy, place, files, opened, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "unpickled",)

    trap = pickle.dumps(Trap())
    assert check_refused_or_sound(policy, place, files | {"adapter_model.bin": trap}, opened)
    assert not check_refused_or_sound(policy, place, {CONFIG: files[CONFIG], "adapter_model.bin": trap}, opened)
    assert not check_refused_or_sound(policy, place, files | {WEIGHTS: trap}, opened)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "base_model.model.../x.lora_A.weight"])
def test_names_that_leave_the_folder(name, policy, place, files, opened):
    weights = load_file_of(files, place)
    first = next(iter(weights))
    weights[name] = weights.pop(first)
    save_file(weights, place.parent / "renamed.safetensors")
    content = (place.parent / "renamed.safetensors").read_bytes()
    assert not check_refused_or_sound(policy, place, files | {WEIGHTS: content}, opened)
    config = json.loads(files[CONFIG]) | {"base_model_name_or_path": name}
    assert check_refused_or_sound(policy, place, files | {CONFIG: json.dumps(config).encode()}, opened)


def load_file_of(files: dict, place: Path) -> dict[str, torch.Tensor]:
    (place.parent / "plain.safetensors").write_bytes(files[WEIGHTS])
    return load_file(place.parent / "plain.safetensors")


def test_link_to_a_file_that_is_none(policy, tmp_path, files):
    # Links are followed, because the Hub's cache consists of them; their targets are checked like any other file.
    (tmp_path / CONFIG).write_bytes(files[CONFIG])
    for target in (tmp_path / "missing", Path("/etc/passwd"), tmp_path):
        (tmp_path / WEIGHTS).symlink_to(target)
        with pytest.raises(ValueError, match="Cannot use the adapter at"):
            load_reference_adapter(policy, str(tmp_path))
        (tmp_path / WEIGHTS).unlink()
