"""URLs as they may be told: in logs, errors and manifests, without what they hold to sign in with."""

from __future__ import annotations

import re

# What stands between `//` and a host (RFC 3986, 3.2.1; what parsers take goes further): up to the last `@` before the
# next `/`, so that neither an `@` nor a space of a password ends it.
_USER_INFO = re.compile(r"(?<=://)[^/]*@")
# A `:` that neither a port follows nor an `@` before the next `/`: no parser finds a host there, but an operator may
# have meant a password with a `/` in it, and the error would show it. Of an address of IPv6 a bracket comes first.
_MEANT = re.compile(r"(?<=://)[^/:\[]*:(?!\d*[/?#]|[^/]*@)")
_WORD = re.compile(r"\S+")


def without_credentials(text: str) -> str:
    """A text without the users and passwords of the URLs in it.

    Rather too much is left out than too little: of a URL without a path, what follows up to an `@` goes, too. What
    every parser takes for a port and a path (`80/…`) stays.

    Args:
        text: a URL, or a text of any form with URLs in it, such as a line of apt's log.
    """
    # In two steps, each as long as the text: the text may be somebody else's, and of any length.
    return _USER_INFO.sub("", _WORD.sub(_without_meant, text))


def _without_meant(word: re.Match[str]) -> str:
    before, at, behind = word[0].rpartition("@")
    found = _MEANT.search(before) if at else None
    return before[: found.start()] + behind if found else word[0]
