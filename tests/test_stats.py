"""Rates per task and per policy, from a journal as hosts write it."""

from __future__ import annotations

import ast
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from test_journal import Opened, opened, result

from drums.errors import ConfigError
from drums.reward import Reward
from drums_core.daemon import documents, requests
from drums_core.daemon.codec import structure, structure_query
from drums_core.daemon.metrics import Metrics
from drums_core.daemon.routes import OPERATIONS
from drums_core.episode import Episode
from drums_core.host import Host
from drums_core.journal import open_journal, read_episode, read_episodes
from drums_core.journal_file import FILE, VERSION
from drums_core.model import OWN_LABEL, Cause, Status, check_labels
from drums_core.stats import read_stats


def begin(journal: Opened, task: str, labels: Mapping[str, str]) -> Episode:
    required = Opened.episode(journal).required
    episode = Episode("d-1", "create", required, lambda e, v: journal.journal.judged(e, v), task=task, labels=labels)
    journal.journal.episode_started(episode, task_sha256="ab", image=("minimal", "cd"), base="c-1")
    return episode


def scored(episode: Episode, score: float | None, **more: Any) -> Reward:
    validity = episode.validity
    return Reward(score, validity.valid, validity.invalid_reasons, validity.verdict, validity.bad_gates, **more)


async def written(state: Path) -> None:
    """Policy `good`: 2 valid of 2. Policy `crasher`: 1 valid, 2 crashed by the agent, one of them twice."""
    async with opened(state) as journal:
        for score in (1.0, 0.5):
            episode = begin(journal, "task-a", {"policy": "good", "seed": "1"})
            episode.add([result()])
            await journal.journal.record_reward(episode, scored(episode, 0.0))  # asked twice: the last one counts
            await journal.journal.record_reward(episode, scored(episode, score))
        for crashes in (0, 1, 2):
            episode = begin(journal, "task-b", {"policy": "crasher"})
            episode.add([result()])
            for _ in range(crashes):
                episode.add([result(Status.FAIL, "no_app_crash", cause=Cause.AGENT, reason="died")])
            reward = scored(episode, 1.0) if crashes else scored(episode, None, checker_error="it raised")
            await journal.journal.record_reward(episode, reward)
        begin(journal, "task-b", {})
        await journal.journal.flush()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    trio.run(written, tmp_path)
    return tmp_path


def test_by_label(state: Path) -> None:
    """What a policy buys shows: its invalid episodes, by gate and by cause; an invalid score is in no mean."""
    rows = {row["label"]: row for row in read_stats(state, by="label")}
    assert set(rows) == {"good", "crasher", None}
    good, crasher, nobody = rows["good"], rows["crasher"], rows[None]
    assert (good["episodes"], good["valid"], good["invalid"], good["valid_rate"]) == (2, 2, 0, 1.0)
    assert (good["rewards"], good["scored"], good["mean_score"], good["failures"]) == (2, 2, 0.75, [])
    assert (crasher["episodes"], crasher["valid"], crasher["invalid"]) == (3, 1, 2)
    assert crasher["failures"] == [{"gate": "no_app_crash", "cause": "agent", "episodes": 2}]
    assert crasher["valid_rate"] == pytest.approx(1 / 3) and crasher["mean_score"] is None
    assert crasher["checker_error_causes"] == {"unknown": 1} and good["checker_error_causes"] == {}
    assert crasher["checker_errors"] == 1 and crasher["checker_error_rate"] == pytest.approx(1 / 3)
    # Those that the journal's other helper begins have neither a verdict nor a label.
    assert nobody["pending"] == nobody["episodes"] and nobody["valid_rate"] is None


def test_by_task_and_by_both(state: Path) -> None:
    """A row per task, and one per pair."""
    assert [row["task"] for row in read_stats(state, by="task")] == ["task-1", "task-a", "task-b"]
    pairs = {(row["task"], row["label"]): row["episodes"] for row in read_stats(state)}
    assert pairs[("task-a", "good")] == 2 and pairs[("task-b", "crasher")] == 3 and pairs[("task-b", None)] == 1
    assert {row["label"] for row in read_stats(state, by="label", label="seed")} == {"1", None}
    assert read_stats(state, since=4e9) == []


