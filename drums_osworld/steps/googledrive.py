"""The `googledrive` step: clean or fill the operator's Google Drive. See `account.py`."""

from __future__ import annotations

from drums_core.abc import Step
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_osworld.steps.account import AccountStep, GoogleDriveParameters


def _factory() -> Step:
    return AccountStep("googledrive", GoogleDriveParameters)


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `googledrive` step."""
    register("googledrive", _factory)
