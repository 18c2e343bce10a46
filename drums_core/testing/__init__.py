"""What tests of drums, and of plugins for it, are made with. Importable without pytest; see `docs/plugins.md`."""

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
