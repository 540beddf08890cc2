"""Admission policies side by side, in a simulation with the gate that serves.

    python -m benchmarks.admission_sim [--seeds 10] [--variant base|context|slow] [--out chart.svg] [--json] [--assert]

Ten packages of 55 steps each, one session per package, a floor of 15 tokens per second and session. A scheduler looks
every 5 s whether it may start one more session. Each step is a turn (prefill, decode) and a pause for tools.

none        no admission: one more session at every look
fixed 4     at most four sessions
plain       the mean rate of all busy slots, those without a sample as 0, against the floor; nobody busy: go
projected   the same with that mean times n / (n + 1)
settled     estimator "settled": settle window, measured drop, idle estimate, warming apart
roofline    estimator "roofline": two levels, turns may be held
oracle      the same two levels with the machine's true speed instead of a fit

The machine: seconds per step = (0.0258 + 0.0216 n + 7e-8 K + 0.0005 P) x lognormal(0.08), n decoding sessions, K their
context, P prompt tokens in the step (at most 512); tokens per session and step 1 + Binomial(2, 0.4). Variants: the
slope over K times 6; everything 1.6 times slower from 300 to 900 s. Nothing is evicted in here, and eviction costs.

Columns are means over the seeds. "Under": time in which the mean rate (EWMA, 2 s) of those who decode is below the
floor; "deep": below half of it. "Below": turns whose own rate was below the floor. "Eff tps": tokens per second of
decoding and holding together, because who waits for a hold waits. The workload is the same for all, seed by seed.
With --assert, exit 1 unless settled has at least 35 % less time under the floor than plain, and roofline 85 % less than
settled within 1.05 of its wall time. These bars are those of the base machine; the variants miss some.
"""

import argparse
import heapq
import json
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

from polykv_proxy.gate.facts import Arrival, EngineFacts, SessionFacts, State, TurnRequest
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.outcome import Admitted, Go, Tick, TurnWake, Wake
from polykv_proxy.gate.policy import Policy, Ruling, parse_policy
from polykv_proxy.gate.rate import Average
from polykv_proxy.gate.roofline import Roofline
from polykv_proxy.gate.settle import AdmitRecord
from polykv_proxy.ids import PoolId, SessionId

N_PACKAGES, N_STEPS, FLOOR_TPS = 10, 55, 15.0
TICK_S, READ_S, EWMA_S = 5.0, 0.5, 2.0
START_CTX, START_PREFILL, MAX_PREFILL = 6000, 800, 512
CELLS_TOTAL = 4_000_000
MIN_CUT_SETTLED, MIN_CUT_ROOFLINE, MAX_WALL = 0.35, 0.85, 1.05
MEAN_TOKENS_PER_STEP = 1.8
POOL = PoolId(1)
VARIANTS = ("base", "context", "slow")


@dataclass(frozen=True)
class Machine:
    """The ground truth. ``variant``: see the module."""

    variant: str = "base"

    def step_s(self, n: float, kv_tokens: float, n_prefill: float, now_s: float) -> float:
        slope = 7e-8 * (6 if self.variant == "context" else 1)
        slower = 1.6 if self.variant == "slow" and 300 <= now_s < 900 else 1.0
        return (0.0258 + 0.0216 * n + slope * kv_tokens + 0.0005 * n_prefill) * slower


