"""The steps that need the operator's account at Google: `googledrive` cleans and fills its Drive, `login` signs in.

drums reaches no account: their parameters are checked, and a set-up that comes to one fails, naming the settings that
the task asks for. Eight of OSWorld's tasks have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from drums.errors import SetupFailed
from drums_core.abc import StepContext
from drums_core.model import Json
from drums_osworld.steps.parameters import structure


@attrs.frozen
class LoginParameters:
    """The parameters of `login`."""

    settings_file: str
    platform: str


@attrs.frozen
class GoogleDriveParameters:
    """The parameters of `googledrive`; `args` has one mapping for each operation."""

    settings_file: str
    operation: tuple[str, ...]
    args: tuple[dict[str, Any], ...]


class AccountStep:
    """Either step.

    Args:
        step_type: its name in tasks.
        into: what its parameters are.
    """

    def __init__(self, step_type: str, into: type[LoginParameters | GoogleDriveParameters]) -> None:
        self._type = step_type
        self._into = into

    def parse(self, parameters: Mapping[str, Json]) -> LoginParameters | GoogleDriveParameters:
        """The parameters; raises `ConfigError`."""
        return structure(parameters, self._into, self._type)

    async def run(self, context: StepContext, parameters: object) -> None:
        """Refuse; raises `SetupFailed`."""
        assert isinstance(parameters, LoginParameters | GoogleDriveParameters)
        raise SetupFailed(
            f"{self._type!r} needs the Google account of {parameters.settings_file!r}, and drums reaches no account",
            hint="leave the task out",
            setting=parameters.settings_file,
            output="",
        )
