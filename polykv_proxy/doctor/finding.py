"""One thing that the doctor found."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
"""error: something does not work, or is open to others. warning: it works, and costs or surprises. info: good to know.
"""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """``id`` is stable; ``what`` is the fact, ``why`` what it does to whom, ``do`` what changes it."""

    id: str
    severity: Severity
    what: str
    why: str
    do: str

    def as_json(self) -> dict[str, str]:
        return {"id": self.id, "severity": self.severity, "what": self.what, "why": self.why, "do": self.do}

    def as_line(self) -> str:
        """For a log."""
        return f"{self.what}: {self.why} ({self.do}) [{self.id}]"


def status_of(findings: Iterable[Finding]) -> Literal["ok", "warnings", "errors"]:
    found = {finding.severity for finding in findings}
    if "error" in found:
        return "errors"
    return "warnings" if "warning" in found else "ok"
