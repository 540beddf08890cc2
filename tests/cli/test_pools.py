"""``polykvctl pools`` through the real command line, against a real socket."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from polykv_proxy.cli import app as polykvctl
from polykv_proxy.cli.output import complain
from polykv_proxy.cli.pool_tree import summary
from polykv_proxy.cli.pools import app
from polykv_proxy.ids import SessionId
from polykv_proxy.tree.view import SessionFacts
from tests.cli.contract_server import ContractServer
from tests.tree.make import add_root, extend, toks

runner = CliRunner()


@pytest.fixture
def server() -> Iterator[ContractServer]:
    with ContractServer() as running:
        yield running


def run(server: ContractServer, *args: str, stdin: str | bytes | None = None) -> Result:
    return runner.invoke(app, [*args, "--url", server.url], input=stdin)


def grow(server: ContractServer) -> None:
    root = server.resident(add_root(server.tree, toks(range(1740)), name="coding-agent"))
    task = server.resident(extend(server.tree, root.pool_id, toks(range(220))))
    extend(server.tree, root.pool_id, toks(range(90)), branch_pos=1200)
    extend(server.tree, task.pool_id, toks(1))
    server.in_use = {root.pool_id, task.pool_id}
    server.sessions.append(
        SessionFacts(
            session_id=SessionId("agent-1"),
            pool_id=task.pool_id,
            pool_n_tokens=1960,
            suffix_n_tokens=52,
            tps_ewma=48.06,
            ttft_ms=31.0,
            state="generating",
        )
    )


def test_tree_shows_lineage_sizes_and_sessions_in_80_columns(server: ContractServer) -> None:
    grow(server)
    result = run(server, "tree")
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "pool             prefix    own       KV  where",
        "coding-agent      1,740  1,740  80.2 MB  resident",
        "├─ #2             1,960    220  10.1 MB  resident",
        "│  │  ▸ agent-1             52   2.4 MB  generating 48.1 tok/s",
        "│  └─ #4          1,961      1      0 B  cold",
        "└─ #3             1,290     90      0 B  cold",
        "",
        "4 pools, depth 3 · 1 session · sequences 8/22 · cells 1,986/16,384",
    ]


def test_what_is_saved_outside_the_cache_is_told() -> None:
    cells = {"kv_cells_used": 2000, "kv_cells_total": 16384, "kv_cells_high": 2756, "idle_tax": None}
    view = {"pools": [], "tree_depth": 0, "seq_ids_used": 0, "seq_ids_max": 16, **cells}
    start = "0 pools, depth 0 · 0 sessions · sequences 0/16 · cells 2,000/16,384"

    def told(more: dict[str, Any]) -> str:
        return " · ".join(summary(view | more).facts)

    assert told({}) == start
    places = {"ram": {"bytes": 40_118_176}, "disk": {"bytes": 0}}
    assert told({"kv_cells_high": 2757, "warm": places}) == f"{start}, highest 2,757 · warm 40.1 MB in memory"
    counted = {"ram": {"bytes": 0, "hits": 3}, "disk": {"bytes": 0, "hits": 1}, "misses": 2}
    assert told({"warm": counted}) == f"{start} · brought back 4, missed 2"
    places = {"ram": {"bytes": 0}, "disk": {"bytes": 80_000_000}}
    assert told({"idle_tax": 0.31, "warm": places}) == f"{start} · warm 80.0 MB on disk · idle cells cost 31%"
    places = {"ram": {"bytes": 40_118_176}, "disk": {"bytes": 80_000_000}}
    assert told({"warm": places}) == f"{start} · warm 40.1 MB in memory, 80.0 MB on disk"


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 100])
def test_the_last_lines_break_between_facts_only(columns: int) -> None:
    places = {"ram": {"bytes": 40_118_176, "hits": 12}, "disk": {"bytes": 80_000_000}, "misses": 1}
    cells = {"kv_cells_used": 2000, "kv_cells_total": 16384, "kv_cells_high": 12756, "idle_tax": 0.31}
    view = {"pools": [], "tree_depth": 0, "seq_ids_used": 0, "seq_ids_max": 16, "warm": places, **cells}
    footer = summary(view)
    console = Console(width=columns, file=io.StringIO())
    with console.capture() as shown:
        console.print(footer, crop=False)
    lines = shown.get().splitlines()
    assert [fact for line in lines for fact in line.split(" · ")] == footer.facts
    assert all(len(line) <= columns or " · " not in line for line in lines)
    assert len(lines) < len(footer.facts) or columns < 60, "a line takes what fits"


@pytest.mark.parametrize("columns", [50, 66, 72, 80])
def test_a_session_outside_the_cache_is_shown_with_what_is_kept_of_it(
    server: ContractServer, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    root = server.resident(add_root(server.tree, toks(range(1740)), name="coding-agent"))
    server.in_use = {root.pool_id}
    facts: dict[str, Any] = {"pool_n_tokens": 0, "suffix_n_tokens": 0, "tps_ewma": 48.06}
    for name, state, n_bytes in (("agent-1", "parked", 2_400_000), ("agent-2", "idle", 0)):
        session_id = SessionId(name)
        server.sessions.append(
            SessionFacts(session_id=session_id, pool_id=root.pool_id, state=state, warm_bytes=n_bytes, **facts)
        )
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run(server, "tree").stdout.splitlines()[2:]
    lines = [" ".join(line.split()) for line in shown[: shown.index("")]]
    told = " ".join(lines)
    assert told == "▸ agent-1 0 0 B parked 2.4 MB 48.1 tok/s ▸ agent-2 0 0 B idle no cells 48.1 tok/s"
    assert not any(line.endswith((" 2.4", "no", " 48.1")) for line in lines), "no number without its unit"


def test_what_has_no_pool_is_a_line_of_its_own_and_counted(server: ContractServer) -> None:
    server.resident(add_root(server.tree, toks(range(100)), name="desk"))
    for name, n_tokens in (("a", 700), ("b", 86)):
        server.sessions.append(
            SessionFacts(session_id=SessionId(name), pool_id=None, pool_n_tokens=0, suffix_n_tokens=n_tokens)
        )
    view = json.loads(run(server, "tree", "--json").stdout)
    view["unpooled"] |= {"kv_cells": 786, "kv_bytes": 786 * 23040}
    server.answer_next = (200, json.dumps(view).encode(), {})
    lines = run(server, "tree").stdout.splitlines()
    assert lines[2].split() == ["unpooled", "786", "18.1", "MB", "2", "sessions"]
    assert lines[4].startswith("1 pool, depth 1 · 2 sessions · ")
    view |= {"pools": [], "tree_depth": 0}
    server.answer_next = (200, json.dumps(view).encode(), {})
    lines = run(server, "tree").stdout.splitlines()
    assert lines[0].startswith("No pools. Make one with: ")
    assert lines[2].split() == ["unpooled", "786", "18.1", "MB", "2", "sessions"]


def test_what_slots_still_hold_of_released_pools_is_a_line_of_its_own(server: ContractServer) -> None:
    server.resident(add_root(server.tree, toks(range(100)), name="desk"))
    view = json.loads(run(server, "tree", "--json").stdout)
    gone = {"name": None, "parent": -1, "branch_pos": 0, "prefix_len": 400}
    view["released"] = [
        gone | {"pool_id": 7, "own_kv_cells": 397, "own_kv_bytes": 397 * 23040},
        gone | {"pool_id": 8, "own_kv_cells": 3, "own_kv_bytes": 3 * 23040},
    ]
    server.answer_next = (200, json.dumps(view).encode(), {})
    lines = run(server, "tree").stdout.splitlines()
    assert lines[2].split() == ["released", "400", "9.2", "MB", "in", "slots"]
    view |= {"pools": [], "tree_depth": 0}
    server.answer_next = (200, json.dumps(view).encode(), {})
    assert run(server, "tree").stdout.splitlines()[2].split()[:2] == ["released", "400"]


def test_of_an_engine_that_is_away_only_what_is_on_disk_is_shown(server: ContractServer) -> None:
    server.resident(add_root(server.tree, toks(range(100)), name="desk"))
    view = json.loads(run(server, "tree", "--json").stdout)
    pool = view["pools"][0]
    for of_pool, shown in ((None, "unknown"), (41_400_000, "unknown 41.4 MB on disk")):
        pool |= {"residency": None, "expires_ts": None, "own_kv_bytes": None, "warm_bytes": of_pool}
        places = {"ram": {"bytes": None, "max_bytes": 1 << 30}, "disk": {"bytes": of_pool, "max_bytes": 0}}
        server.answer_next = (200, json.dumps(view | {"warm": places}).encode(), {})
        told = run(server, "tree").stdout
        assert told.splitlines()[1].split(maxsplit=4)[4] == shown
        assert " warm ? in memory" in " ".join(told.split())


def test_deep_tree_stays_within_80_columns(server: ContractServer) -> None:
    pool = add_root(server.tree, toks(range(9)), name="n" * 40)
    for _ in range(64):
        pool = extend(server.tree, pool.pool_id, toks(1))
    lines = run(server, "tree").stdout.splitlines()
    assert len(lines) == 1 + 65 + 2
    assert max(map(len, lines)) <= 80
    assert "64: #65" in lines[-3]


LONG = "team:coding-agent.instructions-and-tools.2026-11-30.rev-01234567890"


def grow_long(server: ContractServer) -> None:
    tree = server.tree
    root = server.resident(add_root(tree, toks(range(131072)), name=LONG))
    task = tree.plan_fork_own(root.pool_id, toks(range(65536)), branch_pos=None, name=f"{LONG}.task")
    server.resident(tree.commit(task, now_s=0.0))
    web = tree.commit(tree.plan_fork_own(root.pool_id, toks(range(90)), branch_pos=1200, name=f"{LONG}.web"), now_s=0.0)
    tree.set_residency(web.pool_id, "materializing")
    web.pin = True
    extend(tree, web.pool_id, toks(1))
    root.n_hits, root.n_queries = 12345, 23456
    server.in_use = {root.pool_id}
    for name in ("agent-1", "4be0643f-1d98-573b-97cd-ca98a65347dd"):
        facts: dict[str, Any] = {"pool_n_tokens": 131072, "suffix_n_tokens": 4321, "tps_ewma": 48.06}
        server.sessions.append(
            SessionFacts(session_id=SessionId(name), pool_id=root.pool_id, state="generating", **facts)
        )


def test_tree_cuts_long_names_and_no_number(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(LONG) == 67
    grow_long(server)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(server, "tree").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1:7] == [
        "#1 team:coding-agent.instructions-… 131,072 131,072 6.0 GB resident",
        "│  ▸ 4be0643f-1d98-573b-97cd-ca98a…           4,321 199 MB generating 48.1 tok/s",
        "│  ▸ agent-1                                  4,321 199 MB generating 48.1 tok/s",
        "├─ #2 team:coding-agent.instructio… 196,608  65,536 3.0 GB resident grace over",
        "└─ #3 team:coding-agent.instructio…   1,290      90    0 B materializing pinned",
        "   └─ #4                              1,291       1    0 B cold",
    ]


def test_list_cuts_long_names_and_no_number(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    grow_long(server)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(server, "ls").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "1 team:codi… 0 131072 131072 6.0 GB 12345/23456 2 resident",
        "2 team:codi… 1 131072 196608 65536 3.0 GB 0/0 0 resident grace",
        "over",
        "3 team:codi… 1 1200 1290 90 0 B 0/0 0 materializing",
        "pinned",
        "4 3 1290 1291 1 0 B 0/0 0 cold",
    ]


def test_sessions_cut_long_ids_and_no_number(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"prefix_n_tokens": 131072, "suffix_n_tokens": 4321, "marginal_kv_bytes": 199111680, "tps_ewma": 48.06}
    session = {"session_id": LONG, "pool_id": 7, "slot_id": 3, "state": "generating", **facts}
    server.answer_next = (200, json.dumps({"sessions": [session]}).encode(), {})
    monkeypatch.setenv("COLUMNS", "80")
    lines = runner.invoke(polykvctl, ["sessions", "--url", server.url]).stdout.splitlines()
    assert lines[1:] == ["team:coding-agent.instructions-…    7    3 131,072 4,321 199 MB  48.1 generating"]


def test_a_session_outside_the_cache_is_parked(server: ContractServer) -> None:
    facts: dict[str, Any] = dict.fromkeys(("prefix_n_tokens", "suffix_n_tokens", "marginal_kv_bytes", "tps_ewma"))
    facts |= {"warm_bytes": 2_400_000}
    session = {"session_id": "a", "pool_id": 7, "slot_id": None, "state": "parked", "parked": True, **facts}
    server.answer_next = (200, json.dumps({"sessions": [session]}).encode(), {})
    lines = runner.invoke(polykvctl, ["sessions", "--url", server.url]).stdout.splitlines()
    assert lines[1].split() == ["a", "7", "parked", "2.4", "MB"]


@pytest.mark.parametrize("command", ["tree", "ls"])
def test_a_wide_terminal_shows_names_whole(
    server: ContractServer, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    grow_long(server)
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(server, command).stdout
    assert all(f"{LONG}{end} " in shown for end in ("", ".task", ".web"))
    assert "…" not in shown


def test_a_terminal_too_narrow_for_the_numbers_still_gets_them(
    server: ContractServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow_long(server)
    monkeypatch.setenv("COLUMNS", "30")
    shown = run(server, "ls").stdout
    assert all(fact in shown for fact in ("131072 131072 6.0 GB 12345/23456", "196608  65536 3.0 GB", "materializing"))


def test_empty_tree_says_what_to_do(server: ContractServer) -> None:
    assert "polykvctl pools create" in run(server, "tree").stdout


def test_session_ids_cannot_drive_the_terminal(server: ContractServer) -> None:
    grow(server)
    evil = SessionFacts(
        session_id=SessionId("\x1b]0;x\x07[red]b[/red]\n"),
        pool_id=server.tree.get(1).pool_id,
        pool_n_tokens=1,
        suffix_n_tokens=1,
    )
    server.sessions.append(evil)
    shown = run(server, "tree").stdout
    assert "\x1b" not in shown
    assert "\\x1b]0;x\\x07[red]b[/red]\\n" in shown


@pytest.mark.parametrize("command", ["tree", "ls"])
def test_json_is_the_servers_answer_and_nothing_else(server: ContractServer, command: str) -> None:
    grow(server)
    view = json.loads(run(server, command, "--json").stdout)
    assert [pool["pool_id"] for pool in view["pools"]] == [1, 2, 3, 4]
    assert view["kv_cells_used"] == 1986


def test_ls_lists_every_pool(server: ContractServer) -> None:
    grow(server)
    lines = run(server, "ls").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["id", "1", "2", "3", "4"]
    assert "coding-agent" in lines[1]


def test_show_finds_by_name_and_draws_what_is_below(server: ContractServer) -> None:
    grow(server)
    shown = run(server, "show", "coding-agent").stdout
    assert "prefix_len        1,740" in shown
    assert "own_kv_bytes      80.2 MB" in shown
    assert "└─ #3" in shown
    assert json.loads(run(server, "show", "2", "--json").stdout)["pools"][0]["pool_id"] == 2


def test_create_fork_release_from_the_command_line(server: ContractServer, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps({"tokens": list(range(20))}))
    made = run(server, "create", "--tokens", str(ids), "--name", "base", "--pin", "--ttl", "12.5")
    assert made.stdout == "pool 1 (base): 20 tokens; resident in 6,200 ms\n"
    assert server.asked[-1].body == {"tokens": list(range(20)), "name": "base", "pin": True, "ttl_s": 12.5}

    forked = run(server, "fork", "base", "--own-tokens", "-", "--branch-pos", "7", "--json", stdin="91, 92\n93")
    assert json.loads(forked.stdout)["branch_pos"] == 7
    assert server.asked[-1].path == "/polykv/pools/base/fork"
    assert server.asked[-1].body == {"own_tokens": [91, 92, 93], "branch_pos": 7}

    refused = run(server, "release", "base")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == (
        "polykvctl: pool base has 1 child (pool_has_children, HTTP 409); --recursive releases what is below it too\n"
    )
    released = run(server, "release", "base", "--recursive", "--json")
    assert json.loads(released.stdout)["released"] == [2, 1]


def test_fork_names_where_the_prefix_diverges(server: ContractServer) -> None:
    grow(server)
    result = run(server, "fork", "coding-agent", "--tokens", "-", "--branch-pos", "5", stdin="[0, 1, 9, 9, 9, 9, 9]")
    assert result.exit_code == 1
    assert "position 2" in result.stderr
    assert "prefix_mismatch" in result.stderr


@pytest.mark.parametrize(
    ("args", "stdin", "body"),
    [
        (["--prompt", "You are"], None, {"prompt": "You are"}),
        (["--prompt-file", "-"], "Grüße\n", {"prompt": "Grüße\n"}),
        (["--messages", "-"], '[{"role": "system"}]', {"messages": [{"role": "system"}]}),
        (
            ["--messages", "-"],
            '{"model": "m", "messages": [], "tools": [1], "stream": true}',
            {"messages": [], "tools": [1]},
        ),
        (["--from-session", "s1"], None, {"from_session": "s1"}),
        (["--tokens", "-"], "1 2\n3", {"tokens": [1, 2, 3]}),
    ],
)
def test_what_a_pool_is_made_from(server: ContractServer, args: list[str], stdin: str | None, body: Any) -> None:
    assert run(server, "create", *args, stdin=stdin).exit_code == 0
    assert server.asked[-1].body == body


@pytest.mark.parametrize(
    ("args", "stdin", "complaint"),
    [
        (["create"], None, "give exactly one of --prompt, --prompt-file, --messages, --tokens, --from-session"),
        (["create", "--prompt", "a", "--tokens", "x"], None, "not --prompt and --tokens"),
        (["create", "--prompt-file", "/nowhere/x"], None, "/nowhere/x: No such file or directory"),
        (["create", "--prompt-file", "-"], b"\xff\xfe", "not UTF-8 at byte 0"),
        (["create", "--messages", "-"], "{", "not JSON"),
        (["create", "--messages", "-"], '{"a": 1}', "neither an array of messages"),
        (["create", "--tokens", "-"], "1 two", "'two' is not a token id"),
        (["create", "--tokens", "-"], "[1, true]", "not all tokens are integers"),
        (["show", "../../health"], None, "is no pool"),
        (["release", ".."], None, "is no pool"),
    ],
)
def test_wrong_usage_is_status_2_and_asks_nobody(
    server: ContractServer, args: list[str], stdin: str | bytes | None, complaint: str
) -> None:
    result = run(server, *args, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert server.asked == []


def test_admin_key_goes_along_as_bearer(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    run(server, "ls", "--admin-key", "s3cret")
    monkeypatch.setenv("POLYKV_ADMIN_KEY", "from-env")
    run(server, "ls")
    assert [asked.authorization for asked in server.asked] == ["Bearer s3cret", "Bearer from-env"]


def error(message: str, code: str) -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            (401, error("no key", "unauthorized"), {}),
            "no key (unauthorized, HTTP 401); give the key with --admin-key or POLYKV_ADMIN_KEY",
        ),
        (
            (507, error("12 cells\nmissing", "kv_exhausted"), {"retry-after": "3"}),
            "12 cells missing (kv_exhausted, HTTP 507); try again in 3 s",
        ),
        ((404, b"<html>", {}), "/polykv/pools: HTTP 404 without a reason: is this the proxy?"),
        ((200, b"<html>", {}), "/polykv/pools did not answer JSON: is this the proxy?"),
        ((302, b"{}", {"location": "/x"}), "/polykv/pools: HTTP 302 without a reason: is this the proxy?"),
    ],
)
def test_what_the_server_refused_is_one_line_and_status_1(
    server: ContractServer, answer: tuple[int, bytes, dict[str, str]], line: str
) -> None:
    server.answer_next = answer
    result = run(server, "ls", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"polykvctl: {line}\n")


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (404, {"message": "File Not Found", "type": "not_found_error", "code": 404}, {}),
        (401, {"message": "Invalid API Key", "type": "authentication_error", "code": 401}, {"server": "llama.cpp"}),
    ],
)
def test_an_engine_in_the_proxys_place_is_named(
    server: ContractServer, status: int, body: dict[str, Any], headers: dict[str, str]
) -> None:
    server.answer_next = (status, json.dumps({"error": body}).encode(), headers)
    result = run(server, "tree")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"polykvctl: {server.url} is no PolyKV proxy: a llama-server answers there; the proxy listens on port 8090 "
        "by default, name it with --url or POLYKV_URL\n"
    )


def test_nobody_there_is_status_3_and_says_how_to_start_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connecting is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = runner.invoke(app, ["ls", "--url", url])
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"polykvctl: the proxy at {url} cannot be reached: Connection refused; start it with `make up` or "
        "`polykvctl serve`, or name another with --url or POLYKV_URL\n"
    )


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://x", "http://", "http://a:99999999", "http://[::1"])
def test_url_that_is_none_is_status_2(url: str) -> None:
    result = runner.invoke(app, ["ls", "--url", url])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_proxy_from_the_environment_is_not_used_for_loopback(
    server: ContractServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert run(server, "ls").exit_code == 0


def test_installed_command_ends_with_the_same_statuses(server: ContractServer) -> None:
    """Once through ``polykvctl`` itself: its own error handling must not change ours."""

    def ended(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "polykv_proxy.cli", "pools", *args],
            env=os.environ | {"POLYKV_URL": server.url},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    assert (ended("ls", "--json").returncode, ended("show", "7").returncode) == (0, 1)
    unreachable = ended("ls", "--url", "http://127.0.0.1:1")
    assert (unreachable.returncode, len(unreachable.stderr.splitlines())) == (3, 1)
    assert (ended("ls", "--wrong").returncode, ended("create").returncode) == (2, 2)


def test_errors_say_what_to_do_next(server: ContractServer) -> None:
    grow(server)
    for args, ending in (
        (["show", "nope"], "; `polykvctl pools ls` shows what is there"),
        (
            ["create", "--prompt", "x", "--name", "coding-agent"],
            "already: use it, fork it or release it, or take another name (name_taken, HTTP 409)",
        ),
        (["create", "--prompt", "x", "--name", "12"], "; begin it with a letter (invalid_request, HTTP 400)"),
    ):
        refused = run(server, *args)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr.endswith(f"{ending}\n")
    away = {"error": {"code": "upstream_unavailable", "message": "cannot connect", "type": "upstream_error"}}
    server.answer_next = (503, json.dumps(away).encode(), {})
    assert run(server, "tree").stderr == (
        "polykvctl: cannot connect (upstream_unavailable, HTTP 503); "
        "is the llama-server of --upstream running? `polykvctl doctor` tells its URL\n"
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_error_is_one_line_and_broken_between_words_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    line = f"polykvctl: {'a word and ' * 9}a/very/{'long/' * 10}path"
    complain(line)
    lines = screen.getvalue().splitlines()
    assert " ".join(part.strip() for part in lines) == line
    assert len(lines) == 1 or is_terminal
    assert all(len(part) <= 40 for part in lines[:-1]) or not is_terminal
