"""The `execute` step: run a command in the desktop to its end.

OSWorld only logs a command that fails and goes on. That is right for the many set-ups that poke at things which may
not be there, and wrong for a set-up that its task rests on. The rule here:

- a command that fails is noted in the episode's report, and set-up goes on;
- a command that calls `sudo` is trusted provisioning, asked for because the task cannot be right without it: when it
  fails, `SetupFailed`. `sudo su` is none: it changes nothing, it only starts a shell as somebody else;
- a program that is not there (no shell's 127) fails the set-up, as the image lacks what the task calls; in a
  `postconfig` it is noted, as the agent may have removed it;
- a desktop that cannot be asked is a `GuestError` in any case, and so is a command that does not end in time.

`stdout` and `stderr` name files that a checker reads later (OSWorld's `cache_file`). With `until` the command is
repeated until its result matches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs
import trio

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core.abc import CommandResult, Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.absent import goes_on_without
from drums_osworld.steps.parameters import NO, Command, Flag, structure
from drums_osworld.steps.placeholders import fill

PAUSE_S = 0.3
UNTIL_LIMIT_S = 300.0

# sudo as a command's first word: at the start, or after what ends the command before it.
_SUDO = re.compile(r"(?:^|[\s;&|(`])(?:/usr/bin/)?sudo\s+((?:-\S+\s+)*)(\S+)")
_SHOWN = 2000


@attrs.frozen
class Until:
    """What a command's result must show before set-up goes on; one match is enough, and nothing asked is no wait."""

    returncode: int | None = None
    stdout: str | None = None
    stderr: str | None = None

    def met_by(self, result: CommandResult) -> bool:
        """Whether the result matches."""
        return (
            (self.returncode is not None and result.returncode == self.returncode)
            or (self.stdout is not None and self.stdout in result.output)
            or (self.stderr is not None and self.stderr in result.error)
        )


@attrs.frozen
class ExecuteParameters:
    """The parameters of `execute` and `command`."""

    command: Command
    shell: Flag = NO
    stdout: str = ""
    stderr: str = ""
    until: Until | None = None


def provisions(command: Command) -> bool:
    """Whether a command calls `sudo` for something that lasts."""
    text = command.value if isinstance(command.value, str) else " ".join(command.value)
    return any(match[2] != "su" for match in _SUDO.finditer(text))


class Execute:
    """The step; also under the name `command`."""

    def __init__(self, step_type: str = "execute") -> None:
        self._type = step_type

    def parse(self, parameters: Mapping[str, Json]) -> ExecuteParameters:
        """The parameters; raises `ConfigError`."""
        parsed = structure(parameters, ExecuteParameters, self._type)
        for key in ("stdout", "stderr"):
            name = getattr(parsed, key)
            if name in (".", "..") or "/" in name or "\0" in name:
                raise ConfigError(
                    f"the parameters of a {self._type!r} step are wrong: {key} is {name!r}, not a plain file name",
                    path=f"$.parameters.{key}",
                )
        return parsed

    async def run(self, context: StepContext, parameters: object) -> None:
        """Run the command; raises `SetupFailed` as the module says, and `GuestError`."""
        assert isinstance(parameters, ExecuteParameters)
        value = parameters.command.value
        command = (
            fill(value, context.screen) if isinstance(value, str) else tuple(fill(x, context.screen) for x in value)
        )
        try:
            result = await self._repeat(context, command, parameters)
        except GuestError as e:
            if not goes_on_without(context, e):
                raise
            context.note(f"{self._type}: {e.message}")
            return  # and keeps no output, as in OSWorld: a checker that wants it has no score
        for name, text in ((parameters.stdout, result.output), (parameters.stderr, result.error)):
            if name:
                context.keep_output(name, text)
        if result.returncode == 0 or (parameters.until and parameters.until.met_by(result)):
            return
        shown = value if isinstance(value, str) else " ".join(value)
        if provisions(parameters.command):
            raise SetupFailed(
                f"{shown[:200]!r} ended with code {result.returncode}, 0 is needed for what sudo provides",
                output=(result.output + result.error)[-_SHOWN:],
                returncode=result.returncode,
            )
        context.note(
            f"{self._type}: {shown[:200]!r} ended with code {result.returncode}: {result.error[-200:].strip()}"
        )

    async def _repeat(
        self, context: StepContext, command: str | tuple[str, ...], parameters: ExecuteParameters
    ) -> CommandResult:
        result = await context.execute(command, shell=bool(parameters.shell))
        if parameters.until is None or parameters.until == Until():
            return result
        with trio.move_on_after(UNTIL_LIMIT_S):
            while not parameters.until.met_by(result):
                await trio.sleep(PAUSE_S)
                result = await context.execute(command, shell=bool(parameters.shell))
            return result
        raise SetupFailed(
            f"{command!r:.200} did not come to {parameters.until!r} within {UNTIL_LIMIT_S:g} s",
            output=(result.output + result.error)[-_SHOWN:],
            returncode=result.returncode,
        )


def _factory() -> Step:
    return Execute()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `execute` step."""
    register("execute", _factory)
