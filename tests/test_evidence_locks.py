"""The lock reader, CRIU's lock image, and putting locks back by ptrace, on plain processes."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from requires import requires

from drums_core.evidence.locks import describe, normalise_path, read_locks
from drums_core.evidence.multisets import difference
from drums_core.sys.file_locks import (
    DescriptorLock,
    ImageLock,
    LockRestoreError,
    image_locks,
    missing_locks,
    parse_lock_line,
    process_locks,
    reapply_locks,
)
from drums_core.sys.ptrace import traced

PRELUDE = """
import fcntl, os, signal, struct, sys, time, select, ctypes, threading
F = {n: os.open(os.path.join(sys.argv[1], n), os.O_RDWR | os.O_CREAT) for n in "abcd"}
for f in F.values(): os.ftruncate(f, 8192)
def ofd(f, kind, start, length):
    fcntl.fcntl(f, 37, struct.pack("hhxxxxqqixxxx", kind, 0, start, length, 0))
def ready(*words): print("ready", *words, flush=True)
"""
HOLDS = """
fcntl.lockf(F["a"], fcntl.LOCK_EX, 100, 10)
fcntl.lockf(F["a"], fcntl.LOCK_SH, 0, 4000)
ofd(F["b"], 1, 0, 50)
fcntl.flock(F["c"], fcntl.LOCK_SH)
fcntl.flock(F["d"], fcntl.LOCK_EX)
os.unlink(os.path.join(sys.argv[1], "d"))
ready(); sys.stdin.read()
"""
HOLDS_NOTHING = {
    "read": 'ready(*F.values()); assert sys.stdin.buffer.read(1) == b"x"; print("right", flush=True)',
    "poll": """
p = select.poll(); p.register(0, select.POLLIN); ready(*F.values())
assert p.poll() == [(0, select.POLLIN)]; print("right", flush=True)
""",
    "sleep": """
ready(*F.values()); t = time.monotonic(); time.sleep(1); t = time.monotonic() - t
assert 0.99 < t < 3, t
print("right", flush=True)
""",
    "spin": """
import math
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
x = 1.5; ready(*F.values())
while not stop:
    for i in range(1000): x = math.sqrt(x * x)
    assert x == 1.5
print("right", flush=True)
""",
    "stopped": 'ready(*F.values()); assert sys.stdin.buffer.read(1) == b"x"; print("right", flush=True)',
    "seccomp": """
libc = ctypes.CDLL(None)
ready(*F.values())
assert libc.prctl(22, 1, 0, 0, 0) == 0  # strict: read, write and exit only
os.read(0, 1); os.write(1, b"right\\n"); libc.syscall(60, 0)
""",
    "signals": """
