"""Scoring: wait for the verdict, run the checker, and say why there is no score."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from drums.errors import CheckerError, ConfigError, DrumsError, InvalidEpisode
from drums_core import end_states
from drums_core.abc import CheckContext, Checker, EarlyChecker, Pinned
from drums_core.blame import blame
from drums_core.copies import Copy, open_copy, open_kept
from drums_core.end_states import EndState
from drums_core.error_groups import leaves
from drums_core.guest_gateway import serve_guest
from drums_core.model import Cause, Json, Phase, Reward, SetupStep, Task
from drums_core.port_gateway import GRADED_PORTS, PortGateway
from drums_core.ports import PortUses
from drums_core.rewards import make_reward, record_reward
from drums_core.setup import run_steps
from drums_core.slot_state import SlotState
from drums_core.task_needs import checker_for

if TYPE_CHECKING:
    from drums_core.checkpoint import Checkpoint
    from drums_core.host import Host
    from drums_core.slot import Slot

_log = structlog.get_logger("drums.verify")


@attrs.frozen
class Failure:
    """Why there is no score.

    Args:
        message: in words.
        cause: who brought it about, None where nothing shows it.
        evidence: what shows it.
        ports: those of the desktop that could not be asked.
    """

    message: str
    cause: Cause | None = None
    evidence: list[str] = attrs.field(factory=list)
    ports: frozenset[int] = frozenset()


async def verify(slot: Slot, *, strict: bool, in_place: bool | None, keep: bool | None) -> Reward:
    """The reward of a slot that has a task, recorded and told; see `Slot.verify`."""
    host, episode = slot.host, slot.episode
    chosen = host.config.verify_in_place if in_place is None else in_place
    if keep and chosen:
        raise ConfigError("keep is about the copy that is graded, and in place there is none", path="$.keep")
    kept = (host.config.keep_end_states if keep is None else keep) and not chosen
    reward: Reward | None = None
    if not _out_of_order(slot):
        async with slot.states.operating("verify", SlotState.UP):
            await episode.wait_judged()
            if not _out_of_order(slot):
                reward = await grade(slot, in_place=chosen, keep=kept)
    if reward is None or _out_of_order(slot):  # before, or meanwhile
        reward = make_reward(slot, score=None, checker_skipped=f"{slot.state.value}: {slot.reason}")
    reward = await record_reward(slot, episode, reward)
    host.publish("reward", slot.id, attrs.asdict(reward), episode.id)
    if strict and not reward.valid:
        raise InvalidEpisode(
            f"episode {episode.id} is invalid: {'; '.join(reward.invalid_reasons)}",
            bad_gates=list(reward.bad_gates),
            reward=reward,
        )
    if strict and reward.score is None:
        raise CheckerError(f"no score: {reward.checker_error or reward.checker_skipped}", reward=reward)
    return reward


def _out_of_order(slot: Slot) -> bool:
    """Whether there is an episode that can be told about and a desktop that cannot be scored."""
    return slot.state in (SlotState.QUARANTINED, SlotState.FAILED)


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
    check = _Check(task, EndState.of(slot), episode.pinned, kept=keep, graded={"in_place": in_place})
    if in_place:
        score, error = await check.attempt(host, nullcontext(slot), nullcontext())
    else:
        score, error = await check.attempt(host, open_copy(slot, keep=keep), host.copy_limit)
    if keep:
        await end_states.sweep(host.services.store, host.config)
    facts: dict[str, Json] = {"graded": check.graded}
    if error is not None:
        # A program that crashed is a gate's affair; one that the agent has closed is the agent's.
        listened = episode.listened if episode.validity.valid else frozenset()
        look = partial(blame, desktop, acted=slot.has_acted, listened=listened, asked=error.ports)
        cause, seen = await trio.to_thread.run_sync(look)
        if cause is not None and error.cause in (None, Cause.INFRASTRUCTURE):
            error = attrs.evolve(error, cause=cause)
        error = _without_blame(error, acted=slot.has_acted)
        facts["checker_error_evidence"] = [*error.evidence, *seen]
    host.services.watcher.drain()
    slot.check_oom()
    if check.findings:
        facts["findings"] = check.findings
    return make_reward(slot, score=score, failure=error, provenance=facts)


async def regrade(
    host: Host, checkpoint: Checkpoint, state: EndState, task: Task, pinned: Pinned | None
) -> tuple[float | None, Failure | None, list[Json]]:
    """Grade an end state again: a score or why there is none, and the requests that needed living processes.

    Args:
        pinned: what scores it.
    """
    check = _Check(task, state, pinned, kept=True)
    score, error = await check.attempt(host, open_kept(host, checkpoint), host.copy_limit)
    return score, error and _without_blame(error, acted=state.acted), list(check.graded.get("thawed", []))


def _without_blame(error: Failure, *, acted: bool) -> Failure:
    """The same; not the agent's where none has acted."""
    blamed = error.cause == Cause.AGENT and not acted
    return attrs.evolve(error, cause=Cause.INFRASTRUCTURE) if blamed else error


