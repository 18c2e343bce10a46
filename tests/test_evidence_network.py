"""The network reader, on a throw-away network namespace."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from requires import requires

from drums_core.evidence.network import SECTIONS, difference, read_network
from drums_core.sys.inside import in_namespace

pytestmark = requires("root")
libc = ctypes.CDLL(None, use_errno=True)
Change = Callable[[], None]


@pytest.fixture
def netns() -> Iterator[int]:
    """A descriptor of a new network namespace with `lo` up; it goes when the descriptor is closed."""
    opened: list[int] = []

    def work() -> None:
        from drums_core.sys import enter

        enter.unshare(["net"])
        enter.link_up("lo")
        opened.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    yield opened[0]
    os.close(opened[0])


def _address() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.addr("add", index=1, address="10.9.0.1", prefixlen=24)


def _address6() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.addr("add", index=1, address="fd00::7", prefixlen=64)


def _route() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.route("add", dst="10.77.0.0/16", oif=1, table=77)


def _rule() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.rule("add", table=77, src="10.1.0.0/16", priority=1000)


def _route6() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.route("add", dst="fd77::/64", oif=1, table=77)


def _rule6() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.rule("add", family=10, table=77, src="fd01::/64", priority=1000)


def _link() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.link("add", ifname="v0", kind="veth", peer={"ifname": "v1"})


def _mtu() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.link("set", index=1, mtu=9000)


def _down() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.link("set", index=1, state="down")


def _table(family: int = 1, code: int = 1, elements: tuple[str, ...] = ("10.2.3.4",)) -> None:
    from pyroute2.nftables.expressions import ipv4addr, verdict
    from pyroute2.nftables.main import NFTables, NFTSet

    with NFTables(nfgen_family=family) as netlink:
        netlink.table("add", name="t")
        netlink.chain("add", table="t", name="c", hook="input", type="filter", policy=1)
        counter: Any = [{"attrs": [("NFTA_EXPR_NAME", "counter")]}]
        netlink.rule("add", table="t", chain="c", expressions=(counter, verdict(code=code)))
        netlink.rule("add", table="t", chain="c", expressions=(ipv4addr(src="192.168.0.0/24"), verdict(code=1)))
        with suppress(TypeError):  # pyroute2 0.9.7 fails to read the reply; the set is there
            netlink.sets("add", table="t", name="s", key_type="ipv4_addr", comment="words")
        netlink.set_elems("add", set=NFTSet(table="t", name="s", key_type="ipv4_addr"), elements=set(elements))


@pytest.mark.parametrize(
    ("change", "section"),
    [
        (_address, "addresses"),
        (_address6, "addresses"),
        (_route, "routes"),
        (_rule, "rules"),
        (_route6, "routes"),
        (_rule6, "rules"),
        (_link, "links"),
        (_mtu, "links"),
        (_down, "links"),
        (_table, "nftables.tables"),
        (_table, "nftables.chains"),
        (_table, "nftables.rules"),
        (_table, "nftables.sets"),
        (_table, "nftables.elements"),
    ],
)
def test_each_change_is_seen_and_named(netns: int, change: Change, section: str) -> None:
    """A change inside the namespace changes the evidence in its section; reading twice does not."""
    before = json.loads(json.dumps(read_network(netns_fd=netns)))
    assert set(before) == set(SECTIONS)
    assert difference(before, read_network(netns_fd=netns)) == []
    in_namespace(netns, "net", change)
    found = difference(before, read_network(netns_fd=netns))
    assert [x for x in found if x.startswith(f"{section}: ")], found


def test_an_inet_table_is_seen(netns: int) -> None:
    """A table of any family shows, and what is in it; the reader's default family would show nothing."""
    in_namespace(netns, "net", _table)
    nftables = read_network(netns_fd=netns)["nftables"]
    assert [x["nfgen_family"] for x in nftables["tables"]] == [1]
    assert len(nftables["rules"]) == 2
    assert nftables["elements"][0]["NFTA_SET_NAME"] == "s"
    text = json.dumps(nftables)
    for word in ("HANDLE", "USERDATA", "COUNTER_BYTES", "res_id", "POSITION"):
        assert word not in text


