"""Checks of files and folders, each a function of the verifier `example_files`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drums_core.abc import VerifiedDesktop


@dataclass(frozen=True)
class Result:
    """A score, with what it rests on."""

    score: float
    evidence: dict[str, Any]
    notes: str = ""


def renamed_folder(desktop: VerifiedDesktop, task: Mapping[str, Any], *, old: str, new: str) -> Result:
    """1 when there is a folder `new` and nothing at `old` any more; a copy is no renaming."""
    found = {"old_exists": desktop.exists(old), "new_is_folder": desktop.is_folder(new)}
    done = found["new_is_folder"] and not found["old_exists"]
    return Result(float(done), found, f"task {task['id']}")


async def file_lines(desktop: VerifiedDesktop, task: Mapping[str, Any], *, path: str, lines: list[str]) -> float:
    """The part of `lines` that a text file has, in any order; 0 when it is not there."""
    try:
        text = desktop.read_file(path).decode()
    except (FileNotFoundError, ValueError):  # absent, a folder, or no text: the agent's doing
        return 0.0
    present = set(text.splitlines())
    return sum(line in present for line in lines) / len(lines)


def window_open(desktop: VerifiedDesktop, task: Mapping[str, Any], *, title: str) -> bool:
    """Whether some window has `title` in its title."""
    return any(title in window["title"] for window in desktop.windows())
