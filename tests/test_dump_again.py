"""A dump that CRIU refuses is tried again; one that broke off, or that is refused again and again, is not hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from desktops import Played, judged, play
from requires import requires

import drums_core.dumping
from drums.errors import DumpError
from drums_core.desktop import Desktop
from drums_core.dumping import DUMP_TRIES
from drums_core.host import Host
from drums_core.sys.criu import dump

pytestmark = requires("root", "criu")
REFUSAL = "criu.log: 7: Error (criu/kerndat.c:1): planted"


class Refusing:
    """`dump`, which fails for chosen desktops so many times before it works."""

    def __init__(self) -> None:
        self.errors: dict[int, list[DumpError]] = {}  # by pid of init
        self.tried: dict[int, int] = {}

    async def __call__(self, criu: Any, *, pid: int, **options: Any) -> None:
        self.tried[pid] = self.tried.get(pid, 0) + 1
        if self.errors.get(pid):
            raise self.errors[pid].pop(0)
        await dump(criu, pid=pid, **options)


refusing = Refusing()


def forked(*errors: Callable[[], DumpError]) -> Callable[[Host], Any]:
    """Fork a desktop whose first dumps end like this; the error or the child's outcome, the tries, and the desktop."""

    async def scenario(host: Host) -> tuple[object, int, str, int]:
        async with await host.create() as parent:
            assert isinstance(parent.desktop, Desktop)
            pid = parent.desktop.pid1
            refusing.errors[pid] = [x() for x in errors]
            before = len(host.services.store.names())
            try:
                (child,) = await parent.fork(1)
            except DumpError as e:
                result: object = e
                left = len(host.services.store.names()) - before
            else:
                result, left = await judged(child), 0
                await child.close()
            return result, refusing.tried[pid], parent.desktop.damaged, left

    return scenario


def refused() -> DumpError:
    """CRIU's own word: nothing has happened to the processes."""
    return DumpError("planted: refused", interrupted=False, log_excerpt=REFUSAL)


def broken_off() -> DumpError:
    """CRIU ended in the middle."""
    return DumpError("planted: broke off", interrupted=True, log_excerpt=REFUSAL)


def not_criu() -> DumpError:
    """No space for the layers, say."""
    return DumpError("planted: no space", interrupted=False)


SCENARIOS = {
    "once": forked(refused),
    "always": forked(*[refused] * DUMP_TRIES),
    "broken off": forked(broken_off),
    "not criu": forked(not_criu),
}


@pytest.fixture(scope="module")
def played() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drums_core.dumping, "dump", refusing)
        yield play(SCENARIOS, at_once=1)  # what is left of one is counted


def test_refused_once(played: Played) -> None:
    """The second dump is as good as any."""
    child, tried, damaged, _ = played["once"]
    assert (child.verdict, tried, damaged) == ("valid", 2, "")


@pytest.mark.parametrize(("name", "tries"), [("always", DUMP_TRIES), ("not criu", 1)])
def test_refused_for_good(played: Played, name: str, tries: int) -> None:
    """The error is told, nothing is left of the attempts, and the desktop is whole."""
    error, tried, damaged, left = played[name]
    assert isinstance(error, DumpError) and "planted" in str(error)
    assert (tried, damaged, left) == (tries, "", 0)


def test_broken_off(played: Played) -> None:
    """No second dump is made of processes that may be damaged."""
    error, tried, damaged, left = played["broken off"]
    assert isinstance(error, DumpError) and error.facts["interrupted"]
    assert (tried, left) == (1, 0)
    assert "a dump broke off: planted" in damaged


def test_nothing_is_left(played: Played) -> None:
    assert not played.left
