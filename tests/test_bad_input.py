"""Bad input and faults of the host: a named error with observed against allowed, the host goes on, nothing is left.

All scenarios run on real desktops in one `trio.run`, one after the other. After each one what there is on the host
is as before it, and a desktop is created; those are judged while the next scenarios run, and must be valid.
(Long on purpose: one run is shared by all of them, and each is one line of the project's list of bad inputs.)
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from requires import requires
from scratch import IMAGE, copy, scratch_state
from snapshot import assert_unchanged, changes, take

from drums.errors import (
    CheckpointError,
    ConfigError,
    DrumsError,
    DumpError,
    ImageNotFound,
    RestoreError,
    SetupFailed,
    TaskNotFound,
)
from drums_core import dumping
from drums_core.config import HostConfig
from drums_core.host import Host
from drums_core.model import SetupStep, Task
from drums_core.opening import open_host
from drums_core.services import Interposition
from drums_core.slot import Slot
from drums_core.slot_state import SlotState
from drums_core.sys import removal
from drums_core.sys.enter import mount, umount

pytestmark = requires("root", "criu")
TASK = "2e208cb7"
KEPT = "kept"  # the name of a saved checkpoint
Hook = Callable[[Interposition], Awaitable[None]]


@attrs.define
class Bench:
    """What the scenarios share: an open host, its configuration, and what is done at the points of a restore."""

    config: HostConfig
    host: Host
    kept: Path  # the folder of the saved checkpoint
    pristine: Path  # copies of the checkpoints, by id
    hooks: dict[str, Hook]
    made: list[tuple[str, Slot]] = attrs.field(factory=list)  # by which scenario

    @property
    def store(self) -> Path:
        return self.config.state_dir / "checkpoints"

    def task(self, *steps: SetupStep) -> Task:
        """A task with these set-up steps."""
        return attrs.evolve(self.host.task(TASK), config=steps)

    @asynccontextmanager
    async def at(self, point: str, hook: Hook) -> AsyncIterator[None]:
        """Do something whenever a desktop comes to this point of its life."""
        self.hooks[point] = hook
        try:
            yield
        finally:
            del self.hooks[point]

    @contextmanager
    def damaged(self, folder: Path) -> Iterator[Path]:
        """A checkpoint's folder, put right again at the end."""
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
            copy(self.pristine / folder.name, folder)


