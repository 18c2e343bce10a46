"""A reward is no number by mistake: `float`, batches with masks, and the form that is written down."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

import drums
from drums.errors import CheckerError, InvalidEpisode
from drums.reward import Reward, Verdict

VALID = Reward(0.25, True, (), Verdict.VALID, (), provenance={"task": "t"})
INVALID = Reward(1.0, False, ("netns: why",), Verdict.INVALID, ("netns",))
BROKEN = Reward(None, True, (), Verdict.VALID, (), checker_error="it raised")
PENDING = Reward(1.0, False, (), Verdict.PENDING, ())


def test_float_of_a_valid_reward() -> None:
    """Its score, also a 0."""
    assert float(VALID) == 0.25
    assert float(Reward(0, True, (), Verdict.VALID, ())) == 0.0


@pytest.mark.parametrize(
    ("reward", "error", "text"),
    [
        (INVALID, InvalidEpisode, "a reward that is invalid is no number: netns: why"),
        (PENDING, InvalidEpisode, "a reward that is pending is no number"),
        (BROKEN, CheckerError, "a reward without a score is no number: it raised"),
    ],
)
def test_float_of_any_other_raises(reward: Reward, error: type[Exception], text: str) -> None:
    """The same two errors as of a strict verify, with the reward."""
    with pytest.raises(error, match=text) as caught:
        float(reward)
    assert getattr(caught.value, "reward", None) is reward
    with pytest.raises(error):
        math.fsum([VALID, reward])


def test_to_dict_is_json() -> None:
    """It travels as JSON, and the client makes the reward of it again."""
    from drums._answers import reward_of

    for reward in (VALID, INVALID, BROKEN, PENDING):
        document = reward.to_dict()
        assert json.loads(json.dumps(document)) == document
        assert type(document["verdict"]) is str and type(document["bad_gates"]) is list
        assert reward_of(document) == reward


def test_a_batch() -> None:
    """NaN wherever a number would not count, whatever number there was."""
    batch = drums.batch_of([VALID, INVALID, BROKEN, None, InvalidEpisode("x", reward=INVALID), ValueError(), PENDING])
    assert list(batch.valid) == [True, False, True, False, False, False, False]
    assert list(batch.mask) == [True, False, False, False, False, False, False]
    assert batch.scores[0] == 0.25 and all(math.isnan(x) for x in batch.scores[1:])
    assert len(batch) == 7 and batch.mean() == 0.25
    assert math.isnan(math.fsum(batch.scores))  # a mask that was forgotten shows
    assert math.isnan(drums.batch_of([INVALID]).mean()) and len(drums.batch_of([])) == 0


@pytest.mark.parametrize("given", [1.0, {"score": 1.0}, "1"])
def test_a_batch_of_something_else(given: Any) -> None:
    """A number has lost its validity already."""
    with pytest.raises(TypeError, match="element 1 of the batch"):
        drums.batch_of([VALID, given])


def test_columns_are_plain() -> None:
    """Python's own floats and bools in sequences, which every array library takes; none of them is imported."""
    code = """
import sys
import drums
from drums.reward import Reward, Verdict
batch = drums.batch_of([Reward(1, True, (), Verdict.VALID, ()), None])
assert [type(x) for x in batch.scores] == [float] * 2 and {type(x) for x in (*batch.valid, *batch.mask)} == {bool}
assert not {"numpy", "torch", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
