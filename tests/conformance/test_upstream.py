"""What the comparison with llama-server's own tests runs, and what it lets pass."""

from pathlib import Path

import pytest

from conformance import suite, upstream
from conformance.excuses import EXCUSED
from conformance.server import ARMS, N_POOLS, with_pools, without
from conformance.suite import Outcome, Suite
from conformance.upstream import Arm, Found, compare_file, judged, remembered, set_aside

MODEL = ["--hf-repo", "owner/name"]
POOLS = ["--polykv-max-pools", str(N_POOLS)]
CUT = "test_completion::test_completion_unified[256-4-n_predict_vals1-expected_success1]"
LISTING = """    for res in results:
        if "timings" in res.body:
>           {} == n_predict
E           assert 63 == 70
"""
FAILED = Outcome("failed", LISTING.format('assert res.body["timings"]["predicted_n"]'))
CRASHED = Outcome("failed", LISTING.format("assert res.status_code"))
PASSED = Outcome("passed")


@pytest.mark.parametrize("arguments", [["--kv-unified", "--ctx-size", "256", "--parallel", "4"], ["--ctx-size", "256"]])
def test_a_unified_cache_is_left_as_the_test_wants_it(arguments: list[str]) -> None:
    assert with_pools([*MODEL, *arguments]) == [*MODEL, *arguments, *POOLS]


@pytest.mark.parametrize(
    ("n_ctx", "n_slots", "n_ctx_slot"), [(512, 2, 256), (256, 4, 256), (1024, 2, 512), (900, 3, 512)]
)
def test_a_split_cache_stays_split_and_grows_by_what_pools_take(n_ctx: int, n_slots: int, n_ctx_slot: int) -> None:
    arguments = [*MODEL, "--ctx-size", str(n_ctx), "--jinja", "--parallel", str(n_slots)]
    n_sequences = n_slots + N_POOLS + 2
    assert with_pools(arguments) == [
        *[*MODEL, "--jinja", "--parallel", str(n_slots), "--ctx-size", str(n_ctx_slot * n_sequences)],
        *POOLS,
    ]


def test_a_split_cache_of_unknown_size_is_refused() -> None:
    with pytest.raises(SystemExit, match="a split cache without --ctx-size"):
        with_pools([*MODEL, "--parallel", "2"])


@pytest.mark.parametrize("arguments", [["--models-max", "2"], [*MODEL, "--reranking"]])
def test_a_router_and_a_reranker_have_no_pools(arguments: list[str]) -> None:
    assert with_pools([*arguments, "--parallel", "1", "--ctx-size", "1024"])[len(arguments) :] == [
        *["--parallel", "1", "--ctx-size", "1024"],
    ]


def test_flags_go_with_their_values() -> None:
    assert without(["--a", "--port", "1", "--host", "x,y", "--b"], "--port", "--host", "--c") == ["--a", "--b"]


def test_what_a_failure_says() -> None:
    assert FAILED.assertion == 'assert res.body["timings"]["predicted_n"] == n_predict'
    assert FAILED.error == "assert 63 == 70"
    assert (PASSED.assertion, PASSED.error) == ("", "")


def test_an_excuse_is_for_one_assertion_on_one_arm() -> None:
    for arm in ("patched", "proxy"):
        assert list(judged(arm, [CUT], {CUT: FAILED}).excused) == [CUT]
        assert list(judged(arm, [CUT], {CUT: CRASHED}).unexpected) == [CUT]
    for arm in ("patched-off", "proxy-stock"):
        assert judged(arm, [CUT], {CUT: FAILED}).excused == {}
        assert list(judged(arm, [CUT], {CUT: FAILED}).unexpected) == [CUT]


def test_nothing_is_excused_where_there_are_no_pools_and_every_excuse_has_a_reason() -> None:
    assert set(EXCUSED) <= set(ARMS) - {"stock", "patched-off"}
    for excuses in EXCUSED.values():
        assert all(len(excuse.reason) > 30 and excuse.assertion for excuse in excuses.values())


