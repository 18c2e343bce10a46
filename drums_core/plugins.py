"""Finding plugins by entry point, checking them, and what they registered.

One broken plugin neither takes the host down silently nor passes silently: each is a `PluginRecord` with its
distribution, version and traceback. `build_manager` is a function, never a module global.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from types import ModuleType
from typing import Any

import attrs
import pluggy
import structlog

from drums.errors import PluginError
from drums_core import hookspecs
from drums_core.abc import Catalogue, Checker, EventGate, Gate, Step
from drums_core.config import HostConfig
from drums_core.model import PluginId, PluginRecord
from drums_core.package_files import module_sha256, owner_of, unmet_requirement
from drums_core.plugin_trial import try_loading
from drums_core.testing.faults.model import Fault
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

_log = structlog.get_logger("drums.plugins")
OWN = "drums"
"""The distribution whose plugins are the built-in ones."""

_PRINTED_LIMIT = 1000
PLUGIN_GROUPS = ("drums.gates", "drums.setup_steps", "drums")
"""Entry-point groups whose values are pluggy plugins; one plugin per entry point."""


@attrs.define
class Registry:
    """What the plugins of a host registered, each with the plugin that did."""

    gates: dict[str, tuple[Callable[[], Gate | EventGate], PluginId]] = attrs.field(factory=dict)
    faults: dict[str, tuple[Callable[[], Sequence[Fault]], PluginId]] = attrs.field(factory=dict)
    steps: dict[str, tuple[Callable[[], Step], PluginId]] = attrs.field(factory=dict)
    checkers: dict[str, tuple[Callable[[HostConfig], Checker], PluginId]] = attrs.field(factory=dict)
    catalogues: dict[str, tuple[Callable[[HostConfig], Catalogue], PluginId]] = attrs.field(factory=dict)


@attrs.define
class Plugins:
    """A manager with all usable plugins, the registry they filled, and a record of every entry point."""

    manager: pluggy.PluginManager
    registry: Registry
    records: list[PluginRecord]

    def broken(self) -> Sequence[PluginRecord]:
        """The entry points that are not in use."""
        return [r for r in self.records if not r.ok]

    def require_gates(self, extra: Iterable[str] = ()) -> None:
        """Refuse to work without a required gate.

        Raises:
            PluginError: names each missing gate with the reason why it did not load.
        """
        missing = [n for n in (*SPECIFIED_GATES, *EVENT_GATES, *extra) if n not in self.registry.gates]
        if missing:
            why = {r.name: r.error for r in self.broken()}
            text = "; ".join(f"{n!r}: {why.get(n, 'no installed package registers it')}" for n in missing)
            raise PluginError(
                f"required gates cannot be loaded: {text}",
                hint="see `drums plugins`; reinstall the package",
                missing=missing,
            )


def _entry_points() -> list[tuple[str, metadata.EntryPoint]]:
    found = []
    for group in PLUGIN_GROUPS:
        found += [(group, e) for e in sorted(metadata.entry_points(group=group), key=lambda e: e.name)]
    return found


def build_manager(extra: Sequence[tuple[str, object]] = (), *, ambient: bool = True) -> Plugins:
    """Load every plugin.

    Names are flat: where two packages claim one, as an entry point or by registering it, neither is in use, unless it
    is a name of drums' own, which nobody else gets. A package's plugins are loaded in a process of their own first:
    there a hang, a flood of output or the end of the process costs nobody else (`plugin_trial`).

    Args:
        extra: (name, plugin) pairs of an embedding program, registered besides those found by entry point.
        ambient: whether installed packages are looked at; tests of a single plugin pass False.
    """
    manager = pluggy.PluginManager("drums")
    manager.add_hookspecs(hookspecs)
    candidates: list[tuple[PluginRecord, Callable[[], object]]] = []
    entries = _entry_points() if ambient else []
    hashes: dict[str, str] = {}
    candidates += [(_record(group, entry, hashes), entry.load) for group, entry in entries]
    candidates += [(PluginRecord(name, "embedded", "embedded", ""), _given(plugin)) for name, plugin in extra]
    claims = _claims((f"the name {r.name!r} of {r.group}", r) for r, _ in candidates)
    found = [(_clash(claims, [f"the name {r.name!r} of {r.group}"], r), r, load) for r, load in candidates]
    faults = _faults([x for x, (clash, _, _) in zip(entries, found, strict=False) if not clash])
    records: list[PluginRecord] = []
    staged: list[tuple[int, Registry]] = []
    for clash, record, load in found:
        error = clash or faults.get((record.group, record.name), "")
        if error:
            records.append(attrs.evolve(record, error=error))
            continue
        registered = Registry()
        records.append(_load_one(manager, record, load, registered))
        if records[-1].ok:
            staged.append((len(records) - 1, registered))
    plugins = Plugins(manager, Registry(), records)
    claims = _claims((what, records[index]) for index, registered in staged for what in _names(registered))
    for index, registered in staged:
        if clash := _clash(claims, _names(registered), records[index]):
            manager.unregister(name=_full_name(records[index]))
            records[index] = attrs.evolve(records[index], error=clash)
            continue
        for kind in _KINDS:
            getattr(plugins.registry, kind).update(getattr(registered, kind))
    return plugins


def installed_now() -> list[PluginRecord]:
    """Every entry point as it is on disk, none of them loaded. Blocks."""
    hashes: dict[str, str] = {}
    return [_record(group, entry, hashes) for group, entry in _entry_points()]


def _faults(entries: Sequence[tuple[str, metadata.EntryPoint]]) -> dict[tuple[str, str], str]:
    """What is wrong with strangers' entry points before they are loaded here, by group and name."""
    strangers = [(group, entry) for group, entry in entries if owner_of(entry)[0] != OWN]
    faults = {(group, entry.name): unmet_requirement(entry.dist) for group, entry in strangers}
    to_try = [x for x in strangers if not faults[x[0], x[1].name]]
    hooks = {group: list(_KINDS.values()) for group in PLUGIN_GROUPS}
    for (group, entry), fault in zip(to_try, try_loading(to_try, hooks=hooks), strict=True):
        faults[group, entry.name] = fault
    return faults