Scenario = Callable[[Bench], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Register it; its name is the name of its test."""
    SCENARIOS[function.__name__] = function
    return function


# --- names that are not known


@scenario
async def unknown_image(bench: Bench) -> None:
    with pytest.raises(ImageNotFound, match="no image 'nonesuch'") as caught:
        await bench.host.create(image="nonesuch")
    assert caught.value.known == [IMAGE]
    assert IMAGE in str(caught.value)


@scenario
async def unknown_checkpoint(bench: Bench) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint 'nonesuch'") as caught:
        await bench.host.create(checkpoint="nonesuch")
    assert caught.value.checkpoint == "nonesuch"
    assert KEPT in str(caught.value)


@scenario
async def unknown_task(bench: Bench) -> None:
    with pytest.raises(TaskNotFound, match="nonesuch"):
        await bench.host.create("nonesuch")


# --- damaged checkpoints


async def _refused(bench: Bench, *words: str, name: str = KEPT) -> None:
    with pytest.raises(CheckpointError) as caught:
        await bench.host.create(checkpoint=name)
    assert type(caught.value) is CheckpointError
    for word in (name, *words):
        assert word in str(caught.value), str(caught.value)
    assert not [slot for slot in bench.host.slots.values() if slot.state is SlotState.STARTING]


def _pages(folder: Path) -> Path:
    return max((folder / "criu").glob("pages-*.img"), key=lambda p: p.stat().st_size)


@scenario
async def truncated_image_file(bench: Bench) -> None:
    with bench.damaged(bench.kept) as folder:
        pages = _pages(folder)
        size = pages.stat().st_size
        os.truncate(pages, size - 4096)
        await _refused(bench, f"criu/{pages.name}", "size", str(size - 4096), str(size))


@scenario
async def one_changed_byte_of_the_same_size_and_time(bench: Bench) -> None:
    with bench.damaged(bench.kept) as folder:
        pages = _pages(folder)
        info = pages.stat()
        with pages.open("r+b") as f:
            f.seek(info.st_size // 2)
            byte = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte[0] ^ 1]))
        os.utime(pages, ns=(info.st_atime_ns, info.st_mtime_ns))
        await _refused(bench, f"criu/{pages.name}", "content", "allowed")


@scenario
async def missing_file(bench: Bench) -> None:
    with bench.damaged(bench.kept) as folder:
        (folder / "evidence.json").unlink()
        await _refused(bench, "'evidence.json' is missing")


@scenario
async def additional_file(bench: Bench) -> None:
    with bench.damaged(bench.kept) as folder:
        (folder / "criu" / "stranger.img").write_bytes(b"?")
        await _refused(bench, "'criu/stranger.img' is not in its manifest")


@scenario
async def another_owner_in_the_file_layer(bench: Bench) -> None:
    with bench.damaged(bench.kept) as folder:
        os.chown(folder / "upper", 0, 0)
        await _refused(bench, "owner or mode", "'upper'", "allowed")


@scenario
async def damaged_manifest(bench: Bench) -> None:
    with bench.damaged(bench.kept) as folder:
        text = (folder / "manifest.json").read_bytes()
        for damaged in (text[: len(text) // 2], b"", b"[]", text.replace(b'"layers"', b'"lawyers"')):
            (folder / "manifest.json").write_bytes(damaged)
            await _refused(bench, "manifest", name=folder.name)


@scenario
async def missing_manifest(bench: Bench) -> None:
    with bench.damaged(bench.kept) as folder:
        (folder / "manifest.json").unlink()
        await _refused(bench, "no manifest", name=folder.name)


async def _of_another_host(bench: Bench, what: str) -> None:
    with bench.damaged(bench.kept) as folder:
        document = json.loads((folder / "manifest.json").read_text())
        here = document["host"][what]
        document["host"][what] = "something-else"
        (folder / "manifest.json").write_text(json.dumps(document))
        await _refused(bench, what, "'something-else'", repr(here))


@scenario
async def checkpoint_of_another_kernel(bench: Bench) -> None:
    await _of_another_host(bench, "kernel")


@scenario
async def checkpoint_of_another_processor(bench: Bench) -> None:
    await _of_another_host(bench, "cpu_features")


@scenario
async def checkpoint_of_another_criu(bench: Bench) -> None:
    await _of_another_host(bench, "criu")


@scenario
async def damaged_layer_below(bench: Bench) -> None:
    """The golden checkpoint's file layer, on which the saved one stands."""
    below = json.loads((bench.kept / "manifest.json").read_text())["layers"][1]
    with bench.damaged(bench.store / below) as folder:
        changed = next(p for p in sorted((folder / "upper").rglob("*")) if p.is_file() and not p.is_symlink())
        with changed.open("ab") as f:
            f.write(b"?")
        await _refused(bench, str(changed.relative_to(folder)), below)


@scenario
async def missing_layer_below(bench: Bench) -> None:
    below = json.loads((bench.kept / "manifest.json").read_text())["layers"][1]
    with bench.damaged(bench.store / below) as folder:
        shutil.rmtree(folder)
        folder.mkdir()
        await _refused(bench, below)


# --- CRIU and the disk


def _criu() -> int:
    """The host pid of the one CRIU that this process runs."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid() and (b"swrk" in words or any(b"--rpc" in word for word in words)):
                return int(name)
    raise LookupError("no CRIU runs")


async def _send_criu(number: int, _: Interposition) -> None:
    os.kill(_criu(), number)


async def _criu_is_gone(_: Interposition) -> None:
    """Kill CRIU where it waits for our answer, and come back when nobody is there to read one."""
    pid = _criu()
    os.kill(pid, signal.SIGKILL)
    await trio.to_thread.run_sync(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def _killed_after(delay_s: float) -> bool:
    """Kill CRIU so long after it has started; whether it was there to be killed."""
    with trio.move_on_after(5):
        while True:
            try:
                pid = _criu()
                break
            except LookupError:
                await trio.sleep(0.001)
        await trio.sleep(delay_s)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True
    return False


async def _usable(slot: Slot) -> None:
    assert (await slot.execute(["echo", "here"])).output == "here\n"


async def _mended(slot: Slot) -> None:
    """A desktop that a broken dump may have damaged: quarantined, to be released and reset."""
    assert slot.state is SlotState.QUARANTINED, slot.describe()
    assert "not_quarantined" in slot.gates()["validity"]["bad_gates"]
    await slot.release()
    await slot.reset()
    await _usable(slot)


@scenario
async def criu_killed_while_all_is_frozen(bench: Bench) -> None:
    async with await bench.host.create() as slot:
        checkpoints = sorted(os.listdir(bench.store))
        async with bench.at("frozen", _criu_is_gone):
            with pytest.raises(DumpError, match="broke off: criu ended in the middle, by signal 9") as caught:
                await slot.fork(2)
        assert caught.value.interrupted is True
        assert sorted(os.listdir(bench.store)) == checkpoints
        await _mended(slot)


@scenario
async def criu_killed_at_any_moment_of_a_dump(bench: Bench) -> None:
    for delay_s in (0.02, 0.06, 0.1, 0.14):
        async with await bench.host.create() as slot:
            checkpoints = sorted(os.listdir(bench.store))
            failure: DumpError | None = None
            children: list[Slot] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_killed_after, delay_s)
                try:
                    children = await slot.fork()
                except DumpError as e:
                    failure = e
                except RestoreError:
                    continue  # the dump was over, and the child's CRIU was the one that was met
            for child in children:
                await child.close()
            assert sorted(os.listdir(bench.store)) == checkpoints
            if failure is not None:
                assert "broke off" in failure.message
                assert "signal 9" in failure.message
                await _mended(slot)


@scenario
async def criu_that_hangs_in_a_dump(bench: Bench) -> None:
    async with _host_with(bench, criu_timeout_s=2.0) as host, await host.create() as slot:
        checkpoints = sorted(os.listdir(bench.store))
        async with bench.at("frozen", functools.partial(_send_criu, signal.SIGSTOP)):
            with pytest.raises(DumpError, match=r"silent for 2.* s") as caught:
                await slot.save("never")
        assert caught.value.interrupted is True
        assert sorted(os.listdir(bench.store)) == checkpoints
        await _mended(slot)


@scenario
async def dump_that_never_ends(bench: Bench) -> None:
    """Its deadline, when CRIU itself is not what hangs."""

    async def hang(_: Interposition) -> None:
        await trio.sleep_forever()

    async with await bench.host.create() as slot:
        checkpoints = sorted(os.listdir(bench.store))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dumping, "DUMP_DEADLINE_S", 2.0)
            async with bench.at("frozen", hang):
                with pytest.raises(DumpError, match="did not end within 2 s"):
                    await slot.save("never")
        assert sorted(os.listdir(bench.store)) == checkpoints
        await _mended(slot)


@scenario
async def criu_killed_in_a_restore(bench: Bench) -> None:
    for point in ("rebuilt", "restored", "pre_resume"):
        async with bench.at(point, _criu_is_gone):
            with pytest.raises(RestoreError, match="broke off: criu ended in the middle, by signal 9"):
                await bench.host.create(TASK)


@scenario
async def criu_killed_at_any_moment_of_a_restore(bench: Bench) -> None:
    for delay_s in (0.0, 0.02, 0.04, 0.06, 0.08, 0.1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_killed_after, delay_s)
            try:
                await (await bench.host.create()).close()
            except RestoreError as e:
                assert "broke off" in e.message
            nursery.cancel_scope.cancel()


@scenario
async def criu_killed_in_a_reset(bench: Bench) -> None:
    async with await bench.host.create(TASK) as slot:
        async with bench.at("rebuilt", functools.partial(_send_criu, signal.SIGKILL)):
            with pytest.raises(RestoreError, match="broke off"):
                await slot.reset()
        assert slot.state is SlotState.DOWN
        await slot.reset()
        await _usable(slot)


@scenario
async def criu_killed_in_the_restore_of_a_child(bench: Bench) -> None:
    async with await bench.host.create() as slot:
        slots = set(bench.host.slots)
        checkpoints = sorted(os.listdir(bench.store))
        async with bench.at("rebuilt", functools.partial(_send_criu, signal.SIGKILL)):
            with pytest.raises(RestoreError, match="broke off"):
                await slot.fork(2)
        assert set(bench.host.slots) == slots
        assert sorted(os.listdir(bench.store)) == checkpoints
        await _usable(slot)


@scenario
async def criu_that_hangs_in_a_restore(bench: Bench) -> None:
    async with _host_with(bench, criu_timeout_s=2.0) as host:
        for point in ("rebuilt", "pre_resume"):
            async with bench.at(point, functools.partial(_send_criu, signal.SIGSTOP)):
                with pytest.raises(RestoreError, match=r"silent for 2.* s"):
                    await host.create()


@contextmanager
def _small_disk(folder: Path, image: Path, size: int) -> Iterator[None]:
    """Mount a small file system of its own on a folder, with what lies in the folder."""
    kept = folder.with_name("kept")
    copy(folder, kept)
    with image.open("wb") as f:
        os.truncate(f.fileno(), size)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True, capture_output=True)
    try:
        shutil.rmtree(folder / "lost+found")
        for entry in kept.iterdir():
            copy(entry, folder / entry.name)
        yield
    finally:
        umount(str(folder))
        image.unlink()
        shutil.rmtree(kept)


class _Filler:
    """A file without a name on a file system, there before it is full: to fill it not even a name has to be made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)

    def __enter__(self) -> _Filler:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def fill(self, *, but: int) -> None:
        """Leave so many bytes free."""
        self.empty()
        free = os.statvfs(self._folder)
        left = free.f_bavail * free.f_frsize - but
        while left > 0:
            try:
                left -= os.write(self._fd, bytes(min(left, 1 << 20)))
                os.fsync(self._fd)
            except OSError as e:
                assert e.errno == errno.ENOSPC
                return

    def empty(self) -> None:
        """Give it all back, at once: freed blocks count as free only once the journal is written."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.fsync(self._fd)


@scenario
async def full_disk_at_a_dump(bench: Bench) -> None:
    """The file system of the checkpoints fills up at three places of a dump."""
    with scratch_state() as config:
        store = config.state_dir / "checkpoints"
        with _small_disk(store, config.state_dir / "disk", 400 << 20), _Filler(store) as filler:
            hooks: dict[str, Hook] = {}
            async with open_host(config, interposer=_interposer(hooks)) as host, await host.create() as slot:
                before = sorted(os.listdir(store))

                async def refused() -> None:
                    with pytest.raises(DumpError) as caught:
                        await slot.fork()
                    assert "No space left on device" in str(caught.value), str(caught.value)
                    assert caught.value.interrupted is False
                    filler.empty()
                    assert sorted(os.listdir(store)) == before
                    assert list(host.slots.values()) == [slot]
                    assert slot.state is SlotState.UP
                    await _usable(slot)

                for free in (0, 8 << 20):  # not a folder can be made; the pages of memory do not fit
                    filler.fill(but=free)
                    await refused()

                async def fill(_: Interposition) -> None:
                    filler.fill(but=0)

                hooks["frozen"] = fill  # the evidence and the files do not fit
                await refused()
                del hooks["frozen"]
                (child,) = await slot.fork()
                for judged in (slot, child):
                    await judged.wait_valid(20)
                await child.close()


@asynccontextmanager
async def _host_with(bench: Bench, **changed: Any) -> AsyncIterator[Host]:
    """A second host on the same state folder, otherwise configured."""
    async with open_host(attrs.evolve(bench.config, **changed), interposer=_interposer(bench.hooks)) as host:
        yield host


def _interposer(hooks: Mapping[str, Hook]) -> Hook:
    async def interposer(at: Interposition) -> None:
        if at.point in hooks:
            await hooks[at.point](at)

    return interposer


# --- a guest server that never answers, set-ups that fail


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def _stop_guest_server(at: Interposition) -> None:
    stopped = 0
    for pid in (await trio.Path(at.cgroup_paths[0] / "cgroup.procs").read_text()).split():
        command = _command_line(int(pid))
        if b"/opt/drums/guest" in command and b"server" in command:
            os.kill(int(pid), signal.SIGSTOP)
            stopped += 1
    assert stopped, "no guest server to stop"


@scenario
async def guest_server_that_never_answers(bench: Bench) -> None:
    """Without a set-up there is nothing to fail: an invalid episode, that says which gate."""
    async with (
        _host_with(bench, ready_limit_s=2.0) as host,
        bench.at("resumed", _stop_guest_server),
        await host.create() as slot,
    ):
        validity = slot.gates()["validity"]
        assert validity["verdict"] == "invalid"
        assert "guest_ready" in validity["bad_gates"]
        assert any("within 2 s" in reason for reason in validity["invalid_reasons"])


@scenario
async def guest_server_that_never_answers_and_a_set_up(bench: Bench) -> None:
    async with _host_with(bench, ready_limit_s=2.0) as host, bench.at("resumed", _stop_guest_server):
        for command in ("true", "sudo true"):
            with trio.fail_after(20), pytest.raises(SetupFailed, match=r"guest server did not answer within 2 s"):
                await host.create(bench.task(SetupStep("execute", {"command": command, "shell": True})))
            assert not host.slots


@scenario
async def set_up_step_that_nobody_knows(bench: Bench) -> None:
    started = set(os.listdir(bench.config.state_dir / "slots"))
    task = bench.task(SetupStep("sleep", {"seconds": 0}), SetupStep("nonesuch", {}))
    with pytest.raises(ConfigError, match="no plugin provides the set-up step 'nonesuch'") as caught:
        await bench.host.create(task)
    assert caught.value.path == "$.config[1].type"
    assert "execute" in str(caught.value)  # what there is
    assert set(os.listdir(bench.config.state_dir / "slots")) == started


@scenario
async def set_up_step_of_wrong_parameters(bench: Bench) -> None:
    for parameters, path, words in (
        ({"command": 7}, "$.config[1].parameters", "7"),
        ({}, "$.config[1].parameters", "command"),
        ({"command": "true", "user": "root"}, "$.config[1].parameters", "user"),
    ):
        task = bench.task(SetupStep("sleep", {"seconds": 0}), SetupStep("execute", parameters))
        with pytest.raises(ConfigError, match=words) as caught:
            await bench.host.create(task)
        assert caught.value.path.startswith(path)
    with pytest.raises(ConfigError, match="allowed is 0 to 600") as caught:
        await bench.host.create(bench.task(SetupStep("sleep", {"seconds": -1})))
    assert caught.value.path == "$.config[0].parameters.seconds"


@scenario
async def set_up_step_that_fails(bench: Bench) -> None:
    slots = set(bench.host.slots)
    task = bench.task(
        SetupStep("execute", {"command": ["true"]}),
        SetupStep("execute", {"command": "echo out; sudo sh -c 'echo why >&2; exit 3'", "shell": True}),
    )
    with pytest.raises(
        SetupFailed, match=r"set-up step 1 \(execute\) failed: .* ended with code 3, 0 is needed"
    ) as caught:
        await bench.host.create(task)
    e = caught.value
    assert (e.index, e.step_type, e.returncode) == (1, "execute", 3)
    assert "out" in e.output
    assert "why" in e.output
    assert set(bench.host.slots) == slots


@scenario
async def lease_that_cannot_be(bench: Bench) -> None:
    for ttl in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="more than 0 seconds"):
            await bench.host.create(ttl_s=ttl)


# --- mounts below what teardown deletes


@contextmanager
def _canary(config: HostConfig) -> Iterator[Path]:
    """A folder of the host with a file in it that must live on."""
    folder = config.state_dir / "precious"
    folder.mkdir()
    (folder / "canary").write_text("alive")
    try:
        yield folder
        assert (folder / "canary").read_text() == "alive"
    finally:
        shutil.rmtree(folder)


@scenario
async def mount_left_in_a_desktops_folder(bench: Bench) -> None:
    with _canary(bench.config) as precious:
        slot = await bench.host.create()
        folder = bench.config.state_dir / "slots" / slot.id
        (folder / "log" / "x").mkdir()
        mount(str(precious), str(folder / "log" / "x"), None, ["bind"])
        (folder / "log" / "y").mkdir()
        mount("tmpfs", str(folder / "log" / "y"), "tmpfs")
        mount(str(precious), str(folder / "log" / "y"), None, ["bind"])  # one above the other
        (folder / "log" / "link").symlink_to(precious)
        await slot.close()
        assert not folder.exists()
        assert removal.mounts_below(folder) == []


@scenario
async def mount_in_the_desktops_own_tree(bench: Bench) -> None:
    """As an agent with root, or a set-up, might make one: it is the desktop's, and goes with it."""
    with _canary(bench.config) as precious:
        slot = await bench.host.create()
        assert slot.desktop is not None
        inside = slot.desktop.root / "mnt"
        mount(str(precious), str(inside), None, ["bind"])
        await slot.close()
        assert removal.mounts_below(bench.config.state_dir / "slots") == [
            where for where in removal.mounts_below(bench.config.state_dir / "slots") if slot.id not in where
        ]


