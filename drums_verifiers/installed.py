"""The verifiers that operators have installed: found anew at each look, and read without being imported.

An entry point of the group `drums_verifier` names a module, or a class in one. Only a worker runs it; here its source
is parsed to tell whether it has a function, and where that cannot be told (`from x import *`, a base class, a compiled
module) the worker finds out.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import attrs

from drums.errors import VerifierNotFound
from drums_core.model import PluginRecord
from drums_core.package_files import files_sha256, locate, owner_of, unmet_requirement
from drums_core.plugin_trial import try_loading

GROUP = "drums_verifier"


@attrs.frozen
class Installed:
    """A verifier.

    Args:
        name: as tasks name it.
        distribution: the package that it comes from, with its `version`.
        module: the module's name; `attribute` the class in it, or "".
        file: its source, None when there is none to read.
        place: the folder or file of its top-level package or module.
    """

    name: str
    distribution: str
    version: str
    module: str
    attribute: str
    file: Path | None
    place: Path

    def sha256(self) -> str:
        """That of the package's files."""
        return files_sha256(self.place)


def find(name: str) -> Installed:
    """The verifier of this name.

    Raises:
        VerifierNotFound: there is none, several packages have it, or its module is not there.
    """
    importlib.invalidate_caches()  # a package that was installed since must be seen
    entries = metadata.entry_points(group=GROUP)
    mine = [e for e in entries if e.name == name]
    if not mine:
        raise _not_found(f"no installed package has the verifier {name!r}", name, {e.name for e in entries})
    if len(mine) > 1:
        owners = " and ".join(sorted(owner_of(e)[0] for e in mine))
        raise VerifierNotFound(f"the verifier {name!r} is claimed by {owners}: neither is used", verifier=name)
    (entry,) = mine
    distribution, version = owner_of(entry)
    try:
        if unmet := unmet_requirement(entry.dist):
            raise LookupError(unmet)
        file, place = locate(entry.module)
    except LookupError as e:
        raise VerifierNotFound(
            f"the verifier {name!r} of {distribution} {version} cannot be used: {e}", verifier=name
        ) from e
    return Installed(name, distribution, version, entry.module, entry.attr or "", file, place)


def records(known: dict[tuple[str, str], str]) -> list[PluginRecord]:
    """Every verifier with what is wrong with it. Blocks.

    Args:
        known: what loading a verifier of these files came to, by its value and hash; added to.
    """
    importlib.invalidate_caches()
    entries = sorted(metadata.entry_points(group=GROUP), key=lambda e: (e.name, *owner_of(e)))
    found: dict[int, PluginRecord] = {}
    to_try = []
    for index, entry in enumerate(entries):
        record = PluginRecord(entry.name, GROUP, *owner_of(entry))
        try:
            verifier = find(entry.name)
            record = attrs.evolve(record, sha256=verifier.sha256())
            if verifier.file is not None:
                _scope(verifier)
        except (VerifierNotFound, OSError) as e:
            found[index] = attrs.evolve(record, error=str(e))
            continue
        found[index] = record
        if (entry.value, record.sha256) not in known:
            to_try.append((index, entry))
    faults = try_loading([(GROUP, entry) for _, entry in to_try], hooks={}, tell=True)
    for (index, entry), fault in zip(to_try, faults, strict=True):
        known[entry.value, found[index].sha256] = fault
    for index, record in found.items():
        if not record.error:
            found[index] = attrs.evolve(record, error=known[entries[index].value, record.sha256])
    return list(found.values())


def require_function(verifier: Installed, function: str) -> None:
    """Refuse a function that the verifier surely has not.

    Raises:
        VerifierNotFound: names the nearest ones that it has.
    """
    wanted = _described(verifier)
    if not function.isidentifier() or function.startswith("_"):
        raise VerifierNotFound(f"{function!r} is no name of a verifier's function", verifier=verifier.name)
    if verifier.file is None:
        return
    body = _scope(verifier)
    if body is None:
        return
    functions, others, open_ended = _names(body)
    if function not in functions | others and not open_ended:
        raise _not_found(f"{wanted} has no function {function!r}", function, functions, verifier=verifier.name)


def _described(verifier: Installed) -> str:
    return f"the verifier {verifier.name!r} of {verifier.distribution} {verifier.version}"


def _scope(verifier: Installed) -> Sequence[ast.stmt] | None:
    """The statements of its module or class, None where they cannot be told; raises `VerifierNotFound`."""
    assert verifier.file is not None
    try:
        body: Sequence[ast.stmt] | None = ast.parse(verifier.file.read_bytes()).body
        for part in filter(None, verifier.attribute.split(".")):
            body = None if body is None else _class_body(body, part)
    except (OSError, ValueError, SyntaxError, LookupError) as e:
        raise VerifierNotFound(f"{_described(verifier)} cannot be used: {e}", verifier=verifier.name) from e
    return body


def _not_found(message: str, wanted: str, names: Iterable[str], **facts: str) -> VerifierNotFound:
    known = sorted(x for x in names if not x.startswith("_"))
    near = difflib.get_close_matches(wanted, known, n=3)
    hint = f"nearest: {', '.join(near)}" if near else f"there are {', '.join(known[:10])}" if known else ""
    return VerifierNotFound(message, hint=hint, **{"verifier": wanted, **facts}, candidates=near or known[:10])


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a scope, those in its branches included."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _flat([x for x in getattr(statement, field, ()) if isinstance(x, ast.stmt)])
        for handler in getattr(statement, "handlers", ()):
            yield from _flat(handler.body)


def _names(body: Sequence[ast.stmt]) -> tuple[set[str], set[str], bool]:
    """The functions of a scope, the other names that may be functions, and whether there may be more."""
    functions: set[str] = set()
    others: set[str] = set()
    open_ended = False
    for statement in _flat(body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.add(statement.name)
            open_ended |= statement.name == "__getattr__"
        elif isinstance(statement, ast.ImportFrom):
            names = {x.asname or x.name for x in statement.names}
            open_ended |= "*" in names
            others |= names
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            others |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return functions, others, open_ended


def _class_body(body: Sequence[ast.stmt], name: str) -> Sequence[ast.stmt] | None:
    """The body of a class; None when what it has cannot be told. Raises `LookupError` when there is none."""
    for statement in _flat(body):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            plain = not statement.bases and not statement.keywords and not statement.decorator_list
            return statement.body if plain else None
    functions, others, open_ended = _names(body)
    if name in functions | others or open_ended:
        return None
    raise LookupError(f"there is no class {name!r} in its module")
