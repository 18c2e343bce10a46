"""OSWorld's unmodified functions in the sandboxed worker, against a small guest server of this test. As root."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from requires import requires
from worker_bench import workers

from drums.errors import CheckerError, GuestError, SetupFailed
from drums_core.abc import CheckContext
from drums_core.config import HostConfig
from drums_core.guest_client import Response
from drums_core.guest_gateway import serve_guest
from drums_core.model import SetupStep, Task
from drums_osworld import worker_job
from drums_osworld.checker import OSWorldChecker
from drums_verifiers.worker import Job, Worker

needs_root = requires("root")

RENAMED = {
    "func": "exact_match",
    "result": {"type": "vm_command_line", "command": "[ -d ~/Desktop/b ] && echo yes || echo no", "shell": True},
    "expected": {"type": "rule", "rules": {"expected": "yes\n"}},
}


def task(evaluator: Mapping[str, Any]) -> Task:
    return Task("0" * 36, "do", (), evaluator, "os", "0" * 64)


@attrs.define
class Guest:
    """Answers `/execute` with what `answer` makes of the request, and `/file` with `files`."""

    answer: Callable[[Any], tuple[int, Any]]
    files: dict[str, bytes] = attrs.field(factory=dict)
    requests: list[tuple[str, str]] = attrs.field(factory=list)
    failures: list[str] = attrs.field(factory=list)

    async def serve(self, fd: int) -> None:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))
        await trio.serve_listeners(self._one, [listener])

    async def _one(self, stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive_some()
            head, _, body = data.partition(b"\r\n\r\n")
            length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
            while len(body) < length:
                body += await stream.receive_some()
            self.requests.append((head.split(b" ")[1].decode(), body.decode()))
            status, reply = self._reply(head.split(b" ")[1], body)
            if status == 0:
                return  # not a word: the connection just ends
            lines = f"HTTP/1.1 {status} X\r\nContent-Length: {len(reply)}\r\nConnection: close\r\n\r\n"
            await stream.send_all(lines.encode() + reply)

    def _reply(self, path: bytes, body: bytes) -> tuple[int, bytes]:
        if path == b"/execute":
            status, document = self.answer(json.loads(body))
            return status, json.dumps(document).encode()
        content = self.files.get(body.decode().removeprefix("file_path=").replace("%2F", "/"))
        return (200, content) if content is not None else (404, b"")


def says(output: str) -> Callable[[Any], tuple[int, Any]]:
    return lambda _: (200, {"status": "success", "output": output, "error": "", "returncode": 0})


def make_checkout(root: Path) -> Path:
    """A checkout with evaluation code of this test's."""
    files = {
        "evaluators/metrics/general.py": """
import no_such_package
from no_such_package.part import Thing, ThingError
DEFAULT = Thing("made at import")[0]
def annotated(x: Thing | None) -> "Thing": ...
def mine(result): return result / 2
def text(result): return "1"
def swallows(result):
    try:
        return no_such_package.compare(result)
    except ThingError:
        return 0.5
    except:
        return 1.0
""",
        "evaluators/metrics/broken.py": "import desktop_env.no_such_module\ndef of_a_broken_module(result): return 1.0",
        "evaluators/metrics/__init__.py": "raise RuntimeError('never run')",
        "evaluators/getters/general.py": """
def get_x(env, config): return 1
def get_secret(env, config):
    try:
        return env.secret
    except Exception:
        return 1
def get_neighbour(env, config):
    import socket
    assert (env.vm_ip, env.chromium_port, env.vlc_port) == ("127.0.0.1", 9222, 8080)
    try:
        return socket.create_connection((env.vm_ip, env.chromium_port + 1))
    except Exception:
        return 1
""",
        "evaluators/getters/__init__.py": "",
        "controllers/python.py": "class PythonController:\n    def __init__(self, ip, port): ...",
    }
    for name, text in files.items():
        path = root / "checkout" / "desktop_env" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "checkout"


@attrs.define
class Bench:
    """A checker with the context that a core would give it."""

    scratch: Path
    steps: list[SetupStep] = attrs.field(factory=list)
    fault: Exception | None = None
    checker: OSWorldChecker = attrs.field(
        factory=lambda: OSWorldChecker(HostConfig(checker_timeout_s=30, files_offline=True))
    )

    async def _run(self, steps: Sequence[SetupStep]) -> None:
        self.steps += steps
        if self.fault:
            raise self.fault

    async def score(
        self, evaluator: Mapping[str, Any], guest: Guest | Gateway, last_action: str | None = None, **options: Any
    ) -> float:
        context = CheckContext(
            task(evaluator), last_action, guest.serve, guest.failures, self._run, self.scratch, **options
        )
        return await self.checker.check(context)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@needs_root