# --- hosts that end badly, and hosts side by side


@scenario
async def error_in_the_users_own_code(bench: Bench) -> None:
    class Own(Exception):
        pass

    with pytest.raises(Own):
        async with open_host(bench.config) as host:
            await host.create()
            raise Own


@scenario
async def two_hosts_on_one_state_folder(bench: Bench) -> None:
    mine = await bench.host.create(TASK)
    async with _host_with(bench) as other, await other.create(TASK) as theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mine.fork)
            nursery.start_soon(theirs.fork)
        await _usable(mine)
        for slot in (mine, theirs):
            reward = await slot.verify()
            assert (reward.score, reward.valid) == (0.0, True)
    await _usable(mine)
    for slot in [s for s in bench.host.slots.values() if s.episode.origin == "fork"]:
        await _usable(slot)
        await slot.close()
    await mine.close()


_HOST = """
import os, signal, sys, trio
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import attrs
from drums_core.config import load_config
from drums_core.opening import open_host

async def main():
    config = attrs.evolve(load_config(), state_dir=Path(sys.argv[1]), osworld=None)
    reached = {"pre_resume": trio.Event(), "frozen": trio.Event()}
    hold = set()

    async def interposer(at):
        if at.point in hold:
            reached[at.point].set()
            await trio.sleep_forever()

    async with open_host(config, interposer=interposer) as host, trio.open_nursery() as nursery:
        first = await host.create("2e208cb7")
        second = await host.create()
        await first.fork(1)
        hold.add("pre_resume")
        nursery.start_soon(host.create)
        await reached["pre_resume"].wait()
        hold.add("frozen")
        nursery.start_soon(second.fork, 1)
        await reached["frozen"].wait()
        print("ready", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@scenario
async def host_killed_while_desktops_live(bench: Bench) -> None:
    """Two desktops, a fork's child, one held by CRIU before its first instruction, one frozen for a dump."""
    with scratch_state() as config:
        for other_is_open in (False, True):
            process = await trio.lowlevel.open_process(
                [sys.executable, "-c", _HOST, str(config.state_dir), str(Path(__file__).parents[1])],
                stdout=subprocess.PIPE,
            )
            assert process.stdout is not None
            async with process.stdout:
                with trio.fail_after(60):
                    said = b""
                    while b"ready\n" not in said:
                        part = await process.stdout.receive_some(1000)
                        assert part, said
                        said += part
                slots = sorted(os.listdir(config.state_dir / "slots"))
                assert len(slots) == 4
                process.kill()
                await process.wait()
            async with open_host(config) as host:
                assert os.listdir(config.state_dir / "slots") == []
                assert [x.kind for x in host.checkpoints()] == ["golden"]
                assert len(os.listdir(config.state_dir / "checkpoints")) == 1
                assert len(os.listdir(config.state_dir / "run")) == 1
                assert not _cgroups_named(slots)
                if not other_is_open:
                    await (await host.create()).wait_valid(20)
            assert os.listdir(config.state_dir / "run") == []
            assert removal.mounts_below(config.state_dir) == []


