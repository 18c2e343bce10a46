"""Scoring: wait for the verdict, run the checker, and put the reward together."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from drums.errors import CheckerError, DrumsError, VerifierNotFound
from drums_core import end_states
from drums_core.abc import CheckContext, Checker, Pinned
from drums_core.blame import blame
from drums_core.copies import Copy, open_copy, open_kept
from drums_core.end_states import EndState
from drums_core.guest_gateway import serve_guest
from drums_core.leftovers import temporary_cgroup
from drums_core.model import Cause, Json, Limits, Phase, Reward, SetupStep, Task
from drums_core.setup import run_steps

if TYPE_CHECKING:
    from drums_core.checkpoint import Checkpoint
    from drums_core.host import Host
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


async def grade(slot: Slot, *, in_place: bool, keep: bool) -> Reward:
    """The reward of a slot's current episode.

    A checker that fails gives a reward with `checker_error` and no score. Deaths up to the last moment count.

    Args:
        slot: its desktop is copied and the copy graded, or with `in_place` it is graded itself.
        keep: keep the copy's checkpoint as the episode's end state.
    """
    host, task = slot.host, slot.task
    assert task is not None
    episode = slot.episode
    await episode.wait_judged()
    desktop = slot.desktop
    assert desktop is not None
    evidence = await trio.to_thread.run_sync(desktop.evidence)
    episode.add(await host.services.gates.check(Phase.VERIFY, desktop.view(), evidence))
    facts: dict[str, Json] = {"graded": {"in_place": in_place}}
    check = _Check(task, EndState.of(slot), episode.pinned)

    async def on_copy() -> float:
        try:
            async with open_copy(slot, keep=keep) as copy:
                return await check.of_copy(copy, facts, kept=keep)
        finally:
            if keep:
                await end_states.sweep(host.services.store, host.config)

    score, error = await _attempt(task, (lambda: check.score(slot)) if in_place else on_copy)
    if error is not None:
        cause, seen = await trio.to_thread.run_sync(lambda: blame(desktop, acted=slot.has_acted))
        if cause is not None and error.cause in (None, Cause.INFRASTRUCTURE):
            error = attrs.evolve(error, cause=cause)
        error = _without_blame(error, acted=slot.has_acted)
        facts["checker_error_evidence"] = [*error.evidence, *seen]
    host.services.watcher.drain()
    slot.check_oom()
    if check.findings:
        facts["findings"] = check.findings
    return host.make_reward(slot, score=score, failure=error, provenance=facts)


async def regrade(
    host: Host, checkpoint: Checkpoint, state: EndState, task: Task, pinned: Pinned | None
) -> tuple[float | None, Failure | None, list[Json]]:
    """Grade an end state again: a score or why there is none, and the requests that needed living processes.

    Args:
        pinned: what scores it.
    """
    facts: dict[str, Json] = {}
    check = _Check(task, state, pinned)

    async def on_copy() -> float:
        async with open_kept(host, checkpoint) as copy:
            return await check.of_copy(copy, facts, kept=True)

    score, error = await _attempt(task, on_copy)
    thawed = facts.get("graded", {}).get("thawed", [])
    return score, error and _without_blame(error, acted=state.acted), list(thawed)


def _without_blame(error: Failure, *, acted: bool) -> Failure:
    """The same; not the agent's where none has acted."""
    blamed = error.cause == Cause.AGENT and not acted
    return attrs.evolve(error, cause=Cause.INFRASTRUCTURE) if blamed else error


async def _attempt(task: Task, work: Callable[[], Awaitable[float]]) -> tuple[float | None, Failure | None]:
    """A score, or why there is none."""
    try:
        return await work(), None
    except CheckerError as e:
        return None, Failure(str(e), e.facts.get("cause"), list(e.facts.get("evidence", ())))
    except DrumsError as e:
        return None, Failure(f"{type(e).__name__}: {e.message}")
    except Exception as e:  # noqa: BLE001 - a checker that raises gives no score, and says why
        _log.exception("checker raised", task=task.id)
        return None, Failure(f"{type(e).__name__}: {e}")


@attrs.frozen
class _Check:
    """What is checked: `state` is the end of the episode, `pinned` what scores it; `findings` are the checker's."""

    task: Task
    state: EndState
    pinned: Pinned | None
    findings: dict[str, Json] = attrs.field(factory=dict)

    async def of_copy(self, copy: Copy, facts: dict[str, Json], *, kept: bool) -> float:
        """The score of a copy; `facts` learn what was graded."""
        graded: dict[str, Json] = {"in_place": False, "checkpoint": copy.checkpoint.id, "thawed": copy.thawed}
        facts["graded"] = graded | ({"kept": True} if kept else {})
        try:
            return await self.score(copy)
        finally:
            facts["graded"]["notes"] = copy.episode.notes

    async def score(self, place: Slot | Copy) -> float:
        """The score of a desktop.

        Raises:
            CheckerError: there is none.
        """
        _, checker, _ = checker_for(place.host.checkers, self.task)
        failures: list[str] = []
        hostile: list[str] = []
        faults: list[CheckerError] = []
        scratch = Path(tempfile.mkdtemp(prefix="drums-check-"))
        cache = scratch / "cache"
        cache.mkdir()
        for name, text in self.state.outputs.items():
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
                    task=deepcopy(self.task),
                    last_action=self.state.last_action,
                    serve_guest=serve,
                    transport_failures=failures,
                    run_steps=steps,
                    scratch=scratch,
                    worker_cgroups=tuple(cgroup.paths),
                    pinned=self.pinned,
                    findings=self.findings,
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
