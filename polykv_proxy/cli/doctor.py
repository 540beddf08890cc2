"""``polykvctl doctor``: what is wrong, dangerous or useless in how engine, proxy and pools are set up."""

from typing import TYPE_CHECKING, Any

import typer

from polykv_proxy.cli.output import DEFAULT_URL, AdminKey, AsJson, Url, echo_json, ending_well, make_console

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def doctor(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Look for what is wrong, dangerous or useless in the set-up; exit 1 if something does not work."""
    from polykv_proxy.cli.client import ControlClient

    with ending_well(), ControlClient(url, admin_key) as control:
        answer = control.get("/polykv/doctor")
    findings: list[dict[str, Any]] = answer["findings"]
    if as_json:
        echo_json(answer)
    else:
        console = make_console()
        for finding in findings:
            _print(console, finding)
        console.print(_summary(findings))
    if any(finding["severity"] == "error" for finding in findings):
        raise typer.Exit(1)


def _print(console: "Console", finding: dict[str, Any]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    severity = str(finding["severity"])
    console.print(Text.assemble((f"{severity:<8}", _STYLES.get(severity, "")), (f" {finding['id']}", "bold")))
    console.print(Padding(f"{finding['what']}: {finding['why']}.", (0, 0, 0, 2)))
    console.print(Padding(Text.assemble(("→ ", "green"), finding["do"]), (0, 0, 1, 2)))


def _summary(findings: list[dict[str, Any]]) -> str:
    counts = [
        f"{n} {severity}{'s' if n > 1 and severity != 'info' else ''}"
        for severity in _STYLES
        if (n := sum(finding["severity"] == severity for finding in findings))
    ]
    return ", ".join(counts) if counts else "nothing found"
