"""The network of a desktop: links, addresses, routes, rules, nftables rule sets (over netlink), and sysctls.

Normalised to what a copy shares with its source: interfaces by name, no lifetimes, counters, statistics, handles or
states that follow from the other end of a link. What pyroute2 cannot decode is kept as hexadecimal bytes, so that a
difference there shows too. Not read: nftables' flow tables and stateful objects.

Sources: rtnetlink(7), netlink(7), setns(2), Linux `include/uapi/linux/{if,if_addr,rtnetlink,netfilter/nf_tables}.h`.
"""

from __future__ import annotations

import errno
import json
import os
import re
from typing import Any

from drums_core.evidence.sysctls import read_sysctls
from drums_core.model import Json
from drums_core.sys.inside import in_namespace, open_namespace

SECTIONS = ("links", "addresses", "routes", "rules", "nftables", "sysctls")

_IFF_STATE = 0x40 | 0x10000 | 0x20000  # RUNNING, LOWER_UP, DORMANT: follow from the other end
_IFA_STATE = 0x02 | 0x04 | 0x08 | 0x20 | 0x40  # NODAD, OPTIMISTIC, DADFAILED, DEPRECATED, TENTATIVE
_RTNH_STATE = 0x01 | 0x10  # DEAD, LINKDOWN
_RTM_CLONED = 0x200
_RTPROT_KERNEL = 2
_LINK_FIELDS = ("IFLA_MTU", "IFLA_ADDRESS", "IFLA_BROADCAST", "IFLA_TXQLEN", "IFLA_GROUP", "IFLA_LINKINFO")
_HEADER_KEYS = {"attrs", "header", "event", "res1", "res2", "res_id", "version", "index", "value", "__align"}
_DROPPED = {
    "IFA_CACHEINFO",
    "IFA_FLAGS",  # taken with the states masked out
    "IFA_PROTO",
    "RTA_CACHEINFO",
    "NFTA_TABLE_HANDLE",
    "NFTA_TABLE_USE",
    "NFTA_TABLE_USERDATA",
    "NFTA_CHAIN_HANDLE",
    "NFTA_CHAIN_USE",
    "NFTA_CHAIN_COUNTERS",
    "NFTA_CHAIN_USERDATA",
    "NFTA_RULE_HANDLE",
    "NFTA_RULE_POSITION",  # the handle of the rule before it
    "NFTA_RULE_USERDATA",
    "NFTA_SET_HANDLE",
    "NFTA_SET_ID",
    "NFTA_SET_USERDATA",
    "NFTA_SET_ELEM_EXPIRATION",
    "NFTA_SET_ELEM_USERDATA",
    "NFTA_COUNTER_BYTES",
    "NFTA_COUNTER_PACKETS",
}
_ANONYMOUS = re.compile(r"__(set|map)\d+")  # the kernel numbers them as they come
_INTERFACE_ATTRIBUTES = {"RTA_OIF", "RTA_IIF", "IFLA_MASTER"}


def read_network(pid: int | None = None, *, netns_fd: int | None = None) -> dict[str, Json]:
    """The normalised network of a process's network namespace, or of the one that `netns_fd` is open on.

    Returns:
        A sorted list for each of `SECTIONS`; in `nftables` the rules of a chain keep their order;
        `sysctls` is a mapping.

    Raises:
        OSError: the namespace is gone, cannot be entered, or the kernel does not answer.
    """
    if (pid is None) == (netns_fd is None):
        raise ValueError("one of pid and netns_fd names the namespace")
    if netns_fd is not None:
        return in_namespace(netns_fd, "net", _read)
    assert pid is not None
    fd = open_namespace(pid, "net")
    try:
        return in_namespace(fd, "net", _read)
    finally:
        os.close(fd)


