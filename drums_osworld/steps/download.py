"""The `download` step: put files that the task names by URL into the desktop, from the host's mirror or store.

A file that cannot be had, or is not what the mirror's manifest says, fails the set-up: a desktop never gets an empty or
a partial one.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from drums.errors import ConfigError
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.parameters import structure


@attrs.frozen
class File:
    """One file: where it comes from, and its path in the desktop."""

    url: str
    path: str


@attrs.frozen
class DownloadParameters:
    """The parameters of `download`."""

    files: tuple[File, ...]


class Download:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> DownloadParameters:
        """The parameters; raises `ConfigError`."""
        parsed = structure(parameters, DownloadParameters, "download")
        for index, file in enumerate(parsed.files):
            for key, value in (("url", file.url), ("path", file.path)):
                if not value.strip() or "\0" in value:
                    raise ConfigError(
                        f"the parameters of a 'download' step are wrong: {key} of file {index} is {value!r}",
                        path=f"$.parameters.files[{index}].{key}",
                    )
        return parsed

    async def run(self, context: StepContext, parameters: object) -> None:
        """Put every file into the desktop; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, DownloadParameters)
        for file in parameters.files:
            await context.upload(file.path, await context.fetch(file.url))


def _factory() -> Step:
    return Download()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `download` step."""
    register("download", _factory)
