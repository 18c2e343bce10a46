"""Attacks by the file that a checker opens: archives that leave their folder, documents that grow without an end.

By OSWorld's own functions in the worker that a desktop's check has; the file comes from a small guest server of the
test's, as the agent's does from its desktop's.
"""

from __future__ import annotations

import importlib
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from requires import requires
from test_osworld_checker import Bench, Guest, says

from drums.errors import CheckerError
from drums_core.config import HostConfig
from drums_osworld import checker as osworld
from drums_osworld.checker import OSWorldChecker
from drums_verifiers import worker_main
from drums_verifiers.worker import LIMITS, Kind
from drums_verifiers.workers import Workers

needs_root = requires("root")
EXPECTED = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main/set/"
Tar = tarfile.TarFile


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """With a mirror of this test's, and a worker that is soon out of memory."""
    (tmp_path / "mirror" / "set").mkdir(parents=True)
    checker = OSWorldChecker(HostConfig(checker_timeout_s=60, file_mirror=tmp_path / "mirror"))
    limits = attrs.evolve(LIMITS, memory_bytes=512 << 20)
    checker._workers = Workers(Kind(60, limits, preload=osworld._PRELOAD), 0)
    return Bench(tmp_path, checker=checker)


async def scored(bench: Bench, function: str, kind: str, answer: bytes, expected: bytes, **options: Any) -> float:
    """The score of a file of the agent's, beside the expected one."""
    (bench.scratch / "mirror" / "set" / f"gold.{kind}").write_bytes(expected)
    evaluator = {
        "func": function,
        "result": {"type": "vm_file", "path": f"/home/user/answer.{kind}", "dest": f"answer.{kind}"},
        "expected": {"type": "cloud_file", "path": f"{EXPECTED}gold.{kind}", "dest": f"gold.{kind}"},
        "options": options,
    }
    return await bench.score(evaluator, Guest(says(""), {f"/home/user/answer.{kind}": answer}))


# --- archives


