"""Broken plugins: each is listed by name, distribution, version and traceback, and costs no other."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from drums.errors import PluginError
from drums_core.hookspecs import hookimpl
from drums_core.plugins import PluginRecord, Plugins, build_manager
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

Install = Callable[..., None]
GATE = """
from drums_core.hookspecs import hookimpl
@hookimpl
def drums_register_gates(register):
    register({name!r}, lambda: {name!r})
"""
ALL_GATES = {*SPECIFIED_GATES, *EVENT_GATES}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution on sys.path, with one module and its entry points; as pip would leave it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def put(dist: str, code: str, *entries: tuple[str, str], version: str = "1.5", metadata: bool = True) -> None:
        module = dist.replace("-", "_")
        place = tmp_path / dist
        info = place / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (place / f"{module}.py").write_text(code)
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("".join(f"[{g}]\n{name} = {module}\n" for g, name in entries))
        sys.path.insert(0, str(place))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


def broken(plugins: Plugins) -> PluginRecord:
    """The one broken entry point; everything else works."""
    [record] = plugins.broken()
    plugins.require_gates()
    assert set(plugins.registry.gates) >= ALL_GATES
    assert plugins.registry.steps and plugins.registry.checkers
    return record


def test_a_foreign_plugin_works(install: Install) -> None:
    """A gate of another package is found by its entry point and known by name, distribution and version."""
    install("drums-gate-extra", GATE.format(name="extra"), ("drums.gates", "extra"), version="2.0rc1")
    plugins = build_manager()
    assert plugins.broken() == []
    factory, owner = plugins.registry.gates["extra"]
    assert factory() == "extra"  # type: ignore[comparison-overlap]
    assert (owner.name, owner.distribution, owner.version) == ("extra", "drums-gate-extra", "2.0rc1")


BROKEN = {
    "import error": ("import no_such_module_of_anybody", "ModuleNotFoundError: No module named 'no_such_module"),
    "syntax error": ("def (", "SyntaxError: "),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "raises": ("raise RuntimeError('at import')", "RuntimeError: at import"),
    "wrong signature": (
        GATE.format(name="planted").replace("(register)", "(register, surprise)", 1),
        "PluginValidationError: ",
    ),
    "unknown hook": (
        GATE.format(name="planted").replace("drums_register_gates", "drums_register_gatez"),
        "no such hook in this version of drums: drums_register_gatez",
    ),
    "misspelt and unmarked": ("def drums_register_gate(register): ...", "registers its own name alone, this one []"),
    "another name": (GATE.format(name="other"), "registers its own name alone, this one ['other']"),
    "one more": (
        GATE.format(name="planted") + "    register('more', object)\n",
        "registers its own name alone, this one ['more', 'planted']",
    ),
    "registered twice": (
        GATE.format(name="planted") + "    register('planted', object)\n",
        "PluginError: drums_register_gates registered 'planted' twice",
    ),
    "hook raises": (GATE.format(name="planted") + "    1 / 0\n", "ZeroDivisionError: division by zero"),
    "hook exits": (GATE.format(name="planted") + "    raise SystemExit('bye')\n", "SystemExit: bye"),
}


@pytest.mark.parametrize(("code", "error"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_listed(install: Install, code: str, error: str) -> None:
    """Listed with name, group, distribution, version, one line of error and the traceback; nothing of it is in use."""
    install("drums-gate-planted", code, ("drums.gates", "planted"))
    plugins = build_manager()
    record = broken(plugins)
    assert (record.name, record.group, record.distribution, record.version) == (
        "planted",
        "drums.gates",
        "drums-gate-planted",
        "1.5",
    )
    assert error in record.error and not record.ok
    assert "Traceback (most recent call last)" in record.trace
    assert set(plugins.registry.gates) == ALL_GATES
    assert not plugins.manager.has_plugin("drums.gates:planted")


def test_an_entry_point_to_nothing(install: Install, tmp_path: Path) -> None:
    """One whose value is no reference at all, and one whose attribute is missing."""
    install("drums-odd", "", ("drums", "odd"))
    [file] = tmp_path.rglob("entry_points.txt")
    for value, error in (("not a reference!", "Error"), ("drums_odd:absent", "AttributeError")):
        file.write_text(f"[drums]\nodd = {value}\n")
        assert error in broken(build_manager()).error


def test_two_packages_with_one_name(install: Install) -> None:
    """Neither is loaded, and each entry names both packages; their modules are not even imported."""
    for dist in ("drums-gate-a", "drums-gate-b"):
        install(dist, "raise AssertionError('imported')", ("drums.gates", "twin"))
    plugins = build_manager()
    assert {r.distribution for r in plugins.broken()} == {"drums-gate-a", "drums-gate-b"}
    for record in plugins.broken():
        assert "'twin'" in record.error and "neither is loaded" in record.error
        assert "drums-gate-a" in record.error and "drums-gate-b" in record.error
    assert set(plugins.registry.gates) == ALL_GATES


def test_two_plugins_that_register_one_name(install: Install) -> None:
    """The same where the names of the entry points differ: not the order of loading decides, neither is loaded."""
    for dist, entry in (("drums-a", "first"), ("drums-b", "second")):
        install(dist, GATE.format(name="twin"), ("drums", entry))
    plugins = build_manager()
    assert {r.name for r in plugins.broken()} == {"first", "second"}
    for record in plugins.broken():
        assert "gates name 'twin' is claimed by drums-a (drums:first) and drums-b (drums:second)" in record.error
        assert not plugins.manager.has_plugin(f"drums:{record.name}")
    assert set(plugins.registry.gates) == ALL_GATES


@pytest.mark.parametrize("group", ["drums.gates", "drums"])
def test_a_clash_with_a_required_gate_stops_the_host(install: Install, group: str) -> None:
    """Who installs a second `cgroup` gets neither, and a host that needs one refuses to start, naming both packages."""
    install("drums-gate-false", GATE.format(name="cgroup"), (group, "cgroup"))
    plugins = build_manager()
    assert "cgroup" not in plugins.registry.gates
    with pytest.raises(PluginError) as caught:
        plugins.require_gates()
    assert caught.value.missing == ["cgroup"]
    assert "'cgroup'" in str(caught.value) and "drums-gate-false" in str(caught.value)
    assert "drums (drums.gates:cgroup)" in str(caught.value)


def test_a_required_gate_that_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the gate and why it did not load; configured ones count as well."""
    monkeypatch.setitem(sys.modules, "drums_gates.netns", None)
    plugins = build_manager()
    with pytest.raises(PluginError) as caught:
        plugins.require_gates(["of_the_operator"])
    assert caught.value.missing == ["netns", "of_the_operator"]
    assert "'netns': ModuleNotFoundError" in caught.value.message
    assert "'of_the_operator': no installed package registers it" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("metadata", [True, False])
