"""A desktop that forks without end: its messages cost no other desktop its verdict, and hide no crash."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from desktops import judged, make_task, outcome, play, run
from requires import requires

from drums_core.evidence.processes import read_processes
from drums_core.host import Host
from drums_core.model import DesktopEvent, ProcessDied, WatchLost
from drums_core.watcher import _EVENT, _EVENT_OFFSET, _MESSAGE_BYTES, ProcessWatcher

STORM = "setsid sh -c 'while :; do (:); done' </dev/null >/dev/null 2>&1 &\n"
STORM_S = 6.0
STEP_LIMIT_S = 5.0
# Long enough that its name can be read; the name is in no other program of the desktop.
CRASHER = "cp /bin/sh /tmp/{name}; setsid /tmp/{name} -c 'sleep 1; kill -SEGV $$' </dev/null >/dev/null 2>&1 &\n"


async def _storm(host: Host) -> Any:
    async with await host.create(make_task()) as one, await host.create(make_task()) as other:
        assert (await judged(other)).verdict == "valid"
        latencies: list[float] = []
        await run(one, STORM + STORM)
        began = time.monotonic()
        while time.monotonic() - began < STORM_S:
            for action in ("step", "execute"):
                started = time.monotonic()
                if action == "step":
                    await other.step("pass")
                else:
                    await run(other, "true")
                latencies.append(time.monotonic() - started)
            await trio.sleep(0.1)
        before = outcome(other, worst=max(latencies), steps=len(latencies))
        await run(other, CRASHER.format(name="planted"))
        await run(one, CRASHER.format(name="stormy"))
        await trio.sleep(3.0)
        return before, outcome(one), outcome(other)


@requires("root", "criu")
def test_a_storm_is_its_own_desktops_alone() -> None:
    """The neighbour stays valid and answers meanwhile; the crashes of both are seen."""
    played = play({"storm": _storm})
    before, one, other = played["storm"]
    assert before.verdict == "valid", before.reasons
    assert before.facts["worst"] < STEP_LIMIT_S and before.facts["steps"] >= 4, before.facts
    assert other.failing() == {"no_app_crash"}, other.reasons
    assert "planted" in " ".join(other.reasons) and "SIGSEGV" in " ".join(other.reasons)
    assert "no_app_crash" in one.failing() and "SIGSEGV" in " ".join(one.reasons), one.reasons
    assert not any("dropped" in reason for reason in [*one.reasons, *other.reasons])
    assert played.left == []


# --- the watcher alone


@pytest.fixture
def events() -> list[DesktopEvent]:
    return []


@pytest.fixture
def watcher(events: list[DesktopEvent]) -> Iterator[ProcessWatcher]:
    made = ProcessWatcher(lambda _, event: events.append(event), lambda _: True, lambda _: None)
    made.open()
    yield made
    made.close()


@contextmanager
def _running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A program that waits for a line; it and what it forked are ended."""
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def _forking(watcher: ProcessWatcher) -> Iterator[int]:
    with _running("/bin/sh", "-c", "read go || exit; echo on; while :; do (:); done") as process:
        watcher.track("s", read_processes([process.pid]))
        assert process.stdin and process.stdout
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "on\n"
        yield process.pid


def _queued(s: socket.socket) -> list[tuple[int, int]]:
    """What, and which numbers, of every queued message."""
    found: list[tuple[int, list[int]]] = []
    while True:
        try:
            what, _, *numbers = _EVENT(s.recv(_MESSAGE_BYTES), _EVENT_OFFSET)
        except BlockingIOError:
            return [(what, pid) for what, pids in found for pid in pids]
        found.append((what, numbers))


CHANGES = (
    "import ctypes, os, sys, threading\nos.setgid(65534); os.setuid(65534); os.setsid()\n"
    "name = lambda text: ctypes.CDLL(None).prctl(15, text, 0, 0, 0)\n"
    "name(b'first'); t = threading.Thread(target=name, args=(b'second',)); t.start(); t.join()\n"
)


@requires("root")
def test_only_lives_and_deaths_are_queued(watcher: ProcessWatcher) -> None:
    """Changes of user, group, session and name give no message, that of a first thread's name one elsewhere."""
    process = subprocess.Popen([sys.executable, "-I", "-c", CHANGES])
    assert process.wait() == 0
    time.sleep(0.1)
    assert watcher._socket and watcher._names_socket
    lives, names = _queued(watcher._socket), _queued(watcher._names_socket)
    assert {what for what, pid in lives if pid == process.pid} == {0x1, 0x2, 0x80000000}  # fork, exec, exit
    assert {what for what, _ in lives} <= {0, 0x1, 0x2, 0x40000000, 0x80000000}
    assert [what for what, pid in names if pid == process.pid] == [0x200] * 2  # its pid as the thread's, the process's


