"""
In a process group: a callback whose trainer logs a different KL on each rank, the KL column of completions,
and a model whose logits only the first process finds to be scaled.
"""

import gc
import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from trl import GRPOTrainer

from support.tiny import build_trainer, logged, lora, scaled_logits, scripted_rollout, trained_lora
from trl_klx import KLXCallback, KLXGRPOTrainer


torch.set_num_threads(1)
gc.freeze()
folder, rank = sys.argv[1], int(os.environ["RANK"])


class LocalKLTrainer(GRPOTrainer):
    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs["local_kl"] = 0.01 * self.state.global_step * (rank + 1)
        super().log(logs, start_time)


extras = {"peft_config": lora()}
trainer = build_trainer(LocalKLTrainer, f"{folder}/callback", beta=0.1, extras=extras, per_device_train_batch_size=2)
callback = KLXCallback(trainer, "adaptive", target=0.015, horizon=8, kl_key="local_kl")
trainer.add_callback(callback)
trainer.train()
result = {
    "num_processes": trainer.accelerator.num_processes,
    "coefs": [*logged(trainer, "klx/coef"), trainer.beta],
    "local_kls": logged(trainer, "local_kl"),
}

for micro_batches in (1, 2):
    trainer = build_trainer(
        KLXGRPOTrainer,
        f"{folder}/column-{micro_batches}",
        model=trained_lora(1, scale=0.1),
        extras={"rollout_func": scripted_rollout},
        kl_penalty_coef=0.1,
        kl_centering="microbatch",
        log_completions=True,
        num_completions_to_print=0,
        max_steps=1,
        per_device_train_batch_size=4 // micro_batches,
        gradient_accumulation_steps=micro_batches,
    )
    trainer.train()
    result[f"column-{micro_batches}"] = {
        "rows": list(
            zip(trainer._logs["prompt"], trainer._logs["completion"], trainer._logs["extra"]["klx/kl"], strict=True)
        ),
        "kl": logged(trainer, "klx/kl"),
    }


def masked_on_the_second(prompts, trainer):
    completion = [5, 6, 1] if rank == 0 else [5, 6, 7]  # the latter lacks an end
    return scripted_rollout(prompts, trainer) | {"completion_ids": [completion] * len(prompts)}


trainer = build_trainer(
    KLXGRPOTrainer,
    f"{folder}/scaled",
    model=scaled_logits(),
    extras={"rollout_func": masked_on_the_second},
    kl_target=0.5,
    mask_truncated_completions=True,
    max_steps=2,
    per_device_train_batch_size=2,
)
trainer.train()
result["scaled"] = {"statistic": trainer.kl_control.statistic, "kl": logged(trainer, "klx/kl")}
Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
