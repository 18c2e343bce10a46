"""`drums demo`: the main job end to end, on real desktops, with what it proves on one screen."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import attrs
import click
import trio

from drums_core.commands.output import print_json, print_table, progress_bar
from drums_core.config import load_config
from drums_core.error_groups import first_error
from drums_core.host import Host
from drums_core.logs import configure_logging
from drums_core.model import Reward
from drums_core.opening import open_host
from drums_core.slot import Slot
from drums_core.slot_state import SlotState
from drums_core.testing.faults import FaultInjector, fault

OSWORLD_TASK = "e0df059f"
"""OSWorld: rename the folder todo_list_Jan_1, which root made on the user's desktop, to todo_list_Jan_2."""

OWN_TASK = "2e208cb7"
"""The same kind of task, shipped with drums: see `drums_osworld/tasks`."""

SCENES = (
    "untouched",
    "task done",
    "fork child 1",
    "fork child 2, undone",
    "reset",
    "planted fault: a file changed while held",
    "quarantined",
    "released and reset",
)
"""The episodes in the order in which they are shown; they run side by side."""

T = TypeVar("T")


@attrs.frozen
class Row:
    """One judged episode of the demo."""

    what: str
    origin: str
    reward: Reward
    expected: tuple[bool, float | None]  # valid, score

    @property
    def as_expected(self) -> bool:
        """Whether it came out as the demo says it must."""
        return (self.reward.valid, self.reward.score) == self.expected


@attrs.define
class Demo:
    """Runs the scenes and collects rows and timings (milliseconds)."""

    host: Host
    faults: FaultInjector
    progress: Callable[[str, float], None]
    rows: list[Row] = attrs.field(factory=list)
    timings_ms: dict[str, float] = attrs.field(factory=dict)
    report: list[dict[str, object]] = attrs.field(factory=list)

    async def timed(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run and time; the first of each name counts, since later ones may wait for something else."""
        began = time.perf_counter()
        result = await work()
        self.timings_ms.setdefault(name, round((time.perf_counter() - began) * 1e3, 1))
        return result

    async def judge(self, what: str, slot: Slot, expected: tuple[bool, float | None]) -> None:
        """Verify an episode once it is judged; the waiting for its verdict is no part of the time."""
        await slot.episode.wait_judged()
        name = "verify" if slot.state is SlotState.UP else "verify_skipped"
        reward = await self.timed(name, lambda: slot.verify(strict=False))
        self.rows.append(Row(what, slot.episode.origin, reward, expected))
        self.progress(what, len(self.rows) / len(SCENES))

    async def run(self, task: str, picture: Path) -> None:
        """All scenes. Episodes that do not depend on each other run side by side: each settles for 5 s."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._main, task, picture)
            nursery.start_soon(self._broken, task)
            nursery.start_soon(self._quarantined, task)
        self.rows.sort(key=lambda row: SCENES.index(row.what))
        self.timings_ms.pop("verify_skipped", None)

    async def _main(self, task: str, picture: Path) -> None:
        async with await self.timed("create", lambda: self.host.create(task, purpose="demo")) as slot:
            await self.judge("untouched", slot, (True, 0.0))
            await self.timed("step", lambda: slot.step(action_for(slot)))
            await show_folder(slot)
            shot = await self.timed("screenshot", slot.screenshot)
            await trio.to_thread.run_sync(picture.write_bytes, shot)
            await self.judge("task done", slot, (True, 1.0))
            children = await self.timed("fork", lambda: slot.fork(2))
            try:
                await children[1].wait_valid()
                await children[1].step(undo_for(slot))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.judge, "fork child 1", children[0], (True, 1.0))
                    nursery.start_soon(self.judge, "fork child 2, undone", children[1], (True, 0.0))
            finally:
                for child in children:
                    await child.close()
            await self.timed("reset", slot.reset)
            self.report = [dict(line) for line in slot.gates()["gates"]["gates"]]
            await self.judge("reset", slot, (True, 0.0))
            self.report = [dict(line) for line in slot.gates()["gates"]["gates"]]

    async def _broken(self, task: str) -> None:
        async with await self.host.create(task, purpose="demo") as slot:
            await slot.wait_valid()
            # A process of the host appends a byte to a file of the home while the desktop is held.
            self.faults.arm(fault("state_hash"), slot=slot.id)
            await slot.reset()
            await self.judge("planted fault: a file changed while held", slot, (False, 0.0))

    async def _quarantined(self, task: str) -> None:
        async with await self.host.create(task, purpose="demo") as slot:
            slot.quarantine("the demo's harness saw a broken page")
            await self.judge("quarantined", slot, (False, None))
            await slot.release()
            await slot.reset()
            await self.judge("released and reset", slot, (True, 0.0))


