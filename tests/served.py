"""A real daemon in a process of its own, on a free port; needs root, CRIU and an image.

`served` is for tests of the client, `running` for those of the daemon's own answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import attrs
from test_openapi import DOCUMENT, schema_errors

from drums_core.config import HostConfig

TASK = "2e208cb7"
MAX_SLOTS = 4


@attrs.frozen
class Served:
    """Where it is, the token it wants, and its process."""

    url: str
    token: str
    pid: int

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a program that is to find it."""
        return {**os.environ, "DRUMS_URL": self.url, "DRUMS_TOKEN": self.token}


@contextmanager
def served(log: Path, *options: str) -> Iterator[Served]:
    """A daemon until the end of the block; its log goes to a file, whose end tells why it did not start."""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "drums", "serve", "--port", "0", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"the daemon did not start: {log.read_text()[-2000:]}"
            ready = json.loads(line)
            yield Served(ready["url"], Path(ready["token_file"]).read_text().strip(), process.pid)
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, log.read_text()[-2000:]


@attrs.frozen
class Reply:
    """An answer."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.content)

    def refused(self, status: int, code: str) -> dict[str, Any]:
        """The problem document, when this is that refusal."""
        assert self.status == status, self.content[:500]
        document: dict[str, Any] = self.json
        assert self.headers["content-type"] == "application/problem+json"
        assert document["code"] == code and document["status"] == status and document["detail"], document
        assert schema_errors("Problem", document) == []
        return document


@attrs.define
class Running:
    """A daemon in a process of its own."""

    config: HostConfig
    process: subprocess.Popen[str]
    port: int
    token: str

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, token: str | None = ""
    ) -> Reply:
        """One request; `body` is bytes or JSON; `token` None sends none."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        fields = dict(headers or {})
        if token is not None:
            fields["Authorization"] = f"Bearer {token or self.token}"
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, content, fields)
            response = connection.getresponse()
            lines = {k.lower(): v for k, v in response.getheaders()}
            return Reply(response.status, lines, response.read())

    def good(self, method: str, path: str, body: Any = None, *, status: int = 200, **more: Any) -> Any:
        """The JSON of an answer that must be this success, and be what the OpenAPI document says."""
        reply = self.call(method, path, body, **more)
        assert reply.status == status, (method, path, reply.content[:1000])
        route = next(p for p in DOCUMENT["paths"] if _matches(p, path) and method.lower() in DOCUMENT["paths"][p])
        said = DOCUMENT["paths"][route][method.lower()]["responses"][str(status)]
        schema = said.get("content", {}).get("application/json", {}).get("schema")
        if schema is None:
            return reply.content
        assert schema_errors(schema["$ref"].rpartition("/")[2], reply.json) == [], route
        return reply.json

    def create(self, **body: Any) -> str:
        """A new desktop's slot."""
        slot: str = self.good("POST", "/v1/slots", body, status=201)["id"]
        return slot

    @contextmanager
    def slot(self, **body: Any) -> Iterator[str]:
        """A desktop for a block."""
        slot = self.create(**body)
        try:
            yield f"/v1/slots/{slot}"
        finally:
            self.call("DELETE", f"/v1/slots/{slot}")

    def slots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.good("GET", "/v1/slots")["slots"]
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(60)


def _matches(template: str, path: str) -> bool:
    parts, given = template.split("/"), path.partition("?")[0].split("/")
    return len(parts) == len(given) and all(a == b or a.startswith("{") for a, b in zip(parts, given, strict=True))


def _drain(pipe: IO[str]) -> None:
    with pipe:
        pipe.read()


@contextmanager
def running(config: HostConfig, *options: str) -> Iterator[Running]:
    """A daemon on a free port; killed at the end if it still runs."""
    argv = [sys.executable, "-c", "from drums.cli import main; main()", "serve", "--port", "0", "--json"]
    argv += ["--state-dir", str(config.state_dir), "--max-slots", str(MAX_SLOTS), *options]
    log = config.state_dir.parent / f"{config.state_dir.name}.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRUMS_")}
    with open(log, "w") as errors:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                ready = json.loads(line)
                break
        else:
            raise AssertionError(f"the daemon did not start: {log.read_text()}")
        # Nothing must wait for a reader.
        threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
        token = Path(ready["token_file"]).read_text().strip()
        yield Running(config, process, int(ready["url"].rpartition(":")[2]), token)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        log.unlink()


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def events_of(reply: Reply) -> list[tuple[str, Any]]:
    """The events of a stream that has ended."""
    assert reply.headers["content-type"] == "text/event-stream"
    found = []
    for block in reply.content.decode().split("\n\n"):
        if block.startswith("event: "):
            kind, _, data = block.removeprefix("event: ").partition("\ndata: ")
            found.append((kind, json.loads(data)))
    return found
