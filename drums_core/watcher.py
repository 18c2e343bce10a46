"""Deaths in desktops as the kernel reports them: the netlink process connector, without a gap.

The subscription stands before a desktop exists, its processes are handed over while they are still held, and
every later one is learnt from its FORK. Messages are queued by the kernel in the dying task's own exit, so that
draining the socket (`drain`) sees everything that has happened before. Dropped messages (ENOBUFS) are an event
of their own, which fails the gates that need the watching.

A process has died when its last thread has: its first may end long before, and what crashes later is a thread of it
all the same. So its threads are counted, from the messages alone.

An agent may fork without end, and one desktop's messages share the queue with all others'. So a filter in the kernel
queues what lives and deaths need and nothing else, a message costs microseconds, and what costs more (reading proc,
telling of an ordinary end, which no gate judges) is done so many times a second for each slot. Names that processes
give themselves can be had at any rate: they come by a second socket, which may overflow at no other cost.

Sources: the kernel's `driver-api/connector.rst`, `include/uapi/linux/cn_proc.h`, `include/uapi/linux/connector.h`,
`networking/filter.rst`, `drivers/connector/cn_proc.c`; netlink(7), socket(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import attrs
import structlog
import trio

from drums.errors import PrerequisiteError
from drums_core.model import DesktopEvent, ProcessDied, ProcessIdentity, WatchLost

_log = structlog.get_logger("drums.watcher")
_NETLINK_CONNECTOR, _CN_IDX_PROC, _CN_VAL_PROC = 11, 1, 1
_LISTEN = 1
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
# The kernel doubles these; a message takes 768 bytes of it.
_BUFFER_BYTES = 64 << 20
_NAMES_BUFFER_BYTES = 1 << 20
_NONE, _FORK, _EXEC, _COMM, _COREDUMP, _EXIT = 0, 0x1, 0x2, 0x200, 0x40000000, 0x80000000
_EVENT_OFFSET = 16 + 20  # struct nlmsghdr, struct cn_msg
_DATA_OFFSET = _EVENT_OFFSET + 16  # what, cpu, timestamp_ns
_EVENT = struct.Struct("=I4xQIIII").unpack_from  # what, timestamp_ns, and the first four numbers of any event
_MESSAGE_BYTES = 128  # 76 are used
_BATCH_MESSAGES = 256
_BATCH_NS = 2_000_000
_NAMES_AT_ONCE, _NAMES_KEPT = 256, 4096
_READS_AT_ONCE = 16
_SPARE_PER_S = 100.0  # of each slot: reads of proc, ordinary ends told
_RATE_WINDOW_NS = 2_000_000_000
_STORM_FORKS_PER_S = 1500
_FLOOD_FORKS = 100  # more than half of all, and more than these
CRASH_SIGNALS = frozenset({4, 5, 6, 7, 8, 11, 31})  # ILL TRAP ABRT BUS FPE SEGV SYS

# Classic BPF, struct sock_filter: code, jump if true, jump if false, operand.
_Instruction = tuple[int, int, int, int]
_LD_ABS, _JEQ, _JEQ_X, _TAX, _RET = 0x20, 0x15, 0x1D, 0x07, 0x06
_ACCEPT: _Instruction = (_RET, 0, 0, 0xFFFFFFFF)
_DROP: _Instruction = (_RET, 0, 0, 0)


def _loaded(number: int) -> int:
    """A number of a message as the filter loads it: big-endian, while the message is in the host's order."""
    return int.from_bytes(number.to_bytes(4, sys.byteorder), "big")


