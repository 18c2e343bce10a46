"""The worker's sandbox, and everything that a worker can do instead of answering. Real processes, as root.

Each test runs twice: with a worker that is started for its job, and with one that has waited for it.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
import trio
from requires import requires
from test_cancellation import attempt
from worker_bench import (
    Guest,
    gone,
    nothing_left,  # noqa: F401 - the fixture is used by being here
    served,
    shared_cgroup,
    workers,
)

from drums.errors import CheckerError
from drums_verifiers import sandbox
from drums_verifiers.worker import LIMITS, Job, Kind, NotBegun, Serve
from drums_verifiers.workers import Workers

pytestmark = requires("root")
WAITED = {"now": False}
CROWDED = attrs.evolve(LIMITS, pids=64)


@pytest.fixture(params=["started", "waited"], autouse=True)
def way(request: pytest.FixtureRequest) -> str:
    """Whether `run` takes a worker that has waited."""
    WAITED["now"] = request.param == "waited"
    return str(request.param)


async def run(
    function: str,
    request: Mapping[str, Any] | None = None,
    *,
    guest: Serve | None = None,
    files: Mapping[str, Path] | None = None,
    ports: Mapping[int, Serve] | None = None,
    until: Callable[[], Awaitable[None]] | None = None,
    **kind: Any,
) -> dict[str, Any]:
    workers = Workers(Kind(**{"timeout_s": 20, **kind}), 1)
    name = function if ":" in function else f"worker_jobs:{function}"
    job = Job(request or {}, name, guest, files or {}, ports or {}, until)
    if not WAITED["now"]:
        return await workers.run(job)
    async with served(workers) as worker:
        try:
            return await workers.run(job)
        finally:
            assert worker not in workers._idle and worker.function == job.function


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
    assert seen["limits"]["CORE"] == [0, 0]
    assert seen["links"] == ["lo"]
    assert seen["host_file"] == seen["shadow"] == "FileNotFoundError"
    assert seen["file"] == "b'for the worker'"
    assert seen["sysfs"] == "FileNotFoundError"
    assert seen["write_root"] == seen["write_usr"] == seen["write_job"] == "OSError"
    assert {"/drums/job/worker_jobs.py", "/drums/lib/0", "/drums/files/given"} < set(seen["mounts"])
    for place in (x for x in seen["mounts"] if x.startswith("/drums/") and x != "/drums/work"):
        assert {"ro", "nosuid", "nodev"} <= set(seen["mounts"][place]), place
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
        await run(job, timeout_s=5)


async def test_sandbox_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckerError, match=r"could not be started: .*mount"):
        await Workers(Kind(20, scratch_bytes=-1)).run(Job({}, "worker_jobs:echo"))
    with pytest.raises(CheckerError, match="missing' cannot be shown to a worker"):
        await run("echo", files={"x": tmp_path / "missing"})


async def test_memory_limit_kills_and_says_so() -> None:
    limits = attrs.evolve(LIMITS, memory_bytes=64 << 20)
    assert await run("echo", {"a": 1}, limits=limits) == {"a": 1}
    with pytest.raises(CheckerError, match="for want of memory"):
        await run("eat", limits=limits)
    with pytest.raises(CheckerError, match="for want of memory"):
        await run("lose_a_child", limits=limits)


async def test_process_limit_is_its_own_and_shows() -> None:
    """What one worker takes, another does not miss; a refusal that a checker swallows withholds its answer."""
    seen = await run("probe", {"secret": "/none"}, limits=CROWDED)
    assert seen["limits"]["NPROC"] == [-1, -1] or seen["limits"]["NPROC"][1] > 512
    came_to = await beside_a_swarm()
    assert "more processes and threads than its cgroup allows" in str(came_to["swarm"])
    assert came_to["leave"] == {"left": True}


async def test_a_process_limit_that_is_shared_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where both are in one cgroup: what the neighbour starts is refused, as its error says."""
    async with shared_cgroup(CROWDED) as of_each:
        monkeypatch.setattr("drums_verifiers.worker.temporary_cgroup", of_each)
        monkeypatch.setattr("drums_verifiers.worker._counted", lambda *_: 0)  # in one cgroup they share the count, too
        came_to = await beside_a_swarm()
    assert "Resource temporarily unavailable" in str(came_to["leave"])


async def beside_a_swarm() -> dict[str, Any]:
    """What two workers come to, one of which starts something when the other has all that its limit allows."""
    guests = {"leave": Guest(held=True), "swarm": Guest(held=True)}
    came_to: dict[str, Any] = {}

    async def one(function: str) -> None:
        try:
            came_to[function] = await run(function, {"asks": True}, guest=guests[function], limits=CROWDED)
        except CheckerError as e:
            came_to[function] = e

    with trio.fail_after(60):
        async with trio.open_nursery() as around:
            async with trio.open_nursery() as within:
                within.start_soon(one, "leave")
                await guests["leave"].asked.wait()
                around.start_soon(one, "swarm")
                await guests["swarm"].asked.wait()  # a process was refused to it, and all that it has stay
                guests["leave"].may_answer.set()
            guests["swarm"].may_answer.set()
    return came_to


