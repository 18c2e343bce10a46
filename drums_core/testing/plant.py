"""Making one fault in a living desktop: the process that `drums_core.testing.faults` starts for it.

Run as `python -I -S plant.py JSON`. Stand-alone (the standard library, and the two stand-alone modules of
`drums_core.sys` by path): it knows a desktop by the kernel's names only, and no gate. What it does, it does to the
kernel or to the disk.

Sources: proc(5), ptrace(2), pidfd_getfd(2), flock(2), fcntl(2), setns(2), rtnetlink(7), netlink(7), the kernel's
`cgroup-v1/memory.rst`, `cgroup-v2.rst`, `include/uapi/linux/netfilter/nf_tables.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_SYS = Path(__file__).resolve().parents[1] / "sys"
_PIDFD_GETFD = 438  # x86-64
_SYS_FCNTL = 72
_F_SETLK, _F_OFD_SETLK = 6, 37
_FLOCK_LAYOUT = "hhxxxxqqixxxx"
_PAGE = 4096
_INNER_KINDS = ("mnt", "net", "ipc", "uts")
_NLM_REQUEST, _NLM_ACK, _NLM_CREATE_EXCL = 0x1, 0x4, 0x600


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"drums_plant_{name}", _SYS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


enter = _load("enter")


class Target:
    """The desktop as its `Interposition` names it."""

    def __init__(self, pid1: int, root: str, cgroups: Sequence[str], other_pid1: int, asked_at: float) -> None:
        self.pid1 = pid1
        self.root = root
        self.cgroups = [Path(x) for x in cgroups]
        self.other_pid1 = other_pid1
        self.asked_at = asked_at  # by the monotonic clock, which is the machine's

    def pids(self) -> list[int]:
        """Its processes: those of its cgroup in its pid namespace (CRIU may still be in the former)."""
        inside = os.stat(f"/proc/{self.pid1}/ns/pid").st_ino
        found = []
        for pid in sorted(int(x) for x in (self.cgroups[0] / "cgroup.procs").read_text().split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if os.stat(f"/proc/{pid}/ns/pid").st_ino == inside:
                    found.append(pid)
        return found

    def named(self, command: str) -> int:
        """The first process with this command name."""
        for pid in self.pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == command:
                    return pid
        raise LookupError(f"no process {command!r} among {len(self.pids())} of the desktop")

    def namespace(self, kind: str, *, of_other: bool = False) -> int:
        """A descriptor of one of its namespaces, or of the other desktop's."""
        if of_other and not self.other_pid1:
            raise LookupError("there is no other desktop")
        return os.open(f"/proc/{self.other_pid1 if of_other else self.pid1}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


# --- file locks


def _locks(target: Target, kind: str) -> Iterator[tuple[int, int, list[str]]]:
    """Process, descriptor and words of each `lock:` line of this kind."""
    for pid in target.pids():
        for fd in sorted(int(x) for x in os.listdir(f"/proc/{pid}/fdinfo")):
            for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines():
                words = line.split()
                if words and words[0] == "lock:" and words[2] == kind:
                    yield pid, fd, words


def _shared_description(pid: int, fd: int) -> int:
    """A descriptor of this process for the very open file description of that one (pidfd_getfd(2))."""
    pidfd = os.pidfd_open(pid)
    try:
        return int(enter.checked(enter.libc.syscall(_PIDFD_GETFD, pidfd, fd, 0), f"pidfd_getfd {pid} {fd}"))
    finally:
        os.close(pidfd)


def change_lock(target: Target, kind: str, how: str) -> None:
    """Drop (`drop`) or turn from exclusive to shared (`weaken`) the first lock of this kind that the desktop holds."""
    for pid, fd, words in _locks(target, kind):
        start = int(words[-2])
        length = 0 if words[-1] == "EOF" else int(words[-1]) + 1 - start
        lock_type = fcntl.F_UNLCK if how == "drop" else fcntl.F_RDLCK
        request = struct.pack(_FLOCK_LAYOUT, lock_type, os.SEEK_SET, start, length, 0)
        if kind == "POSIX":  # it is the process's own, not the description's
            with _load("ptrace").traced(pid) as tracee:
                result = tracee.call(_SYS_FCNTL, fd, _F_SETLK, tracee.write_scratch(request))
            if result < 0:
                raise OSError(-result, f"fcntl in process {pid}: {os.strerror(-result)}")
            return
        mine = _shared_description(pid, fd)
        if kind == "FLOCK":
            fcntl.flock(mine, fcntl.LOCK_UN if how == "drop" else fcntl.LOCK_SH | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(mine, _F_OFD_SETLK, request)
        return
    raise LookupError(f"the desktop holds no {kind} lock")


def add_lock(target: Target) -> None:
    """Put a shared flock that nobody held on a regular file of the desktop that one of its processes has open.

    The lock is the open file description's, so that it stays when this process ends.
    """
    for pid in target.pids():
        for fd in sorted(int(x) for x in os.listdir(f"/proc/{pid}/fd")):
            with contextlib.suppress(FileNotFoundError):
                link = f"/proc/{pid}/fd/{fd}"
                # While CRIU is at work its own files are open, too; they have no path inside.
                inside = os.stat(f"/proc/{target.pid1}/root{os.readlink(link)}", follow_symlinks=False)
                if stat.S_ISREG(inside.st_mode) and os.path.samestat(os.stat(link), inside):
                    fcntl.flock(_shared_description(pid, fd), fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
    raise LookupError("no process of the desktop has a regular file of it open")


def take_posix_lock(target: Target) -> None:
    """Be the stranger who locks each file in the home's folder `locks` whole that nobody has locked just now.

    The locks are kept for as long as the desktop lives.
    """
    folder = Path(target.root) / "home/user/locks"

    def prepare() -> Callable[[], object]:
        taken = 0
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(os.open(path, os.O_RDWR | os.O_NOFOLLOW), fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken += 1
        if not taken:
            raise LookupError("every file is locked already")
        pidfd = os.pidfd_open(target.pid1)
        return lambda: _wait_for(pidfd, 60.0)

    _stay(prepare)


# --- cgroup


def _join(target: Target, pid: int, *, freezer: bool = True) -> None:
    for path in target.cgroups:
        if freezer or not (path / "freezer.state").exists():
            (path / "cgroup.procs").write_text(str(pid))


def move_in_stranger(target: Target, unshare: Sequence[str]) -> None:
    """Put a process that has nothing to do with the desktop into its cgroup; it dies with the desktop."""

    def prepare() -> Callable[[], object]:
        if unshare:
            enter.unshare(unshare)
        child = _sleeper()
        _join(target, child)
        return lambda: _reap(child)

    _stay(prepare)


def move_out(target: Target, command: str) -> None:
    """Move a process of the desktop to the parent cgroup (but for a version 1 freezer, which would let it run)."""
    pid = target.named(command)
    for path in target.cgroups:
        if not (path / "freezer.state").exists():
            (path.parent / "cgroup.procs").write_text(str(pid))


def change_memory_limit(target: Target, pages: int) -> None:
    """Let the memory limit be some pages off."""
    for path in target.cgroups:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (path / name).exists():
                (path / name).write_text(str(int((path / name).read_text()) + pages * _PAGE))
                return
    raise LookupError("the desktop has no memory cgroup")


def change_cpu_limit(target: Target) -> None:
    """Let the CPU quota be a thousandth of a core off."""
    for path in target.cgroups:
        if (path / "cpu.max").exists():
            quota, period = (path / "cpu.max").read_text().split()
            (path / "cpu.max").write_text(f"{int(quota) + 100} {period}")
            return
        if (path / "cpu.cfs_quota_us").exists():
            (path / "cpu.cfs_quota_us").write_text(str(int((path / "cpu.cfs_quota_us").read_text()) + 100))
            return
    raise LookupError("the desktop has no cpu cgroup")


# --- init, mounts, network


def change_init_argument(target: Target) -> None:
    """Overwrite the last character of init's command line in init's memory."""
    fields = Path(f"/proc/{target.pid1}/stat").read_bytes().rpartition(b")")[2].split()
    end = int(fields[46])  # arg_end, field 49 of proc(5)
    fd = os.open(f"/proc/{target.pid1}/mem", os.O_RDWR)
    last = os.pread(fd, 1, end - 2)
    os.pwrite(fd, b"1" if last != b"1" else b"2", end - 2)


def mount_tmpfs(target: Target, where: str) -> None:
    """Mount a tmpfs inside."""
    fds = [(target.namespace(kind), kind) for kind in ("user", "mnt")]
    for fd, kind in fds:
        enter.setns(fd, kind)
    enter.mount("drums-fault", where, "tmpfs", ["nosuid", "nodev"], "size=64k")


def remount_read_only(target: Target, where: str) -> None:
    """Make a mount inside read-only."""
    fds = [(target.namespace(kind), kind) for kind in ("user", "mnt")]
    for fd, kind in fds:
        enter.setns(fd, kind)
    enter.mount(None, where, None, ["remount", "bind", "ro", "nosuid", "nodev"])


def _attribute(kind: int, value: bytes) -> bytes:
    data = struct.pack("=HH", 4 + len(value), kind) + value
    return data + b"\0" * (-len(data) % 4)


def _netlink(target: Target, protocol: int, messages: Sequence[tuple[int, int, bytes]]) -> None:
    """Send messages (type, flags, payload) in the desktop's network namespace, in one datagram; each ACK is read."""
    enter.setns(target.namespace("net"), "net")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as s:
        s.bind((0, 0))
        s.settimeout(5.0)
        data = b"".join(
            struct.pack("=IHHII", 16 + len(payload), kind, flags | _NLM_REQUEST, number, 0) + payload
            for number, (kind, flags, payload) in enumerate(messages, 1)
        )
        s.send(data)
        waiting = sum(1 for _, flags, _ in messages if flags & _NLM_ACK)
        while waiting:
            reply = s.recv(1 << 16)
            while len(reply) >= 20:
                length, kind, *_ = struct.unpack_from("=IHHII", reply)
                if kind == 2:  # NLMSG_ERROR
                    (number,) = struct.unpack_from("=i", reply, 16)
                    if number:
                        raise OSError(-number, f"netlink: {os.strerror(-number)}")
                    waiting -= 1
                reply = reply[(length + 3) & ~3 :]


def change_network(target: Target, what: str) -> None:
    """Add an `address`, a `route`, a `rule` or an nftables `table`, or change the loopback's `mtu`."""
    make = _NLM_ACK | _NLM_CREATE_EXCL
    address = socket.inet_aton("10.99.0.1")
    if what == "address":  # RTM_NEWADDR; IFA_LOCAL, IFA_ADDRESS
        payload = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 1) + _attribute(2, address) + _attribute(1, address)
        _netlink(target, 0, [(20, make, payload)])
    elif what == "route":  # RTM_NEWROUTE; RTA_DST, RTA_OIF
        header = struct.pack("=BBBBBBBBI", socket.AF_INET, 32, 0, 0, 254, 4, 253, 1, 0)
        _netlink(target, 0, [(24, make, header + _attribute(1, address) + _attribute(4, struct.pack("=I", 1)))])
    elif what == "rule":  # RTM_NEWRULE; FRA_PRIORITY
        header = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 254, 0, 0, 1, 0)
        _netlink(target, 0, [(32, make, header + _attribute(6, struct.pack("=I", 4711)))])
    elif what == "mtu":  # RTM_NEWLINK; IFLA_MTU
        payload = struct.pack("=BxHiII", 0, 0, 1, 0, 0) + _attribute(4, struct.pack("=I", 1400))
        _netlink(target, 0, [(16, _NLM_ACK, payload)])
    elif what == "table":  # a batch with NFT_MSG_NEWTABLE; NFTA_TABLE_NAME
        edge = struct.pack("=BB", 0, 0) + struct.pack(">H", 10)
        table = struct.pack("=BB", 1, 0) + struct.pack(">H", 0) + _attribute(1, b"drums_fault\0")
        _netlink(target, 12, [(16, 0, edge), ((10 << 8) | 0, make, table), (17, 0, edge)])
    else:
        raise LookupError(f"no network fault {what!r}")


# --- the guest server, files, namespaces


def stop_guest_server(target: Target) -> None:
    """SIGSTOP whatever serves the guest's port: it is not started anew, as it would be if it ended."""
    stopped = 0
    for pid in target.pids():
        if b"/opt/drums/guest/server.py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGSTOP)
            stopped += 1
    if not stopped:
        raise LookupError("no guest server among the desktop's processes")


def change_home(target: Target, how: str) -> None:
    """Change one file of the home through the host: append a byte, flip one (times kept), give it away, or add one."""
    home = Path(target.root) / "home/user"
    if how == "add":
        (home / "planted").write_bytes(b"")
        return
    path = next(p for p in sorted(home.iterdir()) if stat.S_ISREG(p.lstat().st_mode) and p.lstat().st_size)
    info = path.lstat()
    if how == "owner":
        os.chown(path, info.st_uid + 1, info.st_gid, follow_symlinks=False)
        return
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    if how == "append":
        os.pwrite(fd, b"\n", info.st_size)
    elif how == "flip":
        os.pwrite(fd, bytes([os.pread(fd, 1, 0)[0] ^ 1]), 0)
        os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
    else:
        raise LookupError(f"no file fault {how!r}")


def share_namespaces(target: Target, kinds: Sequence[str], with_other: bool) -> None:
    """Add a process to the desktop's pid namespace and cgroup that shares namespaces with the host or another desktop.

    Args:
        kinds: of mnt, net, ipc and uts, those to share.
        with_other: with the other desktop, not with the host.
    """
    own = [] if len(kinds) == len(_INNER_KINDS) and not with_other else ["user"]
    own += [kind for kind in _INNER_KINDS if kind not in kinds]
    fds = [(target.namespace(kind), kind) for kind in own]
    fds += [(target.namespace(kind, of_other=True), kind) for kind in kinds if with_other]
    fds.sort(key=lambda x: (x[1] == "user", x[1] == "mnt"))  # the host's rights first: a user namespace takes them

    def prepare() -> Callable[[], object]:
        enter.setns(target.namespace("pid"), "pid")  # for children

        def enter_all() -> None:
            for fd, kind in fds:
                enter.setns(fd, kind)

        child = _sleeper(enter_all)
        _join(target, child)
        return lambda: _reap(child)

    _stay(prepare)


# --- deaths


def kill_later(target: Target, command: str, sig: str, delay_s: float) -> None:
    """Send a signal to one of the desktop's processes `delay_s` after the request was made; this returns at once."""

    def prepare() -> Callable[[], object]:
        pidfd = os.pidfd_open(target.named(command))

        def work() -> None:
            if not _wait_for(pidfd, max(0.0, target.asked_at + delay_s - time.monotonic())):
                signal.pidfd_send_signal(pidfd, signal.Signals[sig])

        return work

    _stay(prepare)


def fill_memory(target: Target) -> None:
    """Fill the desktop's memory from a process in its cgroup until the kernel kills that process."""
    child = os.fork()
    if not child:
        _join(target, os.getpid())
        Path("/proc/self/oom_score_adj").write_text("1000")
        hoard = []
        while True:
            hoard.append(b"x" * (8 << 20))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
        raise OSError("the process that fills the memory was not killed")


# --- processes that stay


def _sleeper(before: Callable[[], None] = lambda: None) -> int:
    """A child that has done `before` and does nothing until it is killed.

    It holds no descriptor when this returns: in a frozen cgroup it could let go of none.
    """
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child:
        os.close(write_fd)
        with open(read_fd, encoding="utf-8") as f:
            problem = f.read()
        if problem:
            raise OSError(problem)
        return child
    try:
        before()
        _silence()
        os.closerange(3, write_fd)
        os.closerange(write_fd + 1, 1024)
        os.close(write_fd)
        while True:
            time.sleep(3600)
    except BaseException as e:  # noqa: BLE001 - told to the parent
        os.write(write_fd, f"{type(e).__name__}: {e}".encode())
    finally:
        os._exit(1)


def _reap(child: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _wait_for(pidfd: int, timeout_s: float) -> bool:
    """Whether a process ended within the time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _silence() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def _stay(prepare: Callable[[], Callable[[], object]]) -> None:
    """Do `prepare` in a process of its own, return when it is done, and let that process do what it returned.

    It is also the parent that reaps what `prepare` started, so that the end of a pid namespace waits for nobody.
    """
    read_fd, write_fd = os.pipe()
    if os.fork():
        os.close(write_fd)
        with open(read_fd, encoding="utf-8") as f:
            answer = f.read()
        if answer != "done":
            raise OSError(answer or "the process ended early")
        return
    os.close(read_fd)
    os.setsid()
    try:
        then = prepare()
        _silence()
        os.write(write_fd, b"done")
        os.close(write_fd)
        then()
    except BaseException as e:  # noqa: BLE001 - told to the parent
        with contextlib.suppress(OSError):
            os.write(write_fd, f"{type(e).__name__}: {e}".encode())
        os._exit(1)
    os._exit(0)


ACTIONS: dict[str, Callable[..., None]] = {
    "add_lock": add_lock,
    "change_cpu_limit": change_cpu_limit,
    "change_home": change_home,
    "change_init_argument": change_init_argument,
    "change_lock": change_lock,
    "change_memory_limit": change_memory_limit,
    "change_network": change_network,
    "fill_memory": fill_memory,
    "kill_later": kill_later,
    "mount_tmpfs": mount_tmpfs,
    "move_in_stranger": move_in_stranger,
    "move_out": move_out,
    "remount_read_only": remount_read_only,
    "share_namespaces": share_namespaces,
    "stop_guest_server": stop_guest_server,
    "take_posix_lock": take_posix_lock,
}


def main() -> None:
    """Carry out the request of the first argument."""
    request = json.loads(sys.argv[1])
    target = Target(request["pid1"], request["root"], request["cgroups"], request["other_pid1"], request["asked_at"])
    try:
        ACTIONS[request["action"]](target, **request["arguments"])
    except (OSError, LookupError, ValueError, ctypes.ArgumentError) as e:
        sys.exit(f"{request['action']}: {type(e).__name__}: {e}")


if __name__ == "__main__":
    main()
