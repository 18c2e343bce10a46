"""Workers that wait for a job: nothing old in them, each used once, and no error when one is lost."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing
from desktops import make_task
from requires import requires
from worker_bench import Guest, nothing_left, served, waiting  # noqa: F401 - the fixture is used by being here

from drums.errors import CheckerError
from drums_core import load_config, open_host
from drums_osworld import checker as osworld
from drums_verifiers import verifier
from drums_verifiers import worker as worker_module
from drums_verifiers import workers as workers_module
from drums_verifiers.showing import show
from drums_verifiers.worker import LIMITS, Job, Kind, Worker, start_worker
from drums_verifiers.workers import Workers

pytestmark = requires("root")

Harm = Callable[[Worker], None]


def kill_helper(worker: Worker) -> None:
    worker.process.kill()


def kill_init(worker: Worker) -> None:
    assert worker.pid1 is not None
    signal.pidfd_send_signal(worker.pid1, signal.SIGKILL)


def inside(worker: Worker) -> psutil.Process:
    """The process that waits."""
    return psutil.Process(worker.process.pid).children(recursive=True)[-1]


def until_dead(process: psutil.Process) -> None:
    """Until it runs no more; blocks, so that the host learns nothing of it meanwhile."""
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)


def kill_inside(worker: Worker) -> None:
    inside(worker).kill()


def stop_inside(worker: Worker) -> None:
    inside(worker).suspend()


HARMS: tuple[Harm, ...] = (kill_helper, kill_init, kill_inside)


@pytest.mark.parametrize("harm", [*HARMS, stop_inside])
@pytest.mark.parametrize("settled", [True, False])
async def test_one_that_was_lost_while_it_waited_is_no_error(
    harm: Harm, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its death has shown by the time that it is given its job, or not."""
    # Of a worker that is stopped it is waited for; the one after it has as long, on a busy machine, too.
    monkeypatch.setattr(worker_module, "BEGIN_LIMIT_S", 8.0)
    monkeypatch.setattr(workers_module, "LOOK_EVERY_S", 60.0)
    kind = Workers(Kind(20), 1)
    async with served(kind) as worker:
        waits = inside(worker)
        harm(worker)
        if harm is not stop_inside:
            until_dead(waits)
        if settled:
            await trio.sleep(0.2)
        guest = Guest()
        assert await kind.run(Job({}, "worker_jobs:ask", guest)) == {"answer": "good day"}
        assert worker.function and not worker.begun


