"""The spawner: a process with one thread that forks the user's processes, and ends those that take too long.

It alone keeps the capabilities to become the user and to kill the user's processes. It never reads the secret, speaks
to no client and to no display, and interprets nothing that comes from one: a job passes through it as a descriptor.

Each job is one message: JSON with `timeout_s`, and the descriptors that `child.main` takes. When its process ends, the
job's status socket gets `{"kind": "ended", "returncode", "timed_out"}`.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import select
import signal
import socket
import time

from guest import child, kernel
from guest.identity import ENVIRONMENT

# What pyautogui imports, but for itself: it asks the display for its keys as it is imported, which each job does on its
# own connection.
_PRELOADED = (
    "base64",
    "ctypes.util",
    "datetime",
    "glob",
    "platform",
    "random",
    "re",
    "shutil",
    "subprocess",
    "tempfile",
    "tkinter",
    "tkinter.messagebox",
    "tkinter.ttk",
    "webbrowser",
    "PIL.Image",
    "PIL.ImageDraw",
    "PIL.ImageGrab",
    "PIL.ImageOps",
    "PIL.PngImagePlugin",
    "Xlib.X",
    "Xlib.XK",
    "Xlib.display",
    "Xlib.ext.xtest",
    "pymsgbox",
    "pyperclip",
    "pyscreeze",
    "pytweening",
)
_KILL_ROUNDS = 50


@dataclasses.dataclass
class _Job:
    status: socket.socket
    deadline: float
    timed_out: bool = False


def main(channel):
    """Serves jobs until the other end of the channel closes.

    Args:
        channel: a SOCK_SEQPACKET socket.
    """
    kernel.set_dumpable(False)
    kernel.die_with_parent(signal.SIGKILL)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    os.set_blocking(wake_reader, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _preload()
    _serve(channel, wake_reader)


def _preload():
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    for name in _PRELOADED:
        # An image without one of them is slower, not broken.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        # A new connection imports every extension that the display has.
        for _, name in importlib.import_module("Xlib.ext").__extensions__:
            importlib.import_module(f"Xlib.ext.{name}")
        display = importlib.import_module("Xlib.display")
        original, display.Display = display.Display, _LateDisplay
        try:
            # It connects as it is imported, for a window that hardly anybody opens.
            importlib.import_module("mouseinfo")
        finally:
            display.Display = original


class _LateDisplay:
    """Stands for an Xlib display that connects when it is first used, in whichever process that is."""

    def __init__(self, name):
        self._name = name
        self._display = None

    def __getattr__(self, attribute):
        if self._display is None:
            self._display = importlib.import_module("Xlib.display").Display(self._name)
        return getattr(self._display, attribute)


def _serve(channel, wake_reader):
    jobs = {}
    while True:
        deadlines = [job.deadline for job in jobs.values() if not job.timed_out]
        wait = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready, _, _ = select.select([channel, wake_reader], [], [], wait)
        if wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_reader, 4096)
        _reap(jobs)
        for pid, job in jobs.items():
            if not job.timed_out and job.deadline <= time.monotonic():
                job.timed_out = True
                # The leader is not reaped yet, so no other process can have its number.
                _kill_session(pid)
        if channel in ready:
            message, descriptors, _, _ = socket.recv_fds(channel, 4096, 8, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            _start(jobs, json.loads(message)["timeout_s"], descriptors)


def _start(jobs, timeout_s, descriptors):
    try:
        pid = os.fork()
    except OSError as error:
        _tell(descriptors[3], {"kind": "failed", "message": f"cannot start a process: {error}"})
        _tell(descriptors[3], {"kind": "ended", "returncode": 127, "timed_out": False})
    else:
        if pid == 0:
            child.main(descriptors)
        status = socket.socket(fileno=os.dup(descriptors[3]))
        jobs[pid] = _Job(status, time.monotonic() + timeout_s)
    for descriptor in descriptors:
        os.close(descriptor)


def _tell(descriptor, message):
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as status:
        status.send(json.dumps(message).encode())


def _reap(jobs):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        job = jobs.pop(pid, None)
        if job is not None:
            message = {"kind": "ended", "returncode": os.waitstatus_to_exitcode(status), "timed_out": job.timed_out}
            _tell(job.status.fileno(), message)
            job.status.close()


def _kill_session(leader):
    """Kills every process of a session, until a look finds none: one that forks meanwhile is found again."""
    for _ in range(_KILL_ROUNDS):
        found = [pid for pid in _processes() if _session_of(pid) == leader]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.002)


def _processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session_of(pid):
    """The session of a process that lives; None for a zombie and for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before the last parenthesis may hold anything.
            state, _parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(session)
