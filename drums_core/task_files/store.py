"""The host's store of files that tasks name by URL: fetched once, whole or not at all, and known by their hashes.

The store is laid out as a mirror (`mirror.py`). Its content lies below `.sha256/`, under its hash, and once: a file's
path is a hard link to that. `manifest.json` is the lock file: a list of `file`, `size`, `sha256` and `url`, against
which every later read is held. A file that is in it is fetched no second time, and one that comes back with another
hash than it says is refused. Several programs may fill a store at once, and read it meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import struct
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import httpx2
import trio

from drums.errors import SetupFailed
from drums_core.durable import locked, sync_directory, write_json
from drums_core.hashing import sha256_of
from drums_core.task_files.addresses import NotPublic, require_public_name, require_public_peer
from drums_core.task_files.mirror import LARGEST_BYTES, MANIFEST, mirrored_path, read_mirrored
from drums_core.urls import without_credentials

TRIES = 3
PAUSE_S = 1.0
LIMIT_S = 3600.0
SILENCE_S = 60.0
CONNECT_S = 10.0
REDIRECTS = 10
FREE_BYTES = 1 << 30
PART_AGE_S = 7 * 86400.0
_CHUNK = 1 << 20
_BLOBS = ".sha256"
_LOCK, _FETCHING = ".lock", ".fetching"
_LOOK_S = 0.05


@attrs.frozen
class Fetched:
    """What became of one file. `cause` is empty where it is in the store, and says why not elsewhere."""

    url: str
    cause: str = ""


class _Refused(Exception):
    """It cannot be had, and another try would not help."""


class FileStore:
    """A folder of files.

    Args:
        folder: the store; made when the first file comes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def fetch(
        self,
        urls: Sequence[str],
        *,
        source: str | Path | None = None,
        private: bool = False,
        limit_s: float = LIMIT_S,
        jobs: int = 4,
        on_file: Callable[[Fetched], None] = lambda _: None,
    ) -> list[Fetched]:
        """Put the files of these URLs into the store, several at a time.

        Args:
            source: a folder laid out as a mirror, or the base URL of one; None fetches from the URLs themselves.
            private: whether a URL itself may lead to an address that is not public, of this host or of its network. The
                base URL of a mirror may: the host's operator has named it.
            limit_s: seconds that one file may take.
            jobs: how many at a time.
            on_file: told of each file as it is done.

        Returns:
            one for each URL, in their order. A file that cannot be had is no exception; nothing of it is in the store.

        Cancellation: whole files stay, of others what came is taken up by the next fetch.
        """
        try:
            await trio.to_thread.run_sync(self._prepare)
        except OSError as e:
            failed = [Fetched(url, str(e)) for url in urls]
            for file in failed:
                on_file(file)
            return failed
        results: dict[str, Fetched] = {}
        limit = trio.CapacityLimiter(jobs)
        public = source is None and not private
        hooks = {"request": [require_public_name]} if public else {}
        timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
        # In a thread: it reads the certificates.
        client = await trio.to_thread.run_sync(lambda: httpx2.AsyncClient(timeout=timeout, event_hooks=hooks))

        async def one(url: str) -> None:
            async with limit:
                cause = f"it was not whole after {limit_s:g} s"
                with trio.move_on_after(limit_s):
                    cause = await self._fetch_one(client, url, source, public)
                results[url] = Fetched(url, cause)
                on_file(results[url])

        async with client, trio.open_nursery() as nursery:
            for url in dict.fromkeys(urls):
                nursery.start_soon(one, url)
        return [results[url] for url in urls]

    async def _fetch_one(self, client: httpx2.AsyncClient, url: str, source: str | Path | None, public: bool) -> str:
        """Fetch a file; why it could not be had, empty when it is there."""
        try:
            name = "/".join(mirrored_path(url))
            async with self._alone(name):
                if await trio.to_thread.run_sync(self._has, name):
                    return ""
                await trio.to_thread.run_sync(self._require_space)
                if isinstance(source, Path):
                    content = await trio.to_thread.run_sync(read_mirrored, source, url)
                    partial = await trio.to_thread.run_sync(self._spill, name, content)
                else:
                    partial = await self._download(client, _at(source, url, name), public)
                await trio.to_thread.run_sync(self._keep, name, url, partial)
            return ""
        except httpx2.InvalidURL as e:
            # Of what is wrong only the kind: behind it stands what was found, and that may be part of a password.
            return f"its URL is none: {str(e).partition(':')[0]}"
        except (ValueError, OSError, _Refused, NotPublic) as e:
            return str(e)
        except SetupFailed as e:
            return str(e.facts.get("cause", e.message))

    def _prepare(self) -> None:
        """Make the folder, and remove what broke off long ago."""
        blobs = self.folder / _BLOBS
        blobs.mkdir(parents=True, exist_ok=True)
        for part in blobs.glob("*.part*"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > PART_AGE_S:
                    part.unlink()

    def _require_space(self) -> None:
        """Raises `_Refused` where the file system is nearly full."""
        space = os.statvfs(self.folder)
        if space.f_bavail * space.f_frsize < FREE_BYTES:
            raise _Refused(
                f"the file system of {str(self.folder)!r} has {space.f_bavail * space.f_frsize >> 20} MiB free, "
                f"{FREE_BYTES >> 20} are needed"
            )

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """Nobody else on this host fetches the file meanwhile: each has a byte of one file to lock (fcntl(2), OFD)."""
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
        fd = os.open(self.folder / _BLOBS / _FETCHING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
                    break
                except BlockingIOError:
                    await trio.sleep(_LOOK_S)
            yield
        finally:
            os.close(fd)

    def _has(self, name: str) -> bool:
        """Whether a file is in the store, and is what the manifest says."""
        entry = self._read_lock().get(name)
        return entry is not None and _is(self.folder / name, str(entry.get("sha256")))

    def _partial(self, source: str) -> Path:
        """Where what came of a file is until it is whole: of each source its own."""
        return self.folder / _BLOBS / f"{hashlib.sha256(source.encode()).hexdigest()}.part"

    def _spill(self, name: str, content: bytes) -> Path:
        path = self._partial(name)
        path.write_bytes(content)
        return path

    async def _download(self, client: httpx2.AsyncClient, url: str, public: bool) -> Path:
        """Fetch a URL into its partial file, going on where an earlier try broke off."""
        path = self._partial(url)
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await trio.sleep(PAUSE_S * 2**attempt)
            try:
                await _stream(client, url, path, public)
                return path
            except httpx2.HTTPError as e:
                problem = str(e) or type(e).__name__
        raise _Refused(f"{problem} (tried {TRIES} times)")

    def _keep(self, name: str, url: str, partial: Path) -> None:
        """Put a whole file in its place, and into the lock file."""
        digest = sha256_of(partial)
        with open(partial, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())
        with locked(self.folder / _BLOBS / _LOCK, wait=True):
            self._enter(name, url, partial, digest, size)

    def _enter(self, name: str, url: str, partial: Path, digest: str, size: int) -> None:
        known = self._read_lock()
        entry = known.get(name)
        if entry is not None and entry.get("sha256") != digest:
            partial.unlink()
            raise _Refused(f"it has sha256 {digest}, {MANIFEST} says {entry.get('sha256')}")
        if not size:
            partial.unlink()
            raise _Refused("it is empty")
        blob = self.folder / _BLOBS / digest
        if _is(blob, digest):
            partial.unlink()
        else:  # it is not there, or was damaged
            os.replace(partial, blob)
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link = place.with_name(f".{place.name}.new")
        link.unlink(missing_ok=True)
        os.link(blob, link)
        os.replace(link, place)
        link.unlink(missing_ok=True)  # two names of one file: a rename does nothing then
        sync_directory(place.parent)
        known[name] = {"file": name, "size": size, "sha256": digest, "url": without_credentials(url)}
        write_json(self.folder / MANIFEST, [known[x] for x in sorted(known)])

    def _read_lock(self) -> dict[str, dict[str, Any]]:
        try:
            document = json.loads((self.folder / MANIFEST).read_bytes())
            return {str(entry["file"]): dict(entry) for entry in document}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError) as e:
            raise OSError(errno.EINVAL, f"{str(self.folder / MANIFEST)!r} is no list of files: {e}") from e


def _is(path: Path, digest: str) -> bool:
    """Whether a file has this sha256; not when it cannot be read."""
    try:
        return sha256_of(path) == digest
    except OSError:
        return False


def _at(source: str | None, url: str, name: str) -> str:
    """Where a file is fetched from: a mirror, or its own URL."""
    return url if source is None else f"{source.rstrip('/')}/{urllib.parse.quote(name)}"


def _validator(reply: httpx2.Response) -> str:
    """What tells whether a file is still the same (RFC 9110, 13.1.5); empty where nothing does."""
    tag = reply.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else ""


@asynccontextmanager
async def _answer(
    client: httpx2.AsyncClient, url: str, headers: Mapping[str, str], public: bool
) -> AsyncIterator[httpx2.Response]:
    """The answer to a request, with its body unread, past redirects, whose bodies nobody reads."""
    request = client.build_request("GET", url, headers=headers)
    for _ in range(REDIRECTS + 1):
        reply = await client.send(request, stream=True)
        try:
            if public:
                require_public_peer(reply)
            if reply.next_request is None:
                yield reply
                return
            request = reply.next_request
        finally:
            await reply.aclose()
    raise _Refused(f"it leads on more than {REDIRECTS} times")


async def _stream(client: httpx2.AsyncClient, url: str, path: Path, public: bool) -> None:
    """Fetch what a partial file lacks: all, unless the server says that the rest is of the same file.

    Raises:
        httpx2.HTTPError: another try may help.
        _Refused, NotPublic: none will.
    """
    known = path.with_name(f"{path.name}.tag")
    have, tag = await trio.to_thread.run_sync(_part, path, known)
    # Compressed on the way, a part's length would tell nothing.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-", "If-Range": tag} if have else {})
    async with _answer(client, url, headers, public) as reply:
        if reply.status_code == 206 and not _is_rest(reply.headers.get("Content-Range", ""), have):
            await trio.to_thread.run_sync(_forget, path, known)
            raise httpx2.RemoteProtocolError("the server sent another part than it was asked for")
        if reply.status_code == 416:
            await trio.to_thread.run_sync(_forget, path, known)
            raise httpx2.RemoteProtocolError("the part that was there is no beginning of it")
        if reply.status_code not in (200, 206):
            again = reply.status_code in (408, 429) or reply.status_code >= 500
            if not again:
                await trio.to_thread.run_sync(_forget, path, known)
            raise (httpx2.RemoteProtocolError if again else _Refused)(f"the server answered {reply.status_code}")
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise _Refused(f"it came as {reply.headers['Content-Encoding']!r}, although not asked for so")
        if reply.status_code == 200:
            have = 0
            # The old part first: it must never lie beside the new file's tag.
            await trio.to_thread.run_sync(_forget, path)
            await trio.to_thread.run_sync(known.write_text, _validator(reply))
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
    await trio.to_thread.run_sync(_forget, known)
    if size > LARGEST_BYTES:
        await trio.to_thread.run_sync(_forget, path)
        raise _Refused(f"it has more than the allowed {LARGEST_BYTES} bytes")


def _is_rest(content_range: str, have: int) -> bool:
    """Whether this is all of a file behind so many bytes (RFC 9110, 14.4); not where none are there."""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
    return match is not None and have > 0 and int(match[1]) == have and int(match[2]) == int(match[3]) - 1


def _part(path: Path, known: Path) -> tuple[int, str]:
    """How many bytes of a file are there, and what it is told by; none where nothing tells."""
    try:
        tag = known.read_text()
        return (path.stat().st_size, tag) if tag else (0, "")
    except FileNotFoundError:
        return 0, ""


def _forget(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