async def test_who_broke_checkers(tmp_path: Path) -> None:
    """A policy that breaks checkers on purpose shows, by cause; the last reward of an episode counts."""
    async with opened(tmp_path) as journal:
        for policy, causes in (("breaker", ["agent", "agent", "task"]), ("honest", ["infrastructure", None])):
            for cause in causes:
                episode = begin(journal, "task-a", {"policy": policy})
                episode.add([result()])
                failed = scored(episode, None, checker_error="it broke", checker_error_cause=cause)
                await journal.journal.record_reward(episode, failed)
        await journal.journal.record_reward(episode, scored(episode, 1.0))  # asked again, it is scored
    rows = {row["label"]: row for row in read_stats(tmp_path, by="label")}
    assert rows["breaker"]["checker_error_causes"] == {"agent": 2, "task": 1}
    assert rows["honest"]["checker_error_causes"] == {"infrastructure": 1}
    for row in rows.values():
        assert sum(row["checker_error_causes"].values()) == row["checker_errors"]


async def test_episodes_of_drums_own(tmp_path: Path) -> None:
    """The self-test's planted faults count for nobody, unless they are asked for."""
    async with opened(tmp_path) as journal:
        for labels in ({"policy": "good"}, {OWN_LABEL: "selftest"}, {OWN_LABEL: "demo"}):
            episode = begin(journal, "task-a", labels)
            broken = result(Status.FAIL, "no_app_crash", cause=Cause.AGENT, reason="died")
            episode.add([result(), *([broken] if OWN_LABEL in labels else [])])
            error = "it raised" if OWN_LABEL in labels else None
            await journal.journal.record_reward(episode, scored(episode, 1.0, checker_error=error))
    (row,) = [row for row in read_stats(tmp_path) if row["task"] == "task-a"]
    assert (row["label"], row["episodes"], row["invalid"], row["failures"]) == ("good", 1, 0, [])
    assert (row["rewards"], row["checker_error_causes"]) == (1, {})
    everything = {row["label"]: row for row in read_stats(tmp_path, by="label", label=OWN_LABEL, all=True)}
    assert set(read_stats(tmp_path, by="label", label=OWN_LABEL)[0]) == set(everything["demo"])
    assert {label: row["invalid"] for label, row in everything.items()} == {None: 0, "selftest": 1, "demo": 1}
    assert everything["demo"]["failures"] and everything["demo"]["checker_error_causes"] == {"unknown": 1}


async def test_over_http(state: Path) -> None:
    """The route passes on what was asked, and its rows are what the document says."""
    async with opened(state) as journal:
        begin(journal, "task-a", {OWN_LABEL: "selftest"})
        await journal.journal.flush()
        host = SimpleNamespace(journal=journal.journal, config=SimpleNamespace(state_dir=state))
        (operation,) = [x for x in OPERATIONS if x.name == "stats"]
        counted = []
        for query in ([], [("all", "true")], [("all", "false")]):
            call: Any = SimpleNamespace(host=host, query=structure_query(query, requests.StatsQuery))
            answer = await operation.handler(call)
            assert isinstance(answer, dict)
            counted.append(sum(row.episodes for row in structure(answer, documents.Stats).rows))
    plain, everything, neither = counted
    assert plain == neither and everything == plain + 1


@pytest.mark.parametrize(
    "place", ["drums_core/selftest", "drums_core/commands/demo.py", "drums_verifiers/live_trial.py", "benchmarks"]
)
def test_drums_own_desktops_say_so(place: str) -> None:
    """Every desktop that the self-test, the demo, trials of verifiers and benchmarks create has its purpose."""
    top = Path(__file__).parents[1] / place
    found = []
    for source in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create":
                found.append((f"{source.name}:{node.lineno}", {keyword.arg for keyword in node.keywords}))
    assert found and [where for where, given in found if "purpose" not in given] == []


