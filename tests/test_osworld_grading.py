"""What counts as a score."""

from __future__ import annotations

import pytest

from drums.errors import CheckerError
from drums_verifiers.grading import score_of


@pytest.mark.parametrize(("value", "score"), [(True, 1.0), (False, 0.0), (0, 0.0), (1, 1.0), (0.25, 0.25)])
def test_score_of_numbers(value: object, score: float) -> None:
    assert score_of(value, source="a test") == score


NO_SCORES = (None, "1", 1.01, -0.1, float("nan"), float("inf"), 2, 7.0, "x" * 100_000, 10**4000, [1.0], 1 + 0j)


@pytest.mark.parametrize("value", NO_SCORES, ids=lambda x: repr(x)[:20])
def test_score_of_anything_else_is_an_error(value: object) -> None:
    with pytest.raises(CheckerError, match="a test returned") as info:
        score_of(value, source="a test")
    assert info.value.cause == "task" and len(info.value.message) < 400
