"""Scoring: wait for the verdict, run the checker, and put the reward together."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from drums.errors import CheckerError, DrumsError, VerifierNotFound
from drums_core.abc import CheckContext, Checker
from drums_core.guest_gateway import serve_guest
from drums_core.leftovers import worker_cgroup_name
from drums_core.model import Json, Limits, Phase, Reward, SetupStep, Task
from drums_core.setup import run_steps
from drums_core.sys.cgroups import create_cgroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from drums_core.model import PluginId
    from drums_core.slot import Slot

_log = structlog.get_logger("drums.verify")
WORKER_LIMITS = Limits(cpus=2.0, memory_bytes=4 << 30, swap_bytes=0, pids=256)


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


async def grade(slot: Slot) -> Reward:
    """The reward of a slot's current episode; the desktop is graded in place.

    A checker that fails gives a reward with `checker_error` and no score. Deaths up to the last moment count.
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
    error: str | None = None
    _, checker, _ = checker_for(host.checkers, task)
    findings: dict[str, Json] = {}
    try:
        score = await _score(slot, task, checker, findings)
    except CheckerError as e:
        error = e.message
    except DrumsError as e:
        error = f"{type(e).__name__}: {e.message}"
    except Exception as e:  # noqa: BLE001 - a checker that raises gives no score, and says why
        _log.exception("checker raised", task=task.id)
        error = f"{type(e).__name__}: {e}"
    host.services.watcher.drain()
    slot.check_oom()
    reward = host.make_reward(slot, score=score, checker_error=error)
    if not findings:
        return reward
    return attrs.evolve(reward, provenance={**reward.provenance, "findings": findings})


@asynccontextmanager
async def _worker_cgroup() -> AsyncIterator[tuple[Path, ...]]:
    """A cgroup for one check's worker: too much memory kills it, which shows, where a failed allocation may not."""
    cgroup = create_cgroup(worker_cgroup_name())
    try:
        cgroup.write_limits(WORKER_LIMITS)
        yield tuple(cgroup.paths)
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
            while not cgroup.remove():
                cgroup.kill()
                await trio.sleep(0.005)


async def _score(slot: Slot, task: Task, checker: Checker, findings: dict[str, Json]) -> float:
    failures: list[str] = []
    guest = slot.guest
    scratch = Path(tempfile.mkdtemp(prefix="drums-check-"))
    cache = scratch / "cache"
    cache.mkdir()
    for name, text in slot.episode.outputs.items():
        (cache / name).write_text(text, encoding="utf-8")

    async def serve(fd: int) -> None:
        await serve_guest(guest, fd, failures)

    async def steps(documents: Sequence[SetupStep]) -> None:
        await run_steps(slot, documents, cache=cache)

    limit_s = slot.host.services.config.checker_timeout_s
    try:
        async with _worker_cgroup() as worker_cgroups:
            context = CheckContext(
                task=copy.deepcopy(task),
                last_action=slot.episode.last_action,
                serve_guest=serve,
                transport_failures=failures,
                run_steps=steps,
                scratch=scratch,
                worker_cgroups=worker_cgroups,
                pinned=slot.episode.pinned,
                findings=findings,
            )
            with trio.move_on_after(limit_s) as scope:
                score = await checker.check(context)
            if scope.cancelled_caught:
                raise CheckerError(f"the checker did not end within {limit_s:g} s")
    finally:
        shutil.rmtree(scratch)
    if failures:
        raise CheckerError(f"the desktop could not be asked: {failures[0]}")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise CheckerError(f"the checker returned {score!r}, expected a finite number")
    return float(score)
