"""The suite that a verifier's view of a desktop passes, the real one and the fake: called as a verifier is.

Stand-alone: it also runs in a worker. The desktop must have been made as `PREPARE` says, by its user; for one that is
recorded, `drums_core.testing.conformance_verifiers.desktop_suite_state` is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREPARE = r"""
mkdir -p ~/suite/folder/inner && cd ~/suite
printf 'h\303\251llo\n' >text && chmod 640 text && : >empty && printf '\377' >latin
ln -s text link && ln -s nowhere dangling && ln -s folder way && mkfifo pipe
: >folder/inner/deep
printf copied | xclip -selection clipboard -i >/dev/null 2>&1
"""
TARGET = {"id": "page-1", "type": "page", "url": "about:suite", "title": "Suite"}
CALLS: dict[str, dict[str, Any]] = {
    "Runtime.evaluate": {"result": {"result": {"type": "number", "value": 7}}},
    "No.such": {"error": {"code": -32601, "message": "'No.such' wasn't found"}},
}
"""What a browser at the desktop's port 9222 has to answer, with `TARGET` alone listed."""


@dataclass(frozen=True)
class Result:
    """1 when every rule holds; `evidence` has each rule with how it is broken, "" when it is not."""

    score: float
    evidence: dict[str, str]


def desktop_suite(desktop: Any, task: Mapping[str, Any]) -> Result:
    """Every rule, on a desktop that was prepared."""
    faults: dict[str, str] = {}
    for rule, holds in _rules(desktop):
        try:
            faults[rule] = "" if holds() else "it does not hold"
        except Exception as e:  # noqa: BLE001 - told as the rule's fault
            faults[rule] = f"{type(e).__name__}: {e}"
    return Result(float(bool(faults) and not any(faults.values())), faults)


def _raises(kind: type[Exception], function: Callable[[], object]) -> Callable[[], bool]:
    def holds() -> bool:
        try:
            value = function()
        except kind:
            return True
        raise AssertionError(f"returned {value!r:.80}, {kind.__name__} was to be raised")

    return holds


def _is(function: Callable[[str], object], path: str, wanted: object) -> Callable[[], bool]:
    return lambda: function(path) == wanted and type(function(path)) is type(wanted)


def _rules(d: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    text = "héllo\n".encode()
    yield "a file is read", lambda: d.read_file("suite/text") == text
    yield "by ~ and from /", lambda: d.read_file("~/suite/text") == d.read_file("/home/user/suite/text") == text
    yield "through a link", lambda: d.read_file("suite/link") == text
    yield "through a linked folder", lambda: d.read_file("suite/way/inner/deep") == b""
    yield "an empty file is read", lambda: d.read_file("suite/empty") == b""
    yield "text is read", lambda: d.read_text("suite/text") == "héllo\n"
    yield "what is no text raises", _raises(ValueError, lambda: d.read_text("suite/latin"))
    yield "a limit holds", _raises(ValueError, lambda: d.read_file("suite/text", limit_bytes=6))
    yield "a limit that suffices", lambda: d.read_file("suite/text", limit_bytes=7) == text
    yield "what is absent raises", _raises(FileNotFoundError, lambda: d.read_file("suite/none"))
    yield "a dangling link is absent", _raises(FileNotFoundError, lambda: d.read_file("suite/dangling"))
    yield "a folder is no file", _raises(ValueError, lambda: d.read_file("suite/folder"))
    yield "a pipe is no file", _raises(ValueError, lambda: d.read_file("suite/pipe"))
    for path, there, is_folder in (
        ("suite/text", True, False),
        ("suite/folder", True, True),
        ("~/suite/folder", True, True),
        ("suite/way", True, True),
        ("/etc", True, True),
        ("suite/dangling", False, False),
        ("suite/none", False, False),
        ("suite/text/below", False, False),
    ):
        yield f"exists {path}", _is(d.exists, path, there)
        yield f"is_folder {path}", _is(d.is_folder, path, is_folder)
    kinds = {"text": "file", "folder": "folder", "link": "link", "dangling": "link", "pipe": "special"}
    for path, kind in kinds.items():
        yield f"stat of a {kind}, {path}", _is(lambda p: d.stat(p).kind, f"suite/{path}", kind)
    yield "stat has the size", lambda: d.stat("suite/text").size_bytes == len(text)
    yield "stat has the mode", lambda: d.stat("suite/text").mode == 0o640
    yield "stat has a link's target", lambda: (d.stat("suite/link").target, d.stat("suite/text").target) == ("text", "")
    yield "stat of nothing is None", lambda: d.stat("suite/none") is None and d.stat("suite/text/below") is None
    yield "a folder is listed", lambda: _names(d.list_directory("suite/folder")) == {"inner": {"deep": None}}
    yield "what is no folder is not", _raises(NotADirectoryError, lambda: d.list_directory("suite/text"))
    yield "nor what is absent", _raises(NotADirectoryError, lambda: d.list_directory("suite/none"))
    yield "a command's output", lambda: d.execute(["/bin/echo", "$HOME"]).output == "$HOME\n"
    yield "a line is the shell's", lambda: d.execute("echo $HOME; exit 3").output == "/home/user\n"
    yield "a command's code", lambda: d.execute("echo $HOME; exit 3").returncode == 3
    yield "it runs as the user", lambda: d.execute(["/usr/bin/id", "-u"]).output == "1000\n"
    yield "the screen is PNG", lambda: d.screenshot().startswith(b"\x89PNG\r\n\x1a\n")
    yield "windows are listed", lambda: all({"id", "title", "class", "pid"} <= set(w) for w in d.windows())
    yield "the tree is XML", lambda: d.accessibility().lstrip().startswith("<")
    yield "the clipboard", lambda: d.clipboard() == "copied"
    yield "a browser's pages", lambda: [t["url"] for t in d.browser_targets()] == ["about:suite"]
    evaluate = ("Runtime.evaluate", {"expression": "3+4"})
    yield "a call", lambda: d.cdp(*evaluate)["result"]["value"] == 7
    yield "a call of a page", lambda: d.cdp(*evaluate, target="page-1")["result"]["value"] == 7
    yield "a call that is refused", _raises(ValueError, lambda: d.cdp("No.such"))
    yield "a page that is not there", _raises(LookupError, lambda: d.cdp(*evaluate, target="page-2"))
    yield "no browser at all", _raises(ConnectionRefusedError, lambda: d.browser_targets(port=9))
    yield "nor for a call", _raises(ConnectionRefusedError, lambda: d.cdp(*evaluate, port=9))
    yield "the last action", lambda: d.last_action == "DONE"


def _names(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {os.path.basename(str(x["name"])): _names(x) if x["type"] == "directory" else None for x in tree["children"]}
