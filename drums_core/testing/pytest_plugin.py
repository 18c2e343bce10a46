"""Fixtures for tests of plugins. In a conftest.py: `pytest_plugins = ["drums_core.testing.pytest_plugin"]`.

No entry point of pytest's loads it: every other test run of an environment with drums in it would pay for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from drums_core.plugins import Plugins, build_manager
from drums_core.testing.end_state import EndState
from drums_core.testing.fake_context import FakeStepContext
from drums_core.testing.fake_desktop import FakeDesktop
from drums_core.testing.recording import RecordingSystem
from drums_core.testing.recording import recording_system as _recording


@pytest.fixture
def fake_desktop() -> Callable[[EndState], FakeDesktop]:
    """Makes a verifier's view of a recorded end state."""
    return FakeDesktop


@pytest.fixture
def step_context() -> FakeStepContext:
    """What a set-up step is given; no desktop behind it."""
    return FakeStepContext()


@pytest.fixture
def recording_system() -> Iterator[RecordingSystem]:
    """Privileged operations are kept, and not carried out."""
    with _recording() as recorder:
        yield recorder


@pytest.fixture
def fresh_manager() -> Callable[..., Plugins]:
    """Makes a manager with the named plugins and nothing that is installed: `fresh_manager(hostname=module)`."""

    def make(**plugins: object) -> Plugins:
        return build_manager(list(plugins.items()), ambient=False)

    return make
