"""The only speaker of CRIU: one `criu swrk` process per dump or restore, driven over its RPC socket.

`swrk` with `rst_sibling` makes a restored init this process's own child, and hands `post-dump`, `post-restore` and
`pre-resume` over as messages that wait for an answer: that is when evidence is recorded and gates look.

Sources: criu.org/RPC, criu's `rpc.proto` and `criu/cr-service.c`; measured facts in `docs/adr/0001-hold-restores.md`.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from drums.errors import CheckpointError, DumpError, RestoreError
from drums_core.criu_provider.model import HARMLESS, Criu
from drums_core.sys.helper import Plan, start_helper

GHOST_LIMIT_BYTES = 64 << 20
_MESSAGE_BYTES = 1 << 20
_LAST_WORDS_S = 0.05
_LOG_BYTES = 1 << 20
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
DEV_KEY = "dev"


def rpc_messages(criu: Criu) -> Any:
    """The module of RPC message classes that came with this CRIU."""
    folder = str(criu.pycriu_dir)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("rpc_pb2")


def log_excerpt(log: Path, *, lines: int = 12) -> str:
    """What CRIU's log says around each error, with line numbers; at most `lines` lines."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except OSError as e:
        return f"no log: {e.strerror}"
    picked = [
        f"{n}: {line}" for n, line in enumerate(text, 1) if "Error" in line and not any(h in line for h in HARMLESS)
    ]
    return "\n".join(picked[-lines:]) or "\n".join(f"{n}: {line}" for n, line in list(enumerate(text, 1))[-3:])


def _options(rpc: Any, images_fd: int, work_fd: int, root: Path) -> Any:
    request = rpc.criu_req()
    o = request.opts
    o.images_dir_fd = images_fd
    o.work_dir_fd = work_fd
    o.root = str(root)
    o.log_level = 2
    o.log_file = "criu.log"
    o.tcp_established = True  # both ways: with tcp_close, connections inside the copy break
    o.tcp_skip_in_flight = True
    o.ext_unix_sk = True
    o.file_locks = True
    o.ghost_limit = GHOST_LIMIT_BYTES
    o.link_remap = True
    o.force_irmap = True
    o.manage_cgroups = True
    o.manage_cgroups_mode = rpc.IGNORE  # a restore lands in the cgroup that CRIU was put into
    o.network_lock = rpc.SKIP  # lo only: nothing outside to lock out
    o.notify_scripts = True
    return request


class _Session:
    """One swrk process and its socket."""

    def __init__(self, rpc: Any, process: trio.Process, sock: trio.socket.SocketType, timeout_s: float) -> None:
        self.rpc = rpc
        self.process = process
        self._socket = sock
        self._timeout_s = timeout_s

    async def send(self, message: Any) -> None:
        """Send; to a CRIU that is gone, nothing: how it ended is what the next `receive` tells."""
        with suppress(ConnectionError):
            await self._socket.send(message.SerializeToString())

    async def answer(self, *, success: bool = True) -> None:
        message = self.rpc.criu_req()
        message.type = self.rpc.NOTIFY
        message.notify_success = success
        await self.send(message)

    async def receive(self) -> Any:
        """The next message; raises ConnectionError when CRIU is gone and TimeoutError when it is silent."""
        data = b""
        with trio.move_on_after(self._timeout_s) as scope:
            async with trio.open_nursery() as nursery:
                # The tasks that it forks hold its end of the socket open for a while: the end of file can be late.
                nursery.start_soon(self._give_up_at_end, nursery.cancel_scope)
                with suppress(ConnectionError):  # it is gone
                    data = await self._socket.recv(_MESSAGE_BYTES)
                nursery.cancel_scope.cancel()
            if not data:
                raise ConnectionError(f"criu ended in the middle, {_ended(await self.process.wait())}")
        if scope.cancelled_caught:
            raise TimeoutError(f"criu was silent for {self._timeout_s:g} s")
        message = self.rpc.criu_resp()
        message.ParseFromString(data)
        return message

    async def _give_up_at_end(self, scope: trio.CancelScope) -> None:
        await self.process.wait()
        await trio.sleep(_LAST_WORDS_S)  # for what it said before
        scope.cancel()

    def close_socket(self) -> None:
        self._socket.close()


