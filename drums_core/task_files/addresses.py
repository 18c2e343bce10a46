"""Whether a URL leads to a public address, and not to this host or its network.

The author of a task names URLs, and desktops see what comes from them. So both what a name stands for is looked at,
before anything is asked, and the address that was really connected to, before anything is read: a name may stand for
something else a moment later. Where the host's environment names a proxy, that one connects, and decides.

Source: the registries behind `ipaddress` (IANA's special-purpose addresses), RFC 6052 (IPv4 inside IPv6), RFC 3056.
"""

from __future__ import annotations

import ipaddress
import urllib.request

import httpx2
import trio

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.IPv6Network("::/96")


class NotPublic(Exception):
    """It leads, or may lead, to an address that is not public."""


def is_public(text: str) -> bool:
    """Whether an address, as `getaddrinfo` gives it, is one of the internet's hosts."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if address in _LOCAL_NAT64 or address in _COMPATIBLE or address.is_site_local or address.teredo:
            return False
    return address.is_global and not address.is_multicast


async def require_public_name(request: httpx2.Request) -> None:
    """A hook of a client: refuse a request whose host is not public.

    Raises:
        NotPublic: it is not, or nothing tells what it is.
    """
    if urllib.request.getproxies():
        return
    host = request.url.host
    try:
        found = await trio.socket.getaddrinfo(host, None)
    except OSError as e:
        raise NotPublic(f"{host!r} has no address: {e}") from e
    for *_, address in found:
        _require(host, str(address[0]))


def require_public_peer(reply: httpx2.Response) -> None:
    """Refuse an answer that did not come from a public address; raises `NotPublic`."""
    if urllib.request.getproxies():
        return
    peer = reply.extensions["network_stream"].get_extra_info("server_addr")
    if peer is None:
        raise NotPublic("nothing tells which address answered")
    _require(reply.url.host, str(peer[0]))


def _require(host: str, address: str) -> None:
    if not is_public(address):
        raise NotPublic(
            f"{host!r} has the address {address}, which is not public: "
            "name it as file_mirror, or set files_private_addresses"
        )
