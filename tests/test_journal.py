"""The journal: what was answered is on disk, what cannot be written is an error, lost hosts' episodes are invalid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner
from requires import requires
from scratch import scratch_state

from drums.errors import DrumsError, PrerequisiteError
from drums.reward import Reward, Verdict
from drums_core.commands.episodes import episodes as command
from drums_core.durable import take_lock
from drums_core.episode import Episode
from drums_core.journal import (
    ALIVE,
    NOT_WATCHED,
    Journal,
    open_journal,
    read_episode,
    read_episodes,
)
from drums_core.journal_file import FILE, VERSION, JournalError
from drums_core.model import Cause, GateResult, Phase, PluginId, Status
from drums_core.opening import open_host
from drums_core.sys.enter import mount, umount

PLUGIN = PluginId("guest_ready", "drums", "0.1.0")
REQUIRED = {"guest_ready": (Phase.READY, PLUGIN)}


def result(status: Status = Status.PASS, gate: str = "guest_ready", **more: Any) -> GateResult:
    return GateResult(gate, status, Phase.READY, PLUGIN, **more)


def reward(score: float | None = 1.0, *, valid: bool = True) -> Reward:
    verdict = Verdict.VALID if valid else Verdict.INVALID
    return Reward(score, valid, () if valid else ("why",), verdict, (), provenance={"task": "t"})


@attrs.define
class Opened:
    """An open journal, and episodes that record into it as a host's do."""

    journal: Journal
    state: Path

    def episode(self, slot: str = "d-1") -> Episode:
        episode = Episode(slot, "create", REQUIRED, lambda e, v: self.journal.judged(e, v), task="task-1")
        self.journal.episode_started(episode, task_sha256="ab", image=("minimal", "cd"), base="c-1")
        return episode

    def read(self, episode: Episode) -> dict[str, Any]:
        return read_episode(self.state, episode.id)


@asynccontextmanager
async def opened(state: Path, *, in_order: bool = True) -> AsyncIterator[Opened]:
    """A journal as `open_host` opens it; one that does not end `in_order` is left as by a host that was killed."""
    instance = f"h-{uuid.uuid4().hex[:12]}"
    runtime = state / "run" / instance
    runtime.mkdir(parents=True)
    lock = take_lock(runtime / ALIVE)
    try:
        journal = open_journal(state, instance)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(journal.run)
                yield Opened(journal, state)
                nursery.cancel_scope.cancel()
        finally:
            if in_order:
                journal.close()
            else:
                journal._db.close()
    finally:
        os.close(lock)


async def test_an_episode_with_all_that_happens_in_it(tmp_path: Path) -> None:
    """Start, results, verdict, reward, quarantine and end come back as they were, in their order."""
    async with opened(tmp_path) as at:
        episode = at.episode()
        episode.add([result()])
        await at.journal.record_reward(episode, reward())
        late = result(Status.FAIL, "no_app_crash", reason="it crashed", cause=Cause.AGENT, observed={"signal": 11})
        episode.add([late])
        at.journal.quarantined(episode, "seen by the harness", True)
        await at.journal.record_reward(episode, reward(None, valid=False))
        at.journal.episode_ended(episode)
        await at.journal.flush()
        found = at.read(episode)
    assert (found["slot"], found["origin"], found["task"], found["task_sha256"]) == ("d-1", "create", "task-1", "ab")
    assert (found["image"], found["image_digest"], found["checkpoint"]) == ("minimal", "cd", "c-1")
    assert found["started_at"] == episode.started_at and found["ended_at"] >= found["started_at"]
    assert [(g["gate"], g["status"]) for g in found["gates"]] == [("guest_ready", "pass"), ("no_app_crash", "fail")]
    assert found["gates"][1]["observed"] == {"signal": 11} and found["gates"][0]["plugin"] == attrs.asdict(PLUGIN)
    assert (found["verdict"], found["bad_gates"], found["causes"]) == ("invalid", ["no_app_crash"], ["agent"])
    assert [(q["reason"], q["by_user"]) for q in found["quarantines"]] == [("seen by the harness", True)]
    assert [(r["score"], r["valid"]) for r in found["rewards"]] == [(1.0, True), (None, False)]


