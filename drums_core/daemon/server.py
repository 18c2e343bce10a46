"""Connections: Hypercorn's HTTP/1.1 on trio, so that no connection can harm another or the daemon.

Hypercorn runs every connection in its server's nursery, where one protocol error ends all of them; here each has its
own end. There is no HTTP/2, and a websocket only to a port of a desktop: elsewhere a client gets HTTP/1.1 whatever
upgrade it asks for.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
from functools import partial
from pathlib import Path

import attrs
import h11
import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp

from drums.errors import ConfigError, PrerequisiteError
from drums_core.daemon.answers import refusal
from drums_core.daemon.problems import ConnectionLimit

_log = structlog.get_logger("drums.http")
IDLE_S = 15.0  # also for a request's head
SEND_LIMIT_S = 30.0
LINGER_S = 1.0
LINGER_BYTES = 4 << 20
GRACE_S = 3.0
_HEAD_LIMIT_BYTES = 32 << 10
_UPGRADABLE = re.compile(rb"/v1/slots/[^/?#]+/ports/[^/?#]+/")


# --- where


def open_socket(listen: str, *, allow_remote: bool) -> socket.socket:
    """A bound socket that does not listen yet.

    Args:
        listen: `HOST:PORT`, `[HOST]:PORT` or `unix:/path`; port 0 is any free one.
        allow_remote: whether the host may be an address that other machines reach.

    Raises:
        ConfigError: malformed, or not allowed.
        PrerequisiteError: somebody else listens there, or it cannot be bound.
    """
    if listen.startswith("unix:"):
        return _open_unix(Path(listen.removeprefix("unix:")))
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"listen is {listen!r}, expected HOST:PORT or unix:/path", path="$.listen")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as e:
        raise ConfigError(f"listen is {listen!r}: {host!r} is no IP address", path="$.listen") from e
    if not address.is_loopback and not allow_remote:
        raise ConfigError(
            f"listen is {listen!r}, which other machines reach: the token would travel in the clear",
            hint="listen on 127.0.0.1 and put TLS in front of it, or set allow_remote = true",
            path="$.listen",
        )
    sock = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(address), int(port)))
    except OSError as e:
        sock.close()
        raise _unusable(listen, e) from e
    return sock


def _open_unix(path: Path) -> socket.socket:
    if not path.is_absolute():
        raise ConfigError(f"listen is 'unix:{path}', expected an absolute path", path="$.listen")
    probe = socket.socket(socket.AF_UNIX)
    try:
        if stat.S_ISSOCK(path.lstat().st_mode):
            probe.connect(str(path))
            raise _unusable(f"unix:{path}", OSError(errno.EADDRINUSE, "somebody listens there"))
    except ConnectionRefusedError:
        path.unlink()  # left by a daemon that was killed
    except FileNotFoundError:
        pass
    except OSError as e:
        raise _unusable(f"unix:{path}", e) from e
    finally:
        probe.close()
    sock = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as e:
        sock.close()
        raise _unusable(f"unix:{path}", e) from e
    finally:
        os.umask(old)
    return sock


def _unusable(listen: str, error: OSError) -> PrerequisiteError:
    hint = "another daemon listens there; stop it, or listen elsewhere" if error.errno == errno.EADDRINUSE else ""
    return PrerequisiteError(f"cannot listen on {listen!r}: {error.strerror or error}", hint=hint, listen=listen)


def close_socket(sock: socket.socket, listen: str) -> None:
    """Close what `open_socket` gave, and remove its file if it has one."""
    sock.close()
    if listen.startswith("unix:"):
        Path(listen.removeprefix("unix:")).unlink(missing_ok=True)


def url_of(sock: socket.socket) -> str:
    """What a client connects to."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# --- connections


class _Pipelined(Exception):
    """The client sends its next request before it has its answer."""


class _RefusedEvent:
    """Stands for the event on which Hypercorn waits with a next request: it would not see the client leave then."""

    async def clear(self) -> None:
        pass

    async def set(self) -> None:
        pass

    async def wait(self) -> None:
        raise _Pipelined


class _PlainHTTP(H11Protocol):
    """HTTP/1.1 without pipelining, and without upgrades but to a desktop's port.

    What follows a request too early is dropped, and its client told by the connection's end.
    """

    _pipelined = False

    def forbid_pipelining(self) -> None:
        self.can_read = _RefusedEvent()  # type: ignore[assignment]

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData) and self._pipelined:
            return
        try:
            await super().handle(event)
        except _Pipelined:
            self._pipelined = True
            self.keep_alive_requests = self.config.keep_alive_max_requests  # says `Connection: close`

    async def _maybe_recycle(self) -> None:
        if self._pipelined:
            await self._close_stream()
            await self.send(Closed())
        else:
            await super()._maybe_recycle()

    async def _check_protocol(self, event: h11.Request) -> None:
        pass

    async def _create_stream(self, request: h11.Request) -> None:
        upgradable = _UPGRADABLE.match(request.target) is not None
        headers = [(name, value) for name, value in request.headers if upgradable or name.lower() != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method, target=request.target, headers=headers, http_version=request.http_version
            )
        )


