"""What `verify` answers, on both sides of the wire: the runtime makes it, and the client makes it again from JSON."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from drums.errors import CheckerError, InvalidEpisode


class Verdict(enum.StrEnum):
    """An episode's verdict."""

    PENDING = "pending"
    VALID = "valid"
    INVALID = "invalid"


@attrs.frozen
class Reward:
    """What `verify` answers: the fields of the specification's page, and provenance.

    `float(reward)` is the score of a valid reward, and raises for any other: a number alone cannot say that it counts.

    Args:
        score: the checker's result, usually 0.0 or 1.0; None when the checker did not give one.
        valid: whether every gate of the episode passed and the desktop was never quarantined.
        invalid_reasons: why it is not valid, in words; empty when valid.
        verdict: `pending`, `valid` or `invalid`.
        bad_gates: the gates that failed.
        checker_error: set when the checker failed; there is no score.
        checker_error_cause: who brought that about, as far as evidence on the host shows it: `agent`, `task`,
            `infrastructure` or `unknown`; `provenance["checker_error_evidence"]` says what shows it.
        checker_skipped: why the checker did not run.
        provenance: task hash, checker and its version, image digest, checkpoint, drums version, plugins.
    """

    score: float | None
    valid: bool
    invalid_reasons: tuple[str, ...]
    verdict: Verdict
    bad_gates: tuple[str, ...]
    checker_error: str | None = None
    checker_skipped: str | None = None
    checker_error_cause: str | None = None
    provenance: Mapping[str, Any] = attrs.field(factory=dict)

    def __float__(self) -> float:
        """The score.

        Raises:
            InvalidEpisode: the episode is not valid, whatever the score says; the reward rides along.
            CheckerError: it is valid, and there is no score; likewise.
        """
        if not self.valid:
            raise InvalidEpisode(
                f"a reward that is {self.verdict} is no number: {'; '.join(self.invalid_reasons)}",
                hint="leave it out of the batch: drums.batch_of masks such rewards",
                bad_gates=list(self.bad_gates),
                invalid_reasons=list(self.invalid_reasons),
                reward=self,
            )
        if self.score is None:
            raise CheckerError(
                f"a reward without a score is no number: {self.checker_error or self.checker_skipped}",
                hint="leave it out of the batch: drums.batch_of masks such rewards",
                reward=self,
            )
        return float(self.score)

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON's own types, as it travels and as the journal has it."""
        document = attrs.asdict(self)
        document["verdict"] = self.verdict.value
        return {name: list(value) if isinstance(value, tuple) else value for name, value in document.items()}