def _new_namespace() -> int:
    from drums_core.sys import enter

    enter.unshare(["net"])
    enter.link_up("lo")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@pytest.fixture
def twins(netns: int) -> Iterator[tuple[int, int]]:
    """Two new namespaces."""
    other = in_namespace(netns, "net", _new_namespace)
    yield netns, other
    os.close(other)


def test_namespaces_made_alike_are_equal(twins: tuple[int, int]) -> None:
    """Two namespaces set up the same way have equal evidence, whatever handles and indexes the kernel gave."""

    def make(extra: bool) -> None:
        if extra:  # other handles
            from pyroute2.nftables.main import NFTables

            with NFTables(nfgen_family=2) as netlink:
                netlink.table("add", name="gone")
                netlink.chain("add", table="gone", name="gone")
                netlink.chain("del", table="gone", name="gone")
                netlink.table("del", name="gone")
        for change in (_address, _route, _rule, _table):
            change()

    for number, fd in enumerate(twins):
        in_namespace(fd, "net", functools.partial(make, bool(number)))
    first, second = (read_network(netns_fd=x) for x in twins)
    assert difference(first, second) == []


@pytest.mark.parametrize("options", [{"code": 0}, {"elements": ("10.2.3.5",)}, {"family": 2}])
def test_small_differences_of_rule_sets(twins: tuple[int, int], options: dict[str, Any]) -> None:
    """Another verdict, another element or another family is another rule set."""
    in_namespace(twins[0], "net", _table)
    in_namespace(twins[1], "net", lambda: _table(**options))
    assert difference(*(read_network(netns_fd=x) for x in twins))


def test_the_caller_stays_where_it_is(netns: int) -> None:
    """Reading leaves the calling thread in its namespace and no descriptor or thread behind."""
    inode = os.stat("/proc/thread-self/ns/net").st_ino
    read_network(netns_fd=netns)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    read_network(netns_fd=netns)
    assert os.stat("/proc/thread-self/ns/net").st_ino == inode
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
    assert read_network(os.getpid())["links"]


def test_what_is_gone_is_an_error() -> None:
    """No namespace, no evidence: never an empty one."""
    with pytest.raises(OSError):
        read_network(999_999_999)
    with pytest.raises(ValueError):
        read_network()


@requires("root")
def test_sysctls(netns: int) -> None:
    """What the namespace can set is there, and a change shows; what the host alone sets, counts and secrets are not."""
    before = read_network(netns_fd=netns)
    names = set(before["sysctls"])
    assert {"ipv4/ip_forward", "ipv4/conf/lo/rp_filter", "core/somaxconn"} <= names
    assert not [x for x in names if x.endswith(("/flush", "stable_secret", "conntrack_count")) or x == "core/rmem_max"]

    def change() -> None:
        with open("/proc/sys/net/ipv4/conf/lo/rp_filter", "r+") as f:
            value = int(f.read())
            f.seek(0)
            f.write(str(1 - value))

    in_namespace(netns, "net", change)
    [text] = difference(before, read_network(netns_fd=netns))
    assert text.startswith("sysctls.ipv4/conf/lo/rp_filter is ")


def test_sysctls_of_kernel_modules() -> None:
    """A module that the host has loaded since is no difference of the desktop's; one that is not loaded is."""
    before = {"links": [], "sysctls": {"core/somaxconn": "4096"}}
    later = {"links": [], "sysctls": {"core/somaxconn": "4096", "netfilter/nf_conntrack_acct": "0"}}
    assert difference(before, later) == []
    assert difference(later, before) == ['sysctls.netfilter/nf_conntrack_acct is null, expected "0"']
