"""A small daemon for the client's tests: it keeps slots as the wire's contract says, without a desktop behind them.

`script` puts an answer of its own before the contract's, once or for good.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import attrs

TOKEN = "drums_sk_test"
TASK = "e0df059f-28a6-4169-924f-b9623e7184cc"
PNG = b"\x89PNG\r\n\x1a\n"


@attrs.frozen
class Asked:
    """A request as it came."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@attrs.frozen
class Answer:
    """What to answer. `drop` closes the connection at that point: before the answer, or within its body."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = attrs.field(factory=lambda: {"Content-Type": "application/json"})
    drop: bool = False


def as_json(document: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(document).encode())


def problem(code: str, status: int, **more: Any) -> Answer:
    document = {"type": "about:blank", "title": code, "status": status, "code": code, "hint": "", "facts": {}, **more}
    return Answer(status, json.dumps(document).encode(), {"Content-Type": "application/problem+json"})


def events(*named: tuple[str, Any], drop: bool = False) -> Answer:
    """An event stream, with the comment that keeps it alive."""
    text = ": keep-alive\n\n" + "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in named)
    return Answer(200, text.encode(), {"Content-Type": "text/event-stream; charset=utf-8"}, drop)


def a_row(query: Mapping[str, str]) -> dict[str, Any]:
    """A policy whose agent crashes its desktop in every second episode."""
    counts = {"episodes": 4, "valid": 2, "invalid": 2, "pending": 0, "rewards": 4, "scored": 3, "checker_errors": 1}
    rates = {"valid_rate": 0.5, "mean_score": 0.25, "checker_error_rate": 0.25, "checker_skipped": 0}
    failures = [{"gate": "no_app_crash", "cause": "agent", "episodes": 2}]
    causes = {"failures": failures, "checker_error_causes": {"agent": 1}}
    return {"task": None, "label": "run-7", **counts, **rates, **causes, "query": dict(query)}


class FakeDaemon:
    """Serves on a port of its own; `asked` is everything that came."""

    def __init__(self, unix: str | None = None) -> None:
        self.asked: list[Asked] = []
        self.slots: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.verdict = "valid"
        self.waits = 0  # how many waits are answered with `pending`
        self.streams = True
        self._scripted: list[tuple[str, Callable[[Asked], Answer | None]]] = []
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True  # the client left

            def do(self) -> None:
                fake._serve(self)

            do_GET = do_POST = do_PUT = do_DELETE = do

            def address_string(self) -> str:
                return "client"

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_UNIX if unix else socket.AF_INET

            def server_bind(self) -> None:
                if unix is None:
                    super().server_bind()
                else:
                    self.socket.bind(unix)

        self._server = Server(unix or ("127.0.0.1", 0), Handler)  # type: ignore[arg-type]
        self.url = f"unix:{unix}" if unix else f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def script(self, pattern: str, *answers: Answer | Callable[[Asked], Answer | None]) -> None:
        """Answer requests whose `METHOD /path` matches with these in turn, the last one for good."""
        left = list(answers)

        def next_one(asked: Asked) -> Answer | None:
            with self._lock:
                answer = left.pop(0) if len(left) > 1 else left[0]
            return answer(asked) if callable(answer) else answer

        self._scripted.insert(0, (pattern, next_one))

    def of(self, pattern: str) -> list[Asked]:
        """The requests whose `METHOD /path` matches."""
        return [asked for asked in self.asked if re.fullmatch(pattern, str(asked))]

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        query = {k: v[-1] for k, v in parse_qs(url.query).items()}
        asked = Asked(handler.command, unquote(url.path), query, dict(handler.headers), body)
        self.asked.append(asked)
        answer = self._answer(asked)
        if answer.drop and not answer.body:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            handler.send_header("Connection", "close")
        elif answer.status != 204:
            handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        handler.wfile.write(answer.body)

    def _answer(self, asked: Asked) -> Answer:
        for pattern, make in self._scripted:
            if re.fullmatch(pattern, str(asked)) and (answer := make(asked)) is not None:
                return answer
        if asked.path == "/v1/health" and "Authorization" not in asked.headers:
            return as_json({"status": "ok", "version": "0.1.0"})
        if asked.headers.get("Authorization") != f"Bearer {TOKEN}":
            return problem("unauthorized", 401, detail="the token is missing or wrong")
        with self._lock:
            return self._contract(asked)

    def _contract(self, asked: Asked) -> Answer:
        listings = ("slots", "checkpoints", "episodes", "plugins", "images")
        match asked.method, asked.path.removeprefix("/v1/").split("/"):
            case "GET", ["health"]:
                return as_json({"status": "ok", "version": "0.1.0", "slots": len(self.slots), "max_slots": 32})
            case "GET", ["tasks"]:
                return as_json({"tasks": [a_task(), a_task(supported=False)], "broken": {"x.json": "no JSON"}})
            case "GET", ["tasks", prefix]:
                if len(prefix) < 8 or not TASK.startswith(prefix):
                    return problem("task_not_found", 404, detail=f"no task {prefix!r}", facts={"task": prefix})
                return as_json(a_task())
            case "POST", ["slots"]:
                body = asked.json
                slot = self._new(body.get("task") and TASK, body.get("ttl", 3600.0))
                slot["labels"] = body.get("labels", {})
                return self._long(asked, 201, slot)
            case "GET", ["slots"]:
                return as_json({"slots": list(self.slots.values())})
            case "GET", [name] if name in listings:
                return as_json({name: [{"id": "one", **asked.query}]})
            case "GET", ["stats"]:
                return as_json({"rows": [a_row(asked.query)]})
            case "POST", ["plugins", "reload"]:
                return as_json({"plugins": [{"id": "one"}]})
            case "GET", ["episodes", identity]:
                return as_json({"id": identity, "gates": [], "rewards": []})
            case "POST", ["episodes", identity, "reverify"]:
                grade = {"score": 1.0, "checker_error": None, "checker_error_cause": None, "at": None}
                document = {"episode": identity, "checkpoint": "c-1", "differences": [], "thawed": []}
                return self._long(asked, 200, document | {"agree": True, "recorded": grade, "again": grade})
            case method, ["slots", identity, *operation]:
                if identity not in self.slots:
                    return problem("slot_not_found", 404, detail=f"no slot {identity!r}", facts={"slot": identity})
                return self._slot(asked, method, self.slots[identity], operation)
            case _:
                return problem("not_found", 404, detail=f"no route {asked.path!r}")

    def _slot(self, asked: Asked, method: str, slot: dict[str, Any], operation: list[str]) -> Answer:
        match method, operation:
            case "GET", []:
                return as_json(slot)
            case "DELETE", []:
                del self.slots[slot["id"]]
                return Answer(204, headers={})
            case "GET", ["gates"]:
                return as_json(self._report(slot))
            case "POST", ["wait"]:
                self.waits -= 1
                return as_json(self._report(slot, "pending" if self.waits >= 0 else None))
            case "GET", ["screenshot"]:
                return Answer(200, PNG, {"Content-Type": "image/png"})
            case "GET", ["accessibility"]:
                return as_json({"AT": "<desktop/>"})
            case "POST", ["step"]:
                if slot["state"] == "quarantined":
                    return problem("slot_quarantined", 409, detail="it is quarantined", hint="release it")
                return as_json({"status": "success", "output": asked.json["action"], "error": "", "returncode": 0})
            case "POST", ["execute"]:
                return as_json({"returncode": 0, "output": json.dumps(asked.json), "error": ""})
            case "GET", ["files"]:
                if asked.query["path"] not in self.files:
                    return problem("file_not_found", 404, detail="no such file", facts={"path": asked.query["path"]})
                return Answer(200, self.files[asked.query["path"]], {"Content-Type": "application/octet-stream"})
            case "PUT", ["files"]:
                self.files[asked.query["path"]] = asked.body
                return Answer(204, headers={})
            case "POST", ["reset"]:
                return self._long(asked, 200, slot)
            case "POST", ["fork"]:
                return self._long(asked, 200, {"slots": [self._new(TASK, None) for _ in range(asked.json["n"])]})
            case "POST", ["save"]:
                return self._long(asked, 200, {"checkpoint": {"id": "c-1", "name": asked.json["name"]}})
            case "POST", ["verify"]:
                return self._long(asked, 200, self._reward(slot))
            case "POST", ["quarantine"]:
                slot |= {"state": "quarantined", "reason": asked.json["reason"]}
                return as_json(slot)
            case "POST", ["release"]:
                slot["state"] = "down"
                return as_json(slot)
            case "POST", ["extend"]:
                slot |= {"ttl": asked.json["ttl"], "expires_in": asked.json["ttl"]}
                return as_json(slot)
        return problem("not_found", 404, detail=f"no route {asked.path!r}")

    def _long(self, asked: Asked, status: int, body: Any) -> Answer:
        if self.streams and "text/event-stream" in asked.headers.get("Accept", ""):
            return events(("progress", {"kind": "note"}), ("result", {"status": status, "body": body}))
        return as_json(body, status)

    def _new(self, task: str | None, ttl: float | None) -> dict[str, Any]:
        slot = a_slot(f"d-{len(self.slots):012x}", task, ttl)
        self.slots[slot["id"]] = slot
        return slot

    def _report(self, slot: dict[str, Any], verdict: str | None = None) -> dict[str, Any]:
        verdict = verdict or ("invalid" if slot["state"] == "quarantined" else self.verdict)
        bad = verdict == "invalid"
        lines = [{"gate": "state_hash", "status": "fail" if bad else "pass", "phase": "pre_resume", "reason": ""}]
        return {
            "episode": "e-1",
            "origin": "create",
            "gates": {"gates": lines},
            "validity": {
                "verdict": verdict,
                "valid": verdict == "valid",
                "bad_gates": ["state_hash"] if bad else [],
                "invalid_reasons": ["state_hash: a file changed"] if bad else [],
            },
        }

    def _reward(self, slot: dict[str, Any]) -> dict[str, Any]:
        validity = self._report(slot)["validity"]
        quarantined = slot["state"] == "quarantined"
        return {
            "score": None if quarantined else 1.0,
            **validity,
            "checker_error": None,
            "checker_error_cause": None,
            "checker_skipped": f"quarantined: {slot['reason']}" if quarantined else None,
            "provenance": {"drums": "0.1.0"},
        }


def a_task(**changes: Any) -> dict[str, Any]:
    return {
        "id": TASK,
        "domain": "os",
        "instruction": "rename the folder",
        "supported": True,
        "unsupported_reason": "" if changes.get("supported", True) else "the agent itself acts as root",
        "evaluator": {"func": "exact_match"},
        "config": [],
        "sha256": "0" * 64,
        "source": "os.json",
        "applications": [],
        "needs_web": False,
        "remarks": [],
        "images": ["minimal", "osworld"],
        **changes,
    }


def a_slot(identity: str = "d-000000000000", task: str | None = TASK, ttl: float | None = 3600.0) -> dict[str, Any]:
    return {
        "id": identity,
        "state": "up",
        "reason": "",
        "task": task,
        "image": "minimal",
        "episode": "e-1",
        "verdict": "pending",
        "ttl": ttl,
        "expires_in": ttl,
        "created_at": time.time(),
    }


@contextmanager
def fake_daemon(unix: str | None = None) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(unix)
    try:
        yield daemon
    finally:
        daemon.stop()
