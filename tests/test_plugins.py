"""Broken plugins: each is listed by name, distribution, version and traceback, and costs no other."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog.testing
import trio
from click.testing import CliRunner
from client_fake import TOKEN, as_json, fake_daemon
from requires import requires

from drums.errors import PluginError
from drums_core import opening, plugin_trial
from drums_core.commands.plugins import plugins as plugins_command
from drums_core.config import HostConfig
from drums_core.hookspecs import hookimpl
from drums_core.model import PluginRecord
from drums_core.opening import open_host
from drums_core.plugins import Plugins, build_manager
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES
from drums_verifiers import installed
from drums_verifiers.verifier import VerifierChecker

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
def test_a_clash_with_a_built_in(install: Install, group: str) -> None:
    """Who installs a second `cgroup` is refused, with both packages named, and takes nothing away from anybody."""
    install("drums-gate-false", GATE.format(name="cgroup"), (group, "cgroup"))
    plugins = build_manager()
    record = broken(plugins)
    assert record.distribution == "drums-gate-false" and "drums keeps its own" in record.error
    assert "drums (drums.gates:cgroup)" in record.error and f"drums-gate-false ({group}:cgroup)" in record.error
    factory, owner = plugins.registry.gates["cgroup"]
    assert owner.distribution == "drums" and type(factory()).__module__ == "drums_gates.cgroup"


DISRUPTIVE = {
    "hangs in its hook": (GATE.format(name="planted") + "    while True: pass\n", "it was not loaded within 4 s"),
    "floods": ("print('x' * (3 << 20))", "it printed more than 1 MiB while it was loaded"),
    "floods the descriptor": ("import os\nwhile True: os.write(2, b'x' * 65536)", "it printed more than 1 MiB"),
    "ends the process": ("import os\nos._exit(7)", "it ended its process with code 7 while it was loaded"),
    "dies": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by SIGSEGV"),
}


@pytest.mark.parametrize(("code", "error"), DISRUPTIVE.values(), ids=DISRUPTIVE)
def test_what_would_take_the_process_along(
    install: Install, monkeypatch: pytest.MonkeyPatch, code: str, error: str
) -> None:
    """Found out in a process of its own; it is listed like any other, and this process goes on with the rest."""
    monkeypatch.setattr(plugin_trial, "LIMIT_S", 4.0)
    install("drums-gate-planted", code, ("drums.gates", "planted"))
    record = broken(build_manager())
    assert error in record.error and record.distribution == "drums-gate-planted"


def test_one_that_hangs_costs_no_other_stranger(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the same look are loaded."""
    monkeypatch.setattr(plugin_trial, "LIMIT_S", 8.0)
    install("drums-gate-hangs", "import time\ntime.sleep(3600)", ("drums.gates", "hangs"))
    install("drums-gate-works", GATE.format(name="works"), ("drums.gates", "works"))
    plugins = build_manager()
    assert broken(plugins).name == "hangs" and "works" in plugins.registry.gates


def test_what_it_leaves_behind_holds_nobody_up(install: Install, tmp_path: Path) -> None:
    """A process in a session of its own that keeps every pipe open: what was loaded is loaded."""
    pids = tmp_path / "pids"
    code = f"""
import os
pid = os.posix_spawn("/bin/sleep", ["sleep", "3600"], os.environ, setsid=True)
with open({str(pids)!r}, "a") as file:
    file.write(f"{{pid}} ")
"""
    install("drums-gate-leaves", code + GATE.format(name="leaves"), ("drums.gates", "leaves"))
    try:
        assert "leaves" in build_manager().registry.gates
    finally:
        left = [int(x) for x in pids.read_text().split()]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(left[-1], 0)  # the one of this process
    assert len(left) == 2  # of the trial, and of the loading here


