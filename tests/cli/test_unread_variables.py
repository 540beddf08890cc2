"""A variable that is named like a setting and is none: told once, at the start, and nothing else happens."""

import json
import stat
import subprocess
import sys
from pathlib import Path

from tests.cli.test_up import POLYKVCTL, environment

SAID = "POLYKV_WRAM is in the environment, and there is no such setting: did you mean POLYKV_WARM_RAM_BYTES?"
GIVEN = {"POLYKV_WRAM": "3", "POLYKV_URL": "http://127.0.0.1:1"}


def test_serve_has_it_in_its_log_and_starts() -> None:
    command = [*POLYKVCTL, "serve", "--json", "--upstream", "http://127.0.0.1:1", "--state", ":memory:", "--port", "0"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **piped, env=environment() | GIVEN) as proxy:  # type: ignore[call-overload]
        try:
            assert json.loads(proxy.stdout.readline())["upstream"] == "http://127.0.0.1:1"
            proxy.terminate()
            _, log = proxy.communicate(timeout=30)
        finally:
            proxy.kill()
    assert proxy.returncode == 0
    assert [line.split(" ", 2)[2] for line in log.splitlines() if "in the environment" in line] == [
        f"WARNING polykv.settings: {SAID}"
    ]


def test_up_says_it_once_before_anything_is_started(tmp_path: Path) -> None:
    """Its proxy, which logs to the same terminal, does not say it again."""
    engine, model = tmp_path / "engine", tmp_path / "model.gguf"
    model.touch()
    engine.write_text(f"#!{sys.executable}\n{ENGINE}")
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    known = ["--engine", str(engine), "--model", str(model), "--state", ":memory:", "--json"]
    command = [*POLYKVCTL, "up", *known, "--port", "0", "--engine-port", "0"]
    log = tmp_path / "log"
    home = {"HOME": str(tmp_path)}
    with (
        log.open("w") as sink,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=sink, text=True, env=environment() | GIVEN | home
        ) as both,
    ):
        try:
            assert both.stdout is not None
            facts = json.loads(both.stdout.readline())
            assert facts["proxy_pid"] != facts["engine_pid"], "both were ready"
            both.terminate()
            both.wait(60)
        finally:
            both.kill()
    lines = log.read_text().splitlines()
    assert [line for line in lines if "in the environment" in line] == [SAID]
    assert lines.index(SAID) == 0


ENGINE = """
import http.server, sys

class Loads(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status = 200 if self.path in ("/health", "/props", "/slots") else 404
        body = {"/props": b'{"total_slots": 1}', "/slots": b"[]"}.get(self.path, b"{}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Loads).serve_forever()
"""