@requires("root")
def test_draining_ends_under_a_storm(watcher: ProcessWatcher, events: list[DesktopEvent]) -> None:
    """However much is queued meanwhile, and what was queued before the call has been handled."""
    with _forking(watcher):
        time.sleep(0.5)
        with _running("/bin/sh", "-c", "read x || exit; kill -SEGV $$") as crashing:
            watcher.drain()
            watcher.track("other", read_processes([crashing.pid]))
            assert crashing.stdin
            crashing.stdin.write("go\n")
            crashing.stdin.flush()
            os.waitid(os.P_PID, crashing.pid, os.WEXITED | os.WNOWAIT)
            time.sleep(0.1)  # the parent is woken just before the message is queued
            began = time.monotonic()
            watcher.drain()
            assert time.monotonic() - began < 2.0
            assert [e.command for e in events if isinstance(e, ProcessDied) and e.signal == 11] in (["sh"], ["dash"])
        assert not any(isinstance(e, WatchLost) for e in events)
    ordinary = sum(isinstance(e, ProcessDied) and e.signal == 0 for e in events)
    assert 0 < ordinary < 300  # a hundred at once and a hundred a second


@requires("root")
def test_other_tasks_have_their_turn_under_a_storm(watcher: ProcessWatcher) -> None:
    """The loop goes on while the watcher reads."""

    async def main() -> int:
        turns = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            with trio.move_on_after(1.0):
                while True:
                    await trio.sleep(0.001)
                    turns += 1
            nursery.cancel_scope.cancel()
        return turns

    with _forking(watcher):
        assert trio.run(main) > 20


@requires("root")
def test_an_overflow_names_the_desktop_that_forks(watcher: ProcessWatcher, events: list[DesktopEvent]) -> None:
    """The loss is every desktop's; its reason tells whose forks they were."""
    assert watcher._socket
    with _forking(watcher):
        time.sleep(0.2)
        watcher.drain()
        watcher._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        time.sleep(0.2)
        watcher.drain()
    lost = [e for e in events if isinstance(e, WatchLost)]
    assert lost and all("desktop s's" in e.reason for e in lost)


@requires("root")
def test_who_is_blamed_for_an_overflow() -> None:
    """The agent of the desktop that made most forks, for its own loss; nobody where none acted, or others did it."""
    seen: list[tuple[str, DesktopEvent]] = []
    acting = {"s"}
    watcher = ProcessWatcher(lambda slot, event: seen.append((slot, event)), acting.__contains__, lambda _: None)
    watcher.open()
    try:
        with _running("/bin/sh", "-c", "read go") as quiet, _forking(watcher):
            watcher.track("quiet", read_processes([quiet.pid]))
            acting.add("quiet")
            for who in ("agent", "nobody"):
                seen.clear()
                # Until it is by far the most on this host, whatever else runs here.
                while _recent(watcher)[0] < 500 or _recent(watcher)[0] * 2 <= _recent(watcher)[1]:
                    time.sleep(0.05)
                    watcher.drain()
                watcher._lost()
                lost = {slot: event.by_agent for slot, event in seen if isinstance(event, WatchLost)}
                assert lost == {"s": who == "agent", "quiet": False}
                acting.discard("s")
            acting.add("s")
            watcher._forks = 1 << 20  # a stranger's on the host
            seen.clear()
            watcher._lost()
            assert not any(event.by_agent for _, event in seen if isinstance(event, WatchLost))
    finally:
        watcher.close()


def _recent(watcher: ProcessWatcher) -> tuple[int, int]:
    """The late forks of desktop `s`, and those of the whole host."""
    share = watcher._share("s")
    return share.forks + share.forks_before, watcher._forks + watcher._forks_before


@requires("root")
def test_names_that_overflow_cost_nothing_else(watcher: ProcessWatcher, events: list[DesktopEvent]) -> None:
    """A process that renames itself without end loses no death, and no other task its turn."""
    code = (
        "import ctypes, os, resource, signal, sys\nsys.stdin.readline()\nf = ctypes.CDLL(None).prctl\n"
        "for _ in range(20000): f(15, b'one of many', 0, 0, 0)\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    with _running(sys.executable, "-I", "-c", code) as process:
        watcher.track("s", read_processes([process.pid]))
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        time.sleep(0.1)
        watcher.drain()
    assert [(type(e), getattr(e, "command", "")) for e in events] == [(ProcessDied, "one of many")]
