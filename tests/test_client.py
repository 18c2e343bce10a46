"""The client's names and what they do, each way of using it: synchronous, on trio, on asyncio."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from client_fake import PNG, TASK, TOKEN, Answer, Asked, FakeDaemon, as_json, fake_daemon, problem
from test_bare_install import BARE

import drums
from drums.errors import CheckerError, DrumsError, InvalidEpisode

Body = Callable[[Any, Callable[[Any], Awaitable[Any]]], Awaitable[None]]
RUNNERS: dict[str, Callable[[Callable[[], Any]], None]] = {
    "trio": trio.run,
    "asyncio": lambda main: asyncio.run(main()),
}


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon() as daemon:
        yield daemon


@pytest.fixture(params=["sync", *RUNNERS])
def using(request: pytest.FixtureRequest, fake: FakeDaemon) -> Callable[[Body], None]:
    """Runs a body with a client of this kind, and a function that takes what its methods give to the end."""

    async def do(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    def run(body: Body) -> None:
        if request.param == "sync":
            # Nothing in it waits for an event loop, so one push takes it to its end.
            with drums.connect(fake.url, TOKEN) as client, pytest.raises(StopIteration):
                body(client, do).__await__().__next__()
            return

        async def main() -> None:
            async with drums.connect_async(fake.url, TOKEN) as client:
                await body(client, do)

        RUNNERS[request.param](main)

    return run


def test_the_host(fake: FakeDaemon, using: Callable[[Body], None]) -> None:
    """What a host has, as plain documents."""

    async def body(client: Any, do: Any) -> None:
        assert client.url == fake.url
        assert (await do(client.health()))["version"] == "0.1.0"
        tasks = await do(client.tasks())
        assert [t["supported"] for t in tasks] == [True, False] and type(tasks[0]) is dict
        assert await do(client.broken_tasks()) == {"x.json": "no JSON"}
        assert (await do(client.task("e0df059f")))["id"] == TASK
        with pytest.raises(drums.TaskNotFound):
            await do(client.task("e0df"))
        for name in ("checkpoints", "plugins", "images", "episodes"):
            assert await do(getattr(client, name)()) == [{"id": "one"}]
        assert await do(client.episodes(limit=5, before="e-9")) == [{"id": "one", "limit": "5", "before": "e-9"}]
        assert (await do(client.episode("e-1")))["rewards"] == []
        assert (await do(client.reverify("e-1")))["agree"] is True
        await do(client.reverify("e-1", anyway=True))
        asked = [asked.json for asked in fake.of("POST /v1/episodes/e-1/reverify")]
        assert asked == [{"anyway": False}, {"anyway": True}]
        with pytest.raises(drums.DrumsError):
            await do(client.reverify("../e-1"))
        assert await do(client.slots()) == []

    using(body)


def test_a_desktop(fake: FakeDaemon, using: Callable[[Body], None]) -> None:
    """Everything that is done with one."""

    async def body(client: Any, do: Any) -> None:
        env = await do(client.create(task="e0df059f", ttl=600))
        assert (env.task_id, env.state) == (TASK, "up")
        assert repr(env) == f"<drums.{type(env).__name__} {env.id} up>"
        assert await do(env.wait_valid()) is None
        report = await do(env.gates())
        assert report["validity"]["verdict"] == "valid" and report["gates"]["gates"][0]["gate"] == "state_hash"
        assert await do(env.screenshot()) == PNG
        assert await do(env.accessibility()) == "<desktop/>"
        assert (await do(env.step("pyautogui.click(1, 2)")))["output"] == "pyautogui.click(1, 2)"
        done = await do(env.execute(["ls", "-l"], timeout=5))
        assert json.loads(done["output"]) == {"command": ["ls", "-l"], "shell": False, "timeout": 5}
        done = await do(env.execute("ls | wc", shell=True))
        assert json.loads(done["output"]) == {"command": "ls | wc", "shell": True, "timeout": 120}
        data = bytes(range(256)) * 10
        await do(env.write_file("/home/user/a b&c=ü", data))
        assert await do(env.read_file("/home/user/a b&c=ü")) == data
        with pytest.raises(DrumsError) as caught:
            await do(env.read_file("/nothing"))
        assert caught.value.code == "file_not_found"
        children = await do(env.fork(2))
        assert len({env.id, *(child.id for child in children)}) == 3
        assert await do(children[0].verify())
        assert (await do(env.save("here")))["name"] == "here"
        await do(env.reset())
        await do(env.extend(None))
        assert (await do(env.refresh()))["ttl"] is None
        reward = await do(env.verify())
        assert type(reward) is drums.Reward and (reward.score, reward.valid) == (1.0, True)
        assert reward.verdict is drums.Verdict.VALID and reward.invalid_reasons == ()
        again = await do(client.slot(env.id))
        assert again.id == env.id
        assert len(await do(client.slots())) == 3
        await do(env.close())
        assert env.state == "closed"
        await do(env.close())
        await do(again.close())  # somebody closed it before: that is what is wanted
        assert len(fake.of(f"DELETE /v1/slots/{env.id}")) == 2

    using(body)


def test_create_sends_what_was_given(fake: FakeDaemon, using: Callable[[Body], None]) -> None:
    """No ttl is the host's default, None is unlimited: on the wire, absent and null."""

    async def body(client: Any, do: Any) -> None:
        await do(client.create())
        await do(client.create(TASK, image="osworld", checkpoint="c", ttl=None, network="nat"))
        await do(client.create(TASK, ttl=1.5))
        await do(client.create(labels={"policy": "run-7"}))

    using(body)
    assert [asked.json for asked in fake.of("POST /v1/slots")] == [
        {"network": "none"},
        {"task": TASK, "image": "osworld", "checkpoint": "c", "ttl": None, "network": "nat"},
        {"task": TASK, "ttl": 1.5, "network": "none"},
        {"network": "none", "labels": {"policy": "run-7"}},
    ]