def _cgroups_named(names: list[str]) -> list[Path]:
    return [path for name in names for path in Path("/sys/fs/cgroup").glob(f"**/{name}")]


# --- the tests


@attrs.define
class Played:
    """What became of each scenario: None is well."""

    failures: dict[str, str] = attrs.field(factory=dict)


async def _play_one(bench: Bench, name: str, played: Played) -> None:
    for made_by, slot in list(bench.made):
        if slot.episode.validity.verdict.value != "pending":
            await _judge(bench, made_by, slot, played)
    await trio.sleep(0.1)
    before = take(bench.config.state_dir)
    try:
        with trio.fail_after(90):
            await SCENARIOS[name](bench)
        found = await trio.to_thread.run_sync(lambda: changes(before, bench.config.state_dir))
        assert not found, "not as before:\n" + "\n".join(found)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - it is the scenario's outcome
        played.failures[name] = traceback.format_exc()
    try:
        bench.made.append((name, await bench.host.create()))
    except DrumsError:
        played.failures[name] = played.failures.get(name, "") + f"and no create afterwards: {traceback.format_exc()}"


async def _judge(bench: Bench, made_by: str, slot: Slot, played: Played) -> None:
    try:
        await slot.wait_valid(20)
        await _usable(slot)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - it is the scenario's outcome
        text = traceback.format_exc()
        played.failures[made_by] = played.failures.get(made_by, "") + f"the desktop created afterwards: {text}"
    await slot.close()
    bench.made.remove((made_by, slot))


