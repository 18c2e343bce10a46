"""The files that tasks name by URL, kept on the host: fetched once, whole or not at all, and known by their hashes.

The store is laid out as a mirror (see `steps/download.py`): a file's path is the part of its URL behind
`/resolve/main/`. Its content lies below `.sha256/`, under its hash, and once: the path is a hard link to that.
`manifest.json` is the lock file: a list of `file`, `size` and `sha256`, against which every later read is held. A file
that is in it is fetched no second time, and one that comes back with another hash than it says is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx2
import trio

from drums.errors import SetupFailed
from drums_core.durable import sync_directory, write_json
from drums_core.model import Task
from drums_osworld.steps.download import LARGEST_BYTES, MANIFEST, mirrored_path, read_mirrored

TRIES = 3
PAUSE_S = 1.0
TIMEOUT_S = 60.0  # without a byte
_CHUNK = 1 << 20
_BLOBS = ".sha256"


@attrs.frozen
class Fetched:
    """What became of one file. `cause` is empty where it is in the store, and says why not elsewhere."""

    url: str
    cause: str = ""


class _Refused(Exception):
    """It cannot be had, and another try would not help."""


def urls_of(tasks: Iterable[Task]) -> list[str]:
    """The URLs of files that tasks download, upload or compare with, each once, in their order."""
    found: dict[str, None] = {}
    for task in tasks:
        steps: list[tuple[str, Any]] = [(step.type, step.parameters) for step in task.config]
        later = task.evaluator.get("postconfig")
        steps += [(str(x.get("type")), x.get("parameters")) for x in _mappings(later)]
        for kind, parameters in steps:
            key = {"download": "files", "googledrive": "args"}.get(kind)
            if key is not None and isinstance(parameters, Mapping):
                found |= dict.fromkeys(str(x["url"]) for x in _mappings(parameters.get(key)) if "url" in x)
        found |= dict.fromkeys(compared_urls(task.evaluator))
    return list(found)


def compared_urls(evaluator: Mapping[str, Any]) -> list[str]:
    """The URLs of files that an evaluator's getters fetch from elsewhere, each once, in their order."""
    found: dict[str, None] = {}
    for key in ("result", "expected"):
        for getter in _mappings(evaluator.get(key)):
            if getter.get("type") == "cloud_file":
                path = getter.get("path")
                found |= dict.fromkeys(str(x) for x in (path if isinstance(path, list) else [path]))
    return list(found)


def lay_out(mirror: Path | None, urls: Iterable[str], folder: Path) -> dict[str, dict[str, str]]:
    """Copies of mirrored files in a folder, which is made, readable for every user. Blocks.

    Returns:
        for each URL its file's name in the folder (`file`), or why it cannot be had (`cause`).
    """
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    found: dict[str, dict[str, str]] = {}
    for number, url in enumerate(urls):
        try:
            content = read_mirrored(mirror, url)
        except SetupFailed as e:
            found[url] = {"cause": str(e.facts.get("cause", e.message))}
            continue
        (folder / str(number)).write_bytes(content)
        (folder / str(number)).chmod(0o644)
        found[url] = {"file": str(number)}
    return found


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, Mapping)]


