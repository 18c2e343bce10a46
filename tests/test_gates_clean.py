"""No false alarm in the long run: forks of forks, resets, verifies at any moment; a fault's episode ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
from desktops import Outcome, Played, judged, make_task, play, run
from requires import requires

from drums_core.episode import Episode
from drums_core.host import Host
from drums_core.journal import Journal
from drums_core.model import Reward
from drums_core.selftest.stage import as_interposition, set_the_stage
from drums_core.slot import Slot
from drums_core.testing.faults import FaultInjector, fault
from drums_core.verdict import SPECIFIED_GATES

pytestmark = requires("root", "criu")

GENERATIONS = 8
MOMENTS_S = (0.0, 0.5, 2.0, 4.0, 4.9, 5.1, 6.0)

faults = FaultInjector()


async def chain(host: Host) -> list[Outcome]:
    """A fork of a fork of ..., each made at once; all have an application, locks and odd files."""
    found: list[Outcome] = []
    slots = [await set_the_stage(host)]
    try:
        for _ in range(GENERATIONS):
            slots += await slots[-1].fork(1)
        async with trio.open_nursery() as nursery:

            async def judge(slot: Slot) -> None:
                found.append(await judged(slot))

            for slot in slots:
                nursery.start_soon(judge, slot)
    finally:
        for slot in slots:
            await slot.close()
    return found


async def moments(host: Host) -> list[Reward]:
    """Verified at each of these moments after the hand-over, each in a desktop of its own."""
    rewards: list[Reward] = []

    async def one(delay_s: float) -> None:
        async with await host.create(make_task()) as slot:
            await run(slot, "mkdir ~/done")
            await trio.sleep(delay_s)
            rewards.append(await slot.verify(strict=False))

    async with trio.open_nursery() as nursery:
        for delay_s in MOMENTS_S:
            nursery.start_soon(one, delay_s)
    return rewards


async def fault_then_reset(host: Host) -> list[Outcome]:
    faults.arm(fault("state_hash"))
    async with await host.create() as slot:
        found = [await judged(slot)]
        await slot.reset()
        found.append(await judged(slot))
        armed = faults.arm(fault("mount_table"), slot=slot.id)
        await slot.reset()
        found.append(await judged(slot))
        assert armed.planted
        return found


async def crash_before_the_reply(host: Host) -> tuple[Reward, list[Reward]]:
    """A process of the desktop crashes while the reward is put on disk, after the checker's last look."""
    recorded: list[Reward] = []
    real = Journal.record_reward

    async with await host.create(make_task()) as slot:

        async def record(journal: Journal, episode: Episode, reward: Reward) -> None:
            if not recorded:
                await fault("no_app_crash").plant(as_interposition(slot, "verify"))
            recorded.append(reward)
            await real(journal, episode, reward)

        await slot.wait_valid()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "record_reward", record)
            return await slot.verify(strict=False), recorded


@pytest.fixture(scope="module")
def late() -> Iterator[Played]:
    """By itself: for a moment its process's journals are not as they are."""
    yield play({"late": crash_before_the_reply})


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    scenarios = {"chain": chain, "moments": moments, "reset": fault_then_reset}
    yield play(scenarios, interposer=faults)


def assert_only(found: Outcome, *gates: str) -> None:
    """Exactly these gates failed, and all others passed."""
    assert found.failing() == set(gates) == set(found.bad_gates), found.reasons
    assert found.passing() >= set(SPECIFIED_GATES) - set(gates), found.lines
    assert found.verdict == ("invalid" if gates else "valid")


def test_forks_of_forks_are_valid(played: Played) -> None:
    """Eight generations, and the first."""
    found = played["chain"]
    assert len(found) == GENERATIONS + 1
    for one in found:
        assert_only(one)


def test_a_verify_at_any_moment_is_valid(played: Played) -> None:
    """It waits for the verdict, and disturbs none."""
    rewards = played["moments"]
    assert len(rewards) == len(MOMENTS_S)
    assert all(reward.valid and reward.score == 1.0 for reward in rewards), rewards


def test_a_reset_begins_a_new_judged_episode(played: Played) -> None:
    first, second, third = played["reset"]
    assert_only(first, "state_hash")
    assert_only(second)
    assert_only(third, "mount_table")


def test_a_crash_before_the_reply_counts(late: Played) -> None:
    """The reward that was put on disk is followed by the one that is answered."""
    reward, recorded = late["late"]
    assert recorded[0].valid and recorded[0].score == 0.0
    assert recorded[1:] == [reward] and reward.bad_gates == ("no_app_crash",)
    assert not reward.valid and reward.score == 0.0 and reward.provenance["causes"] == ["infrastructure"]
    assert "died of SIGSEGV" in reward.invalid_reasons[0]


def test_nothing_is_left(played: Played, late: Played) -> None:
    assert played.left == late.left == []