async def test_a_reward_is_on_disk_when_it_is_answered(tmp_path: Path) -> None:
    """Another process reads the reward, its verdict and its results as soon as `record_reward` returns."""
    async with opened(tmp_path) as at:
        episode = at.episode()
        episode.add([result()])
        await at.journal.record_reward(episode, reward(0.5))
        query = "SELECT score, verdict FROM rewards"
        code = f"import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute({query!r}).fetchall())"
        done = await trio.run_process([sys.executable, "-c", code, str(tmp_path / FILE)], capture_stdout=True)
    assert done.stdout.decode().strip() == "[(0.5, 'valid')]"


def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """A program that is killed at any instant has lost no reward whose `record_reward` had returned."""
    program = textwrap.dedent(
        """
        import os, sys, trio
        sys.path[:0] = [sys.argv[1]]
        from pathlib import Path
        from test_journal import opened, result, reward
        async def main():
            async with opened(Path(sys.argv[2])) as at, trio.open_nursery() as nursery:
                async def many():
                    while True:
                        episode = at.episode()
                        episode.add([result()])
                        await at.journal.record_reward(episode, reward())
                        os.write(1, episode.id.encode() + b"\\n")
                for _ in range(8):
                    nursery.start_soon(many)
        trio.run(main)
        """
    )
    argv = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    for wait_s in (0.05, 0.2):
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = [process.stdout.readline()]
            time.sleep(wait_s)
            process.kill()
            told += process.stdout.read().splitlines(keepends=True)
        whole = [line.decode().strip() for line in told if re.fullmatch(rb"e-\w{16}\n", line)]
        assert len(whole) > 5
        for identity in whole:
            assert len(read_episode(tmp_path, identity)["rewards"]) == 1


async def test_many_writers_share_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that wait at the same time are written together: far fewer commits than rewards."""
    commits: list[int] = []
    write = Journal._write

    def counted(journal: Journal, writes: Any) -> None:
        commits.append(len(writes))
        write(journal, writes)

    monkeypatch.setattr(Journal, "_write", counted)
    async with opened(tmp_path) as at, trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(at.journal.record_reward, at.episode(), reward())
    assert len(read_episodes(tmp_path, limit=1000)) == 200 and len(commits) < 50


async def test_only_root_can_read_it(tmp_path: Path) -> None:
    """The file and what SQLite puts beside it have mode 0600."""
    async with opened(tmp_path) as at:
        await at.journal.record_reward(at.episode(), reward())
        files = [name for name in os.listdir(tmp_path) if name.startswith(FILE)]
        assert {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in files} == {0o600} and len(files) >= 2


def fill(path: Path) -> None:
    """Write to a file until its file system is full."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)


