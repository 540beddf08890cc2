"""The official clients against each arm: one server for all scenarios of an arm, started as llama.cpp's tests do."""

import os
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from conformance import server
from conformance.suite import CannotRunError, Outcome, Suite, name_of, outcome_of
from conformance.upstream import Found, judged
from tests.engine.binaries import chat_model_path
from tests.engine.harness import free_port

SCENARIOS = Path(__file__).resolve().parent / "scenarios"
PROXY_ONLY = "test_refused"
START_WITHIN_S, STOP_WITHIN_S = 180, 30
TEMPLATE = "models/templates/Qwen-Qwen2.5-7B-Instruct.jinja"
"""Of a model with the same special tokens as the tests' chat model, whose own template leaves tools out."""
FLAGS = ("--parallel", "4", "--ctx-size", "8192", "--kv-unified", "--jinja", "--alias", "smol", "--seed", "42")


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("openai", "anthropic")}


@contextmanager
def serving(suite: Suite, arm: str, logs: Path) -> Iterator[str]:
    """The address of a server of this arm with the tests' chat model.

    Raises:  CannotRunError
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", server.__name__, arm]
    command += ["--port", str(port), "--host", "127.0.0.1", "--model", str(chat_model_path()), "--threads", "1", *FLAGS]
    command += ["--chat-template-file", str(suite.upstream / TEMPLATE)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYKV_", "LLAMA_"))}
    environment = kept | {"CONFORMANCE_BINARY": str(suite.binaries[server.ARMS[arm]])}
    with (logs / "server.log").open("w") as log:
        process = suite.children.start(command, stdout=log, stderr=log, env=environment)
    try:
        end_s = time.monotonic() + START_WITHIN_S
        while not server.is_healthy(url):
            if process.poll() is not None or time.monotonic() > end_s:
                raise CannotRunError(f"{(logs / 'server.log').read_text()[-4000:]}\nno server for {arm}")
            time.sleep(0.05)
        yield url
    finally:
        suite.children.end(process, STOP_WITHIN_S)


def run(suite: Suite, arm: str, logs: Path, *, keyword: str | None = None) -> dict[str, Outcome]:
    """Outcome per scenario.

    Raises:  CannotRunError
    """
    logs.mkdir(parents=True)
    results = logs / "results.xml"
    root = SCENARIOS.parent.parent
    with serving(suite, arm, logs) as url:
        own = {"CONFORMANCE_URL": url, "CONFORMANCE_ARM": arm, "NO_PROXY": "*", "PYTHONPATH": str(root)}
        command = [sys.executable, "-m", "pytest", str(SCENARIOS), "-p", "no:cacheprovider", "-q", "-W", "default"]
        command += ["-o", "addopts=", "--junit-xml", str(results), *(["-k", keyword] if keyword else [])]
        with (logs / "pytest.log").open("w") as log:
            status = suite.children.run(command, cwd=root, env=os.environ | own, stdout=log, stderr=log)
    if status not in (0, 1, 5):
        raise CannotRunError(f"{(logs / 'pytest.log').read_text()[-4000:]}\npytest ended with {status} on {arm}")
    return {name_of(case): outcome_of(case) for case in ET.parse(results).iter("testcase")}


def compare(
    suite: Suite, arms: Sequence[str], folder: Path, say: Callable[[str], None], *, keyword: str | None = None
) -> Found:
    """What passes on stock has to pass on the others; what only the proxy is asked has to pass where it is asked.

    Raises:  CannotRunError
    """
    found = Found(run(suite, "stock", folder / "scenarios" / "stock", keyword=keyword))
    passing = [name for name, outcome in found.stock.items() if outcome.how == "passed"]
    say(f"scenarios: {len(found.stock)}, stock passes {len(passing)}")
    for arm in arms:
        outcomes = run(suite, arm, folder / "scenarios" / arm, keyword=keyword)
        own = [name for name, it in outcomes.items() if name.startswith(PROXY_ONLY) and it.how != "skipped"]
        found.arms[arm] = judged(arm, [*passing, *own], outcomes)
        say(f"scenarios: {arm} passes {len(found.arms[arm].passed)} of {len(passing) + len(own)}")
    return found
