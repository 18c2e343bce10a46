"""What tests of drums, and of plugins for it, are made with. Importable without pytest; see `docs/plugins.md`."""

from drums_core.testing.conformance import Check, Conformance, require
from drums_core.testing.conformance_verifiers import check_verifier
from drums_core.testing.end_state import EndState, load_state, load_states
from drums_core.testing.fake_desktop import FakeDesktop

__all__ = [
    "Check",
    "Conformance",
    "EndState",
    "FakeDesktop",
    "check_verifier",
    "load_state",
    "load_states",
    "require",
]
