"""Connection tracking, loaded as a dump would load it.

A dump by CRIU reads the connections that netfilter tracks, which loads that kernel module, and with it each
network namespace gets its sysctls. After a reboot nothing would have loaded it before the first restore: that desktop
would lack what its checkpoint recorded.
"""

from __future__ import annotations

import structlog

_log = structlog.get_logger(__name__)


def load_conntrack() -> None:
    """Ask the kernel for its statistics of tracked connections, which loads the module where it is one. Blocks.

    A kernel without it is left as it is: there a dump finds none either.

    Source: `nfnetlink_rcv_msg` in Linux `net/netfilter/nfnetlink.c`.
    """
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

    try:
        with NFCTSocket() as netlink:
            netlink.stat()
    except (NetlinkError, OSError) as e:
        _log.info("no connection tracking in this kernel", error=str(e))
