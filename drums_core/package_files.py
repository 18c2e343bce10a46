"""Installed packages as files: where a module lies, what its package hashes to, which drums it wants; imports none."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import site
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

import drums


def owner_of(entry: metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that an entry point comes from.

    A damaged distribution may lack its metadata, and still have entry points: its name is then `?`.
    """
    dist = entry.dist
    # From Python 3.13 on the metadata warns when it is asked for what it lacks.
    name = dist.name if dist and "Name" in dist.metadata else "?"
    return name, dist.version if dist and "Version" in dist.metadata else ""


def locate(module: str) -> tuple[Path | None, Path]:
    """A module's source, if it has one, and the place of its top-level package or module.

    Raises:
        LookupError: it is not there.
    """
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError as e:
        raise LookupError(f"the module {top!r} cannot be found") from e
    if spec is None and _read_path_files():
        spec = importlib.util.find_spec(top)
    if spec is None:
        raise LookupError(f"there is no module {top!r}")
    if not spec.submodule_search_locations:
        if parts or not spec.origin:
            raise LookupError(f"there is no module {module!r}")
        place = Path(spec.origin)
        return (place if place.suffix == ".py" else None), place
    place = folder = Path(next(iter(spec.submodule_search_locations)))
    for part in parts[:-1]:
        folder /= part
    candidates = [folder / parts[-1] / "__init__.py", folder / f"{parts[-1]}.py"] if parts else [place / "__init__.py"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate, place
    if parts and any(folder.glob(f"{parts[-1]}.*")):
        return None, place  # compiled
    raise LookupError(f"there is no module {module!r}")


def _read_path_files() -> bool:
    """Add the folders of packages that were installed editable since this process began; whether there were any.

    Their path files (site, "Path configuration files") are read at the start of Python only. Lines of code in them are
    left alone: what needs those is found after a restart.
    """
    found: list[str] = []
    for folder in site.getsitepackages():
        for file in sorted(Path(folder).glob("*.pth")):
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError):
                continue
            found += [x for x in lines if os.path.isdir(x) and x not in sys.path and x not in found]
    sys.path += found
    importlib.invalidate_caches()
    return bool(found)


def files_of(place: Path) -> Iterator[tuple[str, Path]]:
    """The files of a package, or the one of a module, by their paths in it, in order; without compiled copies."""
    if not place.is_dir():
        yield place.name, place
        return
    for folder, names, files in os.walk(place):
        names[:] = sorted(x for x in names if x != "__pycache__")
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file():
                yield path.relative_to(place).as_posix(), path


def files_sha256(place: Path) -> str:
    """The sha256 of all files of a package: of their names and contents. Blocks; raises `OSError`."""
    total = hashlib.sha256()
    for name, path in files_of(place):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def module_sha256(module: str) -> str:
    """`files_sha256` of the package that a module lies in, "" where it cannot be read."""
    try:
        return files_sha256(locate(module)[1])
    except (LookupError, OSError, ImportError):
        return ""


def unmet_requirement(distribution: metadata.Distribution | None) -> str:
    """Why a distribution does not go with this drums, "" when it does: what it requires of `drums` itself."""
    for text in (distribution.requires or []) if distribution else []:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue  # pip has complained
        if wanted.name.lower() != "drums" or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        if not wanted.specifier.contains(drums.__version__, prereleases=True):
            return f"it needs drums{wanted.specifier}, this is drums {drums.__version__}"
    return ""
