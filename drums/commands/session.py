"""The client of the commands that need a daemon which is there already: one of their own would end with them."""

from __future__ import annotations

from drums._client import Client
from drums._endpoint import find_endpoint


def running_daemon() -> Client:
    """A client of the daemon of `DRUMS_URL`, or of the default address."""
    return Client(find_endpoint())