def test_stats_and_reload(fake: FakeDaemon, using: Callable[[Body], None]) -> None:
    """A row per group, asked for as given."""

    async def body(client: Any, do: Any) -> None:
        assert (await do(client.stats()))[0]["query"] == {"by": "both", "label": "policy"}
        rows = await do(client.stats("task", label="run", since=17.5))
        assert rows[0]["query"] == {"by": "task", "label": "run", "since": "17"}
        assert (await do(client.stats(all=True)))[0]["query"] == {"by": "both", "label": "policy", "all": "true"}
        assert await do(client.reload_plugins()) == [{"id": "one"}]

    using(body)


def test_quarantine(fake: FakeDaemon, using: Callable[[Body], None]) -> None:
    """The state follows; steps are refused; verify tells why in a reward that strictness raises."""

    async def body(client: Any, do: Any) -> None:
        env = await do(client.create(TASK))
        await do(env.quarantine("a broken page"))
        assert env.state == "quarantined" and (await do(env.refresh()))["reason"] == "a broken page"
        with pytest.raises(drums.SlotQuarantined, match="release it"):
            await do(env.step("WAIT"))
        reward = await do(env.verify(strict=False))
        assert (reward.valid, reward.score, reward.checker_skipped) == (False, None, "quarantined: a broken page")
        with pytest.raises(InvalidEpisode) as caught:
            await do(env.verify())
        assert caught.value.reward == reward and caught.value.bad_gates == ["state_hash"]
        with pytest.raises(InvalidEpisode):
            await do(env.wait_valid())
        await do(env.release())
        assert env.state == "down"

    using(body)


