"""An episode's kept end state is graded again, by what graded it, and agrees; what does not is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from desktops import Played, Scenario, make_task, play_on_hosts, run
from requires import requires
from test_verifiers import install, packages_folder

from drums.errors import (
    CheckerChanged,
    CheckpointError,
    ConfigError,
    DrumsError,
    EndStateNotFound,
    EpisodeNotFound,
)
from drums_core import load_config
from drums_core.checkpoint import MANIFEST, UPPER, CheckpointStore, HostFacts, Manifest, list_files
from drums_core.config import HostConfig
from drums_core.durable import locked, write_json
from drums_core.end_states import KIND, EndState, _sweep, remove
from drums_core.host import Host
from drums_core.model import Task
from drums_core.slot import Slot

CHECKS = """
import random

def has_file(desktop, task, *, path):
    return float(desktop.exists(path))

def dice(desktop, task):
    return random.random()

def last_word(desktop, task):
    return 1.0 if desktop.last_action == "DONE" else 0.5
"""


def verifier(function: str, **options: Any) -> Task:
    evaluator = {"func": "drums_verifier", "verifier": "again_checks", "function": function, "options": options}
    return attrs.evolve(make_task(), evaluator=evaluator)


async def kept(host: Host, task: str | Task, solve: str = "true") -> str:
    """The id of an episode that has ended, and whose end state is kept."""
    async with await host.create(task) as slot:
        await slot.wait_valid()
        await run(slot, solve)
        await slot.step("DONE")
        reward = await slot.verify(strict=False, keep=True)
        assert reward.provenance["graded"]["kept"] is True and reward.checker_error is None, reward
        return slot.episode.id


def end_states(host: Host, episode: str) -> list[Manifest]:
    return [m for m in host.checkpoints() if m.kind == KIND and m.name == episode]


async def refusal(work: Callable[[], Any]) -> DrumsError:
    try:
        await work()
    except DrumsError as e:
        return e
    raise AssertionError("nothing was refused")


def agreeing(task: str | Task, solve: str) -> Scenario:
    async def scenario(host: Host) -> dict[str, Any]:
        episode = await kept(host, task, solve)
        found = [await host.reverify(episode) for _ in range(2)]
        return {"episode": episode, "found": found, "kept": end_states(host, episode)}

    return scenario


AGREEING: dict[str, tuple[Scenario, float]] = {
    "solved": (agreeing("e0df059f", "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2"), 1.0),
    "untouched": (agreeing("e0df059f", "true"), 0.0),
    "verifier": (agreeing(verifier("has_file", path="~/f"), "touch ~/f"), 1.0),
    "last action": (agreeing(verifier("last_word"), "true"), 1.0),
}


async def differing(host: Host) -> dict[str, Any]:
    """A verifier that answers otherwise each time."""
    episode = await kept(host, verifier("dice"))
    return {"episode": episode, "found": await host.reverify(episode)}


async def changed_checker(host: Host) -> dict[str, Any]:
    """The verifier's package is another one by then: refused; graded only if that is asked for."""
    evaluator = {"func": "drums_verifier", "verifier": "changing_checks", "function": "answer", "options": {}}
    episode = await kept(host, attrs.evolve(make_task(), evaluator=evaluator))
    same = await host.reverify(episode)
    module = PACKAGES[0] / "changing_checks_module.py"
    module.write_text("def answer(desktop, task):\n    return 0.25\n")
    refused = await refusal(lambda: host.reverify(episode))
    return {"same": same, "refused": refused, "anyway": await host.reverify(episode, anyway=True)}


async def none_kept(host: Host) -> dict[str, Any]:
    """Nothing was kept, or it was removed, or it is too old by now, or there is no such episode."""
    async with await host.create(make_task()) as slot:
        await slot.verify(strict=False)
        never = slot.episode.id
    removed, old = await kept(host, make_task()), await kept(host, make_task())
    await host.delete_checkpoint(removed)
    (manifest,) = end_states(host, old)
    path = host.services.store.path / manifest.id / MANIFEST
    write_json(path, json.loads(path.read_bytes()) | {"created_at": 1.0})
    asked = {"never": never, "removed": removed, "old": old, "unknown": "e-none"}
    found: dict[str, Any] = {}
    for name, episode in asked.items():
        found[name] = await refusal(lambda episode=episode: host.reverify(episode))  # type: ignore[misc]
    return found | {"episodes": asked, "left": end_states(host, removed) + end_states(host, old)}


