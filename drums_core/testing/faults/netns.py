"""The network: one more or one less of each thing, other settings, changed sysctls.

That a process shares the host's or another desktop's network is `isolation`'s to see: no process can be moved to
another namespace from outside, only be added there.
"""

from __future__ import annotations

from drums_core.testing.faults.model import PLANT, Fault, Point


def _fault(name: str, about: str, action: str, key: str, value: str, *says: str) -> Fault:
    full = f"netns:{name}" if name else "netns"
    file = PLANT / "netns.py"
    return Fault(full, ("netns",), Point.PRE_RESUME, about, action, file, {key: value}, says=says)


def _change(name: str, about: str, what: str, *says: str) -> Fault:
    return _fault(name, f"the network inside has {about}", "change_network", "what", what, *says)


def _sysctl(name: str) -> Fault:
    return _fault(
        f"sysctl-{name.rpartition('/')[2]}", f"the sysctl net/{name} is another", "change_sysctl", "name", name, name
    )


NETNS_FAULTS = [
    _change("", "one more address", "address", "addresses: extra", "10.99.0.1"),
    _change("address6", "one more IPv6 address", "address6", "addresses: extra", "fd99::1"),
    _change("no-address", "one address less", "no-address", "addresses: missing", "::1"),
    _change("route", "one more route", "route", "routes: extra", "10.99.0.1"),
    _change("route6", "one more IPv6 route", "route6", "routes: extra", "fd99::1"),
    _change("no-route", "one route less", "no-route", "routes: missing", "::1"),
    _change("rule", "one more rule", "rule", "rules: extra", "4711"),
    _change("no-rule", "one rule less", "no-rule", "rules: missing"),
    _change("link", "one more link", "link", "links: extra", "fault0"),
    _change("mtu", "another MTU on the loopback", "mtu", "1400", "65536"),
    _change("queue", "another queue length on the loopback", "queue", "txqlen"),
    _fault("table", "there is one more nftables table", "change_nftables", "what", "table", "drums_fault"),
    _fault("chain", "there is one more nftables chain", "change_nftables", "what", "chain", "planted"),
    _fault("set", "there is one more nftables set", "change_nftables", "what", "set", "planted"),
    _sysctl("ipv4/ip_default_ttl"),
    _sysctl("ipv4/ip_unprivileged_port_start"),
    _sysctl("ipv4/tcp_syncookies"),
    _sysctl("ipv4/conf/lo/rp_filter"),
    _sysctl("ipv6/conf/all/forwarding"),
    _sysctl("core/somaxconn"),
    _sysctl("unix/max_dgram_qlen"),
]
"""Faults of `netns`."""
