"""Running a job in a sandboxed worker process, from the host.

One process per job, so that nothing of one check reaches the next. The worker's only way out are listening sockets of
its own network namespace, 127.0.0.1:5000 and what it is given besides, which the host opens there and serves itself.

Everything that goes wrong is a `CheckerError`, never a value: no reply, a wrong one, a death by signal, a flood,
a time-out. What the worker says cannot be trusted further than the code that runs in it: a job that executes what a
desktop wrote can be made to forge its reply.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from drums.errors import CheckerError
from drums_core.sys import enter
from drums_core.sys.helper import start_helper
from drums_verifiers import sandbox

GUEST_PORT = 5000
REPLY_LIMIT = 4 << 20
OUTPUT_LIMIT = 64 << 20
OUTPUT_TAIL = 64 << 10
START_LIMIT_S = 20.0
END_LIMIT_S = 10.0
_CHUNK = 1 << 16

Serve = Callable[[int], Awaitable[None]]
"""Serves a listening socket, given its descriptor, which it takes over, until cancelled."""


@asynccontextmanager
async def open_worker(
    request: Mapping[str, Any],
    *,
    job: str,
    timeout_s: float,
    cgroup_paths: Sequence[Path] = (),
    guest: Serve | None = None,
    files: Mapping[str, Path] | None = None,
    scratch_bytes: int = 1 << 30,
    ports: Mapping[int, Serve] | None = None,
) -> AsyncIterator[Worker]:
    """A worker that has its request, has imported the job's module, and waits for `Worker.answer`. Needs root.

    Args:
        request: JSON. Where the job's module has a function `prepare`, that is called with it at once, before there is
            anything to ask, and the job with what it returns; else the job is called with the request.
        job: `module:function`; the top-level package or module of it is shown to the worker, nothing else of the host's
            Python path but the installed packages. Importing it must need the standard library only.
        timeout_s: wall-clock seconds that the worker may take once it is asked for its answer.
        cgroup_paths: cgroup directories that it joins. Without one its memory is unlimited.
        guest: serves the worker's 127.0.0.1:5000. Called with the answer: who connects earlier waits. Without it, and
            without `ports`, the worker has no network at all.
        files: name -> file or folder on the host, shown read-only as `/drums/files/NAME`.
        scratch_bytes: size of the worker's scratch directory, which is its working directory.
        ports: serve other ports of its 127.0.0.1, likewise.

    Raises:
        CheckerError: it could not be started.

    At the end of the block the worker is gone, with everything that it started; cancellation waits for that.
    """
    async with AsyncExitStack() as stack:
        worker = await _start(stack, job, timeout_s, cgroup_paths, files or {}, scratch_bytes)
        stack.push_async_callback(_end, worker)
        worker.kills, worker.refused = _oom_kills(cgroup_paths), _forks_refused(cgroup_paths)
        stack.callback(worker.close_listeners)
        for port, serve in {**({} if guest is None else {GUEST_PORT: guest}), **(ports or {})}.items():
            worker.served.append((serve, _listen_inside(worker.process.pid, port)))
        assert worker.process.stdin is not None
        with trio.move_on_after(START_LIMIT_S):  # one that does not read it will not answer either
            await _feed(worker.process.stdin, _call(request, job))
        yield worker


async def run_worker(request: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Run a job on a request and return its answer: `open_worker`, with its arguments, and `Worker.answer`."""
    async with open_worker(request, **options) as worker:
        return await worker.answer()


@attrs.define
class Worker:
    """A worker. Made by `open_worker`; it answers once."""

    job: str
    process: trio.Process
    timeout_s: float
    cgroup_paths: Sequence[Path]
    go: int  # descriptor: a byte written there lets the job begin
    pid1: int | None  # pidfd of the namespace's pid 1
    reply_stream: trio.lowlevel.FdStream
    served: list[tuple[Serve, int]] = attrs.field(factory=list)  # and the socket's descriptor, until it is taken over
    kills: int = 0
    refused: int = 0
    reply: bytearray = attrs.field(factory=bytearray)
    output: bytearray = attrs.field(factory=bytearray)
    fault: str = ""
    ended: bool = False

    async def answer(self) -> dict[str, Any]:
        """Let the job begin, and return its answer; the worker has ended then.

        Raises:
            CheckerError: there is no answer; `.output` is the end of what the worker printed.
        """
        try:
            with trio.move_on_after(self.timeout_s) as clock:
                await _converse(self)
        finally:
            await _end(self)
        if clock.cancelled_caught:
            raise _error(self, f"did not finish within {self.timeout_s:g} s")
        if self.fault:
            raise _error(self, self.fault)
        killed = _oom_kills(self.cgroup_paths) - self.kills
        if self.process.returncode or killed:  # of a child that was killed, it has probably swallowed the loss
            raise _error(self, _ending(self, self.process.returncode or 0, killed))
        if _forks_refused(self.cgroup_paths) > self.refused:
            # What met the refusal has probably swallowed it.
            raise _error(self, "wanted more processes and threads than its cgroup allows")
        return _parse(self)

    def close_listeners(self) -> None:
        """Close the listening sockets that nobody has taken over."""
        while self.served:
            os.close(self.served.pop()[1])