async def test_exact_match_scores_what_the_desktop_says(bench: Bench) -> None:
    guest = Guest(says("yes\n"))
    assert await bench.score(RENAMED, guest) == 1.0
    assert guest.requests == [
        ("/execute", json.dumps({"command": RENAMED["result"]["command"], "shell": True}))  # type: ignore[index]
    ]
    assert await bench.score(RENAMED, Guest(says("no\n"))) == 0.0
    assert await bench.score(RENAMED, Guest(says("yes"))) == 0.0
    assert "desktop_env.evaluators" not in sys.modules


@attrs.define
class Gateway:
    """The gateway that a host puts before a desktop; here it asks a guest server of this test."""

    status: int
    failures: list[str] = attrs.field(factory=list)

    async def serve(self, fd: int) -> None:
        await serve_guest(self._ask, fd, self.failures)

    async def _ask(self, method: str, target: str, body: bytes = b"", headers: object = ()) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(self.status, "application/json", b'{"status": "error", "message": "no"}')


@needs_root
async def test_functions_are_loaded_before_there_is_a_desktop_to_ask(bench: Bench) -> None:
    """A library that OSWorld's module of this function imports is in a worker while nothing is there yet."""
    guest = Guest(says("yes\n"))

    async def wait_there() -> None:
        with trio.fail_after(30):
            while not any("/lxml/etree" in maps(pid) for pid in workers()):  # noqa: ASYNC110 - another process
                await trio.sleep(0.05)
        assert guest.requests == []

    assert await bench.score(RENAMED, guest, wait_there=wait_there) == 1.0


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


@needs_root
async def test_refusal_of_the_guest_scores_as_osworld_does(bench: Bench) -> None:
    """A program that is not there, which is a fact about the desktop: as in production, by the gateway."""
    assert await bench.score(RENAMED, Gateway(404)) == 0.0


@needs_root
async def test_fault_of_the_guest_withholds_the_score(bench: Bench) -> None:
    with pytest.raises(CheckerError, match="could not ask the desktop: POST /execute: the guest server answered 500"):
        await bench.score(RENAMED, Gateway(500))


@needs_root
async def test_output_that_was_cut_withholds_the_score(bench: Bench) -> None:
    """What a metric looks for, or what must not be there, may be in the rest. Text that looks like the mark is none."""
    reply = {"status": "success", "output": "yes\n", "error": "", "returncode": 0}
    with pytest.raises(CheckerError, match="printed more than the desktop's guest server passes on"):
        await bench.score(RENAMED, Guest(lambda _: (200, {**reply, "output_truncated": True})))
    alike = {**reply, "error": '", "output_truncated": true'}
    assert await bench.score(RENAMED, Guest(lambda _: (200, alike))) == 1.0


@needs_root
async def test_recorded_transport_failure_withholds_the_score(bench: Bench) -> None:
    guest = Guest(lambda _: (502, {}))
    guest.failures.append("POST /execute: the guest server did not answer within 30 s")
    with pytest.raises(CheckerError, match="could not ask the desktop: POST /execute") as info:
        await bench.score(RENAMED, guest)
    assert info.value.failures == guest.failures


@needs_root
async def test_broken_connection_withholds_the_score_even_when_nobody_recorded_it(bench: Bench) -> None:
    with pytest.raises(CheckerError, match=r"could not be run: POST http://127\.0\.0\.1:5000/execute failed"):
        await bench.score(RENAMED, Guest(lambda _: (0, None)))


@needs_root
async def test_broken_connection_that_the_getter_swallows_withholds_the_score(bench: Bench) -> None:
    # The controller catches Exception three times, and answers None.
    evaluator = {
        "func": "exact_match",
        "result": {"type": "vm_terminal_output"},
        "expected": {"type": "rule", "rules": {"expected": "x"}},
    }

    class Silent(Guest):
        def _reply(self, path: bytes, body: bytes) -> tuple[int, bytes]:
            return 0, b""

    with pytest.raises(CheckerError, match=r"could not be run: GET .*/terminal failed"):
        await bench.score(evaluator, Silent(says("")))


