"""What the host sees of the ports that programs listen on. Real sockets."""

from __future__ import annotations

import os
import socket

import pytest

from drums_core.blame import closed, listening


def test_ports_that_are_listened_on() -> None:
    """Of both families, on any address; not those of connections, nor one that is only bound."""
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.create_connection(four.getsockname()) as client,
        socket.socket() as bound,
    ):
        bound.bind(("127.0.0.1", 0))
        ports = {
            name: x.getsockname()[1] for name, x in {"4": four, "6": six, "client": client, "bound": bound}.items()
        }
        found = listening(os.getpid())
        assert {name for name, port in ports.items() if port in found} == {"4", "6"}
    assert not {ports["4"], ports["6"]} & listening(os.getpid())


def test_a_desktop_that_is_gone_has_none() -> None:
    assert listening(1 << 30) == frozenset()


@pytest.mark.parametrize(
    ("now", "asked", "gone"),
    [
        ({8080, 1337}, {9222}, {9222}),  # what leads to the browser has ended
        ({9222, 8080}, {9222}, {1337}),  # the browser has, behind what leads to it
        ({9222, 1337}, {9222}, {8080}),  # another has, on which it may depend
        ({1337}, {9222}, {9222}),  # VLC's is closed, too, and was not asked
        ({9222, 1337, 8080}, {9222}, set()),
        ({9222, 1337, 8080}, {5900}, set()),  # nobody ever listened there
        ({9222, 8080}, {9222, 5900}, {1337}),  # one of both leads to what has ended
        ({9222, 8080}, {9222, 1337}, {1337}),
        ({9222}, {9222, 1337}, {1337, 8080}),  # to either
        ({8080}, {9222, 5900}, {9222}),  # neither leads on, and one was there
        ({8080}, {5900}, set()),
        ({9222, 8080, 5900}, {5900}, {1337}),  # listened on since, it leads on as well
        ({8080}, set(), set()),  # the failure is about none
    ],
)
def test_which_closed_ports_a_failure_may_depend_on(now: set[int], asked: set[int], gone: set[int]) -> None:
    assert closed(frozenset({9222, 1337, 8080}), frozenset(now), frozenset(asked)) == gone
