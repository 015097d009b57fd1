"""Helpers of the benchmarks: tiny models, runs in separate processes that take turns, and results kept on disk."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


MARK = "RESULT "


def build_tokenizer(vocabulary: int):
    """One word per token, `w0` for padding and `w1` for EOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w3")


def llama_config(hidden: int, layers: int, vocabulary: int, **overrides):
    """A Llama with six heads. Hidden size 288, 6 layers and a vocabulary of 32000 make 15M parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=6,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        tie_word_embeddings=True,
        **overrides,
    )


def lm_head_share(hidden: int, layers: int, vocabulary: int) -> float:
    """The LM head's share of the weights that a forward pass of such a Llama multiplies by."""
    head, backbone = hidden * vocabulary, layers * hidden * (4 * hidden + 3 * (hidden * 8 // 3))
    return head / (head + backbone)


class Stopwatch:
    """CPU time of the process per step, and the part spent on generation. The first step is not counted."""

    def __init__(self):
        self.stamps: list[tuple[float, float]] = []
        self.generating = 0.0

    def stamp(self) -> None:
        self.stamps.append((time.process_time(), self.generating))

    def watch(self, model, stamps: bool = False) -> None:
        """Time the model's `generate`. With `stamps`, each call begins a step."""
        generate = model.generate

        def timed(*args, **kwargs):
            if stamps:
                self.stamp()
            start = time.process_time()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generating += time.process_time() - start

        model.generate = timed

    def report(self, **more) -> None:
        """Print the measurements for [`measure`] to read."""
        steps = list(zip(self.stamps[1:], self.stamps[2:], strict=False))
        result = {
            "seconds": statistics.median(after[0] - before[0] for before, after in steps),
            "generation": statistics.median(after[1] - before[1] for before, after in steps),
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            **more,
        }
        print(MARK + json.dumps(result), flush=True)


def measure(script: str, case: dict, python: str = sys.executable) -> dict:
    """Run one case with `python script --run case`, and return what it reported."""
    base = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [python, script, "--run", json.dumps(case)], capture_output=True, text=True, env={**os.environ, **base}
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
    if result.returncode or not lines:
        raise RuntimeError(f"{case} failed:\n{result.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix(MARK))


class Results:
    """
    Measurements by case, in a JSON file that is written after every run. A benchmark that is started again with the
    same file continues where it stopped.

    Args:
        path (`Path`, *optional*):
            The file. If unset, results are kept in memory only.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.runs: dict[str, list[dict]] = {}
        if path is not None and path.exists():
            self.runs = json.loads(path.read_text())

    @staticmethod
    def key(case: dict) -> str:
        return json.dumps(case, sort_keys=True)

    def count(self, case: dict) -> int:
        return len(self.runs.get(self.key(case), []))

    def add(self, case: dict, run: dict) -> None:
        self.runs.setdefault(self.key(case), []).append(run)
        if self.path is not None:
            # Imported here: the environment with an older TRL imports this file too.
            from trl_klx.checkpoints.atomic_write import atomic_write

            with atomic_write(self.path) as temporary:
                Path(temporary).write_text(json.dumps(self.runs, indent=1))

    def median(self, case: dict, key: str) -> float:
        return statistics.median(run[key] for run in self.runs[self.key(case)])

    def ratio(self, ours: dict, theirs: dict, key: str) -> float:
        return self.median(ours, key) / self.median(theirs, key)


def take_turns(script: str, groups: Iterable[list[dict]], results: Results, repeats: int, python_of=None) -> None:
    """
    Measure each group of cases `repeats` times, cycling through its cases, so that disturbances of the machine affect
    all of them alike.

    Args:
        script (`str`):
            File of the benchmark.
        groups (`Iterable[list[dict]]`):
            Cases to compare with each other.
        results ([`Results`]):
            Where to keep the measurements.
        repeats (`int`):
            Runs of each case.
        python_of (`Callable`, *optional*):
            Returns the interpreter for a case. If unset, the current one runs all cases.
    """
    groups = list(groups)
    distinct = {Results.key(case): case for group in groups for case in group}.values()
    total = repeats * len(distinct)
    begun, at_start = time.time(), sum(min(repeats, results.count(case)) for case in distinct)
    for group in groups:
        for repeat in range(repeats):
            for case in group:
                if results.count(case) > repeat:
                    continue
                done = sum(min(repeats, results.count(other)) for other in distinct)
                progress(done, total, (time.time() - begun) / max(1, done - at_start) * (total - done))
                results.add(case, measure(script, case, python_of(case) if python_of else sys.executable))
    progress(total, total, 0.0)


def progress(done: int, total: int, left: float) -> None:
    """Show a bar on stderr, with the time left if the next runs take as long as the last ones."""
    if not sys.stderr.isatty() and done not in (0, total):
        return
    width = 30
    filled = width * done // max(1, total)
    end = "\n" if done == total else ""
    print(
        f"\r[{'#' * filled}{'.' * (width - filled)}] {done}/{total} runs, {left / 60:.0f} min left ",
        end=end,
        file=sys.stderr,
        flush=True,
    )


def steps_to_arrive(kls: list[float], target: float, from_above: bool = False) -> int | None:
    """
    The first batch at which the mean of three KLs is at nine tenths of the target; `from_above`, at eleven tenths.
    """
    shares = ((end, statistics.fmean(kls[end - 3 : end]) / target) for end in range(3, len(kls) + 1))
    return next((end for end, share in shares if (share <= 1.1 if from_above else share >= 0.9)), None)


# Fields of a run on a CPU that logs every step and keeps nothing.
PLAIN_RUN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C ends the runs in here, and what was measured so far is shown."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nstopped; results so far:")
