"""The final desktop as a verifier sees it, over the guest server that the worker's only port leads to.

Standard library only. A request that the desktop did not answer is recorded in `BROKEN` as well as raised, and what is
raised is no `Exception`: a verifier that catches broadly must not turn it into a 0.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GUEST = ("127.0.0.1", 5000)
LIVING = "X-Drums-Living"  # as in drums_core.guest_gateway
_TIMEOUT_S = 150.0
_CLIPBOARD_S = 10.0
READ_LIMIT = 64 << 20
HOME = "/home/user"

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
    truncated: bool = False


@dataclass(frozen=True)
class FileInfo:
    """What is at a path, a link itself and not what it leads to.

    Args:
        kind: `file`, `folder`, `link`, or `special` (a device, a pipe, a socket).
        size_bytes: of a file's content.
        mode: its permission bits.
        modified_s: when it was last changed, in seconds since the epoch, by the desktop's clock.
        target: where a link leads, "" for anything else.
    """

    kind: str
    size_bytes: int
    mode: int
    modified_s: float
    target: str


class Desktop:
    """The final desktop, as a verifier sees it. Everything is done as the agent's user, in a frozen copy of the
    desktop, or in the desktop itself where that is graded in place.

    Paths begin at `/`, or with `~/` or nothing at the agent's home.

    Args:
        last_action: the agent's last action, None when there was none.
    """

    def __init__(self, last_action: str | None) -> None:
        self.last_action = last_action

    def read_file(self, path: str, *, limit_bytes: int = READ_LIMIT) -> bytes:
        """A file's content.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it is a folder, or something else that is no regular file, or larger than `limit_bytes`.
        """
        form = urllib.parse.urlencode({"file_path": path}, errors="surrogateescape").encode()
        status, body = _request("POST", "/file", form, "application/x-www-form-urlencoded", limit=limit_bytes)
        if status == 404:
            raise FileNotFoundError(2, "not in the desktop", path)
        if status != 200:
            raise ValueError(f"{path!r} cannot be read: {body[:300].decode('utf-8', 'replace')}")
        if len(body) > limit_bytes:
            raise ValueError(f"{path!r} has more than the allowed {limit_bytes} bytes")
        return body

    def read_text(self, path: str, *, limit_bytes: int = READ_LIMIT) -> str:
        """A text file in UTF-8; raises as `read_file` does, and `ValueError` when it is no such text."""
        return self.read_file(path, limit_bytes=limit_bytes).decode()

    def stat(self, path: str) -> FileInfo | None:
        """What is at a path; None when there is nothing that the agent's user can see. Links are not followed."""
        found = self._probe(_STAT, {"path": _absolute(path)})
        return None if found is None else FileInfo(**found)

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
        self,
        command: str | Sequence[str],
        *,
        shell: bool | None = None,
        timeout_s: float = 60.0,
        applications: bool = False,
    ) -> CommandResult:
        """Run a command to its end. A line is the shell's, a list is not, unless `shell` says otherwise.

        A command may change the desktop. A verifier should not.

        Args:
            applications: the command talks to an application, so they all run meanwhile; what the agent left runs with
                them, and could end the command. Otherwise they stay frozen.
        """
        line = isinstance(command, str)
        document = {
            "command": command if line else list(command),
            "shell": line if shell is None else shell,
            "timeout": timeout_s,
        }
        status, body = _post("/execute", document, applications=applications)
        if status != 200:
            raise ValueError(f"{command!r} was refused: {body[:300].decode('utf-8', 'replace')}")
        reply = _document(body, "/execute")
        cut = bool(reply.get("output_truncated") or reply.get("error_truncated"))
        return CommandResult(int(reply["returncode"]), str(reply["output"]), str(reply["error"]), cut)

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

    def clipboard(self) -> str | None:
        """The text in the clipboard, None when there is none."""
        found = self.execute(
            ["/usr/bin/xclip", "-selection", "clipboard", "-o"], timeout_s=_CLIPBOARD_S, applications=True
        )
        if found.returncode == 0:
            return found.output
        if "not available" in found.error:  # xclip: nobody owns it, or it holds no text
            return None
        raise _broken(f"the clipboard cannot be read: {found.error[:200]}")

    def browser_targets(self, *, port: int = 9222) -> list[dict[str, Any]]:
        """What a browser lists at `/json/list` of its debugging port: `id`, `type`, `title`, `url` and so on.

        Raises:
            ConnectionRefusedError: nothing listens there.
            ValueError: what listens there is no browser's debugging port.
        """
        found = self._ask_browser({"port": port})
        return found if isinstance(found, list) else []

    def cdp(
        self, method: str, params: Mapping[str, Any] | None = None, *, target: str | None = None, port: int = 9222
    ) -> dict[str, Any]:
        """One call of the Chrome DevTools Protocol; it must not change the page.

        Args:
            target: the id of a target of `browser_targets`; the first page by default.

        Returns:
            The call's `result`.

        Raises:
            ConnectionRefusedError: nothing listens there.
            LookupError: there is no such target.
            ValueError: the browser refused the call, or what listens there is no browser.
        """
        found = self._ask_browser({"port": port, "target": target, "method": method, "params": dict(params or {})})
        return found if isinstance(found, dict) else {}

    def _ask_browser(self, request: dict[str, Any]) -> Any:
        # The port is the desktop's own, so that anybody in it may listen there: what comes back is as good as a file of
        # the agent's.
        answer = self._probe(_BROWSER, request, applications=True)
        if not isinstance(answer, dict) or not {"value", "fault"} & set(answer):
            raise ValueError(f"the browser's answer is not understood: {answer!r:.80}")
        if "fault" in answer:
            kinds = {"refused": ConnectionRefusedError, "absent": LookupError}
            raise kinds.get(answer["fault"], ValueError)(str(answer.get("text"))[:500])
        return answer["value"]

    def _probe(self, program: str, request: Mapping[str, Any], *, applications: bool = False) -> Any:
        """What a program of ours prints in the desktop, as JSON. `-I` keeps the agent's modules and settings out."""
        command = ["/usr/bin/python3", "-I", "-c", program, json.dumps(request)]
        found = self.execute(command, timeout_s=60.0, applications=applications)
        if found.returncode != 0:
            raise _broken(f"the desktop's Python ended with {found.returncode}: {found.error[-300:]}")
        if found.truncated:
            raise ValueError("the answer is longer than the guest server passes on")
        try:
            return json.loads(found.output)
        except ValueError as e:
            raise _broken(f"the desktop's Python printed {found.output[:80]!r}") from e

    def _get(self, path: str) -> bytes:
        status, body = _request("GET", path)
        if status != 200:
            raise _broken(f"GET {path}: the guest server answered {status}")
        return body


