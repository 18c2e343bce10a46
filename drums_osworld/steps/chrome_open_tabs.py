"""The `chrome_open_tabs` step: open pages in tabs of the browser, and close the empty tab that it began with.

A browser that does not answer fails the set-up, as in OSWorld; a page that does not load is noted.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.browser import tell_browser
from drums_osworld.steps.parameters import structure


@attrs.frozen
class ChromeOpenTabsParameters:
    """The parameters of `chrome_open_tabs`."""

    urls_to_open: tuple[str, ...]


class ChromeOpenTabs:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> ChromeOpenTabsParameters:
        """The parameters; raises `ConfigError`."""
        return structure(parameters, ChromeOpenTabsParameters, "chrome_open_tabs")

    async def run(self, context: StepContext, parameters: object) -> None:
        """Tell the browser; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, ChromeOpenTabsParameters)
        await tell_browser(context, "open", parameters.urls_to_open)


def _factory() -> Step:
    return ChromeOpenTabs()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `chrome_open_tabs` step."""
    register("chrome_open_tabs", _factory)