_KINDS = {
    "gates": "drums_register_gates",
    "faults": "drums_register_faults",
    "steps": "drums_register_setup_steps",
    "checkers": "drums_register_checkers",
    "catalogues": "drums_register_catalogues",
}
"""A table of the registry, and the hook that fills it."""

_NAMED_AFTER = {"drums.gates": "gates", "drums.setup_steps": "steps"}
"""Groups whose entry points carry the one name that they register, and the table where it stands."""


def _record(group: str, entry: metadata.EntryPoint, hashes: dict[str, str]) -> PluginRecord:
    top = entry.value.partition(":")[0].partition(".")[0].strip()
    if top not in hashes:
        hashes[top] = module_sha256(top)
    return PluginRecord(entry.name, group, *owner_of(entry), sha256=hashes[top])


def _given(plugin: object) -> Callable[[], object]:
    return lambda: plugin


def _full_name(record: PluginRecord) -> str:
    return f"{record.group}:{record.name}"


def _names(registry: Registry) -> list[str]:
    return [f"{kind} name {name!r}" for kind in _KINDS for name in getattr(registry, kind)]


def _claims(claims: Iterable[tuple[str, PluginRecord]]) -> Mapping[str, list[PluginRecord]]:
    """Who claims each name."""
    owners: dict[str, list[PluginRecord]] = {}
    for what, record in claims:
        owners.setdefault(what, []).append(record)
    return owners


def _clash(claims: Mapping[str, list[PluginRecord]], names: Iterable[str], mine: PluginRecord) -> str:
    """Why a plugin does not get the names that it claims, "" when it does."""
    faults = []
    for name in names:
        owners = claims[name]
        own = [x for x in owners if x.distribution == OWN]
        if len(owners) == 1 or own == [mine]:
            continue
        text = " and ".join(sorted(f"{x.distribution} ({_full_name(x)})" for x in owners))
        faults.append(f"{name} is claimed by {text}: {'drums keeps its own' if own else 'neither is loaded'}")
    return "; ".join(faults)


def _load_one(
    manager: pluggy.PluginManager, record: PluginRecord, load: Callable[[], object], into: Registry
) -> PluginRecord:
    full_name = _full_name(record)
    try:
        with _quiet(record):
            loaded = load()
        if not isinstance(loaded, ModuleType) and isinstance(loaded, type):
            loaded = loaded()
        manager.register(loaded, full_name)
        unknown = [h.name for h in manager.get_hookcallers(loaded) or [] if not h.has_spec()]
        if unknown:
            raise PluginError(f"no such hook in this version of drums: {', '.join(sorted(unknown))}")
        with _quiet(record):
            for kind, hook in _KINDS.items():
                _call_register(loaded, hook, getattr(into, kind), record.id)
        if table := _NAMED_AFTER.get(record.group):
            found = sorted(getattr(into, table))
            if found != [record.name]:  # a misspelt hook without a mark would pass in silence
                raise PluginError(f"an entry point of {record.group} registers its own name alone, this one {found}")
    # SystemExit: a plugin's module may call sys.exit at import.
    except (Exception, SystemExit) as e:  # noqa: BLE001 - the plugin is listed as broken, with its traceback
        if manager.has_plugin(full_name):
            manager.unregister(name=full_name)
        return attrs.evolve(record, error=f"{type(e).__name__}: {e}", trace=traceback.format_exc())
    return record


@contextmanager
def _quiet(record: PluginRecord) -> Iterator[None]:
    """What a plugin prints while it is loaded goes to the log: standard output belongs to the program."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield
    finally:
        if text := printed.getvalue():
            _log.warning("a plugin printed while it was loaded", plugin=record.name, output=text[:_PRINTED_LIMIT])


def _call_register(plugin: Any, hook: str, table: dict[str, Any], owner: PluginId) -> None:
    implementation = getattr(plugin, hook, None)
    if implementation is None:
        return

    def register(name: str, factory: Callable[..., Any]) -> None:
        if name in table:
            raise PluginError(f"{hook} registered {name!r} twice")
        table[name] = (factory, owner)

    implementation(register)
