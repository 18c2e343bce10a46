"""`docs/gates.md` explains every gate, and its tables are those of the fault matrix."""

from __future__ import annotations

from pathlib import Path

from drums_core.selftest.tables import fault_table, tables_of, with_tables
from drums_core.testing.faults import FAULTS
from drums_core.verdict import EVENT_GATES, SPECIFIED_GATES

PAGE = Path(__file__).parents[1] / "docs/gates.md"


def test_the_tables_are_the_matrix() -> None:
    """Made anew, nothing changes: `python -m drums_core.selftest.tables docs/gates.md`."""
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(tables_of(text)) == sorted([*SPECIFIED_GATES, *EVENT_GATES, "harmless"])
    assert with_tables(text) == text
    assert with_tables(text.replace("| `netns` |", "| `other` |")) == text
    for name in FAULTS:
        assert f"| `{name}` |" in text


def test_each_gate_says_what_it_cannot_see() -> None:
    """A section each, with what it proves and what it cannot see."""
    text = PAGE.read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    for gate in (*SPECIFIED_GATES, *EVENT_GATES):
        part = next(part for title, part in sections.items() if gate in title.split(", "))
        assert "**Cannot see**" in part and ("**Prove" in part or "**Is added**" in part)
        assert fault_table(gate) in part
