"""An operator's verifier from its installation to its scores, through a running daemon that is never restarted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from requires import requires
from served import Served, served
from test_verifiers import install

import drums
from drums.errors import VerifierNotFound

pytestmark = requires("root", "criu")

NOTED = """
def noted(desktop, task, *, score):
    return score if desktop.exists("note") else 0.0
"""
TASKS: Mapping[str, Mapping[str, Any]] = {
    "10000000-0000-0000-0000-000000000001": {"verifier": "lab", "function": "noted", "options": {"score": 1.0}},
    "20000000-0000-0000-0000-000000000002": {"verifier": "labb", "function": "noted"},
    "30000000-0000-0000-0000-000000000003": {"verifier": "lab", "function": "nooted"},
}
GOOD, NO_VERIFIER, NO_FUNCTION = TASKS


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages of the daemon's; a worker may read it."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


@pytest.fixture
def daemon(tmp_path: Path, site: Path) -> Iterator[Served]:
    """With tasks of this test's."""
    examples = tmp_path / "osworld" / "evaluation_examples"
    (examples / "examples" / "os").mkdir(parents=True)
    (examples / "test_all.json").write_text(json.dumps({"os": list(TASKS)}))
    for identity, evaluator in TASKS.items():
        document = {
            "id": identity,
            "instruction": "Make ~/note.",
            "source": "",
            "config": [],
            "related_apps": ["os"],
            "evaluator": {"func": "drums_verifier", **evaluator},
        }
        (examples / "examples" / "os" / f"{identity}.json").write_text(json.dumps(document))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DRUMS_OSWORLD", str(tmp_path / "osworld"))
        environment.setenv("PYTHONPATH", str(site))
        environment.setenv("PYTHONDONTWRITEBYTECODE", "1")
        with served(tmp_path / "log") as daemon:
            yield daemon


def replace(site: Path, version: str, code: str) -> None:
    """As pip would with another version of the package."""
    for old in site.glob("lab*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    install(site, "lab-checks", {"lab": "lab_checks"}, {"lab_checks.py": code}, version=version)


def reloaded(daemon: Served) -> tuple[int, dict[str, Any]]:
    """What `drums plugins reload` comes to, and what it says of the verifier."""
    done = subprocess.run(
        [sys.executable, "-m", "drums", "plugins", "reload", "--json"],
        env=daemon.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    (record,) = [p for p in json.loads(done.stdout)["plugins"] if p["name"] == "lab"]
    return done.returncode, record


def test_from_installation_to_scores(daemon: Served, site: Path) -> None:
    """Refused before it is there and under other names; found, scored with, replaced, broken; all without a restart."""
    with drums.connect(daemon.url, daemon.token) as client:
        with pytest.raises(VerifierNotFound, match="no installed package has the verifier 'lab'"):
            client.create(GOOD)
        replace(site, "1.0", NOTED)
        for task, near in ((NO_VERIFIER, "lab"), (NO_FUNCTION, "noted")):
            with pytest.raises(VerifierNotFound) as caught:
                client.create(task)
            assert (caught.value.status, caught.value.facts["candidates"]) == (422, [near])
            assert f"nearest: {near}" in caught.value.hint
        assert client.slots() == []
        with client.create(GOOD, ttl=600) as env:
            env.wait_valid()
            code, listed = reloaded(daemon)
            assert code == 0 and (listed["ok"], listed["version"]) == (True, "1.0")
            env.write_file("note", b"")
            replace(site, "2.0", NOTED.replace("return score", "return score / 4"))
            old = env.verify()
            env.reset()
            env.write_file("note", b"")
            new = env.verify()
        checkers = [r.provenance["checker"] for r in (old, new)]
        assert [old.score, new.score] == [1.0, 0.25]
        assert [c["version"] for c in checkers] == ["1.0", "2.0"]
        assert checkers[0]["sha256"] == listed["sha256"] != checkers[1]["sha256"] == reloaded(daemon)[1]["sha256"]
        replace(site, "3.0", "import no_such_module\n" + NOTED)
        code, listed = reloaded(daemon)
        assert code == 1 and not listed["ok"] and "No module named 'no_such_module'" in listed["error"]
