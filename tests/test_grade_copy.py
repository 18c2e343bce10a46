"""`verify` grades a frozen copy: nothing of it is left in the desktop, nothing in the desktop can answer for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import trio
from attacks import COUNTER, THIEF
from desktops import Played, Scenario, make_task, play, play_on_hosts, run, start_daemon, write
from requires import requires
from test_verifiers import install, packages_folder

from drums.errors import CheckerError
from drums_core.copies import Copy, Living, open_copy
from drums_core.host import Host
from drums_core.leftovers import WORKER_PREFIX
from drums_core.model import Cause, Reward, Task
from drums_core.slot import Slot
from drums_core.sys.cgroups import cgroup_names
from drums_core.testing.faults import FaultInjector, fault

pytestmark = requires("root", "criu")
faults = FaultInjector()

CHECKS = '''
def content(desktop, task, *, path):
    """Twice the same, or it is being changed."""
    try:
        first = desktop.read_file(path)
        for _ in range(20):
            if desktop.read_file(path) != first:
                return 0.25
        return 1.0 if first == b"yes" else 0.0
    except FileNotFoundError:
        return 0.0
    except ValueError:
        return 0.125

def looks(desktop, task):
    assert desktop.screenshot().startswith(b"\\x89PNG")
    assert isinstance(desktop.windows(), list) and desktop.accessibility().startswith("<")
    names = [x["name"] for x in desktop.list_directory("~/")["children"]]
    return ("done" in names) / 2 + desktop.is_folder("done") / 2

def crashes(desktop, task):
    desktop.accessibility()  # everything lives meanwhile
    return 1.0
'''


def verifier(function: str, **options: Any) -> Task:
    evaluator = {"func": "drums_verifier", "verifier": "copy_checks", "function": function, "options": options}
    return attrs.evolve(make_task(), evaluator=evaluator)


def with_postconfig(task: Task, command: str) -> Task:
    steps = [{"type": "execute", "parameters": {"command": command, "shell": True}}]
    return attrs.evolve(task, evaluator={**task.evaluator, "postconfig": steps})


async def rewards(slot: Slot, *ways: bool) -> list[Reward]:
    return [await slot.verify(strict=False, in_place=way) for way in ways]


# --- side effects


async def twice(host: Host) -> dict[str, Any]:
    """A checker whose command and whose postconfig write: the desktop shows nothing of it, and the episode goes on."""
    task = with_postconfig(make_task(command="mkdir ~/left && [ -d ~/done ] && echo yes"), "mkdir ~/after")
    async with await host.create(task) as slot:
        await slot.wait_valid()
        episode = slot.episode
        untouched = await rewards(slot, False, False)
        await run(slot, "mkdir ~/done")
        done = await rewards(slot, False, False)
        listing = await run(slot, "ls ~")
        kept = {m.id for m in host.services.store.names()}
        (in_place,) = await rewards(slot, True)
        return {
            "untouched": untouched,
            "done": done,
            "listing": listing,
            "kept": kept,
            "in place": in_place,
            "after": await run(slot, "ls ~"),
            "same": slot.episode is episode,
            "copies": [c for c in host.copies.values() if c.id == slot.id],
        }


async def full_host(host: Host) -> tuple[bool, Reward]:
    """Every slot is taken; a copy takes none."""
    async with await host.create(make_task()) as slot:
        full = len(host.slots) == host.config.max_slots
        return full, await slot.verify(strict=False)


async def as_configured(host: Host) -> list[Any]:
    """`verify_in_place`; what a caller says wins."""
    async with await host.create(make_task()) as slot:
        found = [await slot.verify(strict=False, in_place=way) for way in (None, True, False)]
        return [reward.provenance["graded"]["in_place"] for reward in found]


# --- the same scores


def parity(task: str | Task, solve: str = "", last: str = "DONE", *, untouched: bool = True) -> Scenario:
    """Scores untouched, and solved; each on a copy and in place."""

    async def scenario(host: Host) -> list[list[Reward]]:
        async with await host.create(task) as slot:
            found = [await rewards(slot, False, True)] if untouched else []
            if solve:
                await run(slot, solve)
            await slot.step(last)
            return [*found, await rewards(slot, False, True)]

    return scenario


PARITY: dict[str, tuple[Scenario, list[float]]] = {
    "own": (parity(make_task(), "mkdir ~/done"), [0.0, 1.0]),
    "verifier": (parity(verifier("looks"), "mkdir ~/done"), [0.0, 1.0]),
    "verifier file": (parity(verifier("content", path="~/f"), "printf yes >~/f"), [0.0, 1.0]),
    "verifier fifo": (parity(verifier("content", path="~/f"), "mkfifo ~/f", untouched=False), [0.125]),
    "verifier link": (
        parity(verifier("content", path="f"), "printf yes >/tmp/g; ln -s ../../tmp/g ~/f", untouched=False),
        [1.0],
    ),
    "postconfig": (
        parity(with_postconfig(make_task(), "[ -e ~/half ] && mkdir -p ~/done; true"), "touch ~/half"),
        [0.0, 1.0],
    ),
    "infeasible": (parity(attrs.evolve(make_task(), evaluator={"func": "infeasible"}), last="FAIL"), [0.0, 1.0]),
    "gave up": (parity(make_task(), "mkdir ~/done", last="FAIL", untouched=False), [0.0]),
    "e0df059f": (parity("e0df059f", "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2"), [0.0, 1.0]),
    "b3d4a89c": (parity("b3d4a89c", last="FAIL"), [0.0, 1.0]),
}


# --- what an agent leaves


async def racing(host: Host) -> dict[str, Any]:
    """A process of the agent changes the file while it is looked at, without end."""
    async with await host.create(verifier("content", path="~/f")) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "counter", COUNTER)
        copies = await rewards(slot, False, False)
        in_place = [r.score for r in await rewards(slot, True, True, True)]
        return {"copies": copies, "in place": in_place}


async def thief(host: Host) -> list[Reward]:
    """A process of the agent answers in a command's stead: in place it can."""
    async with await host.create(make_task(command="sleep 1; echo no; : MARK")) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "thief", THIEF)
        return await rewards(slot, False, True)


