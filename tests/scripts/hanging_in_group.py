"""In a process group: the reward function of one rank never returns."""

import os
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.tiny import build_trainer
from trl_klx import KLXGRPOTrainer, reward_timeout


@reward_timeout(2)
def slow_judge(completions, **kwargs):
    if os.environ["RANK"] == "1":
        time.sleep(3600)
    return [0.0] * len(completions)


build_trainer(KLXGRPOTrainer, sys.argv[1], rewards=slow_judge, kl_penalty_coef=0.1).train()
