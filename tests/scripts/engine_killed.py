"""
Train on the engine that launched this process, from the last whole checkpoint if there is one, and say where the run
is, so that it can be killed there.

    python engine_killed.py FOLDER OUTPUT ENGINE CASE
"""

import gc
import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from engine_cases import build_case, series
from engine_setup import set_up
from transformers import TrainerCallback

from trl_klx.checkpoints.integrity import checkpoint_fault
from trl_klx.references.loading import saved_steps


torch.set_num_threads(1)
gc.freeze()
folder, output, engine, case = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
rank = int(os.environ["RANK"])
run = output / "run"
(output / f"pid-{rank}").write_text(str(os.getpid()))


class Announce(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if rank == 0:
            (output / f"step-{state.global_step + 1}").touch()


# Before any process can have written something.
sound = [step for step in saved_steps(str(run)) if checkpoint_fault(str(run / f"checkpoint-{step}")) is None]
fields = set_up(engine, folder) | {"max_steps": 10, "save_strategy": "steps", "save_steps": 2}
# Eight prompts, so that the ten steps are more than two epochs.
trainer = build_case(case, folder, run, 2, rows=8, **fields)
assert trainer.accelerator.num_processes == 2
kind = trainer.accelerator.distributed_type.value
assert kind == {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}[engine]
trainer.add_callback(Announce())
trainer.train(resume_from_checkpoint=True if sound else None)
trainer.save_model(str(output / "saved"))
(output / f"result-{rank}.json").write_text(json.dumps({"series": series(trainer), "epoch": trainer.state.epoch}))
