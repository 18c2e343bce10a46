"""What counts as a score."""

from __future__ import annotations

from drums.errors import CheckerError


def score_of(value: object, *, source: str) -> float:
    """The score that a checker gave, as a float.

    Args:
        value: what the checker returned.
        source: who returned it, for the message.

    Raises:
        CheckerError: `value` is not a finite number (or bool) from 0 to 1; never rounded, clipped or parsed.
    """
    if not isinstance(value, (bool, int, float)):
        message = f"{source} returned {value!r:.200}, not a number from 0 to 1"
        raise CheckerError(message, returned=repr(value)[:200], cause="task")
    if not 0 <= value <= 1:  # nor is NaN
        message = f"{source} returned {str(value)[:200]}, allowed is 0 to 1"
        raise CheckerError(message, returned=repr(value)[:200], cause="task")
    return float(value)
