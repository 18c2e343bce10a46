"""What a test needs of the host: `@requires("root")`, or `pytestmark = requires("root", "criu")`.

An unmet need skips the test with the reason. `DRUMS_REQUIRE=root,criu` says that the host has these: then the test
fails instead. A need that is not known is an error in the test. `osworld` is the image of that name.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def _root() -> str:
    return "" if os.geteuid() == 0 else f"runs as uid {os.geteuid()}, root needed"


def _userns() -> str:
    done = subprocess.run(["unshare", "--user", "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no user namespace can be made: {done.stderr.strip()}"


def _criu() -> str:
    """Root, and a CRIU that drums has installed or the system has; whether it works is for the tests to show."""
    if lack := _root():
        return lack
    from drums_core.config import load_config

    prefix = load_config().state_dir / "criu"
    on_path = any(os.access(f"{x}/criu", os.X_OK) for x in [*os.get_exec_path(), "/usr/sbin"])
    return "" if on_path or prefix.exists() else f"no CRIU on PATH nor in {str(prefix)!r}"


def _osworld() -> str:
    """Root, and the image `osworld`; whether it is of today's recipe is for the host to say."""
    if lack := _root():
        return lack
    from drums_core.config import load_config
    from drums_core.image.store import ImageStore

    images = load_config().state_dir / "images"
    if "osworld" in ImageStore(images).names():
        return ""
    return f"the image 'osworld' is not in {str(images)!r}: ./run test builds it, and drums image build osworld"


_PROBES: dict[str, Callable[[], str]] = {
    "root": functools.cache(_root),
    "userns": functools.cache(_userns),
    "criu": functools.cache(_criu),
    "osworld": functools.cache(_osworld),
}
# What a need promises besides: `run` builds the images where desktops can run.
_PROMISES = {"criu": {"osworld"}}


class _Lack:
    """A skip condition; looked at as pytest sets the test up, where an exception fails that one test."""

    def __init__(self, lacks: list[str]) -> None:
        self._lacks = lacks

    def __bool__(self) -> bool:
        if self._lacks:
            raise AssertionError(f"DRUMS_REQUIRE asks for it, and the host lacks it: {'; '.join(self._lacks)}")
        return False


def requires(*needs: str) -> pytest.MarkDecorator:
    """A mark that skips a test whose needs are not met, or fails it where `DRUMS_REQUIRE` names the need.

    Raises:
        ValueError: an unknown need, here or in `DRUMS_REQUIRE`.
    """
    demanded = {x.strip() for x in os.environ.get("DRUMS_REQUIRE", "").split(",") if x.strip()}
    if unknown := ({*needs} | demanded) - set(_PROBES):
        raise ValueError(f"unknown test requirements {sorted(unknown)}, known are {sorted(_PROBES)}")
    for need in tuple(demanded):
        demanded |= _PROMISES.get(need, set())
    lacks = {need: lack for need in needs if (lack := _PROBES[need]())}
    if fatal := [f"{need}: {lack}" for need, lack in lacks.items() if need in demanded]:
        return pytest.mark.skipif(_Lack(fatal), reason="unreachable")  # type: ignore[arg-type]
    return pytest.mark.skipif(bool(lacks), reason="; ".join(lacks.values()) or "met")


def osworld_checkout() -> Path:
    """OSWorld's checkout, which `DRUMS_OSWORLD` names; for a fixture.

    Without it the test is skipped, or fails where `DRUMS_OSWORLD` or `DRUMS_REQUIRE` says that the host is to run it.
    """
    path = Path(os.environ.get("DRUMS_OSWORLD") or Path(__file__).parents[2] / "shared" / "osworld")
    if not (path / "evaluation_examples" / "test_all.json").is_file():
        if os.environ.get("DRUMS_OSWORLD") or os.environ.get("DRUMS_REQUIRE"):
            pytest.fail(f"no OSWorld checkout at {path}")
        pytest.skip("DRUMS_OSWORLD names no OSWorld checkout")
    return path


def osworld_files(checkout: Path) -> Path:
    """The files that OSWorld's tasks download, in this checkout; for a fixture.

    Without them the test is skipped, or fails where `DRUMS_OSWORLD` or `DRUMS_REQUIRE` says that the host is to run it:
    else a wrong path would pass for tests that were run.
    """
    files = checkout / "file_cache"
    if not files.is_dir():
        lack = f"OSWorld's files are not at {str(files)!r}: DRUMS_OSWORLD names the checkout that has them"
        if os.environ.get("DRUMS_OSWORLD") or os.environ.get("DRUMS_REQUIRE"):
            pytest.fail(lack)
        pytest.skip(lack)
    return files