def add(tar: Tar, name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size, member.mode = kind, link, len(data), 0o755
    tar.addfile(member, io.BytesIO(data))


def tar(*fill: Callable[[Tar], None]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for part in fill:
            part(archive)
    return made.getvalue()


def named(name: str, data: bytes) -> Callable[[Tar], None]:
    return lambda archive: add(archive, name, data)


def linked(name: str, link: str, kind: bytes = tarfile.SYMTYPE) -> Callable[[Tar], None]:
    return lambda archive: add(archive, name, kind=kind, link=link)


def too_long_to_follow(name: str, data: bytes) -> Callable[[Tar], None]:
    """A member behind a link whose real path is longer than a path may be: Python's own filter gives it up there."""

    def fill(archive: Tar) -> None:
        folder, path, short = "d" * 247, "", "abcdefghijklmnop"
        for letter in short:
            add(archive, os.path.join(path, folder), kind=tarfile.DIRTYPE)
            add(archive, os.path.join(path, letter), kind=tarfile.SYMTYPE, link=folder)
            path = os.path.join(path, folder)
        up = "/".join([*short, "l" * 254])
        add(archive, up, kind=tarfile.SYMTYPE, link="../" * len(short))
        add(archive, "out", kind=tarfile.SYMTYPE, link=f"{up}/..")
        add(archive, f"out/{name}", data)

    return fill


RIGHT, WRONG = b"the right text\n", b"whatever the agent likes\n"
GOLD = tar(named("a.txt", RIGHT))
FORGED = tar(named("a.txt", WRONG))  # in the expected one's place it makes the wrong answer right
MINE = named("a.txt", WRONG)
ARCHIVES: Mapping[str, bytes] = {
    "above": tar(named("../gold.tar", FORGED), MINE),
    "above, unpacked": tar(named("../gold_gold/a.txt", WRONG), MINE),
    "link to a folder": tar(linked("up", ".."), named("up/gold.tar", FORGED), MINE),
    "absolute link": tar(linked("up", "/drums/work/cache"), named("up/gold.tar", FORGED), MINE),
    "hard link": tar(linked("up", "../gold.tar", tarfile.LNKTYPE), named("up", FORGED), MINE),
    "link to the answer": tar(linked("a.txt", "../gold_gold/a.txt")),
    "too long to follow": tar(too_long_to_follow("gold.tar", FORGED), MINE),
    "device": tar(linked("a.txt", "", tarfile.CHRTYPE)),
}


@needs_root
@pytest.mark.parametrize("name", ARCHIVES)
async def test_archive_that_leaves_its_folder(bench: Bench, name: str) -> None:
    """It is refused, so there is no score. Each would make the wrong answer right."""
    with pytest.raises(CheckerError, match=r"raised \w*(Destination|SpecialFile)Error"):
        await scored(bench, "compare_archive", "tar", ARCHIVES[name], GOLD)


@needs_root
async def test_honest_archives(bench: Bench) -> None:
    """They score what they hold, one with a link beside its file, too; an absolute name is one inside the folder."""
    absolute = tar(named("/drums/work/cache/gold.tar", FORGED), MINE)
    assert await scored(bench, "compare_archive", "tar", absolute, GOLD) == 0.0
    for fill, score in ((named("a.txt", RIGHT), 1.0), (MINE, 0.0)):
        assert await scored(bench, "compare_archive", "tar", tar(fill), GOLD) == score
    both = tar(named("a.txt", RIGHT), named("b.txt", RIGHT))
    with_link = tar(named("a.txt", RIGHT), linked("b.txt", "a.txt"))
    assert await scored(bench, "compare_archive", "tar", with_link, both) == 1.0


@needs_root
async def test_zip_that_leaves_its_folder(bench: Bench) -> None:
    """Such members are left out: the rest of the archive is judged."""
    gold, forged = zipped({"a.txt": RIGHT}), zipped({"a.txt": WRONG})
    names = {"../gold.zip": forged, "/drums/work/cache/gold.zip": forged, "../gold_gold/a.txt": WRONG}
    assert await scored(bench, "compare_archive", "zip", zipped({**names, "a.txt": WRONG}), gold) == 0.0
    assert await scored(bench, "compare_archive", "zip", gold, gold) == 1.0


def test_a_python_without_filters_unpacks_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """3.11.3 and before, where any member may leave the folder."""
    for name in ("extractall", "extract", "extraction_filter"):
        monkeypatch.setattr(tarfile.TarFile, name, getattr(tarfile.TarFile, name, None), raising=False)
    monkeypatch.delattr(tarfile, "data_filter")
    worker_main._guard_archives()
    with tarfile.open(fileobj=io.BytesIO(GOLD)) as archive, pytest.raises(RuntimeError, match=r"3\.11\.4 is needed"):
        archive.extractall(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- documents


def zipped(parts: Mapping[str, bytes], *, zeros_in: str = "", zeros: int = 0) -> bytes:
    """A zip archive; one of its parts may go on with zeros, which take a thousandth of their size."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in parts.items():
            with archive.open(name, "w", force_zip64=True) as part:
                part.write(data)
                for _ in range(zeros >> 20 if name == zeros_in else 0):
                    part.write(bytes(1 << 20))
    return made.getvalue()


def parts_of(document: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(document)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def table(value: object, *, at: str = "A1") -> bytes:
    book, made = importlib.import_module("openpyxl").Workbook(), io.BytesIO()
    book.active["A1"] = "name"
    book.active[at] = value
    book.save(made)
    return made.getvalue()


def text(words: str) -> bytes:
    document, made = importlib.import_module("docx").Document(), io.BytesIO()
    document.add_paragraph(words)
    document.save(made)
    return made.getvalue()


LAUGHS = b'<!DOCTYPE a [<!ENTITY a "x">' + b"".join(
    b'<!ENTITY %c "%s">' % (x, b"&%c;" % (x - 1) * 10) for x in b"bcdefghijk"
)
SAME_DATA = {"rules": [{"type": "sheet_data", "sheet_idx0": 0, "sheet_idx1": "EI0"}]}


def bomb(kind: str, how: str) -> bytes:
    parts = parts_of(table("right") if kind == "xlsx" else text("right"))
    if how == "zeros":
        return zipped(parts, zeros_in="[Content_Types].xml", zeros=768 << 20)
    parts[{"xlsx": "xl/worksheets/sheet1.xml", "docx": "word/document.xml"}[kind]] = LAUGHS + b"]><a>&k;</a>"
    return zipped(parts)


@needs_root
@pytest.mark.parametrize("kind", ["xlsx", "docx"])
async def test_documents_that_grow(bench: Bench, kind: str) -> None:
    """Too much for the worker's memory is no score; what the parser refuses is no document, and a 0 as in OSWorld."""
    make: Callable[[str], bytes] = table if kind == "xlsx" else text
    function, options = ("compare_table", SAME_DATA) if kind == "xlsx" else ("compare_docx_files", {})
    gold = make("right")
    assert await scored(bench, function, kind, make("right"), gold, **options) == 1.0
    assert await scored(bench, function, kind, make("wrong"), gold, **options) == 0.0
    assert await scored(bench, function, kind, bomb(kind, "entities"), gold, **options) == 0.0
    with pytest.raises(CheckerError, match="for want of memory"):
        await scored(bench, function, kind, bomb(kind, "zeros"), gold, **options)


@needs_root
async def test_table_with_one_cell_far_away(bench: Bench) -> None:
    """A small file that a table of sixteen thousand million cells is made of."""
    far = table("right", at="XFD1048576")
    assert len(far) < 10_000
    with pytest.raises(CheckerError, match="for want of memory"):
        await scored(bench, "compare_table", "xlsx", far, table("right"), **SAME_DATA)
