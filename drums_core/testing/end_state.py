"""Recorded end states: what a desktop was like when the agent was done, as a folder or made in a test.

    states/solved/state.toml    what to call, what to expect, and what is no file (below)
    states/solved/home/...      files of the agent's home
    states/solved/root/...      other files, by their path from `/`

`.keep` files stand for nothing: they keep an empty folder in version control. Fields of `state.toml`:

    case = "solution"           solution, untouched, wrong or damaged
    function = "renamed"        which function of the verifier
    expect = 1.0                the score, or "error" where there must be none
    options = {old = "a"}       the task's options; last_action = "DONE"; instruction = "…"
    unanswered = true           the desktop answers nothing; or names of what is not answered: ["read_file"]
    clipboard = "text"; accessibility = "<desktop-frame/>"; screenshot = "screen.png" (a file beside it)
    live = ["xclip …"]          shell lines that make real what is no file of the home, for `drums verifier test --live`
    [[windows]]                 title = "…", class = ["xterm", "XTerm"], …
    [[commands]]                command = ["dconf", "read", "/x"] (or a line), output = "…", error, returncode
    [[targets]]                 what the browser lists: id, type, url, …
    [[calls]]                   method = "Runtime.evaluate", params = {…}, result = {…} (or fault = "…")
"""

from __future__ import annotations

import functools
import operator
import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
from cattrs.v import format_exception

from drums.errors import ConfigError

HOME = "/home/user"
CASES = ("solution", "untouched", "wrong", "damaged")
"""What each function of a verifier has to be tried on."""

_WINDOW = {"id": "0x1", "title": "", "class": ["", ""], "pid": 1, "x": 0, "y": 0, "width": 640, "height": 480}
_WINDOW["active"] = False


@attrs.frozen
class Entry:
    """What is at a path: `file`, `folder`, `link` or `special`."""

    kind: str
    content: bytes = b""
    mode: int = 0o644
    target: str = ""
    modified_s: float = 0.0


def file(content: bytes | str = b"", **more: Any) -> Entry:
    """A file."""
    return Entry("file", content.encode() if isinstance(content, str) else content, **more)


def folder() -> Entry:
    """An empty folder; those above an entry need not be named."""
    return Entry("folder", mode=0o755)


def link(target: str) -> Entry:
    """A symbolic link."""
    return Entry("link", mode=0o777, target=target)


@attrs.frozen
class Command:
    """The recorded answer to a command."""

    command: list[str] | str
    output: str = ""
    error: str = ""
    returncode: int = 0


@attrs.frozen
class Call:
    """The recorded answer to a call of a browser's debugging port; one with a `fault` is refused."""

    method: str
    params: Mapping[str, Any] = attrs.field(factory=dict)
    result: Mapping[str, Any] = attrs.field(factory=dict)
    fault: str = ""


@attrs.frozen
class EndState:
    """One recorded end state. `files` are by absolute path, or relative to the home."""

    case: Literal["solution", "untouched", "wrong", "damaged"]
    function: str
    expect: float | Literal["error"]
    name: str = ""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    last_action: str | None = None
    instruction: str = ""
    unanswered: bool | list[str] = False
    live: list[str] = attrs.field(factory=list)
    clipboard: str | None = None
    accessibility: str = "<desktop-frame/>"
    screenshot: bytes = b""
    windows: Sequence[Mapping[str, Any]] = ()
    commands: Sequence[Command] = ()
    targets: Sequence[Mapping[str, Any]] | None = None
    calls: Sequence[Call] = ()
    files: Mapping[str, Entry] = attrs.field(factory=dict)

    def task(self) -> dict[str, Any]:
        """The task as a verifier gets it."""
        evaluator = {"func": "drums_verifier", "function": self.function, "options": dict(self.options)}
        return {
            "id": f"recorded-{self.name or self.case}",
            "instruction": self.instruction,
            "domain": "recorded",
            "evaluator": evaluator,
            "sha256": "0" * 64,
        }

    def tree(self) -> dict[str, Entry]:
        """Every entry by its absolute path, with the folders above."""
        found = {"/": folder(), "/home": folder(), HOME: folder()}
        for path, entry in self.files.items():
            whole = absolute(path)
            for parent in reversed(Path(whole).parents):
                found.setdefault(str(parent), folder())
            found[whole] = entry
        return found


def absolute(path: str) -> str:
    """A path of the desktop from `/`, which begins there, or with `~/` or nothing at the home."""
    return os.path.normpath(path if path.startswith("/") else f"{HOME}/{path.removeprefix('~/')}")


def _expectation(value: Any, _: Any) -> Any:
    if value == "error" or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1):
        return value
    raise ValueError(f'expected a number from 0 to 1, or "error", found {value!r:.60}')


def _described(fault: BaseException, kind: type | None) -> str:
    return str(fault) if str(fault).startswith("expected ") else format_exception(fault, kind)


def _as_is(value: Any, _: Any) -> Any:
    return value


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook_func(lambda kind: kind == float | Literal["error"], _expectation)
    for union in (list[str] | str, bool | list[str], bytes):
        converter.register_structure_hook_func(functools.partial(operator.eq, union), _as_is)
    return converter


_converter = _make_converter()


def load_state(path: Path) -> EndState:
    """The end state in a folder. Blocks.

    Raises:
        ConfigError: it is none; the text has the path of each fault.
    """
    described = path / "state.toml"
    try:
        document = tomllib.loads(described.read_text(encoding="utf-8"))
        if "screenshot" in document:
            document["screenshot"] = (path / str(document["screenshot"])).read_bytes()
        if set(document) & {"files", "name"}:
            raise ValueError("files and name are given by the folder")
        document["windows"] = [{**_WINDOW, **window} for window in document.get("windows", ())]
        state = _converter.structure(document, EndState)
    except (OSError, ValueError, cattrs.BaseValidationError) as e:
        wrong = isinstance(e, cattrs.BaseValidationError)
        faults = cattrs.transform_error(e, format_exception=_described) if wrong else [str(e)]
        raise ConfigError(f"{str(described)!r} describes no end state: {'; '.join(faults)}", path=str(path)) from e
    files = {**_read_tree(path / "root", "/"), **_read_tree(path / "home", HOME)}
    return attrs.evolve(state, name=path.name, files=files)


def load_states(path: Path) -> list[EndState]:
    """The end states in a folder of them, by name. Blocks.

    Raises:
        ConfigError: one is none, or there are none.
    """
    found = [load_state(x.parent) for x in sorted(path.glob("*/state.toml"))]
    if not found:
        raise ConfigError(f"there is no end state in {str(path)!r}", hint="each is a folder with a state.toml")
    return found


def _read_tree(top: Path, at: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for parent, folders, files in os.walk(top):
        for name in [*folders, *files]:
            path = Path(parent, name)
            if name != ".keep":
                found[os.path.join(at, path.relative_to(top))] = _read_entry(path)
    return found


def _read_entry(path: Path) -> Entry:
    status = path.lstat()
    mode, when = stat.S_IMODE(status.st_mode), status.st_mtime
    if stat.S_ISLNK(status.st_mode):
        return Entry("link", mode=mode, target=os.readlink(path), modified_s=when)
    if stat.S_ISDIR(status.st_mode):
        return Entry("folder", mode=mode, modified_s=when)
    if stat.S_ISREG(status.st_mode):
        return Entry("file", path.read_bytes(), mode, modified_s=when)
    return Entry("special", mode=mode, modified_s=when)
