"""A host's configuration: what wins over what, and the path of each fault."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drums.errors import ConfigError
from drums_core.config import DEFAULT_STATE_DIR, HostConfig, keeps_secrets, load_config
from drums_core.model import PAGE_BYTES, KernelLimits, Limits


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "drums.toml"
    path.write_text("")
    return path


def test_defaults(file: Path) -> None:
    """An empty file is the defaults, and these are the specification's."""
    config = load_config(file, environ={})
    assert config == HostConfig()
    assert config.state_dir == DEFAULT_STATE_DIR and config.settle_s == 5.0 and config.osworld is None


def test_what_wins(file: Path) -> None:
    """The caller over the environment over the file over the defaults; None and "" are as if not given."""
    file.write_text('state_dir = "/of/the/file"\nimage = "file"\nmax_slots = 3\n')
    environ = {"DRUMS_IMAGE": "environment", "DRUMS_MAX_SLOTS": "4", "DRUMS_STATE_DIR": "", "DRUMS_OTHER": "x"}
    config = load_config(file, environ=environ, max_slots=5, image=None)
    assert (config.state_dir, config.image, config.max_slots) == (Path("/of/the/file"), "environment", 5)


def test_accounts_and_services(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the environment as well; a stand-in may listen on the loopback."""
    monkeypatch.chdir(tmp_path)
    environ = {"DRUMS_ACCOUNTS": "accounts", "DRUMS_GOOGLE_API": "http://127.0.0.1:8000"}
    config = load_config(file, environ={**environ, "DRUMS_GOOGLE_DRIVE_PAGE": "http://localhost:8123/drive"})
    assert config.accounts == tmp_path / "accounts" and config.google_api == "http://127.0.0.1:8000"
    assert config.google_drive_page == "http://localhost:8123/drive"
    assert not any(keeps_secrets(x) for x in ("http://localhost.example", "ftp://localhost", "https://", "file:///x"))


def test_a_whole_file(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables become values, relative paths are made absolute."""
    monkeypatch.chdir(tmp_path)
    file.write_text(
        'state_dir = "state"\nosworld = "o"\nextra_required_gates = ["a", "b"]\ndefault_ttl_s = 60\n'
        "[limits]\ncpus = 0.5\nmemory_bytes = 1073741824\nswap_bytes = 4096\npids = 99\n"
    )
    config = load_config(file, environ={})
    assert config.state_dir == tmp_path / "state" and config.osworld == tmp_path / "o"
    assert config.limits == Limits(0.5, 1 << 30, 4096, 99)
    assert config.extra_required_gates == ("a", "b") and config.default_ttl_s == 60.0


FAULTS = {
    "unknown key": ("stat_dir = 1", ["extra", "stat_dir", "$"]),
    "unknown key below": ("[limits]\nram = 1", ["ram", "$.limits"]),
    "not a number": ('max_slots = "many"', ["$.max_slots"]),
    "none at all": ("max_slots = 0", ["'max_slots' must be >= 1: 0"]),
    "settles too soon": ("settle_s = 4.9", ["'settle_s' must be >= 5.0: 4.9"]),
    "no cpu": ("[limits]\ncpus = 0", ["'cpus' must be >= 0.01: 0.0", "$.limits"]),
    "infinite cpu": ("[limits]\ncpus = inf", ["'cpus' must be < inf", "$.limits"]),
    "cpu that is no number": ("[limits]\ncpus = nan", ["'cpus'", "$.limits"]),
    "odd memory": ("[limits]\nmemory_bytes = 4097", ["'memory_bytes' must be a multiple of 4096", "$.limits"]),
    "no memory": ("[limits]\nmemory_bytes = 0", ["'memory_bytes' must be >= 4096: 0", "$.limits"]),
    "swap below nothing": ("[limits]\nswap_bytes = -4096", ["'swap_bytes' must be >= 0: -4096", "$.limits"]),
    "no process": ("[limits]\npids = 0", ["'pids' must be >= 1: 0", "$.limits"]),
    "a service in the clear": ('google_api = "http://mirror.example"', ["google_api is 'http://mirror.example'", "$"]),
    "a page that is none": ('google_drive_page = "drive"', ["google_drive_page is 'drive'", "https://"]),
    "a password in the clear": (
        'google_api = "http://me:pa@ss@mirror.example"',
        ["google_api is 'http://mirror.example'", "$"],
    ),
    "a password with a stroke": (
        'google_api = "https://me:pa/ss@mirror.example"',
        ["google_api is 'https://mirror.example'", "$"],
    ),
    "a host that is none": ('google_api = "https://["', ["google_api is 'https://['"]),
    "a list that is none": ("extra_required_gates = 7", ["$.extra_required_gates"]),
    "a table that is none": ("limits = 7", ["$.limits"]),
}


@pytest.mark.parametrize(("text", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_with_its_path(file: Path, text: str, said: list[str]) -> None:
    """A ConfigError with what is wrong, where, and against what."""
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    for part in said:
        assert part in caught.value.message
    assert "\n" not in caught.value.message and caught.value.faults


def test_every_fault_is_told(file: Path) -> None:
    """Not the first alone."""
    file.write_text('max_slots = "many"\n[limits]\npids = "few"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={"DRUMS_DEFAULT_TTL_S": "long"})
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize("text", ["a = ", "\x00", "[limits", "é".encode("latin-1").decode("latin-1") + "=1"])
def test_a_file_that_is_no_toml(file: Path, text: str) -> None:
    """The error names the file."""
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"drums\.toml"):
        load_config(file, environ={})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that was asked for must be there, be a file, and be UTF-8."""
    (tmp_path / "latin").write_bytes(b'image = "\xe9"')
    for path in (tmp_path / "absent.toml", tmp_path, tmp_path / "latin"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path, environ={})


@given(
    st.floats(0.01, 1024),
    st.integers(1, 1 << 40).map(lambda n: n * PAGE_BYTES),
    st.integers(0, 1 << 40).map(lambda n: n * PAGE_BYTES),
    st.integers(1, 1 << 22),
)
def test_limits_that_can_be_had(cpus: float, memory: int, swap: int, pids: int) -> None:
    """Whatever the kernel takes and reads back as it was written."""
    limits = Limits(cpus, memory, swap, pids)
    assert attrs.astuple(limits) == (cpus, memory, swap, pids)


@given(
    st.one_of(st.floats(max_value=0.009), st.just(math.inf), st.just(math.nan)),
    st.one_of(st.integers(max_value=4095), st.integers(1, 1 << 40).map(lambda n: n * PAGE_BYTES + 1)),
    st.one_of(st.integers(max_value=-1), st.integers(0, 1 << 40).map(lambda n: n * PAGE_BYTES + 4095)),
    st.one_of(st.integers(max_value=0), st.integers(min_value=(1 << 22) + 1)),
)
def test_limits_that_cannot(cpus: float, memory: int, swap: int, pids: int) -> None:
    """Each is refused on its own, so that no gate compares what was never asked for."""
    for wrong in ({"cpus": cpus}, {"memory_bytes": memory}, {"swap_bytes": swap}, {"pids": pids}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Limits(**wrong)
    assert attrs.astuple(KernelLimits(None, None, None, None)) == (None,) * 4


def test_where_the_files_of_tasks_are(tmp_path: Path) -> None:
    """In the folder that was named; else in the store and in the checkout; what is in none is fetched, or is not."""
    config = load_config(environ={"DRUMS_STATE_DIR": str(tmp_path), "DRUMS_OSWORLD": str(tmp_path)})
    store = tmp_path / "files"
    assert (config.file_mirror, config.file_folders(), config.fetches_files) == (None, [store], True)
    (tmp_path / "file_cache").mkdir()
    assert config.file_folders() == [store, tmp_path / "file_cache"]
    assert not attrs.evolve(config, files_offline=True).fetches_files
    config = load_config(environ={"DRUMS_OSWORLD": str(tmp_path), "DRUMS_FILE_MIRROR": "elsewhere"})
    assert (config.file_folders(), config.fetches_files) == ([Path("elsewhere").absolute()], False)
    config = load_config(environ={"DRUMS_STATE_DIR": str(tmp_path), "DRUMS_FILE_MIRROR": "https://a.example/files"})
    assert (config.file_folders(), config.fetches_files) == ([store], True)
    assert config.file_url == "https://a.example/files"


@pytest.mark.parametrize(("said", "meant"), [("true", True), ("0", False), ("False", False)])
def test_a_switch_in_the_environment(said: str, meant: bool) -> None:
    assert load_config(environ={"DRUMS_FILES_OFFLINE": said}).files_offline is meant


@pytest.mark.parametrize("wrong", ["no", 1, []])
def test_a_switch_is_true_or_false(wrong: Any) -> None:
    for key in ("verify_in_place", "files_offline"):
        with pytest.raises(ConfigError, match=f"expected true or false.*{key}"):
            load_config(environ={}, **{key: wrong})