def _folders(slot: Slot) -> tuple[str, str]:
    """The folder that the task's set-up makes, and the one that its checker looks for."""
    assert slot.task is not None
    if slot.task.id.startswith(OSWORLD_TASK):
        return "todo_list_Jan_1", "todo_list_Jan_2"
    return "minutes_draft", "minutes_final"


async def show_folder(slot: Slot) -> None:
    """Open the desktop's folder and a terminal, for the picture, and wait until their windows are there."""
    listing = "xterm -geometry 80x12+700+640 -e bash -c 'ls -l ~/Desktop; exec bash'"
    await slot.execute(f"setsid -f pcmanfm ~/Desktop; setsid -f {listing}", shell=True)
    with trio.move_on_after(10):
        while len((await slot.execute(["wmctrl", "-l"])).output.splitlines()) < 2:  # noqa: ASYNC110 - X tells nobody here
            await trio.sleep(0.1)
        await trio.sleep(1.0)  # a window is there before it is drawn


def action_for(slot: Slot) -> str:
    """The one action that does the task: renaming the folder."""
    return _rename(*_folders(slot))


def undo_for(slot: Slot) -> str:
    """The action that undoes it."""
    return _rename(*reversed(_folders(slot)))


def _rename(old: str, new: str) -> str:
    return f"import os; d = os.path.expanduser('~/Desktop/'); os.rename(d + {old!r}, d + {new!r})"


async def _demo(picture: Path, progress: Callable[[str, float], None]) -> Demo:
    config = load_config()
    faults = FaultInjector()
    async with open_host(config, interposer=faults) as host:
        demo = Demo(host, faults, progress)
        await host.golden(config.image)
        await demo.run(OSWORLD_TASK if config.osworld else OWN_TASK, picture)
        return demo


def _print(demo: Demo, picture: Path, seconds: float) -> None:
    rows = [
        [
            row.what,
            row.origin,
            row.reward.verdict.value,
            "-" if row.reward.score is None else f"{row.reward.score:.1f}",
            ", ".join(row.reward.bad_gates) or "all passed",
        ]
        for row in demo.rows
    ]
    print_table("episodes", ["episode", "origin", "verdict", "score", "failed gates"], rows)
    gates = [
        [str(line["gate"]), str(line["status"]), str(line["phase"]), f"{float(str(line['duration_ms'])):.1f}"]
        for line in demo.report
    ]
    print_table("gates of the reset", ["gate", "status", "phase", "ms"], gates)
    print_table("times", ["operation", "ms"], [[name, f"{ms:.0f}"] for name, ms in demo.timings_ms.items()])
    for row in demo.rows:
        for reason in row.reward.invalid_reasons:
            click.echo(f"{row.what}: {reason}")
    click.echo(f"screenshot: {picture}")
    click.echo(f"{len(demo.rows)} episodes in {seconds:.0f} s")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: episodes and timings_ms.")
@click.option(
    "--screenshot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the PNG; in the state folder otherwise.",
)
def demo(as_json: bool, screenshot: Path | None) -> None:
    """Run the main job on real desktops: restore, judge, act, score, fork, reset, quarantine.

    Takes OSWorld's task e0df059f where DRUMS_OSWORLD names a checkout, else one of drums' own. Exit code 1 when an
    episode does not come out as it must.

    \b
    sudo drums demo
    sudo DRUMS_OSWORLD=/path/to/OSWorld drums demo --json
    """
    configure_logging()
    picture = screenshot or load_config().state_dir / "demo.png"
    began = time.monotonic()
    try:
        with progress_bar("demo") as progress:
            done = trio.run(_demo, picture, progress)
    except BaseExceptionGroup as group:
        # One scene's error ends the others; it alone is worth telling.
        raise first_error(group) from group
    wrong = [row for row in done.rows if not row.as_expected]
    if as_json:
        episodes = [
            {
                "what": row.what,
                "origin": row.origin,
                "verdict": row.reward.verdict.value,
                "score": row.reward.score,
                "bad_gates": list(row.reward.bad_gates),
                "invalid_reasons": list(row.reward.invalid_reasons),
                "checker_error": row.reward.checker_error,
                "checker_error_cause": row.reward.checker_error_cause,
                "checker_skipped": row.reward.checker_skipped,
                "as_expected": row.as_expected,
            }
            for row in done.rows
        ]
        print_json({"episodes": episodes, "timings_ms": done.timings_ms, "screenshot": str(picture)})
    else:
        _print(done, picture, time.monotonic() - began)
    for row in wrong:
        click.echo(f"not as expected: {row.what}: {row.reward.checker_error or row.reward}", err=True)
    if wrong:
        raise SystemExit(1)
