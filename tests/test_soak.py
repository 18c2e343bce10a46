"""Thirty desktops in a row, six at a time: created, judged, scored, closed; nothing is left and nothing grows."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import trio
from requires import requires
from scratch import scratch_state
from snapshot import assert_unchanged, take

from drums_core.config import HostConfig
from drums_core.host import open_host

pytestmark = requires("root", "criu")
CYCLES = 30
AT_ONCE = 6


@attrs.frozen
class _Cycle:
    """One desktop's outcome, and this process's descriptors when no desktop lived."""

    score: float | None
    valid: bool
    reasons: tuple[str, ...]
    error: str | None


async def _soak(config: HostConfig, task: str) -> tuple[list[_Cycle], list[int]]:
    cycles: list[_Cycle] = []
    descriptors: list[int] = []

    async with open_host(config) as host:

        async def cycle() -> None:
            async with await host.create(task) as slot:
                reward = await slot.verify(strict=False)
            cycles.append(_Cycle(reward.score, reward.valid, tuple(reward.invalid_reasons), reward.checker_error))

        for _ in range(CYCLES // AT_ONCE):
            async with trio.open_nursery() as nursery:
                for _ in range(AT_ONCE):
                    nursery.start_soon(cycle)
            descriptors.append(len(os.listdir("/proc/self/fd")))
            assert not host.slots
            assert os.listdir(config.state_dir / "slots") == []
    return cycles, descriptors


def test_thirty_cycles_are_all_valid_and_leave_nothing() -> None:
    with scratch_state(osworld=True) as config:
        task = "e0df059f" if config.osworld else "2e208cb7"
        before = take(config.state_dir)
        cycles, descriptors = trio.run(_soak, config, task)
        assert_unchanged(before, config.state_dir)
    assert cycles == [_Cycle(0.0, True, (), None)] * CYCLES
    assert len(set(descriptors)) == 1, f"open descriptors after each round: {descriptors}"


def test_what_a_scratch_state_holds_is_gone_with_it() -> None:
    with scratch_state() as config:
        state = config.state_dir
        assert (state / "images").is_dir()
        assert Path(os.readlink(state / "criu")).is_dir()
    assert not state.exists()
