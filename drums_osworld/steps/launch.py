"""The `launch` step: start a program in the desktop and leave it running.

As in OSWorld, no placeholder is filled in, and a line without `shell` is split into arguments by whoever runs it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from drums.errors import GuestError
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.absent import goes_on_without
from drums_osworld.steps.parameters import NO, Command, Flag, structure


@attrs.frozen
class LaunchParameters:
    """The parameters of `launch`."""

    command: Command
    shell: Flag = NO


class Launch:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> LaunchParameters:
        """The parameters; raises `ConfigError`."""
        return structure(parameters, LaunchParameters, "launch")

    async def run(self, context: StepContext, parameters: object) -> None:
        """Start the program; raises `GuestError`, which also stands for a program that the image lacks."""
        assert isinstance(parameters, LaunchParameters)
        try:
            await context.launch(parameters.command.value, shell=bool(parameters.shell))
        except GuestError as e:
            if not goes_on_without(context, e):
                raise
            context.note(f"launch: {e.message}")


def _factory() -> Step:
    return Launch()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `launch` step."""
    register("launch", _factory)