class Oracle(Roofline):
    """Knows the machine instead of fitting it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.now_s = machine, 0.0

    @property
    def ready(self) -> bool:
        return True

    def update(self, facts: EngineFacts) -> None:
        super().update(facts)
        self.now_s = facts.measured_s

    def seconds_per_token(self, n: float, kv_tokens: float, prefill_tokens_per_s: float) -> float:
        prefill_share = min(
            0.9,
            (self.machine.step_s(0, 0, 1, self.now_s) - self.machine.step_s(0, 0, 0, self.now_s))
            * prefill_tokens_per_s,
        )
        return self.machine.step_s(n, kv_tokens, 0, self.now_s) / MEAN_TOKENS_PER_STEP / (1 - prefill_share)


@dataclass(slots=True)
class Session:
    """One package and who works on it."""

    number: int
    work: random.Random
    state: State = "idle"
    held: bool = False
    step: int = 0
    ctx: int = START_CTX
    n_prefill: int = 0
    n_to_decode: int = 0
    n_decoded: int = 0
    decoding_s: float = 0.0
    rate: Average = field(default_factory=Average)
    asked_s: float = 0.0
    went_s: float = 0.0
    decode_from_s: float = 0.0
    turn_tokens: int = 0

    @property
    def session_id(self) -> SessionId:
        return SessionId(f"package-{self.number}")

    @property
    def turn_id(self) -> int:
        return self.number * N_STEPS + self.step

    def next_turn(self) -> None:
        """Draw what the turn will be: the same for every policy."""
        more = 50 + round(self.work.expovariate(1 / 400))
        self.n_prefill = START_PREFILL if self.step == 0 else more
        self.n_to_decode = max(20, round(self.work.gammavariate(2, 170 / 2)))

    def gap_s(self) -> float:
        return self.work.expovariate(1 / 4)

    def facts(self) -> SessionFacts:
        return SessionFacts(
            self.session_id,
            POOL,
            POOL,
            self.state,
            self.step,
            self.n_decoded,
            self.ctx,
            own_cells=self.ctx - START_CTX,
            decoding_s=self.decoding_s,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    tokens: int
    hold_s: float
    decode_s: float


@dataclass(slots=True)
class Run:
    """What one simulation measured."""

    wall_s: float = 0.0
    under_s: float = 0.0
    deep_s: float = 0.0
    delivered_s: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    records: list[AdmitRecord] = field(default_factory=list)
    trace: list[tuple[float, int, float | None]] = field(default_factory=list)
    """Every reading: time, live sessions, mean rate of those who decode."""


class Scheme:
    """No admission; the others override what they do differently."""

    def may_start(self, sim: "Simulation") -> bool:
        return True

    def started(self, sim: "Simulation", session: Session) -> None:
        pass

    def turn(self, sim: "Simulation", session: Session) -> bool:
        """False: it is held, and let go by ``sim.go`` later."""
        return True

    def turn_ended(self, sim: "Simulation", session: Session) -> None:
        pass

    def read(self, sim: "Simulation") -> None:
        pass


@dataclass
class Fixed(Scheme):
    n: int = 4

    def may_start(self, sim: "Simulation") -> bool:
        return len(sim.live) < self.n


class Projected(Scheme):
    """The mean over all busy slots, those without a sample as 0, shared with one more."""

    def may_start(self, sim: "Simulation") -> bool:
        rates = [s.rate.value or 0.0 for s in sim.live if s.state in ("prefilling", "decoding")]
        n = len(rates)
        return n == 0 or fmean(rates) * n / (n + 1) >= FLOOR_TPS


class Plain(Scheme):
    """That mean itself against the floor."""

    def may_start(self, sim: "Simulation") -> bool:
        rates = [s.rate.value or 0.0 for s in sim.live if s.state in ("prefilling", "decoding")]
        return not rates or fmean(rates) >= FLOOR_TPS


class Gated(Scheme):
    """The gate that serves, told what the proxy would tell it."""

    def __init__(self, policy: Policy, roofline: Roofline | None = None):
        self.gate = Gate(roofline=roofline)
        self.ruling = Ruling(policy, POOL)

    def arrival(self, session_id: SessionId) -> Arrival:
        return Arrival(session_id, POOL, self.ruling, expected_tokens=START_PREFILL, uncached_tokens=START_PREFILL)

    def may_start(self, sim: "Simulation") -> bool:
        """As an orchestrator asks: what has no rate yet defers judgment."""
        self.take(sim, self.gate.tick(sim.now_s))
        capacity = self.gate.capacity(self.arrival(SessionId("next")), sim.now_s)
        return capacity.can_admit and (capacity.n_warming == 0 or capacity.guaranteed)

    def started(self, sim: "Simulation", session: Session) -> None:
        decision, wakes = self.gate.arrive(self.arrival(session.session_id), sim.now_s)
        assert isinstance(decision, Admitted)
        self.deliver(sim, wakes)

    def turn(self, sim: "Simulation", session: Session) -> bool:
        request = TurnRequest(
            session.turn_id,
            session.session_id,
            POOL,
            self.ruling,
            session_since_s=session.number,
            ctx_tokens=session.ctx + session.n_prefill,
            uncached_tokens=session.n_prefill,
        )
        return isinstance(self.gate.begin_turn(request, sim.now_s), Go)

    def turn_ended(self, sim: "Simulation", session: Session) -> None:
        self.deliver(sim, self.gate.end_turn(session.turn_id, sim.now_s))

    def read(self, sim: "Simulation") -> None:
        facts = EngineFacts(
            sim.now_s,
            [s.facts() for s in sim.live],
            n_prefilled=sim.n_prefilled,
            cells_total=CELLS_TOTAL,
            cells_used=sum(s.ctx for s in sim.live),
            cells_free=CELLS_TOTAL - sum(s.ctx for s in sim.live),
        )
        self.take(sim, self.gate.observe(facts, sim.now_s))

    def take(self, sim: "Simulation", tick: Tick) -> None:
        sim.run.records.extend(tick.records)
        self.deliver(sim, tick.wakes)

    def deliver(self, sim: "Simulation", wakes: Sequence[Wake]) -> None:
        for wake in wakes:
            if isinstance(wake, TurnWake):
                sim.go(next(s for s in sim.live if s.held and s.turn_id == wake.turn_id))


class Simulation:
    def __init__(self, scheme: Scheme, machine: Machine, seed: int):
        self.scheme, self.machine = scheme, machine
        self.noise = random.Random(f"noise {seed}")
        self.now_s = 0.0
        self.n_prefilled = 0
        self.live: list[Session] = []
        self.todo = [Session(i, random.Random(f"work {seed} {i}")) for i in range(N_PACKAGES)]
        self.gaps: list[tuple[float, int, Session]] = []
        self.prefilling: list[Session] = []
        self.run = Run()

    def simulate(self) -> Run:
        next_look_s = next_read_s = 0.0
        while self.todo or self.live:
            if self.now_s >= next_read_s:
                self.scheme.read(self)
                self.trace()
                next_read_s = self.now_s + READ_S
            if self.todo and self.now_s >= next_look_s:
                next_look_s += TICK_S
                if self.scheme.may_start(self):
                    session = self.todo.pop(0)
                    self.live.append(session)
                    self.scheme.started(self, session)
                    self.ask(session)
            while self.gaps and self.gaps[0][0] <= self.now_s:
                self.ask(heapq.heappop(self.gaps)[2])
            if not self.step():  # nobody at work: to whatever comes next
                upcoming = [next_read_s, *([next_look_s] if self.todo else []), *(at for at, _, _ in self.gaps[:1])]
                self.now_s = max(self.now_s, min(upcoming))
        self.run.wall_s = self.now_s
        return self.run

    def ask(self, session: Session) -> None:
        session.next_turn()
        session.asked_s = self.now_s
        session.held = not self.scheme.turn(self, session)
        if session.held:
            session.state = "waiting"
        else:
            self.go(session)

    def go(self, session: Session) -> None:
        session.held = False
        session.state = "prefilling"
        session.went_s = self.now_s
        session.turn_tokens = 0
        self.prefilling.append(session)

    def step(self) -> bool:
        decoding = [s for s in self.live if s.state == "decoding"]
        if not decoding and not self.prefilling:
            return False
        n_prefill = self.prefill()
        kv = sum(s.ctx for s in decoding)
        took_s = self.machine.step_s(len(decoding), kv, n_prefill, self.now_s) * math.exp(self.noise.gauss(0, 0.08))
        self.now_s += took_s
        for session in decoding:
            n = 1 + (self.noise.random() < 0.4) + (self.noise.random() < 0.4)
            session.rate.fold(n / took_s, took_s, EWMA_S)
            n = min(n, session.n_to_decode)
            session.n_to_decode -= n
            session.ctx += n
            session.n_decoded += n
            session.decoding_s += took_s
            session.turn_tokens += n
        self.judge(decoding, took_s)
        for session in decoding:
            if session.n_to_decode == 0:
                self.end_turn(session)
        for session in [s for s in self.prefilling if s.n_prefill == 0]:
            self.prefilling.remove(session)
            session.state, session.decode_from_s = "decoding", self.now_s
        return True

    def prefill(self) -> int:
        """First come, first served; gives how many tokens are in this step."""
        n_left = MAX_PREFILL
        for session in self.prefilling:
            n = min(n_left, session.n_prefill)
            session.n_prefill -= n
            session.ctx += n
            n_left -= n
        self.n_prefilled += MAX_PREFILL - n_left
        return MAX_PREFILL - n_left

    def judge(self, decoding: list[Session], took_s: float) -> None:
        if decoding:
            mean = fmean(s.rate.value or 0.0 for s in decoding)
            self.run.under_s += took_s * (mean < FLOOR_TPS)
            self.run.deep_s += took_s * (mean < FLOOR_TPS / 2)

    def end_turn(self, session: Session) -> None:
        hold_s = session.went_s - session.asked_s
        self.run.turns.append(Turn(session.turn_tokens, hold_s, self.now_s - session.decode_from_s))
        session.state = "idle"
        self.scheme.turn_ended(self, session)
        session.step += 1
        if session.step == N_STEPS:
            self.live.remove(session)
            self.run.delivered_s.append(self.now_s)
        else:
            heapq.heappush(self.gaps, (self.now_s + session.gap_s(), session.number, session))

    def trace(self) -> None:
        rates = [s.rate.value for s in self.live if s.state == "decoding" and s.rate.value is not None]
        self.run.trace.append((self.now_s, len(self.live), fmean(rates) if rates else None))


# What is made of it ------------------------------------------------------------------------------------------------


def enforced(**fields: str | int) -> Policy:
    return parse_policy({"target_tps_per_session": FLOOR_TPS, "mode": "enforced", **fields})


SCHEMES: dict[str, Callable[[Machine], Scheme]] = {
    "none": lambda _: Scheme(),
    "fixed 4": lambda _: Fixed(4),
    "plain": lambda _: Plain(),
    "projected": lambda _: Projected(),
    "settled": lambda _: Gated(enforced()),
    "roofline": lambda _: Gated(enforced(estimator="roofline")),
    "oracle": lambda machine: Gated(enforced(estimator="roofline"), Oracle(machine)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the seeds. ``hold_*``: seconds per turn. ``max_live``: sessions at once."""

    policy: str
    wall_s: float
    under_s: float
    deep_s: float
    below_pct: float
    p50_delivery_s: float
    decode_tps: float
    effective_tps: float
    hold_mean_s: float
    hold_p95_s: float
    hold_max_s: float
    max_live: float


