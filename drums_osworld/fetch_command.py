"""`drums tasks fetch`: bring the files that tasks name onto this host, before anything needs them."""

from __future__ import annotations

from pathlib import Path

import click
import trio

from drums.errors import DrumsError, SetupFailed
from drums_core.commands.output import print_json, progress_bar
from drums_core.config import HostConfig, load_config
from drums_core.model import Task
from drums_core.task_files.mirror import read_mirrored
from drums_core.task_files.store import Fetched, FileStore
from drums_core.urls import without_credentials
from drums_osworld.catalogue import OSWorldCatalogue
from drums_osworld.files import urls_of


@click.command()
@click.argument("tasks", nargs=-1, metavar="[TASK]...")
@click.option("--from", "source", metavar="MIRROR", help="A folder or base URL laid out as a mirror; tried first.")
@click.option("--offline", is_flag=True, help="Take files from --from and the checkout's file_cache alone.")
@click.option("--jobs", default=4, type=click.IntRange(1, 32), show_default=True, help="Files at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print what became of each file as JSON.")
def fetch(tasks: tuple[str, ...], source: str | None, offline: bool, jobs: int, as_json: bool) -> None:
    """Fetch the files of these tasks, or of all, into the host's store.

    \b
    drums tasks fetch
    drums tasks fetch 1273e544 --from /srv/osworld-files

    Files that are there are not fetched again; one that broke off goes on where it was. `manifest.json` in the store is
    the lock file: sizes and hashes, held against every file that is read or comes anew. Where the setting `file_mirror`
    names a folder, nothing is fetched, as the host looks there alone: the files in it are looked at. Ends with 1 when a
    file is missing.
    """
    config = load_config()
    catalogue = OSWorldCatalogue(config)
    wanted: list[Task] = [catalogue.find(x) for x in tasks] if tasks else list(catalogue.tasks())
    urls = urls_of(wanted)
    folder = config.file_folder
    if folder is None:
        results = trio.run(_fetch, config, urls, source, offline, jobs)
    elif source is None:
        results = trio.run(_look, folder, urls, jobs)
    else:
        raise DrumsError(
            f"what is fetched would not be read: the host looks for files in {str(folder)!r} alone",
            hint="put the files there, or take the folder out of the setting file_mirror",
        )
    place = config.files if folder is None else folder
    missing = [x for x in results if x.cause]
    told = {without_credentials(x.url): x.cause for x in missing}
    if as_json:
        print_json({"files": len(results), "store": str(place), "missing": told})
    else:
        for url, cause in told.items():
            click.echo(f"missing: {url}: {cause}", err=True)
        click.echo(f"{len(results) - len(missing)} of {len(results)} files of {len(wanted)} tasks are in {place}")
    if missing:
        raise SystemExit(1)


async def _look(folder: Path, urls: list[str], jobs: int) -> list[Fetched]:
    """Read each file in the folder in which alone the host looks, as a desktop or a checker would."""
    found: dict[str, Fetched] = {}
    limit = trio.CapacityLimiter(jobs)

    async def one(url: str) -> None:
        try:
            await trio.to_thread.run_sync(read_mirrored, folder, url, limiter=limit)
            found[url] = Fetched(url)
        except SetupFailed as e:
            found[url] = Fetched(url, str(e.facts["cause"]))
        progress(url.rpartition("/")[2], len(found) / len(urls))

    with progress_bar("files") as progress:
        async with trio.open_nursery() as nursery:
            for url in urls:
                nursery.start_soon(one, url)
    return [found[url] for url in urls]


async def _fetch(config: HostConfig, urls: list[str], source: str | None, offline: bool, jobs: int) -> list[Fetched]:
    store = FileStore(config.files)
    sources: list[str | Path | None] = []
    if source is not None:
        sources.append(source if source.startswith(("http://", "https://")) else Path(source))
    if (beside := config.checkout_files()) is not None:
        sources.append(beside)
    if config.file_url is not None and not offline:
        sources.append(config.file_url)
    if not offline:
        sources.append(None)
    if not sources:
        raise DrumsError("nowhere to take files from", hint="name a mirror with --from, or leave --offline out")
    found: dict[str, Fetched] = {}
    with progress_bar("files") as progress:
        for number, place in enumerate(sources):
            left = [url for url in urls if url not in found or found[url].cause]
            done = [0]

            def tell(one: Fetched, done: list[int] = done, of: int = len(left)) -> None:
                done[0] += 1
                progress(one.url.rpartition("/")[2], done[0] / of)

            for one in await store.fetch(
                left, source=place, private=config.files_private_addresses, jobs=jobs, on_file=tell
            ):
                # The first cause of a mirror says less than the last, of the file's own place.
                found[one.url] = one if number == 0 or not one.cause or place is None else found[one.url]
    return [found[url] for url in urls]
