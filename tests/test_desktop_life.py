"""A desktop's life: create, step, verify, fork, save, reset, quarantine, release, close; and what an agent may not."""

from __future__ import annotations

import json
import os
import signal
import struct
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from desktops import Outcome, Played, Scenario, judged, make_task, outcome, play_on_hosts, run, start_daemon
from requires import requires

from drums.errors import (
    CapacityExhausted,
    CheckpointError,
    ConfigError,
    DrumsError,
    ImageNotFound,
    ImageUnsuitable,
    InvalidEpisode,
    InvalidTransition,
    SlotBusy,
    SlotNotFound,
    SlotQuarantined,
    TaskNotFound,
    TaskUnsupported,
    VerifierNotFound,
)
from drums_core import desktop, load_config
from drums_core.boot import boot
from drums_core.host import Host
from drums_core.model import SetupStep
from drums_core.opening import open_host
from drums_core.slot import Slot
from drums_core.slot_state import SlotState
from drums_core.sys.cgroups import Cgroup
from drums_core.verdict import SPECIFIED_GATES

pytestmark = requires("root", "criu")

MAKE = "import os; os.mkdir(os.path.expanduser('~/done'))"


def execute(command: str) -> SetupStep:
    return SetupStep("execute", {"command": command, "shell": True})


async def refusal(error: type[DrumsError], awaitable: Any) -> DrumsError:
    """The error that an operation is refused with."""
    with pytest.raises(error) as caught:
        await awaitable
    return caught.value


async def valid(slot: Slot) -> bool:
    """Whether the verdict becomes valid, with every gate passed."""
    found = await judged(slot)
    assert found.verdict == "valid" and found.passing() == set(SPECIFIED_GATES), found.reasons
    return True


@asynccontextmanager
async def saved(slot: Slot) -> AsyncIterator[str]:
    """The desktop's state under a name of its own; deleted at the end."""
    name = f"drums-test-{uuid.uuid4().hex[:8]}"
    await slot.save(name)
    try:
        yield name
    finally:
        await slot.host.delete_checkpoint(name)


# --- scenarios


async def scored(host: Host) -> dict[str, Any]:
    async with await host.create(make_task()) as slot:
        png = await slot.screenshot()
        early = slot.episode.validity.verdict
        untouched = await slot.verify()
        reply = await slot.step(MAKE)
        done = await slot.verify()
        failing = await slot.step("raise SystemError('of the agent')")
        special = await slot.step("DONE")
        first = slot.episode.id
        await slot.reset()
        again = await slot.verify()
        return {
            "png": png,
            "early": early,
            "scores": [untouched.score, done.score, again.score],
            "valid": [x.valid for x in (untouched, done, again)],
            "replies": [reply, failing, special],
            "episodes": {first, slot.episode.id},
            "origin": slot.episode.origin,
            "provenance": done.provenance,
        }


async def states(host: Host) -> dict[str, Any]:
    seen: list[str] = []
    async with host.events() as events:
        slot = await host.create(make_task())
        found: dict[str, Any] = {"up": [await refusal(InvalidTransition, slot.release())]}
        await valid(slot)
        slot.quarantine("a broken page")
        slot.quarantine("and another")
        found["quarantined"] = [
            await refusal(SlotQuarantined, operation)
            for operation in (
                slot.step("pass"),
                slot.execute("true"),
                slot.reset(),
                slot.fork(1),
                slot.save("drums-test-never"),
            )
        ]
        found["quarantined verify"] = await slot.verify(strict=False)
        found["strict"] = await refusal(InvalidEpisode, slot.verify())
        found["wait_valid"] = await refusal(InvalidEpisode, slot.wait_valid())
        found["screenshot"] = await slot.screenshot()
        await slot.release()
        found["state after release"] = (slot.state, slot.reason)
        found["down"] = [
            await refusal(InvalidTransition, operation)
            for operation in (slot.step("pass"), slot.fork(1), slot.screenshot(), slot.release(), slot.verify())
        ]
        with pytest.raises(InvalidTransition):
            slot.quarantine("too late")
        await slot.reset()
        found["valid again"] = await valid(slot)
        await slot.close()
        await slot.close()
        found["closed"] = [
            await refusal(SlotNotFound, operation)
            for operation in (slot.step("pass"), slot.reset(), slot.verify(), slot.release(), slot.screenshot())
        ]
        with pytest.raises(SlotNotFound) as caught:
            host.slot(slot.id)
        found["closed"].append(caught.value)
        with trio.move_on_after(0.2):
            async for event in events:
                if event.kind == "slot_state" and event.slot == slot.id:
                    seen.append(event.data["state"])
    return found | {"seen": seen}


