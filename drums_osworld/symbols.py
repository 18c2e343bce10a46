"""Which module of OSWorld's `desktop_env` defines a metric or a getter, found without importing any of it."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from drums.errors import PrerequisiteError, VerifierNotFound

PACKAGE = "desktop-env==1.0.2"


@attrs.frozen
class Symbol:
    """A function: its module's name within `metrics` or `getters`, and its own name there."""

    module: str
    attribute: str


@attrs.frozen
class Symbols:
    """What a `desktop_env` folder defines."""

    root: Path
    metrics: Mapping[str, Symbol]
    getters: Mapping[str, Symbol]

    def metric(self, name: str) -> Symbol:
        """The metric of this name; raises `VerifierNotFound`."""
        return self._find(self.metrics, name, "metric", name)

    def getter(self, kind: str) -> Symbol:
        """The getter of this `type`; raises `VerifierNotFound`."""
        return self._find(self.getters, f"get_{kind}", "getter type", kind)

    def _find(self, table: Mapping[str, Symbol], name: str, what: str, shown: str) -> Symbol:
        if name in table:
            return table[name]
        near = [x.removeprefix("get_") if what != "metric" else x for x in difflib.get_close_matches(name, table)]
        raise VerifierNotFound(
            f"OSWorld's {what} {shown!r} is not in {str(self.root)!r}",
            hint=f"nearest: {', '.join(near)}" if near else "",
            name=shown,
            nearest=near,
        )

    def file(self, kind: str, symbol: Symbol) -> Path:
        """The file that defines a symbol of `metrics` or `getters`."""
        return self.root / "evaluators" / kind / f"{symbol.module}.py"

    def hashes(self, files: Iterable[Path]) -> dict[str, str]:
        """sha256 of these files by their path below the folder's parent."""
        return {
            str(x.relative_to(self.root.parent)): hashlib.sha256(x.read_bytes()).hexdigest() for x in sorted(set(files))
        }


def locate(osworld: Path | None) -> tuple[Path, str]:
    """The `desktop_env` folder to use, a checkout's before the installed one, and its version.

    Raises:
        PrerequisiteError: there is none.
    """
    if osworld is not None and (osworld / "desktop_env").is_dir():
        return osworld / "desktop_env", "checkout"
    spec = importlib.util.find_spec("desktop_env")
    if spec is None or not spec.submodule_search_locations:
        raise PrerequisiteError(
            "OSWorld's evaluation code is not installed",
            hint=f"pip install --no-deps {PACKAGE}",
            missing="desktop-env",
        )
    return Path(next(iter(spec.submodule_search_locations))), importlib.metadata.version("desktop-env")


@functools.lru_cache(maxsize=4)
def scan(root: Path) -> Symbols:
    """What the folder defines. Names that a package's initialiser exports mean what it says, as for OSWorld itself."""
    return Symbols(root, _scan(root / "evaluators" / "metrics"), _scan(root / "evaluators" / "getters"))


def _scan(package: Path) -> dict[str, Symbol]:
    found: dict[str, Symbol] = {}
    for path in sorted(package.glob("*.py")):
        if path.stem == "__init__":
            continue
        for node in _parse(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found.setdefault(node.name, Symbol(path.stem, node.name))
    for node in _parse(package / "__init__.py").body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = Symbol(node.module, alias.name)
    return found


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError) as e:
        raise PrerequisiteError(
            f"OSWorld's {str(path)!r} cannot be read: {e}", hint=f"pip install --no-deps --force-reinstall {PACKAGE}"
        ) from e


def named(value: Any) -> list[Any]:
    """A field that holds one thing or a list of them, as a list."""
    return list(value) if isinstance(value, list) else [value]
