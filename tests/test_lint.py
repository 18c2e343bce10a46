"""Types, lint and format are clean: run as tests, so that one command holds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "mypy": ("mypy",),
    "ruff check": ("ruff", "check", "."),
    # Examples in prose are laid out for the page.
    "ruff format": ("ruff", "format", "--check", "--exclude", "*.md", "."),
}


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_clean(argv: tuple[str, ...]) -> None:
    """The tool has nothing to say; mypy is strict by `pyproject.toml`."""
    done = subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def test_mypy_is_strict() -> None:
    """Strictness and the packages it covers stand where mypy reads them."""
    text = (ROOT / "pyproject.toml").read_text()
    assert "[tool.mypy]\nstrict = true\n" in text
    for package in ("drums", "drums_core", "drums_gates", "drums_verifiers", "drums_osworld", "tests"):
        assert f'"{package}"' in text.partition("[tool.mypy]")[2].partition("exclude")[0]