async def busy(host: Host) -> dict[str, Any]:
    async with await host.create() as slot, trio.open_nursery() as nursery:
        began = trio.current_time()
        nursery.start_soon(run, slot, "sleep 2")
        await trio.sleep(0.3)
        refused = [
            await refusal(SlotBusy, operation)
            for operation in (slot.step("pass"), slot.execute("true"), slot.reset(), slot.fork(1), slot.save("x"))
        ]
        refused_after = trio.current_time() - began
        picture = await slot.screenshot()
        await slot.close()
        return {"refused": refused, "after": refused_after, "picture": picture, "closed": trio.current_time() - began}


async def quarantined_while_busy(host: Host) -> dict[str, Any]:
    async with await host.create() as slot, trio.open_nursery() as nursery:
        nursery.start_soon(run, slot, "sleep 1")
        await trio.sleep(0.3)
        slot.quarantine("meanwhile")
        return {"state": slot.state, "outcome": outcome(slot)}


async def quarantined_while_verified(host: Host) -> Any:
    """The verdict is still pending, so verify waits; then the harness gives the episode up."""
    async with await host.create(make_task()) as slot, trio.open_nursery() as nursery:
        rewards = []

        async def verify() -> None:
            rewards.append(await slot.verify(strict=False))

        nursery.start_soon(verify)
        await trio.sleep(1)
        slot.quarantine("the page broke")
        with trio.fail_after(30):
            while not rewards:  # noqa: ASYNC110 - as a client polls
                await trio.sleep(0.05)
        return rewards[0]


async def families(host: Host) -> dict[str, Any]:
    async with await host.create(make_task()) as parent:
        await run(parent, "echo parent > ~/file; mkdir ~/shared; echo deep > ~/shared/file; rm ~/.profile")
        await start_daemon(parent, "counter", COUNTER)
        children = await parent.fork(2)
        for slot, word in zip([parent, *children], ("p", "a", "b"), strict=True):
            await run(slot, f"echo {word} >> ~/file; echo {word} > ~/only-{word}; echo {word} > ~/shared/file")
        await children[0].step(MAKE)
        (grandchild,) = await children[0].fork(1)
        (fourth,) = await grandchild.fork(1)
        look = "cat ~/file ~/shared/file; ls -d ~/only-* ~/.profile 2>/dev/null; cat /tmp/counter.pid"
        family = [parent, *children, grandchild, fourth]
        found: dict[str, Any] = {"looks": [(await run(x, look)).split() for x in family]}
        before = [int(await run(x, "cat /tmp/counter")) for x in family]
        found["episodes"] = {x.episode.id for x in family}
        found["origins"] = [x.episode.origin for x in family]
        found["rewards"] = [await x.verify() for x in family]
        found["counted"] = [int(await run(x, "cat /tmp/counter")) > y for x, y in zip(family, before, strict=True)]
        await fourth.reset()
        found["reset"] = (await fourth.verify(), await run(fourth, "ls -d ~/only-* ~/.profile 2>/dev/null || true"))
        found["base"] = {x.base.id for x in family}
        for slot in family[1:]:
            await slot.close()
        found["forks left"] = [m.id for m in host.services.store.names() if m.kind == "fork" and _is_ours(m, family)]
        return found


def _is_ours(manifest: Any, family: list[Slot]) -> bool:
    return any(x.desktop and x.desktop.checkpoint and x.desktop.checkpoint.id == manifest.id for x in family)


