"""The tables of `docs/gates.md`, made from the fault matrix: `python -m drums_core.selftest.tables docs/gates.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from drums_core.testing.faults import FAULTS

_TABLE = re.compile(r"<!-- faults of (\w+) -->\n.*?<!-- end -->\n", re.DOTALL)


def fault_table(gate: str) -> str:
    """The faults that a gate has to see, as a Markdown table; of `harmless`, the acts that no gate may flag."""
    lines = ["| fault | what is wrong | made |", "|---|---|---|"]
    if gate == "harmless":
        lines[0] = "| act | what happens | when |"
    for x in FAULTS.values():
        if x.harmless if gate == "harmless" else gate in x.gates:
            also = [other for other in x.gates if other != gate]
            about = x.about + (f" (also fails {', '.join(f'`{other}`' for other in also)})" if also else "")
            lines.append(f"| `{x.name}` | {about.replace('|', chr(92) + '|')} | {x.point}, by the {x.by} |")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """A document with its tables as the matrix has them."""
    return _TABLE.sub(lambda m: f"<!-- faults of {m[1]} -->\n{fault_table(m[1])}<!-- end -->\n", text)


def tables_of(text: str) -> list[str]:
    """The gates whose tables are in a document."""
    return [m[1] for m in _TABLE.finditer(text)]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
