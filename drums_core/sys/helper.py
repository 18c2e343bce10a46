"""Starting a helper process that carries out a plan of `enter.py`, and waiting for it under trio."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from drums_core.sys import enter

Plan = list[list[Any]]


@contextmanager
def plan_descriptor(plan: Plan) -> Iterator[int]:
    """A read-only descriptor that holds the plan; closed at the end of the block."""
    fd = os.memfd_create("drums-plan")
    try:
        os.write(fd, json.dumps(plan).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def helper_argv(plan_fd: int) -> list[str]:
    """The command line that carries out the plan on `plan_fd`."""
    return [sys.executable, "-I", "-S", str(Path(enter.__file__)), str(plan_fd)]


async def start_helper(plan: Plan, *, pass_fds: Sequence[int] = (), **popen: Any) -> trio.Process:
    """Start a helper; the caller waits for it and ends it.

    Args:
        plan: the operations, the last of them `exec` unless the helper is to end.
        pass_fds: descriptors that the plan names.
        popen: streams, as for `trio.lowlevel.open_process`.
    """
    with plan_descriptor(plan) as fd:
        return await trio.lowlevel.open_process(helper_argv(fd), pass_fds=[*pass_fds, fd], **popen)


async def run_helper(
    plan: Plan, *, pass_fds: Sequence[int] = (), check: bool = True, **options: Any
) -> tuple[int, bytes]:
    """Run a helper to its end and return its exit code and standard output and error together.

    Raises:
        OSError: the helper failed and `check` is set; the text is what it wrote.
    """
    with plan_descriptor(plan) as fd:
        done = await trio.run_process(
            helper_argv(fd), pass_fds=[*pass_fds, fd], check=False, capture_stdout=True, stderr=-2, **options
        )
    output: bytes = done.stdout or b""
    if check and done.returncode:
        raise OSError(f"helper ended with {done.returncode}: {output.decode(errors='replace')[-2000:]}")
    return done.returncode, output
