"""Gate `no_app_crash`: added as failed when a process of the desktop died of a crash signal.

Cause: the agent's once it has acted in the episode (a crash can be provoked, and must not buy an invalid episode
unseen), else the infrastructure's; of a gap in the watching, the agent's where the desktop's own forks made it. Signals
that end a program in the ordinary way (SIGTERM, SIGKILL, SIGHUP, SIGINT, SIGPIPE, ...) are no crashes; the kernel's
SIGKILL for want of memory is `no_oom_kill`'s.
"""

from __future__ import annotations

import signal
from typing import final

from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Cause, DesktopEvent, Finding, Phase, ProcessDied, WatchLost, failed

CRASH_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)


@final
class NoAppCrashGate:
    """Judges deaths, and gaps in watching them."""

    phase = Phase.EVENT

    def judge(self, event: DesktopEvent) -> Finding | None:
        """A failed finding for a crash, with pid, command and signal, and for a gap."""
        if isinstance(event, ProcessDied) and event.signal in CRASH_SIGNALS:
            name = signal.Signals(event.signal).name
            inside = f"pid {event.inner_pid}" if event.inner_pid else f"host pid {event.host_pid}, pid inside unknown"
            return failed(
                f"process {event.command or 'of unknown name'!r} ({inside}) died of {name}",
                observed={
                    "pid": event.inner_pid,
                    "host_pid": event.host_pid,
                    "command": event.command,
                    "signal": name,
                    "core_dumped": event.core_dumped,
                },
                expected="no process dies of a crash signal",
                cause=Cause.AGENT if event.after_action else Cause.INFRASTRUCTURE,
            )
        if isinstance(event, WatchLost):
            return failed(
                f"a crash may have gone unseen: {event.reason}",
                observed=event.reason,
                cause=Cause.AGENT if event.by_agent else Cause.INFRASTRUCTURE,
            )
        return None


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("no_app_crash", NoAppCrashGate)
