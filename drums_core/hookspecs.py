"""Every hook of drums. Hooks register lazy factories; the objects that the factories make do the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pluggy

from drums_core.abc import Catalogue, Checker, EventGate, Gate, Step
from drums_core.config import HostConfig
from drums_core.model import Validity
from drums_core.testing.faults.model import Fault

hookspec = pluggy.HookspecMarker("drums")
hookimpl = pluggy.HookimplMarker("drums")


class RegisterGate(Protocol):
    """Registers a gate under its name; the factory is called once, when a host opens."""

    def __call__(self, name: str, factory: Callable[[], Gate | EventGate]) -> None: ...


class RegisterFaults(Protocol):
    """Registers the faults of a gate: the factory is called when they are to be tried (`drums gates selftest`)."""

    def __call__(self, gate: str, factory: Callable[[], Sequence[Fault]]) -> None: ...


class RegisterStep(Protocol):
    """Registers a set-up step type."""

    def __call__(self, step_type: str, factory: Callable[[], Step]) -> None: ...


class RegisterChecker(Protocol):
    """Registers a checker under a name that provenance uses."""

    def __call__(self, name: str, factory: Callable[[HostConfig], Checker]) -> None: ...


class RegisterCatalogue(Protocol):
    """Registers a source of tasks."""

    def __call__(self, name: str, factory: Callable[[HostConfig], Catalogue]) -> None: ...


@hookspec
def drums_register_gates(register: RegisterGate) -> None:
    """Register gates (`drums_core.abc.Gate`, `EventGate`)."""


@hookspec
def drums_register_faults(register: RegisterFaults) -> None:
    """Register the faults (`drums_core.testing.faults.Fault`) that a gate has to see."""


@hookspec
def drums_register_setup_steps(register: RegisterStep) -> None:
    """Register set-up step types (`drums_core.abc.Step`)."""


@hookspec
def drums_register_checkers(register: RegisterChecker) -> None:
    """Register checkers (`drums_core.abc.Checker`)."""


@hookspec
def drums_register_catalogues(register: RegisterCatalogue) -> None:
    """Register task catalogues (`drums_core.abc.Catalogue`)."""


@hookspec
def drums_episode_started(slot: str, episode: str, origin: str) -> None:
    """Observe that an episode began; must not block, decides nothing."""


@hookspec
def drums_episode_judged(slot: str, episode: str, validity: Validity) -> None:
    """Observe an episode's verdict, each time that it changes; must not block, decides nothing."""
