"""A pid 1 that is not the one that was started, or not the only one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from drums_core.sys import enter
from drums_core.testing.plant.target import Target, reap, silence, sleeper, stay


def change_argument(target: Target, which: str) -> None:
    """Overwrite the `first` or the `last` character of init's command line in init's memory."""
    fields = Path(f"/proc/{target.pid1}/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    at = start if which == "first" else end - 2
    fd = os.open(f"/proc/{target.pid1}/mem", os.O_RDWR)
    os.pwrite(fd, b"1" if os.pread(fd, 1, at) != b"1" else b"2", at)


def rename_program(target: Target, path: str, to: str) -> None:
    """Give the file that init executes another name, so that it runs a program of that name."""
    os.rename(target.root / path, target.root / to)


def second_init(target: Target) -> None:
    """Add a process to the desktop that is pid 1 of a pid namespace below the desktop's."""

    def prepare() -> Callable[[], object]:
        fds = [(target.namespace(kind), kind) for kind in ("pid", "net", "ipc", "uts", "mnt", "user")]
        enter.setns(fds[0][0], "pid")  # for children

        def enter_all() -> None:
            for fd, kind in fds[1:]:
                enter.setns(fd, kind)

        read_fd, write_fd = os.pipe()
        middle = os.fork()  # in the desktop's pid namespace
        if not middle:
            try:
                enter_all()
                enter.unshare(["pid"])
                inner = sleeper()
                silence()
                os.closerange(3, write_fd)
                os.closerange(write_fd + 1, 1024)
                os.write(write_fd, b"x")
                os.close(write_fd)
                reap(inner)
            finally:
                os._exit(0)
        os.close(write_fd)
        if os.read(read_fd, 1) != b"x":
            raise OSError("the second init was not born")
        os.close(read_fd)
        (inner_pid,) = Path(f"/proc/{middle}/task/{middle}/children").read_text().split()
        target.join(int(inner_pid))
        return lambda: reap(middle)

    stay(prepare)