async def thief_that_lives(host: Host) -> dict[str, Any]:
    """Even while all of the agent's processes run beside a command, they cannot look into it."""
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "thief", THIEF)
        async with open_copy(slot) as copy, copy.frozen():
            command = "until [ -s /tmp/thief.told ]; do sleep 0.05; done; sleep 0.5; echo no; : MARK"
            async with copy._living(Living.EVERYTHING, "the test"):
                with trio.fail_after(60):
                    printed = await command_in(copy, command)
            return {"printed": printed, "told": await command_in(copy, "cat /tmp/thief.told")}


async def command_in(copy: Copy, command: str) -> str:
    body = json.dumps({"command": command, "shell": True}).encode()
    reply = await copy.request("POST", "/execute", body, [("Content-Type", "application/json")])
    return str(reply.json()["output"])


async def what_lives(host: Host) -> dict[str, Any]:
    """What runs at each request: nothing for files and commands, the session for a hanging command and the screen."""
    ticking = "import os, time\nopen('/tmp/tick.ready', 'w').close()\nwhile True:\n    os.utime('/tmp/tick.ready')\n"
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "tick", ticking)
        ticks = "a=$(stat -c %.Y /tmp/tick.ready); sleep 1; b=$(stat -c %.Y /tmp/tick.ready); [ $a = $b ] && echo still"
        async with open_copy(slot) as copy, copy.frozen():
            found: dict[str, Any] = {"frozen": await command_in(copy, ticks), "quick": list(copy.thawed)}
            found["display"] = await command_in(copy, "xset q >/dev/null && echo there; " + ticks)
            found["hung"] = list(copy.thawed)
            async with copy._living(Living.EVERYTHING, "the test"):
                found["living"] = await command_in(copy, ticks)
            found["again"] = await command_in(copy, ticks)
            state = copy.desktop.cgroup
            found["apart"] = len(state.apart.pids())
        return found


async def planted_python(host: Host) -> list[list[Reward]]:
    """What the agent put where Python looks first answers for it: in place it does."""
    found = []
    for place in (".local/lib/python3.11/site-packages/usercustomize.py", "glob.py"):
        async with await host.create(make_task(command="python3 -c 'import glob; print(\"no\")' # MARK")) as slot:
            await slot.wait_valid()
            await write(slot, f"/home/user/{place}", "import os\nos.write(1, b'yes\\n')\nos._exit(0)\n")
            found.append(await rewards(slot, False, True))
    return found


# --- copies that cannot be graded


async def broken_copy(host: Host) -> dict[str, Any]:
    """A gate of the copy fails: no score, and nothing against the episode."""
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        faults.arm(fault("state_hash"))
        reward = await slot.verify(strict=False)
        again = await slot.verify(strict=False)
        return {"reward": reward, "again": again}


