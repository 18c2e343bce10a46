"""A stand-in for Google Drive's API of version 2, and for the place where tokens are refreshed. No test itself.

It holds files in memory, understands the queries that OSWorld's tasks and the step itself ask, hands lists out two at a
time, and refuses what the real one does: another token, a query that is none, a parent that is not there.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

FOLDER = "application/vnd.google-apps.folder"
CLIENT_SECRET, REFRESH_TOKEN, TOKEN = "client-secret-Kq7", "refresh-token-Zw3", "access-token-Lm9"
SECRETS = (CLIENT_SECRET, REFRESH_TOKEN, TOKEN)
PAGE = 2
_WORDS = re.compile(r"'(?:\\.|[^'\\])*'|!=|=|[()]|\w+")


@attrs.define
class File:
    """A file, or a folder."""

    id: str
    title: str
    mimeType: str = "text/plain"
    parents: tuple[str, ...] = ("root",)
    trashed: bool = False
    content: bytes = b""


@attrs.define
class Fault:
    """What goes wrong: in a request whose method and path begin with `at`, `times` times."""

    at: str
    status: int = 0  # 0 answers nothing at all
    document: Any = None
    times: int = 1 << 30
    drip: bool = False
    size: int = 0  # a reply of so many bytes
    packed: bool = False  # which comes as gzip, of few


@attrs.define(eq=False)
class DriveServer:
    """The server's state; `asked` has the method and path of each request, in order."""

    url: str = ""
    files: dict[str, File] = attrs.field(factory=dict)
    asked: list[str] = attrs.field(factory=list)
    faults: list[Fault] = attrs.field(factory=list)
    upload_to: str = ""
    sent: int = 0  # bytes of replies with a size
    closing: threading.Event = attrs.field(factory=threading.Event)
    _made: int = 0

    def add(self, title: str, **more: Any) -> str:
        """A file's id."""
        self._made += 1
        file = File(f"id{self._made}", title, **more)
        self.files[file.id] = file
        return file.id

    def folder(self, title: str, *parents: str, **more: Any) -> str:
        """A folder's id."""
        return self.add(title, mimeType=FOLDER, parents=parents or ("root",), **more)

    def tree(self) -> set[str]:
        """The paths of all that is not in the trash, folders with a stroke at their end."""

        def path(file: File) -> str:
            above = self.files.get(file.parents[0])
            return (path(above) if above else "") + file.title + ("/" if file.mimeType == FOLDER else "")

        return {path(file) for file in self.files.values() if not file.trashed}

    def found(self, query: str) -> list[File]:
        """What a query finds; raises for one that is none."""
        words = _WORDS.findall(query)
        terms = []
        for index, word in enumerate(words):
            if word in ("title", "mimeType", "trashed"):
                terms.append(f"f.{word}")
            elif word == "parents" and words[index - 1] == "in":
                terms.append("f.parents")
            elif word in ("true", "false", "="):
                terms.append({"true": "True", "false": "False", "=": "=="}[word])
            elif word in ("and", "or", "not", "in", "!=", "(", ")") or word.startswith("'"):
                terms.append(word)
            else:
                raise ValueError(word)
        code = compile(" ".join(terms), "query", "eval")
        return [f for f in self.files.values() if eval(code, {"__builtins__": {}}, {"f": f})]

    def remove(self, file: str) -> None:
        """A file, and all that is in it."""
        del self.files[file]
        for inside in [x.id for x in self.files.values() if file in x.parents]:
            if inside in self.files:
                self.remove(inside)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    drive: DriveServer

    def answer(self) -> None:
        """Any request."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urllib.parse.urlsplit(self.path)
        options = dict(urllib.parse.parse_qsl(parts.query))
        line = f"{self.command} {parts.path}"
        self.drive.asked.append(line)
        for fault in self.drive.faults:
            if line.startswith(fault.at) and fault.times > 0:
                fault.times -= 1
                return self.fail(fault)
        if parts.path == "/token":
            form = dict(urllib.parse.parse_qsl(body.decode()))
            wanted = {
                "grant_type": "refresh_token",
                "client_id": "client",
                "client_secret": CLIENT_SECRET,
                "refresh_token": REFRESH_TOKEN,
            }
            if form != wanted:
                return self.reply({"error": "invalid_grant"}, 400)
            return self.reply({"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "authError")
        return self.about_files(line, options, body)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def about_files(self, line: str, options: dict[str, str], body: bytes) -> None:
        """A request with the right token."""
        drive, top = self.drive, "/drive/v2/files"
        if line == f"GET {top}":
            try:
                found = drive.found(options["q"])
            except (ValueError, SyntaxError, TypeError, NameError):
                return self.refuse(400, "invalid")
            begin = int(options.get("pageToken", 0))
            more = {"nextPageToken": str(begin + PAGE)} if begin + PAGE < len(found) else {}
            return self.reply({"items": [{"id": x.id} for x in found[begin : begin + PAGE]], **more})
        if line in (f"POST {top}", f"POST /upload{top}"):
            metadata = json.loads(body)
            parents = tuple(x["id"] for x in metadata.get("parents", [{"id": "root"}]))
            if not isinstance(metadata["title"], str) or not {*parents} <= {*drive.files, "root"}:
                return self.refuse(404, "notFound")
            made = drive.add(metadata["title"], mimeType=metadata.get("mimeType", "text/plain"), parents=parents)
            if not line.startswith("POST /upload"):
                return self.reply({"id": made})
            place = f"{drive.upload_to or drive.url}/upload{top}/{made}?upload_id=x"
            return self.reply({}, headers={"Location": place})
        name = line.split(" ")[1].removeprefix("/upload").removeprefix(top + "/").removesuffix("/trash")
        if name not in drive.files:
            return self.refuse(404, "notFound")
        if line == f"DELETE {top}/{name}":
            drive.remove(name)
            return self.reply(None, 204)
        if line == f"POST {top}/{name}/trash":
            drive.files[name].trashed = True
            return self.reply({"id": name})
        assert line == f"PUT /upload{top}/{name}"
        drive.files[name].content = body
        return self.reply({"id": name, "fileSize": str(len(body))})

    def fail(self, fault: Fault) -> None:
        """As it says."""
        if fault.drip:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not self.drive.closing.wait(0.05):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    break
            self.close_connection = True
        elif fault.size:
            self.flood(fault)
        elif fault.status:
            self.reply(fault.document, fault.status)
        else:
            self.drive.closing.wait()
            self.close_connection = True

    def flood(self, fault: Fault) -> None:
        """Spaces, as JSON may have them, as long as they are taken."""
        content = gzip.compress(b" " * fault.size) if fault.packed else b" " * fault.size
        self.send_response(fault.status or 200)
        self.send_header("Content-Length", str(len(content)))
        if fault.packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        for begin in range(0, len(content), 1 << 16):
            try:
                self.drive.sent += self.wfile.write(content[begin : begin + (1 << 16)])
            except OSError:
                break
        self.close_connection = True

    def refuse(self, status: int, reason: str) -> None:
        """In Google's form."""
        self.reply(refusal(reason), status)

    def reply(self, document: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """JSON."""
        content = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def refusal(reason: str, message: str = "No.") -> dict[str, Any]:
    """What Google's API says when it refuses."""
    return {"error": {"errors": [{"domain": "global", "reason": reason}], "code": 0, "message": message}}


@contextmanager
def drive_server() -> Iterator[DriveServer]:
    """The server, on the loopback, until the end of the block."""
    drive = DriveServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"drive": drive})) as server:
        drive.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield drive
        finally:
            drive.closing.set()
            time.sleep(0.06)  # what drips sees it
            server.shutdown()
            thread.join()
