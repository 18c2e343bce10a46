"""`drums verifier new` and `drums verifier test`: the template passes, and what is wrong with a package is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from requires import requires

from drums.cli import cli
from drums.errors import ConfigError
from drums_core.testing.end_state import load_state
from drums_verifiers.live_trial import try_live
from drums_verifiers.package_trial import open_package, try_package
from drums_verifiers.scaffold import create_package


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A package fresh from the template."""
    create_package("demo", tmp_path / "demo")
    return tmp_path / "demo"


def invoke(*argv: str) -> Result:
    return CliRunner().invoke(cli, argv)


def checks_py(demo: Path) -> Path:
    return demo / "src/drums_verifier_demo/checks.py"


# --- new


def test_as_the_documents_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`drums verifier new demo && drums verifier test demo`."""
    monkeypatch.chdir(tmp_path)
    made = invoke("verifier", "new", "demo")
    assert made.exit_code == 0 and "demo/src/drums_verifier_demo/checks.py" in made.stdout.splitlines()
    tried = invoke("verifier", "test", "demo")
    assert tried.exit_code == 0, tried.output
    assert "ok      note_saved, solution: it scores 1.0" in tried.stdout and "BROKEN" not in tried.stdout
    told = json.loads(invoke("verifier", "test", "demo", "--json").stdout)["checks"]
    assert len(told) == 12 and all(x["ok"] for x in told)
    listed = json.loads(invoke("verifier", "new", "other", "--json").stdout)
    assert listed["folder"] == "other" and "other/src/drums_verifier_other/checks.py" in listed["files"]


def test_every_place_of_a_name_is_filled(tmp_path: Path) -> None:
    """Also of one with dashes; nothing of the template shows."""
    for path in create_package("my-own_checks2", tmp_path / "deep" / "folder"):
        assert "@" not in path.read_text().replace("@dataclass", "") and path.suffix != ".tmpl"
    text = (tmp_path / "deep/folder/pyproject.toml").read_text()
    assert 'my-own_checks2 = "drums_verifier_my_own_checks2.checks"' in text
    assert (tmp_path / "deep/folder/src/drums_verifier_my_own_checks2/checks.py").is_file()


@pytest.mark.parametrize("name", ["", "Demo", "1a", "a b", "a/b", "../a", "a--b", "-a", "a-", "a" * 41, "é"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    """Refused before anything is made."""
    with pytest.raises(ConfigError, match="is no name for a verifier"):
        create_package(name, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there(demo: Path) -> None:
    """Nothing of it is overwritten."""
    before = checks_py(demo).read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        create_package("other", demo)
    assert isinstance(invoke("verifier", "new", "demo", "--into", str(demo)).exception, ConfigError)
    assert checks_py(demo).read_bytes() == before


# --- test

BROKEN: dict[str, tuple[str, str]] = {
    "generous": (
        "def note_saved(desktop, task, **options): return 1.0",
        "untouched: it scores 0.0: scored 1.0, expected 0.0",
    ),
    "blind": ("def note_saved(desktop, task, **options): return 0.0", "damaged: it scores error: scored 0.0"),
    "swallows": (
        "def note_saved(desktop, task, path, text):\n"
        "    try: return desktop.read_text(path).strip() == text\n"
        "    except BaseException: return 0.0",
        "wrong: no answer is no score: scored 0.0",
    ),
    "no function": ("", "it can be loaded: LookupError: no verifier of the package has a function 'note_saved'"),
    "no Python": ("def (", "it can be loaded: SyntaxError"),
    "import error": ("import no_such_module", "it can be loaded: ModuleNotFoundError"),
    "exits": ("import sys; sys.exit(3)", "it can be tried: its process ended with 3"),
    "dies": ("import os; print('last words', flush=True); os.abort()", "ended with -6: last words"),
    "options": ("def note_saved(desktop, task): return 1.0", "raised TypeError"),
}


@pytest.mark.parametrize(("code", "fault"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_package_is_told(demo: Path, code: str, fault: str) -> None:
    """In words, with exit code 1."""
    checks_py(demo).write_text(code)
    result = invoke("verifier", "test", str(demo))
    assert result.exit_code == 1
    assert any(fault in line for line in result.stdout.splitlines() if line.startswith("BROKEN")), result.stdout


@pytest.mark.parametrize("code", ["import time; time.sleep(3600)", "while True: print('x' * 4096)"])
def test_one_that_does_not_end(demo: Path, code: str) -> None:
    """It is ended; what it prints is bounded."""
    checks_py(demo).write_text(code)
    (check,) = try_package(open_package(demo), limit_s=3.0)
    assert "were not done within 3 s" in check.fault or "File too large" in check.fault


def test_a_missing_case(demo: Path) -> None:
    """Each function needs all four."""
    shutil.rmtree(demo / "states/wrong")
    assert [c.fault for c in try_package(open_package(demo)) if not c.ok] == ["missing: wrong"]


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("pyproject.toml", "[project", "cannot be read"),
        ("pyproject.toml", '[project]\nname = "x"', "registers no verifier"),
        ("states/wrong/state.toml", 'case = "other"\nfunction = "f"\nexpect = 0', "case"),
        ("states/wrong/state.toml", 'case = "wrong"\nfunction = "f"\nexpect = 7', "a number from 0 to 1"),
        ("states/wrong/state.toml", 'case = "wrong"\nfunction = "f"\nexpect = 0\nmore = 1', "more"),
        ("states/wrong/state.toml", 'case = "wrong"\nfunction = "f"\nexpect = 0\nscreenshot = "none.png"', "none.png"),
        ("states/wrong/state.toml", 'case = "wrong"\nfunction = "f"\nexpect = 0\nname = "x"', "given by the folder"),
        (
            "states/wrong/state.toml",
            'case = "wrong"\nfunction = "f"\nexpect = 0\n[[commands]]\noutput = "x"',
            "command",
        ),
    ],
)
def test_files_that_are_malformed(demo: Path, file: str, text: str, fault: str) -> None:
    """Refused with the file's name and the place."""
    (demo / file).write_text(text)
    with pytest.raises(ConfigError, match=fault) as caught:
        open_package(demo)
    assert Path(file).name in caught.value.message


