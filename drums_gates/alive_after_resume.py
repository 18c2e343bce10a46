"""Gate `alive_after_resume`: every restored process is still running 5 s after the desktop answered.

A process that waits for what will never come lives, but does not run: what each is woken by has to be restored as well.
"""

from __future__ import annotations

from collections import Counter
from typing import final

import trio

from drums_core.abc import DesktopView
from drums_core.evidence import event_sources, multisets
from drums_core.evidence.processes import is_running, processes_in_pidns, read_processes
from drums_core.hookspecs import RegisterGate, hookimpl
from drums_core.model import Finding, Json, Phase, ProcessIdentity, failed, passed
from drums_gates._report import bounded, no_evidence, some


def _record(view: DesktopView) -> Json:
    processes = read_processes(processes_in_pidns(view.namespaces["pid"]))
    sources = event_sources.read_event_sources([x.host_pid for x in processes], view.pid1)
    return {"processes": [[x.inner_pid, x.command, list(x.argv)] for x in processes], "event_sources": sources}


def _name(inner_pid: int, command: str) -> str:
    return f"{command!r} (pid {inner_pid})"


def _ended(restored: tuple[ProcessIdentity, ...]) -> list[str]:
    return [_name(x.inner_pid, x.command) for x in restored if not is_running(x.host_pid, x.start_ticks)]


def _parts(evidence: Json) -> tuple[list[Json], list[Json] | None]:
    if not isinstance(evidence, dict):
        return [], None
    processes, sources = evidence.get("processes"), evidence.get("event_sources")
    return (processes if isinstance(processes, list) else []), (sources if isinstance(sources, list) else None)


@final
class AliveAfterResumeGate:
    """The processes of the checkpoint: each was restored with what wakes it, and each that was restored still runs.

    A process that ends by itself in those seconds cannot be told apart from a broken restore.
    """

    phase = Phase.SETTLED
    records = True

    async def record(self, view: DesktopView) -> Json:
        """Pid inside, command and command line of each live process, and what wakes them."""
        return await trio.to_thread.run_sync(_record, view)

    async def check(self, view: DesktopView, evidence: Json) -> Finding:
        """Whether nothing is missing, and each process runs: same pid, same start time, no zombie."""
        processes, sources = _parts(evidence)
        if not processes or sources is None:
            return no_evidence("the processes", evidence)
        recorded = Counter((x[0], x[1]) for x in processes)
        restored = Counter((x.inner_pid, x.command) for x in view.restored)
        missing = [_name(*x) for x in sorted((recorded - restored).elements())]
        if missing:
            return failed(
                f"{len(missing)} of {len(processes)} processes were not restored: {some(missing)}",
                observed=bounded([_name(*x) for x in sorted(restored)]),
                expected=bounded(missing),
            )
        lost, extra = multisets.difference(sources, view.event_sources, event_sources.describe)
        if lost:
            return failed(
                f"{len(lost)} timers or connections of the checkpoint were not restored: {some(lost)}",
                observed=bounded(extra),
                expected=bounded(lost),
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
