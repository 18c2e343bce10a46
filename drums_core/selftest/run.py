"""The self-test: faults on throw-away desktops, several at a time, then clean restores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from drums.errors import ConfigError
from drums_core.config import HostConfig
from drums_core.host import Host
from drums_core.model import Json, Limits
from drums_core.opening import open_host
from drums_core.plugins import Plugins, build_manager
from drums_core.selftest.checker import FUNC, SelftestChecker, new_task
from drums_core.selftest.clean import Clean, restore_clean
from drums_core.selftest.stage import set_the_stage
from drums_core.selftest.trial import Trial, trial_of, try_on
from drums_core.services import Interposer
from drums_core.slot import Slot
from drums_core.testing.faults import FAULTS, Armed, By, Fault, FaultInjector, Need, Point
from drums_core.testing.faults.guest import TIGHT_READY_LIMIT_S

AT_ONCE = 12
_COPIES_AT_ONCE = 8
_SPARE_SLOTS = 8 + 2 * _COPIES_AT_ONCE  # parents, copies, and desktops that are being closed
_HANDED_OUT = (Point.UP, Point.VALID, Point.VERIFY)
TIGHT: Mapping[str, Json] = {
    "ready_limit_s": TIGHT_READY_LIMIT_S,
    "limits": Limits(cpus=2.0, memory_bytes=400 << 20, swap_bytes=0, pids=512),
}
"""What a tight host's configuration has of its own."""


@attrs.define
class Findings:
    """What the self-test found."""

    trials: list[Trial] = attrs.field(factory=list)
    clean: Clean = attrs.field(factory=Clean)

    @property
    def planted(self) -> list[Trial]:
        """The faults that were planted, or should have been; harmless acts and what this host has not left out."""
        return [x for x in self.trials if not x.fault.harmless and not x.skipped]

    @property
    def missed(self) -> list[Trial]:
        """Those that were not seen as they must be."""
        return [x for x in self.trials if x.misses()]

    @property
    def alarming(self) -> list[Trial]:
        """Those with a gate that failed though they are not about it."""
        return [x for x in self.trials if x.false_alarms()]

    @property
    def false_alarms(self) -> int:
        """How many desktops a gate flagged without a reason."""
        return len(self.alarming) + len(self.clean.alarms)

    @property
    def good(self) -> bool:
        """Whether there is no miss and no false alarm."""
        return not self.missed and not self.false_alarms

    def document(self) -> dict[str, Json]:
        """As JSON."""
        return {
            "planted": len(self.planted),
            "caught": sum(1 for x in self.planted if not x.misses()),
            "missed": [{"fault": x.fault.name, "why": x.misses()} for x in self.missed],
            "harmless": sum(1 for x in self.trials if x.fault.harmless and not x.skipped),
            "clean": self.clean.count,
            "clean_by_origin": self.clean.tried,
            "clean_verified": self.clean.verified,
            "false_alarms": self.false_alarms,
            "alarms": [
                *({"fault": x.fault.name, "gates": x.false_alarms()} for x in self.alarming),
                *self.clean.alarms,
            ],
            "skipped": {x.fault.name: x.problem for x in self.trials if x.skipped},
            "faults": [x.document() for x in self.trials],
        }


def all_faults(plugins: Plugins) -> dict[str, Fault]:
    """The matrix, and what plugins add to it, by name.

    Raises:
        ConfigError: two faults have one name.
    """
    found = dict(FAULTS)
    for gate, (factory, owner) in plugins.registry.faults.items():
        for fault in factory():
            if fault.name in found:
                raise ConfigError(f"{owner.distribution} brings a fault {fault.name!r} for {gate!r}: the name is taken")
            found[fault.name] = fault
    return found


def choose(faults: Mapping[str, Fault], gates: Sequence[str], known: Sequence[str]) -> list[Fault]:
    """The faults of these gates; of none, all of them and the harmless acts.

    Raises:
        ConfigError: there is no such gate, or it has no fault.
    """
    if not gates:
        return list(faults.values())
    for gate in gates:
        if gate not in known:
            raise ConfigError(f"no gate {gate!r}", hint=f"installed: {', '.join(sorted(known))}")
        if not any(gate in x.gates for x in faults.values()):
            raise ConfigError(f"gate {gate!r} brings no fault, so there is nothing to try")
    return [x for x in faults.values() if set(gates) & set(x.gates)]


