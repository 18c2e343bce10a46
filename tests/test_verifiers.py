"""Operators' verifiers: found anew at each look, refused by name, and run in a worker. The workers as root."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from requires import requires
from test_osworld_checker import Guest, says

from drums.errors import CheckerError, ConfigError, DesktopError, SetupFailed, VerifierNotFound
from drums_core import plugin_trial
from drums_core.abc import CheckContext, Pinned, VerifiedDesktop
from drums_core.config import HostConfig
from drums_core.model import SetupStep, Task
from drums_verifiers import desktop_view, installed
from drums_verifiers.pinning import Copy
from drums_verifiers.verifier import VerifierChecker

needs_root = requires("root")

CHECKS = """
import asyncio, time
from dataclasses import dataclass
from os.path import basename as imported
LOADED = time.time()
assigned = lambda desktop, task: 0.25

@dataclass
class Result:
    score: float
    evidence: object = None
    notes: str = ""

def exists(desktop, task, *, path): return desktop.exists(path)
def text(desktop, task): return "1"
def high(desktop, task): return 1.5
def nan(desktop, task): return float("nan")
def nothing(desktop, task): return None
def raises(desktop, task): raise KeyError("x")
def told(desktop, task, **options):
    return Result(0.5, {"task": task, "options": options, "last": desktop.last_action}, "a note")
def when(desktop, task): return Result(1.0, {"loaded": LOADED, "called": time.time()})
def odd_evidence(desktop, task): return Result(1.0, {1, })
async def later(desktop, task):
    await asyncio.sleep(0)
    return len(desktop.read_file("~/x")) / 10
def swallows(desktop, task):
    try:
        return 1.0 if desktop.read_file("x") else 0.0
    except Exception:
        return 0.0
def absent(desktop, task):
    try:
        desktop.read_file("/none")
    except FileNotFoundError:
        return 0.125
def _private(desktop, task): return 1.0

class Checks:
    def __init__(self): self.ready = 1.0
    def method(self, desktop, task): return self.ready

class Derived(Checks): ...
"""


def install(
    site: Path, name: str, entry_points: Mapping[str, str], files: Mapping[str, str], *, version: str = "1.0"
) -> None:
    """A package as pip would leave it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[drums_verifier]\n{lines}")
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


