"""The plugin: OSWorld's evaluation functions as a checker. What it needs is imported when a host asks for it."""

from __future__ import annotations

from drums_core.abc import Checker
from drums_core.config import HostConfig
from drums_core.hookspecs import RegisterChecker, hookimpl


def _checker(config: HostConfig) -> Checker:
    from drums_osworld.checker import OSWorldChecker

    return OSWorldChecker(config)


@hookimpl
def drums_register_checkers(register: RegisterChecker) -> None:
    """OSWorld's evaluation functions."""
    register("osworld_checker", _checker)