@requires("root")
async def test_a_full_disk_gives_no_reward(tmp_path: Path) -> None:
    """`record_reward` raises, the reward is not there later either, and what was recorded besides it comes to be."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("tmpfs", str(disk), "tmpfs", data="size=512k")
    try:
        async with opened(disk) as at:
            episode = at.episode()
            await at.journal.flush()
            ballast = disk / "ballast"
            fill(ballast)
            episode.add([result(observed="x" * 20000)])
            with pytest.raises(JournalError) as caught:
                await at.journal.record_reward(episode, reward())
            assert FILE in caught.value.message and "full" in caught.value.message and caught.value.hint
            assert at.read(episode)["rewards"] == []
            ballast.unlink()
            await at.journal.record_reward(episode, reward(0.25))
            found = at.read(episode)
            assert [r["score"] for r in found["rewards"]] == [0.25] and found["verdict"] == "valid"
    finally:
        umount(str(disk))


async def test_a_row_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    """The waiters of its group are told; the other rows are there."""
    async with opened(tmp_path) as at:
        episode = at.episode()
        with pytest.raises(JournalError):
            await at.journal.record_reward(episode, attrs.evolve(reward(), score=1 << 80))  # no number of SQLite's
        await at.journal.record_reward(episode, reward())
        assert [r["score"] for r in at.read(episode)["rewards"]] == [1.0]


async def test_text_that_is_no_text(tmp_path: Path) -> None:
    """A reason with a lone surrogate, and an observation that JSON lacks, are kept in another spelling."""
    async with opened(tmp_path) as at:
        episode = at.episode()
        episode.add([result(Status.FAIL, reason="file \udcff", observed={"p": Path("/x")})])
        await at.journal.flush()
        found = at.read(episode)
    assert found["gates"][0]["reason"] == "file \\udcff" and "/x" in found["gates"][0]["observed"]["p"]


async def test_a_lost_host(tmp_path: Path) -> None:
    """Its open episodes are ended and invalid, with the reason; others, ended or of a living host, stay."""
    async with opened(tmp_path) as living:
        other = living.episode("d-living")
        await living.journal.flush()
        async with opened(tmp_path, in_order=False) as at:
            whole, cut = at.episode("d-whole"), at.episode("d-cut")
            whole.add([result()])
            cut.add([result()])
            at.journal.episode_ended(whole)
            await at.journal.record_reward(cut, reward())
        async with opened(tmp_path) as later:
            found = later.read(cut)
            assert found["verdict"] == "invalid" and found["bad_gates"] == ["watched"] and found["ended_at"]
            assert found["invalid_reasons"] == [f"watched: {NOT_WATCHED}"] and found["causes"] == ["infrastructure"]
            assert (found["gates"][-1]["gate"], found["gates"][-1]["reason"]) == ("watched", NOT_WATCHED)
            assert found["gates"][-1]["status"] == "fail" and len(found["rewards"]) == 1
            assert later.read(whole)["verdict"] == "valid"
            assert later.read(other)["ended_at"] is None and later.read(other)["verdict"] == "pending"


async def test_several_hosts_write(tmp_path: Path) -> None:
    """Two hosts on one state folder write at the same time, and both are served."""
    async with opened(tmp_path) as one, opened(tmp_path) as two, trio.open_nursery() as nursery:
        for _ in range(20):
            for at in (one, two):
                nursery.start_soon(at.journal.record_reward, at.episode(), reward())
    assert len(read_episodes(tmp_path)) == 40


async def test_two_hosts_in_one_process_keep_their_locks(tmp_path: Path) -> None:
    """What a second host of the process does loses no lock of the first's: nobody takes its log away under it."""
    touch = "db.execute('SELECT count(*) FROM episodes').fetchone()"
    count = "print(db.execute('SELECT count(*) FROM rewards').fetchone()[0])"

    async def elsewhere(code: str) -> str:
        whole = f"import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); {code}; db.close()"
        done = await trio.run_process([sys.executable, "-c", whole, str(tmp_path / FILE)], capture_stdout=True)
        return done.stdout.decode().strip()

    async with opened(tmp_path) as one:
        await one.journal.record_reward(one.episode(), reward())
        async with opened(tmp_path):
            await elsewhere(touch)  # the last one to close the file, as far as it can see
            await one.journal.record_reward(one.episode(), reward())
            assert await elsewhere(count) == "2"
        await elsewhere(touch)
        await one.journal.record_reward(one.episode(), reward())
        assert await elsewhere(count) == "3"
    assert len(read_episodes(tmp_path)) == 3


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    """A link is not followed, and nothing is made where it leads; a new file is its owner's alone."""
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="no regular file"):
        open_journal(tmp_path, "h-1")
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / FILE).unlink()
    open_journal(tmp_path, "h-1").close()
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


async def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    """A version that this drums does not know is named, and the file is left as it is."""
    async with opened(tmp_path):
        pass
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    for use in (lambda: open_journal(tmp_path, "h-2"), lambda: read_episodes(tmp_path)):
        with pytest.raises(PrerequisiteError, match=f"version {VERSION + 1}"):
            use()


async def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """What is no journal is an error that names the file and what to do."""
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(JournalError) as caught:
        open_journal(tmp_path, "h-1")
    assert str(tmp_path / FILE) in caught.value.message and "move the file away" in caught.value.hint
    with pytest.raises(JournalError) as caught:
        read_episodes(tmp_path)
    assert "move the file away" in caught.value.hint and "sudo" not in caught.value.hint


async def test_a_malformed_file_is_no_matter_of_permission(tmp_path: Path) -> None:
    """One that was overwritten in the middle is to be moved away; `sudo` would not help."""
    async with opened(tmp_path) as at:
        for _ in range(50):
            await at.journal.record_reward(at.episode(), reward())
    content = (tmp_path / FILE).read_bytes()  # no host has it open
    (tmp_path / FILE).write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(JournalError, match="malformed") as caught:
        read_episodes(tmp_path)
    assert "move the file away" in caught.value.hint and "sudo" not in caught.value.hint


