#!/usr/bin/python3 -I
"""Prints the accessibility tree, or a terminal's text, as OSWorld's server has them. Runs as the user.

It is a program of its own, because the libraries that ask the accessibility bus keep threads and connections, and
because everything they answer is of the agent's making: another process could not be trusted any more afterwards.
Whatever a program of the desktop says, this comes to an end: depth, width, number of nodes, length and time are
bounded, and where something was left out the root says so in `truncated`. A program that does not answer costs its
part.

    a11y.py tree [whole]        the tree of all applications
    a11y.py terminal [whole]    the text of the active GNOME terminal's tab with the focus, as JSON; null without one

The first line is a JSON object: `unanswered` lists the programs that did not answer. `whole` is for a checker, who
must not take what was left out for evidence: programs are given more time, and where something is missing all the same,
this ends with 1 and says what on standard error.
"""

import contextlib
import json
import re
import sys
import time

import gi

gi.require_version("Atspi", "2.0")
from gi.repository import Atspi, GLib  # noqa: E402 - its version must be said before

_NAMESPACES = {
    "st": "https://accessibility.ubuntu.example.org/ns/state",
    "attr": "https://accessibility.ubuntu.example.org/ns/attributes",
    "cp": "https://accessibility.ubuntu.example.org/ns/component",
    "doc": "https://accessibility.ubuntu.example.org/ns/document",
    "docattr": "https://accessibility.ubuntu.example.org/ns/document/attributes",
    "txt": "https://accessibility.ubuntu.example.org/ns/text",
    "val": "https://accessibility.ubuntu.example.org/ns/value",
    "act": "https://accessibility.ubuntu.example.org/ns/action",
}
_MAX_DEPTH = 50
_MAX_WIDTH = 1024
_MAX_NODES = 30_000
_MAX_BYTES = 6 << 20
_MAX_TEXT = 200_000
_MAX_VALUE = 8192
_TIME_S, _PATIENT_TIME_S = 20.0, 60.0
_CALL_MS, _PATIENT_CALL_MS = 800, 10_000
# A spreadsheet's table has a child for each cell there could be; beyond these nothing was ever shown.
_MAX_BLANK = 500

# Characters that no XML document may hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Applications that an image presents under another name, in lines of NAME=other name; root's file, as the image's are.
_NAMES = {}
with contextlib.suppress(FileNotFoundError), open("/opt/drums/application-names", encoding="utf-8") as _lines:
    _NAMES.update(line.rstrip("\n").split("=", 1) for line in _lines if "=" in line)
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_TERMINAL = "gnome-terminal-server"


class _Full(Exception):
    """A bound was reached."""


class _NotWhole(Exception):
    """Something is missing in an answer that is to be whole."""


class _Asking:
    """Calls what other programs answer, and remembers those that did not.

    It goes by how long a call took, and not by its error: for some the library makes up an answer.

    Args:
        whole: what is not answered ends the program.
    """

    def __init__(self, whole):
        self.whole = whole
        self.limit_ms = _PATIENT_CALL_MS if whole else _CALL_MS
        self.application = None  # the one that is looked at; None is the registry of them
        self.unanswered = []

    def __call__(self, function, *arguments):
        """What a call returns.

        Raises:
            GLib.Error: that is the answer, or there is none.
            _NotWhole: there is none, and there must be.
        """
        began = time.monotonic()
        try:
            return function(*arguments)
        finally:
            # A clock's tick less: the time-out is the library's.
            if (time.monotonic() - began) * 1000 >= self.limit_ms - 20:
                self.missed(_said_of(self.application))

    def missed(self, program):
        """Notes that a program did not answer."""
        if program not in self.unanswered:
            self.unanswered.append(program)
        if self.whole:
            raise _NotWhole(f"{program} does not answer")


_ask = _Asking(whole=sys.argv[2:] == ["whole"])


def _process(application):
    """An application's process number and name: the bus knows it, and the application need not answer."""
    try:
        pid = application.get_process_id()
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return pid, file.read().strip()
    except (GLib.Error, OSError):
        return None


def _said_of(application):
    """An application in words."""
    if application is None:
        return "the accessibility registry"
    process = _process(application)
    return f"{process[1]} (process {process[0]})" if process else "an application"


