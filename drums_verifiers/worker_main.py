"""The worker's own side of the sandbox: waits for one request, runs the job's function on it, writes one reply.

Stand-alone: the standard library alone. It is started before anyone knows for what: then it imports what it is told to
of the standard library, of which nothing else can be found yet, and says that it waits. The request is a JSON document
in one line on standard input, which the host keeps open: it is the leash. When the host dies its end closes, and the
kernel then ends this process, and with it the sandbox.

The reply's descriptor gets a blank for "waits", a newline for "has a job", and then the reply in JSON. The job's
function is called once the host has written to the descriptor `go`. One that is a generator function is called at once,
and has its first part, up to its `yield`, run before that: imports, while there is no desktop to ask yet.
"""

from __future__ import annotations

import fcntl
import importlib
import inspect
import json
import os
import select
import signal
import sys
import tarfile
import traceback
from collections.abc import Callable, Generator
from typing import Any

_SCRATCH_LEFT = 64 << 10


def _reply(fd: int, document: dict[str, Any]) -> None:
    try:
        data = json.dumps(document).encode()
    except (TypeError, ValueError) as e:
        data = json.dumps({"ok": False, "type": type(e).__name__, "message": str(e), "traceback": ""}).encode()
    while data:
        data = data[os.write(fd, data) :]


def _end(parts: Generator[None, None, Any]) -> Any:
    """What the last part of a job returns."""
    try:
        next(parts)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the job has more than two parts")


def _called(function: Callable[[Any], Any], request: Any, go: int) -> Any:
    if not inspect.isgeneratorfunction(function):
        _wait(go)
        return function(request)
    parts = function(request)
    try:
        next(parts)
    except StopIteration as end:  # it has its answer already
        return end.value
    _wait(go)
    return _end(parts)


def _wait(go: int) -> None:
    told = os.read(go, 1)
    os.close(go)
    if not told:
        os._exit(3)  # the host is gone


def _outcome(call: dict[str, Any], go: int) -> dict[str, Any]:
    try:
        sys.path[:0] = call["path_first"]
        sys.path += call["path_last"]
        module, _, function = call["job"].partition(":")
        value = _called(getattr(importlib.import_module(module), function), call["request"], go)
        free = os.statvfs(".")
        if free.f_bavail * free.f_frsize < _SCRATCH_LEFT or free.f_favail < 8:
            # A checker that met ENOSPC has probably swallowed it.
            raise OSError(28, "the worker's scratch directory is full")
    except BaseException as e:  # noqa: BLE001 - whatever ends a job is the host's to judge
        text = "".join(traceback.format_exception(e))
        return {"ok": False, "type": type(e).__name__, "message": str(e)[:2000], "traceback": text[-8000:]}
    return {"ok": True, "value": value}


def _leash() -> None:
    """Be ended by the kernel when standard input closes (fcntl(2): O_ASYNC; SIGIO's default action ends a process).

    Not `PR_SET_PDEATHSIG`: the host's process that would have to carry it is started by a thread that ends earlier.
    """
    fd = os.dup(0)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        os._exit(3)  # it closed before the kernel was asked to tell


def _guard_archives() -> None:
    """Let no member of a tar archive leave the folder that it is unpacked to: the expected files are beside it.

    Python's own filter `data` is not enough: before 3.11.13 and 3.12.11 it takes a link whose real path is too long for
    the system for one that stays inside (CVE-2025-4517). A link to a neighbour leads nowhere else, however many follow
    one another; one with more than a name is refused. Before 3.11.4 tarfile has no filters, and unpacks nothing here.
    """
    archive: Any = tarfile.TarFile
    if not hasattr(tarfile, "data_filter"):
        archive.extractall = archive.extract = _refuse
        return

    def kept_inside(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if member.issym() and ("/" in member.linkname or member.linkname in ("", ".", "..")):
            raise tarfile.LinkOutsideDestinationError(member, path)
        return tarfile.data_filter(member, path)

    archive.extraction_filter = staticmethod(kept_inside)


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError(
        "this Python's tarfile has no filters, 3.11.4 is needed: no archive of the desktop's is unpacked"
    )


def main() -> None:
    """Serve the one request."""
    fd, go = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(fd, False)
    os.set_inheritable(go, False)
    for name in sys.argv[3:]:
        importlib.import_module(name)
    # Python ignores it, and a file that is too large would then be an error that checkers swallow into a 0.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _guard_archives()
    os.write(fd, b" ")
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(3)
    call = json.loads(line)
    _leash()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.write(fd, b"\n")
    _reply(fd, _outcome(call, go))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that a job left do not hold the reply back


if __name__ == "__main__":
    main()