def _failure(errors: Sequence[BaseException]) -> Failure:
    """What errors say together; they have a cause where no two of them name different ones."""
    told = [x for x in errors if isinstance(x, CheckerError)]
    causes = {x.facts["cause"] for x in told if x.facts.get("cause") is not None}
    return Failure(
        "; ".join(dict.fromkeys(_said(x) for x in errors)),
        causes.pop() if len(causes) == 1 else None,
        [line for x in told for line in x.facts.get("evidence", ())],
        frozenset(port for x in told for port in x.facts.get("ports", ())),
    )


def _said(error: BaseException) -> str:
    if isinstance(error, CheckerError):
        return str(error)
    return f"{type(error).__name__}: {error.message if isinstance(error, DrumsError) else error}"


@attrs.frozen
class _Check:
    """One check.

    Args:
        state: the end of the episode.
        pinned: what scores it.
        kept: whether the copy's checkpoint stays.
        graded: what was graded, for the reward.
        findings: the checker's.
    """

    task: Task
    state: EndState
    pinned: Pinned | None
    kept: bool
    graded: dict[str, Json] = attrs.field(factory=dict)
    findings: dict[str, Json] = attrs.field(factory=dict)

    async def attempt(
        self, host: Host, opening: AbstractAsyncContextManager[Slot | Copy], turn: AbstractAsyncContextManager[object]
    ) -> tuple[float | None, Failure | None]:
        """The score of the desktop that `opening` gives, or why there is none; nothing begins before its turn."""
        try:
            return await self._score(host, opening, turn), None
        except Exception as e:  # noqa: BLE001 - a checker that raises gives no score, and says why
            errors = leaves(e)
            if not all(isinstance(x, DrumsError) for x in errors):
                _log.exception("checker raised", task=self.task.id)
            return None, _failure(errors)

    async def _score(
        self, host: Host, opening: AbstractAsyncContextManager[Slot | Copy], turn: AbstractAsyncContextManager[object]
    ) -> float:
        _, checker, _ = checker_for(host.checkers, self.task)
        scratch = Path(tempfile.mkdtemp(prefix="drums-check-"))
        cache = scratch / "cache"
        cache.mkdir()
        for name, text in self.state.outputs.items():
            (cache / name).write_text(text, encoding="utf-8")
        asking = _Asking(cache, host.config.checker_timeout_s)
        context = CheckContext(
            task=deepcopy(self.task),
            last_action=self.state.last_action,
            serve_guest=asking.serve,
            transport_failures=asking.failures,
            run_steps=asking.run_steps,
            scratch=scratch,
            pinned=self.pinned,
            findings=self.findings,
            serve_ports={port: partial(asking.ports.serve, port) for port in GRADED_PORTS},
            wait_there=asking.wait_there,
        )
        try:
            # A worker loads what it needs while the copy is made, on the processors that this leaves idle.
            async with turn, trio.open_nursery() as nursery:
                nursery.start_soon(asking.check, checker, context)
                async with opening as place:
                    if isinstance(place, Copy):
                        self._note(place)
                    try:
                        score = await asking.checked(place)
                    finally:  # a check that is cancelled has ended before its desktop does
                        await asking.end()
        finally:
            asking.log_unheard(self.task)
            shutil.rmtree(scratch)
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise CheckerError(f"the checker returned {score!r}, expected a finite number")
        return float(score)

    def _note(self, copy: Copy) -> None:
        self.graded.update(in_place=False, checkpoint=copy.checkpoint.id, thawed=copy.thawed)
        self.graded["notes"] = copy.episode.notes
        if self.kept:
            self.graded["kept"] = True