def _post(path: str, document: Mapping[str, Any], *, applications: bool = False) -> tuple[int, bytes]:
    fields = {LIVING: "everything"} if applications else {}
    return _request("POST", path, json.dumps(document).encode(), "application/json", fields)


def _request(
    method: str,
    path: str,
    body: bytes = b"",
    content_type: str = "",
    fields: Mapping[str, str] | None = None,
    *,
    limit: int = READ_LIMIT,
) -> tuple[int, bytes]:
    """Status and body of an answer, of which one byte more than `limit` is read."""
    connection = http.client.HTTPConnection(*GUEST, timeout=_TIMEOUT_S)
    try:
        typed = {"Content-Type": content_type} if content_type else {}
        connection.request(method, path, body, {**typed, **(fields or {})})
        reply = connection.getresponse()
        content = reply.read(limit + 1)
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


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path.removeprefix('~/')}"


# Run by the desktop's own Python: a question in JSON is its argument, the answer in JSON what it prints.
_STAT = """
import json, os, stat, sys
path = json.loads(sys.argv[1])["path"]
try:
    found = os.lstat(path)
    link = stat.S_ISLNK(found.st_mode)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    print(json.dumps({
        "kind": kinds.get(stat.S_IFMT(found.st_mode), "special"),
        "size_bytes": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "modified_s": found.st_mtime,
        "target": os.readlink(path) if link else "",
    }))
except (OSError, ValueError):
    print("null")
"""
_BROWSER = """
import base64, http.client, json, os, socket, struct, sys, urllib.parse
asked = json.loads(sys.argv[1])

def end(**answer):
    print(json.dumps(answer))
    sys.exit()

def take(stream, count):
    data = stream.read(count)
    if len(data) != count:
        raise ValueError("the connection ended")
    return data

def message(stream):
    text = b""
    while True:
        first, second = take(stream, 2)
        length = second & 127
        if length > 125:
            length = struct.unpack(">H" if length == 126 else ">Q", take(stream, 2 if length == 126 else 8))[0]
        if length > 1 << 24:
            raise ValueError("the answer is too long")
        data = take(stream, length)
        if first & 15 == 8:
            raise ValueError("the browser closed the connection")
        if first & 15 in (0, 1):
            text += data
            if first & 128:
                return json.loads(text)

try:
    connection = http.client.HTTPConnection("127.0.0.1", asked["port"], timeout=10)
    connection.request("GET", "/json/list")
    listed = json.loads(connection.getresponse().read(1 << 22))
    if not isinstance(listed, list):
        raise ValueError("it lists no targets")
    if "method" not in asked:
        end(value=listed)
    wanted = asked["target"]
    fit = [x for x in listed if (x["type"] == "page" if wanted is None else x["id"] == wanted)]
    if not fit:
        end(fault="absent", text="there is no such page")
    path = urllib.parse.urlsplit(fit[0]["webSocketDebuggerUrl"]).path
    sock = socket.create_connection(("127.0.0.1", asked["port"]), timeout=20)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["GET %s HTTP/1.1" % path, "Host: 127.0.0.1:%d" % asked["port"], "Upgrade: websocket",
             "Connection: Upgrade", "Sec-WebSocket-Key: " + key, "Sec-WebSocket-Version: 13", "", ""]
    sock.sendall("\\r\\n".join(lines).encode())
    stream = sock.makefile("rb")
    status = stream.readline(1000)
    if b" 101 " not in status:
        raise ValueError("it refused the connection: %r" % status)
    while stream.readline(10000).strip():
        pass
    data = json.dumps({"id": 1, "method": asked["method"], "params": asked["params"]}).encode()
    mask = os.urandom(4)
    size = bytes([128 | len(data)]) if len(data) < 126 else b"\\xff" + struct.pack(">Q", len(data))
    sock.sendall(b"\\x81" + size + mask + bytes(x ^ mask[i % 4] for i, x in enumerate(data)))
    while True:
        answer = message(stream)
        if answer.get("id") == 1:
            break
    if "error" in answer:
        end(fault="error", text=json.dumps(answer["error"]))
    end(value=answer["result"])
except ConnectionRefusedError as e:
    end(fault="refused", text=str(e))
except Exception as e:
    end(fault="error", text="%s: %s" % (type(e).__name__, e))
"""
