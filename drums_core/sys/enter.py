"""Everything that enters, makes or leaves a namespace: operations, and the helper that carries a plan of them out.

A plan is a JSON list of operations. The parent builds it (`Plan`), starts this file as a short-lived
process (`python -I -S enter.py FD`) and the process executes the operations in order, the last being `exec`.
A helper process rather than `preexec_fn`, because a user namespace wants a single-threaded process and Python
code between fork and exec of a threaded process can deadlock.

Stand-alone on purpose (standard library only, no sibling imports), so that it starts in milliseconds and can be
read in one sitting. The same functions serve the daemon as a library where no namespace is entered. The model
is mkosi's `sandbox.py`.

Sources: namespaces(7), mount(2), pivot_root(2), setns(2), unshare(2), capabilities(7), seccomp(2), cgroups(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

CLONE_NEW = {
    "time": 0x00000080,
    "mnt": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
MOUNT_FLAGS = {
    "ro": 0x1,
    "nosuid": 0x2,
    "nodev": 0x4,
    "noexec": 0x8,
    "remount": 0x20,
    "bind": 0x1000,
    "rec": 0x4000,
    "private": 0x40000,
}
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_DUMPABLE = 1, 24, 22, 38, 4
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
SYS_PIVOT_ROOT = 155  # x86-64

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """Turn a C library result below zero into the `OSError` of its errno, naming the call."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _flags(names: Sequence[str], table: dict[str, int]) -> int:
    value = 0
    for name in names:
        value |= table[name]
    return value


def mount(
    source: str | None, target: str, fstype: str | None = None, flags: Sequence[str] = (), data: str = ""
) -> None:
    """mount(2); `flags` are the names of `MOUNT_FLAGS`."""
    text = [None if x is None else os.fsencode(x) for x in (source, target, fstype)]
    bits = ctypes.c_ulong(_flags(flags, MOUNT_FLAGS))
    checked(libc.mount(*text, bits, data.encode() or None), f"mount {source} on {target} ({fstype}, {','.join(flags)})")


def umount(target: str, *, detach: bool = True) -> None:
    """umount2(2), lazily unless `detach` is false."""
    checked(libc.umount2(os.fsencode(target), MNT_DETACH if detach else 0), f"umount {target}")


def setns(fd: int, kind: str) -> None:
    """setns(2) of the calling thread; `kind` is a name of `CLONE_NEW`."""
    checked(libc.setns(fd, CLONE_NEW[kind]), f"setns {kind}")


def unshare(kinds: Sequence[str]) -> None:
    """unshare(2) of the calling thread."""
    checked(libc.unshare(_flags(kinds, CLONE_NEW)), f"unshare {'+'.join(kinds)}")


def prctl(option: int, value: int, what: str) -> None:
    """prctl(2) with one argument."""
    checked(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def new_userns(uid_map: str, gid_map: str) -> None:
    """Move the caller into a new user namespace with these maps (user_namespaces(7)).

    The maps must be written by a process with privilege in the *parent* namespace, so a child that is forked
    before the unshare writes them.
    """
    ready_r, ready_w = os.pipe()
    parent = os.getpid()
    writer = os.fork()
    if writer == 0:
        try:
            os.close(ready_w)
            if os.read(ready_r, 1) != b"1":
                os._exit(1)
            for name, text in (("uid_map", uid_map), ("gid_map", gid_map)):
                with open(f"/proc/{parent}/{name}", "w", encoding="ascii") as f:
                    f.write(text)
            os._exit(0)
        except OSError as e:
            os.write(2, f"writing the id maps: {e}\n".encode())
            os._exit(1)
    os.close(ready_r)
    unshare(["user"])
    os.write(ready_w, b"1")
    os.close(ready_w)
    if os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]):
        raise OSError("the id maps of the new user namespace could not be written")


def link_up(name: str) -> None:
    """Set a network link up in the caller's network namespace (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sH14x", name.encode(), 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(s, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags | IFF_UP))


def pivot_root(new_root: str) -> None:
    """Make `new_root` (a mount point) the root and detach the old one (pivot_root(2), the `.`, `.` form)."""
    os.chdir(new_root)
    checked(libc.syscall(SYS_PIVOT_ROOT, b".", b"."), f"pivot_root {new_root}")
    umount(".")
    os.chdir("/")


def set_ids(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Become uid and gid for good; leaving uid 0 clears the capabilities (capabilities(7))."""
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # A change of ids makes the process undumpable, and /proc/self then belongs to root.
    prctl(PR_SET_DUMPABLE, 1, "dumpable")


def drop_bounding_set() -> None:
    """Empty the capability bounding set."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # EINVAL above the kernel's last capability


def install_seccomp(program: bytes) -> None:
    """Install a classic BPF filter; needs no_new_privs or CAP_SYS_ADMIN in the caller's user namespace."""
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    description = Program(len(program) // 8, ctypes.addressof(buffer))
    checked(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(description), 0, 0), "seccomp filter")


