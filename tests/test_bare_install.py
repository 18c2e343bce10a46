"""`pip install drums` brings the client alone: what only a host needs is neither imported nor missed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = sorted(
    {
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
        for requirements in PROJECT["optional-dependencies"].values()
        for requirement in requirements
    }
)

# Whatever the extras bring, and the rest of drums, cannot be imported: as on a machine that has the client alone.
BARE = """
import importlib.metadata, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
""".replace(
    "ABSENT",
    repr(
        {"google" if name == "protobuf" else name for name in EXTRAS}
        | {"drums_core", "drums_gates", "drums_verifiers", "drums_osworld"}
    ),
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60)


def command(*argv: str) -> str:
    return f"import sys; sys.argv = {['drums', *argv]!r}\nfrom drums.cli import main\nmain()"


def test_every_module_of_the_client_without_the_extras() -> None:
    """Each module of `drums` can be imported where no extra is installed, and brings none of the host's in."""
    done = run(
        BARE + "import pkgutil, drums\n"
        "for m in pkgutil.walk_packages(drums.__path__, 'drums.'): __import__(m.name); print(m.name)"
    )
    assert done.returncode == 0, done.stderr
    assert {"drums.errors", "drums.cli"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    "code", ["import drums, drums.errors, drums.cli", command("--version")], ids=["import", "drums --version"]
)
def test_nothing_of_the_host_is_imported(code: str) -> None:
    """Where the extras are installed, they are left alone; they would cost start-up time."""
    done = run(
        "import atexit, sys\n"
        "heavy = {'trio', 'psutil', 'pyroute2', 'pluggy', 'structlog', 'rich', 'drums_core', 'google'}\n"
        "atexit.register(lambda: print('imported', sorted(heavy & set(sys.modules))))\n" + code
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported []"


def test_version() -> None:
    """`drums --version` works on a bare install and tells the project's version."""
    done = run(BARE + command("--version"))
    assert (done.returncode, done.stdout) == (0, f"drums, version {PROJECT['version']}\n"), done.stderr


def test_a_host_command_says_what_to_install() -> None:
    """On a bare install a command of the host fails in words, and the help lists it as needing more."""
    done = run(BARE + command("doctor"))
    assert done.returncode == 1 and "pip install 'drums[host" in done.stderr and "Traceback" not in done.stderr
    shown = run(BARE + command("--help"))
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^ +doctor +\(needs drums\[host", shown.stdout, re.M)
