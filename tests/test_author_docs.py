"""The pages for plugin authors: each one's complete example, with its test, is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from drums_core.abc import VerifiedDesktop

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("verifiers.md", "custom-gates.md", "setup-steps.md")
SECTIONS = ("Shape", "Lifetime and concurrency", "Errors", "A complete example")


@pytest.mark.parametrize("page", PAGES)
def test_the_example_passes_its_own_test(page: str, tmp_path: Path) -> None:
    """Every file of the page, written where it says, and pytest run on them; warnings are errors."""
    text = (DOCS / page).read_text(encoding="utf-8")
    files = re.findall(r"^```python\n# file: (\w+\.py)\n(.*?)^```", text, re.M | re.S)
    assert len(files) == len(re.findall(r"^```python", text, re.M)) >= 2
    for name, code in files:
        (tmp_path / name).write_text(code)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        str(tmp_path),
    ]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    (entry,) = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    ((group, names),) = tomllib.loads(entry)["project"]["entry-points"].items()
    assert group in ("drums.gates", "drums.setup_steps", "drums_verifier")
    assert all((tmp_path / f"{module}.py").is_file() for module in names.values())


@pytest.mark.parametrize("page", PAGES)
def test_every_page_says_the_same_things(page: str) -> None:
    """Shape, lifetime, concurrency, errors, and a whole example."""
    headings = re.findall(r"^## (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.M)
    assert [h for h in headings if h in SECTIONS] == list(SECTIONS)


def test_the_whole_view_is_documented() -> None:
    """Each name that a verifier may use."""
    text = (DOCS / "verifiers.md").read_text(encoding="utf-8")
    names = {n for n in dir(VerifiedDesktop) if not n.startswith("_")} | set(VerifiedDesktop.__annotations__)
    assert len(names) > 12 and not {n for n in names if not re.search(rf"`{n}\b", text)}
