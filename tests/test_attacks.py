"""The attack suite: a hostile agent in a real desktop, one attack each; `docs/trust.md` is the table of them.

What needs a host or a checker of its own is in `test_attacks_*.py`.
Each is scored with the attack in place and the task undone, and once more when the agent has honestly done the task:
what does not forge a 1 must not turn a right answer into a 0 either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import trio
from attacks import (
    EVAL,
    HONEST_FILE,
    XML_BOMB,
    ZIP_BOMB,
    answer,
    fill_the_disk,
    forge_the_server,
    ignore,
    kill_by_name,
    kill_the_session,
    stop_the_session,
    write_the_answer,
)
from desktops import Played, Scenario, make_task, play_on_hosts, run, start_daemon
from requires import requires
from test_verifiers import install, packages_folder

from drums_core.host import Host
from drums_core.model import Limits, Reward, Task
from drums_core.slot import Slot

pytestmark = requires("root", "criu")

CHECKS = """
import xml.etree.ElementTree, zlib

def zipped(desktop, task):
    return float(zlib.decompress(desktop.read_file("~/answer")) == b"yes")

def marked_up(desktop, task):
    return float(xml.etree.ElementTree.fromstring(desktop.read_file("~/answer")).text == "yes")

def content(desktop, task):
    try:
        return float(desktop.read_file("~/answer") == b"yes")
    except (FileNotFoundError, ValueError):
        return 0.0

def listed(desktop, task):
    return float("done" in [x["name"] for x in desktop.list_directory("~/")["children"]])

def screen(desktop, task):
    return float(desktop.screenshot().startswith(b"\\x89PNG"))

def display(desktop, task):
    return float(desktop.execute(["xset", "q"], timeout_s=8).returncode == 0)
"""


def verifier(function: str) -> Task:
    evaluator = {"func": "drums_verifier", "verifier": "attack_checks", "function": function}
    return attrs.evolve(make_task(), evaluator=evaluator)


@attrs.frozen
class Found:
    """What an attack came to: its reward, the reward of the honest solution beside it, and what the attack saw."""

    attacked: Reward
    honest: Reward
    told: Any = None


async def score(slot: Slot, *, in_place: bool = False) -> Reward:
    return await slot.verify(strict=False, in_place=in_place)


def attack(
    plant: Callable[[Slot], Awaitable[Any]], *, task: Task | None = None, solve: str = "mkdir ~/done"
) -> Scenario:
    """Plant, score, solve, score."""

    async def scenario(host: Host) -> Found:
        async with await host.create(task or make_task()) as slot:
            await slot.wait_valid()
            told = await plant(slot)
            attacked = await score(slot)
            await run(slot, solve)
            return Found(attacked, await score(slot), told)

    return scenario


APPS = attrs.evolve(
    make_task(),
    evaluator={
        "func": "check_gnome_favorite_apps",
        "result": {"type": "vm_command_line", "command": "cat ~/answer", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": ["yes"]}},
    },
)


async def fork_bomb(host: Host) -> dict[str, Reward]:
    """The limit of processes is full; the task was done before."""
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        await run(slot, "mkdir ~/done")
        source = """
