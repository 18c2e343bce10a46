"""Which CRIU this host uses, and how it comes here.

Kernels outgrow a distribution's CRIU (from 6.13 on 4.1 is needed, from 6.16 on 4.2), so drums takes the first that
passes a live dump and restore: the operator's (`DRUMS_CRIU`), the system's, Debian 13's, a newer one. What is not the
system's is unpacked into a private prefix, and the host's packages stay as they are.
"""

from drums_core.criu_provider.install import find_criu, install_criu
from drums_core.criu_provider.model import Criu
from drums_core.criu_provider.probe import ProbeResult, probe_criu

__all__ = ["Criu", "ProbeResult", "find_criu", "install_criu", "probe_criu"]
