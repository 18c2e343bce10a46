"""What this host can do and lacks, from live probes, each with the command that mends it."""

from drums_core.doctor.diagnose import diagnose
from drums_core.doctor.finding import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