async def inherited_crash(host: Host) -> dict[str, Outcome]:
    """The agent leaves a process behind that crashes later; in the copies, nobody has acted yet."""
    async with await host.create() as slot:
        await start_daemon(slot, "bomb", BOMB)
        (child,) = await slot.fork(1)
        async with saved(slot) as name, await host.create(checkpoint=name) as heir:
            waiting = {"fork": child, "saved": heir}
            found = {what: await judged(x, until=["no_app_crash"]) for what, x in waiting.items()}
            await child.close()
            return found


async def kept(host: Host) -> dict[str, Any]:
    task = make_task(execute("echo setup >> ~/log"))
    async with await host.create(task) as slot:
        await run(slot, "echo agent >> ~/log; mkdir ~/done")
        async with saved(slot) as name:
            found: dict[str, Any] = {"taken": await refusal(CheckpointError, slot.save(name))}
            found["bad names"] = [
                await refusal(CheckpointError, slot.save(bad)) for bad in ("", "../x", "a/b", ".a", "a b", "x" * 65)
            ]
            found["state"] = slot.state
            async with await host.create(checkpoint=name) as heir, await host.create(task, checkpoint=name) as anew:
                found["tasks"] = [heir.task, anew.task]
                found["logs"] = [await run(x, "cat ~/log") for x in (heir, anew)]
                reward = await heir.verify()
                found["reward"] = (reward.score, reward.valid)
                await heir.reset()
                found["reset"] = [await run(heir, "cat ~/log"), heir.episode.origin]
                assert await valid(heir)
                found["listed"] = [(m.name, m.kind) for m in host.checkpoints()]
            found["both"] = await refusal(ConfigError, host.create(image="minimal", checkpoint=name))
        found["deleted"] = [
            await refusal(CheckpointError, host.create(checkpoint=name)),
            await refusal(CheckpointError, host.delete_checkpoint(name)),
        ]
        return found | {"name": name}


async def refused_creates(host: Host) -> dict[str, Any]:
    slots = set(host.slots)
    task = make_task()
    odd = attrs.evolve(task, evaluator={"func": "drums_verifier", "verifier": "nobody_has_this", "function": "f"})
    found = [
        await refusal(TaskNotFound, host.create("ffffffff-none")),
        await refusal(TaskUnsupported, host.create(attrs.evolve(task, supported=False, unsupported_reason="root"))),
        await refusal(ImageUnsuitable, host.create(attrs.evolve(task, applications=("gimp", "xterm")))),
        await refusal(ImageUnsuitable, host.create(attrs.evolve(task, needs_web=True))),
        await refusal(VerifierNotFound, host.create(odd)),
        await refusal(ConfigError, host.create(make_task(SetupStep("no_such_step")))),
        await refusal(ConfigError, host.create(make_task(SetupStep("execute", {"command": 7})))),
        await refusal(ImageNotFound, host.create(image="nothing")),
        await refusal(CheckpointError, host.create(checkpoint="nothing")),
        await refusal(ConfigError, host.create(ttl_s=0)),
        await refusal(ConfigError, host.create(ttl_s=float("nan"))),
    ]
    return {"errors": found, "new": set(host.slots) - slots}


async def no_task(host: Host) -> dict[str, Any]:
    async with await host.create() as slot:
        return {
            "verify": await refusal(InvalidTransition, slot.verify()),
            "described": slot.describe(),
            "nothing": await refusal_of_value(slot.fork(0)),
        }


async def refusal_of_value(awaitable: Any) -> ValueError:
    with pytest.raises(ValueError) as caught:
        await awaitable
    return caught.value


async def crowded(host: Host) -> dict[str, Any]:
    """On a host of its own with two slots."""
    started: list[str] = []
    async with host.events() as events:
        first, second = await host.create(), await host.create()
        found: dict[str, Any] = {
            "create": await refusal(CapacityExhausted, host.create()),
            "fork": await refusal(CapacityExhausted, first.fork(1)),
            "state": first.state,
        }
        await second.close()
        found["too many"] = await refusal(CapacityExhausted, first.fork(2))
        (child,) = await first.fork(1)
        found["slots"] = len(host.slots)
        found["valid"] = [await valid(first), await valid(child)]
        found["unlimited"] = await refusal(ConfigError, host.create(ttl_s=None))
        await child.close()
        await first.close()
        with trio.move_on_after(0.2):
            async for event in events:
                if event.kind == "episode_started":
                    started.append(event.slot)
    return found | {"started": started, "allowed": {first.id, second.id, child.id}}


