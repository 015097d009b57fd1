"""
The cost of GAE and KL-to-go without a loop over tokens: their time relative to one `torch.cumsum` over the same
tensor, on CPU.

Each round runs everything once. Prints the median CPU time per call and its ratio to that of `cumsum`.

```bash
python benchmarks/scans.py
python benchmarks/scans.py --threads 2 --json scans.json
```
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path


# Keep freed memory, as a process that has run for a while does. Otherwise the system allocates the result of every
# call page by page, which costs as much as a `cumsum`.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
GOAL, GOAL_WITH_HOLES = 3.0, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})

    import torch

    from trl_klx.maths.advantages import discount_kl
    from trl_klx.maths.gae import compute_gae

    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.tokens)
    rewards, values = torch.randn(2, *shape, generator=generator)
    lengths = torch.randint(options.tokens // 4, options.tokens + 1, (options.rows, 1), generator=generator)
    padded = torch.arange(options.tokens) < lengths
    masks = {
        "no padding": torch.ones(shape, dtype=torch.bool),
        "padding": padded,
        "tool outputs": padded & (torch.rand(shape, generator=generator) < 0.9),
    }
    calls = {"cumsum": lambda: rewards.cumsum(1)}
    for name, mask in masks.items():
        calls[f"KL-to-go, {name}"] = lambda mask=mask: discount_kl(rewards, mask, 0.95)
        calls[f"GAE, {name}"] = lambda mask=mask: compute_gae(rewards, values, mask, 0.99, 0.95)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(options.repeats + 2):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if repeat >= 2:
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{shape} fp32, {options.threads} thread{'s' * (options.threads > 1)}")
    print(f"{'':24}{'ms':>9}{'ratio':>9}")
    for name, median in medians.items():
        print(f"{name:24}{1000 * median:>9.2f}{median / medians['cumsum']:>9.2f}")
    for holes, ending, goal in (("without", "padding", GOAL), ("with", "tool outputs", GOAL_WITH_HOLES)):
        worst = max(median for name, median in medians.items() if name.endswith(ending)) / medians["cumsum"]
        print(f"worst {holes} holes in the mask: {worst:.2f} (goal {goal:.2f})")
    if options.json:
        rows = {name: {"ms": 1000 * median, "ratio": median / medians["cumsum"]} for name, median in medians.items()}
        options.json.write_text(json.dumps({"shape": shape, "threads": options.threads, "results": rows}, indent=2))


if __name__ == "__main__":
    main()
