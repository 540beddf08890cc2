"""docs/changes.md says all that the proxy changes. Each of its rows has a check here, each check a row.

The page drives it: a check is run with the settings of its row under *with*, and must see the change; and with those
under *without*, and must not see it.
"""

import re
from pathlib import Path

import pytest

from polykv_proxy.config import ENV_PREFIX, Settings
from tests.contract.changes import CHECKS
from tests.contract.changes.lab import Lab
from tests.relay.conftest import ProxyMaker

PAGE = (Path(__file__).parents[2] / "docs" / "changes.md").read_text(encoding="utf-8")
NONE: dict[str, str] = {}


def settings_in(cell: str) -> dict[str, str] | None:
    """``default``: {}; ``always``: None; else what is set, by field."""
    if cell in ("default", "always"):
        return {} if cell == "default" else None
    found = re.findall(rf"`{ENV_PREFIX}(\w+)=([^`]*)`", cell)
    assert found, cell
    return {name.lower(): value for name, value in found}


def rows() -> dict[str, tuple[dict[str, str], dict[str, str] | None]]:
    """By name: what it is shown with, and what it is gone with."""
    found = {}
    for line in PAGE.splitlines():
        if not line.startswith("| `"):
            continue
        name, what, shown_with, gone_with = (cell.strip() for cell in line.strip("|").split(" | "))
        assert what
        name, with_it = name.strip("`"), settings_in(shown_with)
        assert name not in found
        assert with_it is not None
        found[name] = with_it, settings_in(gone_with)
    return found


ROWS = rows()


def test_every_row_has_a_check_and_every_check_a_row() -> None:
    assert ROWS.keys() == CHECKS.keys()
    assert len(ROWS) == PAGE.count("\n| `")


def test_the_page_names_settings_that_there_are() -> None:
    named = {name.lower() for name in re.findall(rf"{ENV_PREFIX}([A-Z_]+)", PAGE)}
    assert named <= Settings.model_fields.keys()


@pytest.mark.parametrize("name", ROWS)
async def test_what_a_row_says_is_so(make_proxy: ProxyMaker, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shown_with, gone_with = ROWS[name]
    assert await CHECKS[name](Lab(make_proxy, monkeypatch, shown_with))
    if gone_with is not None:
        assert not await CHECKS[name](Lab(make_proxy, monkeypatch, gone_with))
