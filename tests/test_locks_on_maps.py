"""File locks on mapped files, which CRIU loses: drums has put them back before the desktop's first instruction.

POSIX locks go when their process closes any descriptor of the file, as CRIU does after mapping one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from desktops import Outcome, Played, judged, play, run, start_daemon
from requires import requires

from drums.errors import RestoreError
from drums_core.host import Host
from drums_core.slot import Slot
from drums_core.slot_state import SlotState
from drums_core.testing.faults import Fault, FaultInjector, Point
from drums_core.testing.faults.model import PLANT
from drums_core.verdict import SPECIFIED_GATES

pytestmark = requires("root", "criu")

HOLDER = """
import fcntl, mmap, os, struct, time
top = "/home/user/locks/"
os.makedirs(top)

def held(name):
    fd = os.open(top + name, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 8192)
    return fd

def ofd(fd, kind, start, length):
    fcntl.fcntl(fd, 37, struct.pack("hhxxxxqqixxxx", kind, 0, start, length, 0))

maps = []
fd = held("shared")
maps.append(mmap.mmap(fd, 8192, mmap.MAP_SHARED))
fcntl.lockf(fd, fcntl.LOCK_EX, 100, 100)
fcntl.lockf(fd, fcntl.LOCK_SH, 1, 4096)

fd = held("private")
maps.append(mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ))
fcntl.lockf(fd, fcntl.LOCK_EX)

fd = held("gone")
maps.append(mmap.mmap(fd, 4096, mmap.MAP_SHARED))
fcntl.lockf(fd, fcntl.LOCK_EX, 10)
os.unlink(top + "gone")

fd = held("ofd")
maps.append(mmap.mmap(fd, 4096, mmap.MAP_SHARED))
ofd(fd, fcntl.F_WRLCK, 10, 20)
ofd(fd, fcntl.F_RDLCK, 50, 0)

fd = held("flock")
maps.append(mmap.mmap(fd, 4096, mmap.MAP_SHARED))
fcntl.flock(fd, fcntl.LOCK_EX)

fd = held("unmapped")
fcntl.lockf(fd, fcntl.LOCK_EX, 7, 3)

if os.fork() == 0:  # the neighbouring range of the same mapped file, in another process
    fd = os.open(top + "shared", os.O_RDWR)
    maps.append(mmap.mmap(fd, 8192, mmap.MAP_SHARED))
    fcntl.lockf(fd, fcntl.LOCK_EX, 50, 200)
    open("/tmp/holder.ready", "w").close()
