"""Rewards of a batch as columns: what counts, and the numbers that do; everything else is NaN and masked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from drums.reward import Reward


@attrs.frozen
class RewardBatch:
    """One element per reward, in their order; `numpy.asarray` and `torch.tensor` take each column as it is.

    Args:
        scores: the score where `mask` is true, NaN everywhere else: also where an invalid episode had a score, so that
            a mask that was forgotten shows in the first mean.
        valid: whether the episode was valid.
        mask: whether it is valid and has a score: what may be trained on and reported.
    """

    scores: Sequence[float]
    valid: Sequence[bool]
    mask: Sequence[bool]

    def __len__(self) -> int:
        return len(self.scores)

    def mean(self) -> float:
        """The mean score of what counts, NaN when nothing does."""
        kept = [score for score, counts in zip(self.scores, self.mask, strict=True) if counts]
        return math.fsum(kept) / len(kept) if kept else math.nan


def batch_of(rewards: Iterable[Reward | BaseException | None]) -> RewardBatch:
    """The columns of a batch.

    Args:
        rewards: rewards, in any order; an exception stands for the reward that rides along with it, and None, or an
            exception without one, for an episode that has no reward at all: neither valid nor scored.

    Raises:
        TypeError: an element is something else, a number say: its validity is not known.
    """
    scores: list[float] = []
    valid: list[bool] = []
    mask: list[bool] = []
    for index, given in enumerate(rewards):
        reward: Any = getattr(given, "reward", None) if isinstance(given, BaseException) else given
        if reward is not None and not isinstance(reward, Reward):
            raise TypeError(f"element {index} of the batch is {reward!r:.80}, expected a drums.Reward")
        valid.append(reward is not None and reward.valid)
        mask.append(reward is not None and reward.valid and reward.score is not None)
        scores.append(float(reward) if reward is not None and mask[-1] else math.nan)
    return RewardBatch(tuple(scores), tuple(valid), tuple(mask))
