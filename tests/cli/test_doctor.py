"""``polykvctl doctor`` through the real command line: what it prints and how it ends."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from polykv_proxy.cli import app
from tests.cli.contract_server import ContractServer

runner = CliRunner()


def finding(id_: str, severity: str) -> dict[str, str]:
    return {"id": id_, "severity": severity, "what": "a fact", "why": "it costs", "do": "change it"}


def run(found: list[dict[str, str]], *args: str) -> tuple[Result, ContractServer]:
    with ContractServer() as server:
        body: dict[str, Any] = {"status": "ok", "findings": found, "facts": {}}
        server.answer_next = (200, json.dumps(body).encode(), {})
        return runner.invoke(app, ["doctor", *args, "--url", server.url]), server


@pytest.mark.parametrize(
    ("severities", "status", "summary"),
    [
        ([], 0, "nothing found"),
        (["info"], 0, "1 info"),
        (["warning", "warning", "info"], 0, "2 warnings, 1 info"),
        (["error", "warning"], 1, "1 error, 1 warning"),
    ],
)
def test_exit_status_by_the_worst_finding(severities: list[str], status: int, summary: str) -> None:
    result, server = run([finding(f"f_{severity}", severity) for severity in severities])
    assert result.exit_code == status
    assert result.stdout.splitlines()[-1] == summary
    assert [(asked.verb, asked.path) for asked in server.asked] == [("GET", "/polykv/doctor")]


def test_a_finding_says_what_why_and_what_to_do() -> None:
    result, _ = run([finding("batch_large", "warning")])
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[:4] == ["warning  batch_large", "  a fact: it costs.", "  → change it", ""]


def test_json_is_the_answer_and_the_status_the_same() -> None:
    result, _ = run([finding("not_owner", "error")], "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["findings"][0]["id"] == "not_owner"


def test_nobody_there_is_status_3_and_one_line() -> None:
    result = runner.invoke(app, ["doctor", "--json", "--url", "http://127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.count("\n") == 1
