"""Scoring one task's states three ways, on real desktops: a copy, in place, and by the reference on a sibling."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from drums.errors import DrumsError
from drums.reward import Reward
from drums_core.guest_gateway import serve_guest
from drums_core.host import Host
from drums_core.model import Cause, Task
from drums_core.port_gateway import PortGateway
from drums_core.ports import PortUses
from drums_core.slot import Slot
from drums_core.task_files.obtain import obtain
from drums_osworld.files import lay_out, urls_of
from drums_osworld.parity.states import RIGHT, SCRIPTED, UNTOUCHED, State, states_of
from drums_osworld.symbols import locate
from drums_osworld.worker_job import BROWSER_PORT, VLC_PORT

REFERENCE_TIMEOUT_S = 600.0


@attrs.frozen
class Answer:
    """A score, or how there came to be none."""

    score: float | None
    error: str = ""

    def __str__(self) -> str:
        return self.error if self.score is None else str(self.score)


@attrs.frozen
class Line:
    """One state of one task, as the three scored it. `problem` says why it could not be compared."""

    task: str
    state: str
    copy: Answer | None = None
    in_place: Answer | None = None
    reference: Answer | None = None
    problem: str = ""

    @property
    def difference(self) -> str:
        """What differs, in words; empty when nothing does, or nothing was compared."""
        if self.copy is None or self.in_place is None or self.reference is None:
            return ""
        return "; ".join(
            f"{name} gives {ours}, the reference {self.reference}"
            for name, ours in (("the copy", self.copy), ("in place", self.in_place))
            if not same(ours, self.reference)
        )


Reference = Callable[[Slot, Task, State], Awaitable[Answer]]


def same(ours: Answer, reference: Answer) -> bool:
    """Whether two answers agree: equal scores; or no score, for the exception that the reference names."""
    if ours.score is not None and reference.score is not None:
        return math.isclose(ours.score, reference.score, rel_tol=1e-9, abs_tol=0.0)
    if ours.score is not None or reference.score is not None:
        return False
    return reference.error.partition(":")[0] in ours.error


def answer_of(reward: Reward) -> Answer:
    """Our answer, of a reward whatever its verdict.

    Raises:
        DrumsError: the host could not have it graded, which says nothing of the checker.
    """
    if reward.checker_skipped or reward.checker_error_cause == Cause.INFRASTRUCTURE:
        raise DrumsError(f"it was not graded: {reward.checker_skipped or reward.checker_error}")
    return Answer(reward.score, reward.checker_error or "")


async def ask_reference(slot: Slot, task: Task, state: State) -> Answer:
    """What OSWorld's own `DesktopEnv` says of a desktop; its postconfig changes it.

    Raises:
        DrumsError: it could not say: a package it needs is not installed, or it ended without an answer.
    """
    config = slot.host.config
    failures: list[str] = []
    gateway = PortGateway(partial(PortUses().open, slot.guest.netns_fd), failures, [])
    serve: dict[str, Callable[[int], Awaitable[None]]] = {
        "guest": partial(serve_guest, slot.guest.request, failures=failures),
        "browser": partial(gateway.serve, BROWSER_PORT),
        "vlc": partial(gateway.serve, VLC_PORT),
    }
    listeners = {name: socket.create_server(("127.0.0.1", 0)) for name in serve}
    with tempfile.TemporaryDirectory(prefix="drums-parity-") as folder:
        place = Path(folder)
        laid = await lay_out(config, urls_of([task]), place / "files")
        document = {
            "id": task.id,
            "instruction": task.instruction,
            "config": [{"type": x.type, "parameters": x.parameters} for x in task.config],
            "evaluator": task.evaluator,
        }
        request = {
            "root": str(locate(config.osworld)[0]),
            "ports": {name: x.getsockname()[1] for name, x in listeners.items()},
            "cache": str(place / "cache"),
            "task": document,
            "files": {url: str(place / "files" / x["file"]) for url, x in laid.items() if "file" in x},
            "gave_up": state.gave_up,
        }
        async with trio.open_nursery() as nursery:
            for name, listener in listeners.items():
                nursery.start_soon(serve[name], listener.detach())
            command = [sys.executable, "-m", "drums_osworld.parity.reference"]
            environment = {**os.environ, "HOME": folder}
            with trio.move_on_after(REFERENCE_TIMEOUT_S) as limit:
                done = await trio.run_process(
                    command,
                    stdin=json.dumps(request).encode(),
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                    cwd=folder,
                    env=environment,
                    start_new_session=True,  # Ctrl-C ends it by cancellation, not by a signal of its own
                )
            nursery.cancel_scope.cancel()
    if limit.cancelled_caught:
        raise DrumsError(f"the reference gave no answer within {REFERENCE_TIMEOUT_S:.0f} s")
    if done.returncode:
        raise DrumsError(f"the reference ended with {done.returncode}: {done.stderr.decode(errors='replace')[-400:]}")
    if failures:
        raise DrumsError(f"the reference could not ask the desktop: {failures[0]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "broken" in answer:
        raise DrumsError(f"the reference could not evaluate: {answer['broken'][0]}")
    if "raised" in answer:
        return Answer(None, f"{answer['raised']}: {answer['message']}")
    # What is no number is no score of ours either, and said in these words.
    return Answer(None, f"returned {answer['score']!r}") if answer["score"] is None else Answer(float(answer["score"]))


async def bring_about(slot: Slot, state: State) -> None:
    """Make a state of a desktop whose task is set up.

    Raises:
        DrumsError: its script failed.
    """
    for path, url in state.files.items():
        content = b""
        if url is not None:
            content = await obtain(slot.host.config, url)
        await slot.write_file(path, content)
    if state.script:
        done = await slot.execute(state.script, shell=True)
        if done.returncode:
            raise DrumsError(f"its script ended with {done.returncode}: {(done.error or done.output)[-400:]}")
    if state.gave_up:
        await slot.step("FAIL")


async def compare_state(slot: Slot, task: Task, state: State, reference: Reference = ask_reference) -> Line:
    """Score a fork of a desktop in a state, and a sibling of it by the reference; both are gone afterwards."""
    line = Line(task.id, state.name)
    children: list[Slot] = []
    try:
        children += await slot.fork(1)
        await bring_about(children[0], state)
        children += await children[0].fork(1)
        answers: dict[str, Answer] = {}
        problems: list[DrumsError] = []

        async def ours() -> None:
            # The copy first: grading in place carries the postconfig out on the desktop itself.
            answers["copy"] = answer_of(await children[0].verify(strict=False, in_place=False))
            answers["in_place"] = answer_of(await children[0].verify(strict=False, in_place=True))

        async def theirs() -> None:
            answers["reference"] = await reference(children[1], task, state)

        async def caught(part: Callable[[], Awaitable[None]]) -> None:
            try:
                await part()
            except DrumsError as e:
                problems.append(e)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caught, ours)
            nursery.start_soon(caught, theirs)
        if problems:
            raise problems[0]
        return Line(task.id, state.name, answers["copy"], answers["in_place"], answers["reference"])
    except DrumsError as e:
        return attrs.evolve(line, problem=f"{type(e).__name__}: {e.message}")
    finally:
        with trio.CancelScope(shield=True):
            for child in children:
                await child.close(reason="parity was measured")


async def compare_task(
    host: Host,
    task: Task,
    *,
    others: Sequence[str] = (),
    image: str | None = None,
    reference: Reference = ask_reference,
    on_line: Callable[[Line], None] = lambda _: None,
) -> list[Line]:
    """All states of a task, one after the other.

    Args:
        others: as for `states_of`.
        on_line: told of each state as it is compared.
    """
    lines: list[Line] = []

    def tell(line: Line) -> None:
        lines.append(line)
        on_line(line)

    try:
        slot = await host.create(task, image=image, purpose="selftest")
    except DrumsError as e:
        tell(Line(task.id, "all", problem=f"{type(e).__name__}: {e.message}"))
        return lines
    async with slot:
        for state in states_of(task, others):
            tell(await compare_state(slot, task, state, reference))
    return lines


def _as_meant(line: Line, done_already: bool) -> bool:
    """Whether a script's state has the reference's 1.0 as the right one, and as a wrong one has it not.

    Args:
        done_already: whether the task has it untouched; then it may have it whatever is done.
    """
    assert line.reference is not None
    solved = line.reference.score == 1.0
    return solved if line.state == SCRIPTED + RIGHT else not solved or done_already


def report(lines: Sequence[Line]) -> dict[str, Any]:
    """What was found, as the command prints it as JSON."""
    compared = [x for x in lines if not x.problem]
    already = {x.task for x in compared if x.state == UNTOUCHED and x.reference and x.reference.score == 1.0}
    return {
        "tasks": len({x.task for x in lines}),
        "states": len(lines),
        "compared": len(compared),
        "differences": [{"task": x.task, "state": x.state, "what": x.difference} for x in compared if x.difference],
        "own_expected_fails": [
            {"task": x.task, "reason": f"the reference gives {x.reference} for the task's own expected file"}
            for x in compared
            if x.state == RIGHT and x.reference is not None and x.reference.score != 1.0
        ],
        "done_already": sorted(already),
        "own_solution_fails": [
            {"task": x.task, "state": x.state, "reason": f"the reference gives {x.reference}"}
            for x in compared
            if x.state.startswith(SCRIPTED) and not _as_meant(x, x.task in already)
        ],
        "not_run": [{"task": x.task, "state": x.state, "reason": x.problem} for x in lines if x.problem],
        "lines": [
            {"task": x.task, "state": x.state, "drums": str(x.copy), "reference": str(x.reference)} for x in compared
        ],
    }
