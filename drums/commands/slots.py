"""`drums slots`: the desktops of the host."""

from __future__ import annotations

from typing import Any

import click

from drums.commands.output import json_option, one_line, print_json, print_table, seconds


@click.group(invoke_without_command=True)
@json_option("the slots")
@click.pass_context
def slots(ctx: click.Context, as_json: bool) -> None:
    """List the desktops of the host; show one with its gates, or close some.

    \b
    drums slots
    drums slots --json
    drums slots show d-0123456789ab
    drums slots close d-0123456789ab
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"put --json after {ctx.invoked_subcommand!r}", ctx)
        return
    from drums.commands.session import running_daemon

    with running_daemon() as client:
        found = client.slots()
    if as_json:
        print_json({"slots": found})
        return
    rows = [
        [s["id"], s["state"], s["verdict"] or "-", s["task"] or "-", seconds(s["expires_in"]), s["reason"] or ""]
        for s in found
    ]
    print_table(["id", "state", "verdict", "task", "closes in", "reason"], rows)


@slots.command()
@click.argument("slot")
@json_option("the slot and its gate report")
def show(slot: str, as_json: bool) -> None:
    """Show one desktop and the gate report of its episode.

    \b
    drums slots show d-0123456789ab
    drums slots show d-0123456789ab --json
    """
    from drums.commands.session import running_daemon

    with running_daemon() as client:
        env = client.slot(slot)
        described = env.refresh()
        report = env.gates() if described["episode"] else None
    if as_json:
        print_json({"slot": described, "report": report})
        return
    for name, value in described.items():
        click.echo(f"{name:12} {one_line('-' if value is None else str(value))}")
    if report is not None:
        click.echo()
        _print_gates(report)


def _print_gates(report: dict[str, Any]) -> None:
    rows = [[g["gate"], g["status"], g["phase"], g.get("reason") or ""] for g in report["gates"]["gates"]]
    print_table(["gate", "status", "phase", "reason"], rows)


@slots.command()
@click.argument("slot", nargs=-1, required=True)
@json_option("what was closed")
def close(slot: tuple[str, ...], as_json: bool) -> None:
    """Close desktops; what they hold is gone.

    \b
    drums slots close d-0123456789ab
    drums slots close d-0123456789ab d-ba9876543210 --json
    """
    from drums.commands.session import running_daemon

    with running_daemon() as client:
        for name in slot:
            client.slot(name).close()
            if not as_json:
                click.echo(f"closed {one_line(name)}")
    if as_json:
        print_json({"closed": list(slot)})
