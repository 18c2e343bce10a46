"""The `update_browse_history` step: write visits into the browser's history.

OSWorld overwrites the history with an empty one that it downloads, and adds the visits to that. Here the browser makes
the file itself, once, without a window, so that it is of the version that it knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs

from drums.errors import SetupFailed
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.parameters import structure

_LIMIT_S = 120.0
# argv: the visits as JSON.
_SCRIPT = r"""
import json, os, sqlite3, subprocess, sys, time

history = os.path.expanduser("~/.config/google-chrome/Default/History")
if not os.path.exists(history):
    command = ["google-chrome", "--headless=new", "--dump-dom", "about:blank"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=90)
    if not os.path.exists(history):
        sys.exit(f"the browser made no history: {done.stderr[-500:]}")
with sqlite3.connect(history, timeout=20) as database:
    for visit in json.loads(sys.argv[1]):
        # The browser counts microseconds from 1601.
        when = int((time.time() - visit["visit_time_from_now_in_seconds"] + 11644473600) * 1000000)
        row = database.execute(
            "INSERT INTO urls (url, title, visit_count, typed_count, last_visit_time, hidden) "
            "VALUES (?, ?, 1, 0, ?, 0)",
            (visit["url"], visit["title"], when),
        )
        database.execute(
            "INSERT INTO visits (url, visit_time, from_visit, transition, segment_id, visit_duration) "
            "VALUES (?, ?, 0, 805306368, 0, 0)",
            (row.lastrowid, when),
        )
"""


@attrs.frozen
class Visit:
    """One page that was visited so many seconds ago."""

    url: str
    title: str
    visit_time_from_now_in_seconds: float


@attrs.frozen
class UpdateBrowseHistoryParameters:
    """The parameters of `update_browse_history`."""

    history: tuple[Visit, ...]


class UpdateBrowseHistory:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> UpdateBrowseHistoryParameters:
        """The parameters; raises `ConfigError`."""
        return structure(parameters, UpdateBrowseHistoryParameters, "update_browse_history")

    async def run(self, context: StepContext, parameters: object) -> None:
        """Write the visits; raises `SetupFailed` and `GuestError`."""
        assert isinstance(parameters, UpdateBrowseHistoryParameters)
        visits = json.dumps([attrs.asdict(visit) for visit in parameters.history])
        result = await context.execute(["/usr/bin/python3", "-c", _SCRIPT, visits], timeout_s=_LIMIT_S)
        if result.returncode != 0:
            raise SetupFailed(
                f"the history was not written: {result.error.strip()[-300:]}", output=result.error[-2000:]
            )


def _factory() -> Step:
    return UpdateBrowseHistory()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `update_browse_history` step."""
    register("update_browse_history", _factory)
