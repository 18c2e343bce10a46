"""A process of the desktop that shares namespaces with the host or with another desktop, or has one that nobody has.

Sources: setns(2), unshare(2), namespaces(7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drums_core.sys import enter
from drums_core.testing.plant.target import Target, reap, sleeper, stay

KINDS = ("pid", "net", "ipc", "uts", "mnt", "user")
"""In the order in which they are entered: a user namespace takes the host's rights, a mount namespace its files."""


def add_process(target: Target, kinds: Sequence[str], whose: str) -> None:
    """Add a process to the desktop's cgroup that is in the desktop's namespaces, but for these kinds.

    Args:
        kinds: of `KINDS`.
        whose: `host`, `other` (another desktop's) or `new` (nobody else's).
    """
    fds = [
        (target.namespace(kind, of_other=whose == "other" and kind in kinds), kind)
        for kind in KINDS
        if kind not in kinds or whose == "other"
    ]

    def prepare() -> Callable[[], object]:
        for fd, kind in fds:
            if kind == "pid":
                enter.setns(fd, kind)  # for children

        def enter_all() -> None:
            for fd, kind in fds:
                if kind != "pid":
                    enter.setns(fd, kind)
            if whose == "new":
                enter.unshare(kinds)

        child = sleeper(enter_all)
        target.join(child)
        return lambda: reap(child)

    stay(prepare)
