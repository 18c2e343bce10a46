"""The `open` step: open a file with the program that the desktop has for it, and wait until a window shows it.

OSWorld waits for half an hour; a desktop that shows nothing after `LIMIT_S` never will. Where it fails, so does the
set-up, as in OSWorld: the task is about what the window shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from drums.errors import ConfigError
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.parameters import structure

LIMIT_S = 120.0


@attrs.frozen
class OpenParameters:
    """The parameters of `open`."""

    path: str


class Open:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> OpenParameters:
        """The parameters; raises `ConfigError`."""
        parsed = structure(parameters, OpenParameters, "open")
        if not parsed.path.strip() or "\0" in parsed.path:
            raise ConfigError(
                f"the parameters of an 'open' step are wrong: path is {parsed.path!r}, a file or a program is needed",
                path="$.parameters.path",
            )
        return parsed

    async def run(self, context: StepContext, parameters: object) -> None:
        """Open it; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, OpenParameters)
        await context.open_file(parameters.path, timeout_s=LIMIT_S)


def _factory() -> Step:
    return Open()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `open` step."""
    register("open", _factory)
