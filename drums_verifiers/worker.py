"""A sandboxed worker process: started before anyone knows for what, given one job, and gone with it.

Nothing of one check reaches the next: each worker has one job. Its only way out are listening sockets of its own
network namespace, 127.0.0.1:5000 and what its job is given besides, which the host opens there and serves itself.

Everything that goes wrong is a `CheckerError`, never a value: no reply, a wrong one, a death by signal, a flood,
a time-out. What the worker says cannot be trusted further than the code that runs in it: a job that executes what a
desktop wrote can be made to forge its reply.

A worker has one owner at a time: who starts it, or has taken it over, ends it. A descriptor that one task closes while
another waits for it breaks whoever gets its number next: trio takes that one's wait for the other's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from drums.errors import CheckerError
from drums_core.leftovers import temporary_cgroup
from drums_core.model import Limits
from drums_core.sys.helper import start_helper
from drums_core.sys.inside import in_namespace
from drums_core.sys.waiting import wait_readable
from drums_verifiers import sandbox
from drums_verifiers.showing import show

GUEST_PORT = 5000
LIMITS = Limits(cpus=2.0, memory_bytes=4 << 30, swap_bytes=0, pids=256)
REPLY_LIMIT = 4 << 20
OUTPUT_LIMIT = 64 << 20
OUTPUT_TAIL = 64 << 10
START_LIMIT_S = 20.0
BEGIN_LIMIT_S = 20.0
END_LIMIT_S = 10.0
_CHUNK = 1 << 16
_WAITS, _BEGUN = b" ", b"\n"

Serve = Callable[[int], Awaitable[None]]
"""Serves a listening socket, given its descriptor, which it takes over, until cancelled."""


@attrs.frozen
class Kind:
    """What is settled about a worker before it has a job.

    Args:
        timeout_s: wall-clock seconds that its job may take, from the end of `Job.until` on.
        limits: of its cgroup.
        scratch_bytes: size of its scratch directory, which is its working directory, and of its largest file.
        preload: modules of the standard library that it imports before it waits; it can find no others then.
    """

    timeout_s: float
    limits: Limits = LIMITS
    scratch_bytes: int = 1 << 30
    preload: tuple[str, ...] = ()


@attrs.frozen
class Job:
    """What a worker does.

    Args:
        request: JSON, for the function.
        function: `module:function`; the top-level package or module of it is shown to the worker, nothing else of the
            host's Python path but the installed packages. Importing it must need the standard library only.
        guest: serves the worker's 127.0.0.1:5000. Without it, and without `ports`, the worker has no network at all.
        files: name -> file or folder on the host, shown read-only as `/drums/files/NAME`.
        ports: serve other ports of its 127.0.0.1, likewise.
        until: awaited once the worker has begun; from its end on the ports are served, and the worker's time counts. A
            function that is a generator function meanwhile runs up to its `yield`, others are not called before.
    """

    request: Mapping[str, Any]
    function: str
    guest: Serve | None = None
    files: Mapping[str, Path] = attrs.field(factory=dict)
    ports: Mapping[int, Serve] = attrs.field(factory=dict)
    until: Callable[[], Awaitable[None]] | None = None

    def served(self) -> dict[int, Serve]:
        """Who serves which port."""
        return {**({} if self.guest is None else {GUEST_PORT: self.guest}), **self.ports}

    def shown(self) -> dict[str, Path]:
        """What the worker sees: path inside -> file or folder on the host.

        Raises:
            CheckerError: the function's package cannot be found, or a file's name is none.
        """
        top = self.function.partition(":")[0].partition(".")[0]
        spec = importlib.util.find_spec(top)
        if spec is None:
            raise CheckerError(f"the job {self.function!r} cannot be found: no module {top!r}")
        if spec.submodule_search_locations:
            place = Path(next(iter(spec.submodule_search_locations)))
            inside = top
        else:
            place = Path(spec.origin or "")
            inside = place.name
        shown = {f"{sandbox.JOBS}/{inside}": place, **sandbox.inside_libraries()}
        for name, path in self.files.items():
            if "/" in name or name in ("", ".", ".."):
                raise CheckerError(f"{name!r} is no name for a worker's file: a plain name is needed")
            shown[f"{sandbox.FILES}/{name}"] = path.resolve()
        return shown

    def call(self) -> bytes:
        """The line that the worker reads."""
        document = {
            "job": self.function,
            "path_first": [sandbox.JOBS],
            "path_last": list(sandbox.inside_libraries()),
            "request": dict(self.request),
        }
        return json.dumps(document).encode() + b"\n"


class NotBegun(CheckerError):
    """The worker had not begun its job: another one can be given it."""


async def start_worker(kind: Kind) -> Worker:
    """A worker that waits for a job, which the caller is to `end`. Needs root.

    Raises:
        CheckerError: it could not be started.

    Cancellation leaves nothing.
    """
    async with AsyncExitStack() as stack:
        cgroup = await stack.enter_async_context(temporary_cgroup(kind.limits))
        with ExitStack() as writers:
            reply_r, reply_w = os.pipe()
            writers.callback(os.close, reply_w)
            reply_stream = trio.lowlevel.FdStream(reply_r)
            stack.push_async_callback(reply_stream.aclose)
            report_r, report_w = os.pipe()
            writers.callback(os.close, report_w)
            report_stream = trio.lowlevel.FdStream(report_r)
            stack.push_async_callback(report_stream.aclose)
            go_r, go_w = os.pipe()
            writers.callback(os.close, go_r)
            stack.callback(os.close, go_w)
            plan = sandbox.sandbox_plan(
                reply_fd=reply_w,
                go_fd=go_r,
                report_fd=report_w,
                timeout_s=kind.timeout_s,
                cgroup_paths=cgroup.paths,
                scratch_bytes=kind.scratch_bytes,
                preload=kind.preload,
            )
            # Shielded: until pid 1 is known, a cancelled start would leave a process that nobody can name.
            with trio.CancelScope(shield=True):
                process = await start_helper(
                    plan,
                    pass_fds=(reply_w, go_r, report_w),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    # pid 1 inside keeps the environment that the helper was started with, and the worker can read it.
                    env=sandbox.worker_environment(),
                )
                worker = Worker(kind, cgroup.paths, process, reply_stream, go_w)
                stack.push_async_callback(worker.close_streams)
                stack.push_async_callback(worker.kill)
                writers.close()
                report = b""
                with trio.move_on_after(START_LIMIT_S):
                    while part := await report_stream.receive_some(64):
                        report += part
                worker.pid1 = _pidfd(report, process.pid)
        first = b""
        with trio.move_on_after(START_LIMIT_S):
            first = bytes(await reply_stream.receive_some(1))
        if first != _WAITS:
            await worker.kill()
            with trio.move_on_after(1):  # what a plan that failed has written
                await _drain(worker)
            raise worker.error(_unstarted(worker))
        worker.stack = stack.pop_all()
        return worker


@attrs.define(eq=False)
class Worker:
    """A worker. Made by `start_worker`."""

    kind: Kind
    cgroup_paths: Sequence[Path]
    process: trio.Process
    reply_stream: trio.lowlevel.FdStream
    go: int  # descriptor; written to, it lets the job go on
    pid1: int | None = None  # pidfd of the namespace's pid 1
    function: str = ""
    reply: bytearray = attrs.field(factory=bytearray)
    output: bytearray = attrs.field(factory=bytearray)
    fault: str = ""
    refusal: Exception | None = None  # of what the job waits for
    has_begun: trio.Event = attrs.field(factory=trio.Event)
    awaited: trio.Lock = attrs.field(factory=trio.Lock)  # held while what the job waits for goes on
    unbegun: str = ""  # why not
    stack: AsyncExitStack = attrs.field(factory=AsyncExitStack)

    @property
    def waits(self) -> bool:
        """Whether it still lives."""
        return self.process.returncode is None

    @property
    def begun(self) -> bool:
        """Whether it has its job."""
        return self.has_begun.is_set()

    async def answer(self, job: Job) -> dict[str, Any]:
        """Give it its job, and return the answer.

        Raises:
            NotBegun: there is none, and nothing of the job has run.
            CheckerError: there is none; `.output` is the end of what the worker printed.
            Exception: of `job.until`, as it is.
        """
        self.function = job.function
        shown, call = job.shown(), job.call()
        with trio.CancelScope() as clock:
            await self._converse(job, shown, call, clock)
        if clock.cancelled_caught:
            raise self.error(f"did not finish within {self.kind.timeout_s:g} s")
        if self.refusal:
            raise self.refusal
        if self.fault:
            raise self.error(self.fault)
        if not self.begun:
            raise self.error(self.unbegun or _ending(self, self.process.returncode or 0), NotBegun)
        if self.process.returncode or _oom_kills(self):  # what has lost a child has probably swallowed the loss
            raise self.error(_ending(self, self.process.returncode or 0))
        if _counted(self.cgroup_paths, ("pids.events",), "max"):  # cgroup-v1/pids.rst, cgroup-v2.rst
            # What met the refusal has probably swallowed it.
            raise self.error("wanted more processes and threads than its cgroup allows")
        return _parse(self)

    async def _converse(self, job: Job, shown: Mapping[str, Path], call: bytes, clock: trio.CancelScope) -> None:
        try:
            listeners = await trio.to_thread.run_sync(self._let_in, shown, list(job.served()))
        except OSError as e:
            self.unbegun = f"could not be given its job: {e}"
            return
        async with trio.open_nursery() as outer:
            outer.start_soon(self._let_go, job, listeners, clock, outer)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_feed, self, call)
                nursery.start_soon(_drain, self, outer.cancel_scope)
                nursery.start_soon(_receive, self, outer.cancel_scope)
                await self.process.wait()
            async with self.awaited:  # steps on a desktop are not left half done for it
                outer.cancel_scope.cancel()

    async def _let_go(
        self, job: Job, listeners: Mapping[int, int], clock: trio.CancelScope, nursery: trio.Nursery
    ) -> None:
        """Once it has begun, wait for what the job waits for; then serve its ports in the nursery, and tell it."""
        with ExitStack() as unserved:
            for listener in listeners.values():
                unserved.callback(os.close, listener)
            await self.has_begun.wait()
            if job.until is not None:
                try:
                    async with self.awaited:
                        await job.until()
                except Exception as e:  # noqa: BLE001 - `answer` raises it, as no group
                    self.refusal = e
                    nursery.cancel_scope.cancel()
                    return
            unserved.pop_all()
        clock.deadline = trio.current_time() + self.kind.timeout_s
        for port, serve in job.served().items():
            nursery.start_soon(_serve, self, serve, listeners[port], nursery.cancel_scope)
        with suppress(BrokenPipeError):  # it has ended
            os.write(self.go, b"\n")

    def _let_in(self, shown: Mapping[str, Path], ports: Sequence[int]) -> dict[int, int]:
        """Mount what it is shown, and open its sockets: port -> descriptor. Blocks."""
        if self.pid1 is None:
            raise ProcessLookupError(3, "its sandbox is gone")
        show(self.pid1, shown)
        return in_namespace(self.pid1, "net", lambda: _listen(ports)) if ports else {}

    def error(self, what: str, kind: type[CheckerError] = CheckerError, **facts: Any) -> CheckerError:
        """What went wrong with it, and the end of what it printed."""
        who = f"the worker of {self.function!r}" if self.function else "a worker"
        return kind(f"{who} {what}", output=bytes(self.output[-OUTPUT_TAIL:]).decode(errors="replace"), **facts)

    async def end(self) -> None:
        """Let go of all of it: every process, its cgroup, and what the host holds open. By its owner, once."""
        with trio.CancelScope(shield=True):
            await self.stack.aclose()

    async def kill(self) -> None:
        """Kill what is left of it, and wait until it is gone; quick when it has ended.

        Raises:
            CheckerError: it does not end.
        """
        with trio.move_on_after(END_LIMIT_S, shield=True) as limit:
            if self.pid1 is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pid1, signal.SIGKILL)
                # Readable once pid 1 is dead, and it dies last: the kernel waits for the namespace's other processes.
                await wait_readable(self.pid1)
            else:
                self.process.kill()
            await self.process.wait()
        if limit.cancelled_caught:
            raise self.error(f"could not be ended within {END_LIMIT_S:g} s")

    async def close_streams(self) -> None:
        """Close what leads to it; it has ended."""
        if self.pid1 is not None:
            os.close(self.pid1)
            self.pid1 = None
        with trio.CancelScope(shield=True):
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    await stream.aclose()


def _pidfd(report: bytes, parent: int) -> int | None:
    """A descriptor of the process that the helper reported, if it still is the helper's child."""
    try:
        pid = int(report)
        fd = os.pidfd_open(pid)
    except (ValueError, ProcessLookupError):
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        stat = b") X 0"
    if int(stat.rpartition(b")")[2].split()[1]) != parent:
        os.close(fd)
        return None
    return fd


