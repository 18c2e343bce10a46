"""A verifier's function on a recorded end state, in this process: no host, no root, no sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drums.errors import CheckerError
from drums_core.testing.end_state import EndState
from drums_core.testing.fake_desktop import FakeDesktop, NotRecorded, Unanswered
from drums_verifiers.grading import score_of
from drums_verifiers.verifier_job import call

_GIVE_UP = "FAIL"


def score_state(function: Callable[..., Any], state: EndState) -> float:
    """What a function scores an end state, as a host would: called with the task's options, awaited, and judged.

    Raises:
        CheckerError: it raised, returned no score, asked what the state does not have, or the desktop did not answer.
    """
    if state.last_action == _GIVE_UP:
        return 0.0  # as the host does, without asking the verifier
    name = f"the verifier's function {state.function!r}"
    try:
        answer = call(function, FakeDesktop(state), state.task(), dict(state.options))
    except Unanswered as e:
        raise CheckerError(f"could not ask the desktop: {e}") from e
    except NotRecorded as e:
        raise CheckerError(str(e), hint="add the command or call to its state.toml") from e
    except Exception as e:
        raise CheckerError(f"{name} raised {type(e).__name__}: {e}") from e
    return score_of(answer["score"], source=name)