@contextmanager
def packages_folder(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that workers may read, and in which this process looks for packages until the end of the block."""
    folder = factory.mktemp("packages")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    sys.path.append(str(folder))
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that this process looks into; it is no `site-packages`, as with editable installs."""
    folder = tmp_path / "packages"
    folder.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return folder


@pytest.fixture
def lab(site: Path) -> Path:
    """The package `lab-checks` with two verifiers: a module, and a class."""
    entries = {"lab": "lab_checks.inner.checks", "lab_class": "lab_checks.inner.checks:Checks"}
    files = {"lab_checks/__init__.py": "", "lab_checks/inner/__init__.py": "", "lab_checks/inner/checks.py": CHECKS}
    install(site, "lab-checks", entries, files)
    return site


def task(verifier: str = "lab", function: str = "exists", **fields: Any) -> Task:
    evaluator = {"func": "drums_verifier", "verifier": verifier, "function": function, **fields}
    return Task("0" * 36, "do", (), evaluator, "os", "0" * 64)


def checker() -> VerifierChecker:
    return VerifierChecker(HostConfig(checker_timeout_s=30))


# --- refusing


def test_it_claims_its_own() -> None:
    assert checker().claims({"func": "drums_verifier"})
    assert not checker().claims({"func": "exact_match"}) and not checker().claims({})


@pytest.mark.parametrize(
    ("evaluator", "path"),
    [
        ({"function": "exists"}, "$.evaluator.verifier"),
        ({"verifier": "lab"}, "$.evaluator.function"),
        ({"verifier": 1, "function": "exists"}, "$.evaluator.verifier"),
        ({"verifier": "lab", "function": "exists", "options": []}, "$.evaluator.options"),
        ({"verifier": "lab", "function": "exists", "result": {}}, "$.evaluator.result"),
        ({"verifier": "lab", "function": "exists", "postconfig": {}}, "$.evaluator.postconfig"),
        ({"verifier": "lab", "function": "exists", "postconfig": [{"kind": "x"}]}, "$.evaluator.postconfig[0]"),
    ],
)
def test_wrong_fields_are_refused_by_path(lab: Path, evaluator: dict[str, Any], path: str) -> None:
    document = Task("0" * 36, "do", (), {"func": "drums_verifier", **evaluator}, "os", "0" * 64)
    with pytest.raises(ConfigError) as info:
        checker().validate(document)
    assert info.value.path == path


@pytest.mark.parametrize(
    ("verifier", "function"),
    [("lab", x) for x in ("exists", "later", "imported", "assigned")] + [("lab_class", "method")],
)
def test_what_is_there_is_taken(lab: Path, verifier: str, function: str) -> None:
    checker().validate(task(verifier, function))
    assert "lab_checks" not in sys.modules  # never imported by the host


@pytest.mark.parametrize(
    ("verifier", "function", "message", "nearest"),
    [
        ("labb", "exists", "no installed package has the verifier 'labb'", "lab"),
        ("lab", "exist", "of lab-checks 1.0 has no function 'exist'", "exists"),
        ("lab", "method", "has no function 'method'", None),
        ("lab", "_private", "is no name of a verifier's function", None),
        ("lab", "Checks.method", "is no name of a verifier's function", None),
        ("lab_class", "mehtod", "has no function 'mehtod'", "method"),
    ],
)
def test_what_is_not_there_is_refused_with_the_nearest(
    lab: Path, verifier: str, function: str, message: str, nearest: str | None
) -> None:
    with pytest.raises(VerifierNotFound, match=message) as info:
        checker().validate(task(verifier, function))
    if nearest:
        assert nearest in info.value.candidates and nearest in info.value.hint


def test_broken_packages_are_refused(site: Path) -> None:
    """A module or class that is not there, one that is no Python, a name that two packages claim."""
    entries = {
        "gone": "no_such_module_at_all",
        "inner": "broken.no_such_part",
        "part": "broken.checks:NoSuchClass",
        "syntax": "broken.syntax",
    }
    install(site, "broken", entries, {"broken/__init__.py": "", "broken/checks.py": "", "broken/syntax.py": "def ("})
    for name in entries:
        with pytest.raises(VerifierNotFound, match=f"'{name}' of broken 1.0 cannot be used"):
            checker().validate(task(name))
    install(site, "one", {"twice": "broken.checks"}, {})
    install(site, "two", {"twice": "broken.checks"}, {})
    with pytest.raises(VerifierNotFound, match="claimed by one and two"):
        checker().validate(task("twice"))


def test_packages_come_and_go_without_a_restart(site: Path) -> None:
    with pytest.raises(VerifierNotFound):
        checker().validate(task("fresh", "f"))
    install(site, "fresh", {"fresh": "fresh_module"}, {"fresh_module.py": "def f(desktop, task): return 1"})
    checker().validate(task("fresh", "f"))
    with pytest.raises(VerifierNotFound):
        checker().validate(task("fresh", "g"))
    (site / "fresh_module.py").write_text("def g(desktop, task): return 1")
    checker().validate(task("fresh", "g"))


@pytest.mark.parametrize(
    ("source", "attribute"),
    [
        ("from os import *", ""),
        ("def __getattr__(name): ...", ""),
        ("try:\n    import x\nexcept ImportError:\n    def f(): ...", ""),
        ("if True:\n    f = 1", ""),
        ("class A(object, metaclass=type): ...", ":A"),
        ("from os import path as A", ":A"),
    ],
)
def test_what_cannot_be_told_is_left_to_the_worker(site: Path, source: str, attribute: str) -> None:
    install(site, "open-ended", {"open": f"open_ended{attribute}"}, {"open_ended.py": source})
    installed.require_function(installed.find("open"), "f")


def test_provenance_names_the_package(lab: Path) -> None:
    found = checker().provenance(task())
    assert (found["distribution"], found["version"], found["module"]) == (
        "lab-checks",
        "1.0",
        "lab_checks.inner.checks",
    )
    assert len(found["sha256"]) == 64
    assert "missing" in checker().provenance(task("gone"))


# --- listing

LOADING: dict[str, tuple[str, str]] = {
    "good": ("def f(desktop, task): return 1", ""),
    "imports": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "dies": ("import os; os._exit(4)", "it ended its process with code 4"),
    "hangs": ("import time; time.sleep(3600)", "it was not loaded within 8 s"),
    "floods": ("print('x' * (2 << 20))", "it printed more than 1 MiB"),
    "no_python": ("def (", "cannot be used: invalid syntax"),
}


def test_what_cannot_be_loaded_is_listed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verifier with its package, hash and fault; none of them costs the others, or this process, anything."""
    monkeypatch.setattr(plugin_trial, "LIMIT_S", 8.0)
    for name, (code, _) in LOADING.items():
        install(site, f"pack-{name}", {name: f"pack_{name}"}, {f"pack_{name}.py": code})
    install(site, "other", {"good2": "pack_good:Absent", "gone": "no_such_module_of_ours"}, {})
    for name in ("one", "two"):
        install(site, name, {"twice": "pack_good"}, {})
    asked = checker()
    found = {(r.name, r.distribution): r for r in asked.installed()}
    for name, (_, error) in LOADING.items():
        record = found[name, f"pack-{name}"]
        assert (error in record.error and record.ok is not bool(error)) and record.version == "1.0"
        assert len(record.sha256) == 64 and record.group == "drums_verifier"
    assert "there is no class 'Absent'" in found["good2", "other"].error
    assert "no module 'no_such_module_of_ours'" in found["gone", "other"].error
    assert all("claimed by one and two" in found["twice", x].error for x in ("one", "two"))
    assert not any(name.startswith("pack_") for name in sys.modules)


def test_one_is_loaded_once_per_state_of_its_files(site: Path) -> None:
    """A second look loads what has changed; asked anew, everything."""
    counter = site.parent / "loaded"
    code = f"open({str(counter)!r}, 'a').write('x')\n"
    install(site, "counts", {"counts": "counts"}, {"counts.py": code})
    asked = checker()

    def loaded(**how: Any) -> int:
        assert [r.error for r in asked.installed(**how) if r.name == "counts"] == [""]
        return len(counter.read_text())

    assert [loaded(), loaded(), loaded(anew=True)] == [1, 1, 2]
    (site / "counts.py").write_text(code + "# more\n")
    assert loaded() == 3


def test_one_that_wants_another_drums_is_refused(site: Path) -> None:
    """At create, and in the list."""
    install(site, "future", {"future": "future"}, {"future.py": "def f(desktop, task): return 1"})
    [metadata] = site.glob("future-*/METADATA")
    metadata.write_text(metadata.read_text() + "Requires-Dist: drums>=99\n")
    with pytest.raises(VerifierNotFound, match=r"it needs drums>=99, this is drums 0\."):
        checker().validate(task("future", "f"))
    assert "it needs drums>=99" in next(r.error for r in checker().installed() if r.name == "future")


def test_what_was_installed_editable_since_is_found(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is in a path file that Python reads at its start only; code in one is not run."""
    source = site.parent / "source"
    (source / "fresh_editable").mkdir(parents=True)
    (source / "fresh_editable/__init__.py").write_text("def f(desktop, task): return 1")
    install(site, "fresh-editable", {"editable": "fresh_editable"}, {})
    (site / "fresh.pth").write_text(f"import sys; sys.exit(3)\n{source}\n/no/such/folder\n")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(site)])
    checker().validate(task("editable", "f"))
    assert str(source) in sys.path and "/no/such/folder" not in sys.path


