"""A desktop that is not there: a verifier's view of a recorded end state. The real view and it pass one suite."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from drums_core.abc import CommandOutcome, FileFacts
from drums_core.testing.end_state import Command, EndState, Entry, absolute

_LINKS = 40
_PNG = b"\x89PNG\r\n\x1a\n"


class Unanswered(BaseException):
    """The desktop does not answer. No `Exception`, as of the real view: who catches broadly must not make a 0 of it."""


class NotRecorded(BaseException):
    """The end state has no answer to what was asked: record it. No `Exception`, for the same reason."""


@attrs.frozen
class FakeCommand:
    """What a recorded command did."""

    returncode: int
    output: str
    error: str
    truncated: bool = False


@attrs.frozen
class FakeFile:
    """What is at a path of an end state."""

    kind: str
    size_bytes: int
    mode: int
    modified_s: float
    target: str


class FakeDesktop:
    """`drums_core.abc.VerifiedDesktop` over an end state. It keeps what it was asked in `asked`."""

    def __init__(self, state: EndState) -> None:
        self.state = state
        self.last_action = state.last_action
        self.asked: list[tuple[str, Any]] = []
        self._tree = state.tree()

    def _ask(self, name: str, what: Any = None) -> None:
        self.asked.append((name, what))
        silent = self.state.unanswered
        if silent is True or (isinstance(silent, list) and name in silent):
            raise Unanswered(f"the recorded desktop does not answer {name}")

    # --- files

    def _at(self, path: str, *, follow: bool = True) -> Entry | None:
        """What is at a path, with links followed on the way and, if asked, at its end."""
        here, left, links = "/", absolute(path).split("/")[1:], 0
        while left and left != [""]:
            here = os.path.join(here, left[0])
            left = left[1:]
            entry = self._tree.get(here)
            if entry is None:
                return None
            if entry.kind == "link" and (left or follow):
                links += 1
                if links > _LINKS:
                    return None
                target = os.path.normpath(os.path.join(os.path.dirname(here), entry.target))
                here, left = "/", [*target.split("/")[1:], *left]
            elif left and entry.kind != "folder":
                return None
        return self._tree.get(here)

    def read_file(self, path: str, *, limit_bytes: int = 64 << 20) -> bytes:
        """A file's content; raises as the real view does."""
        self._ask("read_file", path)
        entry = self._at(path)
        if entry is None:
            raise FileNotFoundError(2, "not in the desktop", path)
        if entry.kind != "file":
            raise ValueError(f"{path!r} cannot be read: it is a {entry.kind}")
        if len(entry.content) > limit_bytes:
            raise ValueError(f"{path!r} has more than the allowed {limit_bytes} bytes")
        return entry.content

    def read_text(self, path: str, *, limit_bytes: int = 64 << 20) -> str:
        """A text file in UTF-8; raises as the real view does."""
        return self.read_file(path, limit_bytes=limit_bytes).decode()

    def stat(self, path: str) -> FileFacts | None:
        """What is at a path, a link itself."""
        self._ask("stat", path)
        entry = self._at(path, follow=False)
        if entry is None:
            return None
        size = len(entry.content) if entry.kind == "file" else len(entry.target)
        return FakeFile(entry.kind, size, entry.mode, entry.modified_s, entry.target)

    def exists(self, path: str) -> bool:
        """Whether there is anything at a path; a dangling link is nothing."""
        self._ask("exists", path)
        return self._at(path) is not None

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder at a path."""
        self._ask("is_folder", path)
        entry = self._at(path)
        return entry is not None and entry.kind == "folder"

    def list_directory(self, path: str) -> dict[str, Any]:
        """The tree below a folder; raises `NotADirectoryError`."""
        self._ask("list_directory", path)
        entry, top = self._at(path), absolute(path)
        if entry is None or entry.kind != "folder":
            raise NotADirectoryError(20, "no folder in the desktop", path)
        return self._listed(top)

    def _listed(self, top: str) -> dict[str, Any]:
        inside = [p for p in self._tree if p != top and os.path.dirname(p) == top]
        children = []
        for path in sorted(inside):
            is_folder = self._tree[path].kind == "folder"
            children.append(self._listed(path) if is_folder else {"type": "file", "name": os.path.basename(path)})
        return {"type": "directory", "name": os.path.basename(top), "children": children}

    # --- the rest

    def execute(
        self,
        command: str | Sequence[str],
        *,
        shell: bool | None = None,
        timeout_s: float = 60.0,
        applications: bool = False,
    ) -> CommandOutcome:
        """The recorded answer to a command; raises `NotRecorded` without one."""
        asked = command if isinstance(command, str) else list(command)
        self._ask("execute", asked)
        found: Command | None = next((c for c in self.state.commands if c.command == asked), None)
        if found is None:
            raise NotRecorded(f"the end state {self.state.name!r} has no answer to the command {asked!r}")
        return FakeCommand(found.returncode, found.output, found.error)

    def screenshot(self) -> bytes:
        """The recorded screen."""
        self._ask("screenshot")
        return self.state.screenshot or _PNG

    def windows(self) -> list[dict[str, Any]]:
        """The recorded windows."""
        self._ask("windows")
        return [dict(x) for x in self.state.windows]

    def accessibility(self) -> str:
        """The recorded tree."""
        self._ask("accessibility")
        return self.state.accessibility

    def clipboard(self) -> str | None:
        """The recorded text."""
        self._ask("clipboard")
        return self.state.clipboard

    def browser_targets(self, *, port: int = 9222) -> list[dict[str, Any]]:
        """The recorded targets, whatever the port; without any, nothing listens."""
        self._ask("browser_targets", port)
        return self._targets(port)

    def _targets(self, port: int) -> list[dict[str, Any]]:
        if self.state.targets is None or port != 9222:
            raise ConnectionRefusedError(111, "nothing listens on the recorded desktop's port")
        return [dict(x) for x in self.state.targets]

    def cdp(
        self, method: str, params: Mapping[str, Any] | None = None, *, target: str | None = None, port: int = 9222
    ) -> dict[str, Any]:
        """The recorded answer to a call; raises as the real view does, and `NotRecorded` without one."""
        asked = dict(params or {})
        self._ask("cdp", (method, asked))
        listed = self._targets(port)
        if not [x for x in listed if (x.get("type") == "page" if target is None else x.get("id") == target)]:
            raise LookupError("there is no such page")
        for call in self.state.calls:
            if (call.method, dict(call.params)) == (method, asked):
                if call.fault:
                    raise ValueError(call.fault)
                return dict(call.result)
        raise NotRecorded(f"the end state {self.state.name!r} has no answer to the call {method} {asked}")