def _listen(ports: Sequence[int]) -> dict[int, int]:
    """Descriptors of listening sockets in this thread's network namespace, by port."""
    with ExitStack() as stack:
        sockets = {port: stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for port in ports}
        for port, s in sockets.items():
            s.bind(("127.0.0.1", port))
            s.listen(64)
        return {port: s.detach() for port, s in sockets.items()}


async def _serve(worker: Worker, serve: Serve, listener: int, scope: trio.CancelScope) -> None:
    try:
        await serve(listener)
        worker.fault = "lost its way to the desktop: the relay ended early"
    except Exception as e:  # noqa: BLE001 - of foreign code; a worker without its desktop would score 0
        worker.fault = f"lost its way to the desktop: {e!r}"
    scope.cancel()


async def _feed(worker: Worker, call: bytes) -> None:
    assert worker.process.stdin is not None
    with suppress(trio.BrokenResourceError):  # it died; the way that it did says more
        await worker.process.stdin.send_all(call)
    # It stays open: the worker ends when it closes, which it also does when this process dies.


async def _drain(worker: Worker, scope: trio.CancelScope | None = None) -> None:
    stream = worker.process.stdout
    assert stream is not None
    total = 0
    while part := await stream.receive_some(_CHUNK):
        total += len(part)
        worker.output += part
        del worker.output[: max(0, len(worker.output) - OUTPUT_TAIL)]
        if total > OUTPUT_LIMIT:
            worker.fault = f"printed more than {OUTPUT_LIMIT >> 20} MiB"
            if scope:
                scope.cancel()
            return


