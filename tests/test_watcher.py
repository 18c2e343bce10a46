"""Deaths as the kernel's process connector tells them, of real processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import attrs
import pytest
from requires import requires

from drums_core.evidence.processes import read_processes
from drums_core.model import DesktopEvent, ProcessDied, WatchLost
from drums_core.watcher import ProcessWatcher, _Known

pytestmark = requires("root")

PATIENCE_S = 10.0
# Starts when told, so that it is tracked before it does anything.
HELD = "import ctypes, os, signal, sys, threading, time\nsys.stdin.readline()\n"


@attrs.define
class Watch:
    """A watcher with what it reported."""

    events: list[tuple[str, DesktopEvent]] = attrs.field(factory=list)
    kills: list[str] = attrs.field(factory=list)
    acted: set[str] = attrs.field(factory=set)
    watcher: ProcessWatcher = attrs.field(init=False)
    running: list[subprocess.Popen[str]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.watcher = ProcessWatcher(
            on_event=lambda slot, event: self.events.append((slot, event)),
            acted=lambda slot: slot in self.acted,
            on_kill=self.kills.append,
        )

    def start(self, code: str, slot: str = "s") -> subprocess.Popen[str]:
        """A tracked process that runs `code` when told."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", HELD + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.running.append(process)
        self.watcher.track(slot, read_processes([process.pid]))
        return process

    def run(self, code: str, slot: str = "s") -> subprocess.Popen[str]:
        """Run it to its end, and read on until each process of the slot has been heard of."""
        process = self.start(code, slot)
        process.communicate("go\n", timeout=PATIENCE_S)
        self.settle(slot)
        return process

    def settle(self, slot: str = "s") -> None:
        """Read until no process of the slot is known: the kernel wakes the parent just before it sends the message."""
        wait_for(self, lambda: slot not in {known.slot for known in self.watcher._known.values()})

    def deaths(self) -> list[ProcessDied]:
        return [event for _, event in self.events if isinstance(event, ProcessDied)]

    def death_of(self, pid: int) -> ProcessDied:
        [death] = [d for d in self.deaths() if d.host_pid == pid]
        return death


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    made.watcher.open()
    yield made
    made.watcher.close()
    for process in made.running:
        process.kill()
        process.communicate()


CRASHES = ["SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGTRAP", "SIGSYS"]
CRASH = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), signal.{name})\n"


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash(watch: Watch, name: str) -> None:
    """Its pid, its command and its signal; as the infrastructure's while the agent has not acted."""
    process = watch.run(CRASH.format(name=name))
    death = watch.death_of(process.pid)
    assert (death.signal, death.exit_code, death.inner_pid) == (signal.Signals[name], 0, process.pid)
    assert death.command.startswith("python") and not death.after_action
    assert watch.events[-1][0] == "s" and watch.kills == []


def test_a_crash_after_an_action(watch: Watch) -> None:
    """The event says that the agent had acted in that slot, and in that slot alone."""
    watch.acted.add("agent")
    one, two = watch.run(CRASH.format(name="SIGSEGV"), "agent"), watch.run(CRASH.format(name="SIGSEGV"), "other")
    assert watch.death_of(one.pid).after_action and not watch.death_of(two.pid).after_action


def test_a_grandchild(watch: Watch) -> None:
    """What a tracked process forks is followed, and what that forks, though nobody named it."""
    process = watch.run(
        "child = os.fork()\n"
        "if not child:\n"
        "    grandchild = os.fork()\n"
        "    if not grandchild:\n"
        "        ctypes.CDLL(None).prctl(15, b'grand child', 0, 0, 0)\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    print(grandchild, flush=True); os.waitpid(grandchild, 0); os._exit(3)\n"
        "os.waitpid(child, 0)\n"
    )
    signals = {d.signal: d for d in watch.deaths()}
    assert signals[11].command == "grand child" and signals[11].host_pid not in (process.pid, 0)
    assert sorted((d.signal, d.exit_code) for d in watch.deaths()) == [(0, 0), (0, 3), (11, 0)]


def test_an_orphan(watch: Watch) -> None:
    """A process whose parents have gone is still the slot's."""
    process = watch.start(
        "if os.fork(): os._exit(0)\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True); time.sleep(60)\n"
    )
    assert process.stdin and process.stdout
    process.stdin.write("go\n")
    process.stdin.flush()
    orphan = int(process.stdout.readline())
    os.kill(orphan, signal.SIGABRT)
    process.stdout.read()  # its end of the pipe closes with it
    wait_for(watch, lambda: any(d.host_pid == orphan for d in watch.deaths()))
    assert watch.death_of(orphan).signal == 6


