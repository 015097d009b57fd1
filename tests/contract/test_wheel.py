"""
The wheel works without the source tree: it installs, imports, trains, and has types for a type checker. The sdist
holds what the wheel is built from, and builds the same one.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest
import yaml


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]
TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent

SMOKE = """
import sys
from importlib.metadata import distribution
from pathlib import Path

import trl_klx
from support.tiny import build_trainer, logged

package, environment = Path(trl_klx.__file__).parent, Path(sys.prefix)
assert environment in package.parents, (package, environment)
assert (package / "py.typed").is_file()
assert distribution("trl-klx").version == trl_klx.__version__
assert all(hasattr(trl_klx, name) for name in trl_klx.__all__)
trainer = build_trainer(trl_klx.KLXGRPOTrainer, sys.argv[1], kl_penalty_coef=0.1, kl_target=0.5, max_steps=1)
trainer.train()
assert logged(trainer, "klx/coef") == [0.1]
assert not [name for name, module in sys.modules.items() if name.startswith("trl_klx") and module.__file__
            and environment not in Path(module.__file__).parents]
print("trained")
"""

USER_SCRIPT = """
from typing_extensions import assert_type

from trl_klx import KLController, KLXCallback, KLXGRPOConfig, estimate_kl, get_kl_controller

controller = get_kl_controller("pid", init_coef=0.05, target=6.0)
assert_type(controller, KLController)
assert_type(controller.update(kl=5.0, n_steps=8), float)
assert_type(KLXGRPOConfig("out").kl_penalty_coef, float | None)
assert_type(KLXGRPOConfig("out").kl_target, float | None)
get_kl_controller("pid", init_coef="much")  # type: ignore[arg-type]
controller.updat(5.0, 8)  # type: ignore[attr-defined]
estimate_kl(1.0, 2.0, 3)  # type: ignore[arg-type]
KLXCallback()  # type: ignore[call-arg]
"""

# The types of these packages do not matter here, and torch alone takes a minute to check.
MYPY = """
[mypy]
strict = True
warn_unused_ignores = True
disallow_subclassing_any = False
"""
SKIPPED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "huggingface_hub")


def run(*command, **kwargs) -> str:
    # Keep the tests' own path and overlays of other versions out of the new environment.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=300, **kwargs
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def copy_source(folder: Path) -> Path:
    """Copy the source, because setuptools writes next to it."""
    shutil.copytree(SOURCE / "trl_klx", folder / "trl_klx", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, folder)
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(copy_source(folder / "source"), folder)
    shutil.rmtree(folder / "source")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel):
    """A new virtual environment with the wheel, which uses the dependencies of the current one."""
    folder = wheel.parent
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Python ignores `.pth` files in a folder added this way, such as that of an editable install.
    Path(own, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_it_trains_outside_the_source_tree(environment, tmp_path):
    shutil.copytree(TESTS / "support", tmp_path / "support", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "smoke.py").write_text(SMOKE)
    assert run(environment, "smoke.py", "out", cwd=tmp_path).endswith("trained\n")


def test_the_command_is_installed(environment, tmp_path):
    assert "grpo" in run(environment.parent / "trl-klx", "--help", cwd=tmp_path)


def test_a_type_checker_sees_the_types(environment, tmp_path):
    (tmp_path / "user.py").write_text(USER_SCRIPT)
    sections = [
        f"[mypy-{name},{name}.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n" for name in SKIPPED
    ]
    (tmp_path / "mypy.ini").write_text(textwrap.dedent(MYPY) + "\n".join(sections))
    run(sys.executable, "-m", "mypy", "--python-executable", environment, "user.py", cwd=tmp_path)


def test_the_citation_names_this_version_and_licence(environment):
    citation = yaml.safe_load((SOURCE / "CITATION.cff").read_text())
    ask = "import importlib.metadata as m; d = m.metadata('trl-klx'); print(d['Version'], d['License-Expression'])"
    assert run(environment, "-c", ask).split() == [citation["version"], citation["license"]]
    assert f"## [{citation['version']}]" in (SOURCE / "CHANGELOG.md").read_text()


# ---- sdist ----


BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def test_the_sdist_holds_what_the_wheel_is_built_from_and_builds_the_same_one(wheel, tmp_path):
    source = copy_source(tmp_path / "source")
    (source / "outputs").mkdir()
    (source / "outputs" / "model.safetensors").write_text("not for distribution")
    run(sys.executable, "-c", BUILD_SDIST, tmp_path, cwd=source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    modules = {str(path.relative_to(SOURCE)) for path in (SOURCE / "trl_klx").rglob("*.py")}
    assert {"LICENSE", "README.md", "pyproject.toml", "trl_klx/py.typed", *modules} <= names
    assert not any(name.startswith("outputs") for name in names)
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build_wheel(unpacked, tmp_path)
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert {entry.filename: entry.CRC for entry in one.infolist()} == {
            entry.filename: entry.CRC for entry in other.infolist()
        }


def test_metadata_has_what_an_index_shows(environment):
    ask = (
        "import importlib.metadata as m, json; d = m.metadata('trl-klx'); "
        "print(json.dumps({key: d.get_all(key) for key in ('Author', 'Project-URL', 'Classifier', 'License-File')}))"
    )
    shown = yaml.safe_load(run(environment, "-c", ask))
    assert shown["Author"] and shown["Project-URL"] and shown["License-File"] == ["LICENSE"]
    # Claim only the versions on which all fast tests were run, see docs/compatibility.md.
    pythons = {line.rpartition(" ")[2] for line in shown["Classifier"] if line.startswith("Programming Language")}
    assert pythons == {"Only", "3.11", "3.12", "3.13"}
