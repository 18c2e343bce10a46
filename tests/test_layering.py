"""Imports point one way; `layering.py` states the rules and checks them, and here the checker is checked as well."""

from __future__ import annotations

from pathlib import Path

import layering
import pytest

ROOT = Path(__file__).parents[1]


def test_the_layers_hold() -> None:
    """No file of the tree imports what its layer may not."""
    assert layering.check(ROOT) == []


def test_the_checker_sees_the_tree() -> None:
    """It looks at every package and finds imports there: an empty look would hold any rule."""
    for package in layering.PACKAGES:
        files = list((ROOT / package).rglob("*.py"))
        assert sum(len(list(layering.imports_of(ROOT, path))) for path in files) > 5, package
    for name in layering.STAND_ALONE:
        assert (ROOT / name).is_file(), name
    assert all(list((ROOT / folder).rglob("*.py")) for folder in layering.GUEST)


FAULTS = [
    ("drums/a.py", "import drums_core", "drums may not import drums_core"),
    ("drums/a.py", "def f():\n    from drums_core.model import Task", "drums may not import drums_core.model.Task"),
    ("drums/a.py", "import trio", "trio is of no dependency that pyproject.toml declares for drums"),
    ("drums/a.py", "import psutil", "psutil is of no dependency"),
    ("drums_core/a.py", "import drums_gates.netns", "drums_core may not import drums_gates.netns"),
    ("drums_core/a.py", "from drums_verifiers import worker", "drums_core may not import drums_verifiers.worker"),
    (
        "drums_core/a.py",
        "import importlib\nimportlib.import_module('drums_osworld.steps')",
        "drums_core may not import drums_osworld.steps",
    ),
    (
        "drums_core/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from drums_osworld import checker",
        "drums_core may not import drums_osworld.checker",
    ),
    ("drums_core/a.py", "import requests", "requests is of no dependency that pyproject.toml declares for drums_core"),
    ("drums_core/a.py", "import pytest", "pytest is of no dependency"),
    (
        "drums_core/sys/a.py",
        "from drums_core.desktop import Desktop",
        "drums_core.desktop.Desktop, which lies above it",
    ),
    ("drums_core/sys/a.py", "from .. import host", "drums_core.host, which lies above it"),
    ("drums_core/sys/a.py", "from drums_core import evidence", "drums_core.evidence, which lies above it"),
    ("drums_core/sys/a.py", "import drums_core", "drums_core, which lies above it"),
    ("drums_core/sys/enter.py", "import attrs", "a stand-alone file may not import attrs"),
    (
        "drums_core/sys/enter.py",
        "from drums_core.sys import helper",
        "a stand-alone file may not import drums_core.sys",
    ),
    ("drums_core/sys/sudo_server.py", "from . import enter", "a stand-alone file may not import drums_core.sys.enter"),
    ("drums_verifiers/worker_main.py", "import cattrs", "a stand-alone file may not import cattrs"),
    ("drums_osworld/worker_job.py", "import requests", "a stand-alone file may not import requests"),
    ("drums_core/guest/a.py", "import drums_core", "a guest file may not import drums_core"),
    ("drums_core/guest/a.py", "import attrs", "a guest file may not import attrs"),
    ("drums_gates/a.py", "from drums_core.plugins import _load_one", "_load_one is private to drums_core"),
    ("drums_gates/a.py", "from drums_core import _secret", "_secret is private to drums_core"),
    ("drums_gates/a.py", "import drums_core._secret.part", "_secret.part is private to drums_core"),
    ("drums_gates/a.py", "from drums_core.sys.enter import mount", "a gate may not import drums_core.sys.enter.mount"),
    ("drums_gates/a.py", "import drums_verifiers", "drums_gates may not import drums_verifiers"),
    ("drums_gates/a.py", "import drums_osworld", "drums_gates may not import drums_osworld"),
    ("drums_verifiers/a.py", "import drums_osworld", "drums_verifiers may not import drums_osworld"),
    ("drums_verifiers/a.py", "import drums_gates", "drums_verifiers may not import drums_gates"),
    ("drums_verifiers/a.py", "from drums_core.sys.overlay import _attach", "_attach is private to drums_core"),
    ("drums_osworld/a.py", "import drums_gates", "drums_osworld may not import drums_gates"),
    ("plugins/x/a.py", "import drums_gates", "a plugin may not import drums_gates"),
    ("plugins/x/a.py", "from drums_verifiers import trial", "a plugin may not import drums_verifiers.trial"),
    ("plugins/x/tests/a.py", "from drums_verifiers import worker", "a plugin may not import drums_verifiers.worker"),
    ("drums_core/testing/a.py", "import pytest", "pytest is of no dependency"),
    ("drums_core/testing/conformance_desktop.py", "import attrs", "a stand-alone file may not import attrs"),
    ("drums_verifiers/verifier_job.py", "import drums_core", "a stand-alone file may not import drums_core"),
    ("plugins/x/a.py", "from drums_core.host import _Secret", "_Secret is private to drums_core"),
]
CLEAN = {
    "drums/a.py": "import os, attrs, cattrs, click, httpx2\nfrom drums.errors import DrumsError",
    "drums_core/a.py": "from . import model\nimport trio, psutil, google.protobuf, rpc_pb2\nfrom drums import errors",
    "drums_core/sys/a.py": "from drums.errors import DumpError\nfrom drums_core import model\nfrom . import enter",
    "drums_core/sys/enter.py": "from __future__ import annotations\nimport os",
    "drums_core/guest/a.py": "import os, PIL.Image, Xlib.display\nfrom guest.wire import x",
    "drums_gates/a.py": "from drums_core import abc, __version__\nfrom drums_gates._report import some",
    "drums_verifiers/a.py": "from drums_core.sys.helper import Plan",
    "drums_osworld/a.py": "import requests\nfrom drums_verifiers import worker\nfrom drums_osworld import _own",
    "drums_core/testing/pytest_plugin.py": "import pytest",
    "plugins/x/tests/a.py": "from drums_verifiers.trial import score_state",
    "plugins/x/a.py": "import anything_at_all\nfrom drums_core import hookimpl",
}


def plant(root: Path, files: dict[str, str]) -> None:
    (root / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    """What each layer may import is not complained about."""
    plant(tmp_path, CLEAN)
    assert layering.check(tmp_path) == []


@pytest.mark.parametrize(("name", "text", "expected"), FAULTS, ids=lambda x: str(x).splitlines()[-1].strip()[:50])
def test_a_planted_fault_is_found(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """One forbidden import in an otherwise clean tree: one complaint, with file and line."""
    plant(tmp_path, CLEAN | {name: f"{CLEAN.get(name, '')}\n{text}\n"})
    faults = layering.check(tmp_path)
    assert len(faults) == 1, faults
    line = len(f"{CLEAN.get(name, '')}\n{text}".splitlines())
    assert faults[0].startswith(f"{name}:{line}: ") and expected in faults[0]
