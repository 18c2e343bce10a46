"""Clean restores: creates, resets and forks of an untouched and of a staged desktop.

Every one has to be valid, and those that are verified have to be scored.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import attrs
import trio

from drums_core.host import Host
from drums_core.model import Json, Verdict
from drums_core.selftest.checker import new_task
from drums_core.selftest.stage import set_the_stage
from drums_core.slot import Slot

CHILDREN_AT_ONCE = 4
_OWN_SHARE = 10  # of so many restores one is a create, and one its reset
_VERIFIED_SHARE = 4  # of so many one is verified at once, before its verdict


@attrs.define
class Clean:
    """Clean restores tried, by origin, how many of them were verified, and those that a gate flagged, in words."""

    tried: dict[str, int] = attrs.field(factory=dict)
    verified: int = 0
    alarms: list[dict[str, Json]] = attrs.field(factory=list)

    @property
    def count(self) -> int:
        """How many were tried."""
        return sum(self.tried.values())


async def restore_clean(host: Host, count: int, at_once: int, told: Callable[[], None]) -> Clean:
    """Restore `count` desktops, `at_once` at a time, and have each judged.

    Args:
        told: called after each.
    """
    clean = Clean()
    # Two loops take places one by one: with fewer each could wait for the other's.
    limit = trio.CapacityLimiter(max(at_once, 2 * CHILDREN_AT_ONCE))
    own = max(count // _OWN_SHARE, min(count, 2))
    if own:
        async with trio.open_nursery() as nursery:
            for number in range(own):
                nursery.start_soon(_create_and_reset, host, clean, limit, told, number, 2 * own <= count)
            children = count - own * (2 if 2 * own <= count else 1)
            nursery.start_soon(_children, host, clean, limit, told, children // 2, False)
            nursery.start_soon(_children, host, clean, limit, told, children - children // 2, True)
    return clean


async def _create_and_reset(
    host: Host, clean: Clean, limit: trio.CapacityLimiter, told: Callable[[], None], number: int, reset: bool
) -> None:
    async with limit:
        try:
            async with await host.create(new_task(), purpose="selftest") as slot:
                await _judge(slot, clean, told, verify=number % _VERIFIED_SHARE == 0)
                if reset:
                    await slot.reset()
                    await _judge(slot, clean, told, verify=number % _VERIFIED_SHARE == 1)
        except Exception as e:  # noqa: BLE001 - counts as one that was not valid
            _broken(clean, "create", e)


async def _children(
    host: Host, clean: Clean, limit: trio.CapacityLimiter, told: Callable[[], None], count: int, staged: bool
) -> None:
    """Children of one parent, a few at a time; the parent itself has to stay valid."""
    if not count:
        return
    origin = "fork of a staged desktop" if staged else "fork"
    try:
        task = new_task()
        async with await (set_the_stage(host, task) if staged else host.create(task, purpose="selftest")) as parent:
            await parent.episode.wait_judged()
            async with trio.open_nursery() as nursery:
                while count:
                    now = min(count, CHILDREN_AT_ONCE)
                    count -= now
                    places = [object() for _ in range(now)]
                    for place in places:
                        await limit.acquire_on_behalf_of(place)
                    try:
                        children = await parent.fork(now)
                    except Exception as e:  # noqa: BLE001 - as above
                        _broken(clean, origin, e)
                        children = []
                    for place in places[len(children) :]:
                        limit.release_on_behalf_of(place)
                    # One of each batch is verified, at once: its copy is made of a desktop that has not settled.
                    for number, (place, child) in enumerate(zip(places, children, strict=False)):
                        nursery.start_soon(_child, child, place, clean, limit, told, origin, number == 0)
            if parent.episode.validity.verdict is not Verdict.VALID:
                _alarm(clean, parent, f"the parent ({origin})")
    except Exception as e:  # noqa: BLE001 - as above
        _broken(clean, origin, e)


async def _child(
    child: Slot,
    place: object,
    clean: Clean,
    limit: trio.CapacityLimiter,
    told: Callable[[], None],
    origin: str,
    verify: bool,
) -> None:
    try:
        async with child:
            await _judge(child, clean, told, verify=verify, origin=origin)
    except Exception as e:  # noqa: BLE001 - as above
        _broken(clean, origin, e)
    finally:
        limit.release_on_behalf_of(place)


async def _judge(slot: Slot, clean: Clean, told: Callable[[], None], *, verify: bool, origin: str = "") -> None:
    origin = origin or slot.episode.origin
    clean.tried[origin] = clean.tried.get(origin, 0) + 1
    reward = await slot.verify(strict=False) if verify else None
    clean.verified += verify
    await slot.episode.wait_judged()
    slot.gates()  # what the kernel has said so far counts
    if slot.episode.validity.verdict is not Verdict.VALID:
        _alarm(clean, slot, origin)
    elif reward is not None and (reward.score is None or not reward.valid):
        _alarm(clean, slot, origin, f"it was not scored: {reward.checker_error or reward.checker_skipped}")
    told()


def _alarm(clean: Clean, slot: Slot, origin: str, *reasons: str) -> None:
    validity = slot.episode.validity
    clean.alarms.append(
        {"origin": origin, "verdict": validity.verdict.value, "reasons": [*validity.invalid_reasons, *reasons]}
    )


def _broken(clean: Clean, origin: str, error: Exception) -> None:
    text = "".join(traceback.format_exception_only(error)).strip()
    clean.alarms.append({"origin": origin, "verdict": "none", "reasons": [text]})
