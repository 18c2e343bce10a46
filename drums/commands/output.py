"""What the client's commands share: JSON on request, columns on a terminal, tab-separated fields elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def json_option(what: str) -> Callable[[F], F]:
    """`--json`, given to the command as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=True))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be on a terminal, where long lines are cut; tab-separated fields elsewhere."""
    lines = [list(columns), *([one_line(cell) for cell in row] for row in rows)]
    if not sys.stdout.isatty():
        for line in lines:
            click.echo("\t".join(line))
        return
    import shutil

    width = shutil.get_terminal_size().columns
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()[:width])


def one_line(text: str) -> str:
    """The text without what would break a line or drive a terminal: instructions and reasons are anybody's words."""
    return "".join(c if c.isprintable() else " " for c in text)


def seconds(value: float | None, *, none: str = "never") -> str:
    """A duration for people."""
    if value is None:
        return none
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"
