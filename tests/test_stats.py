"""Rates per task and per policy, from a journal as hosts write it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from test_journal import Opened, opened, result

from drums.errors import ConfigError
from drums.reward import Reward
from drums_core.episode import Episode
from drums_core.journal import FILE, VERSION, open_journal, read_episode
from drums_core.model import Cause, Status, check_labels
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


def test_without_a_journal(tmp_path: Path) -> None:
    """There is nothing to tell."""
    assert read_stats(tmp_path) == []


def test_a_journal_of_the_first_version(state: Path) -> None:
    """It is brought up to date; its episodes have no labels."""
    with sqlite3.connect(state / FILE) as db:
        db.execute("ALTER TABLE episodes DROP COLUMN labels")
        db.execute("PRAGMA user_version = 1")
        (identity,) = db.execute("SELECT id FROM episodes LIMIT 1").fetchone()
    db.close()
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
