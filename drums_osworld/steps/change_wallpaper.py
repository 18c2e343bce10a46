"""The `change_wallpaper` step: show a picture of the desktop's as its wallpaper.

What fails is noted, as OSWorld logs it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.parameters import structure

# Relative paths begin at the home, as in the guest server.
_SCRIPT = (
    'test -f "$1" && path=$(realpath -- "$1") && gsettings set org.gnome.desktop.background picture-uri "file://$path"'
)


@attrs.frozen
class ChangeWallpaperParameters:
    """The parameters of `change_wallpaper`."""

    path: str


class ChangeWallpaper:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> ChangeWallpaperParameters:
        """The parameters; raises `ConfigError`."""
        return structure(parameters, ChangeWallpaperParameters, "change_wallpaper")

    async def run(self, context: StepContext, parameters: object) -> None:
        """Change it; raises `GuestError`."""
        assert isinstance(parameters, ChangeWallpaperParameters)
        result = await context.execute(["sh", "-c", _SCRIPT, "sh", parameters.path])
        if result.returncode != 0:
            context.note(f"change_wallpaper: {parameters.path!r} is no wallpaper: {result.error[-200:].strip()}")


def _factory() -> Step:
    return ChangeWallpaper()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `change_wallpaper` step."""
    register("change_wallpaper", _factory)
