"""The verdict of an episode: a pure function of its gate results.

Rules (held by property tests): pending while a required gate has no result and none failed; invalid once any gate
failed, required or not; valid when all required ones passed. Results are only ever added, so invalid is final.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drums_core.model import Cause, GateResult, Status, Validity, Verdict

SPECIFIED_GATES = (
    "lock_applied",
    "lock_pre_resume",
    "cgroup",
    "init_identity",
    "mount_table",
    "netns",
    "guest_ready",
    "state_hash",
    "isolation",
    "alive_after_resume",
)
"""The gates that every episode needs; configuration only adds to them."""

EVENT_GATES = ("no_oom_kill", "no_app_crash", "not_quarantined")
"""The gates that are added as failed when something happens; they must be loaded, and have no pass of their own."""


def judge(required: Iterable[str], results: Sequence[GateResult]) -> Validity:
    """The verdict of these results.

    Args:
        required: names of the gates that must have passed.
        results: all results so far, in the order in which they came.
    """
    failures = [r for r in results if r.status is Status.FAIL]
    if failures:
        return Validity(
            Verdict.INVALID,
            bad_gates=tuple(dict.fromkeys(r.gate for r in failures)),
            invalid_reasons=tuple(f"{r.gate}: {r.reason or 'failed'}" for r in failures),
            causes=tuple(dict.fromkeys(r.cause or Cause.INFRASTRUCTURE for r in failures)),
        )
    passed = {r.gate for r in results if r.status is Status.PASS}
    return Validity(Verdict.VALID if set(required) <= passed else Verdict.PENDING)
