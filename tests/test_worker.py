"""The worker's sandbox, and everything that a worker can do instead of answering. Real processes, as root."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from requires import requires

from drums.errors import CheckerError
from drums_core.leftovers import temporary_cgroup
from drums_core.model import Limits
from drums_verifiers import sandbox
from drums_verifiers.worker import open_worker, run_worker

pytestmark = requires("root")


async def run(function: str, request: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    options.setdefault("timeout_s", 20)
    return await run_worker(request or {}, job=f"worker_jobs:{function}", **options)


def workers() -> list[int]:
    """Host pids of all processes with a worker's command line or a worker's ids."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        line = " ".join(process.info["cmdline"] or [])
        uids = process.info["uids"]
        if "worker_main.py" in line or (uids and uids.real == 65534 and "time.sleep" in line):
            found.append(process.pid)
    return found


def gone(limit_s: float = 10.0) -> bool:
    """Whether no worker is left; other sessions' short-lived ones are waited for."""
    end = time.monotonic() + limit_s
    while workers():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """No process, descriptor or mount of a worker outlives the test."""

    def mounts() -> list[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return sorted(x.split()[4] for x in lines if x.split()[4].startswith(("/sys", "/drums")))

    before = mounts(), len(os.listdir("/proc/self/fd"))
    yield
    assert not psutil.Process().children(recursive=True)
    assert gone()
    assert (mounts(), len(os.listdir("/proc/self/fd"))) == before


class Guest:
    """Answers `hello` on a listening descriptor that it takes over."""

    def __init__(self) -> None:
        self.listened = ""

    async def __call__(self, fd: int) -> None:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))
        self.listened = str(listener.socket.getsockname())

        async def answer(stream: trio.SocketStream) -> None:
            async with stream:
                if await stream.receive_some(100):
                    await stream.send_all(b"good day")

        await trio.serve_listeners(answer, [listener])