@requires("root")
@pytest.mark.parametrize("inside", [True, False], ids=["the file", "its folder"])
def test_a_file_of_roots_needs_sudo(tmp_path: Path, inside: bool) -> None:
    """Whoever may not read the file, or look into its folder, is told to use sudo."""
    open_journal(tmp_path, "h-1").close()
    tmp_path.chmod(0o755 if inside else 0o700)
    code = f"""
        import os, sys
        from pathlib import Path
        from drums_core.journal import read_episodes
        from drums_core.journal_file import JournalError
        os.chdir(sys.argv[1])
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        try:
            read_episodes(Path({"." if inside else str(tmp_path)!r}))
        except JournalError as e:
            print(e.hint)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.strip() == "it is root's: run it with sudo"


async def test_pages_newest_first(tmp_path: Path) -> None:
    """`limit` and `before` page through all, newest first; an unknown `before` is an error."""
    async with opened(tmp_path) as at:
        ids = [at.episode(f"d-{n}").id for n in range(5)]
        await at.journal.flush()
        first = read_episodes(tmp_path, limit=2)
        second = read_episodes(tmp_path, limit=10, before=first[-1]["id"])
        assert [e["id"] for e in first + second] == ids[::-1]
        with pytest.raises(LookupError):
            read_episodes(tmp_path, before="e-none")
        with pytest.raises(LookupError):
            read_episode(tmp_path, "e-none")


def test_without_a_journal(tmp_path: Path) -> None:
    """Where no host ever ran there are no episodes, and reading makes no file."""
    assert read_episodes(tmp_path) == []
    with pytest.raises(LookupError):
        read_episode(tmp_path, "e-1")
    assert list(tmp_path.iterdir()) == []


async def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`drums episodes` reads the file while a host has it open, as a table and as JSON."""
    monkeypatch.setenv("DRUMS_STATE_DIR", str(tmp_path))
    async with opened(tmp_path) as at:
        episode = at.episode()
        episode.add([result()])
        await at.journal.record_reward(episode, reward())
        run = CliRunner().invoke
        listed = run(command, ["ls", "--json"])
        shown = run(command, ["show", episode.id, "--json"])
        assert [e["id"] for e in json.loads(listed.output)["episodes"]] == [episode.id]
        assert json.loads(listed.output)["episodes"][0]["score"] == 1.0
        assert json.loads(shown.output)["rewards"][0]["score"] == 1.0
        assert episode.id in run(command, ["ls"]).output and "guest_ready" in run(command, ["show", episode.id]).output
        missing = run(command, ["show", "e-none"])
        assert isinstance(missing.exception, DrumsError) and "e-none" in missing.exception.message


@requires("root", "criu")
async def test_a_real_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that cannot be written is not answered; what breaks a valid episode later is recorded as well."""
    write = Journal._write

    def full(_: Journal, writes: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with scratch_state() as config:
        async with open_host(config) as host, await host.create("2e208cb7") as slot:
            await slot.wait_valid()
            assert read_episode(config.state_dir, slot.episode.id)["verdict"] == "valid"
            monkeypatch.setattr(Journal, "_write", full)
            with pytest.raises(JournalError, match="full"):
                await slot.verify()
            with pytest.raises(JournalError):
                await host.create()
            assert list(host.slots) == [slot.id]
            monkeypatch.setattr(Journal, "_write", write)
            reward = await slot.verify()
            found = read_episode(config.state_dir, slot.episode.id)
            assert [r["score"] for r in found["rewards"]] == [reward.score] and found["ended_at"] is None
            assert {g["gate"] for g in found["gates"]} >= {"state_hash", "alive_after_resume"}
            slot.quarantine("seen later")
            await host.journal.flush()
            found = read_episode(config.state_dir, slot.episode.id)
            assert (found["verdict"], found["bad_gates"]) == ("invalid", ["not_quarantined"])
            assert [q["reason"] for q in found["quarantines"]] == ["seen later"]
        assert read_episode(config.state_dir, slot.episode.id)["ended_at"] is not None
        with sqlite3.connect(config.state_dir / FILE) as db:
            assert db.execute("SELECT count(*) FROM hosts WHERE closed_at IS NULL").fetchone() == (0,)
        db.close()
