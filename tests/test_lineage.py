"""What a desktop comes from counts: no copy of a broken one is valid, and a slot that ends early leaves nothing."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import signal
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import pytest
import trio
from desktops import Played, judged, make_task, play
from requires import requires

from drums.errors import DrumsError, InvalidEpisode
from drums_core.checkpoint import list_files
from drums_core.host import Host
from drums_core.testing.faults import FaultInjector, fault
from drums_core.verdict import SPECIFIED_GATES

pytestmark = requires("root", "criu")
faults = FaultInjector()


async def children_of_a_broken_desktop(host: Host) -> dict[str, object]:
    """Forked at once, while the verdict of the parent is already out, and a grandchild."""
    faults.arm(fault("state_hash"))
    async with await host.create() as parent:
        (child,) = await parent.fork(1)
        (grandchild,) = await child.fork(1)
        try:
            await parent.save("broken")
        except InvalidEpisode as e:
            refused = e
        found = {"child": await judged(child), "grandchild": await judged(grandchild), "refused": refused}
        await grandchild.close()
        await child.close()
        return found


async def child_of_one_that_breaks_later(host: Host) -> object:
    """The parent is pending at the dump, and one of its restored processes ends before it is judged."""
    armed = faults.arm(fault("alive_after_resume:last-moment"))
    async with await host.create() as parent:
        (child,) = await parent.fork(1)
        found = await judged(child)
        assert armed.planted
        assert "alive_after_resume" in (await judged(parent)).bad_gates
        await child.close()
        return found


async def child_of_a_sound_desktop(host: Host) -> object:
    async with await host.create() as parent:
        (child,) = await parent.fork(1)
        found = await judged(child)
        await child.close()
        return found


async def verified_after_init_ended(host: Host) -> object:
    async with await host.create(make_task()) as slot:
        await slot.wait_valid()
        assert slot.desktop is not None
        os.kill(slot.desktop.pid1, signal.SIGKILL)
        with trio.fail_after(10):
            while slot.state.value != "failed":  # noqa: ASYNC110 - as an observer outside would
                await trio.sleep(0.02)
        return await slot.verify(strict=False)


async def short_leases(host: Host) -> list[str]:
    """The lease begins when the desktop is there; however short, it ends a whole desktop."""
    told = []
    for ttl_s in (0.001, 0.05, 0.3):
        try:
            slot = await host.create(ttl_s=ttl_s)
        except DrumsError as e:
            told.append(str(e))
            continue
        with trio.fail_after(15):
            while slot.id in host.slots:  # noqa: ASYNC110 - as above
                await trio.sleep(0.02)
        assert slot.state.value == "closed"
        assert slot.desktop is None
    async with await host.create() as slot:
        await slot.wait_valid()
    return told


async def whole_desktop_in_the_hosts_network(host: Host) -> object:
    async with network_sharer(host) as name, await host.create(checkpoint=name) as slot:
        assert slot.desktop is not None
        same = slot.desktop.namespaces["net"] == os.stat("/proc/self/ns/net").st_ino
        return await judged(slot, shared=same)


async def whole_desktop_in_another_desktops_network(host: Host, place: Path) -> object:
    """CRIU itself is in the other's, where nothing listens on the guest server's port any more."""
    async with network_sharer(host) as name, await host.create() as other:
        assert other.desktop is not None
        pid1 = other.desktop.pid1
        os.kill(pid1, signal.SIGSTOP)  # it neither starts the guest server anew nor ends
        for pid in other.desktop.cgroup.pids() - {pid1}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        criu = host.services.criu
        program = place / "criu-in-another-network"
        program.write_text(f'#!/bin/sh\nexec nsenter --net=/proc/{pid1}/ns/net "{criu.path}" "$@"\n')
        program.chmod(0o755)
        host.services = attrs.evolve(
            host.services, criu=attrs.evolve(criu, path=program)
        )  # the host is this one's alone
        async with await host.create(checkpoint=name) as slot:
            assert slot.desktop is not None
            same = slot.desktop.namespaces["net"] == os.stat(f"/proc/{pid1}/ns/net").st_ino
            return await judged(slot, shared=same, other=other.id)


@contextlib.asynccontextmanager
async def network_sharer(host: Host) -> AsyncIterator[str]:
    """The name of a checkpoint that says of every process that it shares the network namespace of CRIU itself."""
    name = f"shares-the-network-{secrets.token_hex(4)}"
    async with await host.create() as slot:
        await slot.wait_valid()
        await slot.save(name)
    folder = host.services.store.load(name).path
    try:
        await trio.to_thread.run_sync(share_the_network, folder, host.services.criu.pycriu_dir)
        yield name
    finally:
        await trio.to_thread.run_sync(host.services.store.discard, folder.name)


def share_the_network(folder: Path, pycriu_dir: Path) -> None:
    """Change the checkpoint's images and, so that it is not refused as damaged, its manifest.

    An image is two magic numbers, the size of a message, and the message (criu.org/Images).
    """
    sys.path.append(str(pycriu_dir))
    own = importlib.import_module("inventory_pb2").inventory_entry()
    ids = importlib.import_module("core_pb2").task_kobj_ids_entry()
    own.ParseFromString((folder / "criu/inventory.img").read_bytes()[12:])
    for path in folder.glob("criu/ids-*.img"):
        content = path.read_bytes()
        ids.ParseFromString(content[12:])
        ids.net_ns_id = own.root_ids.net_ns_id
        message = ids.SerializeToString()
        path.write_bytes(content[:8] + struct.pack("<I", len(message)) + message)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = list_files(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))


SCENARIOS = (
    whole_desktop_in_the_hosts_network,
    children_of_a_broken_desktop,
    child_of_one_that_breaks_later,
    child_of_a_sound_desktop,
    verified_after_init_ended,
    short_leases,
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play({x.__name__: x for x in SCENARIOS}, interposer=faults)


def test_a_copy_of_a_broken_desktop_is_broken(played: Played) -> None:
    found = played["children_of_a_broken_desktop"]
    for name in ("child", "grandchild"):
        assert found[name].verdict == "invalid"
        assert found[name].bad_gates == {"state_hash"}
        assert "inherited from episode" in found[name].reasons[0]
    assert "state_hash" in str(found["refused"])


def test_a_child_waits_for_its_parents_verdict(played: Played) -> None:
    found = played["child_of_one_that_breaks_later"]
    assert found.verdict == "invalid"
    assert "alive_after_resume" in found.bad_gates


def test_a_child_of_a_sound_desktop_is_valid(played: Played) -> None:
    assert played["child_of_a_sound_desktop"].verdict == "valid"


def test_a_dead_desktop_gives_an_invalid_reward_without_a_score(played: Played) -> None:
    reward = played["verified_after_init_ended"]
    assert (reward.score, reward.valid) == (None, False)
    assert reward.checker_skipped == "failed: the desktop's init ended"


def test_a_whole_desktop_in_the_hosts_network_is_broken(played: Played) -> None:
    found = played["whole_desktop_in_the_hosts_network"]
    assert found.facts["shared"]
    assert found.verdict == "invalid"
    assert found.bad_gates == {"isolation", "netns"}
    assert "netns: the desktop is in the host's network namespace" in found.reasons
    assert found.passing() >= set(SPECIFIED_GATES) - {"isolation", "netns"}


def test_a_whole_desktop_in_another_desktops_network_is_broken(tmp_path: Path) -> None:
    played = play({"": lambda host: whole_desktop_in_another_desktops_network(host, tmp_path)})
    found = played[""]
    assert not played.left
    assert found.facts["shared"]
    assert found.verdict == "invalid"
    assert found.bad_gates == {"isolation", "netns"}
    assert f"netns: the desktop shares its network namespace with desktop {found.facts['other']!r}" in found.reasons
    assert found.passing() >= set(SPECIFIED_GATES) - {"isolation", "netns"}


def test_short_leases_leave_nothing(played: Played) -> None:
    assert played["short_leases"] == []
    assert not played.left
