"""Findings that a person can read: one line with a few examples, and details of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from drums_core.model import Finding, Json, failed

EXAMPLES = 3
DETAILS = 20
_EXAMPLE_CHARACTERS = 200


def some(items: Sequence[object], limit: int = EXAMPLES) -> str:
    """The first few of the items in words, and how many more there are."""
    shown = [_short(str(x)) for x in items[:limit]]
    return "; ".join(shown) + (f"; and {len(items) - limit} more" if len(items) > limit else "")


def bounded(items: Sequence[Json]) -> Json:
    """The first `DETAILS` items as JSON, the last of them saying how many are left out."""
    if len(items) <= DETAILS:
        return list(items)
    return [*items[: DETAILS - 1], f"... and {len(items) - DETAILS + 1} more"]


def differs(what: str, differences: Sequence[str]) -> Finding:
    """The failed finding of evidence that is not equal."""
    return failed(
        f"{what} differs from the checkpoint's in {len(differences)} places: {some(differences)}"
        if len(differences) != 1
        else f"{what} differs from the checkpoint's: {some(differences)}",
        observed=bounded(differences),
    )


def no_evidence(what: str, evidence: Json) -> Finding:
    """The failed finding of a gate whose evidence is not there or not of its form."""
    return failed(f"the checkpoint holds no usable evidence of {what}: {_short(repr(evidence))}")


def _short(text: str) -> str:
    return text if len(text) <= _EXAMPLE_CHARACTERS else text[: _EXAMPLE_CHARACTERS - 3] + "..."
