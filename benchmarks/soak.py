"""
A long run: memory, step time and the number of adapters must not grow.

The time is shared by the cases, each in its own process: GRPO with a LoRA reference that is synced every few steps,
the same with one that lags behind, and PPO with four epochs over each rollout and another model as its reference. Time
is the CPU time of the process. Other processes disturb even that by evicting its caches, so a fixed piece of similar
work is timed after every step, and the ratio of the two must stay constant.

```bash
python benchmarks/soak.py               # one minute: shows the table, proves little
python benchmarks/soak.py --minutes 60
python benchmarks/soak.py --minutes 60 --case ppo
```
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from measuring import MARK, PLAIN_RUN, build_tokenizer, llama_config


CASES = {
    "sync": {"kl_ref_sync_steps": 4, "kl_ref_mixup_alpha": 0.6},
    "lag": {"kl_ref_lag": 8},
    "ppo": {"num_ppo_epochs": 4},
}
WINDOWS = 10
# Before the first window: allocators and caches fill up.
WARM_UP = 0.1
VOCABULARY = 64


def resident_megabytes() -> float:
    """Resident memory of this process now."""
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Yardstick:
    """A fixed piece of work: a few milliseconds of small operations, as in a training step."""

    def __init__(self):
        import torch

        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(48, 48, generator=generator) for _ in range(40)]
        self.rows = torch.randn(80, 48, generator=generator)

    def measure(self) -> float:
        """CPU time that the work takes now."""
        start = time.process_time()
        rows = self.rows
        for weight in self.weights * 5:
            rows = (rows @ weight).softmax(-1) + self.rows
        return time.process_time() - start


def reward_small_tokens(completion_ids, **kwargs) -> list[float]:
    return [sum(token < VOCABULARY // 2 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def run(case: str, seconds: float) -> None:
    """Train for `seconds` and print one line per window for [`soak`] to read."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaForCausalLM, TrainerCallback

    from trl_klx import KLXGRPOConfig, KLXGRPOTrainer, KLXPPOConfig, KLXPPOTrainer

    def build_model():
        return LlamaForCausalLM(llama_config(hidden=48, layers=2, vocabulary=VOCABULARY))

    class Watch(TrainerCallback):
        begun = None
        windows = 0
        yardstick = Yardstick()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            now = time.monotonic()
            if self.begun is None:
                self.begun = now
            elif self.windows == 0 and now - self.begun >= WARM_UP * seconds:
                self.open_window(now)
                self.windows = 1
            elif self.windows:
                self.memory.append(resident_megabytes())
                self.fixed.append(self.yardstick.measure())
                if now - self.begun >= seconds * (WARM_UP + (1 - WARM_UP) * self.windows / WINDOWS):
                    self.close_window(now, state, model)
                    self.open_window(now)
                    self.windows += 1
            control.should_training_stop = self.windows > WINDOWS
            return control

        def on_log(self, args, state, control, **kwargs):
            # transformers keeps every line of the log, which alone would be 1% in an hour of steps as small as these.
            del state.log_history[:-1]

        def open_window(self, now: float) -> None:
            self.memory, self.fixed, self.wall, self.cpu = [], [], now, time.process_time()

        def close_window(self, now: float, state, model) -> None:
            steps = len(self.memory)
            cpu = time.process_time() - self.cpu - sum(self.fixed)
            result = {
                "window": self.windows,
                "step": state.global_step,
                "megabytes": statistics.mean(self.memory),
                "cpu": cpu / steps,
                "relative": cpu / sum(self.fixed),
                "wall": (now - self.wall) / steps,
                "adapters": len(getattr(model, "peft_config", ())),
                "files": len(os.listdir("/proc/self/fd")),
                "kl": state.log_history[-1].get("klx/kl") if state.log_history else None,
            }
            print(MARK + json.dumps(result), flush=True)

    if case == "ppo":
        config_class, trainer_class, extras = KLXPPOConfig, KLXPPOTrainer, {"ref_model": build_model()}
    else:
        peft_config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        config_class, trainer_class, extras = KLXGRPOConfig, KLXGRPOTrainer, {"peft_config": peft_config}
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder,
            **PLAIN_RUN | {"logging_steps": 20, "save_strategy": "steps"},
            max_steps=10**7,
            lr_scheduler_type="constant",
            learning_rate=1e-4,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=8,
            # Every step has the same number of tokens, so step times can be compared.
            generation_kwargs={"min_new_tokens": 8},
            save_steps=100,
            save_total_limit=2,
            kl_penalty_coef=0.05,
            kl_controller="pid",
            kl_target=0.5,
            **CASES[case],
        )
        trainer = trainer_class(
            model=build_model(),
            reward_funcs=reward_small_tokens,
            args=args,
            processing_class=build_tokenizer(VOCABULARY),
            train_dataset=Dataset.from_dict({"prompt": [f"w{4 + i % 60} w{4 + 3 * i % 60}" for i in range(512)]}),
            callbacks=[Watch()],
            **extras,
        )
        trainer.train()


def soak(case: str, minutes: float) -> None:
    """Run one case, and print its windows as they arrive."""
    command = [sys.executable, __file__, "--run", case, "--minutes", str(minutes)]
    print(f"\ncase {case!r}, {minutes:g} minutes", flush=True)
    print(
        f"{'window':>6}{'step':>8}{'RSS MB':>10}{'CPU s/step':>12}{'/ fixed work':>13}{'wall s/step':>13}"
        f"{'adapters':>10}{'open files':>12}"
    )
    windows = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.startswith(MARK):
            window = json.loads(line.removeprefix(MARK))
            windows.append(window)
            print(
                f"{window['window']:>6}{window['step']:>8}{window['megabytes']:>10.1f}{window['cpu']:>12.4f}"
                f"{window['relative']:>13.2f}{window['wall']:>13.4f}{window['adapters']:>10}{window['files']:>12}",
                flush=True,
            )
    if process.wait() or len(windows) != WINDOWS:
        raise RuntimeError(f"The case {case!r} ended early, with code {process.returncode}.")
    first, last = windows[0], windows[-1]
    memory = [window["megabytes"] for window in windows]
    print(
        f"memory grows by {memory[-1] / memory[0] - 1:+.2%}, highest to lowest {max(memory) / min(memory) - 1:.2%}; "
        f"last / first: CPU time per step "
        f"{last['cpu'] / first['cpu']:.4f}, relative to the fixed work {last['relative'] / first['relative']:.4f}; "
        f"adapters {sorted({window['adapters'] for window in windows})}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="total time, shared by the cases")
    parser.add_argument("--case", choices=list(CASES), help="run only this case")
    parser.add_argument("--run", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run, 60 * options.minutes)
        return
    chosen = [options.case] if options.case else list(CASES)
    for case in chosen:
        soak(case, options.minutes / len(chosen))


if __name__ == "__main__":
    main()
