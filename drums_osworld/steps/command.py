"""The `command` step: the same as `execute`, under the other name that OSWorld has for it."""

from __future__ import annotations

from drums_core.abc import Step
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_osworld.steps.execute import Execute


def _factory() -> Step:
    return Execute("command")


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `command` step."""
    register("command", _factory)