def _read() -> dict[str, Json]:
    from pyroute2 import IPRoute  # 0.15 s: only here
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as netlink:
            links = list(netlink.get_links())
            names = {x["index"]: x.get_attr("IFLA_IFNAME") for x in links}
            found = {
                "links": [_link(x, names) for x in links],
                "addresses": [_address(x, names) for x in netlink.get_addr()],
                "routes": [],
                "rules": [],
            }
            for family in (2, 10):  # AF_INET, AF_INET6
                found["routes"] += [y for x in netlink.get_routes(family=family) if (y := _route(x, names)) is not None]
                found["rules"] += [_plain(x, names) for x in netlink.get_rules(family=family)]
        found = {section: sorted(entries, key=_order) for section, entries in found.items()}
        return {**found, "nftables": _nftables(), "sysctls": read_sysctls()}
    except NetlinkError as e:  # no OSError in pyroute2
        raise OSError(e.code, f"netlink: {e}") from e


def _order(entry: Json) -> str:
    return json.dumps(entry, sort_keys=True)


def _value(value: Any, names: dict[int, str]) -> Json:
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, set | frozenset):
        return sorted(str(x) for x in value)
    if isinstance(value, dict):
        return _plain(value, names)
    if isinstance(value, list | tuple):
        return [_value(x, names) for x in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _plain(message: Any, names: dict[int, str]) -> dict[str, Json]:
    """A netlink message, or a nest of one, as a dictionary without what a copy does not share."""
    plain: dict[str, Json] = {k: _value(v, names) for k, v in message.items() if k not in _HEADER_KEYS}
    if "value" in message and "attrs" not in message:
        plain["value"] = _value(message["value"], names)
    for name, value in message.get("attrs", ()):
        if name in _DROPPED:
            continue
        if name == "UNKNOWN":
            name = f"UNKNOWN_{value['header']['type'] & 0x3FFF}"
            value = bytes(value.data[value.offset + 4 : value.offset + value.length])
        elif name in _INTERFACE_ATTRIBUTES:
            value = names.get(value, value)
        entry = _value(value, names)
        if name in plain:  # an attribute that is there more than once
            entry = [*(plain[name] if isinstance(plain[name], list) else [plain[name]]), entry]
        plain[name] = entry
    return plain


def _link(message: Any, names: dict[int, str]) -> dict[str, Json]:
    attributes = dict(_plain(message, names))
    link = {
        "name": message.get_attr("IFLA_IFNAME"),
        "flags": message["flags"] & ~_IFF_STATE,
        "type": message["ifi_type"],
    }
    link["master"] = attributes.get("IFLA_MASTER")
    for name in _LINK_FIELDS:
        link[name.removeprefix("IFLA_").lower()] = attributes.get(name)
    return link


def _address(message: Any, names: dict[int, str]) -> dict[str, Json]:
    address = _plain(message, names)
    flags = message.get_attr("IFA_FLAGS")
    address["flags"] = (message["flags"] if flags is None else flags) & ~_IFA_STATE
    address["interface"] = names.get(message["index"], message["index"])
    return address


def _route(message: Any, names: dict[int, str]) -> dict[str, Json] | None:
    """A route; None for those that the kernel makes by itself from link-local addresses once a link has a carrier."""
    if message["flags"] & _RTM_CLONED:
        return None
    destination = message.get_attr("RTA_DST") or ""
    if message["family"] == 10 and message["proto"] == _RTPROT_KERNEL and destination.startswith(("fe80:", "ff00:")):
        return None
    route = _plain(message, names)
    route["flags"] = message["flags"] & ~_RTNH_STATE
    route.pop("table", None)  # eight bits of RTA_TABLE
    hops = route.get("RTA_MULTIPATH")
    for hop in hops if isinstance(hops, list) else ():
        hop["flags"] = hop.get("flags", 0) & ~_RTNH_STATE
        hop["oif"] = names.get(hop.get("oif"), hop.get("oif"))
    return route


def _nftables() -> dict[str, Json]:
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.nfnetlink.nftsocket import NFT_MSG_GETSETELEM, nft_set_elem_list_msg
    from pyroute2.nftables.main import NFTables

    # Family 0 is all of them; pyroute2's default shows nothing of an `inet` table.
    try:
        with NFTables(nfgen_family=0) as netlink:
            try:
                tables = list(netlink.get_tables())
            except NetlinkError as e:
                if e.code in (errno.EINVAL, errno.EOPNOTSUPP):  # this kernel has no nf_tables, so nothing can be in it
                    return {"available": False}
                raise
            chains, rules, sets = (list(x()) for x in (netlink.get_chains, netlink.get_rules, netlink.get_sets))
    except OSError as e:
        if e.errno == errno.EPROTONOSUPPORT:
            return {"available": False}
        raise
    elements: list[Json] = []
    for entry in sets:
        with NFTables(nfgen_family=entry["nfgen_family"]) as netlink:
            request = nft_set_elem_list_msg()
            table, name = entry.get_attr("NFTA_SET_TABLE"), entry.get_attr("NFTA_SET_NAME")
            request["attrs"] = [("NFTA_SET_ELEM_LIST_TABLE", table), ("NFTA_SET_ELEM_LIST_SET", name)]
            for part in netlink.request_get(request, NFT_MSG_GETSETELEM):
                for element in part.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS") or ():
                    elements.append(
                        {
                            "nfgen_family": entry["nfgen_family"],
                            "NFTA_SET_TABLE": table,
                            "NFTA_SET_NAME": name,
                            "element": _value(element, {}),
                        }
                    )
    found: dict[str, Json] = {
        "available": True,
        "tables": sorted((_plain(x, {}) for x in tables), key=_order),
        "chains": sorted((_plain(x, {}) for x in chains), key=_order),
        # A stable sort: the order of the rules within a chain is their meaning.
        "rules": sorted((_plain(x, {}) for x in rules), key=_chain_of),
        "sets": [_plain(x, {}) for x in sets],
        "elements": elements,
    }
    return _name_anonymous_sets(found)


def _chain_of(rule: dict[str, Json]) -> tuple[int, str, str]:
    return rule["nfgen_family"], rule["NFTA_RULE_TABLE"], rule["NFTA_RULE_CHAIN"]


def _name_anonymous_sets(found: dict[str, Json]) -> dict[str, Json]:
    """Number anonymous sets by the order in which the rules of their table use them."""
    numbers: dict[tuple[int, str, str], str] = {}

    def rename(value: Json, family: int, table: str) -> Json:
        if isinstance(value, str) and _ANONYMOUS.fullmatch(value):
            return numbers.setdefault((family, table, value), f"anonymous {len(numbers)}")
        if isinstance(value, dict):
            return {k: rename(v, family, table) for k, v in value.items()}
        return [rename(x, family, table) for x in value] if isinstance(value, list) else value

    rules = [rename(x, x["nfgen_family"], x["NFTA_RULE_TABLE"]) for x in found["rules"]]
    rest = {
        name: sorted((rename(x, x["nfgen_family"], x["NFTA_SET_TABLE"]) for x in found[name]), key=_order)
        for name in ("sets", "elements")
    }
    return {**found, "rules": rules, **rest}


def difference(expected: Json, observed: Json) -> list[str]:
    """How two networks differ, section by section, in words; empty when they are equal.

    A sysctl that is there only now is no difference: all namespaces get it when the host loads a kernel module, or with
    a new interface, which differs among the links. One that is there no longer is a difference: its value is lost.
    """
    found: list[str] = []
    for name, wanted, have in _sections(expected, observed):
        if wanted == have:
            continue
        if not isinstance(wanted, list) or not isinstance(have, list):
            found.append(f"{name} is {_order(have)}, expected {_order(wanted)}")
            continue
        rest = [_order(x) for x in have]
        missing = []
        for entry in wanted:
            text = _order(entry)
            if text in rest:
                rest.remove(text)
            else:
                missing.append(text)
        found += [f"{name}: missing {x}" for x in missing]
        found += [f"{name}: extra {x}" for x in rest]
        if not missing and not rest:
            found.append(f"{name}: another order")
    return found


def _sections(expected: Json, observed: Json) -> list[tuple[str, Json, Json]]:
    pairs = []
    for name in sorted({*expected, *observed}):
        wanted, have = expected.get(name), observed.get(name)
        if isinstance(wanted, dict) and isinstance(have, dict):
            pairs += [(f"{name}.{x}", value, have.get(x)) for x, value in sorted(wanted.items())]
        else:
            pairs.append((name, wanted, have))
    return pairs
