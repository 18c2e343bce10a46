"""The `close_window` step: ask a window to close.

A window that is not there is noted in the episode, and set-up goes on: OSWorld only logs it.
"""

from __future__ import annotations

from collections.abc import Mapping

from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.window import WindowParameters, parse_window


class CloseWindow:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> WindowParameters:
        """The parameters; raises `ConfigError`."""
        return parse_window(parameters, "close_window")

    async def run(self, context: StepContext, parameters: object) -> None:
        """Ask a window to close; raises `GuestError`."""
        assert isinstance(parameters, WindowParameters)
        found = await context.close_window(
            parameters.window_name, strict=bool(parameters.strict), by_class=bool(parameters.by_class)
        )
        if not found:
            context.note(f"close_window: there is no {parameters.describe()}")


def _factory() -> Step:
    return CloseWindow()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `close_window` step."""
    register("close_window", _factory)
