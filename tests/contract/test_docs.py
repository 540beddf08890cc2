"""docs/api.md names everything there is, so that it cannot fall behind unnoticed."""

import re
from pathlib import Path

import pytest
import typer

from polykv_proxy.app import make_app
from polykv_proxy.cli import app as cli
from polykv_proxy.config import Settings, load_settings
from polykv_proxy.errors import PolyKVError
from polykv_proxy.relay.dialects import ATTACHABLE
from polykv_proxy.relay.fields import BODY_FIELDS, OWN_HEADERS
from tests.contract.conftest import RECEIPT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def subclasses(kind: type[PolyKVError]) -> set[type[PolyKVError]]:
    return {kind}.union(*(subclasses(heir) for heir in kind.__subclasses__()))


def test_every_setting() -> None:
    names = {f"POLYKV_{field.upper()}" for field in Settings.model_fields}
    assert names - {"POLYKV_TPS_WINDOW_MS"} <= set(re.findall(r"POLYKV_\w+", PAGE))
    assert "`POLYKV_TPS_WINDOW_TOKENS`, `_MS`" in PAGE


def test_every_error_code_that_can_be_answered() -> None:
    raised = {kind.code for kind in subclasses(PolyKVError)}  # all of them are loaded with the application
    later = {"unavailable"}
    assert {code for code in raised - later if f"`{code}`" not in PAGE} == set()


def test_every_route_of_the_control_plane() -> None:
    router = make_app(load_settings(state=":memory:", upstream_url="http://127.0.0.1:1")).router
    headings = re.findall(r"`(GET|POST|DELETE) (/polykv/[^`]*)`", PAGE)
    shown = {(verb, re.sub(r"\{\w+\}", "{}", path)) for verb, path in headings}
    there = {
        (route.method, re.sub(r"\{\w+\}", "{}", route.resource.canonical))
        for route in router.routes()
        if route.resource is not None and route.resource.canonical.startswith("/polykv") and route.method != "HEAD"
    }
    assert there == {(verb, path) for verb, path in shown if not path.startswith("/polykv/engine")}


@pytest.mark.parametrize("names", [ATTACHABLE, BODY_FIELDS, RECEIPT], ids=["paths", "fields", "receipt"])
def test_paths_fields_and_receipt(names: set[str]) -> None:
    assert [name for name in names if name not in PAGE] == []


def test_headers_and_engine_flags() -> None:
    assert [name for name in OWN_HEADERS if name not in PAGE] == []
    patched = (ROOT / "patches" / "0003-hook-options-and-a-sequence-for-each-pool.patch").read_text(encoding="utf-8")
    flags = set(re.findall(r'^\+\s+\{ "(--polykv-[\w-]+)" \}', patched, re.MULTILINE))
    assert flags
    assert [flag for flag in flags if flag not in PAGE] == []


def test_every_command() -> None:
    top = typer.main.get_command(cli)
    for name, found in top.commands.items():
        assert f"polykvctl {name}" in PAGE
        for below in getattr(found, "commands", {}):
            assert re.search(rf"polykvctl {name}[^|]*`?{below}\b", PAGE), f"{name} {below}"