async def test_sandbox_shows_nothing_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMS_TEST_TOKEN", "of the host")
    secret = tmp_path / "secret"
    secret.write_text("of root")
    given = tmp_path / "given"
    given.write_text("for the worker")
    given.chmod(0o644)

    seen = await run("probe", {"secret": str(secret)}, guest=Guest(), files={"given": given})

    assert seen["ids"] == [[65534] * 3, [65534] * 3, []]
    status = seen["status"]
    assert {status[x] for x in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert seen["pids"][:2] == [1, 2] and len(seen["pids"]) <= 3
    assert seen["writable"] == ["/drums/work"] and seen["listing"] == []
    assert not {os.readlink(f"/proc/self/ns/{x}") for x in seen["namespaces"]} & set(seen["namespaces"].values())
    assert seen["limits"]["CPU"] == [80, 80] and seen["limits"]["FSIZE"] == [1 << 30, 1 << 30]
    assert seen["limits"]["CORE"] == [0, 0] and seen["limits"]["NPROC"] == [512, 512]
    assert seen["links"] == ["lo"]
    assert seen["host_file"] == seen["shadow"] == "FileNotFoundError"
    assert seen["file"] == "b'for the worker'"
    assert seen["sysfs"] == "FileNotFoundError"
    assert seen["write_root"] == seen["write_usr"] == seen["write_job"] == "OSError"
    assert seen["write_work"] == "'1'"
    assert seen["execute_work"] == "PermissionError"
    assert seen["internet"] == "OSError" and seen["guest"] == "None"
    assert seen["vsock"] == "OSError"
    assert seen["unshare_user"] != 0
    assert len(seen["fds"]) <= 6  # the streams, the reply, the leash, and the one that lists them
    for text in (str(seen["environment"]), *seen["others"]):
        assert "TZ" in text and "PYTEST_CURRENT_TEST" not in text and "DRUMS_TEST_TOKEN" not in text


async def test_guest_is_reached_on_its_address_only_when_there_is_one() -> None:
    guest = Guest()
    assert await run("ask", guest=guest) == {"answer": "good day"}
    assert guest.listened == "('127.0.0.1', 5000)"
    with pytest.raises(CheckerError, match="ConnectionRefusedError"):
        await run("ask")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # this thread is still in the host's namespace
        assert ("lo" in {x for _, x in socket.if_nameindex()}) and s.getsockname()[1]


async def test_other_ports_are_reached_where_they_are_served_and_no_more() -> None:
    browser, page = Guest(), Guest()
    reached = await run("connect", {"ports": [5000, 8080, 9222, 9223]}, ports={9222: browser, 8080: page})
    assert reached == {
        "5000": "ConnectionRefusedError",
        "8080": "good day",
        "9222": "good day",
        "9223": "ConnectionRefusedError",
    }
    assert (browser.listened, page.listened) == ("('127.0.0.1', 9222)", "('127.0.0.1', 8080)")


async def test_relay_that_ends_or_fails_withholds_the_answer() -> None:
    async def ends(fd: int) -> None:
        os.close(fd)

    async def fails(fd: int) -> None:
        os.close(fd)
        raise RuntimeError("upstream is gone")

    with pytest.raises(CheckerError, match="relay ended early"):
        await run("hang", guest=ends)
    with pytest.raises(CheckerError, match="upstream is gone"):
        await run("hang", guest=fails)


async def test_large_request_arrives_whole() -> None:
    request = {"text": "ä\n" * 500_000}
    assert await run("echo", {"text": "kept"}) == {"text": "kept"}
    with pytest.raises(CheckerError, match="more than 4 MiB"):
        await run("echo", {**request, "more": "x" * (4 << 20)})


async def test_answer_counts_although_children_and_threads_are_left() -> None:
    assert await run("leave") == {"left": True}


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("exit", "ended with code 7"),
        ("abort", "killed by SIGABRT"),
        ("kill", "killed by SIGKILL"),
        ("segv", "killed by SIGSEGV"),
        ("file", "killed by SIGXFSZ"),
    ],
)
async def test_death_is_an_error_that_names_it(how: str, what: str) -> None:
    with pytest.raises(CheckerError, match=what):
        await run("die", {"how": how})


async def test_exception_is_an_error_with_its_traceback_and_output() -> None:
    with pytest.raises(CheckerError, match="raised ValueError: no such sheet") as info:
        await run("fail")
    assert "worker_jobs.py" in info.value.traceback
    assert "seen before the end" in info.value.output


async def test_huge_exception_is_cut() -> None:
    with pytest.raises(CheckerError, match="raised ValueError: xxx") as info:
        await run("talk")
    assert len(info.value.message) < 3000 and len(info.value.traceback) <= 8000


async def test_busy_worker_is_ended_in_time() -> None:
    with pytest.raises(CheckerError, match="did not finish within 1 s"):
        await run("spin", timeout_s=1)


async def test_hanging_worker_is_ended_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(CheckerError, match=r"within 0\.7 s") as info:
        await run("hang", timeout_s=0.7)
    assert time.monotonic() - start < 3
    assert "hanging" in info.value.output


async def test_flood_of_output_is_an_error() -> None:
    with pytest.raises(CheckerError, match="printed more than 64 MiB") as info:
        await run("flood")
    assert len(info.value.output) <= 64 << 10


async def test_too_large_a_reply_is_an_error() -> None:
    with pytest.raises(CheckerError, match="more than 4 MiB"):
        await run("large")


async def test_full_scratch_directory_is_an_error() -> None:
    with pytest.raises(CheckerError, match="scratch directory is full"):
        await run("fill", scratch_bytes=8 << 20)