def test_what_it_prints_is_no_output_of_ours(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    """Less than a flood is let through, and goes to the log: `drums plugins --json` prints JSON alone."""
    install("drums-gate-chatty", "print('hello')\n" + GATE.format(name="chatty"), ("drums.gates", "chatty"))
    with structlog.testing.capture_logs() as logs:
        assert "chatty" in build_manager().registry.gates
    assert capfd.readouterr().out == ""
    assert [(x["plugin"], x["output"]) for x in logs] == [("chatty", "hello\n")]


@pytest.mark.parametrize(
    ("requires", "error"),
    [
        ("drums>=99", "it needs drums>=99, this is drums "),
        ("drums[host]<0.1", "it needs drums<0.1, this is drums "),
        ("drums>=0.0.1", ""),
        ('drums>=99; python_version < "3"', ""),
        ("something>=99", ""),
    ],
)
def test_one_that_wants_another_drums(install: Install, tmp_path: Path, requires: str, error: str) -> None:
    """It is not even imported."""
    code = "raise AssertionError('imported')" if error else GATE.format(name="planted")
    install("drums-gate-planted", code, ("drums.gates", "planted"))
    [metadata] = tmp_path.rglob("METADATA")
    metadata.write_text(metadata.read_text() + f"Requires-Dist: {requires}\n")
    plugins = build_manager()
    if error:
        assert error in broken(plugins).error and not broken(plugins).trace
    else:
        assert "planted" in plugins.registry.gates


def test_the_hash_is_that_of_the_files(install: Install, tmp_path: Path) -> None:
    """Another content is another hash; compiled copies are none of it."""
    install("drums-gate-extra", GATE.format(name="extra"), ("drums.gates", "extra"))

    def sha256() -> str:
        return next(r.sha256 for r in build_manager().records if r.name == "extra")

    first = sha256()
    assert len(first) == 64 and first == sha256()
    [module] = tmp_path.rglob("drums_gate_extra.py")
    module.write_text(module.read_text() + "# changed\n")
    assert sha256() != first
    assert all(len(r.sha256) == 64 for r in build_manager().records)


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


def test_the_command_lists_them(install: Install) -> None:
    """With packages, hashes and faults; a broken one is exit code 1."""
    install("drums-gate-broken", "1 / 0", ("drums.gates", "broken"), ("drums_verifier", "broken_too"))
    result = CliRunner().invoke(plugins_command, ["--json"])
    listed = {(r["group"], r["name"]): r for r in json.loads(result.stdout)["plugins"]}
    assert result.exit_code == 1 and not listed["drums.gates", "broken"]["ok"]
    assert "ZeroDivisionError" in listed["drums_verifier", "broken_too"]["error"]
    assert listed["drums.gates", "cgroup"]["ok"] and len(listed["drums.gates", "cgroup"]["sha256"]) == 64
    lines = [x.split("\t") for x in CliRunner().invoke(plugins_command).stdout.splitlines()]
    assert lines[0] == ["group", "name", "package", "sha256", "state"]
    assert ["drums.gates", "broken", "drums-gate-broken 1.5"] in [x[:3] for x in lines]


@requires("root", "criu")
def test_the_host_opens_and_logs_what_is_broken(install: Install) -> None:
    """By name, package and reason, each once; verifiers beside its work, as each is loaded for that."""
    install("drums-gate-broken", "1 / 0", ("drums.gates", "broken"))
    install("drums-verifier-slow", "import time\ntime.sleep(2)\n1 / 0", ("drums_verifier", "slow"))
    install("drums-verifier-fine", "def score(desktop): return 1.0", ("drums_verifier", "fine"))

    def told() -> list[tuple[str, str]]:
        return [(x["plugin"], x["distribution"]) for x in logs if x["event"] == "plugin not in use"]

    async def opened() -> None:
        async with open_host():
            assert told() == [("broken", "drums-gate-broken")]
            with trio.fail_after(30):
                while len(told()) < 2:  # noqa: ASYNC110 - what logs is no task of the test's
                    await trio.sleep(0.05)

    with structlog.testing.capture_logs() as logs:
        trio.run(opened)
    assert told() == [("broken", "drums-gate-broken"), ("slow", "drums-verifier-slow")]
    for line in (x for x in logs if x["event"] == "plugin not in use"):
        assert "ZeroDivisionError" in line["error"] and line["log_level"] == "error"


async def test_a_checker_that_cannot_say_what_it_has_costs_the_host_nothing() -> None:
    """It is named in the log, with what it raised."""

    class Broken:
        def installed(self, *, anew: bool = False) -> list[PluginRecord]:
            raise RuntimeError("no packages today")

    with structlog.testing.capture_logs() as logs:
        await opening._tell_packages("lab", Broken())
    assert [(x["checker"], x["log_level"]) for x in logs] == [("lab", "error")]


def test_looks_at_verifiers_wait_for_each_other(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins anew does not take away what another has found meanwhile."""
    install("drums-verifier-lab", "def score(desktop): return 1.0", ("drums_verifier", "lab"))
    checker, begun, other = VerifierChecker(HostConfig()), threading.Event(), threading.Event()
    overtaken: list[bool] = []

    def load(entries: list[object], **_: object) -> list[str]:
        if not begun.is_set():
            begun.set()
            overtaken.append(other.wait(0.5))
        return [""] * len(entries)

    def anew() -> None:
        begun.wait(10)
        checker.installed(anew=True)
        other.set()

    monkeypatch.setattr(installed, "try_loading", load)
    thread = threading.Thread(target=anew)
    thread.start()
    try:
        records = checker.installed()
        assert overtaken == [False] and "lab" in [x.name for x in records if x.ok]
    finally:
        thread.join()


def test_reloading_asks_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lists what it then has, with the remarks."""
    record = {"group": "drums_verifier", "name": "lab", "distribution": "x", "version": "1", "sha256": "ab" * 32}
    reply = {"plugins": [{**record, "error": "", "trace": "", "note": "its files differ", "ok": True}]}
    with fake_daemon() as fake:
        monkeypatch.setenv("DRUMS_URL", fake.url)
        monkeypatch.setenv("DRUMS_TOKEN", TOKEN)
        fake.script("POST /v1/plugins/reload", as_json(reply))
        result = CliRunner().invoke(plugins_command, ["reload"])
        assert result.exit_code == 0 and len(fake.of("POST /v1/plugins/reload")) == 1
        assert result.stdout.splitlines()[1].split("\t")[3:] == ["ab" * 6, "its files differ"]
        assert json.loads(CliRunner().invoke(plugins_command, ["reload", "--json"]).stdout) == reply


def test_managers_share_nothing() -> None:
    """`build_manager` is a function: what one was given, another does not see."""
    module = types.ModuleType("planted")
    first = build_manager([("planted", module)], ambient=False)
    second = build_manager(ambient=False)
    assert first.manager is not second.manager and second.records == [] and second.registry.gates == {}
