"""Where URLs lie in a mirror, and which addresses are public."""

from __future__ import annotations

import hashlib

import pytest

from drums_core.task_files import addresses, mirror
from drums_core.task_files.mirror import MARK, mirrored_path


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "HOSTS", {"127.0.0.1", "a.example"})


def test_no_two_urls_share_a_place() -> None:
    urls = [
        f"https://b.example{MARK}x",
        "https://a.example/datasets/other/ubuntu_osworld_file_cache/resolve/main/x",
        "https://a.example/datasets/one/resolve/main/x",
        "https://a.example/datasets/two/resolve/main/x",
        "https://b.example/datasets/one/resolve/main/x",
        "https://a.example/datasets/one/resolve/main/x?rev=2",
        "http://a.example/datasets/one/resolve/main/x",
        "https://a.example/datasets/one/resolve/main/x/y",
        "https://a.example",
        "https://a.example/",
        "https://a.example/?u=http://b/c%2Fd",
        "https://a.example/" + "long" * 200,
    ]
    places = [mirrored_path(x) for x in urls]
    assert len(set(places)) == len(urls)
    assert all(len(x) == 3 and x[0] == "elsewhere" and len(x[2]) == 64 for x in places)
    assert mirrored_path("https://a.example/x")[2] == hashlib.sha256(b"https://a.example/x").hexdigest()
    # Nor does the user in it make another file of it, which would be told in the name.
    assert mirrored_path("https://u:secret@a.example/x") == mirrored_path("https://a.example/x")


@pytest.mark.parametrize(
    "path", ["manifest.json", ".sha256/0", ".lock", "elsewhere/a.example/0", "..", "a/" + "b" * 241, "a%00b"]
)
def test_a_url_names_nothing_of_the_stores_own(path: str) -> None:
    with pytest.raises(ValueError, match=r"the mirror|bytes"):
        mirrored_path(f"https://a.example{MARK}{path}")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "224.0.0.1", "0.0.0.0", "::1", "fe80::1%eth0"),
        *(
            "::ffff:10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::a00:1",
            "2002:7f00:1::",
            "fec0::1",
            "::7f00:1",
            "ff02::1",
        ),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not addresses.is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822", "::ffff:93.184.216.34"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert addresses.is_public(address)