def summarise(policy: str, runs: list[Run]) -> Row:
    turns = [turn for run in runs for turn in run.turns]
    tokens = sum(t.tokens for t in turns)
    holds = sorted(t.hold_s for t in turns)
    decode_s = sum(t.decode_s for t in turns)
    return Row(
        policy=policy,
        wall_s=fmean(r.wall_s for r in runs),
        under_s=fmean(r.under_s for r in runs),
        deep_s=fmean(r.deep_s for r in runs),
        below_pct=100 * fmean(t.tokens < FLOOR_TPS * t.decode_s for t in turns),
        p50_delivery_s=fmean(median(r.delivered_s) for r in runs),
        decode_tps=tokens / decode_s,
        effective_tps=tokens / (decode_s + sum(holds)),
        hold_mean_s=fmean(holds),
        hold_p95_s=holds[int(0.95 * len(holds))],
        hold_max_s=holds[-1],
        max_live=fmean(max(n for _, n, _ in r.trace) for r in runs),
    )


def forecast_errors(runs: list[Run]) -> dict[str, tuple[float, int]]:
    """Mean absolute error of what was forecast at each admission against the mean once settled, and how many."""
    found: dict[str, tuple[float, int]] = {}
    for name in ("model", "measured", "roofline"):
        errors = [
            abs(forecast - record.mean_tps)
            for run in runs
            for record in run.records
            if record.mean_tps is not None and (forecast := getattr(record.forecasts, name)) is not None
        ]
        if errors:
            found[name] = (fmean(errors), len(errors))
    return found


