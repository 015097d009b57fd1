"""
The newest versions of our dependencies that meet the pins of other training libraries too, by what PyPI says.

    python .ci/co_install.py                          # the table of docs/compatibility.md
    python .ci/co_install.py axolotl==0.19.0          # other packages or versions

Nothing is installed: only the files that hold the pins are downloaded. CI does not run this.
"""

import argparse
import email.parser
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).parents[1]
LIBRARIES = ("axolotl", "unsloth", "ms-swift")


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def our_pins() -> dict[str, Requirement]:
    """Our dependencies, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {pin.name: pin for pin in map(Requirement, project["dependencies"])}


def their_pins(library: str) -> tuple[str, dict[str, Requirement]]:
    """Name with version, and dependencies by name, of the newest or named version of a library."""
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, library)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            (name,) = (name for name in content.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            metadata = email.parser.Parser().parsestr(content.read(name).decode())
    pins = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    held = {pin.name: pin for pin in pins if pin.marker is None or pin.marker.evaluate({"extra": ""})}
    return f"{metadata['Name']} {metadata['Version']}", held


def newest(name: str, ours: Requirement, theirs: Requirement | None) -> Version | None:
    """The newest version of a package that meets both pins."""
    listed = re.search(r"Available versions: (.*)", pip("index", "versions", name))
    assert listed is not None
    versions = [Version(text) for text in listed[1].split(", ")]
    both = ours.specifier if theirs is None else ours.specifier & theirs.specifier
    return max(both.filter(versions), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", default=LIBRARIES)
    ours = our_pins()
    names = ("trl", "transformers", "peft", "accelerate", "datasets")
    print(f"| | installs together | {' | '.join(names)} |")
    print("|---" * (len(names) + 2) + "|")
    for library in parser.parse_args().libraries:
        title, theirs = their_pins(library)
        cells, clashes = [], []
        for name in names:
            pin = theirs.get(name)
            found = newest(name, ours[name], pin)
            clashes += [name] if found is None else []
            cells.append(str(found) if found is not None or pin is None else f"it wants `{pin.specifier}`")
        print(f"| {title} | {'no: ' + ', '.join(clashes) if clashes else 'yes'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