def test_a_distribution_without_metadata(install: Install, metadata: bool) -> None:
    """A damaged installation has no name and no version, and its plugin is listed all the same."""
    install("drums-gate-a", "1 / 0", ("drums.gates", "nameless"), metadata=metadata)
    record = broken(build_manager())
    assert (record.distribution, record.version) == (("drums-gate-a", "1.5") if metadata else ("?", ""))
    install("drums-gate-b", "1 / 0", ("drums.gates", "nameless"))
    assert len(build_manager().broken()) == 2


def test_embedded_plugins() -> None:
    """An embedding program hands modules, objects or classes over; a broken one is listed like any other."""

    class Plugin:
        @hookimpl
        def drums_register_gates(self, register: Callable[[str, object], None]) -> None:
            register("embedded", object)

    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("in its constructor")

    module = types.ModuleType("planted")
    exec("from drums_core.hookspecs import hookimpl\n@hookimpl\ndef drums_episode_started(slot): ...", module.__dict__)  # noqa: S102 - a module from text
    plugins = build_manager([("one", Plugin), ("two", Broken), ("three", module)], ambient=False)
    assert list(plugins.registry.gates) == ["embedded"]
    assert [(r.name, r.distribution, r.ok) for r in plugins.records] == [
        ("one", "embedded", True),
        ("two", "embedded", False),
        ("three", "embedded", True),
    ]
    assert "in its constructor" in plugins.records[1].trace
    assert [r.error for r in build_manager([("one", Plugin), ("one", Plugin)], ambient=False).records if r.ok] == []


def test_managers_share_nothing() -> None:
    """`build_manager` is a function: what one was given, another does not see."""
    module = types.ModuleType("planted")
    first = build_manager([("planted", module)], ambient=False)
    second = build_manager(ambient=False)
    assert first.manager is not second.manager and second.records == [] and second.registry.gates == {}
