"""The process behind `probe_criu`: makes a small desktop-like tree, dumps it, restores it, sees that it lives.

Started as `python -I -m ... LAUNCHER PYCRIU_DIR`; prints one JSON object. It moves into a mount and a pid namespace
of its own first, and keeps its files on a tmpfs there, so that its end takes everything with it.

The tree has what a desktop has and what CRIU failed on before: user, pid, mount, net, ipc, uts and time namespaces, an
external mount, file locks, an unlinked file, a tmpfs, and a TCP connection within. CRIU's options are a desktop's.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from drums_core.criu_provider.model import HARMLESS
from drums_core.sys import enter

FIRST_ID, IDS = 1_000_000, 65_536
_ALIVE_TIMEOUT_S = 5.0
_PERL = "/usr/bin/perl"

# Perl, because every Debian has it at one readable place; this Python may live where no other user can read. It counts
# over a TCP connection between two processes: a higher number with the same token means that both live with their
# memory, and so does the connection. It appends to one open file: a file that is replaced by rename while the tree runs
# on after the dump would be missing at the restore, if the dump found it open.
_TREE = r"""
use strict; use warnings; use Socket; use Fcntl qw(:flock);
my ($token, $n) = ($ARGV[0], 0);
open(my $lock, '>', '/lock-a') or die; flock($lock, LOCK_EX) or die;
open(my $ghost, '>', '/tmp/ghost') or die; unlink '/tmp/ghost' or die;
open(my $out, '>>', '/count') or die;
socket(my $listener, PF_INET, SOCK_STREAM, 6) or die;
bind($listener, sockaddr_in(5000, INADDR_LOOPBACK)) or die; listen($listener, 1) or die;
my $child = fork() // die;
if (!$child) {
    close $listener;
    open(my $shared, '>', '/lock-b') or die; flock($shared, LOCK_SH) or die;
    socket(my $up, PF_INET, SOCK_STREAM, 6) or die;
    connect($up, sockaddr_in(5000, INADDR_LOOPBACK)) or die;
    while ((sysread($up, my $b, 8) // 0) == 8) { syswrite($up, pack('Q', unpack('Q', $b) + 1)); }
    exit 1;
}
accept(my $down, $listener) or die;
while (1) {
    syswrite($down, pack('Q', $n)); (sysread($down, my $b, 8) // 0) == 8 or die; $n = unpack('Q', $b);
    syswrite($out, "$token $n\n");
    select(undef, undef, undef, 0.004);
}
"""


class Failure(Exception):
    """The trial failed at a stage; `log` holds CRIU's error lines."""

    def __init__(self, stage: str, detail: str, log: list[str] | None = None) -> None:
        super().__init__(detail)
        self.stage, self.detail, self.log = stage, detail, log or []


class Trial:
    """One dump and restore.

    Args:
        launcher: the CRIU to try.
        rpc: its `rpc_pb2`.
        scratch: a folder on a file system of the trial's own.
    """

    def __init__(self, launcher: str, rpc: ModuleType, scratch: Path) -> None:
        self._launcher, self._rpc, self._scratch = launcher, rpc, scratch
        self._root = scratch / "root"
        self._token = secrets.token_hex(8)
        self.timings = {"dump_ms": 0.0, "restore_ms": 0.0}

    def run(self) -> None:
        """Carry the trial out.

        Raises:
            Failure: it did not end as it must.
        """
        self._make_root()
        first = self._start()
        self._wait_count(first, above=0, stage="start")
        locks = _locks()
        self._request("dump", first)
        _end(first)
        before = self._count()
        second = self._request("restore", None)
        self._wait_count(second, above=before, stage="alive after the restore")
        if (after := _locks()) != locks:
            raise Failure("locks", f"locks {after} after the restore, {locks} before")
        _end(second)

    def _make_root(self) -> None:
        for name in ("usr", "proc", "dev", "tmp"):
            (self._root / name).mkdir(parents=True)
        for name in ("lib", "lib64", "bin"):
            (self._root / name).symlink_to(f"usr/{name}")
        os.mknod(self._root / "dev/null", 0o20666, os.makedev(1, 3))
        (self._root / "dev/null").chmod(0o666)
        for path in (self._root, *self._root.iterdir()):
            os.lchown(path, FIRST_ID, FIRST_ID)
        # CRIU wants the root to be a mount point, at the restore too.
        enter.mount(str(self._root), str(self._root), None, ["bind"])

    def _start(self) -> int:
        usr = str(self._root / "usr")
        enter.mount("/usr", usr, None, ["bind"])
        reader, writer = os.pipe()
        maker = os.fork()
        if maker == 0:
            try:
                os.close(reader)
                self._become_tree(writer)
            except BaseException as error:  # noqa: BLE001 - a forked copy of this program must never go on
                os.write(2, f"starting the tree: {error!r}\n".encode())
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as report:
            said = report.read()
        _wait(maker)
        enter.umount(usr)
        if not said:
            raise Failure("namespaces", "the tree could not enter its namespaces")
        return int(said)

    def _become_tree(self, report_fd: int) -> None:
        id_map = f"0 {FIRST_ID} {IDS}"
        enter.new_userns(id_map, id_map)
        enter.set_ids(0, 0, [])
        enter.unshare(["mnt", "uts", "ipc", "pid", "net", "time"])
        pid = os.fork()
        if pid:
            os.write(report_fd, str(pid).encode())
            os._exit(0)
        os.close(report_fd)
        os.setsid()
        enter.mount(None, "/", None, ["rec", "private"])
        enter.mount(str(self._root), str(self._root), None, ["bind", "rec"])
        enter.mount("proc", f"{self._root}/proc", "proc", ["nosuid", "nodev", "noexec"])
        enter.mount("tmpfs", f"{self._root}/tmp", "tmpfs", ["nosuid", "nodev"], "mode=1777,size=1m")
        enter.link_up("lo")
        enter.pivot_root(str(self._root))
        enter.set_stdio([None, None, None])
        enter.close_from(3, ())
        enter.execute([_PERL, "-e", _TREE, self._token], {"PATH": "/usr/bin"})

    def _options(self, folder_fd: int) -> Any:
        request = self._rpc.criu_req()
        opts = request.opts
        opts.images_dir_fd = folder_fd
        opts.work_dir_fd = folder_fd
        opts.root = str(self._root)
        opts.log_file, opts.log_level = "criu.log", 2
        opts.tcp_established = opts.ext_unix_sk = opts.file_locks = opts.link_remap = opts.force_irmap = True
        opts.tcp_skip_in_flight = True
        opts.ghost_limit = 64 << 20
        opts.manage_cgroups = True
        opts.manage_cgroups_mode = self._rpc.IGNORE
        opts.network_lock = self._rpc.SKIP
        opts.notify_scripts = True
        return request

    def _request(self, stage: str, pid: int | None) -> int:
        """Have CRIU dump `pid`, or restore; returns the pid of the restored tree (0 for a dump)."""
        folder = self._scratch / "images"
        folder.mkdir(exist_ok=True)
        folder_fd = os.open(folder, os.O_RDONLY)
        request = self._options(folder_fd)
        if pid is None:
            request.type = self._rpc.RESTORE
            request.opts.rst_sibling = True
            request.opts.external.append("mnt[usr]:/usr")
        else:
            request.type = self._rpc.DUMP
            request.opts.pid = pid
            request.opts.leave_running = True
            request.opts.external.append("mnt[/usr]:usr")
        began = time.monotonic()
        restored = self._converse(stage, request, folder_fd)
        self.timings[f"{stage}_ms"] = (time.monotonic() - began) * 1000
        os.close(folder_fd)
        return restored

    def _converse(self, stage: str, request: Any, folder_fd: int) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        criu = subprocess.Popen(
            [self._launcher, "swrk", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), folder_fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        restored = 0
        with ours:
            try:
                ours.send(request.SerializeToString())
                while message := ours.recv(1 << 20):
                    answer = self._rpc.criu_resp()
                    answer.ParseFromString(message)
                    if answer.type != self._rpc.NOTIFY:
                        break
                    restored = answer.notify.pid or restored
                    go_on = self._rpc.criu_req()
                    go_on.type, go_on.notify_success = self._rpc.NOTIFY, True
                    ours.send(go_on.SerializeToString())
            except OSError as error:
                raise Failure(stage, f"CRIU hung up: {error}", self._log()) from error
        said = criu.communicate()[1].decode(errors="replace").strip()
        if not message:
            raise Failure(stage, f"CRIU ended with exit code {criu.returncode}: {said[-200:]!r}", self._log())
        if not answer.success:
            raise Failure(stage, f"CRIU gave up, errno {answer.cr_errno}", self._log())
        return restored

    def _log(self) -> list[str]:
        try:
            text = (self._scratch / "images/criu.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        lines = [x.strip() for x in text.splitlines() if "Error" in x and not any(h in x for h in HARMLESS)]
        return lines[:6]

    def _count(self) -> int:
        try:
            lines = (self._root / "count").read_text(encoding="ascii").splitlines(keepends=True)
            token, number = next(x for x in reversed(lines) if x.endswith("\n")).split()
        except (OSError, ValueError, StopIteration):
            return 0
        return int(number) if token == self._token else 0

    def _wait_count(self, pid: int, *, above: int, stage: str) -> None:
        deadline = time.monotonic() + _ALIVE_TIMEOUT_S
        while (count := self._count()) <= above:
            if time.monotonic() > deadline:
                state = "runs" if _is_running(pid) else "has ended"
                raise Failure(stage, f"the tree's count stays at {count} for {_ALIVE_TIMEOUT_S:.0f} s; pid 1 {state}")
            time.sleep(0.002)


def _locks() -> list[str]:
    """Every file lock of the trial's processes, as kind and mode: no other process is in its pid namespace."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            text = path.read_text(encoding="ascii")
        except OSError:
            continue  # a descriptor that is gone by now
        found += [" ".join(match.split()[1:4]) for match in re.findall(r"^lock:\s*(.*)$", text, re.MULTILINE)]
    return sorted(found)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait(pid: int) -> None:
    os.waitpid(pid, 0)


def _end(pid: int) -> None:
    """Kill a tree by its pid 1 and reap it; its orphans end with their namespace."""
    os.kill(pid, signal.SIGKILL)
    _wait(pid)


def _trial(launcher: str, pycriu_dir: str) -> dict[str, Any]:
    enter.mount(None, "/", None, ["rec", "private"])
    enter.mount("proc", "/proc", "proc")
    # CRIU caches what it finds out about the kernel in /run, where that is a tmpfs: a cache of this trial's own.
    enter.mount("tmpfs", "/run", "tmpfs", [], "mode=755,size=1m")
    scratch = Path("/run/scratch")
    scratch.mkdir()
    enter.mount("tmpfs", str(scratch), "tmpfs", [], "mode=755,size=256m")
    sys.path.insert(0, pycriu_dir)
    trial: Trial | None = None
    try:
        if not Path(_PERL).exists():
            raise Failure("perl", f"{_PERL!r} is not on this host")
        trial = Trial(launcher, importlib.import_module("rpc_pb2"), scratch)
        trial.run()
    except Failure as failure:
        timings = trial.timings if trial else {}
        return {"ok": False, "stage": failure.stage, "detail": failure.detail, "log": failure.log, **timings}
    except Exception as error:  # noqa: BLE001 - whatever breaks here is the trial's answer
        return {"ok": False, "stage": "trial", "detail": f"{type(error).__name__}: {error}", "log": []}
    return {"ok": True, "stage": "done", "detail": "", "log": [], **trial.timings}


def main() -> int:
    """Run the trial as pid 1 of a pid namespace, so that the kernel ends all of it when this process is killed."""
    launcher, pycriu_dir = sys.argv[1:]
    enter.unshare(["mnt", "pid"])
    child = os.fork()
    if child == 0:
        enter.die_with_parent(signal.SIGKILL)
        print(json.dumps(_trial(launcher, pycriu_dir)), flush=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
