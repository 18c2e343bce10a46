"""Reaching into a desktop's namespaces from the host: sockets, and paths through its root."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from drums_core.sys.enter import checked, libc, setns

T = TypeVar("T")
_CLONE_FS = 0x200
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "time")


def in_namespace(fd: int, kind: str, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own that has entered the namespace, and then ends.

    Never in a pooled thread: one that failed to come back would poison the pool (setns(2) acts on a thread).
    Blocks until `work` is done. In a mount namespace, `work` imports and opens nothing that it does not mean to find
    there: root and working folder are that namespace's.

    Args:
        fd: of the namespace, or of a process that is in it (pidfd_open(2)).
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        try:
            if kind == "mnt":
                # A thread that shares root and working folder with others may not leave them (setns(2)).
                checked(libc.unshare(_CLONE_FS), "unshare fs")
            setns(fd, kind)
            result.append(work())
        except BaseException as e:  # noqa: BLE001 - handed on to the caller below
            failure.append(e)

    thread = threading.Thread(target=enter, name=f"drums-{kind}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def tcp_socket_in(netns_fd: int) -> socket.socket:
    """A TCP socket that lives in a network namespace, whoever uses it afterwards."""
    return in_namespace(
        netns_fd, "net", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    )


def open_namespace(pid: int, kind: str) -> int:
    """A descriptor of a process's namespace."""
    return os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def open_namespaces(pid: int) -> Iterator[list[tuple[int, str]]]:
    """Descriptors of all of a desktop's namespaces, with their kinds, in the order in which they are entered.

    Raises:
        OSError: before the block: one cannot be opened.
    """
    with ExitStack() as stack:
        found = []
        for kind in NAMESPACES:
            found.append((open_namespace(pid, kind), kind))
            stack.callback(os.close, found[-1][0])
        yield found
