"""The `sleep` step: wait, on the host's clock."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import trio

from drums.errors import ConfigError
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.parameters import structure

LONGEST_S = 600.0


@attrs.frozen
class SleepParameters:
    """The parameters of `sleep`."""

    seconds: float


class Sleep:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> SleepParameters:
        """The parameters; raises `ConfigError`."""
        parsed = structure(parameters, SleepParameters, "sleep")
        if not math.isfinite(parsed.seconds) or not 0 <= parsed.seconds <= LONGEST_S:
            raise ConfigError(
                f"the parameters of a 'sleep' step are wrong: seconds is {parsed.seconds!r}, "
                f"allowed is 0 to {LONGEST_S:g}",
                path="$.parameters.seconds",
            )
        return parsed

    async def run(self, context: StepContext, parameters: object) -> None:
        """Wait."""
        assert isinstance(parameters, SleepParameters)
        await trio.sleep(parameters.seconds)


def _factory() -> Step:
    return Sleep()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `sleep` step."""
    register("sleep", _factory)
