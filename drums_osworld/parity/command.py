"""`drums osworld parity`: our scores beside those of OSWorld's own code, on siblings of the same desktops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click
import trio

from drums.errors import SetupFailed
from drums_core import open_host
from drums_core.commands.output import print_json, print_table, progress_bar
from drums_core.config import HostConfig, load_config
from drums_core.host import Host
from drums_core.logs import configure_logging
from drums_core.model import Task
from drums_osworld.catalogue import OSWorldCatalogue
from drums_osworld.files import urls_of
from drums_osworld.parity.comparison import Line, compare_task, report
from drums_osworld.parity.states import without_applications
from drums_osworld.steps.download import read_mirrored


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
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def parity(tasks: tuple[str, ...], image: str | None, files_only: bool, jobs: int, as_json: bool) -> None:
    """Score states of these tasks by drums and by OSWorld's unmodified `DesktopEnv.evaluate`, and compare.

    \b
    sudo drums osworld parity --image osworld
    sudo drums osworld parity 1273e544 --files-only

    Each state (untouched, the expected file in place, wrong results, given up) is scored on a copy, in place, and by
    OSWorld's code in a process of its own on a sibling. Without TASK, all tasks whose files this host has. Ends with 1
    when a score differs or nothing could be compared.
    """
    configure_logging()
    config = load_config()
    catalogue = OSWorldCatalogue(config)
    chosen = [catalogue.find(x) for x in tasks] or [x for x in catalogue.tasks() if _has_files(config, x)]
    others = urls_of(x for x in catalogue.tasks() if _has_files(config, x))
    with progress_bar("parity") as progress:
        lines = trio.run(_compare, config, chosen, image, files_only, jobs, others, progress)
    found = report(lines)
    if as_json:
        print_json(found)
    else:
        rows = [
            (x.task[:8], x.state, str(x.copy), str(x.reference), x.difference or "equal")
            for x in lines
            if not x.problem
        ]
        print_table("parity", ("task", "state", "drums", "reference", ""), rows)
        for x in found["not_run"]:
            click.echo(f"not run: {x['task'][:8]} {x['state']}: {x['reason']}", err=True)
        click.echo(f"{found['compared']} of {found['states']} states compared, {len(found['differences'])} differ")
    if found["differences"] or not found["compared"]:
        raise SystemExit(1)


def _has_files(config: HostConfig, task: Task) -> bool:
    """Whether a task names files, and this host has all."""
    urls = urls_of([task])
    try:
        for url in urls:
            read_mirrored(config.mirror(), url)
    except SetupFailed:
        return False
    return bool(urls)


async def _compare(
    config: HostConfig,
    chosen: Sequence[Task],
    image: str | None,
    files_only: bool,
    jobs: int,
    others: Sequence[str],
    progress: Callable[[str, float], None],
) -> list[Line]:
    found: dict[str, list[Line]] = {}
    limit = trio.CapacityLimiter(jobs)

    async def one(host: Host, task: Task) -> None:
        async with limit:
            try:
                wanted = without_applications(task) if files_only else task
                found[task.id] = await compare_task(host, wanted, others=others, image=image)
            except ValueError as e:
                found[task.id] = [Line(task.id, "all", problem=str(e))]
        progress(task.id[:8], len(found) / len(chosen))

    async with open_host(config) as host, trio.open_nursery() as nursery:
        for task in chosen:
            nursery.start_soon(one, host, task)
    return [line for task in chosen for line in found[task.id]]