def _error(worker: Worker, what: str, **facts: Any) -> CheckerError:
    output = bytes(worker.output[-OUTPUT_TAIL:]).decode(errors="replace")
    return CheckerError(f"the worker of {worker.job!r} {what}", output=output, **facts)


async def _start(
    stack: AsyncExitStack,
    job: str,
    timeout_s: float,
    cgroup_paths: Sequence[Path],
    files: Mapping[str, Path],
    scratch_bytes: int,
) -> Worker:
    reply_r, reply_w = os.pipe()
    reply_stream = trio.lowlevel.FdStream(reply_r)
    stack.push_async_callback(reply_stream.aclose)
    report_r, report_w = os.pipe()
    report_stream = trio.lowlevel.FdStream(report_r)
    stack.push_async_callback(report_stream.aclose)
    go_r, go_w = os.pipe()
    stack.callback(os.close, go_w)
    with ExitStack() as writers:
        writers.callback(os.close, go_r)
        writers.callback(os.close, reply_w)
        writers.callback(os.close, report_w)
        plan = sandbox.sandbox_plan(
            reply_fd=reply_w,
            go_fd=go_r,
            report_fd=report_w,
            readonly=_shown(job, files),
            timeout_s=timeout_s,
            cgroup_paths=cgroup_paths,
            scratch_bytes=scratch_bytes,
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
            writers.close()
            worker = Worker(job, process, timeout_s, cgroup_paths, go_w, None, reply_stream)
            report = b""
            with trio.move_on_after(START_LIMIT_S):
                while part := await report_stream.receive_some(64):
                    report += part
    worker.pid1 = _pidfd(report, process.pid)
    if worker.pid1 is not None:
        stack.callback(os.close, worker.pid1)
        return worker
    await _end(worker)
    raise _error(worker, _unstarted(worker))


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


def _shown(job: str, files: Mapping[str, Path]) -> dict[str, Path]:
    top = job.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise CheckerError(f"the job {job!r} cannot be found: no module {top!r}")
    if spec.submodule_search_locations:
        place = Path(next(iter(spec.submodule_search_locations)))
        inside = top
    else:
        place = Path(spec.origin or "")
        inside = place.name
    shown = {
        sandbox.MAIN: Path(__file__).with_name("worker_main.py"),
        f"{sandbox.JOBS}/{inside}": place,
        **sandbox.inside_libraries(),
    }
    for name, path in files.items():
        if "/" in name or name in ("", ".", ".."):
            raise CheckerError(f"{name!r} is no name for a worker's file: a plain name is needed")
        shown[f"{sandbox.FILES}/{name}"] = path.resolve()
    return shown


def _call(request: Mapping[str, Any], job: str) -> bytes:
    document = {
        "job": job,
        "path_first": [sandbox.JOBS],
        "path_last": list(sandbox.inside_libraries()),
        "request": dict(request),
    }
    return json.dumps(document).encode() + b"\n"


def _listen_inside(pid: int, port: int) -> int:
    """The descriptor of a socket that listens on 127.0.0.1 in the network namespace of `pid`, our own child.

    A socket belongs to the namespace of the thread that makes it, so a thread goes there and ends: one of trio's pool
    would carry the namespace to the next task.
    """
    made: list[int] = []
    faults: list[OSError] = []

    def visit() -> None:
        try:
            with open(f"/proc/{pid}/ns/net", "rb") as f:
                enter.setns(f.fileno(), "net")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
                s.bind(("127.0.0.1", port))
                s.listen(64)
                made.append(s.detach())
        except OSError as e:
            faults.append(e)

    thread = threading.Thread(target=visit, name="drums-worker-listen")
    thread.start()
    thread.join()  # a few system calls on a namespace that nobody else uses
    if faults:
        raise CheckerError(f"no socket could be opened for the worker: {faults[0]}") from faults[0]
    return made[0]


async def _converse(worker: Worker) -> None:
    process = worker.process
    assert process.stdout is not None
    async with trio.open_nursery() as outer:
        while worker.served:
            outer.start_soon(_serve, worker, *worker.served.pop(), outer.cancel_scope)
        async with trio.open_nursery() as nursery:
            with suppress(BrokenPipeError):  # it died; the way that it did says more
                os.write(worker.go, b"g")  # into an empty pipe: it does not block
            nursery.start_soon(_drain, worker, process.stdout, outer.cancel_scope)
            nursery.start_soon(_receive, worker, outer.cancel_scope)
            await process.wait()
        outer.cancel_scope.cancel()


async def _serve(worker: Worker, serve: Serve, listener: int, scope: trio.CancelScope) -> None:
    try:
        await serve(listener)
        worker.fault = "lost its way to the desktop: the relay ended early"
    except Exception as e:  # noqa: BLE001 - of foreign code; a worker without its desktop would score 0
        worker.fault = f"lost its way to the desktop: {e!r}"
    scope.cancel()


async def _feed(stream: trio.abc.SendStream, data: bytes) -> None:
    with suppress(trio.BrokenResourceError):  # it died; the way that it did says more
        await stream.send_all(data)
    # It stays open: the worker ends when it closes, which it also does when this process dies.


async def _drain(worker: Worker, stream: trio.abc.ReceiveStream, scope: trio.CancelScope | None = None) -> None:
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
    while part := await worker.reply_stream.receive_some(_CHUNK):
        worker.reply += part
        if len(worker.reply) > REPLY_LIMIT:
            worker.fault = f"sent a reply of more than {REPLY_LIMIT >> 20} MiB"
            scope.cancel()
            return


async def _end(worker: Worker) -> None:
    """Kill what is left of a worker and wait until it is gone; quick when it has ended. Twice is once."""
    if worker.ended:
        return
    with trio.move_on_after(END_LIMIT_S, shield=True) as limit:
        if worker.pid1 is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pid1, signal.SIGKILL)
            # Readable once pid 1 is dead, and it dies last: the kernel waits for the namespace's other processes.
            await trio.lowlevel.wait_readable(worker.pid1)
        else:
            worker.process.kill()
        await worker.process.wait()
        if worker.pid1 is None and worker.process.stdout is not None:
            with trio.move_on_after(1):  # what a plan that failed has written
                await _drain(worker, worker.process.stdout)
        for stream in (worker.process.stdin, worker.process.stdout):
            if stream is not None:
                await stream.aclose()
        worker.ended = True
    if limit.cancelled_caught:
        raise _error(worker, f"could not be ended within {END_LIMIT_S:g} s")


