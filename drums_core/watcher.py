"""Deaths in desktops as the kernel reports them: the netlink process connector, without a gap.

The subscription stands before a desktop exists, its processes are handed over while they are still held, and
every later one is learnt from its FORK. Messages are queued by the kernel in the dying task's own exit, so that
draining the socket (`drain`) sees everything that has happened before. Dropped messages (ENOBUFS) are an event
of their own, which fails the gates that need the watching.

A process has died when its last thread has: its first may end long before, and what crashes later is a thread of it
all the same. So its threads are counted, from the messages alone.

Sources: the kernel's `driver-api/connector.rst`, `include/uapi/linux/cn_proc.h`, `include/uapi/linux/connector.h`;
netlink(7).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import trio

from drums.errors import PrerequisiteError
from drums_core.model import DesktopEvent, ProcessDied, ProcessIdentity, WatchLost

_NETLINK_CONNECTOR, _CN_IDX_PROC, _CN_VAL_PROC = 11, 1, 1
_LISTEN = 1
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 16 << 20
_NONE, _FORK, _EXEC, _COMM, _COREDUMP, _EXIT = 0, 0x1, 0x2, 0x200, 0x40000000, 0x80000000
_EVENT_OFFSET = 16 + 20  # struct nlmsghdr, struct cn_msg
CRASH_SIGNALS = frozenset({4, 5, 6, 7, 8, 11, 31})  # ILL TRAP ABRT BUS FPE SEGV SYS


@attrs.define
class _Known:
    slot: str
    inner_pid: int
    command: str
    core_dumped: bool = False
    threads: set[int] = attrs.field(factory=set)  # alive, the first one left out
    leader_code: int | None = None  # of the first thread, once it has ended


@attrs.define(eq=False)
class ProcessWatcher:
    """Follows the processes of all desktops of this host.

    Args:
        on_event: called with (slot, event) from `run` and `drain`; must not block.
        acted: whether the agent has acted in the slot's episode.
        on_kill: called with a slot after a SIGKILL death there, so that the OOM counter is read again.
    """

    on_event: Callable[[str, DesktopEvent], None]
    acted: Callable[[str], bool]
    on_kill: Callable[[str], None]
    _known: dict[int, _Known] = attrs.field(factory=dict)
    _socket: socket.socket | None = None

    def open(self) -> None:
        """Subscribe; returns once the kernel has acknowledged.

        Raises:
            PrerequisiteError: the kernel has no process connector, or the caller may not use it.
        """
        try:
            s = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_CONNECTOR)
        except OSError as e:
            raise PrerequisiteError(
                f"the kernel's process connector cannot be opened: {e}",
                hint="a kernel with CONFIG_PROC_EVENTS=y, and the host's own network and pid namespaces, are needed",
            ) from e
        try:
            s.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
            s.bind((0, _CN_IDX_PROC))
            payload = struct.pack("=IIIIHHI", _CN_IDX_PROC, _CN_VAL_PROC, 1, 0, 4, 0, _LISTEN)
            s.send(struct.pack("=IHHII", 16 + len(payload), 3, 0, 1, os.getpid()) + payload)
            s.settimeout(5.0)
            while struct.unpack_from("=I", s.recv(4096), _EVENT_OFFSET)[0] != _NONE:
                pass
            s.setblocking(False)
        except OSError as e:
            s.close()
            raise PrerequisiteError(
                f"the kernel's process connector does not answer: {e}", hint="run as root in the initial namespaces"
            ) from e
        self._socket = s

    def close(self) -> None:
        """Unsubscribe."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def track(self, slot: str, processes: Iterable[ProcessIdentity]) -> None:
        """Follow these processes and whatever they fork. Call while they cannot fork, or drain afterwards."""
        for process in processes:
            threads = _other_threads(process.host_pid)
            self._known[process.host_pid] = _Known(slot, process.inner_pid, process.command, threads=threads)

    def untrack(self, slot: str) -> None:
        """Forget a slot's processes: its end is wanted."""
        for pid in [p for p, known in self._known.items() if known.slot == slot]:
            del self._known[pid]

    async def run(self) -> None:
        """Read events until cancelled."""
        assert self._socket is not None, "open() comes first"
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            self.drain()

    def drain(self) -> None:
        """Handle everything that the kernel has queued so far."""
        while self._socket is not None:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise
                lost = WatchLost("the kernel dropped process notifications: deaths may have gone unseen")
                for slot in {known.slot for known in self._known.values()}:
                    self.on_event(slot, lost)
                continue
            self._handle(data)

    def _handle(self, data: bytes) -> None:
        what = struct.unpack_from("=I", data, _EVENT_OFFSET)[0]
        at = _EVENT_OFFSET + 16  # what, cpu, timestamp
        if what == _FORK:
            _, parent, child, child_group = struct.unpack_from("=IIII", data, at)
            if child != child_group:
                if known := self._known.get(child_group):
                    known.threads.add(child)
            elif known := self._known.get(parent):
                self._known[child] = _Known(known.slot, 0, known.command)
            elif (known := self._known.get(child)) and known.leader_code is not None:
                del self._known[child]  # a stranger with the pid of a process that is gone
        elif what == _EXEC:
            group = struct.unpack_from("=II", data, at)[1]
            if known := self._known.get(group):
                # Whichever thread executed it is the first now, and the only one (execve(2)).
                known.threads, known.leader_code = set(), None
                self._read(group, known)
        elif what == _COMM:
            thread, group = struct.unpack_from("=II", data, at)
            if (known := self._known.get(group)) and thread == group:
                known.command = data[at + 8 : at + 24].split(b"\0")[0].decode(errors="replace").strip() or known.command
        elif what == _COREDUMP:
            known = self._known.get(struct.unpack_from("=II", data, at)[1])
            if known:
                known.core_dumped = True
                self._read(struct.unpack_from("=II", data, at)[1], known)
        elif what == _EXIT:
            thread, group, code = struct.unpack_from("=III", data, at)
            self._exit(thread, group, code)

    def _exit(self, thread: int, group: int, code: int) -> None:
        known = self._known.get(group)
        signal = code & 0x7F
        if known is None:
            return
        known.threads.discard(thread)
        if thread == group:
            known.leader_code = code
        # A crashing thread takes its group along; otherwise the process lives while any of its threads does.
        if signal not in CRASH_SIGNALS and (known.leader_code is None or known.threads):
            return
        code = code or known.leader_code or 0
        signal = code & 0x7F
        self._read(group, known)
        del self._known[group]
        event = ProcessDied(
            host_pid=group,
            inner_pid=known.inner_pid,
            command=known.command,
            signal=signal,
            exit_code=0 if signal else (code >> 8) & 0xFF,
            core_dumped=known.core_dumped or bool(code & 0x80),
            after_action=self.acted(known.slot),
        )
        self.on_event(known.slot, event)
        if signal == 9:
            self.on_kill(known.slot)

    @staticmethod
    def _read(pid: int, known: _Known) -> None:
        """Refresh name and inner pid while the process can still be read (a zombie can)."""
        try:
            known.command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or known.command
            for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
                if line.startswith("NSpid:"):
                    known.inner_pid = int(line.split()[-1])
        except (FileNotFoundError, ProcessLookupError):
            return


def _other_threads(pid: int) -> set[int]:
    try:
        return {int(x) for x in os.listdir(f"/proc/{pid}/task")} - {pid}
    except FileNotFoundError:
        return set()
