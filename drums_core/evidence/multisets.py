"""Evidence that is a multiset: entries without an order, of which some may be there twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from drums_core.model import Json


def difference(
    expected: Json, observed: Json, describe: Callable[[Iterable[Json]], str]
) -> tuple[list[str], list[str]]:
    """The entries that are missing and those that are extra, in words.

    Args:
        expected: a list of entries, each a list of numbers and strings.
        observed: the like.
        describe: puts one entry into words.
    """
    wanted, have = (Counter(tuple(x) for x in side) for side in (expected, observed))
    return (
        [describe(x) for x in sorted((wanted - have).elements(), key=str)],
        [describe(x) for x in sorted((have - wanted).elements(), key=str)],
    )
