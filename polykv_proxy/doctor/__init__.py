"""What is wrong, dangerous or useless in how an engine, a proxy and their pools are set up. Pure.

facts    plain values: what the engine said last, the settings, the tree; None = not known, and then nothing is claimed
finding  one thing to tell: what, why, what to do
checks   every check there is, as lists; the functions are in
layout   the engine and its cache
flags    llama-server's flags beside pools
use      pools and sessions now, and the proxy's settings
sizes    what llama-server would not start with

The same checks make the lines that the proxy logs when it finds an engine, and the answer of ``GET /polykv/doctor``.
"""

from polykv_proxy.doctor.checks import examine
from polykv_proxy.doctor.facts import EngineFlagFacts, Facts
from polykv_proxy.doctor.finding import Finding, Severity, status_of
from polykv_proxy.doctor.sizes import EngineSizes, check_sizes

__all__ = [
    "EngineFlagFacts",
    "EngineSizes",
    "Facts",
    "Finding",
    "Severity",
    "check_sizes",
    "examine",
    "status_of",
]
