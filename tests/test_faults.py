"""Each gate sees a real fault, names it, and leaves the other gates alone; and sees none where there is none.

The faults are made by processes of their own, in the kernel or on disk (`drums_core.testing.faults`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from desktops import Outcome, Played, Scenario, judged, make_task, outcome, play_on_hosts, run
from desktops import start_daemon as start
from requires import requires

from drums_core.host import Host
from drums_core.model import Limits
from drums_core.slot import Slot
from drums_core.testing.faults import FAULTS, Fault, FaultInjector, fault
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

pytestmark = requires("root", "criu")

HOLDER = """
import fcntl, mmap, os, struct, time
os.makedirs("/home/user/locks")
def held(name):
    fd = os.open("/home/user/locks/" + name, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 4096)
    return fd
fcntl.flock(held("flock"), fcntl.LOCK_EX)
fcntl.fcntl(held("ofd"), 37, struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, 0, 10, 20, 0))
fd = held("posix")
shared = mmap.mmap(fd, 4096)
fcntl.lockf(fd, fcntl.LOCK_EX, 100, 100)
open("/tmp/holder.ready", "w").close()
time.sleep(3600)
"""
OF_LOCKS = [name for name, x in FAULTS.items() if x.needs.startswith("a process that holds")]
OF_OTHERS = [name for name, x in FAULTS.items() if x.needs == "another desktop"]
ON_TIGHT_HOST = ["guest_ready", "no_oom_kill"]
PLAIN = [name for name in FAULTS if name not in {*OF_LOCKS, *OF_OTHERS, *ON_TIGHT_HOST}]
TIGHT = {"ready_limit_s": 3.0, "limits": Limits(cpus=2.0, memory_bytes=400 << 20, swap_bytes=0, pids=512)}

faults = FaultInjector()


def events_of(x: Fault) -> list[str]:
    """The event gates that a fault is about."""
    return [gate for gate in x.gates if gate in EVENT_GATES]


def planted(name: str) -> Scenario:
    """A created desktop with one fault."""

    async def scenario(host: Host) -> Outcome:
        armed = faults.arm(fault(name))
        async with await host.create() as slot:
            found = await judged(slot, until=events_of(armed.fault))
            assert armed.planted and armed.slot == slot.id
            return found

    return scenario


def planted_beside_another(name: str) -> Scenario:
    async def scenario(host: Host) -> Outcome:
        async with await host.create() as other:
            assert other.desktop is not None
            faults.arm(fault(name), other_pid1=other.desktop.pid1)
            async with await host.create() as slot:
                found = await judged(slot)
                assert (await judged(other)).verdict == "valid"
                return found

    return scenario


async def locked_children(host: Host) -> dict[str, Outcome]:
    """A desktop with locks is forked; each child but one gets a fault."""
    async with await host.create() as parent:
        await start(parent, "holder", HOLDER)
        armed = [faults.arm(fault(name)) for name in OF_LOCKS]
        children = await parent.fork(len(OF_LOCKS) + 1)
        found: dict[str, Outcome] = {}

        async def judge(child: Slot) -> None:
            name = next((x.fault.name for x in armed if x.slot == child.id and x.planted), "none")
            found[name] = await judged(child)
            await child.close()

        async with trio.open_nursery() as nursery:
            for child in children:
                nursery.start_soon(judge, child)
        found["parent"] = await judged(parent)
        return found


async def no_fault(host: Host) -> Outcome:
    async with await host.create() as slot:
        return await judged(slot)


async def fault_then_reset(host: Host) -> list[Outcome]:
    faults.arm(fault("state_hash"))
    async with await host.create() as slot:
        first = await judged(slot)
        await slot.reset()
        second = await judged(slot)
        armed = faults.arm(fault("mount_table"), slot=slot.id)
        await slot.reset()
        third = await judged(slot)
        assert armed.planted
        return [first, second, third]


# --- deaths that the agent brings about


def crash(script: str, *, wait: bool = True) -> Scenario:
    """The agent runs a script; the outcomes before and after."""

    async def scenario(host: Host) -> list[Outcome]:
        async with await host.create() as slot:
            before = await judged(slot) if wait else outcome(slot)
            await slot.execute(script, shell=True)
            return [before, await judged(slot)]

    return scenario


async def crash_before_verify(host: Host) -> tuple[Any, Outcome]:
    task = make_task()
    async with await host.create(task) as slot:
        await judged(slot)
        await run(slot, "mkdir ~/done")
        await slot.execute("setsid python3 -c 'import os; os.abort()' </dev/null >/dev/null 2>&1 &", shell=True)
        reward = await slot.verify(strict=False)
        return reward, outcome(slot)


async def crash_while_checked(host: Host) -> Any:
    """The checker's own command makes a process of the desktop crash: the last moment that counts."""
    task = make_task(command="python3 -c 'import os; os.abort()'; mkdir -p ~/done; echo yes")
    async with await host.create(task) as slot:
        return await slot.verify(strict=False, in_place=True)


