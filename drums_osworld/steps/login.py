"""The `login` step: sign in to a site with the operator's account. See `account.py`."""

from __future__ import annotations

from drums_core.abc import Step
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_osworld.steps.account import AccountStep, LoginParameters


def _factory() -> Step:
    return AccountStep("login", LoginParameters)


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `login` step."""
    register("login", _factory)
