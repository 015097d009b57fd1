"""
Checksums of the files of a checkpoint, in `kl_checksums.json`. They notice every flipped bit, and files that are gone.

CRC-32 is enough, because nobody is assumed to forge a checkpoint. It finds every single flipped bit and every burst of
up to 32 bits, sums up about 3 GB per second and core, and is part of Python.
"""

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .atomic_write import atomic_write


CHECKSUM_FILE = "kl_checksums.json"
CHECKSUM_VERSION = 1
# Key under which a JSON object holds the checksum of the rest of it.
CHECKSUM_KEY = "checksum"

# Our messages tell users to delete these to begin from the config, so their absence is not damage.
_MAY_BE_DELETED = {"kl_state.json", "kl_reference.safetensors", "ppo_state.json", "value_function.safetensors"}
# Descriptions for readers; people edit them, and no run reads them.
_NOT_SUMMED = (".md", ".tmp")
_CHUNK = 1 << 22

_REMEDY = f"If you changed it on purpose, delete `{CHECKSUM_FILE}` in the checkpoint"


def content_checksum(content: Mapping[str, Any]) -> str:
    """Checksum of plain JSON values, without the checksum among them and whatever the spaces between them are."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"


def file_checksum(path: str) -> str:
    """Checksum of a file, read in chunks."""
    checksum, buffer = 0, memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            checksum = zlib.crc32(buffer[:size], checksum)
    return f"{checksum:08x}"


def write_checksums(folder: str) -> None:
    """
    Write the checksums of all files in a checkpoint. Call this on one process, after every process has saved.

    Args:
        folder (`str`):
            Checkpoint folder.
    """
    names = _files(folder)
    files = dict(zip(names, _sum_all(folder, names), strict=True))
    content: dict[str, Any] = {"version": CHECKSUM_VERSION, "files": files}
    content[CHECKSUM_KEY] = content_checksum(content)
    with atomic_write(os.path.join(folder, CHECKSUM_FILE)) as temporary, open(temporary, "w") as stream:
        json.dump(content, stream, indent=2)


def checksum_fault(folder: str) -> str | None:
    """
    Say which file of a checkpoint is not what was written. Files that were added later are not looked at.

    Args:
        folder (`str`):
            Checkpoint folder.

    Returns:
        `str` or `None`: The fault. `None` if there is none, or if the checkpoint has no checksums because an earlier
        version or TRL wrote it.
    """
    path = os.path.join(folder, CHECKSUM_FILE)
    if not os.path.lexists(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        valid = isinstance(content, dict) and content.get(CHECKSUM_KEY) == content_checksum(content)
    except (OSError, ValueError, RecursionError) as error:
        return f"its `{CHECKSUM_FILE}` is torn ({error})"
    if not valid or not isinstance(content.get("files"), dict):
        return f"its `{CHECKSUM_FILE}` is damaged: it does not have the checksum that it names for itself"
    if content.get("version") != CHECKSUM_VERSION:
        return None  # a later version may sum up otherwise
    there = set(_files(folder))
    missing = sorted(content["files"].keys() - there - _MAY_BE_DELETED)
    if missing:
        return f"it has no `{missing[0]}`, which was there when it was saved. {_REMEDY}"
    names = sorted(content["files"].keys() & there)
    try:
        found = _sum_all(folder, names)
    except OSError as error:
        return f"one of its files cannot be read ({error})"
    changed = [name for name, checksum in zip(names, found, strict=True) if checksum != content["files"][name]]
    if changed:
        return f"its `{changed[0]}` is not what was saved: its checksum differs. {_REMEDY}"
    return None


def _sum_all(folder: str, names: list[str]) -> list[str]:
    # Both reading and summing release the interpreter, so the files of a sharded checkpoint are read side by side.
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(lambda name: file_checksum(os.path.join(folder, name)), names))


def _files(folder: str) -> list[str]:
    """The files to sum up, in subfolders too, with `/` between folder and name."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            relative = os.path.relpath(path, folder).replace(os.sep, "/")
            if relative != CHECKSUM_FILE and not name.endswith(_NOT_SUMMED) and os.path.isfile(path):
                found.append(relative)
    return sorted(found)
