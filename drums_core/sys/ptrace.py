"""System calls made in the place of a held process, by ptrace; x86-64 only.

A `Tracee` is one thread of a process that must not run an instruction of its own while it is looked after: the
process waits in CRIU's restorer (or sleeps, or runs: all were tried). It is seized, made to issue system calls
from its own context, and put back exactly as it was found: registers, scratch memory, signal mask.

Every call about one tracee must come from the thread that seized it (ptrace(2)), and nothing in this process
may call `waitpid(-1)`, which would steal the stops.

Sources: ptrace(2), Linux `kernel/ptrace.c`, `kernel/signal.c` (why an injection ends in PTRACE_EVENT_STOP), the
x86-64 `struct user_regs_struct`. The trials behind it are described in `docs/adr` under file locks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONT, _GETREGS, _SETREGS, _DETACH, _SYSCALL = 7, 12, 13, 17, 24
_SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 0x420A, 0x420B
_O_TRACESYSGOOD, _O_EXITKILL, _O_SUSPEND_SECCOMP = 1, 1 << 20, 1 << 21
_EVENT_STOP = 128
_WALL = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80  # what PTRACE_O_TRACESYSGOOD makes of it
# fmt: off
_REGISTERS = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi", "orig_rax",
    "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
)
# fmt: on
_AT = {name: index for index, name in enumerate(_REGISTERS)}
_LAYOUT = f"{len(_REGISTERS)}Q"
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
_ALL_ONES = (1 << 64) - 1
_RED_ZONE = 128  # bytes below rsp that belong to the running function (System V ABI)

SCRATCH_BYTES = 32

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class TraceeGone(ProcessLookupError):
    """The process ended while it was traced."""


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of {tid}: {os.strerror(number)}")


class Tracee:
    """One seized thread; made by `traced`, which also puts it back and lets it go."""

    def __init__(self, tid: int, timeout_s: float) -> None:
        self.tid = tid
        self._timeout_s = timeout_s
        self._registers: list[int] | None = None
        self._mask = b""
        self._memory = -1
        self._instruction = 0
        self._scratch: tuple[int, bytes] | None = None
        self._candidates: list[int] = []
        options = _O_TRACESYSGOOD | _O_EXITKILL | _O_SUSPEND_SECCOMP
        try:
            _ptrace(_SEIZE, tid, 0, options)
        except OSError as e:
            # A kernel without CONFIG_CHECKPOINT_RESTORE does not know SUSPEND_SECCOMP, and without CAP_SYS_ADMIN or
            # under a filter of our own it is refused. Whether the target may be traced shows in the second try.
            if e.errno not in (errno.EINVAL, errno.EPERM):
                raise
            _ptrace(_SEIZE, tid, 0, options & ~_O_SUSPEND_SECCOMP)

    def begin(self) -> None:
        """Stop the thread, keep what has to be put back, block its signals, find an instruction and scratch memory."""
        _ptrace(_INTERRUPT, self.tid)
        self._wait_event_stop()
        mask = self._get_mask()
        self._registers, self._mask = self._get_registers(), mask
        self._set_mask(b"\xff" * 8)
        self._memory = os.open(f"/proc/{self.tid}/mem", os.O_RDWR | os.O_CLOEXEC)
        self._instruction = self._find_syscall_instruction()
        stack = self._registers[_AT["rsp"]]
        self._candidates = [(stack - _RED_ZONE - 2 * SCRATCH_BYTES) & ~15, (stack + 15) & ~15]
        self.next_scratch()

    def next_scratch(self) -> None:
        """Take scratch memory below the red zone, or the next place when the system call said EFAULT.

        `/proc/PID/mem` writes to pages that the system call cannot read, so a place shows its worth only in use.
        """
        self._restore_scratch()
        while self._candidates:
            address = self._candidates.pop(0)
            with suppress(OSError):
                old = os.pread(self._memory, SCRATCH_BYTES, address)
                if len(old) == SCRATCH_BYTES and os.pwrite(self._memory, old, address) == SCRATCH_BYTES:
                    self._scratch = (address, old)
                    return
        raise OSError(errno.EFAULT, f"no scratch memory in process {self.tid}")

    def write_scratch(self, data: bytes) -> int:
        """Put up to `SCRATCH_BYTES` into the thread's memory and return their address there."""
        if self._scratch is None or len(data) > SCRATCH_BYTES:
            raise ValueError(f"{len(data)} bytes do not fit the scratch memory of {self.tid}")
        if os.pwrite(self._memory, data, self._scratch[0]) != len(data):
            raise OSError(errno.EIO, f"scratch memory of {self.tid} could not be written")
        return self._scratch[0]

    def call(self, number: int, *arguments: int) -> int:
        """The result of this system call in the thread, a negated errno when it failed."""
        assert self._registers is not None, "begin() comes first"
        registers = list(self._registers)
        registers[_AT["rax"]] = number
        # Not inside a system call: the kernel must not rewind an interrupted one over our registers.
        registers[_AT["orig_rax"]] = _ALL_ONES
        registers[_AT["rip"]] = self._instruction
        for name, value in zip(_ARGUMENTS, arguments, strict=False):
            registers[_AT[name]] = value & _ALL_ONES
        self._set_registers(registers)
        for _ in ("enter", "exit"):
            _ptrace(_SYSCALL, self.tid)
            while True:
                stop, event = self._wait()
                if stop == _SYSCALL_STOP and not event:
                    break
                if not event:  # every signal is blocked, so this one was forced: the thread is not where we put it
                    raise OSError(errno.EIO, f"process {self.tid} got signal {stop} in an injected system call")
                _ptrace(_SYSCALL, self.tid)
        result = self._get_registers()[_AT["rax"]]
        return result - (1 << 64) if result >> 63 else result

    def undo(self) -> None:
        """Put memory, registers and mask back, in an EVENT_STOP.

        There, inside the kernel's `get_signal`, the handling of an interrupted system call is still to come; at a
        syscall-exit stop it would be skipped and the thread would see -ERESTART as a result. The trap is pending
        when the thread is let run, so no instruction of its own is executed on the way.
        """
        if self._registers is None:
            return
        registers, self._registers = self._registers, None
        try:
            _ptrace(_INTERRUPT, self.tid)
            with suppress(ProcessLookupError):  # still running: an injected call did not come back in time
                _ptrace(_CONT, self.tid)
            self._wait_event_stop()
            self._restore_scratch()
            self._set_registers(registers)
            self._set_mask(self._mask)
        finally:
            if self._memory >= 0:
                os.close(self._memory)
                self._memory = -1

    def detach(self) -> None:
        """Let the thread go on without a tracer."""
        _ptrace(_DETACH, self.tid)

    def _wait(self) -> tuple[int, int]:
        deadline = time.monotonic() + self._timeout_s
        polls = 0
        while True:
            pid, status = os.waitpid(self.tid, _WALL | os.WNOHANG)
            if pid:
                break
            polls += 1
            if polls > 50:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"process {self.tid} did not stop within {self._timeout_s} s")
                time.sleep(0.0001)
        if not os.WIFSTOPPED(status):
            raise TraceeGone(errno.ESRCH, f"process {self.tid} ended under trace, status {status:#x}")
        return (status >> 8) & 0xFF, status >> 16

    def _wait_event_stop(self) -> None:
        while True:
            stop, event = self._wait()
            if event == _EVENT_STOP:
                return
            # On the way: a signal that was being delivered (passed on, nothing is lost) or a syscall stop.
            _ptrace(_CONT, self.tid, 0, 0 if event or stop == _SYSCALL_STOP else stop)

    def _restore_scratch(self) -> None:
        if self._scratch is not None:
            os.pwrite(self._memory, self._scratch[1], self._scratch[0])
            self._scratch = None

    def _get_registers(self) -> list[int]:
        buffer = ctypes.create_string_buffer(struct.calcsize(_LAYOUT))
        _ptrace(_GETREGS, self.tid, 0, ctypes.addressof(buffer))
        return list(struct.unpack(_LAYOUT, buffer.raw))

    def _set_registers(self, values: list[int]) -> None:
        data = struct.pack(_LAYOUT, *values)
        buffer = ctypes.create_string_buffer(data, len(data))
        _ptrace(_SETREGS, self.tid, 0, ctypes.addressof(buffer))

    def _get_mask(self) -> bytes:
        buffer = ctypes.create_string_buffer(8)
        _ptrace(_GETSIGMASK, self.tid, 8, ctypes.addressof(buffer))
        return buffer.raw

    def _set_mask(self, mask: bytes) -> None:
        buffer = ctypes.create_string_buffer(mask, 8)
        _ptrace(_SETSIGMASK, self.tid, 8, ctypes.addressof(buffer))

    def _find_syscall_instruction(self) -> int:
        """Address of a `syscall` instruction: in the vdso, else in any executable mapping."""
        ranges: list[tuple[bool, int, int]] = []
        with open(f"/proc/{self.tid}/maps", "rb") as f:
            for line in f:
                bounds, permissions = line.split()[:2]
                if b"x" in permissions and b"[vsyscall]" not in line:
                    start, end = (int(x, 16) for x in bounds.split(b"-"))
                    ranges.append((b"[vdso]" not in line, start, end))
        for _, start, end in sorted(ranges):
            while start < end:
                try:
                    data = os.pread(self._memory, min(end - start, 1 << 16), start)
                except OSError:
                    break
                found = data.find(b"\x0f\x05")
                if found >= 0:
                    return start + found
                if len(data) < 2:
                    break
                start += len(data) - 1  # the instruction may lie across two reads
        raise OSError(errno.ENOEXEC, f"no syscall instruction in process {self.tid}")


@contextmanager
def traced(tid: int, *, timeout_s: float = 5.0) -> Iterator[Tracee]:
    """Seize a thread for the block, ready for `call`; put it back and detach at the end, whatever happens.

    Args:
        tid: host thread id.
        timeout_s: seconds that one stop may take.

    Raises:
        PermissionError: it is traced by somebody else (CRIU traces the root task that it has made with
            `rst_sibling`), or it is not ours to trace.
        TraceeGone: it ended.
        TimeoutError: it does not stop (a frozen cgroup, uninterruptible sleep). Unless the detach still
            worked, the kernel kills it when the calling thread ends (PTRACE_O_EXITKILL).
    """
    tracee = Tracee(tid, timeout_s)
    try:
        tracee.begin()
        yield tracee
    finally:
        try:
            tracee.undo()
        finally:
            with suppress(ProcessLookupError):  # gone, or not stopped: the error above says so
                tracee.detach()