async def undumpable(host: Host) -> dict[str, Any]:
    """A program that CRIU does not dump: an interactive dash."""
    holder = "import os, pty, time\npid, fd = pty.fork()\nif pid == 0: os.execv('/bin/dash', ['dash', '-i'])\n"
    holder += "os.read(fd, 10)\nopen('/tmp/holder.ready', 'w').close()\ntime.sleep(1000)\n"
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "holder", holder)
        reward, in_place = await rewards(slot, False, True)
        try:
            await slot.verify()
        except CheckerError as e:
            return {"reward": reward, "in place": in_place, "error": e, "state": slot.state.value}
    raise AssertionError("the copy was graded")


async def crash_in_the_copy(host: Host) -> dict[str, Any]:
    """A program that crashes once it runs in a copy: no score, and the episode is as valid as before."""
    task = with_postconfig(make_task(command="echo yes"), "touch /tmp/now; sleep 2")
    waiting = "import os, time\nopen('/tmp/crasher.ready', 'w').close()\n"
    waiting += "while not os.path.exists('/tmp/now'): time.sleep(0.01)\nos.abort()\n"
    async with await host.create(task) as slot:
        await slot.wait_valid()
        await start_daemon(slot, "crasher", waiting)
        reward = await slot.verify(strict=False)
        await run(slot, "true")
        return {"reward": reward, "verdict": slot.episode.validity.verdict.value}


async def verified(slot: Slot) -> None:
    await slot.verify(strict=False)


async def bounded(host: Host) -> int:
    """More verifies at once than copies are allowed: they wait for their turn."""
    most = 0
    done = trio.Event()

    async def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, len(host.copies))
            await trio.sleep(0.01)

    async with (
        await host.create(make_task()) as one,
        await host.create(make_task()) as two,
        trio.open_nursery() as watching,
    ):
        watching.start_soon(watch)
        async with trio.open_nursery() as nursery:
            for slot in (one, two):
                nursery.start_soon(verified, slot)
        done.set()
    return most


async def cancelled(host: Host) -> dict[str, Any]:
    """A verify that is given up in the middle leaves no copy, and the desktop as it was."""

    def copies() -> list[Copy]:
        return [copy for copy in host.copies.values() if copy.id == slot.id]

    async with await host.create(make_task(command="sleep 1000")) as slot:
        await slot.wait_valid()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(verified, slot)
            with trio.fail_after(60):
                while not (copies() and copies()[0]._examiner):  # noqa: ASYNC110 - as an observer outside would
                    await trio.sleep(0.02)
            checkpoint = copies()[0].checkpoint.id
            nursery.cancel_scope.cancel()
        kept = checkpoint in {m.id for m in host.services.store.names()}
        return {"copies": copies(), "kept": kept, "runs on": await run(slot, "echo yes")}