async def agent_fills_memory(host: Host) -> dict[str, Outcome]:
    async with await host.create() as other, await host.create() as slot:
        before = await judged(slot)
        hog = "python3 -c \"x = []\nwhile True: x.append(b'x' * (8 << 20))\""
        result = await slot.execute(hog, shell=True, timeout_s=60)
        after = await judged(slot, until=["no_oom_kill"], returncode=result.returncode)
        return {"before": before, "after": after, "other": await judged(other)}


def quarantined(moment: str) -> Scenario:
    async def scenario(host: Host) -> list[Outcome]:
        async with await host.create() as slot:
            if moment == "during":
                await trio.sleep(2.5)
            if moment == "after":
                await judged(slot)
            before = outcome(slot)
            slot.quarantine("the page is broken")
            at_once = outcome(slot)
            await trio.sleep(0 if moment == "after" else 6)
            return [before, at_once, outcome(slot)]

    return scenario


CRASHES = {
    "SIGSEGV": "python3 -c 'import ctypes; ctypes.string_at(0)'",
    "SIGABRT": "python3 -c 'import os; os.abort()'",
    "SIGILL": "python3 -c 'import os; os.kill(os.getpid(), 4)'",
    "SIGSYS": "python3 -c 'import os; os.kill(os.getpid(), 31)'",
    "grandchild": "sh -c 'python3 -c \"import os; os.fork() or os.fork() or os.abort(); os.wait()\"; true'; sleep 0.3",
}
HARMLESS = {
    "SIGKILL": "sleep 100 & kill -9 $!; wait",
    "SIGTERM": "sleep 100 & kill $!; wait",
    "exit-1": "python3 -c 'raise SystemExit(1)'",
    "exit-139": "sh -c 'exit 139'",
}


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    scenarios: dict[str, Scenario] = {"locks": locked_children, "none": no_fault, "reset": fault_then_reset}
    scenarios |= {name: planted(name) for name in PLAIN}
    scenarios |= {name: planted_beside_another(name) for name in OF_OTHERS}
    scenarios |= {f"crash {name}": crash(script) for name, script in CRASHES.items()}
    scenarios |= {f"crash {name}": crash(script) for name, script in HARMLESS.items()}
    scenarios["crash early"] = crash(CRASHES["SIGSEGV"], wait=False)
    scenarios |= {f"quarantine {moment}": quarantined(moment) for moment in ("before", "during", "after")}
    scenarios |= {"crash before verify": crash_before_verify, "crash while checked": crash_while_checked}
    tight: dict[str, Scenario] = {name: planted(name) for name in ON_TIGHT_HOST}
    tight["agent fills memory"] = agent_fills_memory
    yield play_on_hosts([(scenarios, {}), (tight, TIGHT)], interposer=faults)


def assert_only(found: Outcome, *gates: str, verdict: str = "invalid") -> None:
    """Exactly these gates failed, all others passed, and the verdict says so."""
    assert found.failing() == set(gates) == set(found.bad_gates), found.reasons
    assert found.passing() >= set(SPECIFIED_GATES) - set(gates), found.lines
    assert found.verdict == verdict
    assert len(found.reasons) >= len(gates)


# What the report's line of each fault has to say: words of what was seen, and of what should have been.
WORDS = {
    "lock_applied": ["1 file locks are held, 0 were", "FLOCK READ 0..EOF"],
    "lock_pre_resume": ["1 file locks are held, 0 were", "FLOCK READ 0..EOF"],
    "cgroup": ["memory_bytes is 4294963200, expected 4294967296"],
    "cgroup:cpu": ["cpus is 2.001, expected 2.0"],
    "cgroup:moved-out": ["1 processes of the desktop are not in"],
    "cgroup:stranger": ["1 strangers are in"],
    "cgroup:host-process": ["1 strangers are in"],
    "init_identity": ["1920x1081", "expected", "1920x1080"],
    "mount_table": ["/mnt", "tmpfs"],
    "mount_table:read-only": ["/dev/shm", "ro", "rw"],
    "netns": ["10.99.0.1"],
    "netns:route": ["10.99.0.1"],
    "netns:rule": ["4711"],
    "netns:table": ["drums_fault"],
    "netns:mtu": ["1400", "65536"],
    "guest_ready": ["did not answer within 3 s"],
    "state_hash": [".bash_logout", "size"],
    "state_hash:flip": [".bash_logout", "hash"],
    "state_hash:owner": [".bash_logout", "uid"],
    "state_hash:add": ["planted"],
    "isolation": ["shares the mnt namespace of the host", "shares the net namespace of the host"],
    "alive_after_resume": ["1 of ", "restored processes no longer run", "'openbox'"],
    "alive_after_resume:late": ["restored processes no longer run", "'dbus-daemon'"],
    "no_oom_kill": ["out-of-memory killer", "1 kills so far, expected 0"],
    "no_app_crash": ["'openbox'", "died of SIG"],
}