_WHAT: _Instruction = (_LD_ABS, 0, 0, _EVENT_OFFSET)
_LIVES = (_NONE, _FORK, _EXEC, _COREDUMP, _EXIT)
_LIFE_FILTER: Sequence[_Instruction] = (
    _WHAT,
    *((_JEQ, len(_LIVES) - i, 0, _loaded(what)) for i, what in enumerate(_LIVES)),
    _DROP,
    _ACCEPT,
)
# A first thread's own name is the process's; the other threads' are not wanted.
_NAME_FILTER: Sequence[_Instruction] = (
    _WHAT,
    (_JEQ, 5, 0, _loaded(_NONE)),
    (_JEQ, 0, 5, _loaded(_COMM)),
    (_LD_ABS, 0, 0, _DATA_OFFSET),
    (_TAX, 0, 0, 0),
    (_LD_ABS, 0, 0, _DATA_OFFSET + 4),
    (_JEQ_X, 0, 1, 0),
    _ACCEPT,
    _DROP,
)


@attrs.define
class _Known:
    slot: str
    inner_pid: int
    command: str  # or, of one in `_unread`, what it was before it executed something
    core_dumped: bool = False
    threads: set[int] = attrs.field(factory=set)  # alive, the first one left out
    leader_code: int | None = None  # of the first thread, once it has ended
    since: int = 0  # when `command` was right; a name that it gave itself later holds


@attrs.define
class _Share:
    """What one slot uses of the watcher."""

    forks: int = 0  # since the rates were last looked at
    forks_before: int = 0  # in the time before that
    rate: float = 0.0  # forks a second, as of then
    spare: float = _SPARE_PER_S
    refilled_at: int = 0
    storms: bool = False

    def may_spare(self) -> bool:
        """Whether something that costs more than a message can be done for it now."""
        now = time.monotonic_ns()
        self.spare = min(_SPARE_PER_S, self.spare + (now - self.refilled_at) * 1e-9 * _SPARE_PER_S)
        self.refilled_at = now
        if self.spare < 1:
            return False
        self.spare -= 1
        return True


