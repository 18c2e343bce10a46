"""The functions on a stand-in for a desktop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from drums_verifier_example import files

TASK = {"id": "0", "instruction": "Rename a to b."}


class Desktop:
    """Holds files by path; a folder is None."""

    def __init__(self, **content: bytes | None) -> None:
        self.content = content

    def exists(self, path: str) -> bool:
        return path in self.content

    def is_folder(self, path: str) -> bool:
        return self.exists(path) and self.content[path] is None

    def read_file(self, path: str) -> bytes:
        if path not in self.content:
            raise FileNotFoundError(path)
        content = self.content[path]
        if content is None:
            raise ValueError(path)
        return content

    def windows(self) -> list[dict[str, Any]]:
        return [{"title": "~/a - Editor"}]


@pytest.mark.parametrize(
    ("desktop", "score"),
    [
        (Desktop(b=None), 1.0),
        (Desktop(a=None), 0.0),  # untouched
        (Desktop(a=None, b=None), 0.0),  # copied
        (Desktop(b=b"a file"), 0.0),
        (Desktop(), 0.0),
    ],
)
def test_renamed_folder(desktop: Any, score: float) -> None:
    result = files.renamed_folder(desktop, TASK, old="a", new="b")
    assert result.score == score and set(result.evidence) == {"old_exists", "new_is_folder"}


@pytest.mark.parametrize(
    ("content", "score"), [(b"x\ny\n", 1.0), (b"y\nz", 0.5), (b"", 0.0), (b"\xff", 0.0), (None, 0.0)]
)
def test_file_lines(content: bytes | None, score: float) -> None:
    desktop: Any = Desktop(a=content)
    assert asyncio.run(files.file_lines(desktop, TASK, path="a", lines=["x", "y"])) == score
    assert asyncio.run(files.file_lines(desktop, TASK, path="absent", lines=["x"])) == 0.0


def test_window_open() -> None:
    desktop: Any = Desktop()
    assert files.window_open(desktop, TASK, title="~/a") and not files.window_open(desktop, TASK, title="~/b")