@pytest.mark.parametrize("name", [*PLAIN, *OF_OTHERS, *ON_TIGHT_HOST])
def test_a_fault_fails_its_gate_alone(played: Played, name: str) -> None:
    expected = fault(name)
    found: Outcome = played[name]
    assert_only(found, *expected.gates)
    assert set(found.causes) == {expected.cause}
    line = found.lines[expected.gates[0]]
    assert line["cause"] == expected.cause
    for words in WORDS.get(name, []):
        assert words in line["reason"], line
    assert any(reason.startswith(f"{expected.gates[0]}: ") for reason in found.reasons)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_shared_namespace_names_the_other_desktop(played: Played, name: str) -> None:
    assert "namespace of desktop 'd-" in played[name].lines["isolation"]["reason"]


def test_a_desktop_without_fault_is_valid(played: Played) -> None:
    assert_only(played["none"], verdict="valid")


@pytest.mark.parametrize("name", OF_LOCKS)
def test_a_lock_fault_fails_the_lock_gates_alone(played: Played, name: str) -> None:
    expected = fault(name)
    found: Outcome = played["locks"][name]
    assert_only(found, *expected.gates)
    reason = found.lines[expected.gates[0]]["reason"]
    kind = expected.arguments["kind"]
    where = {"FLOCK": "0..EOF", "OFDLCK": "10..29", "POSIX": "100..199"}[kind]
    assert f" missing: {kind} WRITE {where} on '/home/user/locks/" in reason, reason
    assert ("1 that the checkpoint did not hold: FLOCK READ" in reason) is (expected.arguments["how"] == "weaken")


def test_locks_without_fault_are_valid(played: Played) -> None:
    assert_only(played["locks"]["none"], verdict="valid")
    assert_only(played["locks"]["parent"], verdict="valid")


def test_a_reset_begins_a_new_judged_episode(played: Played) -> None:
    first, second, third = played["reset"]
    assert_only(first, "state_hash")
    assert_only(second, verdict="valid")
    assert_only(third, "mount_table")


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_of_the_agents_is_added(played: Played, name: str) -> None:
    before, after = played[f"crash {name}"]
    assert_only(before, verdict="valid")
    assert "no_app_crash" not in before.lines
    assert_only(after, "no_app_crash")
    line = after.lines["no_app_crash"]
    assert line["cause"] == "agent" and set(after.causes) == {"agent"}
    assert f"died of {name if name.startswith('SIG') else 'SIGABRT'}" in line["reason"]
    # On a busy host a process may be gone before its pid inside and its new name could be read.
    assert line["observed"]["command"] in ("python3", "sh"), line
    assert line["observed"]["pid"] > 1 or "pid inside unknown" in line["reason"]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_crash_is_not_added(played: Played, name: str) -> None:
    for found in played[f"crash {name}"]:
        assert_only(found, verdict="valid")


def test_a_crash_in_the_first_seconds(played: Played) -> None:
    before, after = played["crash early"]
    assert before.verdict == "pending"
    assert_only(after, "no_app_crash")


def test_a_crash_just_before_verify_counts(played: Played) -> None:
    reward, found = played["crash before verify"]
    assert reward.score == 1.0 and not reward.valid and reward.bad_gates == ("no_app_crash",), reward
    assert_only(found, "no_app_crash")


def test_a_crash_while_the_checker_looks_counts(played: Played) -> None:
    reward = played["crash while checked"]
    assert reward.score == 1.0 and reward.bad_gates == ("no_app_crash",), reward


def test_memory_that_the_agent_fills(played: Played) -> None:
    found = played["agent fills memory"]
    assert_only(found["before"], verdict="valid")
    assert found["after"].facts["returncode"] in (-9, 137)
    assert_only(found["after"], "no_oom_kill")
    assert found["after"].causes == ["agent"]
    assert_only(found["other"], verdict="valid")


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_quarantine_is_added(played: Played, moment: str) -> None:
    before, at_once, later = played[f"quarantine {moment}"]
    assert before.verdict == ("valid" if moment == "after" else "pending")
    for found in (at_once, later):
        assert found.verdict == "invalid" and found.bad_gates == {"not_quarantined"}
        assert found.reasons == ["not_quarantined: the desktop was quarantined by its user: the page is broken"]
    assert_only(later, "not_quarantined")


def test_each_gate_has_a_fault() -> None:
    assert {*SPECIFIED_GATES, *EVENT_GATES} - {"not_quarantined"} <= {
        gate for name in FAULTS for gate in fault(name).gates
    }
    assert {*SPECIFIED_GATES, *EVENT_GATES} - {"not_quarantined"} <= set(FAULTS)
    with pytest.raises(LookupError, match="no fault 'x'"):
        fault("x")


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