async def tampered(host: Host) -> dict[str, Any]:
    """A file of the end state is changed on disk; then the manifest with it."""
    episode = await kept(host, make_task(), "echo one >~/note; mkdir ~/done")
    (manifest,) = end_states(host, episode)
    folder = host.services.store.path / manifest.id
    (folder / UPPER / "home/user/note").write_text("two\n")
    damaged = await refusal(lambda: host.reverify(episode))
    document = json.loads((folder / MANIFEST).read_bytes())
    write_json(folder / MANIFEST, document | {"files": list_files(folder)})
    return {"damaged": damaged, "found": await host.reverify(episode)}


async def refusals(host: Host) -> dict[str, Any]:
    """What makes no sense with an end state."""
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        in_place = await refusal(lambda: slot.verify(in_place=True, keep=True))
        await slot.verify(keep=True)
        first = end_states(host, slot.episode.id)
        await slot.verify(keep=True)
        second = end_states(host, slot.episode.id)
        start = await refusal(lambda: host.create(checkpoint=second[0].id))
        return {"in place": in_place, "first": first, "second": second, "start": start}


async def given_up(host: Host) -> dict[str, Any]:
    """A verify that is cancelled keeps nothing; nor does one whose slot is quarantined."""
    async with await host.create(make_task(command="sleep 1000")) as slot:
        await slot.wait_valid()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeping, slot)
            with trio.fail_after(120):
                while not any(c.id == slot.id and c._examiner for c in host.copies.values()):  # noqa: ASYNC110
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        cancelled = end_states(host, slot.episode.id)
        slot.quarantine("the test")
        await slot.verify(strict=False, keep=True)
        return {"cancelled": cancelled, "quarantined": end_states(host, slot.episode.id)}


async def keeping(slot: Slot) -> None:
    await slot.verify(strict=False, keep=True)


async def of_a_child(host: Host) -> dict[str, Any]:
    """The end state of a fork's child stands on the fork's checkpoint, which goes with it."""
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        await run(slot, "mkdir ~/done")
        (child,) = await slot.fork()
        async with child:
            await child.verify(keep=True)
            episode = child.episode.id
        (manifest,) = end_states(host, episode)
        below = manifest.layers[1]
        found = await host.reverify(episode)
        stood = (host.services.store.path / below).exists()
        await host.delete_checkpoint(episode)
        return {"found": found, "stood": stood, "left": (host.services.store.path / below).exists()}


async def as_configured(host: Host) -> list[int]:
    """`keep_end_states`; what a caller says wins."""
    found = []
    async with await host.create(make_task()) as slot:
        for keep, in_place in ((False, None), (None, True), (None, None)):
            await slot.verify(strict=False, keep=keep, in_place=in_place)
            found.append(len(end_states(host, slot.episode.id)))
    return found


