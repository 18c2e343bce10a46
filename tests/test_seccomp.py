"""The filter that every process of a desktop has: what it refuses, and that ordinary programs do not notice it."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys

import pytest
from requires import requires

from drums_core.sys import enter
from drums_core.sys.helper import Plan, helper_argv, plan_descriptor
from drums_core.sys.seccomp import desktop_filter

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is x86-64's")

# Names -> errno of a call, 0 when it worked. Run under the filter; ctypes, so that nothing stands in between.
CALLS = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER = 0x10000000
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result == 0 and number in (56, 435) : os._exit(0)
    if result > 0 and number in (56, 435): os.waitpid(result, 0)
    return 0 if result >= 0 else ctypes.get_errno()
out = {
    "clone new user": call(56, NEWUSER | 17, 0, 0, 0, 0),
    "clone new user and mnt": call(56, NEWUSER | 0x20000 | 17, 0, 0, 0, 0),
    "clone high bits": call(56, (1 << 40) | NEWUSER | 17, 0, 0, 0, 0),
    "clone": call(56, 17, 0, 0, 0, 0),
    "unshare user": call(272, NEWUSER),
    "unshare user and net": call(272, NEWUSER | 0x40000000),
    "unshare high bits": call(272, (1 << 40) | NEWUSER),
    "unshare nothing": call(272, 0),
    "unshare files": call(272, 0x400),
    "clone3": call(435, 0, 0),
    "io_uring_setup": call(425, 1, 0),
    "io_uring_enter": call(426, 0, 0, 0, 0, 0, 0),
    "io_uring_register": call(427, 0, 0, 0, 0),
    "bpf": call(321, 0, 0, 0),
    "add_key": call(248, 0, 0, 0, 0, -3),
    "request_key": call(249, 0, 0, 0, 0),
    "keyctl": call(250, 0, -3, 0),
    "socket vsock": call(41, 40, 1, 0),
    "socketpair vsock": call(53, 40, 1, 0, 0),
    "socket vsock, high bits": call(41, (1 << 40) | 40, 1, 0),
    "socket unix": call(41, 1, 1, 0),
    "socket inet": call(41, 2, 1, 0),
    "x32 getpid": call(0x40000000 | 39),
    "getpid": call(39),
}
print(json.dumps(out))
"""
REFUSED = {
    "clone new user": errno.EPERM,
    "clone new user and mnt": errno.EPERM,
    "clone high bits": errno.EPERM,
    "unshare user": errno.EPERM,
    "unshare user and net": errno.EPERM,
    "unshare high bits": errno.EPERM,
    "clone3": errno.ENOSYS,
    "io_uring_setup": errno.ENOSYS,
    "io_uring_enter": errno.ENOSYS,
    "io_uring_register": errno.ENOSYS,
    "bpf": errno.EPERM,
    "add_key": errno.EPERM,
    "request_key": errno.EPERM,
    "keyctl": errno.EPERM,
    "socket vsock": errno.EAFNOSUPPORT,
    "socketpair vsock": errno.EAFNOSUPPORT,
    "socket vsock, high bits": errno.EAFNOSUPPORT,
    "x32 getpid": errno.EPERM,
}
ORDINARY = """
import asyncio, os, socket, subprocess, tempfile, threading
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert sorted(done) == list(range(8))
assert subprocess.run(["/bin/sh", "-c", "echo a | cat; (exit 3)"], capture_output=True).returncode == 3
pid = os.fork()
if not pid: os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
with socket.create_server(("127.0.0.1", 0)) as s:
    c = socket.create_connection(s.getsockname()); d, _ = s.accept(); c.send(b"y"); assert d.recv(1) == b"y"
socket.socket(socket.AF_INET6).close()
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()
async def main():
    process = await asyncio.create_subprocess_exec("/bin/true")
    return await process.wait()
assert asyncio.run(main()) == 0
with tempfile.TemporaryFile() as f: f.write(b"z")
os.posix_spawn("/bin/true", ["true"], {}); os.wait()
print("well")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return run_plan(program=[sys.executable, "-I", "-c", code])


def run_plan(*before: list[object], program: list[str]) -> subprocess.CompletedProcess[str]:
    plan: Plan = [
        *before,
        ["no_new_privs"],
        ["seccomp", desktop_filter().hex()],
        ["exec", program, {"PATH": "/usr/bin:/bin", "TMPDIR": "/tmp"}],
    ]
    with plan_descriptor(plan) as fd:
        return subprocess.run(
            helper_argv(fd), pass_fds=[fd], capture_output=True, text=True, check=False, timeout=60, cwd="/"
        )


@pytest.fixture(scope="module")
def answers() -> dict[str, int]:
    done = run(CALLS)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("call", REFUSED)
def test_refused(answers: dict[str, int], call: str) -> None:
    """With the errno that makes a program fall back, or give up; bits above the 32 that count hide nothing."""
    assert answers[call] == REFUSED[call], errno.errorcode.get(answers[call], answers[call])


def test_everything_else_works(answers: dict[str, int]) -> None:
    """The same calls with other arguments."""
    assert {call: number for call, number in answers.items() if call not in REFUSED and number} == {}


def test_the_calls_are_refused_by_the_filter_alone() -> None:
    """Without it this kernel answers otherwise, so the test above looks at the filter."""
    done = subprocess.run([sys.executable, "-I", "-c", CALLS], capture_output=True, text=True, check=True)
    without = json.loads(done.stdout)
    assert without["clone3"] != errno.ENOSYS and without["io_uring_register"] != errno.ENOSYS
    assert errno.EPERM not in {without[x] for x in ("add_key", "request_key", "keyctl")}
    if os.geteuid() == 0:
        assert without["clone new user"] == without["unshare user"] == 0


def test_ordinary_programs() -> None:
    """Forks, threads, spawns, sockets, pipes and an event loop, on the C library's fall-backs."""
    done = run(ORDINARY)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


