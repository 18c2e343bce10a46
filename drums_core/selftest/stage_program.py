"""What runs in a staged desktop, as the agent's user, started by path in the desktop: odd files, locks, threads.

Roles are processes: the holder of all locks; one that shares a lock over a fork; one that has the same files open and
holds nothing; one that waits for a lock; one with threads, whose first can be told to end (SIGUSR1), or all (SIGUSR2);
one that waits for timers, and for the display.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time

STAGE = "/home/user/stage"
LOCKED = ("flock", "flock-shared", "ofd", "ofd-shared", "posix", "posix-shared", "waited")
_F_OFD_SETLK = 37
_SYS_EXIT = 60  # x86-64: of one thread


def files() -> None:
    """One entry of each kind that the state hash has to tell apart."""
    os.makedirs(f"{STAGE}/empty")
    contents = {
        b"plain": b"plain\n",
        b"same a": b"same\n",
        b"same b": b"same\n",
        b"hard a": b"hard\n",
        b"tagged": b"tag\n",
    }
    contents |= {b"odd\nname": b"odd\n", b"odd-\xff": b"odd\n", b"big": bytes(range(256)) * 2048}
    for name, content in contents.items():
        with open(os.path.join(STAGE.encode(), name), "wb") as f:
            f.write(content)
    os.link(f"{STAGE}/hard a", f"{STAGE}/hard b")
    os.symlink("plain", f"{STAGE}/link")
    os.mkfifo(f"{STAGE}/fifo")
    os.setxattr(f"{STAGE}/tagged", "user.drums", b"tag")
    with open(f"{STAGE}/sparse", "wb") as f:
        f.truncate(1 << 20)
        f.seek((1 << 20) - 1)
        f.write(b"x")


def held(name: str) -> int:
    """A file of the stage, opened."""
    fd = os.open(f"{STAGE}/{name}", os.O_RDWR | os.O_CREAT, 0o644)
    if not os.fstat(fd).st_size:
        os.write(fd, b"x" * 4096)
    return fd


def ofd_lock(fd: int, kind: int) -> None:
    """Bytes 10 to 29, for the open file description."""
    fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhxxxxqqixxxx", kind, os.SEEK_SET, 10, 20, 0))


def child(work: str) -> tuple[int, int]:
    """A process that does this when it is told, and says so: descriptors to tell it, and to hear it."""
    tell_r, tell_w = os.pipe()
    said_r, said_w = os.pipe()
    if os.fork():
        os.close(tell_r)
        os.close(said_w)
        return tell_w, said_r
    os.close(tell_w)
    os.close(said_r)
    os.read(tell_r, 1)
    fds = [held(name) for name in LOCKED] if work == "beside" else [held("waited")]
    os.write(said_w, b"x")
    os.close(said_w)
    os.close(tell_r)
    if work == "wait":
        fcntl.flock(fds[0], fcntl.LOCK_EX)  # until the holder ends
    time.sleep(1 << 20)
    sys.exit()


def lock_holder() -> None:
    """All locks, in this process."""
    children = [child("wait"), child("beside")]
    kept: list[object] = []
    fcntl.flock(held("forked"), fcntl.LOCK_EX)
    if not os.fork():
        time.sleep(1 << 20)
    fcntl.flock(held("flock"), fcntl.LOCK_EX)
    fcntl.flock(held("flock-shared"), fcntl.LOCK_SH)
    fcntl.flock(held("waited"), fcntl.LOCK_EX)
    fcntl.flock(held("deleted"), fcntl.LOCK_EX)
    os.unlink(f"{STAGE}/deleted")
    ofd_lock(held("ofd"), fcntl.F_WRLCK)
    ofd_lock(held("ofd-shared"), fcntl.F_RDLCK)
    fd = held("posix")
    kept.append(mmap.mmap(fd, 4096))  # CRIU loses the locks on what it maps
    fcntl.lockf(fd, fcntl.LOCK_EX, 100, 100)
    fcntl.lockf(held("posix-shared"), fcntl.LOCK_SH, 100, 100)
    for tell, said in children:
        os.write(tell, b"x")
        os.read(said, 1)
        os.close(tell)
        os.close(said)
    for role in ("threads", "waiter"):
        subprocess.Popen([sys.executable, __file__, role], stdin=subprocess.DEVNULL)
        while not os.path.exists(f"/tmp/drums-{role}.ready"):
            time.sleep(0.01)
    with open("/tmp/drums-stage.ready", "w", encoding="ascii"):
        pass
    time.sleep(1 << 20)


def threads() -> None:
    """A process with another thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    threading.Thread(target=time.sleep, args=[1 << 20], daemon=True).start()
    is_ready("threads")
    if signal.sigwait({signal.SIGUSR1, signal.SIGUSR2}) == signal.SIGUSR1:
        ctypes.CDLL(None).syscall(_SYS_EXIT, 0)
    os._exit(0)


def waiter() -> None:
    """A process with an hourly timer of each kind, one at rest, and a window."""
    from Xlib import X, display  # type: ignore[import-untyped] # the image's

    libc = ctypes.CDLL(None)
    hourly = struct.pack("=4q", 3600, 0, 3600, 0)
    libc.timerfd_settime(libc.timerfd_create(time.CLOCK_MONOTONIC, 0), 0, hourly, None)
    libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
    timer = ctypes.c_void_p()
    event = struct.pack("=qii48x", 0, signal.SIGUSR1, 0)  # sigevent(7), SIGEV_SIGNAL
    if libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) or libc.timer_settime(
        timer, 0, hourly, None
    ):
        raise OSError("no POSIX timer")
    connection = display.Display()
    screen = connection.screen()
    screen.root.create_window(0, 0, 8, 8, 0, screen.root_depth, X.InputOutput).map()
    connection.sync()
    is_ready("waiter")
    time.sleep(1 << 20)


def is_ready(role: str) -> None:
    """Tell the holder of the locks."""
    with open(f"/tmp/drums-{role}.ready", "w", encoding="ascii"):
        pass


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        threads()
    elif sys.argv[1] == "waiter":
        waiter()
    else:
        files()
        lock_holder()