async def _receive(worker: Worker, scope: trio.CancelScope) -> None:
    with trio.move_on_after(BEGIN_LIMIT_S) as clock:
        if await worker.reply_stream.receive_some(1) == _BEGUN:
            worker.has_begun.set()
    if clock.cancelled_caught:
        worker.unbegun = f"had not begun after {BEGIN_LIMIT_S:g} s"
        scope.cancel()
        return
    while part := await worker.reply_stream.receive_some(_CHUNK):
        worker.reply += part
        if len(worker.reply) > REPLY_LIMIT:
            worker.fault = f"sent a reply of more than {REPLY_LIMIT >> 20} MiB"
            scope.cancel()
            return


def _counted(cgroup_paths: Sequence[Path], names: Sequence[str], key: str) -> int:
    total = 0
    for path in cgroup_paths:
        for name in names:
            try:
                lines = (path / name).read_text(encoding="ascii").splitlines()
            except OSError:
                continue  # that controller is not here
            total += sum(int(x.split()[1]) for x in lines if x.startswith(f"{key} "))
    return total


def _unstarted(worker: Worker) -> str:
    return f"could not be started: {bytes(worker.output).decode(errors='replace').strip()[-500:]}"


def _oom_kills(worker: Worker) -> int:
    """How many of its processes the kernel has taken for want of memory (v2: memory.events)."""
    return _counted(worker.cgroup_paths, ("memory.events", "memory.oom_control"), "oom_kill")