COLUMNS = (
    ("policy", "policy", "{:<10}"),
    ("wall s", "wall_s", "{:>7.0f}"),
    ("under s", "under_s", "{:>8.0f}"),
    ("deep s", "deep_s", "{:>7.0f}"),
    ("below %", "below_pct", "{:>8.1f}"),
    ("p50 s", "p50_delivery_s", "{:>6.0f}"),
    ("tps", "decode_tps", "{:>6.2f}"),
    ("eff tps", "effective_tps", "{:>8.2f}"),
    ("hold s", "hold_mean_s", "{:>7.2f}"),
    ("p95", "hold_p95_s", "{:>6.1f}"),
    ("max", "hold_max_s", "{:>6.1f}"),
    ("live", "max_live", "{:>5.1f}"),
)


def table(rows: list[Row]) -> str:
    lines = [" ".join(re.sub(r"\.\df", "", form).format(title) for title, _, form in COLUMNS)]
    lines += [" ".join(form.format(getattr(row, name)) for _, name, form in COLUMNS) for row in rows]
    return "\n".join(lines)


def text_chart(rows: list[Row]) -> str:
    """Time under the floor as bars, with the wall time beside."""
    top = max(row.under_s for row in rows) or 1.0
    lines = ["seconds under the floor (deep: #)"]
    for row in rows:
        n_deep, n_all = round(50 * row.deep_s / top), round(50 * row.under_s / top)
        lines.append(f"{row.policy:<10} |{'#' * n_deep}{'=' * (n_all - n_deep):<{51 - n_deep}} {row.under_s:.0f}")
    return "\n".join(lines)


