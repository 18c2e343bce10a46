"""Scoring: wait for the verdict, run the checker, and put the reward together."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from drums.errors import CheckerError, DrumsError, VerifierNotFound
from drums_core.abc import CheckContext, Checker
from drums_core.blame import blame
from drums_core.copies import Copy, open_copy
from drums_core.guest_gateway import serve_guest
from drums_core.leftovers import temporary_cgroup
from drums_core.model import Cause, Json, Limits, Phase, Reward, SetupStep, Task
from drums_core.setup import run_steps

if TYPE_CHECKING:
    from drums_core.model import PluginId
    from drums_core.slot import Slot

_log = structlog.get_logger("drums.verify")
WORKER_LIMITS = Limits(cpus=2.0, memory_bytes=4 << 30, swap_bytes=0, pids=256)


@attrs.frozen
class Failure:
    """Why there is no score.

    Args:
        message: in words.
        cause: who brought it about, None where nothing shows it.
        evidence: what shows it.
    """

    message: str
    cause: Cause | None = None
    evidence: list[str] = attrs.field(factory=list)


def checker_for(checkers: Mapping[str, tuple[Checker, PluginId]], task: Task) -> tuple[str, Checker, PluginId]:
    """The one checker that claims a task's evaluator.

    Raises:
        VerifierNotFound: none does, or several do.
    """
    claims = [(name, c, p) for name, (c, p) in checkers.items() if c.claims(task.evaluator)]
    if len(claims) != 1:
        func = task.evaluator.get("func")
        who = f"{' and '.join(n for n, _, _ in claims)} both claim" if claims else "no installed checker claims"
        raise VerifierNotFound(f"task {task.id!r}: {who} its evaluator {func!r}", task=task.id, func=func)
    return claims[0]


async def grade(slot: Slot, *, in_place: bool) -> Reward:
    """The reward of a slot's current episode.

    A checker that fails gives a reward with `checker_error` and no score. Deaths up to the last moment count.

    Args:
        slot: its desktop is copied and the copy graded, or with `in_place` it is graded itself.
    """
    host, task = slot.host, slot.task
    assert task is not None
    episode = slot.episode
    await episode.wait_judged()
    desktop = slot.desktop
    assert desktop is not None
    evidence = await trio.to_thread.run_sync(desktop.evidence)
    episode.add(await host.services.gates.check(Phase.VERIFY, desktop.view(), evidence))
    score: float | None = None
    error: Failure | None = None
    _, checker, _ = checker_for(host.checkers, task)
    facts: dict[str, Json] = {"graded": {"in_place": in_place}}
    findings: dict[str, Json] = {}
    try:
        if in_place:
            score = await _score(slot, slot, task, checker, findings)
        else:
            score = await _score_copy(slot, task, checker, findings, facts)
    except CheckerError as e:
        error = Failure(str(e), e.facts.get("cause"), list(e.facts.get("evidence", ())))
    except DrumsError as e:
        error = Failure(f"{type(e).__name__}: {e.message}")
    except Exception as e:  # noqa: BLE001 - a checker that raises gives no score, and says why
        _log.exception("checker raised", task=task.id)
        error = Failure(f"{type(e).__name__}: {e}")
    if error is not None:
        cause, seen = await trio.to_thread.run_sync(lambda: blame(desktop, acted=slot.has_acted))
        if cause is not None and error.cause in (None, Cause.INFRASTRUCTURE):
            error = attrs.evolve(error, cause=cause)
        if error.cause == Cause.AGENT and not slot.has_acted:  # nobody there to blame
            error = attrs.evolve(error, cause=Cause.INFRASTRUCTURE)
        facts["checker_error_evidence"] = [*error.evidence, *seen]
    host.services.watcher.drain()
    slot.check_oom()
    if findings:
        facts["findings"] = findings
    return host.make_reward(slot, score=score, failure=error, provenance=facts)


async def _score_copy(
    slot: Slot, task: Task, checker: Checker, findings: dict[str, Json], facts: dict[str, Json]
) -> float:
    async with open_copy(slot) as copy:
        graded: dict[str, Json] = {"in_place": False, "checkpoint": copy.checkpoint.id, "thawed": copy.thawed}
        facts["graded"] = graded
        try:
            return await _score(slot, copy, task, checker, findings)
        finally:
            graded["notes"] = copy.episode.notes


async def _score(slot: Slot, place: Slot | Copy, task: Task, checker: Checker, findings: dict[str, Json]) -> float:
    failures: list[str] = []
    hostile: list[str] = []
    faults: list[CheckerError] = []
    scratch = Path(tempfile.mkdtemp(prefix="drums-check-"))
    cache = scratch / "cache"
    cache.mkdir()
    for name, text in slot.episode.outputs.items():
        (cache / name).write_text(text, encoding="utf-8")

    async def serve(fd: int) -> None:
        if not isinstance(place, Copy):
            await serve_guest(place.guest.request, fd, failures, hostile)
            return
        try:
            async with place.frozen():
                await serve_guest(place.request, fd, failures, hostile)
        except CheckerError as e:  # the worker's end would hide it
            faults.append(e)
            raise

    async def steps(documents: Sequence[SetupStep]) -> None:
        await run_steps(place, documents, cache=cache)
        if isinstance(place, Copy):
            place.require_sound("broke while its postconfig ran")

    limit_s = place.host.services.config.checker_timeout_s
    try:
        async with temporary_cgroup(WORKER_LIMITS) as cgroup:
            context = CheckContext(
                task=copy.deepcopy(task),
                last_action=slot.episode.last_action,
                serve_guest=serve,
                transport_failures=failures,
                run_steps=steps,
                scratch=scratch,
                worker_cgroups=tuple(cgroup.paths),
                pinned=slot.episode.pinned,
                findings=findings,
            )
            with trio.move_on_after(limit_s) as scope:
                score = await checker.check(context)
            if scope.cancelled_caught:
                raise CheckerError(f"the checker did not end within {limit_s:g} s")
    except CheckerError as e:
        if isinstance(place, Copy) and place.fault is not None:
            faults.insert(0, place.fault)
        if faults and e is not faults[0]:
            raise faults[0] from e
        if hostile:
            e.facts.update(cause=Cause.AGENT, evidence=hostile)
        raise
    finally:
        shutil.rmtree(scratch)
    if isinstance(place, Copy):
        place.require_sound("broke while it was looked at")
    if failures:
        raise CheckerError(f"the desktop could not be asked: {failures[0]}")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise CheckerError(f"the checker returned {score!r}, expected a finite number")
    return float(score)