class _Writer:
    """Collects XML, and refuses to collect too much of it."""

    def __init__(self):
        self._parts = []
        self._size = 0
        self._nodes = 0
        self._deadline = time.monotonic() + (_PATIENT_TIME_S if _ask.whole else _TIME_S)
        self.truncated = ""

    def check(self):
        """Raises `_Full` when there is no room or no time for another node."""
        self._nodes += 1
        for what, full in (
            ("nodes", self._nodes > _MAX_NODES),
            ("size", self._size > _MAX_BYTES),
            ("time", time.monotonic() > self._deadline),
        ):
            if full:
                self.truncated = what
                raise _Full

    def write(self, text):
        """Adds a piece; it is always kept, so that every element that was opened can be closed."""
        self._parts.append(text)
        self._size += len(text.encode("utf-8", "replace"))

    def document(self):
        """All of it, in the root element."""
        names = "".join(f' xmlns:{prefix}="{uri}"' for prefix, uri in _NAMESPACES.items())
        cut = f' truncated="{self.truncated}"' if self.truncated else ""
        return f"<desktop-frame{names}{cut}>{''.join(self._parts)}</desktop-frame>"


def _escape(text):
    text = _FORBIDDEN.sub("", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # As written by others' XML libraries: a line break in an attribute would be read as a space.
    return text.replace('"', "&quot;").replace("\r", "&#13;").replace("\n", "&#10;").replace("\t", "&#9;")


def _local_name(text):
    """A text as the part of an XML name behind a prefix or a role's element name."""
    name = _NO_NAME.sub("-", text.strip().replace(" ", "-"))
    return name if name and (name[0].isalpha() or name[0] == "_") else f"_{name}"


def _interfaces(node):
    with contextlib.suppress(GLib.Error):
        return set(_ask(node.get_interfaces))
    return set()


def _states(node):
    return [state.value_nick.replace("-", "_") for state in _ask(node.get_state_set).get_states()]


def _text_of(node, interfaces):
    if "Text" not in interfaces:
        return ""
    with contextlib.suppress(GLib.Error):
        return _read_text(node)
    return ""


def _read_text(node):
    count = _ask(Atspi.Text.get_character_count, node)
    text = _ask(Atspi.Text.get_text, node, 0, min(count, _MAX_TEXT)) or ""
    # Stands for something that is no text.
    return text.replace("\ufffc", "").replace("\ufffd", "")


def _attributes(node, interfaces, states):
    """The element's attributes by their names with prefixes; the first one of each name counts."""
    found = {"name": _ask(node.get_name) or ""}
    for state in states:
        found[f"st:{_local_name(state)}"] = "true"
    with contextlib.suppress(GLib.Error):
        for name, value in (_ask(node.get_attributes) or {}).items():
            if name:
                found.setdefault(f"attr:{_local_name(name)}", value or "")
    if "Component" in interfaces and "visible" in states and "showing" in states:
        with contextlib.suppress(GLib.Error):
            box = _ask(Atspi.Component.get_extents, node, Atspi.CoordType.SCREEN)
            found["cp:screencoord"] = str((box.x, box.y))
            found["cp:size"] = str((box.width, box.height))
    if "Image" in interfaces:
        found["image"] = "true"
    if "Selection" in interfaces:
        found["selection"] = "true"
    if "Value" in interfaces:
        for name, ask in (
            ("value", Atspi.Value.get_current_value),
            ("min", Atspi.Value.get_minimum_value),
            ("max", Atspi.Value.get_maximum_value),
            ("step", Atspi.Value.get_minimum_increment),
        ):
            with contextlib.suppress(GLib.Error):
                found[f"val:{name}"] = str(_ask(ask, node))
    if "Action" in interfaces:
        with contextlib.suppress(GLib.Error):
            for index in range(min(_ask(Atspi.Action.get_n_actions, node), 64)):
                name = _NO_NAME.sub("-", (_ask(Atspi.Action.get_action_name, node, index) or "").replace(" ", "-"))
                found.setdefault(f"act:{name}_desc", _ask(Atspi.Action.get_action_description, node, index) or "")
                found.setdefault(f"act:{name}_kb", _ask(Atspi.Action.get_key_binding, node, index) or "")
    return found


def _role(node):
    with contextlib.suppress(GLib.Error):
        return (_ask(node.get_role_name) or "").strip() or "unknown"
    return "unknown"


def _write_node(out, node, depth, in_spreadsheet):
    """One element with all below it. A program that does not answer costs its part of the tree, and no more."""
    out.check()
    try:
        # One call, and so the first: the next makes one for each interface, and each waits for a program that hangs.
        states = _states(node)
        interfaces = _interfaces(node)
        attributes = _attributes(node, interfaces, states)
    except GLib.Error:
        return
    role = _role(node)
    name = _local_name(role)
    if depth == 1:
        attributes["name"] = _NAMES.get(attributes.get("name", ""), attributes.get("name", ""))
    text = "".join(f' {key}="{_escape(value[:_MAX_VALUE])}"' for key, value in attributes.items())
    out.write(f"<{name}{text}>{_escape(_text_of(node, interfaces))}")
    try:
        if depth < _MAX_DEPTH:
            in_spreadsheet = in_spreadsheet or role == "document spreadsheet"
            children = _shown_cells(node) if in_spreadsheet and role == "table" else _children(node)
            for child in children:
                _write_node(out, child, depth + 1, in_spreadsheet)
    finally:
        out.write(f"</{name}>")


def _children(node):
    try:
        count = _ask(node.get_child_count)
    except GLib.Error:
        return
    for index in range(min(count, _MAX_WIDTH)):
        with contextlib.suppress(GLib.Error):
            child = _ask(node.get_child_at_index, index)
            if child is not None:
                yield child


def _shown_cells(table):
    """The cells of a spreadsheet that can be seen: one block of rows and columns, looked for from the top left."""
    try:
        rows, columns = _ask(Atspi.Table.get_n_rows, table), _ask(Atspi.Table.get_n_columns, table)
        first = None
        for row in range(rows):
            shown = 0
            for column in range(first or 0, columns):
                cell = _ask(table.get_child_at_index, row * columns + column)
                if cell is not None and "showing" in _states(cell):
                    first = column if first is None else first
                    shown += 1
                    yield cell
                elif first is not None or column >= _MAX_BLANK:
                    break
            if not shown and (first is not None or row >= _MAX_BLANK):
                return
    except GLib.Error:
        return


def _applications():
    """Every application; while one is looked at, what is not answered counts as its."""
    desktop = Atspi.get_desktop(0)
    count = -1  # what the library says when there is no answer and no error
    with contextlib.suppress(GLib.Error):
        count = _ask(desktop.get_child_count)
    if count < 0:
        _ask.missed(_said_of(None))
    for index in range(min(count, _MAX_WIDTH)):
        _ask.application = None
        with contextlib.suppress(GLib.Error):
            _ask.application = _ask(desktop.get_child_at_index, index)
        if _ask.application is not None:
            yield _ask.application


def _tree():
    out = _Writer()
    with contextlib.suppress(_Full):
        for application in _applications():
            _write_node(out, application, 1, in_spreadsheet=False)
    if out.truncated and _ask.whole:
        raise _NotWhole(f"the tree is cut off: {out.truncated}")
    return out.document()


def _terminal():
    """The text of the focused tab of GNOME's terminal when its window is the active one; None otherwise.

    It is called when such a terminal runs. Other applications are not asked: they may hang.
    """
    seen = False
    for application in _applications():
        process = _process(application)
        if process is not None and process[1] != _TERMINAL[:15]:  # the kernel cuts names
            continue
        try:
            if _ask(application.get_name) != _TERMINAL:
                continue
            seen = True
            frames = [frame for frame in _children(application) if "active" in _states(frame)]
            tabs = [tab for frame in frames for tab in _below(frame) if "focused" in _states(tab)]
            if len(tabs) == 1:
                return _read_text(tabs[0]).rstrip()
        except GLib.Error:
            _ask.missed(_said_of(application))
    if not seen:
        _ask.missed(_TERMINAL)
    return None


def _below(node, depth=0):
    """The terminals below a window."""
    for child in _children(node) if depth < _MAX_DEPTH else ():
        if _role(child) == "terminal":
            yield child
        yield from _below(child, depth + 1)


def main():
    """Prints what the argument asks for."""
    Atspi.init()
    Atspi.set_timeout(_ask.limit_ms, _ask.limit_ms)
    try:
        answer = _tree() if sys.argv[1] == "tree" else json.dumps(_terminal())
    except _NotWhole as error:
        sys.exit(str(error))
    head = json.dumps({"unanswered": _ask.unanswered})
    sys.stdout.buffer.write(f"{head}\n{answer}".encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
