"""The suite of an operator's verifier: its recorded end states, and what every verifier has to stand.

from drums_core.testing import check_verifier, load_states, require
from drums_verifiers.trial import score_state

require(check_verifier(lambda state: score_state(checks.renamed, state), load_states(Path("states"))))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs

from drums.errors import CheckerError
from drums_core.testing.conformance import Check, checked, expect
from drums_core.testing.conformance_desktop import CALLS, TARGET
from drums_core.testing.end_state import CASES, Call, Command, EndState, Entry, file, folder, link

_TOLERANCE = 1e-9
Score = Callable[[EndState], float]
"""The score of an end state; raises `CheckerError` where there is none."""


def check_verifier(score: Score, states: Sequence[EndState]) -> list[Check]:
    """Every rule, for every function that the states name.

    Each function needs a state of each case: a *solution* scores 1, an *untouched* start and a plausible *wrong* answer
    score less, a *damaged* state is an error; each scores what it expects, twice the same; and a desktop that answers
    nothing is an error, whatever the state. A function that asks the desktop nothing fails that last rule.
    """
    checks: list[Check] = []
    for function in dict.fromkeys(state.function for state in states):
        mine = [state for state in states if state.function == function]
        missing = [case for case in CASES if case not in {state.case for state in mine}]
        fault = f"missing: {', '.join(missing)}" if missing else ""
        checks.append(Check(f"{function}: there is a state of each case", fault))
        for state in mine:
            name = f"{function}, {state.name or state.case}"
            checks.append(checked(f"{name}: it expects what its case means", partial(_case, state)))
            checks.append(checked(f"{name}: it scores {state.expect}", partial(_scores, score, state)))
            if state.expect != "error" and state.last_action != "FAIL":
                silent = attrs.evolve(state, unanswered=True)
                checks.append(checked(f"{name}: no answer is no score", partial(_refuses, score, silent)))
    return checks


def _case(state: EndState) -> None:
    if state.case == "damaged":
        expect(state.expect == "error", f'a damaged state expects {state.expect!r}, "error" is meant')
    elif state.case == "solution":
        expect(state.expect == 1, f"a solution expects {state.expect!r}, 1 is meant")
    else:
        expect(state.expect != "error" and state.expect < 1, f"it expects {state.expect!r}, less than 1 is meant")


def _scores(score: Score, state: EndState) -> None:
    if state.expect == "error":
        _refuses(score, state)
        return
    for again in ("", " at the second time"):
        found = score(state)
        expect(abs(found - state.expect) <= _TOLERANCE, f"scored {found}{again}, expected {state.expect}")


def _refuses(score: Score, state: EndState) -> None:
    try:
        found = score(state)
    except CheckerError:
        return
    expect(False, f"scored {found}, an error was to be raised")


def desktop_suite_state() -> EndState:
    """What `conformance_desktop.PREPARE` makes, and a browser that answers as it says, as an end state."""
    suite: dict[str, Entry] = {
        "text": file("héllo\n", mode=0o640),
        "empty": file(),
        "latin": file(b"\xff"),
        "link": link("text"),
        "dangling": link("nowhere"),
        "way": link("folder"),
        "pipe": Entry("special"),
        "folder/inner/deep": file(),
    }
    evaluate, wrong = CALLS["Runtime.evaluate"], CALLS["No.such"]
    return EndState(
        case="solution",
        function="desktop_suite",
        expect=1.0,
        last_action="DONE",
        clipboard="copied",
        files={"/etc": folder(), **{f"suite/{name}": entry for name, entry in suite.items()}},
        commands=[
            Command(["/bin/echo", "$HOME"], "$HOME\n"),
            Command("echo $HOME; exit 3", "/home/user\n", returncode=3),
            Command(["/usr/bin/id", "-u"], "1000\n"),
        ],
        targets=[TARGET],
        calls=[
            Call("Runtime.evaluate", {"expression": "3+4"}, evaluate["result"]),
            Call("No.such", fault=str(wrong["error"]["message"])),
        ],
    )
