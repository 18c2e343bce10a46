"""`drums tasks`: what the host can set up and score."""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from typing import Any

import click

import drums
from drums.commands.output import json_option, one_line, print_json, print_table

_MORE = "drums.commands.tasks"


class _Tasks(click.Command):
    """`drums tasks`, with the host's subcommands: found by entry point, as the client needs none of them."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> click.Context:
        """The context of a subcommand where the first argument is one: no task's id is that short."""
        for entry in metadata.entry_points(group=_MORE):
            if args[:1] == [entry.name]:
                try:
                    command: click.Command = entry.load()
                except ImportError as e:
                    raise click.ClickException(f"{entry.name!r} needs more than the client: {e}") from e
                return command.make_context(f"{info_name} {entry.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Tasks)
@click.argument("task", required=False)
@click.option("--domain", metavar="NAME", help="Only the tasks of this domain.")
@click.option("--image", metavar="NAME", help="Only the tasks that run in desktops of this image.")
@click.option("--unsupported", is_flag=True, help="Only the tasks that this host cannot run, with the reason.")
@json_option("the tasks")
def tasks(task: str | None, domain: str | None, image: str | None, unsupported: bool, as_json: bool) -> None:
    """List the tasks that the host serves, or show one.

    TASK is a task's id, or 8 or more characters of it.

    \b
    drums tasks --domain os
    drums tasks e0df059f
    drums tasks --image osworld
    drums tasks --unsupported
    drums tasks fetch --help    bring the files that tasks name onto this host
    drums tasks --json | jq '.tasks[] | select(.supported) | .id'

    Where no daemon answers and this is root on a worker host, one is started for the answer.
    """
    with drums.connect() as client:
        if task is not None:
            _show(client.task(task), as_json)
            return
        found = [
            t
            for t in client.tasks()
            if (domain is None or t["domain"] == domain)
            and (image is None or (image in t["images"] and t["supported"]))
            and not (unsupported and t["supported"])
        ]
        broken = client.broken_tasks()
    if as_json:
        print_json({"tasks": found, "broken": broken})
        return
    rows = [[t["id"], t["domain"], "yes" if t["supported"] else "no", _about(t, unsupported)] for t in found]
    print_table(["id", "domain", "supported", "reason" if unsupported else "instruction"], rows)
    domains = ", ".join(f"{count} {name}" for name, count in Counter(t["domain"] for t in found).most_common())
    supported = sum(t["supported"] for t in found)
    click.echo(f"{len(found)} tasks, {supported} supported ({domains})", err=True)
    for path, reason in broken.items():
        click.echo(one_line(f"broken: {path}: {reason}"), err=True)


def _about(task: dict[str, object], unsupported: bool) -> str:
    return str(task["unsupported_reason"] if unsupported else task["instruction"])


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _show(task: dict[str, object], as_json: bool) -> None:
    if as_json:
        print_json(task)
        return
    evaluator = task["evaluator"]
    func = evaluator.get("func") if isinstance(evaluator, dict) else None
    lines = {
        "id": task["id"],
        "domain": task["domain"],
        "instruction": task["instruction"],
        "supported": "yes" if task["supported"] else f"no: {task['unsupported_reason']}",
        "needs": ", ".join(map(str, _list(task["applications"]))) or "no application",
        "images": ", ".join(map(str, _list(task["images"])))
        or "none: it needs the live web, or an application that they lack",
        "checker": func if isinstance(func, str) else ", ".join(map(str, func or ())),
        "remarks": "; ".join(map(str, _list(task["remarks"]))) or "none",
        "source": task["source"],
        "sha256": task["sha256"],
    }
    for name, value in lines.items():
        click.echo(f"{name:12} {one_line(str(value))}")