def svg_chart(runs: dict[str, Run]) -> str:
    """The mean rate of those who decode over time, one strip per policy, with the number of live sessions; one seed."""
    width, left, strip, gap = 1000, 90, 110, 26
    end_s = max(run.wall_s for run in runs.values())
    top_tps, top_n = 45.0, float(N_PACKAGES)
    height = len(runs) * (strip + gap) + 50

    def at(s: float) -> float:
        return left + (width - left - 20) * s / end_s

    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    parts = [head + f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>']

    def level(y: float, colour: str) -> str:
        return f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'

    def text(x: float, y: float, said: str, anchor: str = "start") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{said}</text>'

    for i, (name, run) in enumerate(runs.items()):
        base = (i + 1) * (strip + gap)

        def tps(value: float, base: float = base) -> float:
            return base - strip * min(value, top_tps) / top_tps

        for (t, _, value), (t_next, _, _) in zip(run.trace, run.trace[1:], strict=False):
            if value is not None and value < FLOOR_TPS:
                place = f'x="{at(t):.1f}" y="{base - strip}" width="{max(0.3, at(t_next) - at(t)):.1f}"'
                parts.append(f'<rect {place} height="{strip}" fill="#f4c7c3"/>')
        rate = " ".join(f"{at(t):.1f},{tps(v):.1f}" for t, _, v in run.trace[::2] if v is not None)
        live = " ".join(f"{at(t):.1f},{base - strip * n / top_n:.1f}" for t, n, _ in run.trace)
        parts += [
            f'<polyline points="{rate}" fill="none" stroke="#1a5fb4" stroke-width="0.7"/>',
            f'<polyline points="{live}" fill="none" stroke="#777" stroke-width="1.2" stroke-dasharray="4 2"/>',
            level(tps(FLOOR_TPS), "#c01c28"),
            level(base, "black"),
            text(8, base - strip / 2, name),
            text(left + 4, base - strip - 4, f"{run.wall_s:.0f} s, {run.under_s:.0f} s under the floor"),
        ]
    parts += [text(at(s), height - 30, f"{s} s", "middle") for s in range(0, int(end_s) + 1, 300)]
    what = f"blue: mean tokens/s of those who decode (0 to {top_tps:.0f}); red: the floor, pink: below it; "
    parts.append(text(left, height - 10, what + f"dashed: live sessions (0 to {N_PACKAGES})") + "</svg>")
    return "\n".join(parts)


def bars(rows: list[Row]) -> list[tuple[str, bool]]:
    """What must hold, as sentences with the numbers, and whether it does."""
    by = {row.policy: row for row in rows}
    plain, settled, roofline = by["plain"], by["settled"], by["roofline"]
    cut_settled, cut_roofline = 1 - settled.under_s / plain.under_s, 1 - roofline.under_s / settled.under_s
    wall = roofline.wall_s / settled.wall_s
    return [
        (f"settled: {cut_settled:.1%} less time under the floor than plain (>= 35 %)", cut_settled >= MIN_CUT_SETTLED),
        (f"roofline: {cut_roofline:.1%} less than settled (>= 85 %)", cut_roofline >= MIN_CUT_ROOFLINE),
        (f"roofline: {wall:.3f} x the wall time of settled (<= 1.05)", wall <= MAX_WALL),
    ]


def main() -> int:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--variant", choices=VARIANTS, default="base")
    parser.add_argument("--out", type=Path, help="write the chart of the first seed here, as SVG")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--assert", action="store_true", dest="check")
    args = parser.parse_args()
    machine = Machine(args.variant)
    runs = {
        name: [Simulation(make(machine), machine, seed).simulate() for seed in range(args.seeds)]
        for name, make in SCHEMES.items()
    }
    rows = [summarise(name, of_policy) for name, of_policy in runs.items()]
    errors = {name: forecast_errors(runs[name]) for name in ("settled", "roofline")}
    checks = bars(rows)
    if args.out is not None:
        args.out.write_text(svg_chart({name: of_policy[0] for name, of_policy in runs.items()}))
    if args.json:
        answer = {"variant": args.variant, "seeds": args.seeds, "rows": [asdict(r) for r in rows], "errors": errors}
        print(json.dumps(answer | {"bars": [{"what": what, "holds": holds} for what, holds in checks]}))
    else:
        print(f"{args.seeds} seeds, variant {args.variant}, floor {FLOOR_TPS:g} tps\n")
        print(table(rows), text_chart(rows), sep="\n\n", end="\n\n")
        for name, found in errors.items():
            said = ", ".join(f"{kind} {error:.1f} tps (n={n})" for kind, (error, n) in found.items())
            print(f"error of the forecast per admission, {name}: {said}")
        print()
        for what, holds in checks:
            print("holds " if holds else "FAILS ", what)
    return 0 if not args.check or all(holds for _, holds in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