async def _play(names: list[str], config: HostConfig, played: Played) -> None:
    hooks: dict[str, Hook] = {}
    pristine = config.state_dir / "pristine"
    pristine.mkdir()
    async with open_host(config, interposer=_interposer(hooks)) as host:
        async with await host.create() as slot:
            kept = await slot.save(KEPT)
        for folder in (config.state_dir / "checkpoints").iterdir():
            copy(folder, pristine / folder.name)
        bench = Bench(config, host, kept.path, pristine, hooks)
        for name in names:
            await _play_one(bench, name, played)
        for made_by, slot in list(bench.made):
            await _judge(bench, made_by, slot, played)
        # The checkpoint that was damaged and put right is good again.
        async with await host.create(checkpoint=KEPT) as slot:
            await slot.wait_valid(20)
        for slot in list(host.slots.values()):  # of scenarios that failed
            await slot.close()
        await host.delete_checkpoint(KEPT)
    shutil.rmtree(pristine)


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Played:
    """The outcome of each scenario that a selected test asks for."""
    asked = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    outcome = Played()
    with scratch_state(waiting_workers=0) as config:  # others come and go beside the scenarios
        before = take(config.state_dir)
        trio.run(_play, [name for name in SCENARIOS if name in asked], config, outcome)
        assert_unchanged(before, config.state_dir)
    return outcome


