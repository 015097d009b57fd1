"""
Train cases of `engine_cases.py` one after another on the engine that launched this process. Each rank writes its
results, and the policies are saved.

    python engine_run.py FOLDER OUTPUT ENGINE CASE...
"""

import gc
import json
import os
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.state import AcceleratorState
from engine_cases import RESUMED, build_case, series
from engine_setup import set_up
from transformers import AutoModelForCausalLM

from trl_klx.references.sharding import is_sharded, loaded_whole


torch.set_num_threads(1)
gc.freeze()
folder, output, engine = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
ENGINE_FIELDS = set_up(engine, folder)


def build(name: str, **overrides):
    # Each run gets a new state, as it would in its own process.
    AcceleratorState._reset_state()
    place = output / "runs" / name
    return build_case(name, folder, place, processes, **ENGINE_FIELDS, **overrides)


def run(name: str) -> dict:
    began = time.perf_counter()
    saving = {"save_strategy": "steps", "save_steps": RESUMED[name]} if name in RESUMED else {}
    trainer = build(name, **saving)
    trainer.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    result = {
        "sharded": all(is_sharded(weight) for weight in policy.parameters()),
        "series": series(trainer),
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
    }
    trainer.save_model(str(output / "saved" / name))
    if saving:
        trainer = build(name)
        trainer.train(resume_from_checkpoint=str(output / "runs" / name / f"checkpoint-{RESUMED[name]}"))
        trainer.save_model(str(output / "resumed" / name))
        result["resumed"] = series(trainer)
    return result | {"seconds": time.perf_counter() - began}


def load_beside() -> float:
    """Largest difference between a model loaded next to the policy and the saved weights."""
    with loaded_whole():
        loaded = AutoModelForCausalLM.from_pretrained(folder / "base").state_dict()
    saved = torch.load(folder / "base.pt")
    return max((loaded[name] - weight).abs().max().item() for name, weight in saved.items())


results = {}
for name in sys.argv[4:]:
    results[name] = run(name)
    gc.collect()
report = {"cases": results, "beside": load_beside()}
(output / f"rank{rank}.json").write_text(json.dumps(report))
