"""`drums plugins`: what is installed, from which package, and why something is not in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import click

from drums_core.commands.output import print_json, print_table


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the plugins as JSON, tracebacks included.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """List gates, set-up steps, checkers, catalogues and verifiers with the packages that provide them.

    Each is loaded for that, here, by this command; `sha256` is that of its package's files. Exit code 1 when one is
    broken.

    \b
    drums plugins --json
    drums plugins reload
    """
    if ctx.invoked_subcommand is not None:
        return
    from drums_core.abc import PackagedChecker
    from drums_core.config import load_config
    from drums_core.plugins import build_manager

    found = build_manager()
    records = list(found.records)
    config = load_config()
    for factory, _ in found.registry.checkers.values():
        checker = factory(config)
        if isinstance(checker, PackagedChecker):
            records += checker.installed()
    _show([{**attrs.asdict(r), "ok": r.ok} for r in records], as_json)


@plugins.command()
@click.option("--json", "as_json", is_flag=True, help="Print the plugins as JSON, tracebacks included.")
def reload(as_json: bool) -> None:
    """Let the daemon find verifiers anew, and list what it then has.

    New and changed verifiers score the episodes that begin from now on; those under way keep what they began with. A
    gate, set-up step or checker that has changed is marked: the daemon uses it after a restart.

    \b
    drums plugins reload
    drums plugins reload --json
    """
    from drums.commands.session import running_daemon

    with running_daemon() as client:
        found = client.reload_plugins()
    _show(found, as_json)


def _show(records: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"plugins": records})
    else:
        rows = [
            [
                r["group"],
                r["name"],
                f"{r['distribution']} {r['version']}",
                r["sha256"][:12] or "-",
                r["error"] or r["note"] or "ok",
            ]
            for r in records
        ]
        print_table("plugins", ["group", "name", "package", "sha256", "state"], rows)
    if not all(r["ok"] for r in records):
        raise SystemExit(1)
