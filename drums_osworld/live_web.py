"""Which tasks need the live web: a rule over their documents, and a list of those that no rule finds.

Desktops have no network. In such a task an honest agent could only get 0.0, which is to mean that the agent failed; so
it is refused (`ImageUnsuitable`).
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drums_core.model import SetupStep
from drums_osworld.applications import getters_of, steps_of
from drums_osworld.support import probes

_FILE = Path(__file__).with_name("live_web.toml")
# What speaks of it: steps, and getters that load a page.
_STEPS = frozenset(("googledrive", "login"))
_GETTERS = frozenset(
    ("googledrive_file", "gotoRecreationPage_and_get_html_content", "info_from_website", "pdf_from_url", "page_info")
)


def needs_web(task: str, instruction: str, config: Sequence[SetupStep], evaluator: Mapping[str, Any]) -> bool:
    """Whether a task cannot be set up or done without the live web.

    Args:
        task: its id.
        instruction: what the agent is told.
        config: its set-up.
        evaluator: its evaluator's document.
    """
    return task in listed() or tells_of_web(instruction, config, evaluator)


def tells_of_web(instruction: str, config: Sequence[SetupStep], evaluator: Mapping[str, Any]) -> bool:
    """Whether a document tells that its task needs the live web: its pages, an account there, or a marketplace.

    A URL in the instruction is a page or a file that the agent is to go to: so it is in each of OSWorld's tasks that
    have one. Hosts alone (`funbrain.com`, `outlook.com`) are names of settings and accounts, too, and tell nothing.
    """
    if any(_is_remote(x) for x in re.findall(r"https?://\S+", instruction)):
        return True
    if any("--list-extensions" in text for text, _ in probes(evaluator)) and ".vsix" not in str(config):
        return True  # an extension of VS Code that no file of the task holds
    for kind, parameters in steps_of(config, evaluator):
        if kind in _STEPS:
            return True
        if kind == "chrome_open_tabs" and any(_is_remote(x) for x in parameters.get("urls_to_open") or ()):
            return True
    return any(getter in _GETTERS for getter in getters_of(evaluator))


@functools.cache
def listed() -> Mapping[str, str]:
    """The ids of tasks that need it although their documents do not tell, and for what."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def _is_remote(url: object) -> bool:
    # One without a scheme is the web's, as browsers read it.
    return re.match(r"(file|about|chrome|data):|https?://(localhost|127\.0\.0\.1)\b", str(url)) is None