SCENARIOS: Sequence[Scenario] = (
    twice,
    racing,
    thief,
    thief_that_lives,
    what_lives,
    planted_python,
    undumpable,
    crash_in_the_copy,
    cancelled,
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The verifiers of this module, as an installed package."""
    with packages_folder(tmp_path_factory) as folder:
        install(folder, "copy-checks", {"copy_checks": "copy_checks_module"}, {"copy_checks_module.py": CHECKS})
        yield


@pytest.fixture(scope="module")
def played(packages: None) -> Played:
    scenarios = {x.__name__: x for x in SCENARIOS} | {name: scenario for name, (scenario, _) in PARITY.items()}
    hosts: Sequence[tuple[Mapping[str, Scenario], Mapping[str, Any]]] = [
        (scenarios, {}),
        ({"full_host": full_host}, {"max_slots": 1}),
        ({"as_configured": as_configured}, {"verify_in_place": True}),
        ({"bounded": bounded}, {"max_copies": 1}),
    ]
    return play_on_hosts(hosts)


@pytest.fixture(scope="module")
def alone(packages: None) -> Played:
    """One that others would disturb: the fault is for the next desktop of the host that is restored."""
    return play({"broken_copy": broken_copy}, interposer=faults)


def test_two_verifies_give_one_score_and_leave_nothing(played: Played) -> None:
    found = played["twice"]
    assert [r.score for r in found["untouched"]] == [0.0, 0.0]
    assert [r.score for r in found["done"]] == [1.0, 1.0]
    assert not {"left", "after"} & set(found["listing"].split())
    assert found["in place"].score == 1.0
    assert {"left", "after"} <= set(found["after"].split())
    assert found["same"] and found["copies"] == []
    for reward in found["done"]:
        graded = reward.provenance["graded"]
        assert graded["in_place"] is False and graded["thawed"] == []
        assert graded["checkpoint"] not in found["kept"]
    assert len({r.provenance["graded"]["checkpoint"] for r in found["done"]}) == 2


def test_a_reward_says_what_it_rests_on(played: Played) -> None:
    """And `drums episodes show` prints it all."""
    reward = played["e0df059f"][1][0]
    found = reward.provenance
    assert len(found["task_sha256"]) == len(found["image_digest"]) == 64 and found["checkpoint"] and found["drums"]
    assert found["graded"]["checkpoint"] and set(found["steps"]) == {"execute"}
    plugins = [found["checker"]["plugin"], *found["gates"], *found["steps"].values()]
    assert all(plugin["distribution"] and plugin["version"] for plugin in plugins)
    checker = found["checker"]
    assert "checkout" in checker and checker["desktop_env"] and all(len(x) == 64 for x in checker["files"].values())
    command = [sys.executable, "-m", "drums", "episodes", "show", found["episode"]]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"}, check=True)
    wanted = [found["task_sha256"], found["image_digest"], found["graded"]["checkpoint"], *checker["files"].values()]
    assert not [value for value in wanted if value not in done.stdout]


@pytest.mark.parametrize("name", PARITY)
def test_both_ways_give_one_score(played: Played, name: str) -> None:
    for found, wanted in zip(played[name], PARITY[name][1], strict=True):
        assert [r.score for r in found] == [wanted] * 2, [r.checker_error for r in found]
        assert all(r.valid for r in found)


def test_what_changes_meanwhile_is_read_once(played: Played) -> None:
    found = played["racing"]
    assert [r.score in (0.0, 1.0) for r in found["copies"]] == [True, True]
    assert 0.25 in found["in place"], "the fault shows in place"


def test_no_process_of_the_agent_answers_for_a_command(played: Played) -> None:
    copy, in_place = played["thief"]
    assert copy.score == 0.0, copy
    assert in_place.score == 1.0, "the forgery works in place"


def test_no_process_of_the_agent_looks_into_a_command(played: Played) -> None:
    found = played["thief_that_lives"]
    assert found["printed"] == "no\n"
    lines = found["told"].splitlines()
    assert "pidfd_getfd: Operation not permitted" in lines
    assert not [line for line in lines if line.endswith(("taken", "opened"))], lines


def test_as_little_lives_as_a_request_needs(played: Played) -> None:
    found = played["what_lives"]
    assert found["frozen"] == "still\n" and found["quick"] == []
    assert found["display"] == "there\nstill\n"
    assert [x["living"] for x in found["hung"]] == ["session"]
    assert found["living"] == "" and found["again"] == "still\n"
    assert found["apart"] >= 1


def test_python_loads_nothing_of_the_agents(played: Played) -> None:
    for copy, in_place in played["planted_python"]:
        assert copy.score == 0.0, copy
        assert in_place.score == 1.0, "the forgery works in place"


def test_what_cannot_be_copied_is_not_scored(played: Played) -> None:
    found = played["undumpable"]
    reward = found["reward"]
    assert (reward.score, reward.valid, reward.checker_error_cause) == (None, True, "agent")
    assert "in_place=True" in reward.checker_error and "cannot be copied" in reward.checker_error
    assert reward.provenance["checker_error_evidence"]
    assert found["in place"].score == 0.0 and found["state"] == "up"
    assert found["error"].reward.score is None


def test_a_crash_in_the_copy_is_not_the_episodes(played: Played) -> None:
    found = played["crash_in_the_copy"]
    reward = found["reward"]
    assert (reward.score, reward.valid, reward.checker_error_cause) == (None, True, Cause.AGENT)
    assert "no_app_crash" in reward.checker_error
    assert found["verdict"] == "valid"


def test_a_copy_that_fails_a_gate_is_not_scored(alone: Played) -> None:
    found = alone["broken_copy"]
    reward = found["reward"]
    assert (reward.score, reward.valid, reward.checker_error_cause) == (None, True, "infrastructure")
    assert "state_hash" in reward.checker_error
    assert found["again"].score == 0.0 and found["again"].valid


def test_a_copy_takes_no_slot(played: Played) -> None:
    full, reward = played["full_host"]
    assert full and reward.score == 0.0


def test_a_verify_given_up_leaves_no_copy(played: Played) -> None:
    assert played["cancelled"] == {"copies": [], "kept": False, "runs on": "yes\n"}


def test_the_host_decides_and_bounds(played: Played) -> None:
    assert played["as_configured"] == [True, True, False]
    assert played["bounded"] == 1


def test_nothing_is_left(played: Played, alone: Played) -> None:
    assert not played.left and not alone.left
    assert [name for name in cgroup_names() if name.startswith(f"{WORKER_PREFIX}{os.getpid()}-")] == []
