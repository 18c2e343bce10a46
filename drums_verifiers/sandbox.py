"""The plan that puts a worker behind walls: what it can see, reach, use and become.

A worker gets namespaces of its own (mount, pid, net, ipc, uts), a read-only root on a small tmpfs that holds the
interpreter, one scratch directory, no capability, uid 65534 and the seccomp filter of desktops. The interpreter's
folders keep their paths; everything else lies under `/drums`. Nothing in it belongs to a job: libraries, the job's code
and its files are shown to it with the job (`showing.py`), so that one which has waited has nothing old.

Memory is limited by a cgroup, which kills where everyone can see it, and never by `RLIMIT_AS`: a checker that meets a
`MemoryError` swallows it and answers 0 to a correct result (`notes/evaluators.md` §3).

The inside is left by killing pid 1 of the pid namespace: the kernel then kills everything in it, and the mounts go
with the last process. The order of the operations matters in three places, marked below.

Sources: namespaces(7), pid_namespaces(7), mount(2), pivot_root(2), prctl(2), capabilities(7).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from drums_core.sys.helper import Plan
from drums_core.sys.seccomp import desktop_filter

NOBODY = 65534
SCRATCH = "/drums/work"
JOBS = "/drums/job"
FILES = "/drums/files"
LIBRARIES = "/drums/lib"
MAIN = "/drums/worker_main.py"

# The new root is assembled on a mount over /sys: a directory that every host has, and below which nothing lies that
# is to be bound. /tmp would hide sources.
_STAGE = "/sys"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_DEVICES = ("null", "zero", "urandom", "random")
_SAFE = ("nosuid", "nodev")


def library_paths() -> list[Path]:
    """The folders with installed packages that this interpreter uses, in the order of `sys.path`."""
    wanted = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}
    found = [x for x in sys.path if x in wanted or Path(x).name in ("site-packages", "dist-packages")]
    return [Path(x) for x in dict.fromkeys(found) if Path(x).is_dir()]


def _below(path: Path, parents: Sequence[Path]) -> bool:
    return any(path == x or x in path.parents for x in parents)


def interpreter_paths() -> list[Path]:
    """What the interpreter needs besides the system's folders, outermost only."""
    system = [Path(x) for x in _SYSTEM]
    candidates = [Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(sysconfig.get_paths()["stdlib"])]
    candidates.append(Path(os.path.realpath(sys.executable)))
    chosen: list[Path] = []
    for path in sorted({x.resolve() for x in candidates}, key=lambda x: len(x.parts)):
        if path.exists() and not _below(path, system) and not _below(path, chosen):
            chosen.append(path)
    return chosen


def inside_libraries() -> dict[str, Path]:
    """Where each of `library_paths` lies inside: path inside -> folder on the host."""
    return {f"{LIBRARIES}/{i}": path for i, path in enumerate(library_paths())}


def _bind(source: Path | str, inside: str, *, extra: Sequence[str] = _SAFE) -> Plan:
    target = _STAGE + inside
    is_directory = Path(source).is_dir()
    parent = os.path.dirname(target)
    place: Plan = [["mkdir", target, 0o755, 0, 0]] if is_directory else [["mkdir", parent, 0o755, 0, 0]]
    if not is_directory:
        place.append(["write", target, "", 0o644])
    return [
        *place,
        ["mount", str(source), target, None, ["bind"]],
        # A bind takes no other flag when it is made (mount(2)); they come with a remount.
        ["mount", None, target, None, ["remount", "bind", "ro", *extra]],
    ]


def _system_folders() -> Plan:
    plan: Plan = []
    for name in _SYSTEM:
        if os.path.islink(name):
            plan.append(["symlink", os.readlink(name), _STAGE + name])
        elif os.path.isdir(name):
            plan += _bind(name, name)
    return plan


