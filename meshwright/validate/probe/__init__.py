"""One rank's stages of a large plan, computed on one device and compared."""

from meshwright.validate.probe.report import ProbeResult, probe_document, probe_report, write_probe
from meshwright.validate.probe.stage_probe import first_device, run_probe

__all__ = [
    "ProbeResult",
    "first_device",
    "probe_document",
    "probe_report",
    "run_probe",
    "write_probe",
]
