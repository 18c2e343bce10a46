"""The layers of drums, as a checker of imports that a test runs over the tree, and over trees with planted faults.

Arrows point one way (`DESIGN.md`, 2): `drums` <- `drums_core` <- (`drums_gates`, `drums_verifiers`, `drums_osworld`),
and `plugins/*` stand where those three do. Within the last three one arrow is allowed: OSWorld's checker runs in the
worker of `drums_verifiers`, which knows nothing of OSWorld.

Every import counts: at the top of a module, in a function, for type checking alone, or by a literal name given to
`importlib.import_module`.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

PACKAGES = ("drums", "drums_core", "drums_gates", "drums_verifiers", "drums_osworld")
ARROWS: Mapping[str, frozenset[str]] = {
    "drums": frozenset({"drums"}),
    "drums_core": frozenset({"drums", "drums_core"}),
    "drums_gates": frozenset({"drums", "drums_core", "drums_gates"}),
    "drums_verifiers": frozenset({"drums", "drums_core", "drums_verifiers"}),
    "drums_osworld": frozenset({"drums", "drums_core", "drums_verifiers", "drums_osworld"}),
}
PLUGIN_ARROWS = frozenset({"drums", "drums_core"})

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "drums": (),
    "drums_core": ("host",),
    "drums_gates": ("host",),
    "drums_verifiers": ("host",),
    "drums_osworld": ("host", "osworld"),
}
"""Whose dependencies of `pyproject.toml` a package may import, besides those of the bare install."""

MODULES_OF = {"protobuf": "google", "attrs": "attrs", "PyYAML": "yaml"}
"""Distributions whose module has another name."""

FROM_ELSEWHERE = frozenset({"rpc_pb2", "stats_pb2"})
"""CRIU's own message modules: they come with the CRIU that is installed, in a folder of their own."""

SYS = "drums_core.sys"
ABOVE_SYS_ALLOWED = ("drums.errors", "drums_core.model", "drums_core.criu_provider.model")
"""What `drums_core/sys` may import besides itself: errors and plain values, nothing that acts. Of the core's packages
above it, only the value that says which CRIU there is."""

STAND_ALONE: Mapping[str, frozenset[str]] = {
    "drums_core/sys/enter.py": frozenset(),
    "drums_core/sys/sudo_server.py": frozenset(),
    "drums_core/sys/examiner_main.py": frozenset({"guest"}),  # the image's own copy of drums_core/guest
    "drums_verifiers/worker_main.py": frozenset(),
    "drums_verifiers/desktop_view.py": frozenset(),
    "drums_core/plugin_trial.py": frozenset(),
    "drums_core/testing/conformance_desktop.py": frozenset(),
    "drums_core/selftest/stage_program.py": frozenset({"Xlib"}),  # it runs in a desktop
    "drums_verifiers/verifier_job.py": frozenset({"drums_verifiers"}),  # the view, which is one of these
    "drums_osworld/worker_browser.py": frozenset(),
    # What it is there to run, and the file above.
    "drums_osworld/worker_job.py": frozenset({"desktop_env", "drums_osworld"}),
    "drums_osworld/parity/reference.py": frozenset({"desktop_env", "drums_osworld"}),  # the same
}
"""Started by path or by source where nothing else of drums can be imported: the standard library and these alone."""

PYTEST_PLUGIN = "drums_core/testing/pytest_plugin.py"
"""Loaded by pytest alone, for who has it."""

FOR_PLUGINS_TESTS = "drums_verifiers.trial"
"""What a plugin may import besides the core: how a host calls a verifier, for the plugin's own tests."""

GUEST = ("drums_core/guest/", "drums_core/image/recipes/")
GUEST_MAY = frozenset({"guest", "PIL", "Xlib", "gi", "isal", "pyautogui", "mouseinfo"})
"""The guest server, and what runs as an image is built, use the image's interpreter, which has these (mouseinfo is
pyautogui's); `guest` is the server's own name there."""


@attrs.frozen
class Import:
    """One import: `target` is the dotted name, down to the name taken out of a module."""

    file: str
    line: int
    target: str

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    def says(self, problem: str) -> str:
        return f"{self.file}:{self.line}: {problem}"


def imports_of(root: Path, path: Path) -> Iterator[Import]:
    """Every import of a file."""
    name = path.relative_to(root).as_posix()
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            parts = [*package[: len(package) - node.level + 1]] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(name, node.lineno, f"{base}.{alias.name}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            match node.args:
                case [ast.Constant(value=str(literal)), *_]:
                    yield Import(name, node.lineno, literal)


def within(target: str, module: str) -> bool:
    """Whether an import's target is a module or something in it."""
    return target == module or target.startswith(f"{module}.")


def declared(pyproject: Path, extras: Sequence[str]) -> frozenset[str]:
    """The top-level modules of the declared dependencies."""
    project = tomllib.loads(pyproject.read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    names = [re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in requirements]
    return frozenset(MODULES_OF.get(name, name.replace("-", "_")) for name in names)


def check(root: Path) -> list[str]:
    """Every broken rule, as `file:line: what is wrong`."""
    faults: list[str] = []
    for package in PACKAGES:
        third_party = declared(root / "pyproject.toml", EXTRAS[package])
        for path in sorted((root / package).rglob("*.py")):
            for found in imports_of(root, path):
                if problem := _problem(package, found, third_party):
                    faults.append(found.says(problem))
    for path in sorted((root / "plugins").rglob("*.py")):
        for found in imports_of(root, path):
            for_tests = "tests" in path.relative_to(root).parts and within(found.target, FOR_PLUGINS_TESTS)
            if found.top in PACKAGES and found.top not in PLUGIN_ARROWS and not for_tests:
                faults.append(found.says(f"a plugin may not import {found.target}"))
            elif problem := _private(found):
                faults.append(found.says(problem))
    return faults


def _problem(package: str, found: Import, third_party: frozenset[str]) -> str:
    if found.file in STAND_ALONE:
        allowed = found.top in sys.stdlib_module_names or found.top in STAND_ALONE[found.file]
        return "" if allowed else f"a stand-alone file may not import {found.target}"
    if found.file.startswith(GUEST):
        allowed = found.top in sys.stdlib_module_names or found.top in GUEST_MAY
        return "" if allowed else f"a guest file may not import {found.target}"
    if found.file == PYTEST_PLUGIN and found.top == "pytest":
        return ""
    if found.top in PACKAGES:
        return _arrow(package, found)
    if found.top in sys.stdlib_module_names or found.top in third_party or found.top in FROM_ELSEWHERE:
        return ""
    return f"{found.target} is of no dependency that pyproject.toml declares for {package}"


def _arrow(package: str, found: Import) -> str:
    if found.top not in ARROWS[package]:
        return f"{package} may not import {found.target}"
    in_sys = found.file.startswith("drums_core/sys/")
    if in_sys and not any(within(found.target, name) for name in (SYS, *ABOVE_SYS_ALLOWED)):
        return f"{SYS} may not import {found.target}, which lies above it"
    if package == "drums_gates":
        # A gate reads; the system calls that change something are not among the core's public names.
        return f"a gate may not import {found.target}" if within(found.target, SYS) else _private(found)
    # A sibling package's private names are as private as the core's.
    return _private(found) if found.top != package else ""


def _private(found: Import) -> str:
    if found.top not in PACKAGES or not found.file.startswith(("drums_", "plugins/")):
        return ""
    if found.file.startswith(f"{found.top}/"):
        return ""
    private = [part for part in found.target.split(".") if part.startswith("_") and not part.startswith("__")]
    return f"{found.target} is private to {found.top}" if private else ""