@pytest.mark.parametrize("kind", ["nan", "set", "string"])
async def test_value_that_is_no_object_is_an_error(kind: str) -> None:
    with pytest.raises(CheckerError):
        await run("value", {"kind": kind})


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "nonsense",
        "\x80",
        '{"ok": true, "value": {"score": 1.0}',
        '{"ok": true, "value": {"score": 1.0}} {"ok": true, "value": {"score": 1.0}}',
        '{"ok": false, "ok": true, "value": {"score": 1.0}}',
        '{"ok": true, "value": {"score": NaN}}',
        '{"ok": true, "value": {"score": 1.0}, "more": 1}',
        '{"ok": 1, "value": {"score": 1.0}}',
        '{"ok": true, "value": 1.0}',
        "[" * 100_000,
        pickle.dumps({"ok": True, "value": {"score": 1.0}}, protocol=0).decode("latin-1"),
        '{"ok": false, "type": "' + "x" * 100_000 + '", "message": "' + "y" * 100_000 + '", "traceback": ""}',
    ],
)
async def test_reply_that_is_none_is_an_error(reply: str) -> None:
    with pytest.raises(CheckerError) as info:
        await run("forge", {"bytes": reply, "exit": True})
    assert len(info.value.message) < 4000


async def test_second_reply_is_an_error() -> None:
    with pytest.raises(CheckerError, match="no reply"):
        await run("forge", {"bytes": '{"ok": true, "value": {"score": 1.0}}'})


@pytest.mark.parametrize("job", ["no_such_module_anywhere:run", "worker_jobs:no_such_function"])
async def test_unknown_job_is_an_error(job: str) -> None:
    with pytest.raises(CheckerError, match="no_such"):
        await run_worker({}, job=job, timeout_s=5)