SCENARIOS: tuple[Scenario, ...] = (
    differing,
    changed_checker,
    none_kept,
    tampered,
    refusals,
    given_up,
    of_a_child,
)
PACKAGES: list[Path] = []


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The verifiers of this module, as installed packages."""
    with packages_folder(tmp_path_factory) as folder:
        install(folder, "again-checks", {"again_checks": "again_checks_module"}, {"again_checks_module.py": CHECKS})
        changing = {"changing_checks_module.py": "def answer(desktop, task):\n    return 0.75\n"}
        install(folder, "changing-checks", {"changing_checks": "changing_checks_module"}, changing)
        PACKAGES[:] = [folder]
        yield folder


@pytest.fixture(scope="module")
def played(packages: Path) -> Iterator[Played]:
    scenarios = {x.__name__: x for x in SCENARIOS} | {name: scenario for name, (scenario, _) in AGREEING.items()}
    hosts: list[tuple[Mapping[str, Scenario], Mapping[str, Any]]] = [
        (scenarios, {"max_end_states": 100}),
        ({"as_configured": as_configured}, {"keep_end_states": True, "max_end_states": 100}),
    ]
    before = _kept_here()
    yield play_on_hosts(hosts)
    store = CheckpointStore(load_config().state_dir / "checkpoints", HostFacts("", "", "", ""))
    for manifest in store.names():
        if manifest.id in _kept_here() - before:
            remove(store, manifest)


def _kept_here() -> set[str]:
    store = CheckpointStore(load_config().state_dir / "checkpoints", HostFacts("", "", "", ""))
    return {m.id for m in store.names() if m.kind == KIND}


def command(packages: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "drums", "episodes", "reverify", *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@requires("root", "criu")
class TestOnDesktops:
    """With real desktops."""

    @pytest.mark.parametrize("name", AGREEING)
    def test_it_agrees(self, played: Played, name: str) -> None:
        found = played[name]
        for again in found["found"]:
            assert again.agree and again.recorded.score == again.again.score == AGREEING[name][1], again
            assert again.differences == () and again.again.checker_error is None
            assert again.recorded.at and again.again.at is None
        (manifest,) = found["kept"]
        assert {x.checkpoint for x in found["found"]} == {manifest.id}

    def test_a_score_that_differs_is_told(self, played: Played) -> None:
        found = played["differing"]["found"]
        assert not found.agree and found.recorded.score != found.again.score

    def test_the_command(self, played: Played, packages: Path) -> None:
        """The end states outlive their host. 0 agrees, 1 differs, 2 cannot say."""
        done = command(packages, played["solved"]["episode"], "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["agree"] and document["again"]["score"] == document["recorded"]["score"] == 1.0
        done = command(packages, played["differing"]["episode"])
        assert done.returncode == 1 and "they differ" in done.stdout, done
        scores = [line.split("\t")[1] for line in done.stdout.splitlines() if line.startswith(("recorded", "again"))]
        assert len(set(scores)) == 2
        done = command(packages, played["none_kept"]["episodes"]["never"])
        assert done.returncode == 2 and "no end state" in done.stderr and "--keep" in done.stderr and not done.stdout

    def test_another_checker_is_refused(self, played: Played) -> None:
        found = played["changed_checker"]
        assert found["same"].agree
        refused = found["refused"]
        assert isinstance(refused, CheckerChanged) and "anyway" in refused.hint
        assert len(refused.differences) == 1 and refused.differences[0].startswith("checker.sha256 was '")
        anyway = found["anyway"]
        assert (anyway.agree, anyway.recorded.score, anyway.again.score) == (False, 0.75, 0.25)
        assert list(anyway.differences) == refused.differences

    def test_without_an_end_state(self, played: Played) -> None:
        found = played["none_kept"]
        assert type(found["unknown"]) is EpisodeNotFound
        assert all(type(found[name]) is EndStateNotFound for name in ("never", "removed", "old"))
        assert "was kept" in found["never"].message and "was removed" in found["old"].message
        assert "max_end_states" in found["removed"].hint and found["left"] == []

    def test_a_changed_end_state_is_no_agreement(self, played: Played) -> None:
        found = played["tampered"]
        assert isinstance(found["damaged"], CheckpointError) and "content of 'upper/home/user/note'" in str(
            found["damaged"]
        )
        again = found["found"]
        assert (again.agree, again.recorded.score, again.again.score) == (False, 1.0, None)
        assert "state_hash" in again.again.checker_error and again.again.checker_error_cause == "infrastructure"

    def test_refusals(self, played: Played) -> None:
        found = played["refusals"]
        assert isinstance(found["in place"], ConfigError) and "no desktop starts from it" in str(found["start"])
        assert len(found["first"]) == len(found["second"]) == 1 and found["first"] != found["second"]

    def test_nothing_is_kept_of_what_was_not_graded(self, played: Played) -> None:
        assert played["given_up"] == {"cancelled": [], "quarantined": []}

    def test_what_it_stands_on_goes_with_it(self, played: Played) -> None:
        found = played["of_a_child"]
        assert found["found"].agree and found["found"].again.score == 1.0
        assert found["stood"] and not found["left"]

    def test_as_configured(self, played: Played) -> None:
        assert played["as_configured"] == [0, 0, 1]

    def test_nothing_is_left(self, played: Played) -> None:
        assert not played.left


# --- the bounds, without desktops


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, HostFacts("", "", "", ""))


def made(store: CheckpointStore, kind: str, name: str = "", *below: str, created_at: float | None = None) -> str:
    """A checkpoint without a desktop."""
    identity, folder = store.begin()
    state = attrs.asdict(EndState(name, "d-1", True, None, {})) if kind == KIND else None
    store.finish(
        folder,
        name=name,
        kind=kind,
        image="",
        image_digest="",
        layers=(identity, *below),
        base=identity,
        init_argv=(),
        task=None,
        end_state=state,
    )
    if created_at is not None:
        document = json.loads((folder / MANIFEST).read_bytes())
        write_json(folder / MANIFEST, document | {"created_at": created_at})
    return identity


def left(store: CheckpointStore) -> set[str]:
    return {m.id for m in store.names()}


def test_the_newest_are_kept(store: CheckpointStore) -> None:
    """One of each episode, as many episodes as are allowed; what is no end state does not count."""
    now = 2e9
    ids = [made(store, KIND, f"e-{i}", created_at=now + i) for i in range(4)]
    again = made(store, KIND, "e-3", created_at=now + 9)
    saved = made(store, "saved", "mine")
    _sweep(store, HostConfig(max_end_states=2))
    assert left(store) == {again, ids[2], saved}


def test_the_old_ones_go(store: CheckpointStore) -> None:
    old, young = made(store, KIND, "e-1", created_at=1e9), made(store, KIND, "e-2")
    _sweep(store, HostConfig(end_state_max_age_s=None))
    assert left(store) == {old, young}
    _sweep(store, HostConfig())
    assert left(store) == {young}


def test_one_that_is_being_graded_stays(store: CheckpointStore) -> None:
    """By whichever host: the lock is on its folder."""
    old = made(store, KIND, "e-1", created_at=1e9)
    with locked(store.path / old, shared=True):
        _sweep(store, HostConfig())
        assert left(store) == {old}
    _sweep(store, HostConfig())
    assert left(store) == set()


def test_one_that_cannot_be_removed_costs_no_other(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = made(store, KIND, "e-1", created_at=2.0), made(store, KIND, "e-2", created_at=1.0)
    plain = CheckpointStore.discard

    def discard(self: CheckpointStore, identity: str) -> None:
        if identity == first:
            raise OSError(5, "planted")
        plain(self, identity)

    monkeypatch.setattr(CheckpointStore, "discard", discard)
    _sweep(store, HostConfig())
    assert left(store) == {first} and second not in left(store)


def test_what_others_stand_on_stays(store: CheckpointStore) -> None:
    """Another end state, a fork that lives, another host's fork."""
    fork = made(store, "fork")
    one, two = made(store, KIND, "e-1", fork), made(store, KIND, "e-2", fork)
    manifests = {m.id: m for m in store.names()}
    remove(store, manifests[one])
    assert left(store) == {two, fork}
    living = store.load(fork)
    store.acquire(living)
    remove(store, manifests[two])
    assert left(store) == {fork}
    store.release(living)
    assert left(store) == set()
    foreign = made(CheckpointStore(store.path, store.host), "fork")
    last = made(store, KIND, "e-3", foreign)
    remove(store, next(m for m in store.names() if m.id == last))
    assert left(store) == {foreign}


def test_a_checkpoint_that_is_no_end_state(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="is no end state"):
        EndState.kept_in(store.load(made(store, "saved", "mine")))
