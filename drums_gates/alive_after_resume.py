"""Gate `alive_after_resume`: every restored process is still running 5 s after the desktop answered."""

from __future__ import annotations

from collections import Counter
from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence.processes import is_running, processes_in_pidns, read_processes
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, ProcessIdentity, failed, passed
from drums_gates._report import bounded, no_evidence, some


def _record(view: DesktopView) -> Json:
    processes = read_processes(processes_in_pidns(view.namespaces["pid"]))
    return [[x.inner_pid, x.command, list(x.argv)] for x in processes]


def _name(inner_pid: int, command: str) -> str:
    return f"{command!r} (pid {inner_pid})"


def _ended(restored: tuple[ProcessIdentity, ...]) -> list[str]:
    return [_name(x.inner_pid, x.command) for x in restored if not is_running(x.host_pid, x.start_ticks)]


@final
class AliveAfterResumeGate:
    """The processes of the checkpoint: each was restored, and each one that was restored still runs.

    A process that ends by itself in those seconds cannot be told apart from a broken restore.
    """

    phase = Phase.SETTLED
    records = True

    async def record(self, view: DesktopView) -> Json:
        """Pid inside, command and command line of each live process."""
        return await trio.to_thread.run_sync(_record, view)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether none is missing, and each runs: same pid, same start time, no zombie."""
        if not isinstance(evidence, list) or not evidence:
            return no_evidence("the processes", evidence)
        recorded = Counter((x[0], x[1]) for x in evidence)
        restored = Counter((x.inner_pid, x.command) for x in view.restored)
        missing = [_name(*x) for x in sorted((recorded - restored).elements())]
        if missing:
            return failed(
                f"{len(missing)} of {len(evidence)} processes were not restored: {some(missing)}",
                observed=bounded([_name(*x) for x in sorted(restored)]),
                expected=bounded(missing),
            )
        ended = await trio.to_thread.run_sync(_ended, view.restored)
        if ended:
            return failed(
                f"{len(ended)} of {len(view.restored)} restored processes no longer run: {some(ended)}",
                observed=bounded(ended),
                expected="all of them run",
            )
        return passed()


@hookimpl
def drums_register_gates(register: RegisterGate) -> None:
    """Register this gate."""
    register("alive_after_resume", AliveAfterResumeGate)