def _ending(worker: Worker, code: int) -> str:
    if _oom_kills(worker):
        return "was killed for want of memory: it needs more than its cgroup allows"
    number = -code if code < 0 else code - 128  # the helper's own death, or the one that it passes on
    if number in {int(x) for x in signal.Signals}:
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with code {code}"


def _parse(worker: Worker) -> dict[str, Any]:
    try:
        reply = json.loads(worker.reply.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as e:
        shown = bytes(worker.reply[:200])
        raise worker.error(f"sent {shown!r}, which is no reply: {e}") from e
    if isinstance(reply, dict) and set(reply) == {"ok", "value"} and reply["ok"] is True:
        value = reply["value"]
        if isinstance(value, dict):
            return value
        raise worker.error(f"answered {value!r:.200}, not an object")
    texts = {"type", "message", "traceback"}
    if isinstance(reply, dict) and set(reply) == {"ok", *texts} and all(isinstance(reply[x], str) for x in texts):
        # The worker cuts them too, unless what it ran has taken it over.
        said = f"raised {reply['type'][:200]}: {reply['message'][:2000]}"
        raise worker.error(said, traceback=reply["traceback"][-8000:])
    raise worker.error(f"sent {bytes(worker.reply[:200])!r}, which is no reply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice")
    return document


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")
