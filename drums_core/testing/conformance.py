"""What the conformance suites share: a check with its outcome, and how checks are gathered."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence

import attrs


@attrs.frozen
class Check:
    """One rule of a suite. `fault` says how it is broken, "" when it holds."""

    rule: str
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return not self.fault


class Conformance(AssertionError):
    """Rules that do not hold, in words. `.checks` are all of them, those that hold included."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)
        super().__init__("\n".join(f"{c.rule}: {c.fault}" for c in checks if c.fault))


def require(checks: Iterable[Check]) -> None:
    """Nothing, when every rule holds.

    Raises:
        Conformance: an AssertionError that names each broken rule; also when there was none to check.
    """
    found = list(checks)
    if not found:
        raise Conformance([Check("there is something to check", "no rule was checked")])
    if not all(c.ok for c in found):
        raise Conformance(found)


class Broken(Exception):
    """Raised by a rule's function: how it is broken."""


def expect(holds: object, fault: str) -> None:
    """Raise `Broken` unless it holds."""
    if not holds:
        raise Broken(fault)


def checked(rule: str, function: Callable[[], object]) -> Check:
    """The check of one rule: it holds unless the function raises."""
    try:
        function()
    except Broken as e:
        return Check(rule, str(e) or "it does not hold")
    except Exception as e:  # noqa: BLE001 - a rule that cannot be checked is broken
        return Check(rule, _told(e))
    return Check(rule)


async def checked_async(rule: str, function: Callable[[], Awaitable[object]]) -> Check:
    """As `checked`, of an async function."""
    try:
        await function()
    except Broken as e:
        return Check(rule, str(e) or "it does not hold")
    except Exception as e:  # noqa: BLE001 - a rule that cannot be checked is broken
        return Check(rule, _told(e))
    return Check(rule)


def _told(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"
