"""The `chrome_close_tabs` step: close the tabs that show certain pages.

A browser that does not answer fails the set-up, as in OSWorld; a page that no tab shows is noted.
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
class ChromeCloseTabsParameters:
    """The parameters of `chrome_close_tabs`."""

    urls_to_close: tuple[str, ...]


class ChromeCloseTabs:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> ChromeCloseTabsParameters:
        """The parameters; raises `ConfigError`."""
        return structure(parameters, ChromeCloseTabsParameters, "chrome_close_tabs")

    async def run(self, context: StepContext, parameters: object) -> None:
        """Tell the browser; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, ChromeCloseTabsParameters)
        await tell_browser(context, "close", parameters.urls_to_close)


def _factory() -> Step:
    return ChromeCloseTabs()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `chrome_close_tabs` step."""
    register("chrome_close_tabs", _factory)