@pytest.mark.parametrize("outcomes", [{}, {"t": Outcome("skipped")}])
def test_what_was_not_run_did_not_pass(outcomes: dict[str, Outcome]) -> None:
    found = judged("proxy", ["t"], outcomes)
    assert (found.passed, list(found.unexpected)) == ([], ["t"])


@pytest.mark.parametrize(
    ("on_stock", "on_arm", "where"),
    [
        ([FAILED, PASSED], [FAILED, FAILED], "unstable"),
        ([CRASHED, PASSED], [FAILED, FAILED], "unexpected"),
        ([PASSED, PASSED], [PASSED, PASSED], "disturbed"),
        ([PASSED, PASSED], [PASSED, FAILED], "unexpected"),
        ([PASSED, PASSED], [], "unexpected"),
    ],
)
def test_a_failure_that_is_repeated(on_stock: list[Outcome], on_arm: list[Outcome], where: str) -> None:
    arm = judged("proxy", ["t"], {"t": FAILED})
    set_aside(arm, "t", FAILED, on_stock, on_arm)
    assert {how: list(getattr(arm, how)) for how in ("unstable", "disturbed", "unexpected")} == {
        how: ["t"] if how == where else [] for how in ("unstable", "disturbed", "unexpected")
    }


def test_only_what_passes_on_stock_is_run_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And one that fails is run again on stock and on its own arm."""
    ran: list[tuple[str, list[str]]] = []

    def run(_: Suite, arm: str, tests: Path, selected: list[str], logs: Path, **more: object) -> dict[str, Outcome]:
        ran.append((arm, list(selected)))
        if selected == ["unit/test_x.py"]:
            return {"test_x::a": PASSED, "test_x::b": CRASHED, "test_x::c": Outcome("skipped"), "test_x::d": PASSED}
        return {
            f"test_x::{name.rpartition(':')[2]}": CRASHED if arm == "proxy" and name.endswith("d") else PASSED
            for name in selected
        }

    monkeypatch.setattr(suite, "run", run)
    monkeypatch.setattr(suite, "lay_out", lambda suite, folder: folder)
    found = compare_file(Suite(tmp_path, tmp_path, {}), "test_x", ["proxy", "proxy-stock"], tmp_path)
    both, one = ["unit/test_x.py::a", "unit/test_x.py::d"], ["unit/test_x.py::d"]
    again = [("proxy", one)] + [("stock", one)] * upstream.N_AGAIN
    assert ran == [("stock", ["unit/test_x.py"]), ("proxy", both), *again, ("proxy-stock", both)]
    assert (found.arms["proxy"].passed, list(found.arms["proxy"].unexpected)) == (["test_x::a"], ["test_x::d"])
    assert found.arms["proxy-stock"] == Arm(passed=["test_x::a", "test_x::d"])
    assert found.differs


def test_what_was_found_is_not_run_again(tmp_path: Path) -> None:
    found = Found({"a::t": PASSED, "a::u": FAILED}, {"proxy": Arm(passed=["a::t"], excused={"a::v": "why"})})
    store, n_runs = tmp_path / "store", 0

    def run() -> Found:
        nonlocal n_runs
        n_runs += 1
        return found

    assert [remembered(store, "a", ["proxy"], run) for _ in range(2)] == [found, found]
    assert n_runs == 1
    remembered(store, "a", ["proxy", "proxy-stock"], run)  # another arm
    remembered(store, "b", ["proxy"], run)
    remembered(None, "a", ["proxy"], run)
    assert n_runs == 4


def test_files_add_up() -> None:
    whole = Found(arms={"proxy": Arm()})
    whole.add(Found({"a::t": PASSED}, {"proxy": Arm(passed=["a::t"])}))
    whole.add(Found({"b::t": FAILED}, {}))
    whole.add(Found({"c::t": PASSED}, {"proxy": Arm(excused={"c::t": "why"})}))
    assert list(whole.stock) == ["a::t", "b::t", "c::t"]
    assert whole.arms == {"proxy": Arm(passed=["a::t"], excused={"c::t": "why"})}
    assert not whole.differs