class FileStore:
    """A folder of files; several programs may read it while one fills it.

    Args:
        folder: the store; made when the first file comes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: dict[str, dict[str, Any]] = {}
        self._keeping = trio.Lock()

    async def fetch(
        self,
        urls: Sequence[str],
        *,
        source: str | Path | None = None,
        jobs: int = 4,
        on_file: Callable[[Fetched], None] = lambda _: None,
    ) -> list[Fetched]:
        """Put the files of these URLs into the store, several at a time.

        Args:
            source: a folder laid out as a mirror, or the base URL of one; None fetches from the URLs themselves.
            jobs: how many at a time.
            on_file: told of each file as it is done.

        Returns:
            one for each URL, in their order. A file that cannot be had is no exception; nothing of it is in the store.

        Cancellation: whole files stay, of others what came is taken up by the next fetch.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._read_lock()
        results: dict[str, Fetched] = {}
        limit = trio.CapacityLimiter(jobs)

        async def one(client: httpx2.AsyncClient, url: str) -> None:
            async with limit:
                results[url] = Fetched(url, await self._fetch_one(client, url, source))
                on_file(results[url])

        async with (
            httpx2.AsyncClient(follow_redirects=True, timeout=TIMEOUT_S) as client,
            trio.open_nursery() as nursery,
        ):
            for url in dict.fromkeys(urls):
                nursery.start_soon(one, client, url)
        return [results[url] for url in urls]

    async def _fetch_one(self, client: httpx2.AsyncClient, url: str, source: str | Path | None) -> str:
        """Fetch a file; why it could not be had, empty when it is there."""
        try:
            name = "/".join(mirrored_path(url))
            if await trio.to_thread.run_sync(self._has, name):
                return ""
            if isinstance(source, Path):
                content = await trio.to_thread.run_sync(read_mirrored, source, url)
                partial = await trio.to_thread.run_sync(self._spill, name, content)
            else:
                partial = await self._download(client, _at(source, url, name), name)
            async with self._keeping:
                await trio.to_thread.run_sync(self._keep, name, partial)
            return ""
        except (ValueError, OSError, _Refused) as e:
            return str(e)
        except SetupFailed as e:
            return str(e.facts.get("cause", e.message))

    def _has(self, name: str) -> bool:
        """Whether a file is in the store, whole: as long as the manifest says."""
        entry = self._lock.get(name)
        try:
            return entry is not None and os.lstat(self.folder / name).st_size == entry["size"]
        except OSError:
            return False

    def _partial(self, name: str) -> Path:
        return self.folder / _BLOBS / f"{hashlib.sha256(name.encode()).hexdigest()}.part"

    def _spill(self, name: str, content: bytes) -> Path:
        path = self._partial(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    async def _download(self, client: httpx2.AsyncClient, url: str, name: str) -> Path:
        """Fetch a URL into its partial file, going on where an earlier try broke off."""
        path = trio.Path(self._partial(name))
        await path.parent.mkdir(exist_ok=True)
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await trio.sleep(PAUSE_S * 2**attempt)
            try:
                await _stream(client, url, path)
                return Path(path)
            except httpx2.HTTPError as e:
                problem = str(e) or type(e).__name__
        raise _Refused(f"{problem} (tried {TRIES} times)")

    def _keep(self, name: str, partial: Path) -> None:
        """Put a whole file in its place, and into the lock file."""
        with open(partial, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())
        entry = self._lock.get(name)
        if entry is not None and entry["sha256"] != digest:
            partial.unlink()
            raise _Refused(f"it has sha256 {digest}, {MANIFEST} says {entry['sha256']}")
        if not size:
            partial.unlink()
            raise _Refused("it is empty")
        blob = self.folder / _BLOBS / digest
        if blob.exists():
            partial.unlink()
        else:
            os.replace(partial, blob)
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link = place.with_name(f".{place.name}.new")
        link.unlink(missing_ok=True)
        os.link(blob, link)
        os.replace(link, place)
        link.unlink(missing_ok=True)  # two names of one file: a rename does nothing then
        sync_directory(place.parent)
        self._lock[name] = {"file": name, "size": size, "sha256": digest}
        write_json(self.folder / MANIFEST, [self._lock[x] for x in sorted(self._lock)])

    def _read_lock(self) -> dict[str, dict[str, Any]]:
        try:
            document = json.loads((self.folder / MANIFEST).read_bytes())
            return {str(entry["file"]): dict(entry) for entry in document}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError) as e:
            raise OSError(errno.EINVAL, f"{str(self.folder / MANIFEST)!r} is no list of files: {e}") from e


def _at(source: str | None, url: str, name: str) -> str:
    """Where a file is fetched from: a mirror, or its own URL."""
    return url if source is None else f"{source.rstrip('/')}/{urllib.parse.quote(name)}"


async def _stream(client: httpx2.AsyncClient, url: str, path: trio.Path) -> None:
    """Fetch what a partial file lacks.

    Raises:
        httpx2.HTTPError: another try may help.
        _Refused: none will.
    """
    have = (await path.stat()).st_size if await path.exists() else 0
    # Compressed on the way, a part's length would tell nothing.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    async with client.stream("GET", url, headers=headers) as reply:
        if reply.status_code == 416:
            await path.unlink()
            raise httpx2.RemoteProtocolError("the part that was there is no beginning of it")
        if reply.status_code not in (200, 206):
            again = reply.status_code in (408, 429) or reply.status_code >= 500
            raise (httpx2.RemoteProtocolError if again else _Refused)(f"the server answered {reply.status_code}")
        if reply.status_code == 200:
            have = 0
        size = have
        async with await trio.open_file(path, "r+b" if have else "wb") as file:
            await file.seek(have)
            # Cancelled rather than left: only so are the connection's generators run to their ends.
            with trio.CancelScope() as scope:
                async for chunk in reply.aiter_raw(_CHUNK):
                    size += len(chunk)
                    if size > LARGEST_BYTES:
                        scope.cancel()
                    else:
                        await file.write(chunk)
        if size > LARGEST_BYTES:
            await path.unlink()
            raise _Refused(f"it has more than the allowed {LARGEST_BYTES} bytes")
