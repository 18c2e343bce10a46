#!/usr/bin/python3 -I
"""The guest server: OSWorld's HTTP dialect on 127.0.0.1:5000, for whoever signs with the desktop's secret (signing.py).

Two processes. The spawner (spawner.py) keeps the capabilities to become the user. This one gives them up, speaks HTTP,
and asks the spawner for everything that is done in the user's name.

The agent can connect too. So one thread takes connections and reads heads, without ever waiting for a client, and only
a signed request reaches the worker threads; and since all threads exist from the start, a desktop at its limit
of processes still answers.
"""

import contextlib
import dataclasses
import os
import queue
import selectors
import socket
import sys
import threading
import time

sys.path.append("/opt/drums")

from guest import kernel, signing, spawner, wire
from guest.jobs import Jobs
from guest.routes import Routes

PORT = 5000
SECRET_FILE = "/run/drums-guest/secret"
_SECRET_LENGTH = 64
_WORKERS = 8
_COMMANDS_AT_ONCE = 5
_HEAD_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 128


def read_secret():
    """The desktop's secret, read anew each time: the host writes another one over it in each copy of a desktop.

    Raises:
        HttpError: there is none to compare with.
    """
    try:
        with open(SECRET_FILE, "rb", buffering=0) as file:
            secret = file.read(_SECRET_LENGTH + 1)
    except OSError as error:
        raise wire.HttpError(503, f"the secret cannot be read: {error.strerror}") from error
    if len(secret) != _SECRET_LENGTH:
        raise wire.HttpError(503, "the secret is malformed")
    return secret


@dataclasses.dataclass
class _Client:
    """A connection whose head is being read, or that was refused and is still sending."""

    socket: socket.socket
    deadline: float
    data: bytearray = dataclasses.field(default_factory=bytearray)
    refused: bool = False


class Front:
    """Takes connections, reads heads, checks their signatures; single-threaded.

    Args:
        listener: the listening socket.
        channel: the spawner's socket, watched for its end.
        accepted: where verified requests go: connection, request, begin of the body, exchange.
        gate: verifies a request's head.
    """

    def __init__(self, listener, channel, accepted, gate):
        self._listener = listener
        self._channel = channel
        self._accepted = accepted
        self._gate = gate
        self._clients = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(channel, selectors.EVENT_READ)

    def run(self):
        """Serves until the spawner is gone."""
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is self._channel:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._clients:
                    self._receive(self._clients[key.fileobj])
            now = time.monotonic()
            for client in [client for client in self._clients.values() if client.deadline <= now]:
                self._forget(client)
                client.socket.close()

    def _wait_s(self):
        if not self._clients:
            return None
        return max(0.0, min(client.deadline for client in self._clients.values()) - time.monotonic())

    def _accept(self):
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The client is gone already, or descriptors are short: those that wait are dropped in time.
            return
        if len(self._clients) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._clients.values()))
            self._forget(oldest)
            oldest.socket.close()
        connection.setblocking(False)
        client = _Client(connection, time.monotonic() + _HEAD_TIMEOUT_S)
        self._clients[connection] = client
        self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self, client):
        self._selector.unregister(client.socket)
        del self._clients[client.socket]

    def _receive(self, client):
        try:
            data = client.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(client)
            client.socket.close()
            return
        if client.refused:
            return
        client.data += data
        try:
            parsed = wire.parse_head(client.data)
            if parsed is None:
                return
            request, body_start = parsed
            exchange = self._gate.admit(request)
        except wire.HttpError as error:
            self._refuse(client, error)
            return
        self._forget(client)
        client.socket.setblocking(True)
        self._accepted.put((client.socket, request, bytes(client.data[body_start:]), exchange))

    def _refuse(self, client, error):
        """Answers, and lets the client go on sending for a moment, as a reset would lose it the answer."""
        client.refused = True
        client.data.clear()
        client.deadline = time.monotonic() + 1.0
        with contextlib.suppress(OSError):
            client.socket.send(wire.encode(wire.error_reply(error)))
            client.socket.shutdown(socket.SHUT_WR)


def _work(accepted, routes):
    while True:
        connection, request, begun, exchange = accepted.get()
        with contextlib.suppress(OSError):
            _answer(connection, request, begun, exchange, routes)
        wire.close(connection)


def _answer(connection, request, begun, exchange, routes):
    prove = None
    try:
        wire.read_body(connection, request, begun)
        exchange.check_body(request.body)
        prove = exchange.proof
        reply = routes.dispatch(request)
    except wire.HttpError as error:
        reply = wire.error_reply(error)
    except Exception as error:  # noqa: BLE001 - one request's fault must not cost the desktop a thread
        reply = wire.error_reply(wire.HttpError(500, f"{type(error).__name__}: {error}"))
    wire.send_reply(connection, reply, prove)


def main():
    """Starts the spawner and serves until it is gone."""
    os.umask(0o077)
    kernel.give_memory_back()
    kernel.set_dumpable(False)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", PORT))
    # At once: until a port is listened on, another program can still take it.
    listener.listen(128)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # While there is one thread only, and before the secret was ever read.
    if os.fork() == 0:
        listener.close()
        ours.close()
        try:
            spawner.main(theirs)
        finally:
            os._exit(1)
    theirs.close()
    kernel.drop_capabilities()
    accepted = queue.SimpleQueue()
    routes = Routes(Jobs(ours), threading.BoundedSemaphore(_COMMANDS_AT_ONCE))
    for _ in range(_WORKERS):
        threading.Thread(target=_work, args=(accepted, routes), daemon=True).start()
    Front(listener, ours, accepted, signing.Gate(read_secret)).run()
    # init.sh starts both again.
    os._exit(1)


if __name__ == "__main__":
    main()
