"""URLs as they are told: no part of a password stays, and all else does."""

from __future__ import annotations

import re
import time
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from drums_core.urls import without_credentials

LINES = [
    ("http://me:pass@m.example/x", "http://m.example/x"),
    ("http://token@m.example/x", "http://m.example/x"),
    ("http://me:p@ss@m.example/x", "http://m.example/x"),
    ("http://me@corp:pass@m.example/x", "http://m.example/x"),
    ("http://me:p%40s%2Fs@m.example", "http://m.example"),
    ("http://me:pass word@m.example/x", "http://m.example/x"),
    ("http://me:pa/ss@m.example/x", "http://m.example/x"),
    ("http://me:pa?ss@m.example/x", "http://m.example/x"),
    ("http://me:pa://ss@m.example/x", "http://m.example/x"),
    ("http://me:pass@[::1]:8080/x", "http://[::1]:8080/x"),
    ("http://me:pass@m.example/@scope/name@1.0", "http://m.example/@scope/name@1.0"),
    ("Get:1 http://me:pass@m.example/x a", "Get:1 http://m.example/x a"),
    (
        "deb [signed-by=/k.asc] https://me:pa@ss@m.example/x suite main",
        "deb [signed-by=/k.asc] https://m.example/x suite main",
    ),
    ("indexes: https://me:pass@a/simple, https://you:word@b/simple", "indexes: https://a/simple, https://b/simple"),
    ("http://me:pa/ss@m.example/x http://you:wo/rd@n.example/x", "http://m.example/x http://n.example/x"),
    # nothing to take out
    ("", ""),
    ("me:pass@m.example", "me:pass@m.example"),
    ("Setting up mail@host:amd64 (1://2) ...", "Setting up mail@host:amd64 (1://2) ..."),
    ("http://m.example:80/name@1.0", "http://m.example:80/name@1.0"),
    ("http://m.example:/name@1.0", "http://m.example:/name@1.0"),
    ("http://m.example/x?to=me@m.example#a@b", "http://m.example/x?to=me@m.example#a@b"),
    ("http://[::1]:80/name@1.0", "http://[::1]:80/name@1.0"),
    ("http://[::1]/name@1.0", "http://[::1]/name@1.0"),
    ("Err:1 http://m.example: cannot open /etc/a@b", "Err:1 http://m.example: cannot open /etc/a@b"),
    (
        "http://a.example/x, http://b.example/y and me@c.example",
        "http://a.example/x, http://b.example/y and me@c.example",
    ),
]

PASSWORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=4, max_size=30)
USERS = st.sampled_from(["", "me", "me@corp", "m%40e"])
AROUND = st.sampled_from(["", "Get:1 ", "deb [arch=amd64] ", "see http://n.example/x and "])
BEHIND = st.sampled_from(["", "/", "/debian", ":80/debian", "/debian bookworm main", "/npm/@scope/name@1"])


def pieces(password: str) -> set[str]:
    """Every part of four characters."""
    return {password[at : at + 4] for at in range(len(password) - 3)}


@pytest.mark.parametrize(("text", "told"), LINES)
def test_what_is_told(text: str, told: str) -> None:
    assert without_credentials(text) == told
    assert without_credentials(told) == told


@given(before=AROUND, user=USERS, password=PASSWORDS, behind=BEHIND, coded=st.booleans())
@example("", "me", "p@ss/word", "/debian", True)
@example("", "me", "p@ssword", "/debian", False)
@example("", "me", "pass word", "/debian", False)
@example("", "me", "pass/word", "/debian", False)
def test_no_part_of_a_password_stays(before: str, user: str, password: str, behind: str, coded: bool) -> None:
    """Percent-encoded, or as it is, where a URL's parser takes it for a password, or nothing for a host and a port."""
    written = quote(password, safe="") if coded else password
    url = f"http://{user}:{written}@m.example{behind}"
    exact = coded or is_accepted(url, password)
    assume(exact or is_meant(password))
    shown = without_credentials(before + url)
    kept = without_credentials(before) + f"http://m.example{behind}"
    assert not (pieces(written) | pieces(password)) & pieces(shown) - pieces(kept)
    assert shown == kept or not exact


def is_accepted(url: str, password: str) -> bool:
    """Whether a parser takes it for a password."""
    try:
        return urlsplit(url).password == password
    except ValueError:  # brackets that are no address of IPv6
        return False


def is_meant(password: str) -> bool:
    """Whether it can be nothing else, as no parser finds a host and a port there; a space ends a URL in text."""
    return not re.search(r"\s", password) and not re.match(r"[^/]*@|\d*[/?#]", password)


@given(st.lists(st.tuples(st.text("pas@:", min_size=4, max_size=9), BEHIND), min_size=1, max_size=4))
def test_each_url_of_a_line(urls: list[tuple[str, str]]) -> None:
    line = ", ".join(f"http://me:{password}@m.example{behind or '/'}" for password, behind in urls)
    assert without_credentials(line) == ", ".join(f"http://m.example{behind or '/'}" for _, behind in urls)


@pytest.mark.parametrize("part", ["http://a:", "http://a:x", "://", "a:@ ", "http://a:b@"])
def test_a_long_text_takes_as_long_as_it_is(part: str) -> None:
    """A task's author names URLs. One that is taken in time with its square would take minutes."""
    began = time.process_time()
    without_credentials(part * (1_000_000 // len(part)))
    assert time.process_time() - began < 10


@given(st.text("ab@:/?# \n"))
def test_a_text_without_a_url_is_told_whole(text: str) -> None:
    assume("://" not in text)
    assert without_credentials(text) == text