@pytest.mark.parametrize("name", SCENARIOS)
def test_bad_input(name: str, played: Played) -> None:
    if name in played.failures:
        pytest.fail(textwrap.dedent(played.failures[name]), pytrace=False)


# --- removal by itself


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A folder with a bind mount of a folder of the same file system, which has a canary in it."""
    top, precious = tmp_path / "top", tmp_path / "precious"
    (top / "a" / "point").mkdir(parents=True)
    (top / "a" / "file").write_text("x")
    precious.mkdir()
    (precious / "canary").write_text("alive")
    yield top
    assert (precious / "canary").read_text() == "alive"
    removal.unmount_below(tmp_path)


def test_a_tree_with_a_mount_in_it_is_not_touched(tree: Path) -> None:
    mount(str(tree.parent / "precious"), str(tree / "a" / "point"), None, ["bind"])
    with pytest.raises(OSError, match="mounted below it") as caught:
        removal.remove_tree(tree)
    assert caught.value.errno == errno.EBUSY
    assert str(tree / "a" / "point") in str(caught.value)
    assert (tree / "a" / "file").exists()
    umount(str(tree / "a" / "point"))
    removal.remove_tree(tree)
    assert not tree.exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_mount_made_after_the_check_is_not_crossed(tree: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    precious = tree.parent / "precious"
    source, point = {
        "folder": (precious, tree / "a" / "point"),
        "file": (precious / "canary", tree / "a" / "file"),
    }[kind]
    mount(str(source), str(point), None, ["bind"])
    monkeypatch.setattr(removal, "mounts_below", lambda path: [])  # it looked a moment earlier
    with pytest.raises(OSError) as caught:
        removal.remove_tree(tree)
    assert caught.value.errno in (errno.EXDEV, errno.EBUSY)
    assert (precious / "canary").read_text() == "alive"


def test_links_are_removed_and_not_followed(tree: Path) -> None:
    precious = tree.parent / "precious"
    (tree / "a" / "link").symlink_to(precious)
    (tree / "a" / "dangling").symlink_to("/nonesuch")
    os.link(precious / "canary", tree / "a" / "hard")
    (tree.parent / "top-link").symlink_to(tree)
    removal.remove_tree(tree)
    assert not tree.exists()
    removal.remove_tree(tree.parent / "top-link")
    assert not (tree.parent / "top-link").is_symlink()


def test_a_link_in_the_place_of_a_folder_is_removed_itself(tree: Path) -> None:
    precious = tree.parent / "precious"
    shutil.rmtree(tree)
    tree.symlink_to(precious)
    removal.remove_tree(tree)
    assert not tree.is_symlink()
