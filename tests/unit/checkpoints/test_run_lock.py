"""One run per folder: who holds the lock is named, and the dead hold nothing."""

import json
import os
import socket
import subprocess
import sys

import pytest

from trl_klx.checkpoints import run_lock
from trl_klx.checkpoints.run_lock import LOCK_FILE, RunLock, RunLockedError


HOLD = """
import sys, time
from trl_klx.checkpoints.run_lock import RunLock
RunLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(120)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def write_holder(folder, **changes) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": None, "since": "then", "token": "other"}
    (folder / LOCK_FILE).write_text(json.dumps(holder | changes))


def test_the_holder_is_named(tmp_path, other):
    with pytest.raises(RunLockedError, match=rf"process {other.pid} on {socket.gethostname()}, since 20.*output_dir"):
        RunLock(str(tmp_path)).acquire()


def test_a_killed_holder_is_followed_without_a_word(tmp_path, other, recwarn):
    other.kill()  # nobody has waited for it yet, so its number is still taken
    lock = RunLock(str(tmp_path))
    for _ in range(100):
        try:
            lock.acquire()
            break
        except RunLockedError:
            run_lock.time.sleep(0.1)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()
    assert os.listdir(tmp_path) == [] and not recwarn.list


def test_another_process_with_the_same_number(tmp_path):
    write_holder(tmp_path, started=1)
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_trainers_of_one_process_share_it(tmp_path):
    first, second = RunLock(str(tmp_path)), RunLock(os.path.join(str(tmp_path), "."))
    first.acquire()
    second.acquire()
    second.release()
    first.check()
    assert os.listdir(tmp_path) == [LOCK_FILE]
    first.release()
    first.release()
    assert os.listdir(tmp_path) == []


def test_another_machine_is_watched_for_a_sign_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE", 0.5)
    write_holder(tmp_path, host="elsewhere")
    lock = RunLock(str(tmp_path))
    with pytest.warns(UserWarning, match="on elsewhere, since then .*sign of life"):
        lock.acquire()
    lock.release()

    write_holder(tmp_path, host="elsewhere", beat=1)
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: write_holder(tmp_path, host="elsewhere", beat=2))
    with pytest.warns(UserWarning), pytest.raises(RunLockedError, match="on elsewhere"):
        lock.acquire()


def test_the_holder_shows_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.02)
    lock = RunLock(str(tmp_path))
    lock.acquire()
    for _ in range(200):
        if json.loads((tmp_path / LOCK_FILE).read_text()).get("beat", 0) >= 2:
            break
        run_lock.time.sleep(0.02)
    else:
        pytest.fail("no beat")
    lock.release()
    run_lock.time.sleep(0.1)
    assert os.listdir(tmp_path) == []


def test_a_run_that_lost_its_folder_stops(tmp_path):
    lock = RunLock(str(tmp_path))
    lock.acquire()
    (tmp_path / LOCK_FILE).unlink()
    lock.check()  # somebody cleaned up; it is written again
    assert os.listdir(tmp_path) == [LOCK_FILE]
    write_holder(tmp_path, host="elsewhere")
    with pytest.raises(RunLockedError, match="on elsewhere.*took the folder over from this run"):
        lock.check()
    lock.release()
    assert os.listdir(tmp_path) == [LOCK_FILE]  # it is the other's


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_torn_lock_holds_nobody(tmp_path, content, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE", 0.2)
    (tmp_path / LOCK_FILE).write_text(content)
    lock = RunLock(str(tmp_path))
    lock.acquire()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_needs_none(tmp_path):
    (tmp_path / "file").touch()
    lock = RunLock(str(tmp_path / "file" / "run"))
    lock.acquire()
    lock.check()
    lock.release()
