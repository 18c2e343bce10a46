"""Trying a verifier package on real desktops of this machine: each recorded state is made in one, then verified."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from drums.errors import DrumsError
from drums_core.as_user import upload_as_user
from drums_core.host import Host
from drums_core.model import Task
from drums_core.opening import open_host
from drums_core.slot import Slot
from drums_core.testing.conformance import Check
from drums_core.testing.end_state import HOME, EndState, absolute
from drums_verifiers.package_trial import Package

AT_ONCE = 4


def try_live(package: Package) -> list[Check]:
    """Each state's score on a real desktop. Blocks; needs what `open_host` needs.

    A state's home is written into the desktop, then its `live` lines are run. What cannot be made real, a desktop that
    does not answer, is not tried.
    """
    with _installed(package):
        return trio.run(_on_host, package)


@contextmanager
def _installed(package: Package) -> Iterator[None]:
    """Let the package be found as if pip had installed it, until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder, f"{package.name.replace('-', '_')}-{package.version}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n")
        lines = "".join(f"{name} = {value}\n" for name, value in package.verifiers.items())
        (info / "entry_points.txt").write_text(f"[drums_verifier]\n{lines}")
        before = list(sys.path)
        # In front: one that is installed already is not what is to be tried.
        sys.path[:0] = [folder, *(str(x.resolve()) for x in package.paths)]
        try:
            yield
        finally:
            sys.path[:] = before


async def _on_host(package: Package) -> list[Check]:
    states = [state for state in package.states if not state.unanswered]
    found: dict[str, Check] = {}
    limit = trio.CapacityLimiter(AT_ONCE)

    async def one(host: Host, state: EndState) -> None:
        async with limit:
            found[state.name] = await _try(host, package, state)

    async with open_host() as host, trio.open_nursery() as nursery:
        for state in states:
            nursery.start_soon(partial(one, host, state))
    return [found[state.name] for state in states]


async def _try(host: Host, package: Package, state: EndState) -> Check:
    rule = f"{state.function}, {state.name}: it scores {state.expect} on a real desktop"
    faults = []
    for verifier in package.verifiers:  # the first that has the function
        evaluator = {
            "func": "drums_verifier",
            "verifier": verifier,
            "function": state.function,
            "options": dict(state.options),
        }
        task = Task(f"trial-{state.name}", state.instruction, (), evaluator, "trial", "0" * 64)
        try:
            async with await host.create(task, ttl_s=600, purpose="trial") as slot:
                return Check(rule, await _score(slot, state))
        except DrumsError as e:
            faults.append(e.message)
    return Check(rule, "; ".join(faults))


async def _score(slot: Slot, state: EndState) -> str:
    await _make(slot, state)
    reward = await slot.verify(strict=False)
    if not reward.valid:
        return f"the episode is {reward.verdict}: {'; '.join(reward.invalid_reasons)}"
    if state.expect == "error":
        return "" if reward.checker_error else f"scored {reward.score}, an error was to be raised"
    if reward.score != state.expect:
        told = reward.provenance.get("findings", "")
        return f"scored {reward.score}, expected {state.expect}: {reward.checker_error or told}"
    return ""


async def _make(slot: Slot, state: EndState) -> None:
    """Make a state real: its files as the agent's user, then its lines."""
    guest = slot.guest
    for path, entry in sorted(state.files.items()):
        whole = absolute(path)
        if not whole.startswith(f"{HOME}/"):
            continue  # the agent's user writes nowhere else; the image has those, or a `live` line makes them
        if entry.kind == "file":
            await upload_as_user(guest, whole, entry.content)
            await slot.execute(["/bin/chmod", f"{entry.mode:o}", whole])
        elif entry.kind == "folder":
            await slot.execute(["/bin/mkdir", "-p", whole])
        elif entry.kind == "link":
            await slot.execute(["/bin/ln", "-sfn", entry.target, whole])
    for line in state.live:
        done = await slot.execute(line, shell=True)
        if done.returncode != 0:
            raise DrumsError(
                f"the line {line!r} of state {state.name!r} ended with {done.returncode}: {done.error[:500]}"
            )
    if state.last_action is not None:
        await slot.step(state.last_action)