@needs_root
async def test_missing_package_withholds_the_score(bench: Bench) -> None:
    # The extras that bring these are left out of the tests' environment: torch, and numba.
    for name in ("easyocr", "librosa"):
        if importlib.util.find_spec(name):
            pytest.fail(f"this test wants an interpreter without {name}")
    evaluator = {
        "func": "compare_image_text",
        "result": {"type": "vm_file", "path": "/home/user/a.png", "dest": "a.png"},
        "expected": {"type": "rule", "rules": {"type": "text", "text": ["x"]}},
    }
    with pytest.raises(CheckerError, match=r"could not be run: easyocr is not installed.*drums\[osworld-ocr\]"):
        await bench.score(evaluator, Guest(says("y"), {"/home/user/a.png": b"junk"}))


@needs_root
async def test_missing_package_withholds_the_score_although_the_function_swallows_it(bench: Bench) -> None:
    # check_image_size and its like have `except Exception` around all; a stand-in raises no Exception.
    evaluator = {
        "func": "compare_audios",
        "result": {"type": "vm_file", "path": "/home/user/a.mp3", "dest": "a.mp3"},
        "expected": {"type": "vm_file", "path": "/home/user/b.mp3", "dest": "b.mp3"},
    }
    files = {"/home/user/a.mp3": b"junk", "/home/user/b.mp3": b"other junk"}
    with pytest.raises(CheckerError, match=r"librosa is not installed.*drums\[osworld-audio\]"):
        await bench.score(evaluator, Guest(says(""), files))


@needs_root
async def test_swallowed_use_of_a_missing_package_withholds_the_score(bench: Bench, tmp_path: Path) -> None:
    bench.checker = OSWorldChecker(HostConfig(osworld=make_checkout(tmp_path)))
    with pytest.raises(CheckerError, match="no_such_package is not installed"):
        await bench.score({"func": "swallows", "result": {"type": "x"}}, Guest(says("")))
    assert await bench.score({"func": "mine", "result": {"type": "x"}}, Guest(says(""))) == 0.5
    with pytest.raises(CheckerError, match="raised ModuleNotFoundError"):
        await bench.score({"func": "of_a_broken_module", "result": {"type": "x"}}, Guest(says("")))
    with pytest.raises(CheckerError, match="returned '1', not a number"):
        await bench.score({"func": "text", "result": {"type": "x"}}, Guest(says("")))
    with pytest.raises(CheckerError, match=r"a getter asked for env\.secret"):
        await bench.score({"func": "mine", "result": {"type": "secret"}}, Guest(says("")))
    with pytest.raises(CheckerError, match=r"a connection to 127\.0\.0\.1:9223 was asked for"):
        await bench.score({"func": "mine", "result": {"type": "neighbour"}}, Guest(says("")))


@needs_root
async def test_file_is_fetched_by_osworlds_own_controller(bench: Bench) -> None:
    evaluator = {
        "func": "diff_text_file",
        "result": {"type": "vm_file", "path": "/home/user/a.txt", "dest": "a.txt"},
        "expected": {"type": "vm_file", "path": "/home/user/b.txt", "dest": "b.txt"},
    }
    files = {"/home/user/a.txt": b"one\ntwo\n", "/home/user/b.txt": b"one\ntwo\n"}
    assert await bench.score(evaluator, Guest(says(""), files)) == 1.0


@needs_root
async def test_output_that_postconfig_kept_is_where_osworld_looks(bench: Bench) -> None:
    (bench.scratch / "cache").mkdir(mode=0o700)
    (bench.scratch / "cache" / "ls.out").write_text("./COMPANY.msf\n")
    (bench.scratch / "cache" / "ls.out").chmod(0o600)
    evaluator = {
        "func": "check_list",
        "postconfig": [{"type": "execute", "parameters": {"command": ["ls"], "stdout": "ls.out"}}],
        "result": {"type": "cache_file", "path": "ls.out"},
        "expected": {"type": "rule", "rules": {"expect": ["COMPANY"]}},
    }
    assert await bench.score(evaluator, Guest(says(""))) == 1.0
    assert [x.type for x in bench.steps] == ["execute"]
    (bench.scratch / "cache" / "ls.out").unlink()
    with pytest.raises(CheckerError, match="AssertionError"):
        await bench.score(evaluator, Guest(says("")))


COMPARED = {
    "func": "diff_text_file",
    "result": {"type": "vm_file", "path": "/home/user/a.txt", "dest": "a.txt"},
    "expected": {
        "type": "cloud_file",
        "path": "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main/set/b%20c.txt",
        "dest": "b.txt",
    },
}


