"""Root steps where an agent has been: its processes stand still while a step has `sudo`, and go on afterwards."""

from __future__ import annotations

import attrs
import trio
from desktops import make_task, play, run, start_daemon
from requires import requires

from drums_core.host import Host

pytestmark = requires("root", "criu")

COUNTER = """
import time
n = 0
open("/tmp/counter.ready", "w").close()
while True:
    n += 1
    open("/tmp/count", "w").write(str(n))
    time.sleep(0.005)
"""
STEP = "sudo id -u; until [ -s /tmp/count ]; do :; done; cat /tmp/count; echo; sleep 0.5; cat /tmp/count"


async def step_beside_an_agent(host: Host) -> dict[str, object]:
    task = make_task()
    postconfig = [{"type": "execute", "parameters": {"command": STEP, "shell": True, "stdout": "seen"}}]
    task = attrs.evolve(task, evaluator={**task.evaluator, "postconfig": postconfig})
    async with await host.create(task) as slot:
        await start_daemon(slot, "counter", COUNTER)
        await slot.wait_valid()
        reward = await slot.verify(strict=False)
        before = await run(slot, "cat /tmp/count")
        await trio.sleep(0.3)
        after = await run(slot, "cat /tmp/count")
        assert slot.desktop is not None
        asides = [str(p) for p in slot.desktop.cgroup.paths if (p / "aside").exists()]
        return {"reward": reward, "seen": slot.episode.outputs["seen"], "counts": (before, after), "asides": asides}


def test_the_agents_processes_stand_still_while_a_step_has_root() -> None:
    """Uid 1000 could trace the step, which runs as the same user, and reach its sudo."""
    found = play({"beside": step_beside_an_agent})["beside"]
    uid, first, second = found["seen"].split()
    assert uid == "0"
    assert first == second, "the agent's counter went on while the step had sudo"
    before, after = map(int, found["counts"])
    assert after > before, "the agent's counter does not run any more"
    assert found["asides"] == []
    assert found["reward"].valid and found["reward"].score == 0.0