class _Connection(TCPServer):
    """One connection. Whatever goes wrong in it stays in it."""

    _closing = False
    _dropped_bytes = 0
    protocol: _PlainHTTP  # type: ignore[assignment]  # the wrapper's only purpose is HTTP/2
    _read_to_end: trio.Event
    _reader: trio.lowlevel.Task

    async def run(self) -> None:
        """Serve it to its end."""
        self._read_to_end = trio.Event()
        self._reader = trio.lowlevel.current_task()
        sock = self.stream.socket
        try:
            client = parse_socket_addr(sock.family, sock.getpeername())
            server = parse_socket_addr(sock.family, sock.getsockname())
            async with TaskGroup() as group:
                self._task_group = group
                self.protocol = _PlainHTTP(
                    self.app,
                    self.config,
                    self.context,
                    group,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                self.protocol.forbid_pipelining()
                await self.idle_task.restart(group, self._idle_timeout)
                await self._read_data()
                await self.idle_task.stop()
        except Exception as e:  # noqa: BLE001 - a client's nonsense, or a defect of the protocol's library
            _log.debug("a connection was dropped", error=repr(e))
        finally:
            self._read_to_end.set()
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Send; a client that does not read for too long loses its connection."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_LIMIT_S) as scope:
                try:
                    await self.stream.send_all(event.data)
                    return
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
            if scope.cancelled_caught:
                await trio.aclose_forcefully(self.stream)
        await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        while True:
            try:
                data = await self.stream.receive_some(MAX_RECV)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                break
            if not self._closing:
                await self.protocol.handle(RawData(bytes(data)))
            elif self._drops(data):
                break
            if not data:
                break
        self._read_to_end.set()
        if not self._closing:
            await self.protocol.handle(Closed())

    def _drops(self, data: bytes | bytearray) -> bool:
        """Whether what is read and dropped has come to its end, or is too much."""
        self._dropped_bytes += len(data)
        return not data or self._dropped_bytes > LINGER_BYTES

    async def _close(self) -> None:
        # Data that is not read at a close makes the kernel reset the connection, and the answer with it: what still
        # comes is read and dropped for a moment.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + LINGER_S):
            self._closing = True
            try:
                async with self.send_lock:
                    await self.stream.send_eof()
                if trio.lowlevel.current_task() is not self._reader:
                    await self._read_to_end.wait()
                while trio.lowlevel.current_task() is self._reader:
                    if self._drops(await self.stream.receive_some(MAX_RECV)):
                        break
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                pass
        await trio.aclose_forcefully(self.stream)


@attrs.define(eq=False)
class Server:
    """Serves an application on listening sockets until `stop` is set.

    Args:
        max_connections: one more is answered with `connection_limit` and closed.
    """

    app: ASGIApp
    sockets: list[socket.socket]
    max_connections: int
    stop: trio.Event = attrs.field(factory=trio.Event)
    _open: set[trio.SocketStream] = attrs.field(factory=set)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve; returns once every connection is closed, `GRACE_S` after the stop at the latest."""
        config = Config()
        config.errorlog = config.accesslog = None
        config.include_server_header = False
        config.keep_alive_timeout = IDLE_S
        config.h11_max_incomplete_size = _HEAD_LIMIT_BYTES
        context = WorkerContext(None)
        wrapped = ASGIWrapper(self.app)  # type: ignore[arg-type]
        listeners = []
        for sock in self.sockets:
            sock.listen(128)
            listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                handle = partial(self._handle, wrapped, config, context)
                accepting.start_soon(partial(trio.serve_listeners, handle, listeners, handler_nursery=connections))
                task_status.started()
                await self.stop.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            with trio.move_on_after(GRACE_S):
                while self._open:  # noqa: ASYNC110 - they end by themselves
                    await trio.sleep(0.02)
            for stream in list(self._open):
                stream.socket.close()  # ends even a send that is shielded
            connections.cancel_scope.cancel()

    async def _handle(
        self, app: ASGIWrapper, config: Config, context: WorkerContext, stream: trio.SocketStream
    ) -> None:
        if len(self._open) >= self.max_connections:
            await self._turn_away(stream)
            return
        self._open.add(stream)
        try:
            await _Connection(app, config, context, LifespanState(), stream).run()  # type: ignore[arg-type]
        finally:
            self._open.discard(stream)

    async def _turn_away(self, stream: trio.SocketStream) -> None:
        answer = refusal(ConnectionLimit(f"{len(self._open)} clients are connected, as many as allowed"))
        content = answer.content()
        head = (
            f"HTTP/1.1 {answer.status} Service Unavailable\r\nContent-Type: {answer.media_type}\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        try:
            with trio.move_on_after(LINGER_S):
                async with stream:
                    await stream.send_all(head.encode() + content)
                    await stream.send_eof()
                    await stream.receive_some(1 << 16)
        except (OSError, trio.BrokenResourceError):
            pass
