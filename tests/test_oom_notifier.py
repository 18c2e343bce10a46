"""The kernel tells of a cgroup that runs out of memory, and of a file of a cgroup that changed (version 2's way)."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from requires import requires

from drums_core.model import Limits
from drums_core.sys.cgroups import Cgroup, create_cgroup
from drums_core.sys.oom import open_notifier, watch_file

WITHIN_MS = 60_000
HOG = "import sys; sys.stdin.readline(); x = []\nwhile True: x.append(b'x' * (1 << 20))"


@pytest.fixture
def group() -> Iterator[Cgroup]:
    """A small cgroup of its own."""
    made = create_cgroup(f"test-{uuid.uuid4().hex[:12]}")
    made.write_limits(Limits(cpus=1.0, memory_bytes=64 << 20, swap_bytes=0, pids=16))
    yield made
    made.kill()
    while not made.remove():
        made.kill()


def readable(fd: int, within_ms: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_ms))


@requires("root")
def test_a_kill_is_told(group: Cgroup) -> None:
    """Of a process that came from outside; nothing is told before."""
    notifier = open_notifier(group)
    try:
        assert not readable(notifier, 0) and group.oom_kills() == 0
        with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE) as hog:
            for path in group.paths:
                (path / "cgroup.procs").write_text(str(hog.pid))
            hog.communicate(b"go\n")
        assert readable(notifier, WITHIN_MS)
        assert hog.returncode == -9 and group.oom_kills() == 1
    finally:
        os.close(notifier)


@requires("root")
def test_a_changed_file_is_told() -> None:
    """As `memory.events` changes on version 2: here `cgroup.events` of a cgroup that gets its first process."""
    mounts = [x.split() for x in Path("/proc/self/mounts").read_text().splitlines()]
    tops = [Path(x[1]) for x in mounts if x[2] == "cgroup2"]
    if not tops:
        pytest.skip("no version 2 hierarchy on this host")
    folder = tops[0] / f"drums-test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        notifier = watch_file(str(folder / "cgroup.events"))
        assert not readable(notifier, 0)
        with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE) as sleeper:
            (folder / "cgroup.procs").write_text(str(sleeper.pid))
            assert readable(notifier, WITHIN_MS)
            sleeper.kill()
        os.close(notifier)
    finally:
        folder.rmdir()


@requires("root")
def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It is an error, and leaves no descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="inotify_add_watch"):
        watch_file(str(tmp_path / "absent"))
    assert len(os.listdir("/proc/self/fd")) == before
