"""Cancelled at any await, create, reset and fork leave nothing, and what they were called on goes on.

The operation and every task below it are counted step by step; the n-th attempt is cancelled just as the n-th step
has come to its await. Desktops are real.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from requires import requires
from scratch import scratch_state
from snapshot import Snapshot, assert_unchanged, changes, take

from drums_core.config import HostConfig
from drums_core.host import Host
from drums_core.opening import open_host
from drums_core.services import Interposition
from drums_core.slot import Slot
from drums_core.slot_state import SlotState

pytestmark = requires("root", "criu")
TASK = "2e208cb7"  # its set-up calls sudo
ALL_OF_FIRST = 40


class CancelAt(trio.abc.Instrument):
    """Cancels a scope at the `step`-th step of a task, the tasks below it counted in.

    Args:
        step: which one; the first is 0.
        before: cancel just before the step, when what the task waited for is there already, so that the next await
            is the one that is cancelled; otherwise just after it, in the await that it has come to.
    """

    def __init__(self, step: int, *, before: bool) -> None:
        self.step = step
        self.before = before
        self.count = 0
        self.fired = False
        self.scope = trio.CancelScope()
        self._tasks: set[trio.lowlevel.Task] = set()

    def follow(self, task: trio.lowlevel.Task) -> None:
        self._tasks.add(task)

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        if task.parent_nursery is not None and task.parent_nursery.parent_task in self._tasks:
            self._tasks.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self._tasks.discard(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.before and task in self._tasks:
            self._step()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self.before and task in self._tasks:
            self._step()

    def _step(self) -> None:
        if self.count == self.step and not self.fired:
            self.fired = True
            self.scope.cancel()
        self.count += 1


@contextmanager
def _instrument(instrument: CancelAt) -> Iterator[None]:
    trio.lowlevel.add_instrument(instrument)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(instrument)


async def attempt(operation: Callable[[], Awaitable[Any]], step: int, *, before: bool = False) -> tuple[bool, Any]:
    """Run an operation, cancelled at a step: whether it had already ended by itself, and its result, if any."""
    cancel = CancelAt(step, before=before)
    result: Any = None

    async def run() -> None:
        nonlocal result
        cancel.follow(trio.lowlevel.current_task())
        with cancel.scope:
            result = await operation()

    with _instrument(cancel), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
    return not cancel.fired, result


def steps(stride: int) -> Iterator[tuple[int, bool]]:
    """The first steps one by one, then every `stride`-th; and whether to cancel before it, every other time."""
    for n, step in enumerate((*range(ALL_OF_FIRST), *range(ALL_OF_FIRST, 10_000, stride))):
        yield step, n % 2 == 1


async def _settled(before: Snapshot, config: HostConfig, what: str) -> None:
    # Long enough for another program of the machine, too short for a desktop to go unseen.
    found = await trio.to_thread.run_sync(lambda: changes(before, config.state_dir))
    assert not found, f"{what} left:\n" + "\n".join(found)


def test_create_cancelled_at_every_await_leaves_nothing() -> None:
    async def main(config: HostConfig) -> None:
        async with open_host(config) as host:
            await (await host.create(TASK)).close()  # whatever is made once and kept
            before = take(config.state_dir)
            for step, early in steps(2):
                ended, slot = await attempt(lambda: host.create(TASK), step, before=early)
                if slot is not None:
                    await slot.close()
                assert not host.slots, f"cancelled at step {step}: {[s.describe() for s in host.slots.values()]}"
                await _settled(before, config, f"create, cancelled at step {step},")
                if ended:
                    assert step > 50, f"a create of only {step} steps"
                    break
            async with await host.create(TASK) as slot:
                reward = await slot.verify()
                assert (reward.score, reward.valid) == (0.0, True)

    _run(main)


def test_reset_cancelled_at_every_await_leaves_the_slot_down() -> None:
    async def main(config: HostConfig) -> None:
        async with open_host(config) as host, await host.create(TASK) as slot:
            assert await _down(slot), "a cancelled reset"
            before = take(config.state_dir)
            for step, early in steps(2):
                if step % 3 == 0 and step < ALL_OF_FIRST:
                    await slot.reset()  # so that there is a desktop to end
                    assert slot.state is SlotState.UP
                ended, _ = await attempt(slot.reset, step, before=early)
                if slot.state is SlotState.UP:
                    await _down(slot)
                assert slot.state is SlotState.DOWN, f"cancelled at step {step}: {slot.describe()}"
                assert list(host.slots.values()) == [slot]
                await _settled(before, config, f"reset, cancelled at step {step},")
                assert slot.state is SlotState.DOWN, f"cancelled at step {step}: {slot.describe()}"
                if ended:
                    assert step > 50, f"a reset of only {step} steps"
                    break
            await slot.reset()
            reward = await slot.verify()
            assert (reward.score, reward.valid) == (0.0, True)

    _run(main)


async def _down(slot: Slot) -> bool:
    slot.quarantine("the test wants it down")
    await slot.release()
    return slot.state is SlotState.DOWN


def test_fork_cancelled_at_every_await_leaves_the_parent_alone() -> None:
    async def main(config: HostConfig) -> None:
        async with open_host(config) as host, await host.create(TASK) as slot:
            for child in await slot.fork(2):
                await child.close()
            await trio.sleep(0.2)  # the slot's own watch has begun
            before = take(config.state_dir)
            for step, early in steps(6):
                ended, children = await attempt(lambda: slot.fork(2), step, before=early)
                for child in children or []:
                    await child.close()
                assert list(host.slots.values()) == [slot], f"cancelled at step {step}"
                assert slot.state is SlotState.UP, f"cancelled at step {step}: {slot.describe()}"
                await _settled(before, config, f"fork, cancelled at step {step},")
                if ended:
                    assert step > 50, f"a fork of only {step} steps"
                    break
            assert (await slot.execute(["echo", "here"])).output == "here\n"
            (child,) = await slot.fork()
            for judged in (slot, child):
                reward = await judged.verify()
                assert (reward.score, reward.valid) == (0.0, True)
            await child.close()

    _run(main)


def test_cancelled_while_the_dump_is_under_way_the_dump_ends_and_is_thrown_away() -> None:
    async def main(config: HostConfig) -> None:
        seen: list[str] = []
        scope = trio.CancelScope()

        async def interposer(at: Interposition) -> None:
            seen.append(at.point)
            if at.point == "frozen":
                scope.cancel()
                await trio.sleep(0.05)  # shielded: a dump is not torn in the middle

        async with open_host(config, interposer=interposer) as host, await host.create() as slot:
            await trio.sleep(0.2)  # the slot's own watch has begun
            before = take(config.state_dir)
            seen.clear()
            with scope:
                await slot.fork(1)
            assert scope.cancelled_caught
            assert [point for point in seen if point != "settled"] == ["frozen"]  # it may settle meanwhile
            assert list(host.slots.values()) == [slot]
            await _settled(before, config, "fork, cancelled while frozen,")
            assert slot.state is SlotState.UP
            assert (await slot.execute(["echo", "here"])).output == "here\n"

    _run(main)


@pytest.mark.parametrize("point", ["rebuilt", "restored", "pre_resume", "resumed", "ready"])
def test_cancelled_by_somebody_else_at_a_point_of_the_restore(point: str) -> None:
    """The operation runs on from the point, to be cancelled at whatever it awaits next."""

    async def main(config: HostConfig) -> None:
        scope = trio.CancelScope()

        async def interposer(at: Interposition) -> None:
            if at.point == point:
                scope.cancel()

        async def cancelled(operation: Callable[[], Awaitable[Any]]) -> None:
            nonlocal scope
            scope = trio.CancelScope()
            with scope:
                await operation()
            assert scope.cancelled_caught

        async with open_host(config, interposer=interposer) as host:
            await (await host.create()).close()  # whatever is made once and kept
            before = take(config.state_dir)
            await cancelled(lambda: host.create(TASK))
            assert not host.slots
            await _settled(before, config, f"create, cancelled at {point!r},")
            scope = trio.CancelScope()
            slot = await host.create(TASK)
            await trio.sleep(0.2)  # the slot's own watch has begun
            before = take(config.state_dir)
            await cancelled(lambda: slot.fork(2))
            assert list(host.slots.values()) == [slot]
            await _settled(before, config, f"fork, cancelled at {point!r},")
            assert slot.state is SlotState.UP
            await cancelled(slot.reset)
            await trio.sleep(0.1)  # nothing comes after it
            assert (slot.describe()["state"], slot.desktop) == ("down", None)
            await slot.reset()
            assert (await slot.execute(["echo", "here"])).output == "here\n"

    _run(main)


def test_cancelled_from_outside_the_host_leaves_nothing() -> None:
    """At many moments from the first step of `open_host` on, with a create under way."""

    async def main(config: HostConfig) -> None:
        async def life(host_opened: list[Host]) -> None:
            async with open_host(config) as host:
                host_opened.append(host)
                await host.create(TASK)

        await attempt(lambda: life([]), 1 << 30)
        before = take(config.state_dir)
        for step in (*range(0, 30), *range(30, 600, 40)):
            opened: list[Host] = []
            await attempt(lambda opened=opened: life(opened), step)  # type: ignore[misc]
            await _settled(before, config, f"a host, cancelled at step {step},")

    _run(main, waiting_workers=1)


def _run(main: Callable[[HostConfig], Awaitable[None]], *, waiting_workers: int = 0) -> None:
    """Without workers that come and go beside, where what there is is counted while a host is open."""
    with scratch_state(waiting_workers=waiting_workers) as config:
        before = take(config.state_dir)
        trio.run(main, config)
        assert_unchanged(before, config.state_dir)


@pytest.mark.parametrize("step", [0, 2])
def test_the_harness_cancels_at_the_step_it_is_told(step: int) -> None:
    reached: list[int] = []

    async def child() -> None:
        reached.append(1)
        await trio.lowlevel.checkpoint()
        reached.append(2)

    async def operation() -> str:
        reached.append(0)
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        return "done"

    async def main() -> None:
        assert await attempt(operation, step) == (False, None)
        assert await attempt(operation, 100) == (True, "done")

    trio.run(main)
    assert reached == {0: [0], 2: [0, 1]}[step] + [0, 1, 2]
