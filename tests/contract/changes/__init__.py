"""How to see each change that docs/changes.md names: checks that say whether it is there.

lab        the proxy in front of an engine that is played byte by byte, or of the fake one
requests   what the engine gets, and when
replies    what the client gets
refusals   what the engine never sees
"""

from tests.contract.changes.lab import Check
from tests.contract.changes.refusals import REFUSALS
from tests.contract.changes.replies import REPLIES
from tests.contract.changes.requests import REQUESTS

__all__ = ["CHECKS"]

CHECKS: dict[str, Check] = {**REQUESTS, **REPLIES, **REFUSALS}
