"""Finding plugins by entry point, checking them, and what they registered.

One broken plugin neither takes the host down silently nor passes silently: each is a `PluginRecord` with its
distribution, version and traceback. `build_manager` is a function, never a module global.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import attrs
import pluggy

from drums.errors import PluginError
from drums_core import hookspecs
from drums_core.abc import Catalogue, Checker, EventGate, Gate, Step
from drums_core.config import HostConfig
from drums_core.model import PluginId
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

PLUGIN_GROUPS = ("drums.gates", "drums.setup_steps", "drums")
"""Entry-point groups whose values are pluggy plugins; one plugin per entry point."""


@attrs.frozen
class PluginRecord:
    """One entry point, loaded or not. `error` is one line, `trace` the traceback, both empty when it is usable."""

    name: str
    group: str
    distribution: str
    version: str
    error: str = ""
    trace: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is in use."""
        return not self.error

    @property
    def id(self) -> PluginId:
        """The short form that reports carry."""
        return PluginId(self.name, self.distribution, self.version)


@attrs.define
class Registry:
    """What the plugins of a host registered, each with the plugin that did."""

    gates: dict[str, tuple[Callable[[], Gate | EventGate], PluginId]] = attrs.field(factory=dict)
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

    Args:
        extra: (name, plugin) pairs of an embedding program, registered besides those found by entry point.
        ambient: whether installed packages are looked at; tests of a single plugin pass False.
    """
    manager = pluggy.PluginManager("drums")
    manager.add_hookspecs(hookspecs)
    plugins = Plugins(manager, Registry(), [])
    names: dict[str, list[str]] = {}
    candidates: list[tuple[str, str, metadata.EntryPoint | None, object | None]] = []
    if ambient:
        for group, entry in _entry_points():
            candidates.append((group, entry.name, entry, None))
            names.setdefault(f"{group}:{entry.name}", []).append(entry.dist.name if entry.dist else "?")
    for name, plugin in extra:
        candidates.append(("embedded", name, None, plugin))
        names.setdefault(f"embedded:{name}", []).append("embedded")
    for group, name, entry_point, plugin in candidates:
        dist = entry_point.dist if entry_point else None
        record = PluginRecord(name, group, dist.name if dist else "embedded", dist.version if dist else "")
        owners = names[f"{group}:{name}"]
        if len(owners) > 1:
            error = f"the name {name!r} of {group} is claimed by {' and '.join(sorted(owners))}; neither is loaded"
            plugins.records.append(attrs.evolve(record, error=error))
            continue
        plugins.records.append(_load_one(plugins, record, entry_point, plugin))
    return plugins


def _load_one(
    plugins: Plugins, record: PluginRecord, entry_point: metadata.EntryPoint | None, plugin: object | None
) -> PluginRecord:
    manager = plugins.manager
    full_name = f"{record.group}:{record.name}"
    try:
        loaded = entry_point.load() if entry_point else plugin
        if not isinstance(loaded, ModuleType) and isinstance(loaded, type):
            loaded = loaded()
        manager.register(loaded, full_name)
        unknown = [h.name for h in manager.get_hookcallers(loaded) or [] if not h.has_spec()]
        if unknown:
            raise PluginError(f"no such hook in this version of drums: {', '.join(sorted(unknown))}")
        staged = Registry()
        for hook, table in (
            ("drums_register_gates", staged.gates),
            ("drums_register_setup_steps", staged.steps),
            ("drums_register_checkers", staged.checkers),
            ("drums_register_catalogues", staged.catalogues),
        ):
            _call_register(loaded, hook, table, record.id)
        _merge(plugins.registry, staged)
    # SystemExit: a plugin's module may call sys.exit at import.
    except (Exception, SystemExit) as e:  # noqa: BLE001 - the plugin is listed as broken, with its traceback
        if manager.has_plugin(full_name):
            manager.unregister(name=full_name)
        return attrs.evolve(record, error=f"{type(e).__name__}: {e}", trace=traceback.format_exc())
    return record


def _call_register(plugin: Any, hook: str, table: dict[str, Any], owner: PluginId) -> None:
    implementation = getattr(plugin, hook, None)
    if implementation is None:
        return

    def register(name: str, factory: Callable[..., Any]) -> None:
        if name in table:
            raise PluginError(f"{hook} registered {name!r} twice")
        table[name] = (factory, owner)

    implementation(register)


def _merge(into: Registry, staged: Registry) -> None:
    for kind in ("gates", "steps", "checkers", "catalogues"):
        have, new = getattr(into, kind), getattr(staged, kind)
        for name in new:
            if name in have:
                owner = have[name][1]
                raise PluginError(f"{kind} name {name!r} is already registered by {owner.distribution} ({owner.name})")
    for kind in ("gates", "steps", "checkers", "catalogues"):
        getattr(into, kind).update(getattr(staged, kind))