@pytest.mark.parametrize("moment", ["before it is shown anything", "once it has been shown all"])
async def test_one_that_is_lost_as_it_is_given_its_job_is_no_error(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harmed: list[int] = []
    waits_for: list[str] = []  # an evaluator's steps, say

    async def until() -> None:
        waits_for.append("once")

    def harming(pid1: int, readonly: Mapping[str, Path]) -> None:
        late = moment.startswith("once")
        if late:
            show(pid1, readonly)
        if not harmed:
            harmed.append(pid1)
            signal.pidfd_send_signal(pid1, signal.SIGKILL)
            until_dead(waits)
        if not late:
            show(pid1, readonly)

    monkeypatch.setattr(worker_module, "show", harming)
    kind = Workers(Kind(20), 1)
    async with served(kind) as worker:
        waits = inside(worker)
        job = Job({"a": 1}, "worker_jobs:echo", until=until)
        assert await kind.run(job) == {"a": 1}
        assert harmed and not worker.begun and waits_for == ["once"]


@pytest.mark.parametrize("harm", HARMS)
async def test_one_that_was_lost_while_it_waited_is_replaced(harm: Harm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_EVERY_S", 0.02)
    kind = Workers(Kind(20), 1)
    async with served(kind) as worker:
        harm(worker)
        other = await waiting(kind, but=worker)
        assert await kind.run(Job({"a": 1}, "worker_jobs:echo")) == {"a": 1}
        assert other.begun


async def test_what_was_lost_once_it_has_begun_is_an_error() -> None:
    """Its code has run: no second one is given the job."""
    kind = Workers(Kind(20), 2)
    async with served(kind):
        with trio.fail_after(30):
            while len(kind._idle) < 2:  # noqa: ASYNC110 - as an observer outside would
                await trio.sleep(0.005)
        _, other = kind._idle
        with pytest.raises(CheckerError, match="killed by SIGKILL"):
            await kind.run(Job({"how": "kill"}, "worker_jobs:die"))
        assert not other.function


async def test_each_has_one_job_and_the_next_waits_already() -> None:
    kind = Workers(Kind(20), 1)
    async with served(kind) as first:
        for _ in range(3):
            seen = await kind.run(Job({"secret": "/none"}, "worker_jobs:probe"))
            assert seen["listing"] == [] and seen["write_work"] == "'1'"
            assert first.begun and not first.waits
            first = await waiting(kind, but=first)


async def test_more_jobs_than_wait_are_done_all_the_same() -> None:
    kind = Workers(Kind(20), 1)
    answers: list[dict[str, Any]] = []

    async def one(i: int) -> None:
        answers.append(await kind.run(Job({"i": i}, "worker_jobs:echo")))

    async with served(kind), trio.open_nursery() as nursery:
        for i in range(4):
            nursery.start_soon(one, i)
    assert sorted(x["i"] for x in answers) == list(range(4))


async def test_where_none_can_wait_the_job_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once one can be started again, one waits again."""
    monkeypatch.setattr(workers_module, "LOOK_EVERY_S", 0.02)
    tries: list[Kind] = []

    async def failing(kind: Kind) -> Worker:
        tries.append(kind)
        if len(tries) < 5:
            raise CheckerError("planted")
        return await start_worker(kind)

    monkeypatch.setattr(workers_module, "start_worker", failing)
    kind = Workers(Kind(20), 1)
    with pytest.raises(CheckerError, match="planted"):
        await kind.run(Job({}, "worker_jobs:echo"))
    async with served(kind):
        assert await kind.run(Job({"a": 1}, "worker_jobs:echo")) == {"a": 1}


@pytest.fixture
def changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which jobs are found, and one of installed packages in it."""
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    libraries = tmp_path / "site-packages"
    libraries.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(libraries))
    yield tmp_path
    importlib.invalidate_caches()


def write_code(folder: Path, number: int) -> None:
    """A job's package, with a module beside it that is installed, made anew as an installer does."""
    for path, text in (
        (folder / "changing_job", f"import changing_library\ndef run(request):\n    return {{'job': {number}, "),
        (folder / "site-packages" / "changing_library", ""),
    ):
        fresh = path.with_name(f"{path.name}.{number}")
        fresh.mkdir()
        source = text + "'library': changing_library.NUMBER}\n" if text else f"NUMBER = {number}\n"
        (fresh / "__init__.py").write_text(source)
        if path.exists():
            path.rename(path.with_name(f"{path.name}.old"))
        fresh.rename(path)
    importlib.invalidate_caches()


@pytest.mark.parametrize("whole", ["the package", "all that is installed"])
async def test_code_that_changed_while_it_waited_is_the_new_one(changing: Path, whole: str) -> None:
    write_code(changing, 1)
    kind = Workers(Kind(20), 1)
    async with served(kind) as worker:
        if whole != "the package":
            libraries = changing / "site-packages"
            libraries.rename(changing / "gone")
            libraries.mkdir()
        write_code(changing, 2)
        assert await kind.run(Job({}, "changing_job:run")) == {"job": 2, "library": 2}
        assert worker.begun


@pytest.mark.parametrize("module", ["attrs", "worker_jobs", "drums_verifiers.verifier_job"])
async def test_nothing_but_the_standard_library_is_imported_early(module: str) -> None:
    with pytest.raises(CheckerError, match=f"(?s)could not be started: .*No module named '{module.split('.')[0]}'"):
        await start_worker(Kind(20, preload=(module,)))


@pytest.mark.parametrize("preload", [verifier._PRELOAD, osworld._PRELOAD])
async def test_what_checkers_import_early_is_there(preload: tuple[str, ...]) -> None:
    assert {name.partition(".")[0] for name in preload} <= sys.stdlib_module_names
    assert await Workers(Kind(20, preload=preload)).run(Job({"a": 1}, "worker_jobs:echo")) == {"a": 1}


async def test_it_waits_with_nothing_of_a_job_in_it() -> None:
    """And with its limits: its cgroup is there, and what is mounted in it is the interpreter's and the system's."""
    kind = Workers(Kind(20), 1)
    async with served(kind) as worker:
        pid = psutil.Process(worker.process.pid).children(recursive=True)[-1].pid
        mountinfo = await trio.Path(f"/proc/{pid}/mountinfo").read_text()
        places = [line.split()[4] for line in mountinfo.splitlines()]
        drums = sorted(x for x in places if x.startswith("/drums"))
        assert drums == ["/drums/work", "/drums/worker_main.py"]
        for path in worker.cgroup_paths:
            assert str(pid) in (path / "cgroup.procs").read_text().split()
        limit = [x / name for x in worker.cgroup_paths for name in ("memory.max", "memory.limit_in_bytes")]
        assert [int(x.read_text()) for x in limit if x.exists()] == [LIMITS.memory_bytes]


@requires("criu")
async def test_while_a_host_is_open_one_waits_for_each_checker_and_a_verify_takes_it() -> None:
    async with open_host(load_config()) as host:
        kinds = {name: checker._workers for name, (checker, _) in host.checkers.items()}  # type: ignore[attr-defined]
        assert set(kinds) == {"osworld_checker", "drums_verifier"}
        first = {name: await waiting(workers) for name, workers in kinds.items()}
        async with await host.create(make_task()) as slot:
            await slot.wait_valid()
            assert (await slot.verify()).score == 0.0
        assert first["osworld_checker"].begun and not first["drums_verifier"].function
        await waiting(kinds["osworld_checker"], but=first["osworld_checker"])
    assert all(not workers._idle for workers in kinds.values())


async def test_a_checker_that_cannot_keep_any_costs_its_host_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checker does beside is its own: an error of it ends no host."""

    async def serve(self: Workers) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Workers, "serve", serve)
    async with open_host(load_config()) as host:
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert host.slots == {}
