"""What the comparison with llama-server's own tests runs, and what it lets pass."""

import pytest

from benchmarks import upstream_tests
from benchmarks.upstream_server import N_POOLS, with_pools, without
from benchmarks.upstream_tests import ARMS, EXCUSED, Arm, Outcome, judged, report

POOLS = ["--polykv-max-pools", str(N_POOLS)]
CUT = "test_completion::test_completion_unified[256-4-n_predict_vals1-expected_success1]"
LISTING = """    for res in results:
        if "timings" in res.body:
>           {} == n_predict
E           assert 63 == 70
"""
FAILED = Outcome("failed", LISTING.format('assert res.body["timings"]["predicted_n"]'))
CRASHED = Outcome("failed", LISTING.format("assert res.status_code"))


@pytest.mark.parametrize("arguments", [["--kv-unified", "--ctx-size", "256", "--parallel", "4"], ["--ctx-size", "256"]])
def test_a_unified_cache_is_left_as_the_test_wants_it(arguments: list[str]) -> None:
    assert with_pools(arguments) == [*arguments, *POOLS]


@pytest.mark.parametrize(
    ("n_ctx", "n_slots", "n_ctx_slot"), [(512, 2, 256), (256, 4, 256), (1024, 2, 512), (900, 3, 512)]
)
def test_a_split_cache_stays_split_and_grows_by_what_pools_take(n_ctx: int, n_slots: int, n_ctx_slot: int) -> None:
    arguments = ["--ctx-size", str(n_ctx), "--jinja", "--parallel", str(n_slots)]
    n_sequences = n_slots + N_POOLS + 2
    assert with_pools(arguments) == [
        *["--jinja", "--parallel", str(n_slots), "--ctx-size", str(n_ctx_slot * n_sequences)],
        *POOLS,
    ]


def test_a_split_cache_of_unknown_size_is_refused() -> None:
    with pytest.raises(SystemExit, match="a split cache without --ctx-size"):
        with_pools(["--parallel", "2"])


def test_flags_go_with_their_values() -> None:
    assert without(["--a", "--port", "1", "--host", "x,y", "--b"], "--port", "--host", "--c") == ["--a", "--b"]


def test_only_the_arms_with_pools_are_excused_and_only_for_a_cut_answer() -> None:
    assert {arm: list(tests) for arm, tests in EXCUSED.items()} == {
        arm: [CUT, CUT.replace("s1", "s2")] for arm in ("patched", "proxy")
    }
    for arm in ("patched", "proxy"):
        assert list(judged(arm, [CUT], {CUT: FAILED}).excused) == [CUT]
        assert judged(arm, [CUT], {CUT: CRASHED}).unexpected == {CUT: "failed: assert res.status_code == n_predict"}
    assert judged("patched-off", [CUT], {CUT: FAILED}).excused == {}
    assert list(judged("patched-off", [CUT], {CUT: FAILED}).unexpected) == [CUT]


@pytest.mark.parametrize("outcomes", [{}, {"t": Outcome("skipped")}])
def test_what_was_not_run_did_not_pass(outcomes: dict[str, Outcome]) -> None:
    found = judged("proxy", ["t"], outcomes)
    assert (found.passed, list(found.unexpected)) == ([], ["t"])


def test_table_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    stock = {"t": Outcome("passed"), CUT: Outcome("passed"), "u": Outcome("failed"), "v": Outcome("skipped")}
    excused = judged("proxy", ["t", CUT], {"t": Outcome("passed"), CUT: FAILED})
    assert report(stock, {"patched-off": Arm(passed=["t", CUT]), "proxy": excused}) == 0
    table = capsys.readouterr().out
    assert "stock: 4 tests, 2 pass with this model (1 fail, 1 skipped)" in table
    rows = [line.split() for line in table.splitlines()]
    assert ["patched-off", "2", "2", "0", "0", "0"] in rows
    assert ["proxy", "2", "1", "1", "0", "0"] in rows
    assert f"proxy: excused {CUT}" in table
    assert report(stock, {"proxy": judged("proxy", ["t"], {})}) == 1
    assert "proxy: UNEXPECTED t" in capsys.readouterr().out


def test_help_names_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        upstream_tests.parse_arguments(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n{arm} " in shown for arm in ARMS)


@pytest.mark.parametrize(
    ("on_stock", "unstable"),
    [([FAILED, Outcome("passed")], True), ([Outcome("passed")] * 2, False), ([CRASHED, CRASHED], False)],
)
def test_unstable_is_what_fails_on_stock_in_the_same_way(on_stock: list[Outcome], unstable: bool) -> None:
    found = judged("patched-off", ["t"], {"t": FAILED})
    upstream_tests.set_aside_if_unstable(found, "t", {"t": FAILED}, on_stock)
    assert (list(found.unstable), list(found.unexpected)) == ((["t"], []) if unstable else ([], ["t"]))
