"""One run per folder: a lock that says who holds it, and that a dead holder cannot keep."""

import json
import os
import socket
import threading
import time
import uuid
import warnings
from datetime import datetime
from typing import Any

from .atomic_write import atomic_write


# Transformers does not push files that start with an underscore to the Hub.
LOCK_FILE = "_kl_run.lock"
# Nobody can ask whether a process on another machine is alive. Its holder writes the lock again after every beat, and
# whoever sees it unchanged for `PATIENCE` takes it over.
BEAT, PATIENCE = 15.0, 90.0

# The locks of this process by their path. Several trainers of one process may use one folder, one after the other.
_HELD: dict[str, "RunLock"] = {}


class RunLockedError(RuntimeError):
    """Another run is using the folder; the message says which."""


class RunLock:
    """
    The lock of a run's folder. [`~RunLock.acquire`] it on the main process alone, and always [`~RunLock.release`] it.

    Args:
        folder (`str`):
            Folder of the run.
    """

    def __init__(self, folder: str):
        self.path = os.path.join(os.path.realpath(folder), LOCK_FILE)
        self.holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _start_time(os.getpid()),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            "token": uuid.uuid4().hex,
        }
        self._users = 0
        self._beats = 0
        self._ended = threading.Event()

    def acquire(self) -> None:
        """
        Take the lock, from a dead holder too. A folder that cannot be written needs none.

        Raises:
            RunLockedError: If another run holds it.
        """
        held = _HELD.get(self.path)
        if held is not None and held.holder["pid"] == os.getpid():  # a fork has a copy of its parent's locks
            held._users += 1
            return
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            while not self._create():
                self._wait_for_holder()
        except OSError:
            return
        self._users = 1
        _HELD[self.path] = self
        threading.Thread(target=self._beat, name="kl_run_lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock back, if this process holds it. The last trainer that uses it removes the file."""
        held = _HELD.get(self.path)
        if held is None or held.holder["pid"] != os.getpid():
            return
        held._users -= 1
        if held._users == 0:
            del _HELD[self.path]
            held._ended.set()
            if _is_of(_read(self.path), held.holder):
                _remove(self.path)

    def check(self) -> None:
        """
        Check that the lock was not taken by another run in the meantime. Call this before a checkpoint is written.

        Raises:
            RunLockedError: If it was.
        """
        held = _HELD.get(self.path)
        if held is None or held.holder["pid"] != os.getpid():
            return
        holder = _read(self.path)
        if holder is None:  # somebody cleaned up
            held._write()
        elif not _is_of(holder, held.holder):
            raise RunLockedError(f"{_describe(self.path, holder)} It took the folder over from this run, which stops.")

    def _create(self) -> bool:
        """Create the file, or return `False` if it exists."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(self.holder, stream)
        return True

    def _write(self) -> None:
        with atomic_write(self.path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
            json.dump(self.holder | {"beat": self._beats}, stream)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            self._beats += 1
            try:
                if _is_of(_read(self.path), self.holder):
                    self._write()
            except OSError:
                pass  # a full disk: the next beat may succeed

    def _wait_for_holder(self) -> None:
        """Remove the lock of a dead holder, or raise if the holder lives."""
        holder = _read(self.path)
        alive = None if holder is None else _is_alive(holder)
        if alive is None:
            # Another machine, or a file that is just being written.
            if holder is not None:
                warnings.warn(
                    f"{_describe(self.path, holder)} Waiting up to {PATIENCE:g} seconds for a sign of life.",
                    stacklevel=2,
                )
            alive = self._changes(holder)
        if alive:
            raise RunLockedError(
                f"{_describe(self.path, holder)} Two runs in one folder would mix their checkpoints. Set another "
                "`output_dir`, or end that run."
            )
        self._remove_dead(holder)

    def _changes(self, seen: dict[str, Any] | None) -> bool:
        """Whether the file changes before patience ends."""
        end = time.monotonic() + (PATIENCE if seen is not None else min(PATIENCE, 2.0))
        while time.monotonic() < end:
            time.sleep(min(1.0, PATIENCE / 10))
            if not os.path.lexists(self.path):
                return False
            now = _read(self.path)
            if now != seen:
                return seen is not None or _is_alive(now or {}) is not False
        return False

    def _remove_dead(self, holder: dict[str, Any] | None) -> None:
        # Two runs may find the same dead holder. The one that comes second must not remove the lock of the first.
        aside = f"{self.path}.{uuid.uuid4().hex}"
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read(aside) == holder or os.path.lexists(self.path):
            _remove(aside)
        else:
            os.rename(aside, self.path)


def _read(path: str) -> dict[str, Any] | None:
    """The holder in a lock file, or `None` if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _is_of(holder: dict[str, Any] | None, own: dict[str, Any]) -> bool:
    return holder is not None and holder.get("token") == own["token"]


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether the holder's process lives, or `None` if that cannot be known from here."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0 or os.name != "posix":
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # it lives, and belongs to somebody else
    except (ProcessLookupError, OverflowError):
        return False
    started = _start_time(pid)
    # A process that has ended but that nobody has waited for, or another one with the same number.
    return not (started == 0 or (started is not None and holder.get("started") not in (None, started)))


def _start_time(pid: int) -> int | None:
    """When a process started, in the system's ticks; 0 if it has ended, `None` if the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            # The name, in parentheses, may hold spaces.
            state, *numbers = stream.read().rpartition(")")[2].split()
        return 0 if state in ("Z", "X") else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return None


def _describe(path: str, holder: dict[str, Any] | None) -> str:
    holder = holder or {}
    who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
    return f"Another run uses {os.path.dirname(path)!r}: {who} (`{LOCK_FILE}`)."
