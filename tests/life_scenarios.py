"""What desktops go through, side by side on one host, and what their agents try: `test_desktop_life.py` looks at it."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from attacks import AGENT, BOMB, INTRUDER
from desktops import Outcome, Scenario, judged, make_task, outcome, run, start_daemon

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
from drums_core.host import Host
from drums_core.model import SetupStep
from drums_core.slot import Slot
from drums_core.slot_state import SlotState
from drums_core.verdict import SPECIFIED_GATES

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
SCENARIOS: Mapping[str, Scenario] = {
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