# --- keeping what an episode began with


def test_a_copy_of_each_state_of_a_package(lab: Path, tmp_path: Path) -> None:
    """One for all episodes that begin with it; readable by the worker; its hash is that of what was copied."""
    asked, kept = checker(), tmp_path / "kept"
    first, again = asked.pin(task(), kept), asked.pin(task("lab_class", "method"), kept)
    assert isinstance(first.handle, Copy) and isinstance(again.handle, Copy)
    assert first.handle.place == again.handle.place and first.facts["sha256"] == checker().provenance(task())["sha256"]
    (lab / "lab_checks/inner/checks.py").write_text(CHECKS + "\n# changed\n")
    second = asked.pin(task(), kept)
    assert second.facts["sha256"] != first.facts["sha256"]
    assert {x.name for x in kept.iterdir()} == {first.facts["sha256"], second.facts["sha256"]}
    assert (first.handle.place / "inner/checks.py").read_text() == CHECKS
    for path in kept.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)
    (lab / "lab_checks/inner/checks.py").write_text(CHECKS)  # as before: its time is another one, its content is not
    assert asked.pin(task(), kept).facts["sha256"] == first.facts["sha256"]
    with pytest.raises(VerifierNotFound):
        asked.pin(task("gone"), kept)


# --- running


@attrs.define
class Bench:
    """A checker with the context that a core would give it."""

    scratch: Path
    guest: Guest = attrs.field(factory=lambda: Guest(says("")))
    steps: list[SetupStep] = attrs.field(factory=list)
    fault: Exception | None = None
    findings: dict[str, Any] = attrs.field(factory=dict)

    async def _run(self, steps: Sequence[SetupStep]) -> None:
        self.steps += steps
        if self.fault:
            raise self.fault

    async def score(
        self, what: Task, last_action: str | None = None, pinned: Pinned | None = None, **options: Any
    ) -> float:
        guest = self.guest
        context = CheckContext(
            what,
            last_action,
            guest.serve,
            guest.failures,
            self._run,
            self.scratch,
            pinned=pinned,
            findings=self.findings,
            **options,
        )
        return await checker().check(context)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def code(returncode: int) -> Callable[[Any], tuple[int, Any]]:
    return lambda _: (200, {"status": "success", "output": "", "error": "", "returncode": returncode})


