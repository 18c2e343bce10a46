"""`drums_core.abc.StepContext` without a desktop; the suite of `conformance_steps` checks it, and the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from drums.errors import ConfigError, GuestError, SetupFailed
from drums_core.abc import Accounts, CommandResult


@attrs.define
class FakeStepContext:
    """Keeps what a step does, and answers as it was told.

    Args:
        commands: (command, result) pairs; any other command ends with code 0 and prints nothing.
        windows: titles of the windows there are; one that is closed is gone.
        openable: what `open_file` can open: files' paths, programs' names.
        files: what `fetch` has, by URL.
        silent: the desktop does not answer: each request raises `GuestError`.
        calls: (method, what it was given) in order.
        uploaded, kept, notes: what the step has written, kept and noted.
    """

    commands: Sequence[tuple[str | list[str], CommandResult]] = ()
    windows: set[str] = attrs.field(factory=set)
    openable: set[str] = attrs.field(factory=set)
    files: Mapping[str, bytes] = attrs.field(factory=dict)
    silent: bool = False
    screen: tuple[int, int] = (1920, 1080)
    accounts: Accounts = attrs.field(factory=Accounts)
    has_acted: bool = False
    calls: list[tuple[str, Any]] = attrs.field(factory=list)
    uploaded: dict[str, bytes] = attrs.field(factory=dict)
    kept: dict[str, str] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)

    async def _ask(self, method: str, what: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append((method, what))
        if self.silent:
            raise GuestError(f"the guest server did not answer {method}")

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120.0
    ) -> CommandResult:
        """The result that was told, or that of a command that does well and prints nothing."""
        asked = command if isinstance(command, str) else list(command)
        await self._ask("execute", asked)
        return next((result for known, result in self.commands if known == asked), CommandResult(0, "", ""))

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        """Nothing but kept."""
        await self._ask("launch", command if isinstance(command, str) else list(command))

    async def fetch(self, url: str) -> bytes:
        """Raises `SetupFailed` for a file that is not there. The desktop is not asked."""
        await trio.lowlevel.checkpoint()
        if url not in self.files:
            raise SetupFailed(f"{url!r} cannot be had: it is not there", url=url, cause="it is not there", output="")
        return self.files[url]

    async def open_file(self, path: str, *, timeout_s: float = 120.0) -> None:
        """Raises `SetupFailed` for what is not openable."""
        await self._ask("open_file", path)
        if path not in self.openable:
            raise SetupFailed(f"there is no file or program {path!r}", output="")

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Whether there is such a window."""
        await self._ask("activate_window", name)
        return bool(self._matching(name, strict))

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Whether there was such a window; the first one is gone."""
        await self._ask("close_window", name)
        found = self._matching(name, strict)
        self.windows -= set(found[:1])
        return bool(found)

    def _matching(self, name: str, strict: bool) -> list[str]:
        return sorted(x for x in self.windows if (x == name if strict else name.lower() in x.lower()))

    async def upload(self, path: str, content: bytes) -> None:
        """Kept in `uploaded`."""
        await self._ask("upload", path)
        self.uploaded[path] = content

    def note(self, text: str) -> None:
        """Kept in `notes`."""
        self.notes.append(text)

    def keep_output(self, name: str, text: str) -> None:
        """Kept in `kept`."""
        if "/" in name or name in ("", ".", ".."):
            raise ConfigError(f"{name!r} is no file name to keep an output under", path="$.stdout")
        self.kept[name] = text