def test_no_state_at_all(demo: Path) -> None:
    """A package without one is not tried."""
    shutil.rmtree(demo / "states")
    with pytest.raises(ConfigError, match="there is no end state"):
        open_package(demo)


def test_a_state_with_everything(tmp_path: Path) -> None:
    """Each field of a state's file gets to its place; links, modes and folders come from the disk."""
    place = tmp_path / "all"
    (place / "home/d/empty").mkdir(parents=True)
    (place / "home/d/empty/.keep").touch()
    (place / "home/a").write_text("x")
    (place / "home/a").chmod(0o600)
    (place / "home/l").symlink_to("/etc/hosts")
    (place / "root/etc").mkdir(parents=True)
    (place / "root/etc/hosts").write_text("recorded")
    (place / "screen.png").write_bytes(b"png")
    (place / "state.toml").write_text(
        """
        case = "solution"
        function = "f"
        expect = 1
        options = {a = [1]}
        last_action = "DONE"
        instruction = "do"
        clipboard = "c"
        accessibility = "<a/>"
        screenshot = "screen.png"
        live = ["true"]
        [[windows]]
        title = "t"
        [[commands]]
        command = ["id"]
        output = "o"
        [[commands]]
        command = "id -u"
        returncode = 3
        [[targets]]
        id = "1"
        type = "page"
        [[calls]]
        method = "m"
        result = {x = 1}
        """
    )
    from drums_core.testing import FakeDesktop

    state = load_state(place)
    desktop = FakeDesktop(state)
    assert desktop.is_folder("d/empty") and not desktop.exists("d/empty/.keep")
    info = desktop.stat("a")
    assert info is not None and (info.mode, info.size_bytes) == (0o600, 1)
    assert desktop.read_file("l") == b"recorded" and desktop.screenshot() == b"png"
    assert (desktop.clipboard(), desktop.accessibility(), desktop.last_action) == ("c", "<a/>", "DONE")
    assert desktop.windows()[0]["title"] == "t" and desktop.windows()[0]["pid"] == 1
    assert desktop.execute(["id"]).output == "o" and desktop.execute("id -u").returncode == 3
    assert desktop.cdp("m") == {"x": 1} and desktop.browser_targets()[0]["id"] == "1"
    assert state.task()["evaluator"]["options"] == {"a": [1]} and state.live == ["true"]


# --- live


@requires("root", "criu")
def test_live(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On real desktops the states score the same; one that expects what is not so, or cannot be made, is told."""
    described = demo / "states/solution/state.toml"
    described.write_text(described.read_text() + "live = [\"printf 'buy milk' >~/Documents/note.txt\"]\n")
    package = open_package(demo)
    solution = next(s for s in package.states if s.name == "solution")
    changes: dict[str, dict[str, Any]] = {
        "lies": {"expect": 0.0},
        "cannot": {"live": ["exit 7"]},
        "gives up": {"last_action": "FAIL", "expect": 0.0},
    }
    more = [attrs.evolve(solution, name=name, **fields) for name, fields in changes.items()]
    found = {
        c.rule.split(",")[1].split(":")[0].strip(): c
        for c in try_live(attrs.evolve(package, states=[*package.states, *more]))
    }
    assert {name for name, c in found.items() if c.ok} == {"solution", "untouched", "wrong", "gives up"}
    assert "scored 1.0, expected 0.0" in found["lies"].fault and "ended with 7" in found["cannot"].fault
