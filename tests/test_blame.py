"""What the host sees of the ports that programs listen on. Real sockets."""

from __future__ import annotations

import os
import socket

from drums_core.blame import listening


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
