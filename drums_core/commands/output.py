"""What commands share: JSON on request, tables and progress bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click


def print_json(document: Any) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=True, default=str))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: drawn by rich on a terminal, tab-separated elsewhere."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            click.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """A function of (what is done, fraction 0 to 1): a bar on a terminal, lines elsewhere, on standard error."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            job = bar.add_task(title, total=1.0)
            yield lambda text, part: bar.update(job, completed=part, description=f"{title}: {text[:60]}")
        return
    last = [-1.0]

    def line(text: str, part: float) -> None:
        if part - last[0] >= 0.1 or part >= 1.0:
            last[0] = part
            click.echo(f"{title}: {part:4.0%} {text[:100]}", err=True)

    yield line