@attrs.define
class _Asking:
    """What a checker reaches of a desktop.

    Args:
        cache: takes what its steps print.
        limit_s: how long it may take, in seconds, once the desktop is there.
    """

    cache: Path
    limit_s: float
    failures: list[str] = attrs.field(factory=list)
    _hostile: list[str] = attrs.field(factory=list)
    _faults: list[CheckerError] = attrs.field(factory=list)
    _place: Slot | Copy | None = None
    _there: trio.Event = attrs.field(factory=trio.Event)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _clock: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _ended: trio.Event = attrs.field(factory=trio.Event)
    _score: object = None
    _error: Exception | None = None
    _heard: bool = False
    ports: PortGateway = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.ports = PortGateway(self._connect, self.failures, self._hostile)

    async def wait_there(self) -> None:
        """`CheckContext.wait_there`."""
        await self._there.wait()

    async def _desktop(self) -> Slot | Copy:
        await self._there.wait()
        assert self._place is not None
        return self._place

    @asynccontextmanager
    async def _connect(self, port: int) -> AsyncIterator[trio.SocketStream]:
        place = await self._desktop()
        stream = place.connect_port(port) if isinstance(place, Copy) else PortUses().open(place.guest.netns_fd, port)
        async with stream as opened:
            yield opened

    async def serve(self, fd: int) -> None:
        """`CheckContext.serve_guest`."""
        try:
            with ExitStack() as unserved:
                unserved.callback(os.close, fd)
                place = await self._desktop()
                if not isinstance(place, Copy):
                    unserved.pop_all()  # who serves closes it
                    await serve_guest(place.guest.request, fd, self.failures, self._hostile)
                    return
                async with place.frozen():
                    unserved.pop_all()
                    await serve_guest(place.request, fd, self.failures, self._hostile)
        except Exception as e:  # the worker's end would hide it
            self._faults += [x for x in leaves(e) if isinstance(x, CheckerError)]
            raise

    async def run_steps(self, documents: Sequence[SetupStep]) -> None:
        """`CheckContext.run_steps`."""
        place = await self._desktop()
        await run_steps(place, documents, cache=self.cache)
        if isinstance(place, Copy):
            place.require_sound("broke while its postconfig ran")

    async def check(self, checker: Checker, context: CheckContext) -> None:
        """Run a checker, from before there is a desktop on if it can; `checked` tells what came of it."""
        try:
            with self._scope, self._clock:
                if not (isinstance(checker, EarlyChecker) and checker.begins_early):
                    await self.wait_there()
                self._score = await checker.check(context)
            if self._clock.cancelled_caught:
                self._error = CheckerError(f"the checker did not end within {self.limit_s:g} s")
        except Exception as e:  # noqa: BLE001 - `checked` raises it
            self._error = e
        finally:
            self._ended.set()

    async def end(self) -> None:
        """End the check, and wait for that."""
        self._scope.cancel()
        with trio.CancelScope(shield=True):
            await self._ended.wait()

    def log_unheard(self, task: Task) -> None:
        """Log an error of a check that was ended: what ended it is told instead."""
        if self._error is not None and not self._heard:
            _log.error("a check that was ended failed", task=task.id, error=str(self._error))

    async def checked(self, place: Slot | Copy) -> object:
        """What the checker returns that was given to `check`, of this desktop.

        Raises:
            CheckerError: it cannot count.
        """
        self._place = place
        self._clock.deadline = trio.current_time() + self.limit_s
        self._there.set()
        await self._ended.wait()
        self._heard = True
        try:
            if self._error is not None:
                raise self._error
        except Exception as e:
            told = [x for x in leaves(e) if isinstance(x, CheckerError)]
            if told and isinstance(place, Copy) and place.fault is not None:
                self._faults.insert(0, place.fault)
            if told and self._faults and told != self._faults[:1]:
                raise self._faults[0] from e
            if told and self.ports.failed:
                told[0].facts["ports"] = self.ports.failed
            if told and self._hostile:
                told[0].facts.update(cause=Cause.AGENT, evidence=self._hostile)
            raise
        if isinstance(place, Copy):
            place.require_sound("broke while it was looked at")
        if self.failures:
            raise CheckerError(f"the desktop could not be asked: {self.failures[0]}")
        return self._score