@needs_root
async def test_expected_files_come_from_the_mirror(bench: Bench, tmp_path: Path) -> None:
    """Under OSWorld's own name and by its own code; another address, or a file that is not there, is no score."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "b c.txt").write_text("right\n")
    bench.checker = OSWorldChecker(HostConfig(checker_timeout_s=30, file_mirror=tmp_path))
    assert await bench.score(COMPARED, Guest(says(""), files={"/home/user/a.txt": b"right\n"})) == 1.0
    assert await bench.score(COMPARED, Guest(says(""), files={"/home/user/a.txt": b"wrong\n"})) < 1.0
    (tmp_path / "set" / "b c.txt").unlink()
    with pytest.raises(CheckerError, match=r"cannot be had: .* is not in the mirror"):
        await bench.score(COMPARED, Guest(says(""), files={"/home/user/a.txt": b"right\n"}))


def test_what_osworld_would_evaluate_is_a_literal_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is never run, and recorded; what is none is the error that OSWorld has of it."""
    monkeypatch.setattr(worker_job, "BROKEN", [])
    monkeypatch.setattr(worker_job, "HOSTILE", [])
    assert worker_job.literal(" ['a.desktop', 1]\n") == ["a.desktop", 1]
    with pytest.raises(SyntaxError):
        worker_job.literal("@as []\n")
    assert worker_job.BROKEN == worker_job.HOSTILE == []
    others = ("[].append(1)", "__import__('os').getpid()", "import os", "(", "@as [exit()]", "(" * 500 + ")" * 500)
    for text in others:
        with pytest.raises(worker_job.WorkerBroken):
            worker_job.literal(text)
    assert len(worker_job.HOSTILE) == len(worker_job.BROKEN) == len(others)


async def test_what_is_compared_is_fetched_before_an_episode_is_spent(tmp_path: Path) -> None:
    config = HostConfig(state_dir=tmp_path, files_private_addresses=True)
    evaluator = {**COMPARED, "expected": {"type": "cloud_file", "path": "http://127.0.0.1:1/x", "dest": "x"}}
    with pytest.raises(SetupFailed, match=r"'http://127\.0\.0\.1:1/x' cannot be had"):
        await OSWorldChecker(config).prepare(task(evaluator))
    await OSWorldChecker(attrs.evolve(config, files_offline=True)).prepare(task(evaluator))


@needs_root
async def test_other_addresses_withhold_the_score(bench: Bench) -> None:
    evaluator = {
        "func": "diff_text_file",
        "result": {"type": "cloud_file", "path": "https://example.org/a", "dest": "a"},
        "expected": {"type": "cloud_file", "path": "https://example.org/b", "dest": "b"},
    }
    with pytest.raises(CheckerError, match=r"'https://example\.org/a'.* cannot be had"):
        await bench.score(evaluator, Guest(says("")))


async def test_infeasible_and_fail_are_judged_after_postconfig(bench: Bench) -> None:
    steps = [{"type": "sleep", "parameters": {"seconds": 0}}]
    guest = Guest(says("yes\n"))
    for evaluator, action, score in (
        ({"func": "infeasible"}, "FAIL", 1.0),
        ({"func": "infeasible"}, "DONE", 0.0),
        ({"func": "infeasible"}, None, 0.0),
        (RENAMED, "FAIL", 0.0),
    ):
        bench.steps.clear()
        assert await bench.score({**evaluator, "postconfig": steps}, guest, action) == score
        assert [x.type for x in bench.steps] == ["sleep"]
    assert guest.requests == []


async def test_postconfig_that_fails_withholds_the_score(bench: Bench) -> None:
    bench.fault = GuestError("no answer")
    with pytest.raises(CheckerError, match="postconfig failed: no answer"):
        await bench.score({**RENAMED, "postconfig": [{"type": "sleep", "parameters": {}}]}, Guest(says("")))


async def test_what_a_worker_answers_is_checked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = [{"score": x, "broken": []} for x in (None, "1.0", 1.5, -1, [1])]
    answers += [{"score": 1.0}, {"score": 1.0, "broken": "no"}, {"score": 1.0, "broken": ["swallowed"]}, {}]
    for answer in answers:

        async def told(_: Worker, job: Job, answer: dict[str, Any] = answer) -> dict[str, Any]:
            return answer

        monkeypatch.setattr(Worker, "answer", told)
        with pytest.raises(CheckerError):
            await bench.score(RENAMED, Guest(says("")))
