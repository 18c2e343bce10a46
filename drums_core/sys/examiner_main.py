"""The examiner, the part that runs inside a frozen copy of a desktop: a second guest server, for the checker alone.

The host enters the copy's namespaces and runs this file's source with the image's interpreter (`python3 -I -c SOURCE
FD`). It serves the guest server's own routes, with the guest server's own code, on the listening socket FD, whose
address lies in the host's network namespace; it ends when its standard input closes.

What differs from the desktop's guest server (docs/adr/0005-grade-a-frozen-copy.md):

- It and what it starts are in a cgroup of their own, so they run while every process of the desktop is frozen.
- What it starts keeps one capability, CAP_WAKE_ALARM, which gives nothing in a user namespace that is not the first.
  The kernel lets no process look into another that holds a capability which it lacks (ptrace(2), "Ptrace access mode
  checking"): no `/proc/PID/fd`, no pidfd_getfd, no memory. So a thawed process of the agent, although of the same
  user, cannot reach a command's pipes.
- Python ignores what the user installed for himself, and code given with `-c` imports nothing from the working folder.
- `pyautogui` is loaded when it is first used: it asks the display, which is frozen, as it is imported.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import os
import queue
import re
import socket
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

sys.path.append("/opt/drums")

from guest import child, identity, kernel, server, signing, spawner  # type: ignore[import-not-found]
from guest.jobs import Jobs  # type: ignore[import-not-found]
from guest.routes import Routes  # type: ignore[import-not-found]

_CAP_WAKE_ALARM = 35
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL, _PR_SET_NO_NEW_PRIVS = 47, 2, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
_INLINE_PYTHON = re.compile(r"\bpython[\d.]*\s+(-\w+\s+)*-c\b")
_SCRIPT = re.compile(r"\.py\b")
_OWN_PATH = "__import__('sys').path[:] = [p for p in __import__('sys').path if p and not p.startswith('/home/')]"

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, first: int, second: int) -> None:
    words = [ctypes.c_ulong(x) for x in (first, second, 0, 0)]
    _checked(_libc.prctl(option, *words), f"prctl {option}")


def become(uid: int, gid: int, groups: Sequence[int]) -> None:
    """As `kernel.become`, but for the one capability that is kept, through execve(2) as well (ambient)."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    high = 1 << (_CAP_WAKE_ALARM - 32)
    only = (ctypes.c_uint32 * 6)(0, 0, 0, high, high, high)
    _checked(_libc.capset(header, only), "capset")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_WAKE_ALARM)
    held = (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(header, held), "capget")
    if list(held) != list(only) or os.getresuid() != (uid,) * 3 or os.getresgid() != (gid,) * 3:
        raise PermissionError(f"still {os.getresuid()}, {os.getresgid()}, capabilities {list(held)}")


class Late(types.ModuleType):
    """A module that is imported when something of it is first used; what is set before is set then."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        early = {k: v for k, v in vars(self).items() if not k.startswith("__")}
        del sys.modules[self.__name__]
        real = importlib.import_module(self.__name__)
        for key, value in early.items():
            setattr(real, key, value)
        # A name that was bound before goes on through this object.
        vars(self).update({k: v for k, v in vars(real).items() if not k.startswith("__")})
        return getattr(real, name)


def _python(status: Any, data: Any, code: Any) -> Any:
    sys.modules["pyautogui"] = Late("pyautogui")
    with contextlib.suppress(SyntaxError, ValueError):  # the operation tells of it as it always does
        tree = ast.parse(code, "<string>")
        futures = [x for x in tree.body if isinstance(x, ast.ImportFrom) and x.module == "__future__"]
        place = 1 + tree.body.index(futures[-1]) if futures else 0
        tree.body[place:place] = ast.parse(_OWN_PATH).body
        code = tree
    return _plain_python(status, data, code)


def _exec(status: Any, data: Any, argv: list[str]) -> Any:
    line = " ".join(argv)
    if _INLINE_PYTHON.search(line) and not _SCRIPT.search(line):
        os.environ["PYTHONSAFEPATH"] = "1"
    return _plain_exec(status, data, argv)


_plain_python, _plain_exec = child._OPERATIONS["python"], child._OPERATIONS["exec"]


def _prepare() -> None:
    os.environ.clear()
    os.environ.update(identity.ENVIRONMENT)


def _leash() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Serve until standard input closes."""
    os.umask(0o077)
    kernel.set_dumpable(False)
    identity.ENVIRONMENT["PYTHONNOUSERSITE"] = "1"
    kernel.become = become
    child._OPERATIONS.update(python=_python, exec=_exec)
    spawner._preload = _prepare  # one check does not make up for the time that it takes
    listener = socket.socket(fileno=int(sys.argv[1]))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        listener.close()
        ours.close()
        try:
            spawner.main(theirs)
        finally:
            os._exit(1)
    theirs.close()
    kernel.drop_capabilities()
    threading.Thread(target=_leash, daemon=True).start()
    accepted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    routes = Routes(Jobs(ours), threading.BoundedSemaphore(server._COMMANDS_AT_ONCE))
    for _ in range(server._WORKERS):
        threading.Thread(target=server._work, args=(accepted, routes), daemon=True).start()
    server.Front(listener, ours, accepted, signing.Gate(server.read_secret)).run()
    os._exit(1)


if __name__ == "__main__":
    main()