@attrs.define(eq=False)
class ProcessWatcher:
    """Follows the processes of all desktops of this host.

    Args:
        on_event: called with (slot, event) from `run` and `drain`; must not block. Every crash is told; of ordinary
            ends, a hundred a second of each slot.
        acted: whether the agent has acted in the slot's episode.
        on_kill: called with a slot after SIGKILL deaths there, so that the OOM counter is read again.
    """

    on_event: Callable[[str, DesktopEvent], None]
    acted: Callable[[str], bool]
    on_kill: Callable[[str], None]
    _known: dict[int, _Known] = attrs.field(factory=dict)
    _socket: socket.socket | None = None
    _names_socket: socket.socket | None = None
    _names: dict[int, tuple[int, str]] = attrs.field(factory=dict)  # when, and how, a process named itself
    _unread: dict[int, None] = attrs.field(factory=dict)  # processes whose name is to be read
    _killed: set[str] = attrs.field(factory=set)
    _shares: dict[str, _Share] = attrs.field(factory=dict)
    _rates_at: int = 0
    _forks: int = 0  # of all processes on the host, since the rates were last looked at
    _forks_before: int = 0  # in the time before that

    def open(self) -> None:
        """Subscribe; returns once the kernel has acknowledged.

        Raises:
            PrerequisiteError: the kernel has no process connector, or the caller may not use it.
        """
        self._socket = _subscribe(_LIFE_FILTER, _BUFFER_BYTES)
        try:
            self._names_socket = _subscribe(_NAME_FILTER, _NAMES_BUFFER_BYTES)
        except PrerequisiteError:
            self.close()
            raise

    def close(self) -> None:
        """Unsubscribe."""
        for s in (self._socket, self._names_socket):
            if s is not None:
                s.close()
        self._socket = self._names_socket = None

    def track(self, slot: str, processes: Iterable[ProcessIdentity]) -> None:
        """Follow these processes and whatever they fork. Call while they cannot fork, or drain afterwards."""
        now = time.monotonic_ns()
        for process in processes:
            threads = _other_threads(process.host_pid)
            self._known[process.host_pid] = _Known(slot, process.inner_pid, process.command, threads=threads, since=now)

    def untrack(self, slot: str) -> None:
        """Forget a slot's processes: its end is wanted."""
        for pid in [p for p, known in self._known.items() if known.slot == slot]:
            del self._known[pid]
        self._shares.pop(slot, None)

    async def run(self) -> None:
        """Read events until cancelled; other tasks have their turn after each batch."""
        assert self._socket is not None, "open() comes first"
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            self._read_queue(time.monotonic_ns() + _BATCH_NS, _BATCH_MESSAGES)

    def drain(self) -> None:
        """Handle everything that the kernel has queued so far; what is queued meanwhile does not prolong it."""
        # An event that happened after the call was queued after it, and behind all that was queued before.
        self._read_queue(time.monotonic_ns(), None)

    def _read_queue(self, until: int, limit: int | None) -> None:
        """Handle events up to the first that is later than `until`, or `limit` of them."""
        self._read_names()
        handled = 0
        while self._socket is not None and handled != limit:
            try:
                data = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise
                self._lost()
                continue
            handled += 1
            if self._handle(data) > until:
                break
        self._read_unread()
        while self._killed:
            self.on_kill(self._killed.pop())
        self._look_at_rates()

    def _lost(self) -> None:
        """Tell every slot: the kernel does not say whose messages it dropped."""
        slots = {known.slot for known in self._known.values()}
        forks = {slot: share.forks + share.forks_before for slot, share in self._shares.items()}
        all_forks = self._forks + self._forks_before
        most = max(forks, key=lambda slot: forks[slot], default="")
        whose = f"; {forks[most]} of the last {all_forks} forks on the host are desktop {most}'s" if most else ""
        _log.warning("process notifications dropped", slots=sorted(slots), forks=forks, of=all_forks)
        reason = f"the kernel dropped process notifications: deaths may have gone unseen{whose}"
        for slot in slots:
            # An agent must not buy an episode that does not count: the flood that it makes is its own.
            flooded = forks.get(slot, 0) >= _FLOOD_FORKS and forks[slot] * 2 > all_forks
            self.on_event(slot, WatchLost(reason, by_agent=flooded and self.acted(slot)))

    def _handle(self, data: bytes) -> int:
        what, at, one, two, three, four = _EVENT(data, _EVENT_OFFSET)
        if what == _FORK:  # parent's thread and process, child's thread and process
            self._forks += 1
            if three != four:
                if known := self._known.get(four):
                    known.threads.add(three)
                    self._share(known.slot).forks += 1
            elif known := self._known.get(two):
                self._fork(at, two, three, known)
            elif (known := self._known.get(three)) and known.leader_code is not None:
                del self._known[three]  # a stranger with the pid of a process that is gone
        elif what == _EXIT:  # thread, process, code
            if known := self._known.get(two):
                self._exit(one, two, three, known)
        elif what == _EXEC:
            if known := self._known.get(two):
                # Whichever thread executed it is the first now, and the only one (execve(2)).
                known.threads, known.leader_code = set(), None
                if at > known.since:
                    known.since = at
                    self._unread[two] = None
        elif what == _COREDUMP and (known := self._known.get(two)):
            known.core_dumped = True
            self._read(two, known)
        return int(at)

    def _fork(self, at: int, parent: int, child: int, known: _Known) -> None:
        self._share(known.slot).forks += 1
        self._known[child] = _Known(known.slot, 0, self._name(parent, known, at), since=at)
        if parent in self._unread:
            self._unread[child] = None

    def _exit(self, thread: int, group: int, code: int, known: _Known) -> None:
        signal = code & 0x7F
        known.threads.discard(thread)
        if thread == group:
            known.leader_code = code
        # A crashing thread takes its group along; otherwise the process lives while any of its threads does.
        if signal not in CRASH_SIGNALS and (known.leader_code is None or known.threads):
            return
        code = code or known.leader_code or 0
        signal = code & 0x7F
        del self._known[group]
        if signal == 9:
            self._killed.add(known.slot)
        if signal not in CRASH_SIGNALS and not self._share(known.slot).may_spare():
            return
        self._read(group, known)
        event = ProcessDied(
            host_pid=group,
            inner_pid=known.inner_pid,
            command=self._name(group, known),
            signal=signal,
            exit_code=0 if signal else (code >> 8) & 0xFF,
            core_dumped=known.core_dumped or bool(code & 0x80),
            after_action=self.acted(known.slot),
        )
        self.on_event(known.slot, event)

    def _share(self, slot: str) -> _Share:
        share = self._shares.get(slot)
        if share is None:
            share = self._shares[slot] = _Share(refilled_at=time.monotonic_ns())
        return share

    def _look_at_rates(self) -> None:
        now = time.monotonic_ns()
        if now - self._rates_at < _RATE_WINDOW_NS:
            return
        seconds, self._rates_at = (now - self._rates_at) * 1e-9, now
        self._forks_before, self._forks = self._forks, 0
        for slot, share in self._shares.items():
            share.rate, share.forks_before, share.forks = share.forks / seconds, share.forks, 0
            if share.rate > _STORM_FORKS_PER_S and not share.storms:
                share.storms = True
                _log.warning("a desktop forks without end", slot=slot, forks_per_s=round(share.rate))

    # --- names

    def _name(self, pid: int, known: _Known, until: int | None = None) -> str:
        """The name of a process, until then: as it was read, or as it named itself later."""
        named = self._names.get(pid)
        if named is not None and named[0] >= known.since and (until is None or named[0] <= until):
            return named[1]
        return known.command

    def _read_names(self) -> None:
        """Take in what processes named themselves. When that overflows, names are missing and nothing else."""
        for _ in range(_NAMES_AT_ONCE):
            if self._names_socket is None:
                return
            try:
                data = self._names_socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise
                continue
            what, at, _, pid, _, _ = _EVENT(data, _EVENT_OFFSET)
            name = data[_DATA_OFFSET + 8 : _DATA_OFFSET + 24].split(b"\0")[0].decode(errors="replace").strip()
            self._names.pop(pid, None)
            if what == _COMM and name:
                self._names[pid] = at, name
                if len(self._names) > _NAMES_KEPT:
                    del self._names[next(iter(self._names))]

    def _read_unread(self) -> None:
        """Read the names of those that have executed something and still run; most of a storm have ended by now."""
        for pid in list(self._unread):
            if pid not in self._known:
                del self._unread[pid]
        for pid in list(self._unread)[:_READS_AT_ONCE]:
            del self._unread[pid]
            known = self._known[pid]
            if self._share(known.slot).may_spare():
                self._read(pid, known)
            else:
                self._unread[pid] = None  # later, after the others

    @staticmethod
    def _read(pid: int, known: _Known) -> None:
        """Refresh name and inner pid while the process can still be read (a zombie can)."""
        try:
            at = time.monotonic_ns()
            if command := _read_file(f"/proc/{pid}/comm").decode(errors="replace").strip():
                known.command, known.since = command, at
            _, found, rest = _read_file(f"/proc/{pid}/status").partition(b"\nNSpid:")
            if found:
                known.inner_pid = int(rest.partition(b"\n")[0].split()[-1])
        except (FileNotFoundError, ProcessLookupError):
            return


def _read_file(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 13)
    finally:
        os.close(fd)


def _subscribe(program: Sequence[_Instruction], buffer_bytes: int) -> socket.socket:
    """A socket that the kernel queues the events on which the program accepts."""
    try:
        s = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_CONNECTOR)
    except OSError as e:
        raise PrerequisiteError(
            f"the kernel's process connector cannot be opened: {e}",
            hint="a kernel with CONFIG_PROC_EVENTS=y, and the host's own network and pid namespaces, are needed",
        ) from e
    try:
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *x) for x in program))
        s.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))
        s.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer_bytes)
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
    return s


def _other_threads(pid: int) -> set[int]:
    try:
        return {int(x) for x in os.listdir(f"/proc/{pid}/task")} - {pid}
    except FileNotFoundError:
        return set()