count = [0]
def tick(*_): count[0] += 1
signal.signal(signal.SIGALRM, tick); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
ready(*F.values())
p = select.poll(); p.register(0, select.POLLIN)
while not p.poll(): pass
signal.setitimer(signal.ITIMER_REAL, 0)
assert count[0] > 10, count
print("right", flush=True)
""",
}
Start = Callable[..., "tuple[subprocess.Popen[bytes], list[int]]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program that opens the files a to d; its descriptors of them come with it."""
    running: list[subprocess.Popen[bytes]] = []
    (tmp_path / "files").mkdir()

    def run(code: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(tmp_path / "files")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        running.append(process)
        assert process.stdout
        words = process.stdout.readline().split()
        assert words and words[0] == b"ready"
        return process, [int(x) for x in words[1:]]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def entry(pid: int, fd: int, flag: int, kind: int, start: int, length: int) -> bytes:
    """One entry of `filelocks.img` as CRIU writes it."""

    def varint(value: int) -> bytes:
        value &= (1 << 64) - 1
        data = b""
        while value > 0x7F:
            data += bytes([value & 0x7F | 0x80])
            value >>= 7
        return data + bytes([value])

    body = b"".join(bytes([n << 3]) + varint(v) for n, v in enumerate((flag, kind, pid, fd, start, length), 1))
    return struct.pack("<I", len(body)) + body


def image(folder: Path, *entries: bytes) -> Path:
    """An image directory that holds these locks."""
    folder.mkdir(exist_ok=True)
    (folder / "filelocks.img").write_bytes(struct.pack("<II", 0x54564319, 0x54323616) + b"".join(entries))
    return folder


def test_all_kinds_are_read(start: Start, tmp_path: Path) -> None:
    """POSIX, OFD and flock locks are read with descriptor, path, range and kind."""
    child, _ = start(HOLDS)
    locks = read_locks([child.pid])
    where = str(tmp_path / "files")
    assert sorted([x[2:7] for x in locks]) == sorted(
        [
            [f"{where}/a", "POSIX", "WRITE", "10", "109"],
            [f"{where}/a", "POSIX", "READ", "4000", "EOF"],
            [f"{where}/b", "OFDLCK", "WRITE", "0", "49"],
            [f"{where}/c", "FLOCK", "READ", "0", "EOF"],
            [f"{where}/d (deleted)", "FLOCK", "WRITE", "0", "EOF"],
        ]
    )
    assert {x[0] for x in locks} == {child.pid}
    assert locks == read_locks([child.pid, 999_999_999])


def test_blocked_waiters_hold_nothing(start: Start) -> None:
    """A process that waits for a lock shows none."""
    start(HOLDS)
    waiter, _ = start("ready(); fcntl.lockf(F['a'], fcntl.LOCK_EX)")
    while Path(f"/proc/{waiter.pid}/syscall").read_text().split()[0] != "72":
        os.sched_yield()
    assert read_locks([waiter.pid]) == []


def test_comparison_is_of_multisets() -> None:
    """A lock that is held twice is not held once."""
    lock = [5, 3, "/x", "POSIX", "WRITE", "0", "EOF", "ADVISORY"]
    assert difference([lock, lock], [list(lock), tuple(lock)], describe) == ([], [])
    missing, extra = difference([lock, lock], [lock], describe)
    assert missing == ["POSIX WRITE 0..EOF on '/x' (pid 5, descriptor 3)"] and extra == []
    assert difference([lock], [lock, lock], describe)[1] == missing


def test_names_of_deleted_files() -> None:
    """CRIU's stand-in name for a deleted file is undone, and only for deleted ones."""
    assert normalise_path("/a/b.cr_link (deleted)") == "/a/b (deleted)"
    assert normalise_path("/a/b.cr.1f.ghost.cr_link (deleted)") == "/a/b (deleted)"
    assert normalise_path("/a/b.cr_link") == "/a/b.cr_link"


def test_lock_lines() -> None:
    """The kernel's forms parse; anything else is an error, never skipped."""
    assert parse_lock_line(7, "lock:\t1: POSIX  ADVISORY  WRITE 12 00:2a:7 0 EOF") == DescriptorLock(
        7, "POSIX", "WRITE", "0", "EOF"
    )
    assert parse_lock_line(7, "lock:\t1: LEASE  BREAKING  READ 12 00:2a:7 0 EOF").state == "BREAKING"
    with pytest.raises(ValueError):
        parse_lock_line(7, "lock:\t1: POSIX")


def test_image(tmp_path: Path) -> None:
    """CRIU's image is read; large and negative numbers too."""
    folder = image(tmp_path / "img", entry(12, 3, 1, 1, 0, 0), entry(1, 300, 4, 0, 1 << 62, 5), entry(2, 4, 2, 1, 0, 0))
    assert image_locks(folder) == [
        ImageLock(12, 3, "POSIX", "WRITE", 0, 0),
        ImageLock(1, 300, "OFDLCK", "READ", 1 << 62, 5),
        ImageLock(2, 4, "FLOCK", "WRITE", 0, 0),
    ]
    assert image_locks(tmp_path) == []
    assert image_locks(image(tmp_path / "none")) == []


def test_every_truncation_of_an_image_is_refused(tmp_path: Path) -> None:
    """An image cut anywhere but between two entries is a ValueError, never fewer locks."""
    first = entry(12, 3, 1, 1, 1000, 1 << 40)
    folder = image(tmp_path / "img", first, first)
    data = (folder / "filelocks.img").read_bytes()
    for size in range(len(data)):
        if size in (8, 8 + len(first)):
            continue
        (folder / "filelocks.img").write_bytes(data[:size])
        with pytest.raises(ValueError):
            image_locks(folder)
    for broken in (entry(1, 1, 64, 1, 0, 0), entry(1, 1, 1, 3, 0, 0), b"\2\0\0\0\x0a\0", b"\1\0\0\0\x08"):
        with pytest.raises(ValueError):
            image_locks(image(tmp_path / "img", broken))


@requires("root")
@pytest.mark.parametrize("kind", HOLDS_NOTHING)
def test_locks_are_put_back(start: Start, tmp_path: Path, kind: str) -> None:
    """A process gets its missing locks, and goes on with what it did as if nothing had been."""
    child, (a, b, c, _) = start(HOLDS_NOTHING[kind])
    folder = image(
        tmp_path / "img",
        entry(child.pid, a, 1, 1, 10, 100),
        entry(child.pid, a, 1, 0, 4000, 0),
        entry(child.pid, b, 4, 1, 0, 50),
        entry(child.pid, c, 2, 1, 0, 0),
    )
    if kind == "stopped":
        os.kill(child.pid, signal.SIGSTOP)
    while {"stopped": "State:\tT (stopped)", "seccomp": "Seccomp:\t1"}.get(kind, "") not in _status(child.pid):
        os.sched_yield()
    status = _masks(child.pid, kind)
    assert len(reapply_locks(folder, [os.getpid(), child.pid])) == 4
    assert process_locks(child.pid) == sorted(
        [
            DescriptorLock(a, "POSIX", "WRITE", "10", "109"),
            DescriptorLock(a, "POSIX", "READ", "4000", "EOF"),
            DescriptorLock(b, "OFDLCK", "WRITE", "0", "49"),
            DescriptorLock(c, "FLOCK", "WRITE", "0", "EOF"),
        ]
    )
    assert missing_locks(image_locks(folder), [child.pid]) == {}
    assert reapply_locks(folder, [child.pid]) == []
    assert _masks(child.pid, kind) == status
    for number in range(20):
        extra = entry(child.pid, a, 1, 1, 200 + 10 * number, 5)
        assert len(reapply_locks(image(tmp_path / "more", extra), [child.pid])) == 1
    assert child.stdin and child.stdout
    if kind == "stopped":
        while "State:\tT (stopped)" not in _status(child.pid):  # it is as it was found
            os.sched_yield()
        os.kill(child.pid, signal.SIGCONT)
    if kind == "spin":
        os.kill(child.pid, signal.SIGUSR1)
    child.stdin.write(b"x")
    child.stdin.flush()
    assert child.stdout.readline() == b"right\n"
    assert child.wait(10) == 0


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def _masks(pid: int, kind: str) -> list[str]:
    """A process's signal masks and its tracer; outside a handler of its own, which blocks its signal while it runs."""
    deadline = time.monotonic() + 10
    while True:
        lines = _status(pid).splitlines()
        found = [x for x in lines if x.startswith(("SigBlk", "SigIgn", "SigCgt", "TracerPid"))]
        if kind != "signals" or f"SigBlk:\t{0:016x}" in found or time.monotonic() > deadline:
            return found


@requires("root")
def test_a_conflict_is_an_error_and_lets_the_process_go(start: Start, tmp_path: Path) -> None:
    """A lock that another process holds is refused with its reason, and the target is left running, untraced."""
    start(HOLDS)
    child, (a, *_) = start(HOLDS_NOTHING["read"])
    folder = image(tmp_path / "img", entry(child.pid, a, 1, 1, 10, 100))
    with pytest.raises(LockRestoreError) as caught:
        reapply_locks(folder, [child.pid])
    assert caught.value.errno in (errno.EAGAIN, errno.EACCES)
    assert process_locks(child.pid) == []
    assert "TracerPid:\t0" in _masks(child.pid, "read")
    out, _ = child.communicate(b"x", timeout=10)
    assert out == b"right\n"


@requires("root")
def test_an_owner_that_is_traced_is_an_error(start: Start, tmp_path: Path) -> None:
    """A process that somebody else traces (CRIU the root task) is refused, naming the tracer."""
    child, (a, *_) = start(HOLDS_NOTHING["read"])
    folder = image(tmp_path / "img", entry(child.pid, a, 1, 1, 10, 100))
    code = (
        "import sys; from pathlib import Path; from drums_core.sys.file_locks import reapply_locks\n"
        "reapply_locks(Path(sys.argv[1]), [int(sys.argv[2])])"
    )
    with traced(child.pid):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(child.pid)], capture_output=True, text=True, check=False
        )
    assert "LockRestoreError" in done.stderr and f"tracer {os.getpid()}" in done.stderr
    assert child.communicate(b"x", timeout=10)[0] == b"right\n"


