"""What the daemon's JSON is here: a problem is an exception, a reward is a `Reward`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drums import errors
from drums.errors import AuthError, DrumsError

if TYPE_CHECKING:
    from drums._flows import Reply


def _classes(root: type[DrumsError]) -> dict[str, type[DrumsError]]:
    found = {root.code: root}
    for sub in root.__subclasses__():
        # A class without a code of its own is its parent on the wire; others' classes are not the wire's business.
        if sub.__module__ == errors.__name__ and "code" in vars(sub):
            found |= _classes(sub)
    return found


def error_of(reply: Reply) -> DrumsError:
    """The exception for an answer that is no success: by the problem's code, else by the status."""
    if 300 <= reply.status < 400:
        return DrumsError(
            f"{reply.request} was redirected to {reply.headers.get('location', '')!r}; redirects are not followed,"
            " so that the token stays with the daemon it is for",
            hint="set DRUMS_URL to the daemon's own address",
            status=reply.status,
        )
    problem = _problem(reply)
    code = problem.get("code")
    kind = _classes(DrumsError).get(code) if isinstance(code, str) else None
    if kind is None and reply.status == 401:
        kind = AuthError
    facts = dict(problem["facts"]) if isinstance(problem.get("facts"), dict) else {}
    if isinstance(problem.get("errors"), list):
        facts.setdefault("errors", problem["errors"])
    detail = problem.get("detail") or problem.get("title") or f"{reply.request} failed: {reply.excerpt()}"
    if kind is None:
        kind = DrumsError
        facts.update(status=reply.status, code=code)
    if isinstance(facts.get("reward"), dict):
        facts["reward"] = reward_of(facts["reward"])
    error = kind(str(detail), hint=str(problem.get("hint") or ""))
    error.facts = facts  # not as keywords: a fact may have any name
    if kind is DrumsError:
        vars(error).update(status=reply.status, code=code or DrumsError.code)
    return error


def _problem(reply: Reply) -> dict[str, Any]:
    try:
        document = json.loads(reply.body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def reward_of(document: Mapping[str, Any]) -> Any:
    """The `Reward` of a JSON object.

    Raises:
        DrumsError: it is none.
    """
    import cattrs  # 40 ms that only verify needs

    from drums.reward import Reward

    try:
        return cattrs.structure(document, Reward)
    except (cattrs.BaseValidationError, ValueError, TypeError, KeyError) as e:
        faults = cattrs.transform_error(e) if isinstance(e, cattrs.BaseValidationError) else [str(e)]
        raise DrumsError(f"the daemon's reward is not understood: {'; '.join(faults)}") from e
