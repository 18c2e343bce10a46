"""Processes with odd names, dead ones, and namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from requires import requires

from drums_core.evidence import processes

NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
print("ready", flush=True); sys.stdin.read()
"""
IN_NAMESPACE = """
import os, sys
pid = os.fork()
if pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(os.getpid(), flush=True); sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python program that ends when its standard input does."""
    running: list[subprocess.Popen[bytes]] = []

    def run(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        running.append(process)
        assert process.stdout and process.stdout.readline()
        return process

    yield run
    for process in running:
        process.communicate()


@pytest.mark.parametrize("name", ["a b) S 1 2", ")", "new\nline", "(x) (y)", "", "caf\u00e9"])
def test_odd_command_names(start: Start, name: str) -> None:
    """A command name that imitates the file's own syntax does not shift the fields."""
    child = start(NAMED, name)
    (found,) = processes.read_processes([child.pid])
    assert found.command == name
    assert found.host_pid == found.inner_pid == child.pid
    assert found.argv == (sys.executable, "-c", NAMED, name)
    stat = processes.read_stat(child.pid)
    assert stat.parent == os.getpid() and stat.alive and stat.threads == 1
    assert processes.is_running(child.pid, found.start_ticks)
    assert not processes.is_running(child.pid, found.start_ticks + 1)


def test_empty_arguments_are_kept(start: Start) -> None:
    """Empty arguments at the end of a command line are arguments."""
    child = start("import sys; print(1, flush=True); sys.stdin.read()", "", "x", "")
    assert processes.read_argv(child.pid)[-3:] == ("", "x", "")


def test_zombies_are_no_processes() -> None:
    """A zombie is neither listed nor running."""
    child = subprocess.Popen(["true"])
    ticks = processes.read_stat(child.pid).start_ticks
    deadline = time.monotonic() + 10
    while processes.read_stat(child.pid).state != "Z" and time.monotonic() < deadline:
        os.sched_yield()
    assert processes.read_processes([child.pid]) == []
    assert not processes.is_running(child.pid, ticks)
    assert not processes.is_alive(child.pid)
    child.wait()
    assert processes.read_processes([child.pid]) == []
    assert not processes.is_running(child.pid, ticks)


def test_a_process_outlives_its_first_thread(start: Start) -> None:
    """A process whose first thread has ended still runs."""
    child = start(
        "import threading, time, ctypes, sys\n"
        "def work():\n"
        "    while open('/proc/self/stat').read().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.001)\n"
        "    print('ready', flush=True); sys.stdin.read(); import os; os._exit(0)\n"
        "threading.Thread(target=work).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    assert processes.read_stat(child.pid).state == "Z"
    assert processes.is_alive(child.pid)
    assert [x.host_pid for x in processes.read_processes([child.pid])] == [child.pid]


@requires("root")
def test_processes_of_a_pid_namespace(start: Start) -> None:
    """All processes of a nested pid namespace are found by its inode, with their pid inside; others are not."""
    helper = start(IN_NAMESPACE, prefix=("unshare", "--pid", "--net", "--uts"))
    (init,) = [
        int(x)
        for x in os.listdir("/proc")
        if x.isdecimal() and processes.is_alive(int(x)) and _parent(int(x)) == helper.pid
    ]
    inodes = processes.namespace_inodes(init)
    own = processes.namespace_inodes("self")
    assert {k for k in inodes if inodes[k] != own[k]} == {"pid", "net", "uts"}
    assert processes.processes_in_pidns(inodes["pid"]) == [init]
    (identity,) = processes.read_processes([init])
    assert identity.inner_pid == 1 and identity.host_pid == init
    assert len(processes.read_nspid(init)) == 2
    assert init not in processes.processes_in_pidns(own["pid"])
    assert os.getpid() in processes.processes_in_pidns(own["pid"])


def _parent(pid: int) -> int:
    try:
        return processes.read_stat(pid).parent
    except (FileNotFoundError, ProcessLookupError):
        return 0


def test_descent(start: Start) -> None:
    """Descendants and the process itself descend from it; ancestors and strangers do not."""
    child = start("import sys; print(1, flush=True); sys.stdin.read()")
    assert processes.descends_from(os.getpid(), [os.getpid(), child.pid, os.getppid(), 1]) == {os.getpid(), child.pid}
    assert processes.descends_from(child.pid, [os.getpid(), child.pid, 999_999_999]) == {child.pid}


def test_what_is_gone_is_left_out() -> None:
    """A pid that nobody has is no error."""
    assert processes.read_processes([999_999_999]) == []
    with pytest.raises(ProcessLookupError):
        processes.namespace_inodes(999_999_999)
