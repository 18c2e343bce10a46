"""The examples run, and the documents say what is there."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from requires import requires
from served import Served, served

import drums
from drums.errors import CheckerError, DrumsError, InsecureTransport, InvalidEpisode
from drums_core.daemon import problems
from drums_core.daemon.operations import Operation
from drums_core.daemon.routes import OPERATIONS
from drums_core.journal_file import JournalError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
HTTP = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
OPENAPI = ("GET", "/openapi.json")  # it is made of the table, and so not in it
ON_THE_CLIENT = {DrumsError.code, InsecureTransport.code, InvalidEpisode.code, CheckerError.code, "daemon_unreachable"}
"""Codes that no answer has: the client raises these itself, or nobody does."""


def sections() -> dict[tuple[str, str], str]:
    """The reference's section of each route."""
    parts = re.split(r"^### `([A-Z]+) (/\S*)`$", re.sub(r"^## .*", "### ", HTTP, flags=re.M), flags=re.M)
    found = list(zip(parts[1::3], parts[2::3], parts[3::3], strict=True))
    assert len({(m, p) for m, p, _ in found}) == len(found), "a route is there twice"
    return {(method, path): text for method, path, text in found}


def test_every_route_is_documented() -> None:
    """Those of the running application's table, and no others."""
    assert set(sections()) == {(o.method, o.path) for o in OPERATIONS} | {OPENAPI}


def names_of(kind: object) -> set[str]:
    """The fields of a class of the wire."""
    return {f.name for f in attrs.fields(kind)} if isinstance(kind, type) and attrs.has(kind) else set()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
def test_every_field_of_a_request_is_documented(operation: Operation) -> None:
    """In its route's section, which also says what it answers."""
    text = sections()[operation.method, operation.path]
    for name in names_of(operation.body) | names_of(operation.query):
        assert f"`{name}`" in text or f'"{name}"' in text, f"{name} of {operation.name}"
    assert f"**{operation.status}**" in text
    assert ("Streams." in text) is operation.long
    if isinstance(operation.answer, str):
        assert operation.answer in text


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
def test_every_field_of_an_answer_is_documented(operation: Operation) -> None:
    """Somewhere: answers share their documents."""
    for name in names_of(operation.answer):
        assert re.search(rf'[`"]{name}["`]', HTTP), f"{name} of {operation.name}"


def classes(base: type[DrumsError]) -> Iterator[type[DrumsError]]:
    """A class and all that derive from it."""
    yield base
    for derived in base.__subclasses__():
        yield from classes(derived)


def test_every_error_is_documented() -> None:
    """Each code with its status, and no others."""
    of_drums = {"drums.errors", problems.__name__, JournalError.__module__}
    expected = {x.code: x.status for x in classes(DrumsError) if x.__module__ in of_drums}
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \|", HTTP, re.M)
    assert len(rows) == len({code for code, _ in rows})
    assert {code: int(status) for code, status in rows} == {
        code: status for code, status in expected.items() if code not in ON_THE_CLIENT
    }


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *EXAMPLES.rglob("*.md")], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    """The relative ones: a file that is there, and a heading that it has."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/install.md", "docs/plugins.md"])
def test_snippets_are_python(page: str) -> None:
    """They compile, and name nothing that `drums` does not have."""
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S):
        compile(block, page, "exec")
        for name in re.findall(r"\bdrums\.(\w+)", block):
            assert hasattr(drums, name), name


class StandIn:
    """A desktop whose episode ends as it is told."""

    def __init__(self, end: Exception | drums.Reward) -> None:
        self.end = end

    def wait_valid(self) -> None:
        """Valid so far."""

    def screenshot(self) -> bytes:
        """Nothing to see."""
        return b""

    def step(self, _action: str) -> None:
        """Done."""

    def verify(self) -> drums.Reward:
        """The end."""
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


def test_training_masks_what_is_no_evidence() -> None:
    """An invalid episode, a checker that failed and a desktop that broke are masked: not zeros, nor in the mean."""
    loop = runpy.run_path(str(EXAMPLES / "training_loop.py"))
    ends: list[Exception | drums.Reward] = [
        drums.Reward(1.0, True, (), drums.Verdict.VALID, ()),
        drums.Reward(0.0, True, (), drums.Verdict.VALID, ()),
        drums.InvalidEpisode("state_hash failed"),
        drums.CheckerError("no score"),
        drums.GuestError("no answer"),
    ]
    samples: list[Any] = [loop["rollout"](StandIn(end), "", lambda _i, _s: "WAIT", 1) for end in ends]
    batch = loop["batch_of"](samples)
    assert batch.mask == (True, True, False, False, False)
    assert loop["advantages"](batch)[:2] == [0.5, -0.5] and all(map(math.isnan, loop["advantages"](batch)[2:]))
    assert loop["loss_of"](batch, [-1.0, -3.0, -5.0, -7.0, -9.0]) == 0.5 * 1.0 - 0.5 * 3.0
    assert loop["loss_of"](loop["batch_of"](samples[2:]), [-1.0] * 3) == 0.0
    assert "state_hash" in str(samples[2].outcome)


@pytest.mark.parametrize("name", ["own_gate", "own_verifier"])
def test_own_plugins(name: str) -> None:
    """The example points to a package, whose own tests pass."""
    (target,) = re.findall(r"\]\((\S*plugins/drums-\S*?)/README\.md\)", (EXAMPLES / name / "README.md").read_text())
    package = (EXAMPLES / name / target).resolve()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "tests"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With drums' own tasks, whatever the environment names."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("DRUMS_OSWORLD", raising=False)
        with served(tmp_path_factory.mktemp("daemon") / "log") as daemon:
            yield daemon


@requires("root", "criu")
class TestOnDesktops:
    """Against a real daemon."""

    def test_training_loop(self, daemon: Served) -> None:
        """As a program, small; all its episodes are valid, and no desktop is left."""
        policy = f"guess-{uuid.uuid4().hex[:8]}"  # the journal has earlier runs
        argv = [str(EXAMPLES / "training_loop.py"), "--envs", "2", "--steps", "1", "--length", "1", "--policy", policy]
        done = subprocess.run(
            [sys.executable, *argv],
            env=daemon.environ,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *steps, rates, summary = done.stdout.splitlines()
        assert len(steps) == 2 and all(re.match(r"step 0: score [01]\.0, loss", s) for s in steps), done.stdout
        assert rates == f"policy {policy}: valid rate 1.0, 0 checker errors"
        assert summary.startswith("2 of 2 episodes are valid, mean score ")
        with drums.connect(daemon.url, daemon.token) as client:
            assert client.slots() == []

    def test_the_scores_are_the_policys(self, daemon: Served) -> None:
        """One action solves the task, another does not, and after a quarantine the desktop has a new episode."""
        loop = runpy.run_path(str(EXAMPLES / "training_loop.py"))
        with drums.connect(daemon.url, daemon.token) as client, client.create(task="2e208cb7", ttl=600) as env:
            solved = loop["rollout"](env, "", lambda _i, _s: loop["RENAME"], 1)
            assert float(solved.outcome) == 1.0, solved
            env.quarantine("a test")
            masked = loop["rollout"](env, "", lambda _i, _s: "WAIT", 1)
            assert isinstance(masked.outcome, drums.InvalidEpisode)
            assert loop["renewed"](client, env, "2e208cb7") is env
            failed = loop["rollout"](env, "", lambda _i, _s: "WAIT", 1)
            assert float(failed.outcome) == 0.0, failed
