"""In a process group: train two epochs, resume in the second, and write both outcomes on each rank."""

import gc
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from resume.test_epochs import KL, OURS, build, prompts
from support.tiny import build_dataset, history, weights


torch.set_num_threads(1)
gc.freeze()
folder, rank, resume_at = Path(sys.argv[1]), int(os.environ["RANK"]), 6
outcomes = {}
for name, trainer_class in OURS.items():
    outcomes[name] = {}
    for part in ("whole", "resumed"):
        fields = KL | {"per_device_train_batch_size": 2, "max_steps": 8, "dataset": build_dataset(8)}
        trainer = build(trainer_class, folder / name, **fields)
        assert trainer.accelerator.num_processes == 2
        trainer.train(
            resume_from_checkpoint=str(folder / name / f"checkpoint-{resume_at}") if outcomes[name] else None
        )
        outcomes[name][part] = {
            "prompts": {step: seen for step, seen in prompts(trainer).items() if step >= resume_at},
            "history": history(trainer)[:-1],
            "weights": weights(trainer),
        }
torch.save(outcomes, folder / f"rank{rank}.pt")
