"""What the tests of workers share: one that waits, what is left of them, and a desktop that answers one word."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import psutil
import pytest
import trio

from drums_core.leftovers import WORKER_PREFIX, temporary_cgroup
from drums_core.model import Limits
from drums_core.sys.cgroups import Cgroup, cgroup_names
from drums_verifiers.worker import Worker
from drums_verifiers.workers import Workers


@asynccontextmanager
async def served(workers: Workers) -> AsyncIterator[Worker]:
    """A worker waits, and more are made when it is used."""
    problem: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers.serve)
        try:
            yield await waiting(workers)
        except Exception as e:  # noqa: BLE001 - raised below, as no group
            problem = e
        nursery.cancel_scope.cancel()
    assert not workers._idle
    if problem is not None:
        raise problem


async def waiting(workers: Workers, but: Worker | None = None) -> Worker:
    """The first that waits, another one than `but`."""
    with trio.fail_after(30):
        while not workers._idle or workers._idle[0] is but:  # noqa: ASYNC110 - as an observer outside would
            await trio.sleep(0.005)
    return workers._idle[0]


def workers() -> list[int]:
    """Host pids of all processes with a worker's command line or a worker's ids, but those of other hosts."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        line = " ".join(process.info["cmdline"] or [])
        uids = process.info["uids"]
        likely = "worker_main.py" in line or (uids and uids.real == 65534 and "time.sleep" in line)
        if likely and not _of_another_host(process):
            found.append(process.pid)
    return found


def _of_another_host(process: psutil.Process) -> bool:
    me = psutil.Process()
    above_me = {1, *(p.pid for p in me.parents())}  # what a killed host leaves becomes the child of one of these
    try:
        hosts = [p for p in process.parents() if not {"enter.py", "worker_main.py"} & _names(p)]
        return bool(hosts) and hosts[0].pid not in above_me and me not in [hosts[0], *hosts[0].parents()]
    except psutil.NoSuchProcess:
        return False


def _names(process: psutil.Process) -> set[str]:
    return {os.path.basename(x) for x in process.cmdline()}


def gone(limit_s: float = 10.0) -> bool:
    """Whether no worker is left."""
    end = time.monotonic() + limit_s
    while workers():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, descriptor, mount or cgroup of a worker outlives the test.

    Not async: pytest-trio runs no async fixture that a test does not name.
    """

    def mounts() -> list[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return sorted(x.split()[4] for x in lines if x.split()[4].startswith(("/sys", "/drums")))

    before = mounts(), len(os.listdir("/proc/self/fd"))
    yield
    assert not psutil.Process().children(recursive=True)
    assert gone()
    assert (mounts(), len(os.listdir("/proc/self/fd"))) == before
    assert [name for name in cgroup_names() if name.startswith(f"{WORKER_PREFIX}{os.getpid()}-")] == []


@asynccontextmanager
async def shared_cgroup(limits: Limits) -> AsyncIterator[Callable[[Limits], AbstractAsyncContextManager[Cgroup]]]:
    """What gives every worker the same cgroup in place of one of its own."""
    async with temporary_cgroup(limits) as cgroup:
        yield lambda _: nullcontext(cgroup)


class Guest:
    """Answers `hello` on a listening descriptor that it takes over.

    Args:
        held: it keeps the answer back until `may_answer` is set; `asked` is set when it is asked.
    """

    def __init__(self, *, held: bool = False) -> None:
        self.listened = ""
        self.asked, self.may_answer = trio.Event(), trio.Event()
        if not held:
            self.may_answer.set()

    async def __call__(self, fd: int) -> None:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))
        self.listened = str(listener.socket.getsockname())

        async def answer(stream: trio.SocketStream) -> None:
            async with stream:
                if await stream.receive_some(100):
                    self.asked.set()
                    await self.may_answer.wait()
                    await stream.send_all(b"good day")

        await trio.serve_listeners(answer, [listener])