def test_strictness(fake: FakeDaemon, using: Callable[[Body], None]) -> None:
    """Valid without a score is CheckerError; not valid is InvalidEpisode, checker or not; a valid 0.0 is a score."""
    document: dict[str, Any] = {
        "score": None,
        "valid": True,
        "verdict": "valid",
        "invalid_reasons": [],
        "bad_gates": [],
    }
    broke: dict[str, Any] = {**document, "checker_error": "it raised", "checker_skipped": None, "provenance": {}}
    invalid: dict[str, Any] = {
        **broke,
        "valid": False,
        "verdict": "invalid",
        "invalid_reasons": ["a: b"],
        "bad_gates": ["a"],
    }
    skipped = {**document, "checker_skipped": "no checker"}
    failed = {**document, "score": 0.0, "of_a_later_version": 1}
    fake.script("POST .*/verify", *map(as_json, (broke, broke, invalid, invalid, skipped, failed)))

    async def body(client: Any, do: Any) -> None:
        env = await do(client.create(TASK))
        with pytest.raises(CheckerError, match="it raised") as caught:
            await do(env.verify())
        assert caught.value.reward.checker_error == "it raised"
        assert (await do(env.verify(strict=False))).score is None
        with pytest.raises(InvalidEpisode, match="a: b"):
            await do(env.verify())
        assert (await do(env.verify(strict=False))).bad_gates == ("a",)
        with pytest.raises(CheckerError, match="no checker"):
            await do(env.verify())
        assert (await do(env.verify())).score == 0.0

    using(body)


