"""
Start as a training script would, and report the process group and whether it is the requested one.

    python engine_launch.py OUTPUT USE_CPU
"""

import json
import os
import sys
import warnings
from pathlib import Path

from accelerate import Accelerator

from trl_klx.trainers.launch_check import check_launch


output, use_cpu = Path(sys.argv[1]), sys.argv[2] == "cpu"
launched = {name: value for name, value in os.environ.items() if name in ("WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK")}
accelerator = Accelerator(cpu=use_cpu)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    faults = check_launch(accelerator)
report = {
    "num_processes": accelerator.num_processes,
    "distributed_type": accelerator.distributed_type.value,
    "faults": faults,
    "warnings": [str(warning.message) for warning in caught],
    "environment": launched,
}
(output / f"process{os.getpid()}.json").write_text(json.dumps(report))
accelerator.end_training()