def _oom_kills(cgroup_paths: Sequence[Path]) -> int:
    """How many processes the kernel has taken in these cgroups for want of memory (v2: memory.events)."""
    return _counted(cgroup_paths, ("memory.events", "memory.oom_control"), "oom_kill")


def _forks_refused(cgroup_paths: Sequence[Path]) -> int:
    """How many forks the kernel has refused in these cgroups (cgroup-v1/pids.rst, cgroup-v2.rst: pids.events)."""
    return _counted(cgroup_paths, ("pids.events",), "max")


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


def _ending(worker: Worker, code: int, oom_kills: int) -> str:
    if code == 125 and worker.output.startswith(b"drums-enter: "):
        return _unstarted(worker)
    if oom_kills:
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
        raise _error(worker, f"sent {shown!r}, which is no reply: {e}") from e
    if isinstance(reply, dict) and set(reply) == {"ok", "value"} and reply["ok"] is True:
        value = reply["value"]
        if isinstance(value, dict):
            return value
        raise _error(worker, f"answered {value!r:.200}, not an object")
    texts = {"type", "message", "traceback"}
    if isinstance(reply, dict) and set(reply) == {"ok", *texts} and all(isinstance(reply[x], str) for x in texts):
        # The worker cuts them too, unless what it ran has taken it over.
        said = f"raised {reply['type'][:200]}: {reply['message'][:2000]}"
        raise _error(worker, said, traceback=reply["traceback"][-8000:])
    raise _error(worker, f"sent {bytes(worker.reply[:200])!r}, which is no reply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice")
    return document


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")
