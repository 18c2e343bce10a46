"""The `execute_with_verification` step: run a command, and wait until a window is there or another command succeeds.

OSWorld ends the set-up when what it waits for does not come about, and so does this; the command's own exit code is as
with `execute`.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import trio

from drums.errors import ConfigError, SetupFailed
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.execute import Execute
from drums_osworld.steps.parameters import NO, Command, Flag, structure

LONGEST_S = 600.0
_NAME = "execute_with_verification"


@attrs.frozen
class Verification:
    """What must have come about.

    Args:
        window_exists: what a window has in its line of `wmctrl -l`, whatever the case.
        command_success: a command that ends with 0.
    """

    window_exists: str = ""
    command_success: Command | None = None


@attrs.frozen
class VerifiedParameters:
    """The parameters of the step; times in seconds."""

    command: Command
    verification: Verification | None = None
    max_wait_time: float = 10.0
    check_interval: float = 1.0
    shell: Flag = NO


class ExecuteWithVerification:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> VerifiedParameters:
        """The parameters; raises `ConfigError`."""
        parsed = structure(parameters, VerifiedParameters, _NAME)
        for key in ("max_wait_time", "check_interval"):
            value = getattr(parsed, key)
            if not 0 < value <= LONGEST_S:
                raise ConfigError(
                    f"the parameters of a {_NAME!r} step are wrong: {key} is {value!r}, "
                    f"more than 0 and at most {LONGEST_S:g} s are allowed",
                    path=f"$.parameters.{key}",
                )
        return parsed

    async def run(self, context: StepContext, parameters: object) -> None:
        """Run the command and wait; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, VerifiedParameters)
        command = Execute(_NAME)
        value = parameters.command.value
        document: dict[str, Json] = {"command": value if isinstance(value, str) else list(value)}
        await command.run(context, command.parse({**document, "shell": bool(parameters.shell)}))
        wanted = parameters.verification or Verification()
        deadline = trio.current_time() + parameters.max_wait_time
        while missing := await _missing(context, wanted):
            left = deadline - trio.current_time()
            if left <= 0:
                raise SetupFailed(
                    f"after {value!r:.200} {missing} within {parameters.max_wait_time:g} s",
                    hint="raise max_wait_time, or mend the command",
                    output="",
                )
            await trio.sleep(min(left, parameters.check_interval))


async def _missing(context: StepContext, wanted: Verification) -> str:
    """What has not come about, in words; empty when all has."""
    if wanted.window_exists:
        windows = (await context.execute(["wmctrl", "-l"])).output
        if wanted.window_exists.lower() not in windows.lower():
            return f"there was no window {wanted.window_exists!r}"
    if wanted.command_success is not None:
        value = wanted.command_success.value
        # As in OSWorld, a line is for the shell.
        done = await context.execute(value, shell=isinstance(value, str))
        if done.returncode:
            return f"{value!r:.200} did not end with 0 but {done.returncode}"
    return ""


def _factory() -> Step:
    return ExecuteWithVerification()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `execute_with_verification` step."""
    register(_NAME, _factory)
