"""Having a file that a task names by URL: from a folder on this host, or fetched into its store."""

from __future__ import annotations

import trio

from drums.errors import SetupFailed
from drums_core.config import HostConfig
from drums_core.task_files.mirror import is_mirrored, read_mirrored
from drums_core.task_files.store import Fetched, FileStore

LIMIT_S = 600.0


async def obtain(config: HostConfig, url: str) -> bytes:
    """A file's content.

    Looked for in the host's folders (`HostConfig.file_folders`); where none has it, it is fetched into the store, from
    the mirror that the host names or from the URL itself, unless the host fetches nothing.

    Raises:
        SetupFailed: it cannot be had; names the URL and the cause.
    """
    folders = config.file_folders()
    for folder in folders:
        if await trio.to_thread.run_sync(is_mirrored, folder, url):
            return await trio.to_thread.run_sync(read_mirrored, folder, url)
    if not config.fetches_files:
        return await trio.to_thread.run_sync(read_mirrored, folders[0], url)  # tells that it is not there
    fetched = Fetched(url, f"it was not whole after {LIMIT_S:g} s")
    with trio.move_on_after(LIMIT_S):
        (fetched,) = await FileStore(config.files).fetch([url], source=config.file_url)
    if fetched.cause:
        place = "the URL itself" if config.file_url is None else f"the mirror {config.file_url!r}"
        raise SetupFailed(
            f"{url!r} cannot be had: it is not on this host, and {place} does not give it: {fetched.cause}",
            hint="drums tasks fetch --from MIRROR takes it from elsewhere; files_offline keeps this host from asking",
            url=url,
            cause=fetched.cause,
            output="",
        )
    return await trio.to_thread.run_sync(read_mirrored, config.files, url)


def have(config: HostConfig, url: str) -> bool:
    """Whether this host has a file, without fetching it. Blocks."""
    try:
        return any(is_mirrored(folder, url) for folder in config.file_folders())
    except SetupFailed:
        return False