def _ended(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


@asynccontextmanager
async def _swrk(
    criu: Criu, plan: Plan, kdat_dir: Path, timeout_s: float, *, paths: Sequence[Path]
) -> AsyncIterator[_Session]:
    """A swrk process, which is to reach `paths`; ended and reaped at the end of the block whatever happens."""
    # Killed, CRIU leaves mount points of its own in /tmp: in one of its own, they go with it.
    reached = (criu.path, *paths)
    uses_tmp = any(os.path.realpath(p).startswith("/tmp/") for p in reached)  # noqa: ASYNC240 - a few readlinks
    own_tmp: Plan = (
        [] if uses_tmp else [["mount", "drums-tmp", "/tmp", "tmpfs", ["nosuid", "nodev"], "mode=1777,size=1m"]]
    )
    rpc = rpc_messages(criu)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        sock = trio.socket.from_stdlib_socket(ours)
        try:
            full: Plan = [
                *plan,
                ["setsid"],  # by its session an init is known of which CRIU has not told yet
                # CRIU keeps its probe of the kernel (criu.kdat, 35 ms) only where /run is a tmpfs.
                ["unshare", ["mnt"]],
                ["mount", None, "/", None, ["rec", "private"]],
                ["mount", str(kdat_dir), "/run", None, ["bind"]],
                *own_tmp,
                ["chdir", "/"],
                ["exec", [str(criu.path), "swrk", str(theirs.fileno())], _ENV],
            ]
            process = await start_helper(
                full,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except BaseException:
            sock.close()
            raise
    session = _Session(rpc, process, sock, timeout_s)
    try:
        yield session
    finally:
        session.close_socket()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(2.0):
                await process.wait()
            if process.returncode is None:
                process.kill()  # SIGTERM is blocked in criu
                await process.wait()
            if process.stderr is not None:
                await process.stderr.aclose()


@asynccontextmanager
async def _directories(*paths: Path) -> AsyncIterator[list[int]]:
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


async def dump(
    criu: Criu,
    *,
    pid: int,
    images: Path,
    root: Path,
    kdat_dir: Path,
    timeout_s: float,
    while_frozen: Callable[[], Awaitable[None]],
) -> None:
    """Dump the process tree below `pid` into `images`; the tree runs on afterwards.

    Args:
        pid: host pid of the desktop's init.
        images: an empty folder for the images and `criu.log`.
        root: the desktop's root as mounted on the host.
        kdat_dir: a folder on a tmpfs for CRIU's cache.
        timeout_s: seconds that CRIU may be silent.
        while_frozen: called at `post-dump`, when every process is dumped and still stopped; raising fails the dump.

    Raises:
        DumpError: with the log around each error; `.interrupted` is true when CRIU ended or hung in the middle, so
            that the processes may be damaged.

    Cancellation: not while CRIU works; the caller shields and bounds it.
    """
    failure: Exception | None = None
    try:
        async with _directories(images) as (fd,), _swrk(criu, [], kdat_dir, timeout_s, paths=[root]) as session:
            request = _options(session.rpc, fd, fd, root)
            request.type = session.rpc.DUMP
            request.opts.pid = pid
            request.opts.leave_running = True
            request.opts.external.append(f"mnt[/dev]:{DEV_KEY}")
            await session.send(request)
            while True:
                message = await session.receive()
                if message.type != session.rpc.NOTIFY:
                    break
                if message.notify.script == "post-dump":
                    try:
                        await while_frozen()
                    except Exception as e:  # noqa: BLE001 - CRIU must hear of it first, so that the tree runs on
                        failure = e
                await session.answer(success=failure is None)
    except (ConnectionError, TimeoutError, OSError) as e:
        raise DumpError(
            f"dump of pid {pid} broke off: {e}",
            interrupted=not isinstance(e, OSError) or isinstance(e, ConnectionError | TimeoutError),
            log_excerpt=log_excerpt(images / "criu.log"),
        ) from e
    if failure is not None:
        raise failure
    if not message.success:
        excerpt = log_excerpt(images / "criu.log")
        raise DumpError(
            f"dump of pid {pid} failed: {_said(criu, message)}: {excerpt}{_lack_of_space(images)}",
            interrupted=False,
            log_excerpt=excerpt,
        )


def _said(criu: Criu, message: Any) -> str:
    """What a failed reply of CRIU says: its first error, unless that is one that every run has."""
    text = message.cr_errmsg.strip()
    if not text or any(h in text for h in HARMLESS):
        text = f"error {message.cr_errno}"
    return f"criu {criu.version} says {text}"


def _lack_of_space(folder: Path) -> str:
    """Words on a full file system, on which CRIU could not even write its log."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    return "" if free >= _LOG_BYTES else f"; {os.strerror(errno.ENOSPC)} on {str(folder)!r}: {free} bytes are free"


@attrs.define(eq=False)
class HeldRestore:
    """A desktop that CRIU has rebuilt and holds before its first instruction."""

    pid1: int
    criu_pid: int
    _session: _Session
    _log: Path
    released: bool = False

    async def release(self) -> None:
        """Let CRIU finish. Under a frozen cgroup nothing runs until it is thawed.

        Raises:
            RestoreError: CRIU failed at the last step.
        """
        await self._session.answer()
        message = await _next(self._session, self._log, {"post-resume": None})
        if not message.success:
            raise RestoreError(
                f"restore failed at its last step: {message.cr_errmsg.strip() or message.cr_errno}",
                log_excerpt=log_excerpt(self._log),
            )
        self.released = True


async def _next(session: _Session, log: Path, hooks: dict[str, Callable[[int], Awaitable[None]] | None]) -> Any:
    """Answer notifications, calling their hooks, until CRIU's final reply; that reply."""
    try:
        while True:
            message = await session.receive()
            if message.type != session.rpc.NOTIFY:
                return message
            hook = hooks.get(message.notify.script)
            if hook is not None:
                await hook(message.notify.pid)
            await session.answer()
    except (ConnectionError, TimeoutError) as e:
        raise RestoreError(f"restore broke off: {e}", log_excerpt=log_excerpt(log)) from e


@asynccontextmanager
async def hold_restore(
    criu: Criu,
    *,
    images: Path,
    work: Path,
    root: Path,
    dev: Path,
    cgroup_paths: Sequence[Path],
    kdat_dir: Path,
    timeout_s: float,
    on_pid1: Callable[[int], None],
    at_post_restore: Callable[[], Awaitable[None]],
) -> AsyncIterator[HeldRestore]:
    """Restore `images`, up to `pre-resume`: everything is there and nothing has run.

    Args:
        images: the folder of the images.
        work: a folder for `criu.log`.
        root: the mounted root to restore on.
        dev: the host's shared `/dev`, handed in as the external mount.
        cgroup_paths: cgroup directories that CRIU is put into, and so the desktop.
        on_pid1: told the host pid of the new init as soon as it exists (a child of this process).
        at_post_restore: called when memory and files are rebuilt, before CRIU traces the tasks: the moment at which
            drums may trace them itself.

    Raises:
        RestoreError: with the log around each error.

    Cancellation: leaving the block without `release` kills the new init first, because CRIU's death resumes a held
    tree; the caller reaps it and thaws its cgroup.
    """
    log = work / "criu.log"
    async with AsyncExitStack() as stack:
        pid1, criu_pid = 0, 0

        @stack.callback
        def adopt_unheard() -> None:
            # The restore ended between init's birth and the message that names it; CRIU is reaped by now.
            for pid in _children_in_session(criu_pid) if criu_pid and not pid1 else ():
                on_pid1(pid)

        plan: Plan = [["cgroups", [str(p) for p in cgroup_paths]]]
        session = await stack.enter_async_context(_swrk(criu, plan, kdat_dir, timeout_s, paths=[root, dev]))
        criu_pid = session.process.pid
        # CRIU opens these through /proc/PID/fd of the requester, up to its first notification.
        images_fd, work_fd = await stack.enter_async_context(_directories(images, work))
        request = _options(session.rpc, images_fd, work_fd, root)
        request.type = session.rpc.RESTORE
        request.opts.rst_sibling = True
        request.opts.external.append(f"mnt[{DEV_KEY}]:{dev}")
        await session.send(request)
        held: HeldRestore | None = None

        @stack.callback
        def kill_unreleased() -> None:
            # Our own unreaped child: its pid cannot have passed to another process.
            if pid1 and not (held and held.released):
                os.kill(pid1, signal.SIGKILL)

        try:
            while True:
                message = await session.receive()
                if message.type != session.rpc.NOTIFY:
                    excerpt = log_excerpt(log)
                    raise RestoreError(
                        f"restore failed: {_said(criu, message)}: {excerpt}",
                        log_excerpt=excerpt,
                    )
                if message.notify.pid and not pid1:
                    pid1 = message.notify.pid
                    on_pid1(pid1)
                if message.notify.script == "post-restore":
                    await at_post_restore()
                if message.notify.script == "pre-resume":
                    break
                await session.answer()
        except (ConnectionError, TimeoutError) as e:
            raise RestoreError(f"restore broke off: {e}; {await _stderr(session)}", log_excerpt=log_excerpt(log)) from e
        if not pid1:
            raise CheckpointError("criu named no init for the restored tree")
        held = HeldRestore(pid1=pid1, criu_pid=session.process.pid, session=session, log=log)
        yield held


def _children_in_session(session: int) -> list[int]:
    """This process's children, zombies included, that are in a session (proc(5), `stat`)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == os.getpid() and int(fields[3]) == session:
                found.append(int(name))
    return found


async def _stderr(session: _Session) -> str:
    """What the helper wrote before it became CRIU; bounded, and never waited for long."""
    if session.process.stderr is None:
        return ""
    with trio.move_on_after(0.5):
        return (await session.process.stderr.receive_some(4000)).decode(errors="replace").strip()
    return ""
