"""What the steps about a window have in common."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from drums.errors import ConfigError
from drums_core.model import Json
from drums_osworld.steps.parameters import NO, Flag, structure


@attrs.frozen
class WindowParameters:
    """Which window: a part of its title, the whole of it (`strict`), or its class (`by_class`)."""

    window_name: str
    strict: Flag = NO
    by_class: Flag = NO

    def describe(self) -> str:
        """The window in words."""
        how = "the class" if self.by_class else "the title"
        return f"window with {how} {self.window_name!r}" + (" exactly" if self.strict else "")


def parse_window(parameters: Mapping[str, Json], step_type: str) -> WindowParameters:
    """The parameters; raises `ConfigError`."""
    parsed = structure(parameters, WindowParameters, step_type)
    if not parsed.window_name or "\0" in parsed.window_name:
        raise ConfigError(
            f"the parameters of a {step_type!r} step are wrong: window_name is {parsed.window_name!r}, "
            "a title or a class is needed",
            path="$.parameters.window_name",
        )
    return parsed
