"""
Which methods of TRL and transformers this package depends on, and how they differ between versions.

    python .ci/upstream.py                                    # the newest TRL, against the installed one
    python .ci/upstream.py --old 1.14.2 --new installed       # any two versions
    python .ci/upstream.py --package transformers             # the same for transformers
    python .ci/upstream.py --write                            # record the installed versions

`tests/contract/test_upstream.py` compares the installed versions with the record in `tests/contract/upstream.json`.
Record a version only after reading its changes.
"""

import argparse
import ast
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "contract" / "upstream.json"
PACKAGES = ("transformers", "trl")

_PREPARE_INPUTS = (
    "calls `_generate_and_score_completions` once per `steps_per_generation * num_iterations` micro-batches, counted "
    "in `_step`; shuffles and splits the batch, together with our keys"
)
_COMPUTE_LOSS = "calls `_compute_loss` once per micro-batch"
_PREDICTION_STEP = "evaluates through `_prepare_inputs` and `compute_loss`"
_SCRIPT = "builds its trainer as `trl.<Name>Trainer(...)`, which `trl-klx` replaces while the script runs"

# Definitions that we do not override but call around, wrap or replace, and what we rely on in each.
RELIED_ON = {
    "trl.trainer.grpo_trainer:GRPOTrainer._prepare_inputs": _PREPARE_INPUTS,
    "trl.trainer.grpo_trainer:GRPOTrainer.compute_loss": _COMPUTE_LOSS,
    "trl.trainer.grpo_trainer:GRPOTrainer.prediction_step": _PREDICTION_STEP,
    "trl.trainer.rloo_trainer:RLOOTrainer._prepare_inputs": _PREPARE_INPUTS,
    "trl.trainer.rloo_trainer:RLOOTrainer.compute_loss": _COMPUTE_LOSS,
    "trl.trainer.rloo_trainer:RLOOTrainer.prediction_step": _PREDICTION_STEP,
    "trl.trainer.utils:shuffle_sequence_dict": "carries every `(B, ...)` tensor of a batch, ours included",
    "trl.trainer.utils:split_tensor_dict": "carries every `(B, ...)` tensor of a batch, ours included",
    "trl.trainer.utils:add_fused_lm_head": "is applied to every reference model that TRL has not prepared",
    "trl.kernels.chunked_logprob:ChunkedLogProbFunction.forward": (
        "is replaced where the reference's pass stops before the LM head, by a function with the same interface"
    ),
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": (
        "is wrapped so that vLLM gets only the policy's weights"
    ),
    "trl.scripts.grpo:main": _SCRIPT,
    "trl.scripts.rloo:main": _SCRIPT,
    "transformers.trainer:Trainer._init_training_state": "loads the state from which `KLXCallback` restores its own",
    "transformers.trainer:Trainer._load_callback_state": "builds no callback from a key that is not a class name",
    "transformers.trainer:Trainer._prepare_for_training": (
        "loads the weights first, then calls `_load_optimizer_and_scheduler`"
    ),
    "transformers.trainer:Trainer._run_epoch": (
        "calls `training_step` for every micro-batch, steps the optimizer, then calls `on_step_end`, logs and saves"
    ),
    "transformers.trainer:Trainer._maybe_log_save_evaluate": "logs on every process, and before it saves",
    "transformers.trainer_utils:rotate_checkpoints": "deletes nothing without `save_total_limit`, which we take over",
}


