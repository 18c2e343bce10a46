"""Showing a job's code and files to a sandbox that has waited for a job.

Sources: open_tree(2), move_mount(2), mount(2), pidfd_open(2), setns(2).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from drums.errors import CheckerError
from drums_core.sys.enter import mount
from drums_core.sys.inside import in_namespace
from drums_core.sys.overlay import attach_tree, clone_tree

_ROOT = ("remount", "bind", "nosuid", "nodev")


def show(pid1: int, readonly: Mapping[str, Path]) -> None:
    """Mount files and folders of the host, read-only, in a worker's sandbox. Blocks.

    Args:
        pid1: pidfd of the sandbox's pid 1. By descriptor, so that no other process of its number is met.
        readonly: path inside -> file or folder on the host; the folders above it are there.

    Raises:
        CheckerError: a file or folder cannot be shown.
        OSError: the sandbox is gone.
    """
    with ExitStack() as stack:
        trees = []
        for inside, path in readonly.items():
            try:
                tree = clone_tree(path, None, bare=True)
            except OSError as e:
                raise CheckerError(f"{str(path)!r} cannot be shown to a worker: {e}") from e
            stack.callback(os.close, tree)
            trees.append((inside, tree))
        in_namespace(pid1, "mnt", lambda: _attach(trees))


def _attach(trees: Sequence[tuple[str, int]]) -> None:
    """In the sandbox, in which only what drums itself has started runs yet, without a right to change its root."""
    mount(None, "/", None, _ROOT)
    for inside, tree in trees:
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.mkdir(inside)
        else:
            os.mknod(inside)
        attach_tree(tree, Path(inside))
    mount(None, "/", None, [*_ROOT, "ro"])
