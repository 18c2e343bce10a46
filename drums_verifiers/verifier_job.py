"""The job of a verifier's worker: calls an operator's function on a view of the desktop, inside the sandbox.

Standard library only. A request that the desktop did not answer is recorded in `BROKEN` as well as raised, and what is
raised is no `Exception`: a verifier that catches broadly must not turn it into a 0.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import inspect
import json
import sys
import urllib.parse
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GUEST = ("127.0.0.1", 5000)
_TIMEOUT_S = 150.0
_EVIDENCE_LIMIT = 64 << 10

BROKEN: list[str] = []


class DesktopUnreachable(BaseException):
    """The desktop could not be asked: nothing about it follows."""


def _broken(reason: str) -> DesktopUnreachable:
    BROKEN.append(reason)
    return DesktopUnreachable(reason)


@dataclass(frozen=True)
class CommandResult:
    """What a command in the desktop did."""

    returncode: int
    output: str
    error: str


class Desktop:
    """The final desktop, as a verifier sees it. Everything is done as the agent's user, in a frozen copy of the
    desktop, or in the desktop itself where that is graded in place.

    Paths begin at `/`, or with `~/` or nothing at the agent's home.

    Args:
        last_action: the agent's last action, None when there was none.
    """

    def __init__(self, last_action: str | None) -> None:
        self.last_action = last_action

    def read_file(self, path: str) -> bytes:
        """A file's content.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it is a folder, or something else that is no regular file.
        """
        form = urllib.parse.urlencode({"file_path": path}, errors="surrogateescape").encode()
        status, body = _request("POST", "/file", form, "application/x-www-form-urlencoded")
        if status == 404:
            raise FileNotFoundError(2, "not in the desktop", path)
        if status != 200:
            raise ValueError(f"{path!r} cannot be read: {body[:300].decode('utf-8', 'replace')}")
        return body

    def exists(self, path: str) -> bool:
        """Whether there is anything at a path; a dangling link is nothing."""
        return self._test("-e", path)

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder at a path."""
        return self._test("-d", path)

    def _test(self, option: str, path: str) -> bool:
        return self.execute(["/usr/bin/test", option, path.removeprefix("~/")]).returncode == 0

    def list_directory(self, path: str) -> dict[str, Any]:
        """The tree below a folder: `type` (directory, file), `name`, `children`.

        Raises:
            NotADirectoryError: there is no folder.
        """
        status, body = _post("/list_directory", {"path": path})
        if status != 200:
            raise NotADirectoryError(20, "no folder in the desktop", path)
        tree = _document(body, "/list_directory").get("directory_tree")
        return tree if isinstance(tree, dict) else {}

    def execute(
        self, command: str | Sequence[str], *, shell: bool | None = None, timeout_s: float = 60.0
    ) -> CommandResult:
        """Run a command to its end. A line is the shell's, a list is not, unless `shell` says otherwise.

        A command may change the desktop. A verifier should not.
        """
        line = isinstance(command, str)
        document = {
            "command": command if line else list(command),
            "shell": line if shell is None else shell,
            "timeout": timeout_s,
        }
        status, body = _post("/execute", document)
        if status != 200:
            raise ValueError(f"{command!r} was refused: {body[:300].decode('utf-8', 'replace')}")
        reply = _document(body, "/execute")
        return CommandResult(int(reply["returncode"]), str(reply["output"]), str(reply["error"]))

    def screenshot(self) -> bytes:
        """The screen as PNG."""
        return self._get("/screenshot")

    def windows(self) -> list[dict[str, Any]]:
        """The windows: `id`, `title`, `class` (instance and class), `pid`, `x`, `y`, `width`, `height`, `active`."""
        found = _document(self._get("/windows"), "/windows").get("windows")
        return found if isinstance(found, list) else []

    def accessibility(self) -> str:
        """The accessibility tree as XML, in OSWorld's form."""
        return str(_document(self._get("/accessibility"), "/accessibility").get("AT"))

    def _get(self, path: str) -> bytes:
        status, body = _request("GET", path)
        if status != 200:
            raise _broken(f"GET {path}: the guest server answered {status}")
        return body


def _post(path: str, document: Mapping[str, Any]) -> tuple[int, bytes]:
    return _request("POST", path, json.dumps(document).encode(), "application/json")


def _request(method: str, path: str, body: bytes = b"", content_type: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*GUEST, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, body, {"Content-Type": content_type} if content_type else {})
        reply = connection.getresponse()
        content = reply.read()
    except (OSError, http.client.HTTPException) as e:
        raise _broken(f"{method} {path}: {type(e).__name__}: {e}") from e
    finally:
        connection.close()
    if reply.status >= 500:
        raise _broken(f"{method} {path}: the guest server answered {reply.status}: {content[:200]!r}")
    return reply.status, content


def _document(body: bytes, path: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as e:
        raise _broken(f"{path}: the guest server answered {body[:80]!r}") from e
    if not isinstance(document, dict):
        raise _broken(f"{path}: the guest server answered {body[:80]!r}")
    return document


def _plain(value: Any) -> Any:
    """What JSON can carry of a score; numpy's scalars have `item`. The host judges it."""
    item = getattr(value, "item", None)
    value = item() if callable(item) else value
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)[:200]


def _remark(value: Any) -> Any:
    """Evidence or notes, as far as JSON can carry them."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        value = repr(value)[:_EVIDENCE_LIMIT]
        text = json.dumps(value)
    return value if len(text) <= _EVIDENCE_LIMIT else f"{text[:_EVIDENCE_LIMIT]}… (cut: {len(text)} characters)"


async def _finish(value: Awaitable[Any]) -> Any:
    return await value


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Call a verifier.

    Args:
        request: `module`, `attribute` (dotted, or empty), `function`, `options`, `task`, `last_action`, and `path`:
            folders to look for modules in besides the others.

    Returns:
        `score` as it was returned, `broken`, and `evidence` and `notes` where they were given.
    """
    sys.path += request["path"]
    target: Any = importlib.import_module(request["module"])
    for part in filter(None, request["attribute"].split(".")):
        target = getattr(target, part)
    if isinstance(target, type):
        target = target()
    answer: dict[str, Any] = {"score": None}
    try:
        value = getattr(target, request["function"])(
            Desktop(request["last_action"]), request["task"], **request["options"]
        )
        if inspect.isawaitable(value):
            value = asyncio.run(_finish(value))
        answer["score"] = _plain(getattr(value, "score", value))
        for name in ("evidence", "notes"):
            if getattr(value, name, None) is not None:
                answer[name] = _remark(getattr(value, name))
    except DesktopUnreachable:
        pass  # it is in BROKEN
    return {**answer, "broken": BROKEN[:20]}
