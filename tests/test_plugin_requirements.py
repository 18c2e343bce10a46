"""What the packages of `plugins/` and of the template declare is enough, and is what is here.

`test_example_plugins.py` installs them without their dependencies, into an environment that sees this one's packages:
an import that they do not declare works there, and may fail where an operator's pip has installed them.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import drums
from drums_verifiers.scaffold import create_package

ROOT = Path(__file__).parents[1]
PLUGINS = [*sorted(x.parent.name for x in (ROOT / "plugins").glob("*/pyproject.toml")), "template"]


def declared(package: Path) -> list[Requirement]:
    """What a package says that it needs here."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    found = [Requirement(x) for x in project.get("dependencies", [])]
    return [x for x in found if x.marker is None or x.marker.evaluate()]


def imported(body: ast.AST) -> Iterator[str]:
    """The top-level modules that code imports as it runs, at any depth; not what is for type checking alone."""
    if isinstance(body, ast.If) and ast.unparse(body.test).rpartition(".")[2] == "TYPE_CHECKING":
        for other in body.orelse:
            yield from imported(other)
        return
    if isinstance(body, ast.Import):
        yield from (x.name.partition(".")[0] for x in body.names)
    elif isinstance(body, ast.ImportFrom) and not body.level:
        yield str(body.module).partition(".")[0]
    elif isinstance(body, ast.Call) and ast.unparse(body.func).rpartition(".")[2] in ("import_module", "__import__"):
        yield from (str(x.value).partition(".")[0] for x in body.args[:1] if isinstance(x, ast.Constant))
    for node in ast.iter_child_nodes(body):
        yield from imported(node)


def faults(package: Path) -> list[str]:
    """What a package needs and does not declare, or declares and has not here."""
    wrong = []
    owners = {name: {*map(canonicalize_name, of)} for name, of in metadata.packages_distributions().items()}
    # An editable installation, as a checkout has, does not tell which packages are drums'.
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    owners |= {name: {canonicalize_name("drums")} for name in own["packages"]}
    needed = declared(package)
    source = package / "src"
    here = {x.stem for x in source.iterdir()}
    for file in sorted(source.rglob("*.py")):
        for name in sorted({*imported(ast.parse(file.read_bytes()))} - here - sys.stdlib_module_names):
            if not owners.get(name, set()) & {canonicalize_name(x.name) for x in needed}:
                wrong.append(f"{file.name} imports {name}, which no declared requirement brings")
    return wrong + [fault for wanted in needed for fault in unmet(wanted)]


def unmet(wanted: Requirement) -> list[str]:
    """Why what is installed does not meet a requirement; of the extras that it names, whether all is there."""
    try:
        found = metadata.distribution(wanted.name)
    except metadata.PackageNotFoundError:
        return [f"{wanted.name} is not installed"]
    wrong = []
    if not wanted.specifier.contains(found.version, prereleases=True):
        wrong.append(f"{wanted} is declared, {found.version} is installed")
    if unknown := wanted.extras - {*(found.metadata.get_all("Provides-Extra") or [])}:
        wrong.append(f"{wanted.name} has no extra {', '.join(sorted(unknown))}")
    for extra in sorted(wanted.extras):
        for part in map(Requirement, found.requires or []):
            if part.marker and not part.marker.evaluate({"extra": ""}) and part.marker.evaluate({"extra": extra}):
                wrong += unmet(part)
    return wrong


@pytest.fixture
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One of `plugins/`, or one made from the template."""
    if request.param != "template":
        return ROOT / "plugins" / str(request.param)
    create_package("demo", tmp_path / "demo")
    return tmp_path / "demo"


@pytest.mark.parametrize("package", PLUGINS, indirect=True)
def test_what_it_declares_is_enough_and_is_here(package: Path) -> None:
    assert [*(package / "src").rglob("*.py")] and faults(package) == []


def test_the_examples_declare_drums_where_they_run_it() -> None:
    """A gate does; a verifier gets all that it needs as arguments."""
    gate = next(x for x in declared(ROOT / "plugins" / "drums-gate-example") if x.name == "drums")
    assert gate.extras == {"host"} and drums.__version__ in gate.specifier and "99" not in gate.specifier
    assert declared(ROOT / "plugins" / "drums-verifier-example") == []


@pytest.mark.parametrize(
    ("dependencies", "code", "fault"),
    [
        ([], "import drums_core.abc", "a.py imports drums_core, which no"),
        ([], "def f():\n    from pytest import raises", "a.py imports pytest, which no"),
        ([], "import importlib\nimportlib.import_module('pytest.x')", "a.py imports pytest, which no"),
        ([], "import a_module_of_nobody", "a.py imports a_module_of_nobody, which no"),
        (
            [],
            "import typing\nif typing.TYPE_CHECKING:\n    import x\nelse:\n    import pytest",
            "imports pytest, which no",
        ),
        (["pytest"], "import packaging", "a.py imports packaging, which no"),
        (
            ["drums>=0.1,<0.2", "no-such-package-of-anybody"],
            "import drums",
            "no-such-package-of-anybody is not installed",
        ),
        (["drums>=9"], "import drums", "drums>=9 is declared, "),
        (["drums[host,ghost]"], "import drums", "drums has no extra ghost"),
    ],
)
def test_planted_fault_is_seen(dependencies: list[str], code: str, fault: str, tmp_path: Path) -> None:
    [found] = faults(make(tmp_path, dependencies, code))
    assert fault in found


@pytest.mark.parametrize(
    ("dependencies", "code"),
    [
        ([], "import json, os.path\nfrom . import b\nfrom pkg.b import c"),
        ([], "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import drums_core"),
        (["drums[host]>=0.1,<0.2"], "import drums_verifiers"),
        (["PyTest", "never; python_version < '3'"], "import pytest"),
    ],
)
def test_what_is_right_is_no_fault(dependencies: list[str], code: str, tmp_path: Path) -> None:
    assert faults(make(tmp_path, dependencies, code)) == []


def make(folder: Path, dependencies: list[str], code: str) -> Path:
    place = folder / "src" / "pkg"
    place.mkdir(parents=True)
    (place / "a.py").write_text(code)
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'pkg'\ndependencies = {dependencies!r}\n")
    return folder
