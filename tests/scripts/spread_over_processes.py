"""Run every case of `batchings.py` in this process group. Each rank writes its results."""

import gc
import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.batchings import CASES, run_case


torch.set_num_threads(1)
gc.freeze()
folder = sys.argv[1]
processes, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
results = {
    f"{name}/{micro_batches}": run_case(case, f"{folder}/{name}-{micro_batches}", micro_batches, processes)
    for name, case in CASES.items()
    for micro_batches in (1, 2)
}
Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
