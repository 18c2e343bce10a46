"""The specification's page: its code runs unchanged against a daemon, and what its prose promises holds there.

The page has two blocks of code; the third here is what its section on quarantine says in prose.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from requires import requires
from served import Served, served

import drums

TASKS = """\
import collections
import drums

with drums.connect() as client:
    tasks = client.tasks()
    supported = sum(t["supported"] for t in tasks)
    print(len(tasks), "tasks;", supported, "supported on this host")
    print(collections.Counter(t["domain"] for t in tasks).most_common(3))
    t = client.task("e0df059f")  # id, or a unique prefix of 8+ characters
    print(t["instruction"], "|", t["evaluator"]["func"])
"""
GATES = """\
import drums

with drums.connect() as client:
    with client.create(task="e0df059f", ttl=600) as env:
        env.wait_valid()
        g = env.gates()
        failed = [x["gate"] for x in g["gates"]["gates"] if x["status"] != "pass"]
        print(g["validity"]["verdict"], failed)
        env.quarantine("harness detected a broken page")
        r = env.verify(strict=False)
        print(r.valid, r.score, r.invalid_reasons)
"""
QUARANTINE = """\
import drums

with drums.connect() as client:
    with client.create(task="e0df059f", ttl=600) as env:
        env.quarantine("harness detected a broken page")
        for refused in (lambda: env.step("WAIT"), env.reset, lambda: env.save("kept")):
            try:
                refused()
            except drums.SlotQuarantined:
                print("refused")
        try:
            env.verify()
        except drums.InvalidEpisode as e:
            print(e.reward.verdict, e.reward.bad_gates, e.reward.checker_skipped)
        env.release()
        print(env.state)
        env.reset()
        env.wait_valid()
        print(env.state, env.verify().score)
