"""`drums plugins`: what is installed, from which package, and why something is not in use."""

from __future__ import annotations

import attrs
import click

from drums_core.commands.output import print_json, print_table
from drums_core.plugins import build_manager


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the plugins as JSON, tracebacks included.")
def plugins(as_json: bool) -> None:
    """List gates, set-up steps, checkers and catalogues with the packages that provide them.

    Exit code 1 when a plugin is broken.
    """
    found = build_manager()
    if as_json:
        print_json({"plugins": [{**attrs.asdict(r), "ok": r.ok} for r in found.records]})
    else:
        rows = [[r.group, r.name, f"{r.distribution} {r.version}", r.error or "ok"] for r in found.records]
        print_table("plugins", ["group", "name", "package", "state"], rows)
    if found.broken():
        raise SystemExit(1)