async def test_a_job_in_two_parts_waits_between_them() -> None:
    """The first runs while what is to be asked is not there yet: nothing is served, and no time counts."""
    guest, seen = Guest(), []

    async def until() -> None:
        await trio.sleep(1.5)  # more than the job's time
        seen.append(guest.listened)

    began = time.time()
    answer = await run("in_two_parts", {}, guest=guest, until=until, timeout_s=1.0)
    assert answer["answer"] == "good day"
    assert answer["first"] - began < 1.5 <= answer["second"] - began
    assert seen == [""] and guest.listened == "('127.0.0.1', 5000)"


async def test_a_job_in_one_part_is_not_called_before() -> None:
    times = []

    async def until() -> None:
        await trio.sleep(0.5)
        times.append(time.time())

    answer = await run("now", {}, until=until)
    assert answer["now"] >= times[0]


async def test_what_a_job_waits_for_fails_and_its_error_comes_through() -> None:
    async def until() -> None:
        raise CheckerError("planted: the postconfig failed")

    with pytest.raises(CheckerError, match="planted: the postconfig failed") as info:
        await run("in_two_parts", {}, guest=Guest(), until=until)
    assert not isinstance(info.value, NotBegun)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "raised ValueError: planted"),
        ("dies", "killed by SIGKILL"),
        ("thrice", "raised RuntimeError: the job has more than two parts"),
    ],
)
@pytest.mark.parametrize("fault", [None, CheckerError("planted: the postconfig failed")])
async def test_a_job_that_fails_leaves_no_step_half_done(how: str, said: str, fault: CheckerError | None) -> None:
    """And what failed of these is told first: it may be why."""
    ended = []

    async def until() -> None:
        await trio.sleep(0.7)
        ended.append(True)
        if fault is not None:
            raise fault

    with pytest.raises(CheckerError, match=said if fault is None else "planted: the postconfig failed"):
        await run("in_two_parts", {"how": how}, guest=Guest(), until=until)
    assert ended == [True]


async def test_a_job_may_have_its_answer_after_its_first_part() -> None:
    assert await run("in_two_parts", {"how": "once"}, until=trio.lowlevel.checkpoint) == {"first": "and last"}


async def test_cancellation_while_a_job_waits_leaves_nothing() -> None:
    with trio.move_on_after(1.0) as scope:
        await run("in_two_parts", {}, guest=Guest(), until=trio.sleep_forever)
    assert scope.cancelled_caught


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.04, 0.06, 0.1, 0.3])
async def test_cancellation_leaves_nothing(after_s: float) -> None:
    with trio.move_on_after(after_s) as scope:
        await run("hang", guest=Guest())
    assert scope.cancelled_caught


async def test_killing_the_helper_kills_everything() -> None:
    async def kill() -> None:
        while len(workers()) < 4:  # noqa: ASYNC110 - other processes, which set no event
            await trio.sleep(0.05)
        psutil.Process().children()[0].kill()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        with pytest.raises(CheckerError, match="killed by SIGKILL"):
            await run("hang")


async def test_workers_do_not_outlive_a_host_that_is_killed(way: str) -> None:
    """Whether they work, or wait."""
    doing = "workers.serve()" if way == "waited" else "workers.run(Job({}, 'worker_jobs:hang'))"
    code = f"""
import trio
from drums_verifiers.worker import Job, Kind
from drums_verifiers.workers import Workers
async def main():
    workers = Workers(Kind(1000), 3)
    await {doing}
trio.run(main)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    host = await trio.lowlevel.open_process([sys.executable, "-c", code], env=environment)
    try:
        with trio.fail_after(60):
            while len(workers()) < (3 if way == "waited" else 4):  # noqa: ASYNC110 - other processes, without an event
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


async def test_cancelled_at_every_await_nothing_is_left_and_no_neighbour_disturbed(way: str) -> None:
    """A worker that two tasks ended once made the wait for another process fail, and that process was never waited for.

    What is never waited for is told as the interpreter finds it, and fails the test.
    """
    groups: list[BaseException] = []
    over = trio.Event()

    async def neighbour() -> None:
        while not over.is_set():
            try:
                await trio.run_process(["/bin/sleep", "0.01"])
            except BaseExceptionGroup as e:
                groups.append(e)

    found: dict[str, Any] = {}
    async with trio.open_nursery() as neighbours:
        for _ in range(3):
            neighbours.start_soon(neighbour)
        kind = Workers(Kind(20), 1)
        for step in range(1000):
            job = Job({"step": step}, "worker_jobs:echo", Guest())
            async with served(kind) if way == "waited" else nullcontext():
                ended, found = await attempt(partial(kind.run, job), step, before=step % 2 == 1)
            gc.collect()
            assert not workers(), step
            if ended:
                break
        over.set()
    assert found == {"step": step} and step > 15
    assert not groups
