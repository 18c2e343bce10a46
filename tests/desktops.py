"""Real desktops for tests: scenarios that run side by side on open hosts, and what each of them showed.

A judged episode takes 5 s, so a module's scenarios share one `trio.run` (`play`), a few desktops at a time; its tests
then look at the outcomes. After it nothing of the desktops may be left, which `play` looks for itself.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from drums_core import load_config, open_host
from drums_core.host import Host
from drums_core.model import SetupStep, Task
from drums_core.slot import Slot
from drums_core.testing.faults import FaultInjector
from drums_core.verdict import SPECIFIED_GATES

AT_ONCE = 6
_JUDGED_WITHIN_S = 20.0
_OWN_NAMESPACES = ("pid", "user")  # every process of a desktop is in one of them; both are cheap to keep


def make_task(*config: SetupStep, command: str = "test -d ~/done && echo yes || echo no") -> Task:
    """A task that is done when there is a folder `~/done`, scored by OSWorld's `exact_match`."""
    evaluator = {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": command, "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "yes\n"}},
    }
    return Task(
        id="00000000-drums-test",
        instruction="Make a folder named done in your home directory.",
        config=config,
        evaluator=evaluator,
        domain="test",
        sha256="0" * 64,
    )


@attrs.frozen
class Outcome:
    """An episode's report, when every gate had a result; and what a scenario adds."""

    verdict: str
    bad_gates: frozenset[str]
    lines: Mapping[str, Mapping[str, Any]]  # gate -> its line in the report
    reasons: Sequence[str]
    causes: Sequence[str]
    facts: Mapping[str, Any] = attrs.field(factory=dict)

    def failing(self) -> set[str]:
        """The gates whose line says so."""
        return {gate for gate, line in self.lines.items() if line["status"] == "fail"}

    def passing(self) -> set[str]:
        """The gates whose line says so."""
        return {gate for gate, line in self.lines.items() if line["status"] == "pass"}


def outcome(slot: Slot, **facts: Any) -> Outcome:
    """The report as of now."""
    report = slot.gates()
    validity = report["validity"]
    return Outcome(
        verdict=validity["verdict"],
        bad_gates=frozenset(validity["bad_gates"]),
        lines={line["gate"]: line for line in report["gates"]["gates"]},
        reasons=validity["invalid_reasons"],
        causes=validity["causes"],
        facts=facts,
    )


async def judged(slot: Slot, *, until: Sequence[str] = (), **facts: Any) -> Outcome:
    """The report once every gate has a result, whatever the verdict was before; and one of each gate of `until`."""
    found = outcome(slot, **facts)
    with trio.move_on_after(_JUDGED_WITHIN_S):
        while not {*SPECIFIED_GATES, *until} <= found.failing() | found.passing():
            await trio.sleep(0.05)
            found = outcome(slot, **facts)
    return found


# --- the agent's side


async def run(slot: Slot, script: str, **options: Any) -> str:
    """A shell script as the agent's user; its standard output. Raises AssertionError when it fails."""
    result = await slot.execute(script, shell=True, **options)
    assert result.returncode == 0, f"{script[:80]!r} ended with {result.returncode}: {result.error}{result.output}"
    return result.output


async def write(slot: Slot, path: str, text: str) -> None:
    """A file of the agent's, made by the agent."""
    code = f"import os; p = {path!r}; os.makedirs(os.path.dirname(p), exist_ok=True); open(p, 'w').write({text!r})"
    result = await slot.execute(["python3", "-c", code])
    assert result.returncode == 0, result


async def start_daemon(slot: Slot, name: str, source: str) -> None:
    """A Python program of the agent's that runs on; returns once it has made the file `/tmp/NAME.ready`."""
    await write(slot, f"/tmp/{name}.py", source)
    started = f"setsid python3 /tmp/{name}.py </dev/null >/tmp/{name}.log 2>&1 &"
    wait = f"for i in $(seq 200); do [ -e /tmp/{name}.ready ] && exit 0; sleep 0.05; done; cat /tmp/{name}.log; exit 1"
    await run(slot, f"{started}\n{wait}")


# --- scenarios

Scenario = Callable[[Host], Awaitable[Any]]


@attrs.frozen
class _Failed:
    text: str


