"""What a probe found."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class Finding:
    """One probe's answer.

    Args:
        name: the probe's name.
        needed: whether desktops cannot run without it; otherwise it is a recommendation.
        ok: whether the host has it.
        observed: what was seen, one line.
        wanted: what is wanted, one line.
        remedy: the command that mends it, or what to do where no command can; empty when ok.
    """

    name: str
    needed: bool
    ok: bool
    observed: str
    wanted: str
    remedy: str = ""

    @property
    def mark(self) -> str:
        """One word: "ok", "missing" or, where it is only recommended, "advice"."""
        return "ok" if self.ok else "missing" if self.needed else "advice"


@attrs.frozen
class Diagnosis:
    """All findings of one run.

    Args:
        findings: in the order of the probes.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that is needed is missing."""
        return all(finding.ok or not finding.needed for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The object that `drums doctor --json` prints."""
        return {"ok": self.ok, "probes": [attrs.asdict(finding) for finding in self.findings]}
