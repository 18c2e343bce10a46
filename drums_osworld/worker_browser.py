"""What OSWorld's getters do to the desktop's browser, watched inside a checker's worker. Standard library only.

They speak to it by Playwright, whose driver is a process of the worker, and take nearly every failure for an answer: an
empty list of tabs. So the calls that reach the browser are wrapped: where the last one of a getter failed, it could not
ask, and there is no score. An earlier one may fail: several getters start the browser then, and connect again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

# These read an address in the browser and load it again: where it leads nowhere, the agent has led it there. The page
# that this one wants to look at is the live web's, and its task says what holds where that cannot be had.
_LOADS_MAY_FAIL = frozenset({"active_tab_info", "info_from_website"})

_faults: dict[str, str] = {}


def watched(
    getters: Mapping[str, Callable[..., Any]], broken: Callable[[str], BaseException]
) -> dict[str, Callable[..., Any]]:
    """The getters, each of which ends in what `broken` makes of a reason when it could not ask the browser."""

    def watch(name: str, getter: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            _faults.clear()
            try:
                return getter(*args)
            finally:
                if name in _LOADS_MAY_FAIL:
                    _faults.pop("load", None)
                if _faults:
                    raise broken(next(iter(_faults.values())))

        return call

    return {name: watch(name, getter) for name, getter in getters.items()}


def watch_playwright(module: ModuleType, broken: Callable[[str], BaseException]) -> None:
    """Wrap what a getters' module has imported of Playwright; nothing where it is not installed, or not imported."""
    api: Any = sys.modules.get("playwright.sync_api")
    make = vars(module).get("sync_playwright")
    if make is None or getattr(api, "__file__", None) is None:
        return
    vars(module)["sync_playwright"] = lambda: _Driver(make(), broken)
    _wrap(api.BrowserType, "connect_over_cdp", "connect", "the browser could not be asked")
    _wrap(api.Page, "goto", "load", "the browser could not load a page that is to be compared")


def _wrap(owner: Any, name: str, kind: str, what: str) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        try:
            result = original(*args, **options)
        except Exception as e:
            _faults[kind] = f"{what}: {e}".strip()[:500]
            raise
        _faults.pop(kind, None)
        return result

    setattr(owner, name, call)


class _Driver:
    """Playwright's context manager, whose driver must have started, and must still be there at the end."""

    def __init__(self, inner: Any, broken: Callable[[str], BaseException]) -> None:
        self._inner = inner
        self._broken = broken
        self._processes: set[int] = set()

    def __enter__(self) -> Any:
        before = _children()
        try:
            entered = self._inner.__enter__()
        except Exception as e:
            raise self._broken(f"Playwright's driver does not start: {e}") from e
        self._processes = _children() - before
        return entered

    def __exit__(self, *exception: Any) -> Any:
        alive = self._processes and self._processes <= _children()
        ended = self._inner.__exit__(*exception)
        if not alive:
            raise self._broken("Playwright's driver ended while a getter used it")
        return ended


def _children() -> set[int]:
    """This process's children that run (proc_pid_stat(5): a zombie's state is Z)."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", "rb") as f:
                state, parent = f.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if int(parent) == os.getpid() and state not in (b"Z", b"X"):
            found.add(int(name))
    return found
