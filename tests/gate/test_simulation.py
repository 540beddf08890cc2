"""The simulation: everybody gets the same work done, and its measurements are what they say."""

import pytest

from benchmarks import admission_sim as sim


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "N_STEPS", 4)
    monkeypatch.setattr(sim, "N_PACKAGES", 5)


@pytest.mark.usefixtures("short")
def test_every_policy_does_the_same_work() -> None:
    machine = sim.Machine()
    runs = {name: sim.Simulation(make(machine), machine, 3).simulate() for name, make in sim.SCHEMES.items()}
    assert {len(run.delivered_s) for run in runs.values()} == {5}
    assert {len(run.turns) for run in runs.values()} == {20}
    assert len({sum(t.tokens for t in run.turns) for run in runs.values()}) == 1
    for name, run in runs.items():
        assert run.deep_s <= run.under_s <= run.wall_s
        assert max(run.delivered_s) == run.wall_s
        assert all(t.hold_s == 0 for t in run.turns) or name in ("roofline", "oracle")
        # A hold ends at a reading, and those come between steps.
        assert max(t.hold_s for t in run.turns) <= 30 + 2 * sim.READ_S
    assert max(n for _, n, _ in runs["fixed 4"].trace) == 4
    assert max(n for _, n, _ in runs["none"].trace) == 5


@pytest.mark.usefixtures("short")
def test_the_same_seed_gives_the_same_run() -> None:
    machine = sim.Machine()
    first, second = (sim.Simulation(sim.SCHEMES["roofline"](machine), machine, 1).simulate() for _ in range(2))
    assert first == second


def test_the_machine_is_the_one_it_was_calibrated_on() -> None:
    """38 tokens per second alone, 15.9 with four, 11.6 with six, give or take a tenth."""
    machine = sim.Machine()
    for n, tps in ((1, 38.0), (4, 15.9), (6, 11.6)):
        assert sim.MEAN_TOKENS_PER_STEP / machine.step_s(n, n * 6000, 0, 0.0) == pytest.approx(tps, rel=0.1)
    assert sim.Machine("slow").step_s(1, 0, 0, 300.0) == pytest.approx(1.6 * machine.step_s(1, 0, 0, 0.0))
    assert sim.Machine("slow").step_s(1, 0, 0, 900.0) == machine.step_s(1, 0, 0, 0.0)
    assert sim.Machine("context").step_s(0, 1e6, 0, 0.0) == pytest.approx(0.0258 + 6 * 0.07)


def test_the_bars_are_told_from_the_rows() -> None:
    def row(policy: str, wall_s: float, under_s: float) -> sim.Row:
        return sim.Row(policy, wall_s, under_s, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    rows = [row("plain", 100, 100), row("settled", 100, 65), row("roofline", 105, 9.75)]
    assert [holds for _, holds in sim.bars(rows)] == [True, True, True]
    rows = [row("plain", 100, 100), row("settled", 100, 66), row("roofline", 106, 10)]
    assert [holds for _, holds in sim.bars(rows)] == [False, False, False]
