"""Booting a desktop for the first time; every later one is a restore of what this leads to (the golden checkpoint)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import trio

from drums.errors import DesktopError
from drums_core import hashing
from drums_core.evidence import VERSION as EVIDENCE_VERSION
from drums_core.sys.cgroups import Cgroup
from drums_core.sys.helper import Plan, start_helper
from drums_core.sys.overlay import OPTIONS
from drums_core.sys.seccomp import desktop_filter
from drums_core.sys.userns import ID_MAP

INIT_ARGV = ("/usr/bin/tini", "--", "/opt/drums/guest/init.sh", "1920x1080")
HOSTNAME = "desktop"
OPEN_FILES = (1024, 8192)  # soft and hard
NAMESPACES = ["mnt", "uts", "ipc", "pid", "net", "time"]
_TMPFS = (("dev/shm", "mode=1777,size=512m"), ("run", "mode=755,size=32m"), ("tmp", "mode=1777,size=1g"))
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


def boot_plan(root: Path, dev: Path, cgroup: Cgroup, report_fd: int) -> Plan:
    """The operations that turn a helper process into a desktop's init; see user_namespaces(7), pivot_root(2)."""
    top = str(root)
    plan: Plan = [
        ["setsid"],
        # Fixed here, because a CRIU that runs with lower limits than these lowers them without a word.
        ["rlimit", "NOFILE", *OPEN_FILES],
        ["rlimit", "CORE", 0, 0],  # the host's core_pattern is the host's: no dump of a desktop goes there
        ["cgroups", [str(p) for p in cgroup.paths]],
        ["userns", ID_MAP, ID_MAP],
        ["ids", 0, 0, []],
        ["unshare", NAMESPACES],
        ["fork", report_fd, True],
        ["mount", None, "/", None, ["rec", "private"]],
        ["mount", top, top, None, ["bind", "rec"]],  # pivot_root wants a mount point
        ["link_up", "lo"],
        ["mount", "proc", f"{top}/proc", "proc", ["nosuid", "nodev", "noexec"]],
        ["mount", str(dev), f"{top}/dev", None, ["bind"]],
        [
            "mount",
            "devpts",
            f"{top}/dev/pts",
            "devpts",
            ["nosuid", "noexec"],
            "newinstance,ptmxmode=0666,mode=0620,gid=5",
        ],
    ]
    plan += [["mount", "tmpfs", f"{top}/{where}", "tmpfs", ["nosuid", "nodev"], options] for where, options in _TMPFS]
    plan += [
        ["mkdir", f"{top}/run/user", 0o755, 0, 0],
        ["mkdir", f"{top}/run/user/1000", 0o700, 1000, 1000],
        ["mkdir", f"{top}/tmp/.X11-unix", 0o1777, 0, 0],
        ["mkdir", f"{top}/tmp/.ICE-unix", 0o1777, 0, 0],
        ["pivot_root", top],
        ["hostname", HOSTNAME],
        ["umask", 0o022],
        ["stdio", [None, None, None]],
        ["close_from", 3, []],
        ["seccomp", desktop_filter().hex()],
        ["exec", list(INIT_ARGV), _ENV],
    ]
    return plan


def layout_digest() -> str:
    """A hash of how desktops are laid out and what gates record: with another, a checkpoint would fail its gates."""
    plan = boot_plan(Path("/root"), Path("/dev"), Cgroup("", {}), 0)
    return hashlib.sha256(json.dumps([plan, OPTIONS, EVIDENCE_VERSION, hashing.SCHEME]).encode()).hexdigest()[:16]


async def boot(root: Path, dev: Path, cgroup: Cgroup) -> tuple[trio.Process, int]:
    """Start a desktop's init; the helper (its parent, which ends with it) and init's host pid.

    Raises:
        DesktopError: an operation failed; the text names it.
    """
    read_fd, write_fd = os.pipe()
    try:
        helper = await start_helper(
            boot_plan(root, dev, cgroup, write_fd),
            pass_fds=[write_fd],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    assert helper.stderr is not None
    stream = trio.lowlevel.FdStream(read_fd)
    try:
        async with stream, helper.stderr:
            with trio.move_on_after(10.0):
                text = await stream.receive_some(32)
                # Both ends of the fork let go of standard error once init is about to be executed.
                problem = b""
                while part := await helper.stderr.receive_some(2000):
                    problem += part
                if text and not problem:
                    return helper, int(text)
                await helper.wait()
                raise DesktopError(f"the desktop could not be started: {problem.decode(errors='replace').strip()}")
            raise DesktopError("the desktop's init did not start within 10 s")
    except BaseException:
        # Init itself, if it was born, is in the desktop's cgroup, and ends with it.
        helper.kill()
        with trio.CancelScope(shield=True):
            await helper.wait()
        raise
