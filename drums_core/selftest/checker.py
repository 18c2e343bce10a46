"""A checker of the self-test's own: it answers 1, after it has done what it was told to do while it looks."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs

from drums_core.abc import CheckContext
from drums_core.config import HostConfig
from drums_core.hookspecs import RegisterChecker, hookimpl
from drums_core.model import Json, Task

FUNC = "drums_selftest"
"""What the evaluator of its tasks names."""


def new_task() -> Task:
    """A task for one desktop, scored by `SelftestChecker`."""
    identity = f"drums-selftest-{uuid.uuid4().hex[:12]}"
    return Task(identity, "Nothing is to be done.", (), {"func": FUNC}, "selftest", "0" * 64)


@attrs.define
class SelftestChecker:
    """Both the plugin and the checker. `during` maps a task's id to what is done while its desktop is looked at."""

    during: dict[str, Callable[[], Awaitable[None]]] = attrs.field(factory=dict)

    def claims(self, evaluator: Mapping[str, Json]) -> bool:
        """Whether it is the self-test's."""
        return evaluator.get("func") == FUNC

    def validate(self, task: Task) -> None:
        """Nothing can be wrong with it."""

    def provenance(self, task: Task) -> Mapping[str, Json]:
        """Nothing more to say."""
        return {}

    async def check(self, context: CheckContext) -> float:
        """Do what is to be done meanwhile; the score is 1."""
        if work := self.during.pop(context.task.id, None):
            await work()
        return 1.0

    @hookimpl
    def drums_register_checkers(self, register: RegisterChecker) -> None:
        """Register this very object."""

        def factory(_: HostConfig) -> Any:
            return self

        register(FUNC, factory)
