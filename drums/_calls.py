"""Every call of the API as a flow: the request, what becomes of the answer, and who waits for what.

The two clients add nothing to these but a way to carry them out.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs

from drums._answers import reward_of
from drums._flows import QUICK_S, Flow, Request, ask, post
from drums.errors import CheckerError, ConfigError, DrumsError, InvalidEpisode, SlotNotFound, TaskNotFound

if TYPE_CHECKING:
    from drums._endpoint import Endpoint
    from drums.reward import Reward

WAIT_SLICE_S = 30.0  # a wait is asked for anew this often, so that a daemon that is gone is noticed
STEP_S = 600.0  # the desktop's guest server limits an action; this is for a desktop that hangs

Document = dict[str, Any]


class Default(enum.Enum):
    """The place of an argument that was not given, where None means something."""

    TTL = "the host's default"

    def __repr__(self) -> str:
        return f"<{self.value}>"


@attrs.frozen
class PortAddress:
    """Where a port of a desktop is reached through the daemon.

    Args:
        url: what paths are appended to; it ends without a slash.
        headers: to be sent with every request to it. They bear the daemon's token: send them nowhere else.
    """

    url: str
    headers: Mapping[str, str] = attrs.field(repr=False)


class SlotView:
    """What a client knows of a slot: what the daemon last told."""

    _transport: Any  # of either client

    def __init__(self, slot: Document) -> None:
        self._slot = _checked(slot)
        self._closed = False

    def __repr__(self) -> str:
        return f"<drums.{type(self).__name__} {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """The slot's id."""
        return str(self._slot["id"])

    def port(self, port: int = 9222) -> PortAddress:
        """Where a port of the desktop is reached, by any HTTP client, for as long as the desktop lives.

        `p.chromium.connect_over_cdp(address.url, headers=address.headers)` drives a browser with Playwright.

        Raises:
            ConfigError: the daemon is reached by a Unix socket, for which there is no URL.
        """
        endpoint: Endpoint = self._transport.endpoint
        if endpoint.socket is not None:
            raise ConfigError(
                f"the daemon is reached by {endpoint.url!r}, so a port of a desktop has no URL",
                hint="let the daemon listen on HOST:PORT",
                path="DRUMS_URL",
            )
        headers = {} if endpoint.token is None else {"Authorization": f"Bearer {endpoint.token}"}
        return PortAddress(f"{endpoint.base_url}{_slot(self.id)}/ports/{int(port)}", headers)

    @property
    def task_id(self) -> str | None:
        """The task's whole id, None without a task."""
        task: str | None = self._slot["task"]
        return task

    @property
    def state(self) -> str:
        """The slot's state as the daemon last told it; `refresh` asks."""
        return str(self._slot["state"])

    def _learn(self, slot: Document) -> None:
        self._slot = _checked(slot)

    def _end(self) -> None:
        self._closed = True
        self._slot = {**self._slot, "state": "closed"}


def _checked(slot: Document) -> Document:
    if not isinstance(slot, dict) or not {"id", "task", "state"} <= set(slot):
        raise DrumsError(
            f"the daemon described a slot as {str(slot)[:200]}, expected an object with id, task and state"
        )
    return slot


def note_failed_close(error: BaseException | None, name: str, failure: DrumsError | TimeoutError) -> None:
    """A close at the end of a `with` failed: the error of the body, if there is one, is not hidden by that."""
    if error is None:
        raise failure
    error.add_note(f"and closing {name} failed: {failure}")


def _segment(value: str, what: str, missing: type[DrumsError] = DrumsError) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is {value!r}, expected str")
    # These would name another route, or none.
    if value in ("", ".", "..") or "/" in value:
        raise missing(f"there is no {what} {value!r}")
    return quote(value, safe="")


def _slot(slot: str, rest: str = "") -> str:
    return f"/v1/slots/{_segment(slot, 'slot', SlotNotFound)}{rest}"


# --- the host


def get(path: str) -> Flow[Document]:
    """An object."""
    return (yield from ask(Request("GET", path))).object()


def listing(path: str, name: str) -> Flow[list[Document]]:
    """A list of objects, which the answer has under this name."""
    return (yield from ask(Request("GET", path))).field(name, list)


def broken_tasks() -> Flow[dict[str, str]]:
    """The files of the catalogue that are no tasks."""
    return (yield from ask(Request("GET", "/v1/tasks"))).field("broken", dict)


def task(prefix: str) -> Flow[Document]:
    """A task by its id or a unique prefix."""
    return (yield from get(f"/v1/tasks/{_segment(prefix, 'task', TaskNotFound)}"))


def episodes(limit: int | None, before: str | None) -> Flow[list[Document]]:
    """Episodes of the journal, newest first."""
    params = {k: str(v) for k, v in (("limit", limit), ("before", before)) if v is not None}
    return (yield from ask(Request("GET", "/v1/episodes", params=params))).field("episodes", list)


def episode(identity: str) -> Flow[Document]:
    """One episode of the journal."""
    return (yield from get(f"/v1/episodes/{_segment(identity, 'episode')}"))


def reverify(identity: str, anyway: bool) -> Flow[Document]:
    """Both gradings of an episode's end state."""
    path = f"/v1/episodes/{_segment(identity, 'episode')}/reverify"
    return (yield from ask(post(path, {"anyway": anyway}, is_long=True))).object()


def reload_plugins() -> Flow[list[Document]]:
    """The plugins, once they have been looked for again."""
    return (yield from ask(post("/v1/plugins/reload", {}))).field("plugins", list)


