"""What a test does on a host that lacks what it needs: skipped where nothing was promised, failed where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
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