"""

OSWORLD = Path(os.environ.get("DRUMS_OSWORLD") or Path(__file__).parents[2] / "shared" / "osworld")
PAGE = OSWORLD.parent / "spec" / "tasks-and-verifiers.txt"
GATE_NAMES = {
    "lock_applied",
    "lock_pre_resume",
    "cgroup",
    "init_identity",
    "mount_table",
    "netns",
    "guest_ready",
    "state_hash",
    "isolation",
    "alive_after_resume",
}

needs_osworld = pytest.mark.skipif(
    not OSWORLD.is_dir() and not os.environ.get("DRUMS_REQUIRE"), reason=f"no OSWorld checkout at {str(OSWORLD)!r}"
)


def test_the_page_is_what_is_tested() -> None:
    """The blocks above are those of the page, where the page is at hand."""
    if not PAGE.exists():
        assert not os.environ.get("DRUMS_REQUIRE"), f"the specification's page is not at {str(PAGE)!r}"
        pytest.skip(f"no page at {str(PAGE)!r}")
    # A block begins after a line "Python" and ends before the first line that is prose.
    block = r"^Python\n((?:(?:import |with |(?! +•) ).*\n|\n(?=with | |import ))+)"
    blocks = re.findall(block, PAGE.read_text(encoding="utf-8"), re.M)
    assert blocks == [TASKS, GATES]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("daemon") / "log", "--osworld", str(OSWORLD)) as daemon:
        yield daemon


def run(daemon: Served, code: str, tmp_path: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=daemon.environ, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with drums.connect(daemon.url, daemon.token) as client:
        assert client.slots() == [], "a desktop is left"
    return done.stdout.splitlines()


@needs_osworld
@requires("root", "criu")
class TestServed:
    """Against a daemon that serves the pinned OSWorld checkout."""

    def test_tasks(self, daemon: Served, tmp_path: Path) -> None:
        """369 tasks, 3 of them unsupported."""
        counts, domains, one = run(daemon, TASKS, tmp_path)
        assert counts == "369 tasks; 366 supported on this host"
        assert re.fullmatch(r"\[\('\w+', \d+\), \('\w+', \d+\), \('\w+', \d+\)\]", domains)
        assert one.endswith(" | exact_match") and len(one) > 30

    def test_gates_and_quarantine(self, daemon: Served, tmp_path: Path) -> None:
        """All gates pass; quarantined, the reward is not valid and has no score, with the reason in words."""
        before, after = run(daemon, GATES, tmp_path)
        assert before == "valid []"
        assert after.startswith("False None (") and "harness detected a broken page" in after

    def test_quarantine(self, daemon: Served, tmp_path: Path) -> None:
        """Steps, resets and saves are refused; released and reset it is a new, judged episode."""
        assert run(daemon, QUARANTINE, tmp_path) == [
            "refused",
            "refused",
            "refused",
            "invalid ('not_quarantined',) quarantined: harness detected a broken page",
            "down",
            "up 0.0",
        ]

    def test_facts_beyond_the_page(self, daemon: Served) -> None:
        """Health has the version; a wrong token is AuthError."""
        with drums.connect(daemon.url, daemon.token) as client:
            assert client.health()["version"] == drums.__version__
        with drums.connect(daemon.url, "drums_sk_wrong") as client, pytest.raises(drums.AuthError):
            client.tasks()

    def test_unsupported_tasks(self, daemon: Served) -> None:
        """Three; to create one is TaskUnsupported (422), and nothing starts."""
        with drums.connect(daemon.url, daemon.token) as client:
            unsupported = [t for t in client.tasks() if not t["supported"]]
            assert len(unsupported) == 3
            for task in unsupported:
                assert task["unsupported_reason"]
                with pytest.raises(drums.TaskUnsupported) as caught:
                    client.create(task=task["id"])
                assert caught.value.status == 422
            assert client.slots() == []
            with pytest.raises(drums.TaskNotFound):
                client.task("e0df059")

    def test_a_valid_failure_and_a_valid_success(self, daemon: Served) -> None:
        """A valid episode with score 0.0 is a reward, not an error; and so are the gates and fields of the tables."""
        with drums.connect(daemon.url, daemon.token) as client, client.create(task="e0df059f", ttl=600) as env:
            reward = env.verify()
            assert (reward.score, reward.valid, reward.verdict, reward.bad_gates) == (0.0, True, "valid", ())
            assert (reward.invalid_reasons, reward.checker_error, reward.checker_skipped) == ((), None, None)
            assert {g["gate"] for g in env.gates()["gates"]["gates"]} == GATE_NAMES
            done = env.execute("cd ~/Desktop && ls", shell=True)
            assert done["returncode"] == 0, done
            children = env.fork(2)
            try:
                for child in children:
                    child.wait_valid()
                    assert child.task_id == env.task_id
            finally:
                for child in children:
                    child.close()
            env.reset()
            env.wait_valid()
            assert env.screenshot().startswith(b"\x89PNG")
            env.write_file("/home/user/x", b"\0\xff")
            assert env.read_file("/home/user/x") == b"\0\xff"

    def test_a_caller_that_leaves(self, daemon: Served) -> None:
        """A cancelled create leaves no desktop, and a cancelled body closes its own."""

        async def main() -> None:
            async with drums.connect_async(daemon.url, daemon.token) as client:
                with trio.move_on_after(0.3) as scope:
                    await client.create(task="e0df059f")
                assert scope.cancelled_caught
                with trio.move_on_after(60) as scope:
                    async with await client.create(task="e0df059f"):
                        scope.cancel()
                        await trio.sleep_forever()
                with trio.fail_after(30):
                    while await client.slots():  # noqa: ASYNC110 - the daemon tells nobody that it is done
                        await trio.sleep(0.05)

        trio.run(main)

    def test_the_commands(self, daemon: Served) -> None:
        """A desktop's life from a shell."""

        def command(*argv: str, status: int = 0) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "drums", *argv], capture_output=True, text=True, timeout=120, env=daemon.environ
            )
            assert done.returncode == status, (done.stdout, done.stderr)
            return done.stdout

        listed = json.loads(command("tasks", "--json"))
        assert (len(listed["tasks"]), sum(not t["supported"] for t in listed["tasks"])) == (369, 3)
        assert listed["broken"] == {}
        slot = command("create", "e0df059f", "--ttl", "600", "--wait").strip()
        assert command("slots").splitlines()[1].split("\t")[:3] == [slot, "up", "valid"]
        assert command("step", slot, "print(6 * 7)") == "42\n"
        command("step", slot, "nonsense", status=1)
        assert json.loads(command("step", slot, "DONE", "--json"))["status"] == "success"
        assert json.loads(command("verify", slot, "--json"))["score"] == 0.0
        assert command("slots", "close", slot) == f"closed {slot}\n"
        assert json.loads(command("slots", "--json")) == {"slots": []}

    def test_asynchronously(self, daemon: Served, tmp_path: Path) -> None:
        """The page's second block, awaited, on both event loops."""
        body = """
            async def main():
                async with drums.connect_async() as client:
                    async with await client.create(task="e0df059f", ttl=600) as env:
                        await env.wait_valid()
                        await env.quarantine("harness detected a broken page")
                        r = await env.verify(strict=False)
                        print(r.valid, r.score, r.verdict)
        """
        for loop, start in (("asyncio", "asyncio.run(main())"), ("trio", "trio.run(main)")):
            code = f"import drums, {loop}\n{textwrap.dedent(body)}\n{start}"
            assert run(daemon, code, tmp_path) == ["False None invalid"]
