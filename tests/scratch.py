"""A state folder of a test's own, on the real one's file system, with the real one's CRIU and image.

What is large and never changes (CRIU, the image's files) is linked to; the golden checkpoint is copied, so that a
test may damage it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from drums_core.config import HostConfig, load_config
from drums_core.image.store import ImageStore
from drums_core.sys.removal import remove_tree, unmount_below

IMAGE = "minimal"


def copy(source: Path, target: Path) -> None:
    """Copy a tree with owners, times and extended attributes."""
    subprocess.run(["cp", "-a", "--preserve=all", str(source), str(target)], check=True, capture_output=True)


@contextmanager
def scratch_state(*, osworld: bool = False, **overrides: Any) -> Iterator[HostConfig]:
    """A configuration whose state folder is new, and gone afterwards with all that is mounted in it.

    Args:
        osworld: keep the OSWorld checkout that the environment names; otherwise the tasks are drums' own.
        overrides: fields of the configuration.
    """
    real = load_config()
    images = ImageStore(real.state_dir / "images")
    if IMAGE not in images.names():
        text = f"image {IMAGE!r} is not built in {str(real.state_dir)!r}: ./run setup"
        demanded = "criu" in os.environ.get("DRUMS_REQUIRE", "").split(",")
        (pytest.fail if demanded else pytest.skip)(text)
    state = real.state_dir / f"test-{uuid.uuid4().hex[:8]}"
    in_use, temporary = images.use(IMAGE), tempfile.tempdir
    try:
        image = images.load(IMAGE)
        # Desktops' roots are nobody on the host and pass through.
        state.mkdir(mode=0o711)
        (state / "criu").symlink_to(real.state_dir / "criu")
        here = state / "images" / IMAGE
        here.mkdir(parents=True)
        (here / "rootfs").symlink_to(image.path / "rootfs")
        # What a host makes when it first opens, and leaves.
        for name in ("checkpoints", "slots", "run", "tmp"):
            (state / name).mkdir()
        (state / "tmp").chmod(0o1777)
        tempfile.tempdir = str(state / "tmp")  # where a snapshot sees it
        for lock in (state / "host.lock", here / "use.lock"):
            lock.touch(mode=0o600)
        shutil.copy2(image.path / "image.json", here)
        golden = image.golden_id()
        if golden is not None:
            copy(real.state_dir / "checkpoints" / golden, state / "checkpoints" / golden)
            shutil.copy2(image.path / "golden.json", here)
        config = attrs.evolve(real, state_dir=state, **overrides)
        yield config if osworld else attrs.evolve(config, osworld=None)
    finally:
        tempfile.tempdir = temporary
        os.close(in_use)
        if state.exists():
            unmount_below(state)
            remove_tree(state)
