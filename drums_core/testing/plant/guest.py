"""A guest server that does not answer, answers wrongly, or has somebody else answer on its port.

Sources: signal(7); the protocol is that of `drums_core.guest_client`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from drums_core.sys.descriptors import open_targets, shared_description
from drums_core.testing.plant.target import Target, stay, wait_for

_SERVER = "/opt/drums/guest/server.py"
_SECRET = "run/drums-guest/secret"


def stop_server(target: Target, resume_after_s: float = 0.0) -> None:
    """SIGSTOP whatever serves the guest's port: it is not started anew, as it would be if it ended.

    Args:
        resume_after_s: seconds after which it goes on; 0 is never.
    """
    stopped = target.running(_SERVER)
    if not stopped:
        raise LookupError("no guest server among the desktop's processes")
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    if resume_after_s:
        pidfds = [os.pidfd_open(pid) for pid in stopped]

        def prepare() -> Callable[[], object]:
            def work() -> None:
                time.sleep(resume_after_s)
                for pidfd in pidfds:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGCONT)

            return work

        stay(prepare)


def change_secret(target: Target) -> None:
    """Let the guest server know another secret than its desktop's."""
    with open(f"/proc/{target.pid1}/root/{_SECRET}", "r+b") as f:
        secret = f.read()
        f.seek(0)
        f.write(secret[::-1] if secret[::-1] != secret else b"0" * len(secret))


def answer_instead(target: Target, how: str) -> None:
    """Stop the guest server and answer on its port in its place, for as long as the desktop lives.

    Args:
        how: `silent` takes connections and says nothing, `closes` closes them, `babbles` speaks no HTTP, `unproven`
            answers 200 as anybody could, `fails` answers 500 with the server's own proof.
    """
    listener = _listening_socket(target)
    secret = Path(f"/proc/{target.pid1}/root/{_SECRET}").read_text(encoding="ascii").strip()
    stop_server(target)

    def prepare() -> Callable[[], object]:
        pidfd = os.pidfd_open(target.pid1)

        def work() -> None:
            listener.settimeout(0.5)
            kept = []
            while not wait_for(pidfd, 0):
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    if how == "silent":
                        kept.append(connection)
                        continue
                    with connection:
                        connection.settimeout(2.0)
                        if how != "closes":
                            connection.sendall(_reply(how, connection.recv(1 << 16), secret))

        return work

    stay(prepare)


def _reply(how: str, request: bytes, secret: str) -> bytes:
    if how == "babbles":
        return b"220 desktop ESMTP\r\n"
    head = "HTTP/1.1 {}\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
    if how == "unproven":
        return (head.format("200 OK") + f"X-Drums-Proof: {'0' * 64}\r\n\r\n").encode()
    nonce = next(
        line.partition(b":")[2].strip().decode()
        for line in request.splitlines()
        if line.lower().startswith(b"x-drums-nonce:")
    )
    fields = ["drums-reply", nonce, "500", "text/plain", hashlib.sha256(b"ok").hexdigest()]
    message = b"".join(b"%d:%s," % (len(x), x.encode()) for x in fields)
    proof = hmac.digest(secret.encode(), message, "sha256").hex()
    return (head.format("500 Internal Server Error") + f"X-Drums-Proof: {proof}\r\n\r\n").encode()


def _listening_socket(target: Target) -> socket.socket:
    """The guest server's own listening socket."""
    for pid in target.running(_SERVER):
        for number, path in open_targets(pid):
            if not path.startswith("socket:"):
                continue
            found = socket.socket(fileno=shared_description(pid, number))
            if found.family == socket.AF_INET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return found
            found.close()
    raise LookupError("the guest server listens on no TCP socket")
