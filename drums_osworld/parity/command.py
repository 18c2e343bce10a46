"""`drums osworld parity`: our scores beside those of OSWorld's own code, on siblings of the same desktops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import trio

from drums_core import open_host
from drums_core.commands.output import print_json
from drums_core.config import HostConfig, load_config
from drums_core.host import Host
from drums_core.logs import configure_logging
from drums_core.model import Task
from drums_osworld.catalogue import OSWorldCatalogue
from drums_osworld.files import urls_of
from drums_osworld.parity.comparison import Line, compare_task, report
from drums_osworld.parity.selection import Selection, has_files, select
from drums_osworld.parity.states import without_applications

INTERRUPTED = 130  # as a shell tells of a program that Ctrl-C ended


@click.group()
def osworld() -> None:
    """How drums stands to OSWorld's own code.

    \b
    sudo drums osworld parity 1273e544 --files-only
    """


@osworld.command()
@click.argument("tasks", nargs=-1, metavar="[TASK]...")
@click.option("--image", help="Image to start desktops from; the host's default otherwise.")
@click.option("--files-only", is_flag=True, help="Leave out applications: set-up downloads alone, no postconfig.")
@click.option("--jobs", default=3, type=click.IntRange(1, 16), show_default=True, help="Tasks at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON, at the end.")
def parity(tasks: tuple[str, ...], image: str | None, files_only: bool, jobs: int, as_json: bool) -> None:
    """Score states of these tasks by drums and by OSWorld's unmodified `DesktopEnv.evaluate`, and compare.

    \b
    sudo drums osworld parity --image osworld
    sudo drums osworld parity 1273e544 --files-only

    Each state (untouched, the expected file in place or the task done by a script, wrong results, given up) is scored
    on a copy, in place, and by OSWorld's code in a process of its own on a sibling. Without TASK, all tasks that need
    no live web and no file that this host lacks. Ends with 1 when a score differs, a script of ours does not do what it
    is meant to, or nothing could be compared; with 130 and what was found so far when it is interrupted.
    """
    configure_logging()
    config = load_config()
    catalogue = OSWorldCatalogue(config)
    known = catalogue.tasks()
    named = [catalogue.find(x) for x in tasks]
    selection = Selection(named, {}) if named else select(config, known, files_only=files_only)
    others = urls_of(x for x in known if has_files(config, x))
    lines: list[Line] = []

    def on_line(line: Line) -> None:
        lines.append(line)
        # On standard error with --json, whose output is one document.
        click.echo("\t".join(_row(line)), err=as_json)

    interrupted = False
    try:
        trio.run(_compare, config, selection.chosen, image, files_only, jobs, others, on_line)
    except* KeyboardInterrupt:
        interrupted = True
    found = _whole(selection, lines, interrupted)
    if as_json:
        print_json(found)
    else:
        _print_summary(found)
    if interrupted:
        raise SystemExit(INTERRUPTED)
    if found["differences"] or found["own_solution_fails"] or not found["compared"]:
        raise SystemExit(1)


def _whole(selection: Selection, lines: Sequence[Line], interrupted: bool) -> dict[str, Any]:
    """The report, in the order of the tasks, with those that were not come to."""
    begun = {x.task for x in lines}
    missing = [Line(x.id, "all", problem="interrupted before it") for x in selection.chosen if x.id not in begun]
    order = {x.id: i for i, x in enumerate(selection.chosen)}
    ordered = sorted([*lines, *missing], key=lambda x: order[x.task])
    return {**report(ordered), "left_out": selection.left_out, "interrupted": interrupted}


def _row(line: Line) -> tuple[str, ...]:
    if line.problem:
        return (line.task[:8], line.state, "not run", line.problem)
    return (line.task[:8], line.state, str(line.copy), str(line.reference), line.difference or "equal")


def _print_summary(found: dict[str, Any]) -> None:
    for x in found["own_expected_fails"]:
        click.echo(f"own expected file fails: {x['task'][:8]}: {x['reason']}")
    for task in found["done_already"]:
        click.echo(f"done already untouched: {task[:8]}")
    for x in found["own_solution_fails"]:
        click.echo(f"own solution fails: {x['task'][:8]} {x['state']}: {x['reason']}")
    for reason, ids in found["left_out"].items():
        click.echo(f"left out: {len(ids)} tasks: {reason}")
    click.echo(
        f"{found['compared']} of {found['states']} states of {found['tasks']} tasks compared, "
        f"{len(found['differences'])} differ, {len(found['not_run'])} not run"
    )


async def _compare(
    config: HostConfig,
    chosen: Sequence[Task],
    image: str | None,
    files_only: bool,
    jobs: int,
    others: Sequence[str],
    on_line: Callable[[Line], None],
) -> None:
    limit = trio.CapacityLimiter(jobs)

    async def one(host: Host, task: Task) -> None:
        async with limit:
            try:
                wanted = without_applications(task) if files_only else task
            except ValueError as e:
                on_line(Line(task.id, "all", problem=str(e)))
                return
            await compare_task(host, wanted, others=others, image=image, on_line=on_line)

    async with open_host(config) as host, trio.open_nursery() as nursery:
        for task in chosen:
            nursery.start_soon(one, host, task)