def stats(by: str, label: str, since: float | None, all: bool) -> Flow[list[Document]]:
    """The rates, a row per group."""
    params = {"by": by, "label": label} | ({} if since is None else {"since": str(int(since))})
    params |= {"all": "true"} if all else {}
    return (yield from ask(Request("GET", "/v1/stats", params=params))).field("rows", list)


def create(
    task: str | None,
    image: str | None,
    checkpoint: str | None,
    ttl: float | Default | None,
    network: str,
    labels: Mapping[str, str] | None,
) -> Flow[Document]:
    """A new slot."""
    body: Document = {"task": task, "image": image, "checkpoint": checkpoint}
    body = {k: v for k, v in body.items() if v is not None} | {"network": network}
    if not isinstance(ttl, Default):
        body["ttl"] = ttl
    if labels:
        body["labels"] = dict(labels)
    return (yield from ask(post("/v1/slots", body, is_long=True))).object()


# --- a slot


def describe(slot: str) -> Flow[Document]:
    """The slot as it is now."""
    return (yield from get(_slot(slot)))


def operate(slot: str, operation: str, body: Document | None = None, *, is_long: bool = False) -> Flow[Document]:
    """An operation that is answered with an object."""
    return (yield from ask(post(_slot(slot, f"/{operation}"), {} if body is None else body, is_long=is_long))).object()


def fork(slot: str, count: int) -> Flow[list[Document]]:
    """The slots of the children."""
    return (yield from ask(post(_slot(slot, "/fork"), {"n": count}, is_long=True))).field("slots", list)


def save(slot: str, name: str) -> Flow[Document]:
    """The checkpoint that was made."""
    return (yield from ask(post(_slot(slot, "/save"), {"name": name}, is_long=True))).field("checkpoint", dict)


def step(slot: str, action: str) -> Flow[Document]:
    """What an action printed."""
    return (yield from ask(post(_slot(slot, "/step"), {"action": action}, read_timeout_s=STEP_S))).object()


def execute(slot: str, command: str | Sequence[str], shell: bool, timeout: float) -> Flow[Document]:
    """What a command printed."""
    body = {"command": command if isinstance(command, str) else list(command), "shell": shell, "timeout": timeout}
    limit = (timeout if isinstance(timeout, int | float) else 0.0) + QUICK_S
    return (yield from ask(post(_slot(slot, "/execute"), body, read_timeout_s=limit))).object()


def gates(slot: str) -> Flow[Document]:
    """The gate report of the current episode."""
    return (yield from get(_slot(slot, "/gates")))


def wait_valid(slot: str, timeout: float | None) -> Flow[None]:
    """Return at `valid`.

    Raises:
        InvalidEpisode: the episode is invalid.
        TimeoutError: it is still pending.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        request = Request("POST", _slot(slot, "/wait"), {"timeout": max(0.0, min(left, WAIT_SLICE_S))})
        report = (yield from ask(request)).object()
        validity = report.get("validity")
        if not isinstance(validity, dict) or "verdict" not in validity:
            raise DrumsError(f"the gate report of slot {slot} has no verdict: {str(report)[:200]}")
        if validity["verdict"] == "valid":
            return
        name = f"episode {report.get('episode')} of slot {slot}"
        if validity["verdict"] == "invalid":
            reasons = list(validity.get("invalid_reasons", ()))
            raise InvalidEpisode(
                f"{name} is invalid: {'; '.join(reasons)}",
                bad_gates=list(validity.get("bad_gates", ())),
                invalid_reasons=reasons,
                report=report,
            )
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{name} is still pending after {timeout:g} s")


def verify(slot: str, strict: bool, in_place: bool | None, keep: bool | None) -> Flow[Reward]:
    """The reward, of a copy, which the host may `keep`, or `in_place`; None is as the host is configured.

    Raises:
        InvalidEpisode: strict, and it is not valid.
        CheckerError: strict, and it is valid but without a score.
    """
    body = {k: v for k, v in (("in_place", in_place), ("keep", keep)) if v is not None}
    document = (yield from ask(post(_slot(slot, "/verify"), body, is_long=True))).object()
    reward: Reward = reward_of(document)
    if strict:
        require_score(slot, reward)
    return reward


def require_score(slot: str, reward: Reward) -> None:
    """Nothing, when the reward is valid and has a score.

    Raises:
        InvalidEpisode, CheckerError: the reward rides along.
    """
    if not reward.valid:
        raise InvalidEpisode(
            f"the episode of slot {slot} is {reward.verdict}: {'; '.join(reward.invalid_reasons)}",
            bad_gates=list(reward.bad_gates),
            invalid_reasons=list(reward.invalid_reasons),
            reward=reward,
        )
    if reward.score is None:
        raise CheckerError(f"no score: {reward.checker_error or reward.checker_skipped}", reward=reward)


def screenshot(slot: str) -> Flow[bytes]:
    """The screen as PNG."""
    return (yield from ask(Request("GET", _slot(slot, "/screenshot")))).body


def accessibility(slot: str) -> Flow[str]:
    """The accessibility tree as XML."""
    return (yield from ask(Request("GET", _slot(slot, "/accessibility")))).field("AT", str)


def read_file(slot: str, path: str) -> Flow[bytes]:
    """A file's content."""
    return (yield from ask(Request("GET", _slot(slot, "/files"), params={"path": path}))).body


def write_file(slot: str, path: str, data: bytes) -> Flow[None]:
    """Write a file."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data is {type(data).__name__}, expected bytes")
    yield from ask(Request("PUT", _slot(slot, "/files"), bytes(data), params={"path": path}))


def close(slot: str) -> Flow[None]:
    """End the slot; one that is gone already is what is wanted."""
    try:
        yield from ask(Request("DELETE", _slot(slot), read_timeout_s=STEP_S))
    except SlotNotFound:
        return