async def selftest(
    config: HostConfig,
    *,
    gates: Sequence[str] = (),
    clean: int = 0,
    at_once: int = AT_ONCE,
    progress: Callable[[str, float], None] = lambda _text, _part: None,
    plugins: Callable[[SelftestChecker], Plugins] | None = None,
    also: Interposer | None = None,
) -> Findings:
    """Plant faults and restore cleanly, in desktops of hosts of its own on this configuration's state folder.

    A daemon that runs on the same folder is not disturbed: a state folder has room for several hosts.

    Args:
        gates: whose faults; of none, all, and acts that are no faults.
        clean: how many clean restores.
        at_once: how many desktops live at once, besides a few copies of one.
        progress: told what was done, and the part of all that is done.
        plugins: what to load, with the self-test's own checker; None is what is installed.
        also: called at each point of each desktop's life, before the faults.

    Raises:
        ConfigError: no such gate, or one without faults.

    Cancellation: nothing is left.
    """
    checker = SelftestChecker()
    found = (plugins or _installed)(checker)
    # Others may claim every evaluator; nothing but the self-test's is to be scored here.
    checkers = found.registry.checkers
    found.registry.checkers = {name: x for name, x in checkers.items() if name == FUNC}
    wanted = choose(all_faults(found), gates, list(found.registry.gates))
    findings = Findings()
    total = len(wanted) + clean
    done = 0

    def told(text: str) -> None:
        nonlocal done
        done += 1
        progress(text, done / total)

    def tried(trial: Trial) -> None:
        findings.trials.append(trial)
        told(trial.fault.name)

    limit = trio.CapacityLimiter(at_once)
    others: list[Trial] = []  # the desktops that faults mixed up with those under test
    roomy = attrs.evolve(
        config, max_slots=max(config.max_slots, at_once + _SPARE_SLOTS), default_ttl_s=None, allow_unlimited_ttl=True
    )
    tight = [x for x in wanted if Need.TIGHT in x.needs]
    async with trio.open_nursery() as nursery:
        if tight:
            nursery.start_soon(_bench, attrs.evolve(roomy, **TIGHT), found, checker, tight, limit, tried, also, others)
        rest = [x for x in wanted if Need.TIGHT not in x.needs]
        if rest:
            nursery.start_soon(_bench, roomy, found, checker, rest, limit, tried, also, others)
    order = {x.name: number for number, x in enumerate(wanted)}
    findings.trials.sort(key=lambda x: order[x.fault.name])
    findings.trials += others
    if clean:
        async with open_host(roomy, plugins=found, interposer=also) as host:
            findings.clean = await restore_clean(host, clean, at_once, lambda: told("clean restores"))
    return findings


def _installed(checker: SelftestChecker) -> Plugins:
    return build_manager([("drums_selftest", checker)])


async def _bench(
    config: HostConfig,
    plugins: Plugins,
    checker: SelftestChecker,
    faults: Sequence[Fault],
    limit: trio.CapacityLimiter,
    tried: Callable[[Trial], None],
    also: Interposer | None,
    others: list[Trial],
) -> None:
    """Try these faults on one open host."""
    injector = FaultInjector(raises=False, before=also)
    async with open_host(config, plugins=plugins, interposer=injector) as host:
        await host.golden(config.image)
        bench = Bench(host, injector, checker, limit, tried)
        await bench.run(faults)
        others += bench.others


