"""What a route is, and one request to it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import attrs
import trio
from starlette.requests import Request

from drums_core.daemon.answers import Following
from drums_core.daemon.metrics import Metrics
from drums_core.host import Host
from drums_core.slot import Slot

T = TypeVar("T")


@attrs.define
class Call:
    """One request.

    Args:
        nursery: for what goes on when the caller leaves.
        parameters: of the path.
        body: an object of the route's class, or the bytes themselves.
        query: likewise.
        request: all of it, for what is passed on.
        authorized: whether the token was presented.
        following: whose events the caller sees as progress.
    """

    host: Host
    metrics: Metrics
    nursery: trio.Nursery
    parameters: Mapping[str, str]
    body: Any
    query: Any
    request: Request
    authorized: bool
    following: Following

    def slot(self) -> Slot:
        """The slot of the path, followed from now on."""
        slot = self.host.slot(self.parameters["slot"])
        self.following.slots.add(slot.id)
        return slot

    async def to_its_end(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run something that goes on when the caller leaves."""
        return await to_its_end(self.nursery, work)


async def to_its_end(nursery: trio.Nursery, work: Callable[[], Awaitable[T]]) -> T:
    """Run something in another nursery: cancelling the caller does not cancel it."""
    done = trio.Event()
    results: list[T] = []
    problems: list[Exception] = []

    async def run() -> None:
        try:
            results.append(await work())
        except Exception as e:  # noqa: BLE001 - raised in the caller
            problems.append(e)
        finally:
            done.set()

    nursery.start_soon(run)
    await done.wait()
    if problems:
        raise problems[0]
    if not results:
        raise trio.ClosedResourceError("the daemon stops")
    return results[0]


@attrs.frozen
class Operation:
    """A route.

    Args:
        name: its id in the OpenAPI document.
        answer: the class of its answer, a media type, or None for no content.
        body: the class of its body, None when it takes none.
        mutating: whether it takes an idempotency key.
        long: whether it can stream its progress.
        acts: whether it may have acted though its answer is lost: with a key it goes on when its caller leaves.
        of_port: path, query and body are those of a program in the desktop.
    """

    name: str
    method: str
    path: str
    summary: str
    handler: Callable[[Call], Awaitable[Any]]
    answer: type | str | None
    status: int = 200
    body: type | None = None
    query: type | None = None
    raw_body: bool = False
    mutating: bool = False
    long: bool = False
    acts: bool = False
    needs_token: bool = True
    of_port: bool = False

    @property
    def route(self) -> str:
        """The path as Starlette has it."""
        return self.path.replace("{path}", "{path:path}")

    @property
    def path_parameters(self) -> list[str]:
        """Their names."""
        return re.findall(r"{(\w+)}", self.path)
