"""Root steps where an agent has been: there is no `sudo` for them, whatever the agent left would use it."""

from __future__ import annotations

import attrs
from desktops import make_task, outcome, play, run, write
from requires import requires

from drums.errors import SetupFailed
from drums_core.host import Host
from drums_core.model import SetupStep

pytestmark = requires("root", "criu")

PLANT = "import os, subprocess; open('/tmp/uid', 'a').write(str(os.getuid()))"
"""What the user's own Python loads at every start; as root it would have the desktop."""


def sudo_step(command: str) -> SetupStep:
    return SetupStep("execute", {"command": command, "shell": True})


async def root_step_after_an_agent(host: Host) -> dict[str, object]:
    postconfig = [{"type": "execute", "parameters": {"command": "python3 -c 1; sudo python3 -c 1", "shell": True}}]
    task = make_task()
    task = attrs.evolve(task, evaluator={**task.evaluator, "postconfig": postconfig})
    async with await host.create(task) as slot:
        await write(slot, "/home/user/.local/lib/python3.11/site-packages/usercustomize.py", PLANT)
        await slot.wait_valid()
        reward = await slot.verify(strict=False, in_place=True)
        return {"reward": reward, "uids": await run(slot, "cat /tmp/uid"), "notes": list(slot.episode.notes)}


async def root_step_in_a_saved_desktop(host: Host) -> object:
    async with await host.create() as slot:
        await run(slot, "true")
        name = f"acted-{slot.id}"
        await slot.save(name)
    try:
        async with await host.create(make_task(sudo_step("sudo mkdir /root/x")), checkpoint=name) as slot:
            return outcome(slot)
    except SetupFailed as e:
        return e
    finally:
        await host.delete_checkpoint(name)


async def root_step_before_any_agent(host: Host) -> object:
    """The operand keeps HOME, and loads nothing that the caller's environment names."""
    step = sudo_step("PYTHONPATH=/tmp/evil sudo sh -c 'env > /env; echo $HOME >> /env'")
    async with await host.create(make_task(step)) as slot:
        return await run(slot, "cat /env")


def test_no_agent_gets_root_through_a_step() -> None:
    played = play({x.__name__: x for x in (root_step_after_an_agent, root_step_in_a_saved_desktop)})
    found = played["root_step_after_an_agent"]
    assert found["reward"].score is None
    assert "sudo" in found["reward"].checker_error
    assert found["uids"].replace("1000", "") == "", "what the agent planted ran as somebody else than the agent"
    assert "no sudo for a step" in found["notes"][0]
    refused = played["root_step_in_a_saved_desktop"]
    assert isinstance(refused, SetupFailed)
    assert not played.left


def test_what_root_runs_in_a_fresh_desktop_is_not_chosen_by_its_caller() -> None:
    lines = play({"before": root_step_before_any_agent})["before"].splitlines()
    assert lines[-1] == "/home/user"
    assert "PYTHONNOUSERSITE=1" in lines
    assert not [line for line in lines if line.startswith(("PYTHONPATH", "LD_"))]
