"""Being told by the kernel that a cgroup ran out of memory.

The process watcher sees deaths of the processes that it follows; one that was put into the cgroup from outside is none
of them, and its kill counts as well.

Sources: the kernel's `cgroup-v1/memory.rst` (9 and 10), `cgroup-v2.rst` (memory.events); inotify(7), eventfd(2).
"""

from __future__ import annotations

import ctypes
import os

from drums_core.sys.cgroups import Cgroup
from drums_core.sys.enter import checked

_IN_MODIFY = 0x2

_libc = ctypes.CDLL(None, use_errno=True)


def open_notifier(cgroup: Cgroup) -> int:
    """A descriptor that is readable once something may have happened to the cgroup's `oom_kills`, soon after.

    Raises:
        OSError: the cgroup is gone, or the kernel tells nobody.
    """
    if cgroup.is_v2:
        return watch_file(os.fspath(cgroup.paths[0] / "memory.events"))
    folder = cgroup.directories["memory"]
    notifier = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        control = os.open(folder / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            (folder / "cgroup.event_control").write_text(f"{notifier} {control}", encoding="ascii")
        finally:
            os.close(control)
    except BaseException:
        os.close(notifier)
        raise
    return notifier


def watch_file(path: str) -> int:
    """An inotify descriptor that is readable once the kernel has changed a file of a cgroup."""
    fd = checked(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "inotify_init1")
    try:
        checked(_libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY), f"inotify_add_watch {path}")
    except BaseException:
        os.close(fd)
        raise
    return fd
