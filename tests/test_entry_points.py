"""The built-in gates, steps and checkers are plugins like anybody's: an entry point each, and a module of its own."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from importlib import metadata
from pathlib import Path

import click
import pytest

from drums_core.abc import EventGate
from drums_core.config import HostConfig
from drums_core.gating import GateSet
from drums_core.model import Phase
from drums_core.plugins import PLUGIN_GROUPS, build_manager
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

ROOT = Path(__file__).parents[1]
ENTRY_POINTS: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "entry-points"
]
PHASES = {
    "lock_applied": Phase.RESTORED,
    "lock_pre_resume": Phase.PRE_RESUME,
    "cgroup": Phase.PRE_RESUME,
    "init_identity": Phase.PRE_RESUME,
    "mount_table": Phase.PRE_RESUME,
    "netns": Phase.PRE_RESUME,
    "guest_ready": Phase.READY,
    "state_hash": Phase.PRE_RESUME,
    "isolation": Phase.PRE_RESUME,
    "alive_after_resume": Phase.SETTLED,
    "no_oom_kill": Phase.EVENT,
    "no_app_crash": Phase.EVENT,
    "not_quarantined": Phase.EVENT,
}
"""The specification's gates with the phases of the design."""


def plugins_of(group: str) -> list[tuple[str, str]]:
    return sorted(ENTRY_POINTS[group].items())


def test_the_gates_of_the_specification_are_there() -> None:
    """Each of the thirteen, in its phase, and by its own entry point; the ten checked ones are required."""
    assert {*SPECIFIED_GATES, *EVENT_GATES} == set(PHASES) == set(ENTRY_POINTS["drums.gates"])
    plugins = build_manager()
    plugins.require_gates()
    gates = GateSet.build(plugins.registry, timeout_s=1)
    assert {g.name: g.gate.phase for g in gates._gates if g.name in PHASES} == PHASES
    assert {g.name for g in gates._gates if isinstance(g.gate, EventGate)} == set(EVENT_GATES)
    assert {name: phase for name, (phase, _) in gates.required.items()} == {n: PHASES[n] for n in SPECIFIED_GATES}


@pytest.mark.parametrize(
    ("group", "name", "module"),
    [(group, *item) for group in ("drums.gates", "drums.setup_steps") for item in plugins_of(group)],
)
def test_one_module_each_registers_its_own_name(group: str, name: str, module: str) -> None:
    """Loaded alone, an entry point registers its name, once, and nothing else; the module is named after it."""
    assert module.rpartition(".")[2] == name
    plugins = build_manager([(name, importlib.import_module(module))], ambient=False)
    assert plugins.broken() == []
    registry = plugins.registry
    registered = {
        "drums.gates": list(registry.gates),
        "drums.setup_steps": list(registry.steps),
        "drums": [*registry.checkers, *registry.catalogues],
    }
    assert registered == {"drums.gates": [], "drums.setup_steps": [], "drums": []} | {group: [name]}


def test_no_module_serves_two_entry_points() -> None:
    """One module each."""
    modules = [module for group in PLUGIN_GROUPS for module in ENTRY_POINTS[group].values()]
    assert len(modules) == len(set(modules))


@pytest.mark.parametrize(("name", "module"), plugins_of("drums"))
def test_checkers_and_catalogues(name: str, module: str) -> None:
    """Each registers one checker or one catalogue, under its own name, and one can be made of it."""
    registry = build_manager([(name, importlib.import_module(module))], ambient=False).registry
    assert [*registry.checkers, *registry.catalogues] == [name]
    assert not registry.gates and not registry.steps
    for factory, _ in (registry.checkers | registry.catalogues).values():
        assert factory(HostConfig()) is not None


def test_what_scores_and_what_lists_tasks() -> None:
    """OSWorld's functions and operators' verifiers score; OSWorld's tasks are listed."""
    registry = build_manager().registry
    assert {"osworld_checker", "drums_verifier"} <= set(registry.checkers)
    assert set(registry.catalogues) == {"osworld_catalogue"}


@pytest.mark.parametrize(("name", "target"), plugins_of("drums.commands"))
def test_commands(name: str, target: str) -> None:
    """Each is a click command of its own name with a first line of help."""
    module, _, attribute = target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command) and command.name == name
    assert command.get_short_help_str(80)


@pytest.mark.parametrize("group", [*PLUGIN_GROUPS, "drums.commands"])
def test_what_is_installed_is_what_is_declared(group: str) -> None:
    """The installed metadata lists the same entry points as pyproject.toml; if not, `./run setup` installs it anew."""
    installed = {e.name: e.value for e in metadata.entry_points(group=group) if e.dist and e.dist.name == "drums"}
    assert installed == ENTRY_POINTS[group], "pyproject.toml has changed since `./run setup`"


@pytest.mark.parametrize("name", sorted(PHASES))
def test_gates_are_made_without_io(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate's factory takes nothing and opens nothing: a host makes all of them before it has a desktop."""
    factory, owner = build_manager().registry.gates[name]
    assert (owner.name, owner.distribution) == (name, "drums")
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr("os.open", None)
    gate = factory()
    assert gate.phase is PHASES[name]
    assert inspect.iscoroutinefunction(getattr(gate, "check", None)) is not isinstance(gate, EventGate)
