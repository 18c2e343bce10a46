"""The windows of the desktop as the window manager lists them, and whether one of them shows a file.

`listed` runs in a process of the user's: what answers on the display is of the agent's making.
"""

import os
import re

_MAX_WINDOWS = 1024
_MAX_TITLE = 4096
# Of shorter names, a window that was there before the file was opened proves nothing: `a` is in many titles.
_TELLING = 3


class DisplayRefused(Exception):
    """The display is not there, or does not answer as a display does."""


def listed():
    """Every window: `id` (as wmctrl takes it), `title`, `class` (instance and class), `pid`, place, size, `active`.

    Raises:
        DisplayRefused: the display does not answer.
    """
    from Xlib import X, display, error

    try:
        connection = display.Display(os.environ.get("DISPLAY"))
        try:
            root = connection.screen().root
            active = _property(connection, root, "_NET_ACTIVE_WINDOW", X.AnyPropertyType) or [0]
            found = []
            for number in list(_property(connection, root, "_NET_CLIENT_LIST", X.AnyPropertyType) or [])[:_MAX_WINDOWS]:
                try:
                    found.append(_describe(connection, root, int(number), active[0], X))
                except error.XError:
                    continue  # it has closed meanwhile
            return found
        finally:
            connection.close()
    except (error.DisplayError, error.ConnectionClosedError, error.XError, OSError, ValueError, TypeError) as e:
        raise DisplayRefused(f"the display does not list its windows: {e}") from e


def _property(connection, window, name, kind):
    value = window.get_full_property(connection.intern_atom(name), kind)
    return value.value if value is not None else None


def _describe(connection, root, number, active, x):
    window = connection.create_resource_object("window", number)
    title = _property(connection, window, "_NET_WM_NAME", x.AnyPropertyType)
    if title is None:
        title = window.get_wm_name() or ""
    if isinstance(title, bytes):
        title = title.decode("utf-8", "replace")
    size = window.get_geometry()
    place = window.translate_coords(root, 0, 0)
    process = _property(connection, window, "_NET_WM_PID", x.AnyPropertyType)
    return {
        "id": f"0x{number:08x}",
        "title": str(title)[:_MAX_TITLE],
        "class": [str(part) for part in window.get_wm_class() or ()],
        "pid": int(process[0]) if process else None,
        # The root's place in the window's eyes.
        "x": -place.x,
        "y": -place.y,
        "width": size.width,
        "height": size.height,
        "active": number == active,
    }


def shows(title, name):
    """Whether a title names a file: its whole name, and not the end of another's (`a.txt` is not `data.txt`)."""
    return re.search(rf"(?<![\w.\-]){re.escape(name)}(?!\w|\.\w)", title) is not None


def opened(found, before, name, path=""):
    """The window that shows what was opened, None while there is none.

    Args:
        found: the windows as of now.
        before: the windows before it was opened.
        name: the file's name, or a program's or title's.
        path: the file's whole path; empty for a program.
    """
    known = {window["id"]: window["title"] for window in before}
    stem = os.path.splitext(name)[0]
    for window in found:
        title = window["title"]
        is_new = known.get(window["id"]) != title
        if path:
            whole = shows(title, name) and (is_new or len(name) >= _TELLING or path in title)
            # Some programs leave the ending away. That is sought in new titles alone.
            part = is_new and stem != name and len(stem) >= _TELLING and shows(title, stem)
            if whole or part:
                return window
        elif is_new or len(name) >= _TELLING:
            names = [part.lower() for part in window["class"]]
            if name.lower() in names or shows(title.lower(), name.lower()):
                return window
    return None