import os, time
open('/tmp/bomb.ready', 'w').close()
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        time.sleep(0.1)
"""
        await start_daemon(slot, "bomb", source)
        with trio.fail_after(60):
            assert slot.desktop is not None
            while slot.desktop.cgroup.pids_in_use() < slot.desktop.limits.pids:  # noqa: ASYNC110
                await trio.sleep(0.05)
        return {"copy": await score(slot), "in place": await score(slot, in_place=True)}


async def memory_hog(host: Host) -> dict[str, Reward]:
    """Nearly all memory is held; the task was done before."""
    source = "import time\nx = bytearray(b'x') * (%d << 20)\nopen('/tmp/hog.ready', 'w').close()\ntime.sleep(1000)\n"
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        await run(slot, "mkdir ~/done")
        assert slot.desktop is not None
        free = slot.desktop.limits.memory_bytes - slot.desktop.cgroup.memory_in_use()
        await start_daemon(slot, "hog", source % ((free >> 20) - 24))
        return {"copy": await score(slot)}


async def needs_the_session(host: Host) -> dict[str, Reward]:
    """Checkers that need what the agent killed or stopped: no score, and its own doing."""
    found = {}
    for name, function, plant in (
        ("killed", "screen", kill_the_session),
        ("stopped", "display", stop_the_session),
    ):
        async with await host.create(verifier(function)) as slot:
            await slot.wait_valid()
            found[f"{name} before"] = await score(slot)
            await plant(slot)
            found[name] = await score(slot)
    return found


async def crash_on_purpose(host: Host) -> Reward:
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        await ignore(slot, "python3 -c 'import os; os.abort()'; bash -c 'kill -SEGV $$'")
        return await score(slot)


async def do_nothing(host: Host) -> dict[str, Reward]:
    """The base rates: nothing, and FAIL, on a task that can be done and on one that cannot."""
    found = {}
    for name, task in (
        ("done", make_task()),
        ("infeasible", attrs.evolve(make_task(), evaluator={"func": "infeasible"})),
    ):
        async with await host.create(task) as slot:
            found[f"{name}, nothing"] = await score(slot)
            await slot.step("print('[INFEASIBLE] FAIL')")
            found[f"{name}, said in passing"] = await score(slot)
            await slot.step("FAIL")
            found[f"{name}, FAIL"] = await score(slot)
    return found


FORGERIES: Mapping[str, Scenario] = {
    "write-the-answer": attack(write_the_answer),
    "kill-by-name": attack(kill_by_name),
    "kill-the-session": attack(kill_the_session),
    "stop-the-session": attack(stop_the_session),
    "fill-the-disk": attack(fill_the_disk),
    "forge-the-server": attack(forge_the_server),
    "symlink": attack(answer("os.symlink('/etc/shadow', 'answer')"), task=verifier("content"), solve=HONEST_FILE),
    "fifo": attack(answer("os.mkfifo('answer')"), task=verifier("content"), solve=HONEST_FILE),
    "socket": attack(
        answer("socket.socket(socket.AF_UNIX).bind('answer')"), task=verifier("content"), solve=HONEST_FILE
    ),
    "odd-names": attack(
        answer("[open(b'\\xff\\xfe' + bytes([10, i]), 'w') for i in range(1, 9)]; os.makedirs('x/' * 200)"),
        task=verifier("listed"),
    ),
}
NO_SCORE: Mapping[str, tuple[Scenario, str]] = {
    "huge-file": (
        attack(answer("open('answer', 'w').truncate(1 << 40)"), task=verifier("content"), solve=HONEST_FILE),
        "agent",
    ),
    "zip-bomb": (
        attack(
            answer(ZIP_BOMB),
            task=verifier("zipped"),
            solve="""cd; python3 -c 'import zlib; open("answer", "wb").write(zlib.compress(b"yes"))'""",
        ),
        "unknown",
    ),
    "xml-bomb": (
        attack(answer(XML_BOMB), task=verifier("marked_up"), solve="echo '<a>yes</a>' >~/answer"),
        "unknown",
    ),
    "eval": (
        attack(answer(f"open('answer', 'w').write({EVAL!r})"), task=APPS, solve="echo \"['yes']\" >~/answer"),
        "agent",
    ),
}
OTHERS: Mapping[str, Scenario] = {
    "needs-the-session": needs_the_session,
    "crash-on-purpose": crash_on_purpose,
    "do-nothing": do_nothing,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with packages_folder(tmp_path_factory) as folder:
        install(folder, "attack-checks", {"attack_checks": "attack_checks_module"}, {"attack_checks_module.py": CHECKS})
        scenarios = {**FORGERIES, **OTHERS, **{name: scenario for name, (scenario, _) in NO_SCORE.items()}}
        hosts: Sequence[tuple[Mapping[str, Scenario], Mapping[str, Any]]] = [
            (scenarios, {}),
            ({"fork-bomb": fork_bomb}, {"limits": Limits(pids=160)}),
            ({"memory-hog": memory_hog}, {"limits": Limits(memory_bytes=512 << 20)}),
        ]
        yield play_on_hosts(hosts)


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery(played: Played, name: str) -> None:
    """No 1 for the attack, and the honest solution scores 1 beside it, in a valid episode."""
    found = played[name]
    for reward, wanted in ((found.attacked, 0.0), (found.honest, 1.0)):
        assert (reward.score, reward.valid) == (wanted, True), (reward.checker_error, reward.invalid_reasons)


@pytest.mark.parametrize("name", NO_SCORE)
def test_no_score(played: Played, name: str) -> None:
    """The checker cannot go on: no score, with its cause where it shows; the honest solution scores 1."""
    found = played[name]
    reward = found.attacked
    assert (reward.score, reward.valid, reward.checker_error_cause) == (None, True, NO_SCORE[name][1]), reward
    assert found.honest.score == 1.0, found.honest


def test_fork_bomb(played: Played) -> None:
    """The right answer counts in the copy; in place the checker cannot ask, which is the agent's doing."""
    found = played["fork-bomb"]
    assert (found["copy"].score, found["copy"].valid) == (1.0, True), found["copy"]
    reward = found["in place"]
    assert (reward.score, reward.checker_error_cause) == (None, "agent"), reward
    assert "processes and threads" in str(reward.provenance["checker_error_evidence"])


def test_memory_hog(played: Played) -> None:
    reward = played["memory-hog"]["copy"]
    assert (reward.score, reward.valid) == (1.0, True), reward


def test_needs_the_session(played: Played) -> None:
    found = played["needs-the-session"]
    for name, word in (("killed", "has ended"), ("stopped", "is stopped")):
        assert found[f"{name} before"].score == 1.0, found[f"{name} before"]
        reward = found[name]
        assert (reward.score, reward.checker_error_cause) == (None, "agent"), reward
        assert any(word in x for x in reward.provenance["checker_error_evidence"]), reward


def test_crash_on_purpose(played: Played) -> None:
    reward = played["crash-on-purpose"]
    assert not reward.valid and reward.bad_gates == ("no_app_crash",)
    assert set(reward.provenance["causes"]) == {"agent"}


def test_do_nothing(played: Played) -> None:
    """FAIL is an action, not a word; it scores on what nobody can do, and nowhere else."""
    scores = {name: reward.score for name, reward in played["do-nothing"].items()}
    assert scores.pop("infeasible, FAIL") == 1.0
    assert set(scores.values()) == {0.0}


def test_nothing_is_left(played: Played) -> None:
    assert not played.left