def test_an_owner_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """A lock whose owner was not restored cannot be put back, and is never forgotten."""
    folder = image(tmp_path / "img", entry(987_654_321, 3, 1, 1, 0, 0))
    with pytest.raises(LockRestoreError, match="987654321"):
        reapply_locks(folder, [os.getpid()])


@requires("root")
def test_a_lease_is_refused(start: Start, tmp_path: Path) -> None:
    """What cannot be put back is an error."""
    child, (a, *_) = start(HOLDS_NOTHING["read"])
    with pytest.raises(LockRestoreError, match="LEASE"):
        reapply_locks(image(tmp_path / "img", entry(child.pid, a, 8, 1, 0, 0)), [child.pid])
    assert child.communicate(b"x", timeout=10)[0] == b"right\n"


UNREADABLE_STACK = """
libc = ctypes.CDLL(None, use_errno=True)
# push rbx; rbx = rsp; rsp = arg 1; read(0, arg 5, arg 2); rsp = rbx; pop rbx; ret
code = bytes.fromhex("53 4889e3 4889fc 31c0 31ff 4889f2 4c89c6 0f05 4889dc 5b c3")
import mmap
m = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC); m.write(code)
stack = mmap.mmap(-1, 8192)
base = ctypes.addressof(ctypes.c_char.from_buffer(stack))
assert libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(4096), 0) == 0
buffer = ctypes.create_string_buffer(16)
function = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_void_p] * 5)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
before = ctypes.string_at(base + 4096, 256)
ready(*F.values())
got = function(base + 4096 + 64, 1, 0, 0, ctypes.addressof(buffer))
assert got == 1 and buffer.raw[:1] == b"x", got
assert ctypes.string_at(base + 4096, 256) == before
print("right", flush=True)
"""


@requires("root")
def test_scratch_memory_above_the_stack_pointer(start: Start, tmp_path: Path) -> None:
    """Where the memory below the stack pointer cannot be read by a system call, that above is lent and given back."""
    child, (a, *_) = start(UNREADABLE_STACK)
    while Path(f"/proc/{child.pid}/syscall").read_text().split()[0] != "0":
        os.sched_yield()
    assert len(reapply_locks(image(tmp_path / "img", entry(child.pid, a, 1, 1, 10, 100)), [child.pid])) == 1
    assert process_locks(child.pid) == [DescriptorLock(a, "POSIX", "WRITE", "10", "109")]
    assert child.communicate(b"x", timeout=10)[0] == b"right\n"
