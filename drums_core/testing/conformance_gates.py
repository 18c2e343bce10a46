"""The suite of a gate: its shape, and how it behaves on a desktop that is right and on ones that are not.

require(check_gate_shape(factory))
require(await check_gate(factory(), view, faulty={"another host name": other_view}))
"""

from __future__ import annotations

import builtins
import copy
import inspect
import io
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import trio

from drums_core.abc import DesktopView, EventGate, Gate
from drums_core.model import DesktopEvent, Finding, Json, Phase
from drums_core.testing.cancelling import cancelled_everywhere
from drums_core.testing.conformance import Broken, Check, checked, checked_async, expect

LIMIT_S = 60.0


def check_gate_shape(factory: Callable[[], Gate | EventGate]) -> list[Check]:
    """What can be told of a gate without a desktop: it is made without opening a file, and has what it must have."""
    made: list[Gate | EventGate] = []

    def make() -> None:
        with _nothing_opened():
            made.append(factory())

    checks = [checked("it is made without opening a file", make)]
    if not made:
        return checks
    gate = made[0]

    def phase() -> None:
        expect(isinstance(gate.phase, Phase), f"its phase is {gate.phase!r}, a drums_core.model.Phase is needed")
        is_event = gate.phase is Phase.EVENT
        expect(is_event == isinstance(gate, EventGate), "`judge` goes with Phase.EVENT, `check` with the other phases")

    def methods() -> None:
        if isinstance(gate, EventGate):
            expect(not inspect.iscoroutinefunction(gate.judge), "`judge` must not be async")
            return
        expect(isinstance(gate.records, bool), f"`records` is {gate.records!r}, a bool is needed")
        for name in ("record", "check"):
            expect(inspect.iscoroutinefunction(getattr(gate, name, None)), f"`{name}` must be an async method")

    return [*checks, checked("its phase fits what it is", phase), checked("its methods are what they must be", methods)]


async def check_gate(
    gate: Gate, view: DesktopView, *, faulty: Mapping[str, DesktopView], evidence: Json = None
) -> list[Check]:
    """Every rule that a desktop is needed for.

    Args:
        gate: one object, as a host keeps it; it is used for several desktops at once.
        view: a desktop that is as it was when `record` looked.
        faulty: desktops in which the gate must fail, or raise, by what is wrong with them.
        evidence: of a gate that does not record, what `check` is given.
    """
    recorded: list[Json] = [evidence]

    async def record() -> None:
        first, second = await gate.record(view), await gate.record(view)
        expect(first == second, f"two looks at one desktop differ: {first!r:.200} and {second!r:.200}")
        try:
            again = json.loads(json.dumps(first, allow_nan=False))
        except (TypeError, ValueError) as e:
            raise Broken(f"its evidence is no JSON: {e}") from e
        expect(again == first, "its evidence is not the same once it was written down as JSON")
        recorded[0] = again

    async def passes() -> None:
        found = await _finding(gate, view, copy.deepcopy(recorded[0]))
        expect(found.ok is True, f"a desktop that is as recorded fails: {found.reason}")

    async def unchanged() -> None:
        given = copy.deepcopy(recorded[0])
        await gate.check(view, given)
        expect(given == recorded[0], "`check` changes the evidence that it is given")

    async def cancelled() -> None:
        await cancelled_everywhere(lambda: gate.check(view, copy.deepcopy(recorded[0])))
        found = await _finding(gate, view, copy.deepcopy(recorded[0]))
        expect(found.ok is True, f"after it was cancelled, a right desktop fails: {found.reason}")

    async def side_by_side() -> None:
        views = [view, *faulty.values()] * 3
        found: list[bool | None] = [None] * len(views)

        async def one(index: int) -> None:
            try:
                found[index] = (await gate.check(views[index], copy.deepcopy(recorded[0]))).ok
            except Exception:  # noqa: BLE001 - raising counts as failing
                found[index] = False

        async with trio.open_nursery() as nursery:
            for index in range(len(views)):
                nursery.start_soon(one, index)
        wanted = [v is view for v in views]
        expect(found == wanted, "checks of several desktops side by side find something else than one by one")

    rules: list[tuple[str, Callable[[], Awaitable[object]]]] = []
    if gate.records:
        rules.append(("its evidence is JSON, and the same twice", record))
    rules += [("a desktop that is as recorded passes", passes), ("evidence is not changed", unchanged)]
    checks = [await _limited(rule, function) for rule, function in rules]
    expect_a_fault = Check("a fault is planted", "" if faulty else "no faulty desktop was given")
    checks.append(expect_a_fault)
    for name, wrong in faulty.items():
        checks.append(await _limited(f"it fails: {name}", _failing(gate, wrong, recorded)))
    checks.append(await _limited("it can be cancelled at any point, and used again", cancelled))
    checks.append(await _limited("it serves several desktops at once", side_by_side))
    return checks


def check_event_gate(
    gate: EventGate, *, breaking: Sequence[DesktopEvent], harmless: Sequence[DesktopEvent]
) -> list[Check]:
    """Every rule of a gate of events.

    Args:
        breaking: events that it must fail for.
        harmless: events that it must let pass.
    """

    def breaks(event: DesktopEvent) -> None:
        found = gate.judge(event)
        expect(isinstance(found, Finding) and found.ok is False, f"it gives {found!r:.100}, a failed finding is needed")
        assert found is not None
        _readable(found)
        expect(gate.judge(event) == found, "the same event is judged otherwise the second time")

    def passes(event: DesktopEvent) -> None:
        found = gate.judge(event)
        expect(found is None or found.ok is True, f"it fails: {found}")

    checks = [Check("there is an event that breaks it", "" if breaking else "none was given")]
    checks += [checked(f"it fails for {event}", lambda e=event: breaks(e)) for event in breaking]  # type: ignore[misc]
    checks += [checked(f"it lets pass {event}", lambda e=event: passes(e)) for event in harmless]  # type: ignore[misc]
    return checks


def _failing(gate: Gate, view: DesktopView, recorded: list[Json]) -> Callable[[], Awaitable[None]]:
    async def fails() -> None:
        try:
            found = await gate.check(view, copy.deepcopy(recorded[0]))
        except Exception:  # noqa: BLE001 - the core counts that as a failure
            return
        expect(isinstance(found, Finding), f"it returned {type(found).__name__}, a Finding is needed")
        expect(found.ok is False, "the fault goes unseen")
        _readable(found)

    return fails


def _readable(found: Finding) -> None:
    expect(found.reason.strip() and "\n" not in found.reason, f"its reason is {found.reason!r}, one line is needed")
    try:
        json.dumps([found.observed, found.expected])
    except (TypeError, ValueError) as e:
        raise Broken(f"what it observed or expected is no JSON: {e}") from e


async def _finding(gate: Gate, view: DesktopView, evidence: Json) -> Finding:
    found = await gate.check(view, evidence)
    expect(isinstance(found, Finding), f"it returned {type(found).__name__}, a Finding is needed")
    return found


async def _limited(rule: str, function: Callable[[], Awaitable[object]]) -> Check:
    async def within() -> None:
        with trio.move_on_after(LIMIT_S) as scope:
            await function()
        expect(not scope.cancelled_caught, f"it was not done within {LIMIT_S:g} s")

    return await checked_async(rule, within)


@contextmanager
def _nothing_opened() -> Iterator[None]:
    def refuse(*_: object, **__: object) -> None:
        raise Broken("it opens a file; constructors do no I/O")

    with ExitStack() as stack:
        for module in (builtins, io, os):
            stack.enter_context(mock.patch.object(module, "open", refuse))
        yield
