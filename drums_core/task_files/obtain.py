"""Having a file that a task names by URL: from a folder on this host, or fetched into its store."""

from __future__ import annotations

import trio

from drums.errors import SetupFailed
from drums_core.config import HostConfig
from drums_core.task_files.mirror import is_mirrored, read_mirrored
from drums_core.task_files.store import FileStore
from drums_core.urls import without_credentials

LIMIT_S = 240.0  # less than a checker has


async def obtain(config: HostConfig, url: str) -> bytes:
    """A file's content.

    Looked for in the host's folders (`HostConfig.file_folders`); where none has it, it is fetched into the store, from
    the mirror that the host names or from the URL itself, unless the host fetches nothing.

    Raises:
        SetupFailed: it cannot be had; names the URL and the cause.
    """
    folders = config.file_folders()
    try:
        for folder in folders:
            if await trio.to_thread.run_sync(is_mirrored, folder, url):
                try:
                    return await trio.to_thread.run_sync(read_mirrored, folder, url)
                except SetupFailed:
                    if folder != config.files or not config.fetches_files:
                        raise
                break  # what was fetched is damaged, and is fetched anew
        if config.fetches_files:
            await _fetch(config, url)
            return await trio.to_thread.run_sync(read_mirrored, config.files, url)
        return await trio.to_thread.run_sync(read_mirrored, folders[0], url)  # tells that it is not there
    except SetupFailed as e:
        hint = "set files_offline to false, or drums tasks fetch" if config.files_offline else ""
        hint = "put it into file_mirror" if config.file_mirror and not config.file_url else hint
        raise SetupFailed(e.message, hint=e.hint or hint, **e.facts) from e


async def _fetch(config: HostConfig, url: str) -> None:
    (fetched,) = await FileStore(config.files).fetch(
        [url], source=config.file_url, private=config.files_private_addresses, limit_s=LIMIT_S
    )
    if fetched.cause:
        shown = without_credentials(url)
        place = "its URL" if config.file_url is None else f"the mirror {without_credentials(config.file_url)!r}"
        raise SetupFailed(
            f"{shown!r} cannot be had: it is not on this host, and {place} does not give it: {fetched.cause}",
            hint="drums tasks fetch --from MIRROR takes it from elsewhere; files_offline keeps this host from asking",
            url=shown,
            cause=fetched.cause,
            output="",
        )


def have(config: HostConfig, url: str) -> bool:
    """Whether something is in the file's place on this host; whether it is whole shows as it is read. Blocks."""
    try:
        return any(is_mirrored(folder, url) for folder in config.file_folders())
    except SetupFailed:
        return False
