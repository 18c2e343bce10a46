"""Connections to ports of a desktop that clients reach through the daemon: a browser's debugging port, VLC's page.

What answers there is the agent's as far as anybody can tell, so nothing that it says is believed or followed. No
connection outlives the moment at which the desktop is frozen, since it would be dumped with it, or no longer acts.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import attrs
import trio

from drums.errors import PortError, PortNotAllowed
from drums_core.sys.inside import tcp_socket_in

CONNECT_LIMIT_S = 10.0
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class PortClosed(Exception):
    """The slot ended a connection; the message says why."""


@attrs.define(eq=False)
class _Use:
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    sock: trio.socket.SocketType | None = None
    ended: str = ""


@attrs.define(eq=False)
class PortUses:
    """The open connections of one slot."""

    _uses: set[_Use] = attrs.field(factory=set)

    def __len__(self) -> int:
        return len(self._uses)

    @asynccontextmanager
    async def open(self, netns_fd: int, port: int) -> AsyncIterator[trio.SocketStream]:
        """A stream to a port of the loopback in a network namespace.

        Args:
            netns_fd: the namespace; the descriptor may be closed meanwhile.
            port: 1 to 65535.

        Raises:
            PortError: nothing listens there.
            PortClosed: `end` was called before the block was done, which is cancelled by that.
        """
        use = _Use()
        self._uses.add(use)
        netns = os.dup(netns_fd)  # so that it names no other desktop's by the time that it is used
        try:
            with use.scope:
                use.sock = trio.socket.from_stdlib_socket(await trio.to_thread.run_sync(tcp_socket_in, netns))
                # No half-closed end stays behind in the desktop, whose checkpoints would have it.
                use.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                await _connect(use.sock, port)
                yield trio.SocketStream(use.sock)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as e:
            if use.ended:  # what was being read or sent noticed first
                raise PortClosed(use.ended) from e
            raise
        finally:
            self._uses.discard(use)
            if use.sock is not None:
                use.sock.close()
            os.close(netns)
        if use.ended:
            raise PortClosed(use.ended)

    def end(self, why: str) -> None:
        """Close every connection now, whatever those who use it are at."""
        for use in self._uses:
            use.ended = use.ended or why
            use.scope.cancel()
            if use.sock is not None:
                use.sock.close()


def require_allowed(port: int, allowed: Collection[int]) -> None:
    """Refuse a port that the host's configuration does not list.

    Raises:
        PortNotAllowed: so it is.
    """
    if port not in allowed:
        raise PortNotAllowed(
            f"port {port} of a desktop is not let through, allowed are {', '.join(map(str, allowed)) or 'none'}",
            hint="list it under `ports` in the host's configuration",
            port=port,
            allowed=list(allowed),
        )


async def _connect(sock: trio.socket.SocketType, port: int) -> None:
    try:
        with trio.fail_after(CONNECT_LIMIT_S):
            await sock.connect(("127.0.0.1", port))
    except trio.TooSlowError:
        raise PortError(
            f"port {port} of the desktop took no connection within {CONNECT_LIMIT_S:g} s", port=port
        ) from None
    except OSError as e:
        raise PortError(
            f"port {port} of the desktop takes no connection: {e.strerror or e}",
            hint="start the program that listens there, on 127.0.0.1, and wait until it does",
            port=port,
        ) from e
