"""What `verify` answers, on both sides of the wire: the runtime makes it, and the client makes it again from JSON."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs


class Verdict(enum.StrEnum):
    """An episode's verdict."""

    PENDING = "pending"
    VALID = "valid"
    INVALID = "invalid"


@attrs.frozen
class Reward:
    """What `verify` answers: the fields of the specification's page, and provenance.

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