def join_cgroups(paths: Sequence[str]) -> None:
    """Move the caller into each of these cgroup directories."""
    for path in paths:
        with open(f"{path}/cgroup.procs", "w", encoding="ascii") as f:
            f.write("0")


def make_directory(path: str, mode: int, uid: int, gid: int) -> None:
    """Make a directory (or take the one that is there) with exactly this mode and owner."""
    os.makedirs(path, exist_ok=True)
    os.chown(path, uid, gid)
    os.chmod(path, mode)


def write_file(path: str, text: str, mode: int) -> None:
    """Write a whole file with this mode."""
    with open(path, "w", encoding="utf-8") as f:
        os.fchmod(f.fileno(), mode)
        f.write(text)


def fork_and_wait(report_fd: int | None, new_session: bool) -> None:
    """Go on in a child; the parent passes the child's end on as its own.

    Args:
        report_fd: descriptor that gets the child's pid (as this process sees it) in ASCII, or None.
        new_session: whether the child leads a session of its own, inside its pid namespace.
    """
    child = os.fork()
    if child:
        if report_fd is not None:
            os.write(report_fd, str(child).encode())
        # Nothing of the plan may stay open here: a pipe's other end waits for the last writer.
        # By number: /proc may be another pid namespace's by now, where this process has no entry.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os._exit(_exit_code(os.waitpid(child, 0)[1]))
    if report_fd is not None:
        os.close(report_fd)
    if new_session:
        os.setsid()


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def close_from(first: int, keep: Sequence[int]) -> None:
    """Close every descriptor from `first` on except those to keep."""
    for fd in sorted(int(x) for x in os.listdir("/proc/self/fd")):
        if fd >= first and fd not in keep:
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone already
                os.close(fd)


def set_stdio(fds: Sequence[int | None]) -> None:
    """Make these the standard streams; None is /dev/null as the current root has it."""
    null = os.open("/dev/null", os.O_RDWR)
    for number, fd in enumerate(fds):
        os.dup2(null if fd is None else fd, number, inheritable=True)
    if null > 2:
        os.close(null)


def set_rlimit(name: str, soft: int, hard: int) -> None:
    """setrlimit(2); -1 is unlimited."""
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))


def die_with_parent(sig: int) -> None:
    """Be sent `sig` when the parent thread ends (prctl(2), PR_SET_PDEATHSIG)."""
    prctl(PR_SET_PDEATHSIG, sig, "pdeathsig")


def execute(argv: Sequence[str], env: dict[str, str]) -> None:
    """Reset the signals that Python changed, and become the program."""
    for number in (signal.SIGPIPE, signal.SIGINT, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(argv[0], list(argv), env)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "bounding": drop_bounding_set,
    "cgroups": join_cgroups,
    "chdir": os.chdir,
    "close_from": close_from,
    "die_with_parent": die_with_parent,
    "exec": execute,
    "fork": fork_and_wait,
    "hostname": socket.sethostname,
    "ids": set_ids,
    "link_up": link_up,
    "mkdir": make_directory,
    "mount": mount,
    "no_new_privs": lambda: prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs"),
    "pivot_root": pivot_root,
    "rlimit": set_rlimit,
    "seccomp": lambda program: install_seccomp(bytes.fromhex(program)),
    "setns": setns,
    "setsid": os.setsid,
    "stdio": set_stdio,
    "symlink": os.symlink,
    "umask": os.umask,
    "umount": umount,
    "unshare": unshare,
    "userns": new_userns,
    "write": write_file,
}


def describe(plan: Sequence[Sequence[Any]]) -> str:
    """The plan as text, one operation a line, for logs and for reading a failure."""
    return "\n".join(f"{name}({', '.join(map(repr, arguments))})" for name, *arguments in plan)


def run(plan: Sequence[Sequence[Any]]) -> None:
    """Execute the operations in order. A failure is written to standard error and ends the process with 125."""
    for name, *arguments in plan:
        try:
            OPERATIONS[name](*arguments)
        except Exception as e:  # noqa: BLE001 - a plan that is wrong in itself ends in the same way
            what = f"{name}({', '.join(map(repr, arguments))[:300]})"
            why = str(e) if isinstance(e, OSError) else f"{type(e).__name__}: {e}"
            os.write(2, f"drums-enter: {what}: {why}\n".encode(errors="replace"))
            os._exit(125)


def main() -> None:
    """Read the plan from the descriptor that the first argument names, and run it."""
    fd = int(sys.argv[1])
    with open(fd, encoding="utf-8") as f:
        plan = json.load(f)
    run(plan)


if __name__ == "__main__":
    main()