@attrs.define
class Played:
    """What the scenarios of a module showed.

    Args:
        results: what each returned.
        left: what was left of their desktops, in words.
        took: seconds that each took.
        seconds: how long it all took.
    """

    results: dict[str, Any] = attrs.field(factory=dict)
    left: list[str] = attrs.field(factory=list)
    took: dict[str, float] = attrs.field(factory=dict)
    seconds: float = 0.0

    def __getitem__(self, name: str) -> Any:
        """What a scenario returned; fails the test when it did not come to its end."""
        result = self.results[name]
        if isinstance(result, _Failed):
            pytest.fail(f"scenario {name!r} ended early:\n{result.text}", pytrace=False)
        return result


def play(
    scenarios: Mapping[str, Scenario],
    *,
    interposer: FaultInjector | None = None,
    at_once: int = AT_ONCE,
    **config: Any,
) -> Played:
    """Run scenarios on one open host, `at_once` at a time.

    Args:
        config: fields of the host's configuration that differ from the machine's.
    """
    return play_on_hosts([(scenarios, config)], interposer=interposer, at_once=at_once)


def play_on_hosts(
    hosts: Sequence[tuple[Mapping[str, Scenario], Mapping[str, Any]]],
    *,
    interposer: FaultInjector | None = None,
    at_once: int = AT_ONCE,
) -> Played:
    """Run scenarios on hosts with configurations of their own, which are open side by side on this machine."""
    played = Played()
    began = time.monotonic()
    witness = Witness(interposer)

    async def one(name: str, scenario: Scenario, host: Host, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            started = time.monotonic()
            try:
                played.results[name] = await scenario(host)
            except Exception as e:  # noqa: BLE001 - told in the test that asks for it
                played.results[name] = _Failed("".join(traceback.format_exception(e)))
            played.took[name] = time.monotonic() - started

    async def on_host(
        scenarios: Mapping[str, Scenario], config: Mapping[str, Any], limit: trio.CapacityLimiter
    ) -> None:
        settings = attrs.evolve(load_config(), **config)
        async with open_host(settings, interposer=witness) as host:
            witness.names.add(host.services.instance)
            async with trio.open_nursery() as nursery:
                for name, scenario in scenarios.items():
                    nursery.start_soon(one, name, scenario, host, limit)

    async def main() -> None:
        limit = trio.CapacityLimiter(at_once)
        async with trio.open_nursery() as nursery:
            for scenarios, config in hosts:
                nursery.start_soon(on_host, scenarios, config, limit)

    trio.run(main)
    played.seconds = time.monotonic() - began
    played.left = witness.left_over(load_config().state_dir)
    return played


@attrs.define(eq=False)
class Witness:
    """An interposer that remembers every desktop there was, and looks for what is left of them.

    By name, pid and namespace, so that another host on the same machine does not matter. The namespaces are kept until
    then: the number of one that has ended is soon a stranger's.
    """

    inner: FaultInjector | None = None
    names: set[str] = attrs.field(factory=set)
    namespaces: set[str] = attrs.field(factory=set)
    _kept: list[int] = attrs.field(factory=list)

    async def __call__(self, at: Any) -> None:
        self.names.add(at.slot)
        for kind in _OWN_NAMESPACES:
            path = f"/proc/{at.pid1}/ns/{kind}"
            if (name := os.readlink(path)) not in self.namespaces:
                self._kept.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                self.namespaces.add(name)
        if self.inner is not None:
            await self.inner(at)

    def left_over(self, state_dir: Path) -> list[str]:
        """Mounts, cgroups, folders, and processes of the desktops or about them. A dying process has 3 s."""
        found = [
            f"mount {line}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if any(name in line for name in self.names)
        ]
        for top in (Path("/sys/fs/cgroup"), state_dir / "slots", state_dir / "run"):
            for folder, names, _ in os.walk(top):
                found += [f"folder {folder}/{name}" for name in names if name in self.names]
                if folder.count("/") - str(top).count("/") >= 3:
                    names.clear()
        deadline = time.monotonic() + 3.0
        while (processes := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        while self._kept:
            os.close(self._kept.pop())
        return found + processes

    def _processes(self) -> list[str]:
        found: list[str] = []
        for pid in [int(x) for x in os.listdir("/proc") if x.isdigit()]:
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                groups = Path(f"/proc/{pid}/cgroup").read_text()
                inside = {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in _OWN_NAMESPACES}
            except OSError:  # it is gone, or (pid 1 of some machines) not ours to look at
                continue
            if any(name in line or name in groups for name in self.names) or inside & self.namespaces:
                found.append(f"process {pid} {line!r}")
        return found
