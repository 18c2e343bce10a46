"""Every recorded end state, and what every verifier has to stand."""

from __future__ import annotations

from pathlib import Path

from drums_verifier_example import files

from drums_core.testing import check_verifier, load_states, require
from drums_verifiers.trial import score_state

STATES = load_states(Path(__file__).parents[1] / "states")


def test_the_recorded_states() -> None:
    require(check_verifier(lambda state: score_state(getattr(files, state.function), state), STATES))
