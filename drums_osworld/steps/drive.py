"""Google Drive's API, as far as the step `googledrive` needs it, and the tokens that it is asked with.

The API is version 2, since that is the one whose queries (`title = '…'`) OSWorld's tasks are written in. It is asked by
httpx2 and not by PyDrive2, which OSWorld uses: that one holds `cryptography` below 44, rests on `oauth2client`, which
ended in 2018, brings 130 MB, and only blocks, so that a cancelled set-up would go on in the account.

A settings file is one of PyDrive's: YAML, with `save_credentials_file` for the tokens that its sign-in has left, JSON.
Nothing is written back to either; each step asks for a token of its own.

Sources: Google's reference of Drive API v2 (files: list, insert, trash, delete; resumable uploads; errors), RFC 6749
section 6 (refreshing a token).
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx2
import trio

from drums_core.abc import Accounts
from drums_core.config import keeps_secrets
from drums_core.urls import without_credentials
from drums_osworld.steps.account import failure, read_account_file, read_mapping, text_of, without

FOLDER = "application/vnd.google-apps.folder"
TOKEN_URI = "https://oauth2.googleapis.com/token"
TIMEOUT_S = 60.0  # without a byte
TRIES = 3
PAUSE_S = 1.0
# Of one reply: a page of a list has up to 1000 files, with some KB about each; all others are short.
LARGEST_BYTES = 32 << 20
_SHOWN = 300
_REACH = "see whether this host reaches it; the setting google_api says where it is"
_LOOK = "see what the account may do, and sign in to it anew with PyDrive"
# What was refused for coming too soon, and may come again.
_TOO_SOON = ("rateLimitExceeded", "userRateLimitExceeded")


class DriveError(Exception):
    """The account could not be asked, or refused; says what was observed, without a secret.

    Args:
        hint: the remedy, or an empty string.
    """

    def __init__(self, cause: str, hint: str = "") -> None:
        super().__init__(cause)
        self.hint = hint


@attrs.frozen
class Credentials:
    """What a token is asked for with."""

    client_id: str
    client_secret: str = attrs.field(repr=False)
    refresh_token: str = attrs.field(repr=False)
    token_uri: str


def read_credentials(accounts: Accounts, settings_file: str) -> Credentials:
    """The credentials that a settings file leads to. Blocks.

    Raises:
        SetupFailed: a file is not there or is none such, or PyYAML is not installed.
    """
    content = read_account_file(accounts, settings_file)
    try:
        import yaml
    except ImportError as e:
        raise failure(settings_file, "PyYAML is not installed", "pip install 'drums[osworld]'") from e
    try:
        document = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError):
        document = None
    if not isinstance(document, dict):
        # Not with the error as its cause: that quotes the file.
        raise failure(settings_file, "it is no YAML mapping")
    if document.get("client_config_backend") == "service":
        raise failure(settings_file, "it is of a service account", "sign in as a user, with PyDrive")
    hint = "sign in with PyDrive, with save_credentials and get_refresh_token true in the settings"
    name = text_of(document, "save_credentials_file", settings_file, hint)
    # A path of the operator's own, so it may lead anywhere; a relative one begins where OSWorld is run.
    tokens = read_mapping(read_account_file(_own(accounts, name), os.path.basename(name)), name)
    token_uri = str(tokens.get("token_uri") or TOKEN_URI)
    if not keeps_secrets(token_uri):
        shown = without_credentials(token_uri)
        raise failure(name, f"its token_uri is {shown!r}, which is neither https:// nor the loopback", hint)
    client_id, client_secret, refresh_token = (
        text_of(tokens, key, name, hint) for key in ("client_id", "client_secret", "refresh_token")
    )
    return Credentials(client_id, client_secret, refresh_token, token_uri)


def _own(accounts: Accounts, name: str) -> Accounts:
    folder = None if accounts.folder is None else accounts.folder / os.path.dirname(name)
    return attrs.evolve(accounts, folder=folder)


@asynccontextmanager
async def open_drive(api: str, credentials: Credentials) -> AsyncIterator[Drive]:
    """The account's Drive, signed in to.

    Args:
        api: the base URL of Google's APIs.

    Raises:
        DriveError: the account is refused.
    """
    async with httpx2.AsyncClient(timeout=TIMEOUT_S) as http:
        drive = Drive(http, api.rstrip("/"), credentials)
        await drive.sign_in()
        yield drive


class Drive:
    """One account's Drive. Each method raises `DriveError`; cancelled, it leaves at most one request half done."""

    def __init__(self, http: httpx2.AsyncClient, api: str, credentials: Credentials) -> None:
        self._http = http
        self._api = api
        self._files = f"{api}/drive/v2/files"
        self._credentials = credentials
        self._token = ""

    async def sign_in(self) -> None:
        """Have a token made."""
        credentials = self._credentials
        form = {
            "grant_type": "refresh_token",
            "client_id": credentials.client_id,
            "client_secret": credentials.client_secret,
            "refresh_token": credentials.refresh_token,
        }
        reply = await self._ask("POST", credentials.token_uri, data=form)
        self._token = self._text(reply, "access_token")

    async def find(self, query: str) -> list[str]:
        """The ids of all files that a query finds, in Google's order."""
        found: list[str] = []
        page = ""
        while True:
            more = {"pageToken": page} if page else {}
            reply = await self._ask("GET", self._files, params={"q": query, "maxResults": "1000", **more})
            document = self._document(reply)
            items = document.get("items")
            if not isinstance(items, list) or not all(
                isinstance(x, dict) and isinstance(x.get("id"), str) for x in items
            ):
                raise DriveError(f"{self._shown(reply)} has no list of files")
            found += [item["id"] for item in items]
            page = str(document.get("nextPageToken") or "")
            if not page:
                return found

    async def remove(self, file: str, *, trash: bool) -> None:
        """Delete a file, or put it into the trash, with all that is in it. One that is gone is as it should be."""
        url = f"{self._files}/{urllib.parse.quote(file, safe='')}"
        await self._ask("POST" if trash else "DELETE", f"{url}/trash" if trash else url, allowed=(404,))

    async def make_folders(self, path: Collection[str]) -> str:
        """The id of the last folder of a path from the root, empty for the root; those that are not there are made."""
        parent = ""
        for title in path:
            quoted = title.replace("\\", "\\\\").replace("'", "\\'")
            place = f"'{parent or 'root'}' in parents and title = '{quoted}'"
            there = await self.find(f"{place} and mimeType = '{FOLDER}' and trashed = false")
            if there:
                parent = there[0]
            else:
                made = await self._ask("POST", self._files, json=_metadata(title, parent, mimeType=FOLDER))
                parent = self._text(made, "id")
        return parent

    async def upload(self, title: str, parent: str, content: bytes) -> None:
        """Add a file to a folder, in two requests, as Google wants it for more than 5 MB."""
        begun = await self._ask(
            "POST",
            f"{self._api}/upload/drive/v2/files",
            params={"uploadType": "resumable"},
            headers={"X-Upload-Content-Length": str(len(content))},
            json=_metadata(title, parent),
        )
        place = begun.headers.get("Location", "")
        if _origin(place) != _origin(self._api):
            raise DriveError(f"{self._shown(begun)} and names no place of its own to upload to")
        done = await self._ask("PUT", place, content=content)
        size = str(self._document(done).get("fileSize", len(content)))
        if size != str(len(content)):
            raise DriveError(f"{title!r} has {size} bytes there, {len(content)} were uploaded")

    async def _ask(self, method: str, url: str, *, allowed: Collection[int] = (), **options: Any) -> httpx2.Response:
        """A request, repeated where it came too soon.

        Args:
            allowed: statuses that are right besides those of success.
        """
        where = _place(url)
        headers = {"Accept-Encoding": "identity", **options.pop("headers", {})}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        for attempt in range(TRIES):
            if attempt:
                await trio.sleep(PAUSE_S * 2**attempt)
            try:
                async with self._http.stream(method, url, headers=headers, **options) as stream:
                    reply = await self._whole(stream)
            except httpx2.TimeoutException as e:
                raise DriveError(f"{where} did not answer within {TIMEOUT_S} s", _REACH) from e
            except (httpx2.HTTPError, httpx2.InvalidURL) as e:
                cause = self._clean(str(e)) or type(e).__name__
                raise DriveError(f"{where} cannot be reached: {cause}", _REACH) from e
            if not _too_soon(reply):
                break
        if reply.is_success or reply.status_code in allowed:
            return reply
        raise DriveError(self._shown(reply), _LOOK if reply.status_code in (400, 401, 403) else "")

    async def _whole(self, stream: httpx2.Response) -> httpx2.Response:
        """A reply with all that was sent in it, as long as that is not too much; raises `DriveError`."""
        told = f"{_place(str(stream.url))} answered {stream.request.method} with {stream.status_code}"
        coding = stream.headers.get("Content-Encoding", "identity")
        if coding != "identity":  # a few bytes could be any number of them
            raise DriveError(f"{told}, packed as {self._clean(coding)!r}, although not asked for so")
        parts, size = [], 0
        # Cancelled rather than left: only so are the connection's generators run to their ends.
        with trio.CancelScope() as scope:
            async for part in stream.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > LARGEST_BYTES:
                    scope.cancel()
        if size > LARGEST_BYTES:
            raise DriveError(f"{told} and at least {size} bytes, allowed are {LARGEST_BYTES}")
        content = b"".join(parts)
        return httpx2.Response(stream.status_code, headers=stream.headers, content=content, request=stream.request)

    def _shown(self, reply: httpx2.Response) -> str:
        """What a server answered, in words."""
        told = f"{_place(str(reply.url))} answered {reply.request.method} with {reply.status_code}"
        return told + self._clean(_reason(reply))

    def _document(self, reply: httpx2.Response) -> dict[str, Any]:
        try:
            document = reply.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise DriveError(f"{self._shown(reply)} and no JSON object")
        return document

    def _text(self, reply: httpx2.Response, key: str) -> str:
        value = self._document(reply).get(key)
        if not isinstance(value, str) or not value:
            raise DriveError(f"{self._shown(reply)} and no {key!r}")
        return value

    def _clean(self, text: str) -> str:
        hidden = (self._credentials.client_secret, self._credentials.refresh_token, self._token)
        return without(text, hidden)[:_SHOWN]


def _metadata(title: str, parent: str, **more: str) -> dict[str, Any]:
    return {"title": title, **more, **({"parents": [{"id": parent}]} if parent else {})}


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _place(url: str) -> str:
    """Scheme and host of a URL, as they may be told."""
    return without_credentials("{}://{}".format(*_origin(url)))


def _too_soon(reply: httpx2.Response) -> bool:
    return reply.status_code == 429 or (
        reply.status_code == 403 and any(reason in _reason(reply) for reason in _TOO_SOON)
    )


def _reason(reply: httpx2.Response) -> str:
    """What a refusal says for itself: Google's reasons and message, or those of RFC 6749; empty without one."""
    if reply.is_success:
        return ""
    try:
        document = reply.json()
    except ValueError:
        return ""
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        details = error.get("errors")
        reasons = [str(x.get("reason")) for x in details if isinstance(x, dict)] if isinstance(details, list) else []
        said = [*reasons, str(error.get("message", ""))]
    else:
        said = [str(document.get(key) or "") for key in ("error", "error_description")] if error else []
    text = ": ".join(x for x in said if x)
    return f" ({text})" if text else ""
