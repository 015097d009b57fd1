"""Launch scripts in separate processes."""

import os
import subprocess
import sys
from pathlib import Path


SCRIPTS = Path(__file__).parents[1] / "scripts"


def torchrun(script: str, *arguments: str, processes: int = 2) -> None:
    """Start a script in a process group on a free port, and wait for it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(SCRIPTS / script), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]
