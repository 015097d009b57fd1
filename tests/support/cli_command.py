"""The installed `trl-klx`, run as a user runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path


COMMAND = Path(sys.executable).with_name("trl-klx")


def command(*arguments, cwd=None, **env) -> subprocess.CompletedProcess:
    """Run the command in a separate process, and wait for it."""
    return subprocess.run(
        [COMMAND, *map(str, arguments)], cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=600
    )


def start(*arguments, cwd=None) -> subprocess.Popen:
    """Start the command without waiting for it."""
    return subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background processes ignore Ctrl-C, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