@requires("root")
def test_ordinary_programs_of_a_user() -> None:
    """The same for who has no rights at all."""
    # The shell, because this Python may lie where no other user can read.
    code = "test $(id -u) = 65534 && (echo a; echo b) | sort -r | head -n 1 & wait; (exit 3); echo $?"
    done = run_plan(["ids", 65534, 65534, []], program=["/bin/sh", "-c", code])
    assert (done.returncode, done.stdout) == (0, "b\n3\n"), done.stderr


def test_the_filter_passes_to_children_and_cannot_be_taken_off() -> None:
    """A program that is executed has it as well, and a second filter only adds."""
    code = f"import subprocess, sys; print(subprocess.run([sys.executable, '-I', '-c', {CALLS!r}]).returncode)"
    done = run(code)
    assert json.loads(done.stdout.splitlines()[0])["unshare user"] == errno.EPERM
    assert "Seccomp:\t2" in run("print(open('/proc/self/status').read())").stdout


def test_32_bit_calls() -> None:
    """`int 0x80` has other numbers, which no rule would see: every one of them is refused, getpid too."""
    # mov eax, 20 (getpid of i386); int 0x80; ret
    code = (
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))\n"
        "run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
        "print(run())\n"
    )
    without = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    if without.returncode or int(without.stdout) < 0:
        pytest.skip(f"this kernel runs no 32-bit calls: {without.returncode} {without.stdout.strip()}")
    done = run(code)
    assert done.stdout == f"{-errno.EPERM}\n", (done.returncode, done.stderr)


def test_the_program_is_well_formed() -> None:
    """Whole instructions, every jump inside, the architecture first: an unchecked number means nothing."""
    program = desktop_filter()
    count = len(program) // 8
    assert len(program) % 8 == 0 and count < 4096
    for place in range(count):
        code, jump_true, jump_false = (
            int.from_bytes(program[place * 8 : place * 8 + 2], "little"),
            program[place * 8 + 2],
            program[place * 8 + 3],
        )
        if code & 7 == 5:  # BPF_JMP
            assert place + 1 + max(jump_true, jump_false) < count
    assert program[4:8] == (4).to_bytes(4, "little")
    assert program[-8:-6] == (6).to_bytes(2, "little")  # ends with a return


def test_install_needs_a_right_or_no_new_privs() -> None:
    """The library's error names the call when the kernel refuses the program."""
    child = os.fork()
    if child == 0:
        try:
            enter.prctl(enter.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
            enter.install_seccomp(b"\xff" * 8)
        except OSError as e:
            os._exit(0 if "seccomp filter" in str(e) and e.errno == errno.EINVAL else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