time.sleep(3600)
"""
# What a stranger gets who asks for each of the ranges; True is refused.
PROBE = r"""
import fcntl, json, os
def refused(name, operation, *where):
    fd = os.open("/home/user/locks/" + name, os.O_RDWR)
    try:
        fcntl.lockf(fd, operation | fcntl.LOCK_NB, *where) if where else fcntl.flock(fd, operation | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
EX, SH = fcntl.LOCK_EX, fcntl.LOCK_SH
print(json.dumps({
    "shared 100..199": refused("shared", SH, 100, 100),
    "shared 200..249, the other process": refused("shared", SH, 50, 200),
    "shared 4096, exclusively": refused("shared", EX, 1, 4096),
    "shared 4096, shared": refused("shared", SH, 1, 4096),
    "shared 250..": refused("shared", EX, 1000, 250),
    "private": refused("private", SH, 0, 0),
    "ofd 10..29": refused("ofd", SH, 20, 10),
    "ofd 50.., exclusively": refused("ofd", EX, 0, 50),
    "ofd 30..49": refused("ofd", EX, 20, 30),
    "flock": refused("flock", SH),
    "unmapped": refused("unmapped", SH, 7, 3),
}))
"""
FREE = {"shared 4096, shared", "shared 250..", "ofd 30..49"}

faults = FaultInjector()
LOCKS = PLANT / "locks.py"
CONFLICT = Fault("conflict", (), Point.REBUILT, "a stranger has what is to be put back", "take_posix_lock", LOCKS)
WITHHELD = Fault(
    "withheld",
    ("lock_applied", "lock_pre_resume"),
    Point.RESTORED,
    "a POSIX lock is dropped",
    "change_lock",
    LOCKS,
    {"kind": "POSIX", "how": "drop", "name": "shared"},
)


def kernel_locks(slot: Slot) -> list[str]:
    """Every lock of the desktop as the kernel shows it on the host, without gate or evidence code."""
    assert slot.desktop is not None
    found = []
    for pid in slot.desktop.cgroup.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that ended meanwhile held none
            inner = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1]
            for fd in os.listdir(f"/proc/{pid}/fdinfo"):
                lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
                for words in [x.split() for x in lines if x.startswith("lock:")]:
                    name = os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("/home/user/locks/")
                    found.append(f"{inner} {fd} {name} {words[2]} {words[4]} {words[-2]}..{words[-1]}")
    return sorted(found)


async def forked(host: Host) -> dict[str, Any]:
    async with await host.create() as parent:
        await start_daemon(parent, "holder", HOLDER)
        before = kernel_locks(parent)
        children = await parent.fork(3)
        found: dict[str, Any] = {"before": before, "after": kernel_locks(parent)}
        found["children"] = [kernel_locks(child) for child in children]
        found["probes"] = [json.loads(await run(x, f"python3 - <<'E'\n{PROBE}\nE")) for x in [parent, *children]]
        (grandchild,) = await children[0].fork(1)
        found["grandchild"] = kernel_locks(grandchild)
        found["probes"].append(json.loads(await run(grandchild, f"python3 - <<'E'\n{PROBE}\nE")))
        found["outcomes"] = [await judged(x) for x in [parent, *children, grandchild]]
        await parent.save("drums-test-locks-on-maps")
        try:
            async with await host.create(checkpoint="drums-test-locks-on-maps") as again:
                found["saved"] = kernel_locks(again)
                found["outcomes"].append(await judged(again))
        finally:
            for slot in [grandchild, *children]:
                await slot.close()
            await host.delete_checkpoint("drums-test-locks-on-maps")
        return found


async def withheld(host: Host) -> dict[str, Any]:
    """Children whose repaired lock is taken away again, one that a stranger's lock keeps from being repaired."""
    async with await host.create() as parent:
        await start_daemon(parent, "holder", HOLDER)
        armed = faults.arm(WITHHELD)
        children = await parent.fork(2)
        async with trio.open_nursery() as nursery:
            outcomes: dict[str, Outcome] = {}

            async def judge(child: Slot) -> None:
                outcomes["withheld" if child.id == armed.slot else "kept"] = await judged(child)

            for child in children:
                nursery.start_soon(judge, child)
        known = set(host.slots)
        faults.arm(CONFLICT)
        with pytest.raises(RestoreError) as caught:
            await parent.fork(1)
        found: dict[str, Any] = {"outcomes": outcomes, "conflict": caught.value, "new slots": set(host.slots) - known}
        (child,) = await parent.fork(1)
        found["afterwards"] = await judged(child)
        found["parent"] = parent.state
        for slot in [*children, child]:
            await slot.close()
        return found


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    yield play({"forked": forked, "withheld": withheld}, interposer=faults)


def test_the_desktop_holds_what_the_test_is_about(played: Played) -> None:
    before = played["forked"]["before"]
    assert len({x.split(" ", 2)[2] for x in before}) == 9, before
    for kind in ("POSIX", "OFDLCK", "FLOCK"):
        assert any(f" {kind} " in x for x in before), before


def test_a_dump_changes_no_lock_of_the_source(played: Played) -> None:
    assert played["forked"]["after"] == played["forked"]["before"]


def test_children_hold_every_lock(played: Played) -> None:
    found = played["forked"]
    for locks in [*found["children"], found["grandchild"], found["saved"]]:
        assert locks == found["before"]


def test_the_locks_work(played: Played) -> None:
    for probe in played["forked"]["probes"]:
        assert {what for what, refused in probe.items() if not refused} == FREE


def test_all_are_valid(played: Played) -> None:
    for found in played["forked"]["outcomes"]:
        assert found.verdict == "valid" and found.passing() >= set(SPECIFIED_GATES), found.reasons


def test_a_withheld_lock_fails_the_lock_gates(played: Played) -> None:
    found = played["withheld"]["outcomes"]
    assert found["kept"].verdict == "valid", found["kept"].reasons
    bad = found["withheld"]
    assert bad.failing() == {"lock_applied", "lock_pre_resume"} == set(WITHHELD.gates)
    assert bad.passing() == set(SPECIFIED_GATES) - set(WITHHELD.gates)
    assert bad.verdict == "invalid" and bad.causes == ["infrastructure"]
    assert "missing: POSIX " in bad.lines["lock_applied"]["reason"]


def test_a_lock_that_cannot_be_put_back_ends_the_restore(played: Played) -> None:
    found = played["withheld"]
    message = str(found["conflict"])
    assert "locks that CRIU lost could not be put back" in message and "refused" in message, message
    assert found["new slots"] == set()
    assert found["parent"] is SlotState.UP and found["afterwards"].verdict == "valid"


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