@needs_root
async def test_it_is_loaded_before_there_is_a_desktop_to_ask_and_called_then(lab: Path, bench: Bench) -> None:
    there = []

    async def wait_there() -> None:
        await trio.sleep(1.5)
        there.append(time.time())

    assert await bench.score(task(function="when"), wait_there=wait_there) == 1.0
    times = bench.findings["evidence"]
    assert times["loaded"] < there[0] <= times["called"]


@needs_root
async def test_scores(lab: Path, bench: Bench) -> None:
    """A bool, a float of an async function, of a method, and of a lambda; the desktop is asked as the function does."""
    bench.guest = Guest(code(0), {"~/x": b"12345"})
    assert await bench.score(task(options={"path": "~/Desktop/b"})) == 1.0
    assert '["/usr/bin/test", "-e", "Desktop/b"]' in bench.guest.requests[-1][1]
    bench.guest.answer = code(1)
    assert await bench.score(task(options={"path": "/b"})) == 0.0
    assert await bench.score(task("lab_class", "method")) == 1.0
    assert await bench.score(task(function="assigned")) == 0.25
    assert await bench.score(task(function="absent")) == 0.125
    assert await bench.score(task(function="later")) == 0.5


@needs_root
async def test_evidence_and_notes_are_kept(lab: Path, bench: Bench) -> None:
    assert await bench.score(task(function="told", options={"a": [1]}), "DONE") == 0.5
    evidence = bench.findings["evidence"]
    assert (evidence["options"], evidence["last"], evidence["task"]["instruction"]) == ({"a": [1]}, "DONE", "do")
    assert bench.findings["notes"] == "a note"
    assert await bench.score(task(function="odd_evidence")) == 1.0
    assert bench.findings["evidence"] == "{1}"


@needs_root
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("text", "returned '1'"),
        ("high", "returned 1.5"),
        ("nan", "NaN"),
        ("nothing", "returned None"),
        ("raises", "raised KeyError"),
        ("imported", "raised TypeError"),
    ],
)
async def test_what_is_no_score_is_an_error(lab: Path, bench: Bench, function: str, message: str) -> None:
    with pytest.raises(CheckerError, match=message):
        await bench.score(task(function=function))


@needs_root
async def test_a_desktop_that_does_not_answer_is_an_error(lab: Path, bench: Bench) -> None:
    """Also for a function that catches every exception."""
    bench.guest = Guest(lambda _: (500, {"status": "error", "message": "broken"}))
    with pytest.raises(CheckerError, match="could not ask the desktop: POST /execute"):
        await bench.score(task(options={"path": "x"}))
    bench.guest = Guest(lambda _: (0, {}))
    with pytest.raises(CheckerError, match="could not ask the desktop"):
        await bench.score(task(options={"path": "x"}))


@needs_root
async def test_order_of_an_evaluation(lab: Path, bench: Bench) -> None:
    """`postconfig` first, also before a FAIL, which scores 0; a postconfig that fails gives no score."""
    steps = [{"type": "sleep", "parameters": {"seconds": 0}}]
    what = task("lab_class", "method", postconfig=steps)
    assert await bench.score(what, "FAIL") == 0.0
    assert await bench.score(what, "DONE") == 1.0
    assert bench.steps == [SetupStep("sleep", {"seconds": 0})] * 2
    fault: DesktopError = SetupFailed("no")
    bench.fault = fault
    with pytest.raises(CheckerError, match="postconfig failed"):
        await bench.score(what, "DONE")


@needs_root
async def test_what_was_kept_is_what_scores(lab: Path, bench: Bench, tmp_path: Path) -> None:
    """Also from within an installed package that has changed since, and once it is gone."""
    pinned = checker().pin(task("lab_class", "method"), tmp_path / "kept")
    shutil.rmtree(lab / "lab_checks")
    assert await bench.score(task("lab_class", "method"), pinned=pinned) == 1.0
    with pytest.raises(CheckerError, match="is gone"):
        await bench.score(task("lab_class", "method"))


@needs_root
async def test_a_verifier_that_is_gone_is_an_error(bench: Bench) -> None:
    with pytest.raises(CheckerError, match="is gone"):
        await bench.score(task("no_such"))


def test_the_view_is_what_the_interface_says() -> None:
    view: VerifiedDesktop = desktop_view.Desktop(None)
    assert view.last_action is None