@attrs.define(eq=False)
class Bench:
    """One open host with what its trials share.

    Args:
        host: the host; `injector` is its interposer, `checker` among its plugins.
        limit: how many desktops live at once, copies of the stage left out.
        tried: told of each trial.
    """

    host: Host
    injector: FaultInjector
    checker: SelftestChecker
    limit: trio.CapacityLimiter
    tried: Callable[[Trial], None]
    others: list[Trial] = attrs.field(factory=list)
    # They are made in batches: in one queue with single desktops, each batch would wait for all of those.
    _copies_limit: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(2 * _COPIES_AT_ONCE))

    async def run(self, faults: Sequence[Fault]) -> None:
        """Try these faults side by side."""
        staged = [x for x in faults if Need.STAGE in x.needs]
        mixed = [x for x in faults if Need.OTHER in x.needs]
        async with trio.open_nursery() as nursery:
            if staged:
                nursery.start_soon(self._copies, staged)
            if mixed:
                nursery.start_soon(self._beside, mixed)
            for fault in faults:
                if fault not in staged and fault not in mixed:
                    nursery.start_soon(self._alone, fault, None)

    async def _alone(self, fault: Fault, other: Slot | None) -> None:
        """On a desktop of its own."""
        async with self.limit:
            armed = self._arm(fault, other)
            try:
                async with await self.host.create(new_task(), purpose="selftest") as slot:
                    armed.slot = slot.id
                    trial = await try_on(slot, armed, self.checker)
            except Exception as e:  # noqa: BLE001 - a trial that breaks off is a miss, with its reason
                trial = Trial(fault, problem=f"{type(e).__name__}: {e}")
        self.tried(trial)

    async def _beside(self, faults: Sequence[Fault]) -> None:
        """On desktops of their own, beside one that they mix up with."""
        async with await self.host.create(purpose="selftest") as other:
            async with trio.open_nursery() as nursery:
                for fault in faults:
                    nursery.start_soon(self._alone, fault, other)
            gates = tuple(dict.fromkeys(gate for fault in faults for gate in fault.other_gates))
            name = "beside:" + "+".join(gates) if gates else "harmless:beside"
            about = "a desktop that others were mixed up with"
            await other.episode.wait_judged()
            self.others.append(trial_of(other, Fault(name, gates, Point.UP, about, "")))

    async def _copies(self, faults: Sequence[Fault]) -> None:
        """On copies of a staged desktop."""
        waiting = deque(faults)
        try:
            async with await set_the_stage(self.host, application=False) as parent, trio.open_nursery() as nursery:
                while waiting:
                    batch = [waiting.popleft() for _ in range(min(_COPIES_AT_ONCE, len(waiting)))]
                    await self._copy(parent, batch, nursery)
        except Exception as e:  # noqa: BLE001 - as above
            for fault in waiting:
                self.tried(Trial(fault, problem=f"{type(e).__name__}: {e}"))

    async def _copy(self, parent: Slot, batch: Sequence[Fault], nursery: trio.Nursery) -> None:
        places = [object() for _ in batch]
        for place in places:
            await self._copies_limit.acquire_on_behalf_of(place)
        armed = [self._arm(fault, None) for fault in batch]
        try:
            children = await parent.fork(len(batch))
        except Exception as e:  # noqa: BLE001 - as above
            for place, one in zip(places, armed, strict=True):
                one.slot = one.slot or "-"  # it is for no later copy
                self._copies_limit.release_on_behalf_of(place)
                self.tried(Trial(one.fault, problem=f"{type(e).__name__}: {e}"))
            return
        free = [x for x in armed if not x.slot]
        for place, child in zip(places, children, strict=True):
            mine = next((x for x in armed if x.slot == child.id), None) or free.pop()
            mine.slot = child.id
            nursery.start_soon(self._on_copy, child, mine, place)

    async def _on_copy(self, child: Slot, armed: Armed, place: object) -> None:
        try:
            async with child:
                trial = await try_on(child, armed, self.checker)
        except Exception as e:  # noqa: BLE001 - as above
            trial = Trial(armed.fault, problem=f"{type(e).__name__}: {e}")
        finally:
            self._copies_limit.release_on_behalf_of(place)
        self.tried(trial)

    def _arm(self, fault: Fault, other: Slot | None) -> Armed:
        desktop = other.desktop if other is not None else None
        pid1, cgroups = (desktop.pid1, tuple(desktop.cgroup.paths)) if desktop is not None else (0, ())
        if fault.by is By.HOST and fault.point not in _HANDED_OUT:
            return self.injector.arm(fault, other_pid1=pid1, other_cgroups=cgroups)
        return Armed(fault, other_pid1=pid1, other_cgroups=cgroups)