@dataclass(frozen=True, order=True)
class Definition:
    """
    A method, function or class of TRL or transformers.

    Attributes:
        package, module (`str`):
            Where it is defined.
        name (`str`):
            Its qualified name.
    """

    package: str
    module: str
    name: str

    @classmethod
    def parse(cls, key: str) -> "Definition":
        module, name = key.split(":")
        return cls(module.split(".")[0], module, name)

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name}"

    def source(self, folder: Path) -> str | None:
        """The source of the definition in a folder of packages, or `None` if it is not there."""
        file = folder.joinpath(*self.module.split(".")).with_suffix(".py")
        if not file.is_file():
            return None
        text = file.read_text()
        node = _find(ast.parse(text), self.name.split("."))
        if node is None:
            return None
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _find(tree: ast.AST, names: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    for node in getattr(tree, "body", []):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == names[0]:
            return node if len(names) == 1 else _find(node, names[1:])
    return None


# ---- What we depend on ----


def our_classes() -> list[type]:
    """Our public trainers and configs."""
    package = importlib.import_module("trl_klx")
    return [getattr(package, name) for name in package.__all__ if name.endswith(("Trainer", "Config"))]


def overridden(classes: list[type]) -> dict[str, set[type]]:
    """The methods of our classes that override TRL or transformers, each with all host classes that may define it."""
    found: dict[str, set[type]] = {}
    for cls in classes:
        ours = [base for base in cls.__mro__ if base.__module__.startswith("trl_klx.")]
        hosts = [base for base in cls.__mro__ if base.__module__.split(".")[0] in PACKAGES]
        for name in {name for base in ours for name, value in vars(base).items() if _is_written(value)}:
            if any(name in vars(host) for host in hosts):
                found.setdefault(name, set()).update(hosts)
    return found


def _is_written(value: object) -> bool:
    """Whether a member is a method with source code. Methods generated for a dataclass have none."""
    function = getattr(value, "__func__", getattr(value, "fget", value))
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename != "<string>"


def definitions() -> list[Definition]:
    """
    Everything that we override or rely on. An overridden method is listed for every host class, whether or not the
    class defines it: a version that begins to define it changes what `super()` calls.
    """
    keys = [
        f"{host.__module__}:{host.__name__}.{name}"
        for name, hosts in overridden(our_classes()).items()
        for host in hosts
    ]
    return sorted({Definition.parse(key) for key in [*keys, *RELIED_ON]})


# ---- Fingerprints ----


def fingerprint(source: str | None) -> str | None:
    """A hash of the code without comments, docstrings and layout. It is the same on every Python version."""
    if source is None:
        return None
    tree = ast.parse(_dedent(source))
    return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest()[:16]


def _dedent(source: str) -> str:
    # `textwrap.dedent` would also change multi-line strings; a block around the code does not.
    return f"if True:\n{source}" if source[:1].isspace() else source


def _shape(value: object) -> object:
    """The syntax tree as nested tuples. Empty fields are left out, because Python versions differ in them."""
    if isinstance(value, list):
        return [_shape(item) for item in value]
    if not isinstance(value, ast.AST):
        return value
    shape = []
    for name, child in ast.iter_fields(value):
        if name == "body" and isinstance(value, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            child = child[1:] if ast.get_docstring(value, clean=False) is not None else child
        child = _shape(child)
        if child is not None and child != []:
            shape.append((name, child))
    return type(value).__name__, shape


def read_record() -> dict[str, dict[str, str]]:
    """The recorded fingerprints: by definition, then by version of its package."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def write_record() -> None:
    """Record the installed versions, and drop what we no longer depend on."""
    before, after = read_record(), {}
    for definition in definitions():
        versions = dict(before.get(definition.key, {}))
        version = importlib.metadata.version(definition.package)
        versions.pop(version, None)
        found = fingerprint(definition.source(installed_folder(definition.package)))
        if found is not None:
            versions[version] = found
        if versions:
            after[definition.key] = dict(sorted(versions.items(), key=lambda item: _version_order(item[0])))
    lines = [f"  {json.dumps(key)}: {json.dumps(versions)}" for key, versions in sorted(after.items())]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _version_order(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in version.split(".")]


# ---- Versions ----


def installed_folder(package: str) -> Path:
    """The folder that holds an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def fetch(package: str, version: str, folder: Path) -> tuple[str, Path]:
    """Download a version of a package unless it is `"installed"`, and return its number and its folder."""
    if version == "installed":
        return importlib.metadata.version(package), installed_folder(package)
    wanted = package if version == "newest" else f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), wanted], check=True)
    found = importlib.metadata.distributions(name=package, path=[str(folder)])
    return next(iter(found)).version, folder


def differences(package: str, old: Path, new: Path, old_name: str, new_name: str) -> dict[str, str]:
    """The definitions whose code differs between two folders, with diffs. Comments are shown but do not count."""
    found = {}
    for definition in definitions():
        if definition.package != package:
            continue
        before, after = definition.source(old), definition.source(new)
        if fingerprint(before) == fingerprint(after):
            continue
        names = [f"{definition.key} {version}" for version in (old_name, new_name)]
        lines = [(source or "").splitlines() for source in (before, after)]
        found[definition.key] = "\n".join(difflib.unified_diff(*lines, *names, lineterm="", n=5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Show what changed in the methods of TRL and transformers that this package depends on."
    )
    parser.add_argument("--package", choices=PACKAGES, default="trl")
    parser.add_argument("--old", default="installed", help="a version, 'installed' or 'newest'")
    parser.add_argument("--new", default="newest", help="a version, 'installed' or 'newest'")
    parser.add_argument("--write", action="store_true", help=f"record the installed versions in {RECORD.name}")
    args = parser.parse_args()
    if args.write:
        write_record()
        return
    with tempfile.TemporaryDirectory() as folder:
        old, old_folder = fetch(args.package, args.old, Path(folder, "old"))
        new, new_folder = fetch(args.package, args.new, Path(folder, "new"))
        print(f"{args.package} {old} -> {new}")
        changed = differences(args.package, old_folder, new_folder, old, new)
    overrides = {definition.key for definition in definitions()} - RELIED_ON.keys()
    for key, diff in changed.items():
        why = "we override it" if key in overrides else f"it {RELIED_ON[key]}"
        print(f"\n== {key}: {why}\n{diff}")
    total = sum(definition.package == args.package for definition in definitions())
    print(f"\n{len(changed)} of {total} definitions differ" + "".join(f"\n  {key}" for key in changed))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
