"""Which part of the package may import which, and that README and CI run the same command."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_domino"
DRAFTER_MAY_USE = ("torch", "transformers", "huggingface_hub", "safetensors")  # the last two come with transformers
USERS_OF_DRAFTER = ("training", "evaluation", "hub")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Level (dots) and full name of each module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.level, node.module
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, alias.name) for alias in node.names)


def absolute(file: Path, level: int, name: str) -> str:
    """The module's name without dots in front."""
    if level == 0:
        return name
    package = file.relative_to(ROOT).parent.parts
    return ".".join([*package[: len(package) - level + 1], name])


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("file", sorted((PACKAGE / "drafter").glob("*.py")), ids=lambda file: file.name)
def test_the_drafter_stands_alone(file):
    siblings = {sibling.stem for sibling in file.parent.glob("*.py")}
    for level, name in imports(file):
        if level:
            assert level == 1 and name in siblings, f"{'.' * level}{name} is no sibling"
        else:
            allowed = name.split(".")[0] in sys.stdlib_module_names or within(name, DRAFTER_MAY_USE)
            assert allowed, f"{name} would be missing where only torch and transformers are installed"


def test_the_drafter_is_one_flat_folder():
    # The Hub's code loader copies the files beside each other and knows no folders.
    assert not [file for file in (PACKAGE / "drafter").rglob("*.py") if file.parent.name != "drafter"]


@pytest.mark.parametrize("part", USERS_OF_DRAFTER)
def test_the_parts_around_the_drafter_do_not_know_each_other(part):
    others = tuple(f"hf_domino.{other}" for other in USERS_OF_DRAFTER if other != part)
    files = sorted((PACKAGE / part).rglob("*.py"))
    assert files
    names = [(file, absolute(file, *imported)) for file in files for imported in imports(file)]
    assert not [(file.relative_to(ROOT), name) for file, name in names if within(name, others)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import hf_domino.hub.staging", "hf_domino.hub.staging"),
        ("from ..hub import staging", "hf_domino.hub"),
        ("from .. import hub", "hf_domino.hub"),
        ("from .blocks import Blocks", "hf_domino.training.blocks"),
        ("def f():\n    from hf_domino.evaluation import record", "hf_domino.evaluation"),
    ],
)
def test_every_way_of_importing_is_seen(line, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "hf_domino" / "training" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text(line)

    assert [absolute(file, *imported) for imported in imports(file)] == [expected]


def test_ci_runs_the_readmes_own_test_command():
    shown = subprocess.run(["bash", str(ROOT / ".ci" / "run"), "--show"], capture_output=True, text=True, check=True)

    command = shown.stdout.strip()
    assert "\n" not in command
    assert f"```bash\n{command}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert command.startswith("python3 -m venv .venv && ") and command.rpartition(" && ")[2].startswith("pytest")