def wait_for(watch: Watch, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, watch.events
        watch.watcher.drain()
        time.sleep(0.002)


def test_exec_renames(watch: Watch) -> None:
    """The command is the program that runs, not the one that was tracked."""
    script = "echo ready; read x; kill -SEGV $$"
    process = watch.start(f"os.execv('/bin/sh', ['/bin/sh', '-c', {script!r}])\n")
    assert process.stdin and process.stdout
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    watch.watcher.drain()
    process.communicate("go\n", timeout=PATIENCE_S)
    watch.settle()
    assert watch.death_of(process.pid).command in ("sh", "dash", "bash") and watch.death_of(process.pid).signal == 11


def test_a_name_of_its_own(watch: Watch) -> None:
    """A process may name itself; the name at its end is told."""
    process = watch.run("ctypes.CDLL(None).prctl(15, b'my own name', 0, 0, 0)\nos.abort()\n")
    assert watch.death_of(process.pid).command == "my own name"


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_an_ordinary_end(watch: Watch, code: int) -> None:
    """An exit code and no signal."""
    process = watch.run(f"os._exit({code})\n")
    death = watch.death_of(process.pid)
    assert (death.signal, death.exit_code, death.core_dumped) == (0, code, False)


def test_sigkill_calls_on_kill(watch: Watch) -> None:
    """After a SIGKILL the slot's OOM counter is to be read again: once per death, and for no other signal."""
    watch.run("os.kill(os.getpid(), signal.SIGKILL)\n")
    watch.run("os.kill(os.getpid(), signal.SIGTERM)\n", "other")
    assert watch.kills == ["s"]
    assert [d.signal for d in watch.deaths()] == [9, 15]


THREADS = "def work():\n    time.sleep(0.05)\n    {end}\nthreading.Thread(target=work).start()\n"


def test_a_threads_end_is_no_death(watch: Watch) -> None:
    """Threads come and go; the process dies once."""
    process = watch.run("for _ in range(20): t = threading.Thread(target=int); t.start(); t.join()\nos._exit(5)\n")
    assert [(d.host_pid, d.exit_code) for d in watch.deaths()] == [(process.pid, 5)]


def test_a_leader_that_ends_first(watch: Watch) -> None:
    """Its thread lives on and crashes later: the crash must not be lost because the leader had gone."""
    process = watch.run(
        THREADS.format(end="os.kill(os.getpid(), signal.SIGSEGV)") + "ctypes.CDLL(None).syscall(60, 0)\n"
    )
    assert process.returncode == -11
    assert [(d.host_pid, d.signal) for d in watch.deaths()] == [(process.pid, 11)]


def test_a_leader_that_ends_first_is_no_death(watch: Watch) -> None:
    """The process dies with its last thread, by that thread's code or the leader's; one tracked late is counted too."""
    process = watch.run(THREADS.format(end="os._exit(4)") + "ctypes.CDLL(None).syscall(60, 0)\n")
    assert [(d.host_pid, d.exit_code) for d in watch.deaths()] == [(process.pid, 4)]
    watch.events.clear()
    late = watch.start(
        THREADS.format(end="ctypes.CDLL(None).syscall(60, 0)") + "print('x', flush=True); input()\n"
        "ctypes.CDLL(None).syscall(60, 7)\n"
    )
    assert late.stdin and late.stdout
    watch.watcher.untrack("s")
    late.stdin.write("go\n")
    late.stdin.flush()
    late.stdout.read(1)
    watch.watcher.track("s", read_processes([late.pid]))
    late.communicate("\n", timeout=PATIENCE_S)
    watch.settle()
    assert [(d.host_pid, d.exit_code) for d in watch.deaths()] == [(late.pid, 7)]


def test_a_thread_that_crashes_takes_the_process_along(watch: Watch) -> None:
    """One death, of the process, by the thread's signal."""
    process = watch.run(THREADS.format(end="ctypes.string_at(0)") + "time.sleep(60)\n")
    assert process.returncode == -11
    assert [(d.host_pid, d.signal) for d in watch.deaths()] == [(process.pid, 11)]


def test_exec_from_a_thread(watch: Watch) -> None:
    """The thread takes the leader's place: no death, and the process is followed on."""
    process = watch.run(
        THREADS.format(end="os.execv('/bin/sh', ['/bin/sh', '-c', 'kill -ABRT $$'])") + "time.sleep(60)\n"
    )
    assert process.returncode == -6
    assert [(d.host_pid, d.signal) for d in watch.deaths()] == [(process.pid, 6)]


def test_a_pid_inside(watch: Watch) -> None:
    """Of a process in a pid namespace, the pid that the desktop knows it by; a zombie can still be read."""
    code = "pid = os.fork()\nif not pid: os._exit(9)\nos.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n"
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", sys.executable, "-I", "-c", f"{HELD}{code}print('died', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    watch.running.append(process)
    assert process.stdin and process.stdout
    children: list[int] = []
    while not children:
        with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as f:
            children = [int(x) for x in f.read().split()]
    watch.watcher.track("s", read_processes(children))
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "died\n"
    wait_for(watch, lambda: bool(watch.deaths()))
    [death] = watch.deaths()
    assert (death.inner_pid, death.exit_code) == (2, 9)
    process.communicate("\n", timeout=PATIENCE_S)


def test_strangers_are_not_followed(watch: Watch) -> None:
    """Neither a process that nobody tracks, nor one that was untracked: its end is wanted."""
    subprocess.run([sys.executable, "-I", "-c", "import os; os.abort()"], check=False)
    process = watch.start(CRASH.format(name="SIGSEGV"))
    other = watch.start(CRASH.format(name="SIGSEGV"), "other")
    watch.watcher.untrack("s")
    for each in (process, other):
        each.communicate("go\n", timeout=PATIENCE_S)
    watch.settle("other")
    assert [slot for slot, _ in watch.events] == ["other"]


def test_slots_are_told_apart(watch: Watch) -> None:
    """Each death is reported for the slot that its process belongs to."""
    for slot, code in (("a", 1), ("b", 2), ("c", 3)):
        watch.run(f"if not os.fork(): os._exit({code})\nos.wait(); os._exit({code})\n", slot)
    seen = [(slot, event.exit_code) for slot, event in watch.events if isinstance(event, ProcessDied)]
    assert sorted(seen) == [("a", 1), ("a", 1), ("b", 2), ("b", 2), ("c", 3), ("c", 3)]


def test_a_reused_pid_is_no_ones(watch: Watch) -> None:
    """A process that has died is forgotten; one whose death was missed gives way to the stranger that has its pid."""
    process = watch.run("os._exit(0)\n")
    assert process.pid not in watch.watcher._known and len(watch.deaths()) == 1
    stranger = subprocess.Popen(["/bin/sleep", "60"])
    watch.watcher._known[stranger.pid] = _Known("s", 0, "gone", leader_code=0)
    watch.watcher.drain()
    stranger.kill()
    stranger.wait()
    watch.watcher.drain()
    assert len(watch.deaths()) == 1


def test_dropped_messages_are_told(watch: Watch) -> None:
    """A queue that overflows is WatchLost for every slot that has processes, and what follows is still seen."""
    assert watch.watcher._socket is not None
    watch.watcher._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    one = watch.start("for _ in range(200):\n    if not os.fork(): os._exit(0)\n    os.wait()\n")
    two = watch.start(CRASH.format(name="SIGSEGV"), "other")
    one.communicate("go\n", timeout=PATIENCE_S)
    watch.watcher.drain()
    lost = [(slot, event) for slot, event in watch.events if isinstance(event, WatchLost)]
    assert {slot for slot, _ in lost} == {"s", "other"}
    assert all("dropped" in event.reason for _, event in lost if isinstance(event, WatchLost))
    watch.watcher._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 20)  # SO_RCVBUFFORCE
    two.communicate("go\n", timeout=PATIENCE_S)
    watch.settle("other")
    assert watch.death_of(two.pid).signal == 11


def test_other_errors_are_raised(watch: Watch) -> None:
    """An error of the socket that is not an overflow is a bug, and not swallowed."""

    class Broken:
        def recv(self, size: int) -> bytes:
            raise OSError(errno.EIO, "planted")

        def close(self) -> None: ...

    real, watch.watcher._socket = watch.watcher._socket, Broken()  # type: ignore[assignment]
    with pytest.raises(OSError, match="planted"):
        watch.watcher.drain()
    watch.watcher._socket = real


def test_closed(watch: Watch) -> None:
    """Closing twice is harmless, and a closed watcher reads nothing."""
    watch.watcher.close()
    watch.watcher.close()
    watch.watcher.drain()
    assert watch.events == []
