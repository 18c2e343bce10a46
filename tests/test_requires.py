"""What a test does on a host that lacks what it needs: skipped where nothing was promised, failed where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import requires
from requires import osworld_files


@pytest.fixture
def promised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the variable that the test names is set."""
    for name in ("DRUMS_OSWORLD", "DRUMS_REQUIRE"):
        monkeypatch.delenv(name, raising=False)
    if request.param:
        monkeypatch.setenv(request.param, "root")


@pytest.mark.parametrize(
    ("promised", "outcome"),
    [("", pytest.skip.Exception), ("DRUMS_REQUIRE", pytest.fail.Exception), ("DRUMS_OSWORLD", pytest.fail.Exception)],
    indirect=["promised"],
)
def test_osworlds_files_are_missing(promised: None, outcome: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(outcome) as caught:
        osworld_files(tmp_path)
    assert type(caught.value) is outcome and str(tmp_path / "file_cache") in str(caught.value)


@pytest.mark.parametrize("promised", ["", "DRUMS_REQUIRE"], indirect=True)
def test_osworlds_files_are_there(promised: None, tmp_path: Path) -> None:
    (tmp_path / "file_cache").mkdir()
    assert osworld_files(tmp_path) == tmp_path / "file_cache"


@requires.requires("root")
def test_an_image_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Skipped where nothing was promised; failed where desktops were. Both say what builds it."""
    monkeypatch.setenv("DRUMS_STATE_DIR", str(tmp_path))
    monkeypatch.setitem(requires._PROBES, "osworld", requires._osworld)
    monkeypatch.delenv("DRUMS_REQUIRE", raising=False)
    mark = requires.requires("osworld").mark
    assert mark.args == (True,) and "drums image build osworld" in mark.kwargs["reason"]
    for promise in ("criu", "root, osworld"):
        monkeypatch.setenv("DRUMS_REQUIRE", promise)
        with pytest.raises(AssertionError, match=r"osworld: the image 'osworld' is not in .*\./run test builds it"):
            bool(requires.requires("osworld").mark.args[0])
    (tmp_path / "images" / "osworld").mkdir(parents=True)
    (tmp_path / "images" / "osworld" / "image.json").touch()
    assert requires.requires("osworld").mark.args == (False,)
