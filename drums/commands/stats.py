"""`drums stats`: how episodes came out, per task and per policy."""

from __future__ import annotations

from typing import Any

import click

from drums.commands.output import json_option, print_json, print_table

COLUMNS = ("episodes", "valid", "invalid", "pending", "valid_rate", "mean_score", "checker_errors")


@click.command()
@click.option("--by", type=click.Choice(["task", "label", "both"]), default="both", show_default=True, help="Groups.")
@click.option("--label", default="policy", show_default=True, metavar="NAME", help="The label that makes the groups.")
@click.option("--since", type=float, metavar="TIME", help="Only episodes since then, in seconds since the epoch.")
@click.option("--all", "with_own", is_flag=True, help="Also drums' own episodes: self-test, demo, trials.")
@json_option("the rows")
def stats(by: str, label: str, since: float | None, with_own: bool, as_json: bool) -> None:
    """Show how episodes came out: verdicts, scores, checker errors, and what made episodes invalid.

    `failures` counts episodes by failed gate and cause: a policy that crashes its desktop shows as `agent`, and so
    does one that breaks checkers in `checker error causes`.

    \b
    drums create e0df059f --label policy=run-7
    drums stats --by label
    """
    from drums.commands.session import running_daemon

    with running_daemon() as client:
        rows = client.stats(by, label, since, all=with_own)
    if as_json:
        print_json(rows)
        return
    names = [name for name in ("task", "label") if by in (name, "both")]
    titles = [label if name == "label" else name for name in names]
    print_table(
        [*titles, *COLUMNS, "checker error causes", "failures"],
        [
            [*(row[name] or "-" for name in names), *(_cell(row[c]) for c in COLUMNS), _causes(row), _failures(row)]
            for row in rows
        ],
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _causes(row: dict[str, Any]) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in row["checker_error_causes"].items()) or "-"


def _failures(row: dict[str, Any]) -> str:
    return ", ".join(f"{x['gate']} ({x['cause'] or '-'}) {x['episodes']}" for x in row["failures"]) or "-"
