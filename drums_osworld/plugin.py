"""The plugin: OSWorld's checker and its tasks. What they need is imported when a host asks for them."""

from __future__ import annotations

from drums_core.abc import Catalogue, Checker
from drums_core.config import HostConfig
from drums_core.hookspecs import RegisterCatalogue, RegisterChecker, hookimpl


def _checker(config: HostConfig) -> Checker:
    from drums_osworld.checker import OSWorldChecker

    return OSWorldChecker(config)


def _catalogue(config: HostConfig) -> Catalogue:
    from drums_osworld.catalogue import OSWorldCatalogue

    return OSWorldCatalogue(config)


@hookimpl
def drums_register_checkers(register: RegisterChecker) -> None:
    """OSWorld's evaluation functions."""
    register("osworld", _checker)


@hookimpl
def drums_register_catalogues(register: RegisterCatalogue) -> None:
    """The tasks of an OSWorld checkout, or drums' own."""
    register("osworld", _catalogue)