async def test_the_purpose_is_a_label(tmp_path: Path) -> None:
    """Kept with the slot, from which its episodes and its children have it; a client cannot set or take it away."""
    told = []

    class Told(Exception):
        pass

    def tell(slot: Any) -> None:
        told.append(dict(slot.labels))
        raise Told

    async def base(*_: Any) -> Any:
        return SimpleNamespace()

    # The front of `Host.create`, up to the slot: no desktop starts.
    host: Any = SimpleNamespace(
        config=SimpleNamespace(max_slots=1), slots={}, lease=lambda _: None, _base=base, _check_task=None
    )
    host.reserve = lambda *_, **__: [SimpleNamespace(labels={})]
    for purpose, labels in (("demo", {"policy": "x"}), (None, {"policy": "x"}), ("trial", None)):
        with pytest.raises(Told):
            await Host.create(host, labels=labels, purpose=purpose, on_slot=tell)  # type: ignore[arg-type]
    assert told == [{"policy": "x", OWN_LABEL: "demo"}, {"policy": "x"}, {OWN_LABEL: "trial"}]
    with pytest.raises(ConfigError) as caught:
        await Host.create(host, labels={OWN_LABEL: "demo"}, on_slot=tell)
    assert caught.value.path == f"$.labels.{OWN_LABEL}" and caught.value.status == 422


async def test_metrics_count_whose_doing_it_is() -> None:
    """`/metrics` has rewards without a score by cause, from the host's own events."""
    send, receive = trio.open_memory_channel[Any](10)

    @asynccontextmanager
    async def events() -> AsyncIterator[Any]:
        yield receive

    host: Any = SimpleNamespace(events=events, slots={}, config=SimpleNamespace(max_slots=1))
    metrics = Metrics(host)
    for error, cause in (("it broke", "agent"), ("it broke", "agent"), ("it broke", None), (None, None)):
        data = {"valid": True, "checker_error": error, "checker_error_cause": cause}
        send.send_nowait(SimpleNamespace(kind="reward", data=data, slot="d-1", episode="e-1"))
    send.close()
    await metrics.follow(host)
    text = metrics.text().decode()
    assert 'drums_checker_errors_total{cause="agent"} 2.0' in text
    assert 'drums_checker_errors_total{cause="unknown"} 1.0' in text
    assert 'drums_rewards_total{valid="true"} 4.0' in text


def test_without_a_journal(tmp_path: Path) -> None:
    """There is nothing to tell."""
    assert read_stats(tmp_path) == []


def of_the_first_version(state: Path) -> str:
    """Make the journal one; the id of an episode."""
    with sqlite3.connect(state / FILE) as db:
        db.execute("ALTER TABLE episodes DROP COLUMN labels")
        db.execute("PRAGMA user_version = 1")
        (identity,) = db.execute("SELECT episode FROM rewards LIMIT 1").fetchone()
    db.close()
    return str(identity)


def test_a_journal_of_the_first_version_is_read_as_it_is(state: Path) -> None:
    """Before any host has opened it, and without writing to it: its episodes have no labels."""
    expected = read_episodes(state)
    identity = of_the_first_version(state)
    assert read_episodes(state) == [{**episode, "labels": {}} for episode in expected]
    assert read_episode(state, identity)["labels"] == {} and read_episode(state, identity)["rewards"]
    assert [(row["label"], row["episodes"]) for row in read_stats(state, by="label")] == [(None, len(expected))]
    with sqlite3.connect(state / FILE) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    db.close()


def test_a_journal_of_the_first_version(state: Path) -> None:
    """It is brought up to date; its episodes have no labels."""
    identity = of_the_first_version(state)
    open_journal(state, "h-new").close()
    with sqlite3.connect(state / FILE) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
    db.close()
    assert read_episode(state, identity)["labels"] == {}


@pytest.mark.parametrize(
    ("labels", "path"),
    [
        ({str(i): "x" for i in range(17)}, "$.labels"),
        ({"a b": "x"}, "$.labels"),
        ({"a": ""}, "$.labels.a"),
        ({"a": "x" * 201}, "$.labels.a"),
        ({"a": 1}, "$.labels.a"),
        ({1: "a"}, "$.labels"),
        ({OWN_LABEL: "selftest"}, f"$.labels.{OWN_LABEL}"),
    ],
)
def test_labels_that_are_none(labels: Any, path: str) -> None:
    """Bounded, and texts alone."""
    with pytest.raises(ConfigError) as caught:
        check_labels(labels)
    assert caught.value.path == path


def test_labels_that_are() -> None:
    """As given, in a dict of its own."""
    given = {"policy": "run-7/step 400", "seed": "1"}
    assert check_labels(given) == given and check_labels(given) is not given
