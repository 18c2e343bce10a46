"""Calls in a process's place, on its own descriptors. Source: ptrace(2)."""

from __future__ import annotations

import os

from drums_core.sys.ptrace import traced


def in_place(pid: int, number: int, *arguments: int | bytes) -> None:
    """A system call in a process's place, which must not be frozen."""
    with traced(pid) as tracee:
        numbers = [tracee.write_scratch(x) if isinstance(x, bytes) else x for x in arguments]
        result = tracee.call(number, *numbers)
    if result < 0:
        raise OSError(-result, f"system call {number} in process {pid}: {os.strerror(-result)}")
