"""The plugin: the tasks of an OSWorld checkout, or drums' own. Its module is imported when a host asks for it."""

from __future__ import annotations

from drums_core.abc import Catalogue
from drums_core.config import HostConfig
from drums_core.hookspecs import RegisterCatalogue, hookimpl


def _catalogue(config: HostConfig) -> Catalogue:
    from drums_osworld.catalogue import OSWorldCatalogue

    return OSWorldCatalogue(config)


@hookimpl
def drums_register_catalogues(register: RegisterCatalogue) -> None:
    """The tasks of an OSWorld checkout, or drums' own."""
    register("osworld_catalogue", _catalogue)