async def test_sandbox_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckerError, match=r"could not be started: .*cgroup\.procs"):
        await run("echo", cgroup_paths=[tmp_path / "no" / "cgroup"])
    with pytest.raises(CheckerError, match=r"could not be started: .*mount"):
        await run("echo", files={"x": tmp_path / "missing"})


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup that allows 64 MiB, on either version."""
    first = Path("/sys/fs/cgroup/memory")
    version_1 = first.is_dir()
    path = (first if version_1 else Path("/sys/fs/cgroup")) / f"drums-test-worker-{os.getpid()}"
    if not version_1:
        Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+memory")
    path.mkdir()
    try:
        (path / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(64 << 20))
        yield path
    finally:
        path.rmdir()


async def test_memory_limit_kills_and_says_so(memory_cgroup: Path) -> None:
    assert await run("echo", {"a": 1}, cgroup_paths=[memory_cgroup]) == {"a": 1}
    with pytest.raises(CheckerError, match="for want of memory"):
        await run("eat", cgroup_paths=[memory_cgroup])
    with pytest.raises(CheckerError, match="for want of memory"):
        await run("lose_a_child", cgroup_paths=[memory_cgroup])


async def test_process_limit_is_its_own_and_shows() -> None:
    """What one worker takes, another does not miss; a refusal that a checker swallows withholds its answer."""
    async with temporary_cgroup(Limits(pids=64)) as one, temporary_cgroup(Limits(pids=64)) as other:
        seen = await run("probe", {"secret": "/none"}, cgroup_paths=other.paths)
        assert seen["limits"]["NPROC"] == [-1, -1] or seen["limits"]["NPROC"][1] > 512
        with pytest.raises(CheckerError, match="more processes and threads than its cgroup allows"):
            await run("swarm", cgroup_paths=one.paths)
        assert await run("leave", cgroup_paths=other.paths) == {"left": True}


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.04, 0.06, 0.1, 0.3])
async def test_cancellation_leaves_nothing(after_s: float) -> None:
    with trio.move_on_after(after_s) as scope:
        await run("hang", guest=Guest())
    assert scope.cancelled_caught


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.04, 0.1, 0.3])
async def test_one_that_is_never_asked_leaves_nothing(after_s: float) -> None:
    """Given up while it starts, or while it waits."""
    with trio.move_on_after(after_s):
        async with open_worker({}, job="worker_jobs:hang", timeout_s=20, guest=Guest()):
            await trio.sleep_forever()
    async with open_worker({}, job="worker_jobs:hang", timeout_s=20, guest=Guest()):
        pass


async def test_it_prepares_before_it_is_asked_and_begins_when_it_is() -> None:
    """What `prepare` does is done; the job has not begun, and nobody serves the guest yet."""
    guest = Guest()
    async with open_worker({"x": 1}, job="prepared_jobs:run", timeout_s=20, guest=guest) as worker:
        assert worker.process.stdout is not None
        with trio.fail_after(60):
            assert await worker.process.stdout.receive_some(100) == b"prepared\n"
        await trio.sleep(0.2)
        before = time.time()
        assert worker.reply == b"" and guest.listened == ""
        answer = await worker.answer()
    assert answer["prepared"] < before <= answer["began"]
    assert answer["request"] == {"x": 1} and answer["answer"] == "good day" and guest.listened


async def test_what_goes_wrong_before_it_is_asked_is_told_when_it_is() -> None:
    for fault, told in (("raise", "raised KeyError"), ("die", "killed by SIGKILL"), ("exit", "ended with code 7")):
        async with open_worker({"fault": fault}, job="prepared_jobs:run", timeout_s=20) as worker:
            with pytest.raises(CheckerError, match=told):
                await worker.answer()
    async with open_worker({"fault": "hang"}, job="prepared_jobs:run", timeout_s=0.2) as worker:
        with pytest.raises(CheckerError, match="did not finish within"):
            await worker.answer()


@pytest.mark.parametrize("waits_for", ["an answer", "its host"])
async def test_killing_the_helper_kills_everything_that_waits(waits_for: str) -> None:
    async with open_worker({}, job="worker_jobs:echo", timeout_s=20) as worker:
        with trio.fail_after(20):
            while not workers():  # noqa: ASYNC110 - other processes, which set no event
                await trio.sleep(0.05)
        worker.process.kill()
        if waits_for == "an answer":
            with pytest.raises(CheckerError, match="killed by SIGKILL"):
                await worker.answer()


async def test_killing_the_helper_kills_everything() -> None:
    async def kill() -> None:
        while len(workers()) < 4:  # noqa: ASYNC110 - other processes, which set no event
            await trio.sleep(0.05)
        psutil.Process().children()[0].kill()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        with pytest.raises(CheckerError, match="killed by SIGKILL"):
            await run("hang")


@pytest.mark.parametrize(
    ("job", "asked", "processes"),
    [("worker_jobs:hang", True, 4), ("worker_jobs:hang", False, 1), ("prepared_jobs:run", False, 1)],
    ids=["works", "waits", "prepares"],
)
async def test_workers_do_not_outlive_a_host_that_is_killed(job: str, asked: bool, processes: int) -> None:
    """Whether they work, wait to be asked, or prepare without end."""
    code = f"""
import trio
from drums_verifiers.worker import open_worker
async def main():
    async with open_worker({{'fault': 'hang'}}, job={job!r}, timeout_s=1000) as worker:
        await (worker.answer() if {asked!r} else trio.sleep_forever())
trio.run(main)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    host = await trio.lowlevel.open_process([sys.executable, "-c", code], env=environment)
    try:
        with trio.fail_after(60):
            while len(workers()) < processes:  # noqa: ASYNC110 - other processes, which set no event
                await trio.sleep(0.05)
    finally:
        host.kill()
        await host.wait()
    assert await trio.to_thread.run_sync(gone)


async def test_several_at_once_are_apart() -> None:
    answers: list[dict[str, Any]] = []

    async def one(i: int) -> None:
        answers.append(await run("ask", guest=Guest()) | {"i": i})

    async with trio.open_nursery() as nursery:
        for i in range(6):
            nursery.start_soon(one, i)
    assert sorted(x["i"] for x in answers) == list(range(6))
    assert {x["answer"] for x in answers} == {"good day"}


async def test_interpreter_lies_where_no_system_folder_hides_it() -> None:
    assert not set(sandbox.interpreter_paths()) & {Path("/usr"), Path("/usr/bin")}
    assert all(x.exists() for x in sandbox.interpreter_paths())
