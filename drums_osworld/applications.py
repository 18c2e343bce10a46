"""Which programs of an image a task needs: a rule over its document, no list of tasks.

What its steps launch and open, what it says that it is about, and what its checker asks in the desktop. An image that
lacks one of them does not suit the task; the task stays supported.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drums_core.model import SetupStep
from drums_osworld.support import probes

# By the words of `related_apps`; the others (`os`, `pdf`, …) name no program.
_RELATED = {
    "browser": "google-chrome",
    "calc": "libreoffice",
    "chrome": "google-chrome",
    "code": "code",
    "gimp": "gimp",
    "impress": "libreoffice",
    "libreoffice": "libreoffice",
    "thunderbird": "thunderbird",
    "vlc": "vlc",
    "vscode": "code",
    "writer": "libreoffice",
}
_BY_ENDING = {
    ".docx": "libreoffice",
    ".mp4": "vlc",
    ".ods": "libreoffice",
    ".odt": "libreoffice",
    ".pdf": "evince",
    ".pptx": "libreoffice",
    ".xls": "libreoffice",
    ".xlsx": "libreoffice",
}
# What a checker's getter reads of, and what its commands call.
_BY_GETTER = {"vm_terminal_output": "gnome-terminal", "vm_wallpaper": "gsettings", "vscode_config": "code"}
_CALLED = ("gsettings", "pactl", "xdg-mime")
_EVERYWHERE = frozenset(("pkill", "killall", "sh"))


def needed_applications(
    config: Sequence[SetupStep], evaluator: Mapping[str, Any], related: Iterable[object] = ()
) -> tuple[str, ...]:
    """The executables that an image must have for a task, sorted.

    Args:
        config: its set-up.
        evaluator: its evaluator's document.
        related: its `related_apps`.
    """
    found = set()
    for word in re.findall(r"[a-z]+", " ".join(str(x) for x in related).lower().replace("vs_code", "vscode")):
        if word in _RELATED:
            found.add(_RELATED[word])
    for kind, parameters in steps_of(config, evaluator):
        if kind == "launch":
            found.add(_program(parameters.get("command")))
        elif kind == "open":
            found.add(_BY_ENDING.get(os.path.splitext(str(parameters.get("path")))[1].lower(), ""))
    for getter in getters_of(evaluator):
        found.add(_BY_GETTER.get(getter, ""))
    for text, _ in probes(evaluator):
        found |= {name for name in _CALLED if re.search(rf"\b{name}\b", text)}
    return tuple(sorted(found - _EVERYWHERE - {""}))


def steps_of(config: Sequence[SetupStep], evaluator: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The type and parameters of each step of a task, those before its check included."""
    found: list[tuple[str, Mapping[str, Any]]] = [(step.type, step.parameters) for step in config]
    later = evaluator.get("postconfig")
    for step in later if isinstance(later, list) else ():
        if isinstance(step, Mapping) and isinstance(step.get("parameters"), Mapping):
            found.append((str(step.get("type")), step["parameters"]))
    return found


def getters_of(evaluator: Mapping[str, Any]) -> list[str]:
    """The types of an evaluator's getters."""
    found = []
    for key in ("result", "expected"):
        value = evaluator.get(key)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                found.append(str(one.get("type")))
    return found


def _program(command: object) -> str:
    """The name of what a command line starts, past settings of its environment."""
    words = command.split() if isinstance(command, str) else list(command) if isinstance(command, Sequence) else []
    for word in words:
        if not re.match(r"\w+=", str(word)):
            return os.path.basename(str(word))
    return ""
