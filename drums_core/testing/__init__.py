"""What tests of drums, and of plugins for it, are made with. Importable without pytest; see `docs/plugins.md`.

Names are imported when they are first used: the runtime has modules of its own in here, and needs none of these.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drums_core.testing.conformance import Check, Conformance, require
    from drums_core.testing.conformance_gates import check_event_gate, check_gate, check_gate_shape
    from drums_core.testing.conformance_steps import check_step, check_step_context
    from drums_core.testing.conformance_verifiers import check_verifier
    from drums_core.testing.end_state import EndState, load_state, load_states
    from drums_core.testing.fake_context import FakeStepContext
    from drums_core.testing.fake_desktop import FakeDesktop
    from drums_core.testing.recording import RecordingSystem, recording_system

__all__ = [
    "Check",
    "Conformance",
    "EndState",
    "FakeDesktop",
    "FakeStepContext",
    "RecordingSystem",
    "check_event_gate",
    "check_gate",
    "check_gate_shape",
    "check_step",
    "check_step_context",
    "check_verifier",
    "load_state",
    "load_states",
    "recording_system",
    "require",
]

_PLACES = {
    "conformance": ("Check", "Conformance", "require"),
    "conformance_gates": ("check_event_gate", "check_gate", "check_gate_shape"),
    "conformance_steps": ("check_step", "check_step_context"),
    "conformance_verifiers": ("check_verifier",),
    "end_state": ("EndState", "load_state", "load_states"),
    "fake_context": ("FakeStepContext",),
    "fake_desktop": ("FakeDesktop",),
    "recording": ("RecordingSystem", "recording_system"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

# Type checkers read the imports above; to them this would make every name one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