def test_wait_valid(fake: FakeDaemon, using: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks again while it is pending; TimeoutError after the timeout, which a verdict that is there comes before."""
    monkeypatch.setattr("drums._calls.WAIT_SLICE_S", 0.01)

    async def body(client: Any, do: Any) -> None:
        env = await do(client.create(TASK))
        fake.waits = 3
        await do(env.wait_valid())
        assert [asked.json for asked in fake.of("POST .*/wait")] == [{"timeout": 0.01}] * 4
        await do(env.wait_valid(timeout=0))
        fake.waits = 10**6
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"still pending after 0.05 s"):
            await do(env.wait_valid(timeout=0.05))
        assert 0.05 <= time.monotonic() - began < 5
        with pytest.raises(TimeoutError):
            await do(env.wait_valid(timeout=-1))
        fake.waits, fake.verdict = 0, "invalid"
        with pytest.raises(InvalidEpisode, match="state_hash: a file changed") as caught:
            await do(env.wait_valid(timeout=5))
        assert caught.value.bad_gates == ["state_hash"] and caught.value.report["episode"] == "e-1"

    using(body)


def test_over_a_unix_socket(tmp_path: Path) -> None:
    """The same, with the local daemon's token file."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    with fake_daemon(str(tmp_path / "s")) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRUMS_URL", f"unix:{tmp_path}/s")
        patch.setenv("DRUMS_STATE_DIR", str(tmp_path))
        patch.delenv("DRUMS_TOKEN", raising=False)
        with drums.connect() as client, client.create(TASK) as env:
            assert env.verify().score == 1.0

        async def main() -> None:
            async with drums.connect_async() as client, await client.create(TASK) as env:
                assert (await env.verify()).score == 1.0

        for run in RUNNERS.values():
            run(main)
        assert fake.slots == {} and len(fake.of("DELETE .*")) == 3


# --- ends of `with`


def test_with_closes_the_desktop(fake: FakeDaemon) -> None:
    """Whether its body ends or raises."""
    with drums.connect(fake.url, TOKEN) as client:
        with client.create(TASK) as env:
            assert list(fake.slots) == [env.id]
        assert fake.slots == {}
        with pytest.raises(ZeroDivisionError), client.create(TASK):
            _ = 1 / 0
        assert fake.slots == {}
    with pytest.raises(DrumsError, match="is closed"):
        client.health()
    client.close()


def test_a_failing_close_does_not_hide_the_error_of_the_body(fake: FakeDaemon) -> None:
    """It is a note on it; without one, it is raised."""
    fake.script("DELETE .*", problem("restore_failed", 500, detail="stuck"))
    with drums.connect(fake.url, TOKEN) as client:
        with pytest.raises(ZeroDivisionError) as caught, client.create(TASK) as env:
            _ = 1 / 0
        assert caught.value.__notes__ == [f"and closing desktop {env.id} failed: stuck"]
        with pytest.raises(drums.RestoreError, match="stuck"), client.create(TASK):
            pass
        fake.script("DELETE .*", Answer(drop=True))
        with pytest.raises(ZeroDivisionError), client.create(TASK):
            _ = 1 / 0

    async def main() -> None:
        async with drums.connect_async(fake.url, TOKEN) as client:
            fake.script("DELETE .*", problem("restore_failed", 500, detail="stuck"))
            with pytest.raises(ZeroDivisionError) as caught:
                async with await client.create(TASK):
                    _ = 1 / 0
            assert "stuck" in caught.value.__notes__[0]
            with pytest.raises(drums.RestoreError):
                async with await client.create(TASK):
                    pass

    for run in RUNNERS.values():
        run(main)


def test_cancelled_on_trio(fake: FakeDaemon) -> None:
    """A cancelled body closes its desktop all the same."""

    async def main() -> None:
        with trio.move_on_after(30) as scope:
            async with drums.connect_async(fake.url, TOKEN) as client, await client.create(TASK):
                assert len(fake.slots) == 1
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught and fake.slots == {}

    trio.run(main)


def test_cancelled_on_asyncio(fake: FakeDaemon) -> None:
    """So it does here, and a second cancellation while it closes does not keep it from that."""
    deleting = threading.Event()
    created = asyncio.Event()

    def slowly(_: Any) -> None:
        deleting.set()
        time.sleep(0.1)

    fake.script("DELETE .*", slowly)

    async def body() -> None:
        async with drums.connect_async(fake.url, TOKEN) as client, await client.create(TASK):
            created.set()
            await asyncio.sleep(1000)

    async def main() -> None:
        task = asyncio.create_task(body())
        await created.wait()
        task.cancel()
        await asyncio.to_thread(deleting.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert fake.slots == {}


def test_cancelled_in_a_call(fake: FakeDaemon) -> None:
    """The connection is closed, so the daemon ends the operation; the client works on."""
    go = threading.Event()

    def when_told(_: Asked) -> None:
        go.wait(10)

    fake.script("POST .*/step", when_told)

    async def main() -> None:
        async with drums.connect_async(fake.url, TOKEN) as client, await client.create(TASK) as env:
            with trio.move_on_after(0.05) as scope:
                await env.step("WAIT")
            assert scope.cancelled_caught
            go.set()
            assert (await env.step("DONE"))["output"] == "DONE"

    trio.run(main)


def test_many_at_once(fake: FakeDaemon) -> None:
    """Threads share a client, and so do tasks."""
    with drums.connect(fake.url, TOKEN) as client:
        env = client.create(TASK)
        seen: list[str] = []
        threads = [threading.Thread(target=lambda i=i: seen.append(env.step(str(i))["output"])) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen, key=int) == [str(i) for i in range(20)]

    async def main() -> None:
        async with drums.connect_async(fake.url, TOKEN) as client, await client.create(TASK) as env:
            outputs: dict[str, str] = {}

            async def one(action: str) -> None:
                outputs[action] = (await env.step(action))["output"]

            async with trio.open_nursery() as nursery:
                for i in range(50):
                    nursery.start_soon(one, str(i))
            assert all(k == v for k, v in outputs.items()) and len(outputs) == 50

    trio.run(main)


# --- what it is


@pytest.mark.parametrize(("one", "other"), [(drums.Client, drums.AsyncClient), (drums.Env, drums.AsyncEnv)])
def test_both_clients_have_the_same_names(one: type, other: type) -> None:
    """Names, arguments and defaults; all that asks the daemon is to be awaited."""
    names = {n for n in dir(one) if not n.startswith("_")}
    assert names == {n for n in dir(other) if not n.startswith("_")}
    for name in names:
        mine, theirs = inspect.getattr_static(one, name), inspect.getattr_static(other, name)
        if mine is theirs:  # what asks no daemon
            continue
        if isinstance(mine, property):
            assert isinstance(theirs, property)
            continue
        a, b = inspect.signature(mine), inspect.signature(theirs)
        assert list(a.parameters.values()) == list(b.parameters.values()), name
        assert a.return_annotation == b.return_annotation.replace("Async", ""), name
        assert inspect.iscoroutinefunction(theirs) and not inspect.iscoroutinefunction(mine), name
        assert mine.__doc__ and theirs.__doc__
    assert inspect.signature(drums.connect).parameters == inspect.signature(drums.connect_async).parameters


def test_public_names() -> None:
    """Each name of the package can be had, and nothing else."""
    for name in drums.__all__:
        assert getattr(drums, name).__name__ == name
    assert set(drums.__all__) <= set(dir(drums))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(drums, "nonsense")  # noqa: B009 - mypy knows that it is not there


def python(code: str, *argv: str) -> str:
    done = subprocess.run([sys.executable, "-I", "-c", code, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    """`import drums` brings neither httpx2 nor attrs in; not even a client's making does, until it asks."""
    heavy = "print(sorted({'httpx2', 'attrs', 'attr', 'cattrs', 'trio', 'click', 'asyncio'} & set(sys.modules)))"
    assert python(f"import sys, drums, drums.errors\n{heavy}") == "[]\n"
    code = f"import sys, drums\ndrums.connect('http://127.0.0.1:1', 'x').close()\n{heavy}"
    assert "httpx2" not in python(code) and "cattrs" not in python(code)


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_without_the_host_extras(fake: FakeDaemon, kind: str) -> None:
    """A whole life of a desktop where trio, pluggy, psutil and pyroute2 are not installed."""
    body = {
        "sync": """
with drums.connect(*sys.argv[1:]) as client, client.create('e0df059f') as env:
    env.wait_valid()
    print(env.step('DONE')['output'], env.verify().score)
""",
        "asyncio": """
import asyncio
async def main():
    async with drums.connect_async(*sys.argv[1:]) as client, await client.create('e0df059f') as env:
        await env.wait_valid()
        print((await env.step('DONE'))['output'], (await env.verify()).score)
asyncio.run(main())
""",
    }[kind]
    forbidden = "assert not {'trio', 'pluggy', 'psutil', 'pyroute2'} & set(sys.modules)"
    # h11 is an extra of the host's that httpx2 brings along.
    bare = BARE.replace("'h11'", "'-'")
    assert python(f"{bare}\nimport drums\n{body}\n{forbidden}", fake.url, TOKEN) == "DONE 1.0\n"
    assert fake.slots == {}


# --- without a daemon


def test_a_daemon_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch, fake: FakeDaemon) -> None:
    """No other is started where one answers on the default address."""
    monkeypatch.delenv("DRUMS_URL", raising=False)
    monkeypatch.setattr("drums._spawn.DEFAULT_URL", fake.url)
    monkeypatch.setattr("drums._endpoint.DEFAULT_URL", fake.url)
    monkeypatch.setattr("drums._spawn.SpawnedDaemon", None)
    with drums.connect(token=TOKEN) as client:
        assert client.health()["max_slots"] == 32


@pytest.mark.parametrize("connect", [drums.connect, drums.connect_async])
def test_none_can_be_started(monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Any]) -> None:
    """The error says why, where one was sought, and what to do."""
    monkeypatch.delenv("DRUMS_URL", raising=False)
    monkeypatch.setattr("drums._spawn.DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(drums.DaemonUnreachable, match=r"127.0.0.1:1.*needs root.*uid 1000.*drums serve"):
        connect()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("drums._spawn._EXTRAS", ("trio", "not_installed"))
    with pytest.raises(drums.DaemonUnreachable, match=r"drums\[host\] is not installed \(not_installed\)"):
        connect()