def _etc() -> Plan:
    texts = {
        "/etc/passwd": f"nobody:x:{NOBODY}:{NOBODY}:nobody:{SCRATCH}:/usr/sbin/nologin\n",
        "/etc/group": f"nogroup:x:{NOBODY}:\n",
        "/etc/hosts": "127.0.0.1 localhost\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    plan: Plan = [["mkdir", _STAGE + "/etc", 0o755, 0, 0]]
    plan += [["write", _STAGE + path, text, 0o644] for path, text in texts.items()]
    if os.path.isfile("/etc/ld.so.cache"):
        plan += _bind("/etc/ld.so.cache", "/etc/ld.so.cache")
    return plan


def _limits(timeout_s: float, scratch_bytes: int) -> Plan:
    cpu = math.ceil(timeout_s) * 4  # the wall clock is what ends a worker; this holds if the host's process dies
    # No RLIMIT_NPROC: the kernel counts that over all processes of uid 65534, those of other checks' workers included:
    # one that forks without end would take the others' share. A cgroup's limit is the worker's own.
    values = {"NOFILE": 1024, "FSIZE": scratch_bytes, "CORE": 0, "CPU": cpu, "MEMLOCK": 65536}
    return [["rlimit", name, value, value] for name, value in values.items()]


def worker_environment() -> dict[str, str]:
    """The environment of a worker: nothing of the host's."""
    return {
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        # One worker per check: threads of a linear algebra library only add start-up time and memory.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def sandbox_plan(
    *,
    reply_fd: int,
    go_fd: int,
    report_fd: int,
    timeout_s: float,
    cgroup_paths: Sequence[Path],
    scratch_bytes: int,
    preload: Sequence[str],
) -> Plan:
    """The plan of a worker that waits for a job, ending in `worker_main.py`.

    Args:
        reply_fd: descriptor that the worker writes its reply to.
        go_fd: descriptor that it reads from before it does what asks a desktop.
        report_fd: descriptor that gets the host's pid of the namespace's pid 1 once the namespaces are there.
        timeout_s: the worker's time, for the CPU limit.
        cgroup_paths: cgroup directories that the worker joins; they limit its memory and its processes.
        scratch_bytes: size of the scratch directory, and of the largest file.
        preload: modules of the standard library that it imports before it waits.
    """
    plan: Plan = [
        ["umask", 0o022],
        ["cgroups", [str(x) for x in cgroup_paths]],
        ["unshare", ["pid", "net", "ipc", "uts"]],
        ["link_up", "lo"],
        # No `die_with_parent` before this fork: the helper's parent is a thread of trio's pool, which ends when idle.
        ["fork", report_fd, True],
        # After the fork: pivot_root(2) moves every process of a mount namespace, and the helper needs the host's /proc.
        ["unshare", ["mnt"]],
        ["hostname", "worker"],
        ["mount", None, "/", None, ["rec", "private"]],
        ["mount", "tmpfs", _STAGE, "tmpfs", ["nosuid", "nodev"], "size=4m,mode=755"],
        ["mkdir", _STAGE + SCRATCH, 0o700, 0, 0],
        [
            "mount",
            "tmpfs",
            _STAGE + SCRATCH,
            "tmpfs",
            ["nosuid", "nodev", "noexec"],
            f"size={scratch_bytes},mode=700,uid={NOBODY},gid={NOBODY},nr_inodes=200000",
        ],
        ["symlink", SCRATCH, _STAGE + "/tmp"],
        *_system_folders(),
        *_etc(),
    ]
    for path in interpreter_paths():
        plan += _bind(path, str(path))
    plan += _bind(Path(__file__).with_name("worker_main.py"), MAIN)
    plan += [["mkdir", _STAGE + folder, 0o755, 0, 0] for folder in (JOBS, FILES, LIBRARIES)]
    for name in _DEVICES:
        plan += _bind(f"/dev/{name}", f"/dev/{name}", extra=("nosuid", "noexec"))
    plan += [
        ["mkdir", _STAGE + "/proc", 0o755, 0, 0],
        ["mount", "proc", _STAGE + "/proc", "proc", ["nosuid", "nodev", "noexec"]],
        ["pivot_root", _STAGE],
        ["mount", None, "/", None, ["remount", "bind", "ro", "nosuid", "nodev"]],
        ["chdir", SCRATCH],
        *_limits(timeout_s, scratch_bytes),
        ["bounding"],
        ["ids", NOBODY, NOBODY, []],
        ["no_new_privs"],
        # After the change of ids, which clears it (prctl(2)); to pid 1 of the namespace, with which all others die.
        ["die_with_parent", int(signal.SIGKILL)],
        ["seccomp", desktop_filter().hex()],
        # The worker is not pid 1 itself: pid 1 ignores signals that it has no handler for, its own abort(3) included.
        ["fork", None, False],
        ["close_from", 3, [reply_fd, go_fd]],
        ["umask", 0o077],
        [
            "exec",
            [os.path.realpath(sys.executable), "-I", "-S", "-B", MAIN, str(reply_fd), str(go_fd), *preload],
            worker_environment(),
        ],
    ]
    return plan
