"""Launch scripts in separate processes."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path


SCRIPTS = Path(__file__).parents[1] / "scripts"
# How the launcher reports that abort() in a native library ended a worker, and that nothing failed before it.
ROOT_CAUSE, ABORTED = "Root Cause", "(SIGABRT)"
TIMEOUT = 400  # seconds of one run; pytest allows for two
# How such a library, or Python on its behalf, begins to say why.
REASONS = ("terminate called", "Fatal Python error")


def run_group(
    command: list[str], environment: dict[str, str] | None = None, clean_up: Callable[[], None] | None = None
) -> None:
    """
    Run a launcher of several processes, and fail if it fails.

    Args:
        command (`list[str]`):
            The launcher's command line.
        environment (`dict[str, str]`, *optional*):
            Variables to set.
        clean_up (`Callable`, *optional*):
            Removes what a run wrote. If set, a group is run once more if a library aborts one of its workers, with a
            warning that has the reason. Rarely, a worker of a group of CPU processes dies like that while the others
            wait for it in a collective, which says nothing about the numbers that are compared.
    """
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | (environment or {})
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    if clean_up is not None and result.returncode and ABORTED in result.stderr.partition(ROOT_CAUSE)[2]:
        warnings.warn(f"A worker was aborted, and its group is run again:\n{explain(result.stderr)}", stacklevel=2)
        clean_up()
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, explain(result.stderr)


def explain(stderr: str) -> str:
    """What a library said before it aborted, if it did, and the end: the error, then the launcher's report of it."""
    begins = min((stderr.find(reason) for reason in REASONS if reason in stderr), default=None)
    reason = "" if begins is None else f"{stderr[begins : begins + 4000]}\n[...]\n"
    return reason + stderr[-8000:]


def torchrun(script: str, *arguments: str, processes: int = 2) -> None:
    """Start a script in a process group on a free port, and wait for it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    run_group([*command, str(SCRIPTS / script), *arguments])