async def leased(host: Host) -> dict[str, Any]:
    slot = await host.create(ttl_s=2.0)
    left = slot.expires_in_s()
    with trio.fail_after(10):
        while slot.state is not SlotState.CLOSED:  # noqa: ASYNC110 - as a client polls
            await trio.sleep(0.1)
    return {"left": left, "reason": slot.reason, "error": await refusal(SlotNotFound, slot.step("pass"))}


def init_killed(when: str) -> Scenario:
    async def scenario(host: Host) -> dict[str, Any]:
        async with await host.create(make_task()) as slot:
            if when == "after":
                await valid(slot)
            assert slot.desktop is not None
            os.kill(slot.desktop.pid1, signal.SIGKILL)
            with trio.fail_after(5):
                while slot.state is SlotState.UP:  # noqa: ASYNC110 - as a client polls
                    await trio.sleep(0.02)
            found = {"state": slot.state, "reason": slot.reason, "outcome": outcome(slot)}
            found["step"] = await refusal(InvalidTransition, slot.step("pass"))
            await slot.reset()
            return found | {"again": await valid(slot)}

    return scenario


def status_of(pid: int) -> Mapping[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(x.split(":\t", 1) for x in text.splitlines() if ":\t" in x)


async def powerless(host: Host) -> dict[str, Any]:
    async with await host.create() as slot:
        desktop = slot.desktop
        assert desktop is not None and desktop.guest is not None
        found: dict[str, Any] = json.loads(await run(slot, f"python3 - <<'E'\n{AGENT}\nE"))
        statuses = [status_of(pid) for pid in desktop.cgroup.pids()]
        secrets = await run(
            slot, f"grep -rl {desktop.guest.secret} /run /tmp /home /proc/*/environ 2>/dev/null || true"
        )
        return {"agent": found, "statuses": statuses, "secrets": secrets, "outcome": await judged(slot)}


async def provisioned(host: Host) -> dict[str, Any]:
    intruder = f"cat > /tmp/i.py <<'E'\n{INTRUDER}\nE\nsetsid python3 /tmp/i.py </dev/null >/tmp/i.log 2>&1 & sleep 0.3"
    task = make_task(
        execute(intruder),
        execute(
            "cd ~/Desktop && echo {CLIENT_PASSWORD} | sudo -S mkdir ~/Desktop/roots && "
            "sudo sh -c 'echo $(id -u) $HOME $PWD > roots/who; touch /root-was-here; sleep 1' && "
            "(id -u; command -v sudo) > ~/user-part"
        ),
    )
    async with await host.create(task) as slot:
        look = "stat -c '%U %a' ~/Desktop/roots ~/Desktop/roots/who ~/Desktop; cat ~/Desktop/roots/who ~/user-part"
        found: dict[str, Any] = {"look": (await run(slot, look)).splitlines()}
        found["sudo now"] = await slot.execute("command -v sudo; sudo id; ls -d /run/drums-step-*", shell=True)
        found["intruder"] = await run(slot, "cat /tmp/i.log")
        found["roots file"] = await run(slot, "stat -c %U /root-was-here; ls -d /intruder-was-here 2>&1 || true")
        found["outcome"] = await judged(slot)
        (child,) = await slot.fork(1)  # what provisioning leaves behind can be dumped
        found["child"] = await judged(child)
        await child.close()
        return found


async def watched(host: Host) -> list[Any]:
    seen = []
    async with host.events() as events, await host.create(make_task()) as slot:
        await slot.verify()
        await slot.execute("python3 -c 'import os; os.abort()'", shell=True)
        slot.quarantine("enough")
        with trio.move_on_after(1.0):
            async for event in events:
                if event.slot == slot.id:
                    seen.append(event)
                    if event.kind == "slot_state" and event.data["state"] == "quarantined":
                        break
    return seen


COUNTER = """
import os, time
open("/tmp/counter.pid", "w").write(str(os.getpid()))
n = 0
while True:
    n += 1
    open("/tmp/counter.new", "w").write(str(n))
    os.rename("/tmp/counter.new", "/tmp/counter")
    open("/tmp/counter.ready", "w").close()
    time.sleep(0.05)
"""
BOMB = """
import os, time
since = time.monotonic()
open("/tmp/bomb.ready", "w").close()
while time.monotonic() - since < 8:
    time.sleep(0.05)
if os.fork() == 0:
    os.abort()
time.sleep(3600)
"""
AGENT = r"""
import ctypes, json, os, signal, socket, struct, urllib.error, urllib.request
libc = ctypes.CDLL(None, use_errno=True)
def errno_of(work):
    try:
        result = work()
    except OSError as e:
        return e.errno
    return 0 if result is None or result >= 0 else ctypes.get_errno()
def call(number, *args):
    return lambda: libc.syscall(number, *args)
guests = []
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            if b"/opt/drums/guest/server.py" in open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0"):
                guests.append(int(pid))
        except OSError:
            pass
out = {"guests": len(guests)}
for name, pid in [("init", 1)] + [(f"guest{n}", p) for n, p in enumerate(guests)]:
    out[f"kill {name}"] = errno_of(lambda: os.kill(pid, signal.SIGKILL))
    out[f"stop {name}"] = errno_of(lambda: os.kill(pid, signal.SIGSTOP))
    out[f"trace {name}"] = errno_of(lambda: libc.ptrace(16, pid, 0, 0))
    out[f"read memory of {name}"] = errno_of(lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    out[f"read environment of {name}"] = errno_of(lambda: len(open(f"/proc/{pid}/environ", "rb").read()))
    out[f"pidfd_getfd {name}"] = errno_of(lambda: libc.syscall(438, os.pidfd_open(pid), 0, 0))
out["read secret"] = errno_of(lambda: os.open("/run/drums-guest/secret", os.O_RDONLY))
out["list secrets"] = errno_of(lambda: len(os.listdir("/run/drums-guest")))
out["setuid"] = errno_of(lambda: os.setuid(0))
out["userns by unshare"] = errno_of(lambda: libc.unshare(0x10000000))
out["mntns by unshare"] = errno_of(lambda: libc.unshare(0x20000))
out["userns by clone"] = errno_of(call(56, 0x10000000 | 17, 0, 0, 0, 0))
out["userns by clone3"] = errno_of(call(435, 0, 0))
out["io_uring"] = errno_of(call(425, 8, ctypes.create_string_buffer(120)))
out["vsock"] = errno_of(lambda: socket.socket(40, socket.SOCK_STREAM).close())
out["bpf"] = errno_of(call(321, 0, 0, 0))
out["mount"] = errno_of(lambda: libc.mount(b"x", b"/mnt", b"tmpfs", 0, None))
out["chroot"] = errno_of(lambda: os.chroot("/tmp"))
out["core_pattern"] = errno_of(lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
out["raw socket"] = errno_of(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
out["write guest"] = errno_of(lambda: os.open("/opt/drums/guest/server.py", os.O_WRONLY))
out["int80"] = os.path.exists("/proc/kcore") and errno_of(lambda: os.open("/proc/kcore", os.O_RDONLY))
for route in ("/health", "/screenshot", "/run_python"):
    request = urllib.request.Request("http://127.0.0.1:5000" + route, method="POST" if "run" in route else "GET")
    try:
        out["http " + route] = urllib.request.urlopen(request, timeout=5).status
    except urllib.error.HTTPError as e:
        out["http " + route] = e.code
out["status"] = dict(x.split(":\t", 1) for x in open("/proc/self/status").read().splitlines() if ":\t" in x)
out["suid"] = os.popen("find / -xdev -perm /6000 -type f 2>/dev/null").read().split()
print(json.dumps(out))
"""
# A process of the user's that is no descendant of the step, and asks the step's sudo for root.
INTRUDER = r"""
import array, glob, json, os, socket, struct, time
for _ in range(2000):
    for path in glob.glob("/run/drums-step-*/socket"):
        try:
            s = socket.socket(socket.AF_UNIX)
            s.connect(path)
            body = json.dumps({"argv": ["touch", "/intruder-was-here"], "cwd": "/", "env": dict(os.environ)}).encode()
            fds = array.array("i", [0, 1, 2])
            s.sendmsg([struct.pack("I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            s.sendall(body)
            print("answer", s.recv(4), flush=True)
        except OSError as e:
            print("refused", e, flush=True)
        raise SystemExit
    time.sleep(0.005)
print("found no socket", flush=True)
"""


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    scenarios: dict[str, Scenario] = {
        "families": families,
        "scored": scored,
        "states": states,
        "kept": kept,
        "busy": busy,
        "quarantined while busy": quarantined_while_busy,
        "quarantined while verified": quarantined_while_verified,
        "inherited crash": inherited_crash,
        "refused": refused_creates,
        "no task": no_task,
        "leased": leased,
        "init killed early": init_killed("early"),
        "init killed later": init_killed("after"),
        "powerless": powerless,
        "provisioned": provisioned,
        "watched": watched,
    }
    small = {"max_slots": 2, "allow_unlimited_ttl": False}
    yield play_on_hosts([(scenarios, {}), ({"crowded": crowded}, small)])


def test_a_task_is_scored(played: Played) -> None:
    found = played["scored"]
    assert found["early"].value == "pending"
    assert found["scores"] == [0.0, 1.0, 0.0] and found["valid"] == [True] * 3
    assert len(found["episodes"]) == 2 and found["origin"] == "reset"
    assert found["png"].startswith(b"\x89PNG") and struct.unpack(">II", found["png"][16:24]) == (1920, 1080)
    good, bad, special = found["replies"]
    assert good["returncode"] == 0 and special["status"] == "success"
    assert bad["returncode"] != 0 and "of the agent" in bad["error"]
    assert {"episode", "task", "checker", "image_digest", "criu", "gates"} <= set(found["provenance"])


def test_states_and_what_they_refuse(played: Played) -> None:
    found = played["states"]
    assert "is up; 'release' needs it quarantined" in str(found["up"][0])
    for error in found["quarantined"]:
        assert "is quarantined (and another), so" in str(error) or "a broken page" in str(error)
    reward = found["quarantined verify"]
    assert reward.score is None and not reward.valid and reward.bad_gates == ("not_quarantined",)
    assert reward.checker_skipped.startswith("quarantined: ")
    assert found["strict"].facts["bad_gates"] == ["not_quarantined"]
    assert found["screenshot"].startswith(b"\x89PNG")
    assert found["state after release"] == (SlotState.DOWN, "released from quarantine")
    for error in found["down"]:
        assert "is down" in str(error)
    assert found["valid again"]
    for error in found["closed"]:
        assert isinstance(error, LookupError)


def test_the_states_in_their_order(played: Played) -> None:
    assert played["states"]["seen"] == ["starting", "up", "quarantined", "down", "down", "starting", "up", "closed"]


def test_one_operation_at_a_time(played: Played) -> None:
    found = played["busy"]
    assert all("busy with 'execute'" in str(error) for error in found["refused"])
    assert found["after"] < 1.5 and found["picture"].startswith(b"\x89PNG")
    assert 1.9 < found["closed"] < 5


def test_a_quarantine_waits_for_nothing(played: Played) -> None:
    found = played["quarantined while busy"]
    assert found["state"] is SlotState.QUARANTINED
    assert found["outcome"].bad_gates == {"not_quarantined"}


def test_a_quarantine_stops_a_verify_that_waits(played: Played) -> None:
    reward = played["quarantined while verified"]
    assert (reward.score, reward.checker_skipped) == (None, "quarantined: the page broke"), reward


@pytest.mark.parametrize("what", ["fork", "saved"])
def test_a_crash_that_an_agent_prepared_before_the_copy_is_still_the_agents(played: Played, what: str) -> None:
    found = played["inherited crash"][what]
    assert found.bad_gates == {"no_app_crash"} and found.causes == ["agent"], found.lines["no_app_crash"]


def test_forks_are_independent(played: Played) -> None:
    parent, a, b, grandchild, fourth = played["families"]["looks"]
    pid = parent[-1]
    assert parent == ["parent", "p", "p", "/home/user/only-p", pid]
    assert a == ["parent", "a", "a", "/home/user/only-a", pid]
    assert b == ["parent", "b", "b", "/home/user/only-b", pid]
    assert grandchild == fourth == a
    assert all(played["families"]["counted"]), "a process of the agent's runs on in each"


def test_forks_are_judged_and_scored_on_their_own(played: Played) -> None:
    found = played["families"]
    assert [x.score for x in found["rewards"]] == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert all(x.valid for x in found["rewards"])
    assert len(found["episodes"]) == 5
    assert found["origins"] == ["create", "fork", "fork", "fork", "fork"]


def test_a_reset_of_a_fork_goes_back_to_the_root_creates_checkpoint(played: Played) -> None:
    reward, files = played["families"]["reset"]
    assert (reward.score, reward.valid) == (0.0, True)
    assert files.split() == ["/home/user/.profile"]
    assert len(played["families"]["base"]) == 1
    assert played["families"]["forks left"] == []


def test_a_saved_desktop(played: Played) -> None:
    found = played["kept"]
    heir, anew = found["tasks"]
    assert heir == anew
    assert found["logs"] == ["setup\nagent\n", "setup\nagent\nsetup\n"], "set-up is inherited, unless a task is given"
    assert found["reward"] == (1.0, True)
    assert found["reset"] == ["setup\nagent\n", "reset"]
    assert (found["name"], "saved") in found["listed"]


def test_names_of_checkpoints(played: Played) -> None:
    found = played["kept"]
    assert "already there" in str(found["taken"])
    assert len(found["bad names"]) == 6 and all("is no name" in str(error) for error in found["bad names"])
    assert found["state"] is SlotState.UP
    assert all(found["name"] in str(error) for error in found["deleted"])


def test_creates_that_are_refused_start_nothing(played: Played) -> None:
    assert played["refused"]["new"] <= set(), played["refused"]["new"]
    assert all(str(error) for error in played["refused"]["errors"])
    unsuitable = [error for error in played["refused"]["errors"] if isinstance(error, ImageUnsuitable)]
    assert 'network="none"' in unsuitable[1].hint and "yet" in unsuitable[1].hint
    assert [error.facts["missing"] for error in unsuitable] == [["gimp"], ["network"]]
    assert unsuitable[0].facts["suitable"] == ["osworld"]


def test_a_desktop_without_task(played: Played) -> None:
    found = played["no task"]
    assert "has no task" in str(found["verify"]) and "at least 1" in str(found["nothing"])
    assert found["described"]["state"] == "up" and found["described"]["task"] is None
    assert json.dumps(found["described"])


def test_capacity(played: Played) -> None:
    found = played["crowded"]
    assert found["create"].facts["allowed"] == 2 and found["create"].facts["free"] == 0
    assert found["too many"].facts == {"wanted": 2, "free": 1, "allowed": 2}
    assert found["state"] is SlotState.UP and found["slots"] == 2 and found["valid"] == [True, True]
    assert set(found["started"]) == found["allowed"] and len(found["started"]) == 3


def test_a_lease_ends(played: Played) -> None:
    found = played["leased"]
    assert 0 < found["left"] <= 2 and found["reason"] == "its time to live ended"


@pytest.mark.parametrize("when", ["early", "later"])
def test_the_end_of_init(played: Played, when: str) -> None:
    found = played[f"init killed {when}"]
    assert found["state"] is SlotState.FAILED and "init ended" in found["reason"]
    result: Outcome = found["outcome"]
    assert result.verdict == "invalid" and "not_quarantined" in result.bad_gates
    assert any("init ended" in reason for reason in result.reasons)
    assert "is failed" in str(found["step"]) and found["again"]


def test_the_agent_cannot_touch_init_and_guest_server(played: Played) -> None:
    agent = played["powerless"]["agent"]
    assert agent["guests"] == 2
    for name, number in agent.items():
        if any(name.startswith(x) for x in ("kill", "stop", "trace", "read", "list", "pidfd", "write")):
            assert number in (1, 13), (name, number)  # EPERM, EACCES
    assert all(agent[f"http {route}"] in (401, 403) for route in ("/health", "/screenshot", "/run_python")), agent
    assert played["powerless"]["secrets"] == ""
    assert played["powerless"]["outcome"].verdict == "valid"


def test_the_agent_has_no_rights(played: Played) -> None:
    agent = played["powerless"]["agent"]
    for what in ("setuid", "userns by unshare", "mntns by unshare", "userns by clone", "bpf", "mount", "chroot"):
        assert agent[what] == 1, what
    assert agent["userns by clone3"] == agent["io_uring"] == 38  # ENOSYS
    assert agent["vsock"] == 97 and agent["raw socket"] == 1 and agent["core_pattern"] in (13, 30)
    assert agent["int80"] in (False, 1, 13)


def test_no_process_of_the_users_has_a_capability(played: Played) -> None:
    found = played["powerless"]
    users = [x for x in found["statuses"] if x["Uid"].split()[0] == "1001000"]
    assert len(users) >= 5
    for status in [*users, found["agent"]["status"]]:
        for what in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(status[what], 16) == 0, status
        assert status["NoNewPrivs"] == "1"
    assert all(x["Seccomp"] == "2" for x in found["statuses"]), "root's processes as well"


def test_provisioning_gives_root_to_the_operand_alone(played: Played) -> None:
    found = played["provisioned"]
    assert found["look"][:3] == ["root 755", "root 644", "user 755"]
    assert found["look"][3] == "0 /home/user /home/user/Desktop", "HOME and the working folder are kept"
    assert found["look"][4] == "1000" and found["look"][5].startswith("/run/drums-step-")
    assert found["roots file"].splitlines()[0] == "root"


def test_sudo_is_gone_after_the_step(played: Played) -> None:
    result = played["provisioned"]["sudo now"]
    assert result.returncode != 0 and result.output == "" and "not found" in result.error


def test_only_descendants_of_the_step_get_root(played: Played) -> None:
    found = played["provisioned"]
    assert found["intruder"].startswith(("answer b''", "refused [Errno 104]", "refused [Errno 32]")), found["intruder"]
    assert "No such file" in found["roots file"].splitlines()[1]
    assert found["outcome"].verdict == "valid" and found["child"].verdict == "valid", found["child"].reasons


def test_events(played: Played) -> None:
    seen = played["watched"]
    kinds = [x.kind for x in seen]
    assert kinds.index("episode_started") < kinds.index("verdict") < kinds.index("reward")
    verdicts = [x.data["verdict"] for x in seen if x.kind == "verdict"]
    assert verdicts[0] == "valid" and set(verdicts[1:]) == {"invalid"}
    assert [x.data["event"] for x in seen if x.kind == "desktop_event"][-1] == "Quarantined"
    crash = next(x for x in seen if x.kind == "verdict" and x.data["verdict"] == "invalid")
    assert crash.data["bad_gates"] == ["no_app_crash"] and crash.episode == seen[-2].episode


async def test_a_boot_that_fails_half_way_waits_for_its_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper has ended before it is moved out of the desktop's cgroup: the kernel refuses, and it is reaped."""
    helpers: list[trio.Process] = []
    evict = Cgroup.evict

    async def booted(*arguments: Any) -> tuple[trio.Process, int]:
        helper, pid = await boot(*arguments)
        helpers.append(helper)
        return helper, pid

    def evict_late(self: Cgroup, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        evict(self, pid)
        raise ProcessLookupError(3, "planted: the kernel of another version takes a zombie")

    monkeypatch.setattr(desktop, "boot", booted)
    monkeypatch.setattr(Cgroup, "evict", evict_late)
    async with open_host(load_config()) as host:
        booting = desktop.Desktop(host.services, f"d-{uuid.uuid4().hex[:12]}", host.config.limits)
        with pytest.raises(ProcessLookupError):
            await booting.start_booted(host.images.load(host.config.image).layer)
        await booting.stop()
    assert helpers[0]._proc.returncode == -signal.SIGKILL  # unasked: a question would reap it
    assert not booting.folder.exists()


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
