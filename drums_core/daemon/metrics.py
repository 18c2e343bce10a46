"""What Prometheus reads at `/metrics`."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator

import attrs
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from drums_core.host import Host
from drums_core.slot_state import SlotState

MEDIA_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@attrs.define(eq=False)
class _Slots(Collector):
    host: Host

    def collect(self) -> Iterator[Metric]:
        """The slots by state, as of now."""
        counted = Count(slot.state for slot in list(self.host.slots.values()))
        states = GaugeMetricFamily("drums_slots", "Slots by state.", labels=["state"])
        for state in SlotState:
            states.add_metric([state.value], counted[state])
        yield states
        yield GaugeMetricFamily("drums_slots_allowed", "Slots that there may be.", value=self.host.config.max_slots)


class Metrics:
    """The numbers of one daemon, in a registry of their own."""

    def __init__(self, host: Host) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Slots(host))
        self.episodes = Counter("drums_episodes", "Episodes that began, by origin.", ["origin"], registry=self.registry)
        self.verdicts = Counter(
            "drums_verdicts", "Verdicts by cause (none for valid ones).", ["verdict", "cause"], registry=self.registry
        )
        self.rewards = Counter("drums_rewards", "Rewards that were answered.", ["valid"], registry=self.registry)
        self.checker_errors = Counter(
            "drums_checker_errors", "Rewards without a score, by whose doing it is.", ["cause"], registry=self.registry
        )
        self.dropped = Counter("drums_events_dropped", "Times that events went uncounted.", registry=self.registry)
        self.requests = Counter(
            "drums_http_requests", "Requests by method and status.", ["method", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "drums_operation_seconds",
            "How long operations took.",
            ["operation", "outcome"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        for origin in ("create", "reset", "fork"):
            self.episodes.labels(origin)
        self._judged: dict[str, str] = {}

    def request(self, method: str, status: int) -> None:
        """A request was answered; 0 is one whose client left."""
        known = method if method in ("GET", "HEAD", "POST", "PUT", "DELETE") else "other"
        self.requests.labels(known, str(status)).inc()

    async def follow(self, host: Host) -> None:
        """Count what happens on the host."""
        async with host.events() as events:
            async for event in events:
                data = event.data if isinstance(event.data, dict) else {}
                if event.kind == "episode_started":
                    self.episodes.labels(str(data.get("origin"))).inc()
                elif event.kind == "verdict":
                    self._verdict(event.slot, event.episode, str(data.get("verdict")), data.get("causes") or ())
                elif event.kind == "reward":
                    self.rewards.labels(str(bool(data.get("valid"))).lower()).inc()
                    if data.get("checker_error") is not None:
                        self.checker_errors.labels(str(data.get("checker_error_cause") or "unknown")).inc()
                elif event.kind == "slot_state" and data.get("state") == SlotState.CLOSED:
                    self._judged.pop(event.slot, None)
                elif event.kind == "dropped":
                    self.dropped.inc()

    def _verdict(self, slot: str, episode: str, verdict: str, causes: object) -> None:
        # An episode's reasons may grow; its verdict counts once each.
        if self._judged.get(slot) == f"{episode} {verdict}":
            return
        self._judged[slot] = f"{episode} {verdict}"
        first = next(iter(causes), "none") if isinstance(causes, list | tuple) else "none"
        self.verdicts.labels(verdict, str(first)).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
