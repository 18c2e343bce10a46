"""`docs/configuration.md` has every setting of a host, with its default and the variable that it takes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from drums_core import config, copies
from drums_core.config import HostConfig, load_config
from drums_core.image.software import Software
from drums_core.model import Limits
from drums_verifiers.worker import LIMITS

PAGE = (Path(__file__).parents[1] / "docs/configuration.md").read_text(encoding="utf-8")
KEYS = {f.name for f in attrs.fields(HostConfig)} | {f"limits.{f.name}" for f in attrs.fields(Limits)}
SOFTWARE = {f"software.{f.name}" for f in attrs.fields(Software)}


def rows(page: str) -> dict[str, list[str]]:
    """The cells behind each key: default, what, and the variable where there is one."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert len({key for key, *_ in cells}) == len(cells), "a key is there twice"
    return {key.strip("` "): rest for key, *rest in cells}


def value_of(key: str) -> Any:
    """The default."""
    of: Any = HostConfig()
    for part in key.split("."):
        of = getattr(of, part)
    return of


def faults(page: str) -> Iterator[str]:
    """Keys that are missing or are none, and those with another default."""
    table = rows(page)
    yield from (f"{key} is missing or no key" for key in sorted((KEYS | SOFTWARE) ^ set(table)))
    for key in sorted(KEYS & set(table)):
        told, default = table[key][0].strip("`"), value_of(key)
        if default is None or key == "limits":
            right = told == ("a table" if key == "limits" else "none")
        else:
            value = tomllib.loads(f"x = {told}")["x"]
            right = type(default)(value) == default and isinstance(value, bool) is isinstance(default, bool)
        if not right:
            yield f"{key}: {told}, it is {default!r}"


def test_every_key_with_its_default() -> None:
    """And no others."""
    assert list(faults(PAGE)) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("| `settle_s` | `5.0`", "| `settle_s` | `6.0`", "settle_s: 6.0, it is 5.0"),
        ("| `osworld` | none", "| `osworld` | `0`", "osworld: 0, it is None"),
        ("| `image` |", "| `picture` |", "image is missing or no key"),
        ("| `limits.pids` |", "| `limits.processes` |", "limits.pids is missing or no key"),
        ("| `software.source` |", "| `software.url` |", "software.source is missing or no key"),
    ],
)
def test_what_is_wrong_is_seen(old: str, new: str, fault: str) -> None:
    """A wrong default, a missing key."""
    assert old in PAGE and fault in list(faults(PAGE.replace(old, new)))


def test_the_variables() -> None:
    """Those that are read, and no others."""
    told = {key: re.findall(r"`(DRUMS_\w+)`", cells[-1]) for key, cells in rows(PAGE).items()}
    assert {k for k, v in told.items() if v} == config._SCALARS
    assert all(names == [f"DRUMS_{key.upper()}"] for key, names in told.items() if names)


def test_the_defaults_are_taken_as_a_file(tmp_path: Path) -> None:
    """The page's own values, written down, are the configuration of an empty file."""
    pairs = [(key, cells[0].strip("`")) for key, cells in rows(PAGE).items() if cells[0].startswith("`")]
    file = tmp_path / "drums.toml"
    file.write_text("".join(f"{key} = {text}\n" for key, text in pairs))
    assert load_config(file, environ={}) == HostConfig()


@pytest.mark.parametrize("page", ["configuration", "install"])
def test_the_software_that_is_shown(page: str, tmp_path: Path) -> None:
    """The examples are settings."""
    text = (Path(__file__).parents[1] / f"docs/{page}.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(\[\[software\]\]\n.*?)```", text, re.DOTALL)
    file = tmp_path / "drums.toml"
    file.write_text(example)
    (found,) = load_config(file, environ={}).software
    assert (found.image, found.packages, found.applications) == ("osworld", ("code",), ("code",))


def test_what_a_copy_takes() -> None:
    """The numbers in the paragraph on memory."""
    told = PAGE.replace("\n", " ")
    assert f"plus {copies.SPARE_MEMORY_BYTES >> 20} MiB of memory and {copies.SPARE_PIDS} processes" in told
    assert f"{LIMITS.memory_bytes >> 30} GiB" in told
