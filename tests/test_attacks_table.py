"""`docs/trust.md` is the table of the attack suite: complete, its tests are there, and all kinds are tried."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import test_attacks

TESTS = Path(__file__).parent
TRUST = TESTS.parent / "docs/trust.md"
KINDS = {*map(str, range(1, 13)), *(f"B{x}" for x in (*range(21, 30), 31, 32))}
NO_ATTACKS = {"test_nothing_is_left", "test_the_table_and_the_suite_are_one", "test_every_kind_is_tried"}


@attrs.frozen
class Row:
    """An attack's row."""

    name: str
    kinds: frozenset[str]
    tests: frozenset[str]


def cells() -> Iterator[list[str]]:
    for line in TRUST.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in cells():
        if len(row) == 5 and row[0].startswith("`"):
            name, kinds, _, _, tests = row
            name = name.strip("`")
            assert name not in found, f"{name} has two rows"
            named = re.findall(r"`(test_\w+\.py::test_\w+)`", tests)
            found[name] = Row(name, frozenset(kinds.split(", ")), frozenset(named))
    return found


def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_table_and_the_suite_are_one() -> None:
    """Each attack has a row, each row tests that are there, each test of the suite a row."""
    table = rows()
    suite = {*test_attacks.FORGERIES, *test_attacks.NO_SCORE, *test_attacks.OTHERS, "fork-bomb", "memory-hog"}
    assert suite <= set(table), suite - set(table)
    named = {x for row in table.values() for x in row.tests}
    for row in table.values():
        assert row.tests, f"{row.name} names no test"
    for test in named:
        file, function = test.split("::")
        assert function in functions(file), f"{test} is not there"
    files = sorted(x.name for x in TESTS.glob("test_attacks*.py"))
    own = {f"{file}::{x}" for file in files for x in functions(file) if x.startswith("test_") and x not in NO_ATTACKS}
    assert own <= named, own - named


def test_every_kind_is_tried() -> None:
    """Each of the twelve and each report is some row's, no row has another, and the document says what they are."""
    table = rows()
    assert {kind for row in table.values() for kind in row.kinds} == KINDS
    assert {row[0] for row in cells() if row[0] in KINDS} == KINDS
