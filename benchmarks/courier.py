"""The courier: packages of many short turns with pauses for tools, started as the gate has room; the real engine.

    python -m benchmarks.courier [--packages 10] [--turns 12] [--arms none,fixed,plain,settled,roofline]
                                 [--assert] [--json] [--out chart.svg] [--report report.md]

Every package is a session of its own behind one pool: per turn a question of some 20 tokens, an answer of 32, a pause.
The floor is measured first: 0.9 of the tokens per second that each of three gets who decode at once. So the machine
holds it with three who never pause, and not with ten. Then the same packages in turn, each arm on a pool of its own:

none        all at once
fixed       at most three
plain       one more at every look (1 s), if the mean rate of all who are at work reaches the floor; who has no rate yet
            counts as 0: what was run before there was a settle window
settled     an enforced policy with the settled estimator, and the client's pacer
roofline    the same with the roofline estimator, whose turns may be held

"Under": time in which the mean rate of those who decode (the engine's moving average) was below the floor, "deep" below
half of it; looked at five times a second. "Delivery": from the start of the arm to the end of a package. "Eff tps":
tokens per second of decoding and holding together. "Error": of what was projected at an admission against the mean once
it had settled, by the proxy's own receipts.

Every answer is compared, token by token, with what the same turn answered alone before the arms. What differs is only
taken for rounding (batches of other sizes and cells in another order add up differently) if the first other token was
nearly as likely: less than 1 behind, in natural logarithms. A stock llama-server moves that distance by 0.14 (median of
12 places, at most 0.33) when it prefills the same prompt in other pieces. With `--assert` the run ends with 1 unless
every package was delivered, no answer was wrong, no turn of an admitted session was refused, and settled was under the
floor for less time than none.
"""

import argparse
import json
import math
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.courier_chart import Sample, Strip, svg
from polykv_proxy.client import (
    Admission,
    AdmissionPacer,
    Capacity,
    CompletionReply,
    Courier,
    Job,
    PolyKVClient,
    PoolSaturatedError,
)
from polykv_proxy.client.line import Line
from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.stack import ProxyStack

N_SLOTS, N_CTX = 12, 16384
N_THREADS = 1
"""Of the engine: on two cores the proxy, the packages and who looks on have one of their own."""
N_ANSWER, PAUSE_S, MAX_PAUSE_S = 32, 0.5, 2.0
N_AT_ONCE, SHARE = 3, 0.9
LOOK_S, PLAIN_LOOK_S, POLL_S = 0.2, 1.0, 0.25
N_PROBS, TIE = 10, 1.0
GREEDY = {"temperature": 0, "ignore_eos": True, "return_tokens": True, "n_predict": N_ANSWER}
SEED_FIGURES = {"under_s": -52, "deep_s": -83, "p50_delivery_s": -43, "wall_s": -12}
"""What the original run of the scheme changed against the one without a settle window, in percent."""

RULE = (
    "Read the file before you change it and keep every change as small as the task allows. Name what you are not sure "
    "of, never invent an interface, and run the tests of the module you touched before you report that it works. "
)
TOPICS = ("names", "errors", "tests", "docs", "types", "logs", "imports", "settings", "locks", "clocks")


# The work ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """``answer``: what it answers alone; ``behind``: at each place of it the likeliest tokens, and by how much they are
    less likely than the first (natural logarithm). ``pause_s``: of the tools, afterwards.
    """

    prompt: list[int]
    answer: list[int]
    behind: list[dict[int, float]]
    pause_s: float

    def gap(self, tokens: list[int]) -> float:
        """How far behind the first other token is; 0: there is none."""
        if tokens == self.answer:
            return 0.0
        at = next((i for i, (a, b) in enumerate(zip(tokens, self.answer, strict=False)) if a != b), None)
        if at is None or len(tokens) != len(self.answer):
            return math.inf
        return self.behind[at].get(tokens[at], math.inf)


def verdict(gap: float) -> str:
    if gap == 0:
        return "exact"
    return "rounding" if gap < TIE else "wrong"


@dataclass(frozen=True)
class Package:
    name: str
    turns: list[Turn]


@dataclass
class Work:
    prefix: list[int]
    packages: list[Package] = field(default_factory=list)


def prepare(client: PolyKVClient, n_packages: int, n_turns: int, say: Callable[[str], Any]) -> Work:
    """Every turn alone, one after the other. Later turns build on what the earlier ones answered here.

    The pool stays, so that those of the arms, which are the same, need no prefill.
    """
    work = Work(client.tokenize(f"<|im_start|>system\n{RULE * 12}<|im_end|>\n"))
    client.create_pool(tokens=work.prefix, name="alone")
    pauses, end = random.Random("pauses"), client.tokenize("<|im_end|>\n")
    for number in range(n_packages):
        talk, turns = list(work.prefix), []
        for step in range(n_turns):
            asked = f"Package {number}, step {step}: what about the {TOPICS[(number + step) % len(TOPICS)]}?"
            talk += client.tokenize(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
            reply = client.complete(talk, pool_id="alone", session_id=f"alone-{number}", n_probs=N_PROBS, **GREEDY)
            answer, behind = read_answer(reply)
            pause_s = min(MAX_PAUSE_S, pauses.expovariate(1 / PAUSE_S))
            turns.append(Turn(list(talk), answer, behind, pause_s))
            talk += answer + end
        client.drop_session(f"alone-{number}")
        work.packages.append(Package(f"package-{number}", turns))
        say(f"package {number} alone")
    return work


def read_answer(reply: CompletionReply) -> tuple[list[int], list[dict[int, float]]]:
    """Its tokens, and at each place how far the likeliest ones are behind the first."""
    places: list[dict[str, Any]] = (reply.model_extra or {})["completion_probabilities"]
    tops = [place["top_logprobs"] for place in places]
    tokens = reply.tokens or []
    if len(tops) != len(tokens) or len(tokens) != N_ANSWER:
        raise RuntimeError(f"{len(tokens)} tokens with {len(tops)} probabilities instead of {N_ANSWER}")
    return tokens, [{one["id"]: top[0]["logprob"] - one["logprob"] for one in top} for top in tops]


def measure_floor(client: PolyKVClient, work: Work) -> tuple[float, dict[int, float]]:
    """(the floor, tokens per second of each by how many decode at once). The median of three."""

    def rate(name: str, package: Package) -> float:
        reply = client.complete(package.turns[0].prompt, pool_id="alone", session_id=name, **GREEDY)
        client.drop_session(name)
        return float((reply.timings or {})["predicted_per_second"])

    found: dict[int, float] = {}
    for n in (1, N_AT_ONCE):
        rounds = []
        with ThreadPoolExecutor(n) as threads:
            for i in range(3):
                names = [f"speed-{n}-{i}-{j}" for j in range(n)]
                packages = [work.packages[j % len(work.packages)] for j in range(n)]
                rounds.append(fmean(threads.map(rate, names, packages)))
        found[n] = median(rounds)
    return SHARE * found[N_AT_ONCE], found


# The arms ----------------------------------------------------------------------------------------------------------


class RawMeanPacer(AdmissionPacer):
    """Lets one in at every look at which the mean rate of all who are at work reaches the floor."""

    def __init__(self, client: PolyKVClient, pool_id: str, floor_tps: float):
        super().__init__(client, pool_id)
        self._asked, self._floor_tps = client, floor_tps

    def acquire(self, **asking: Any) -> Admission:
        while True:
            time.sleep(PLAIN_LOOK_S)
            rates = [s.tps_ewma or 0.0 for s in self._asked.tps().sessions if s.state in ("prefilling", "decoding")]
            if not rates or fmean(rates) >= self._floor_tps:
                now_s = time.monotonic()
                return Admission(Line(), asking.get("session_id"), Capacity(can_admit=True), "raw mean", now_s)


@dataclass(frozen=True)
class TurnRun:
    gap: float
    n_tokens: int
    decode_s: float
    hold_s: float


@dataclass
class Arm:
    """What one arm measured. Seconds from its start."""

    name: str
    wall_s: float = 0.0
    under_s: float = 0.0
    deep_s: float = 0.0
    delivered_s: list[float] = field(default_factory=list)
    turns: list[TurnRun] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    errors_tps: dict[str, list[float]] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        n_tokens = sum(turn.n_tokens for turn in self.turns)
        decode_s, holds = sum(turn.decode_s for turn in self.turns), [turn.hold_s for turn in self.turns]
        kinds = Counter(event["kind"] for event in self.events)
        return {
            "arm": self.name,
            "wall_s": self.wall_s,
            "under_s": self.under_s,
            "deep_s": self.deep_s,
            "p50_delivery_s": median(self.delivered_s) if self.delivered_s else math.nan,
            "decode_tps": n_tokens / decode_s if decode_s else math.nan,
            "effective_tps": n_tokens / (decode_s + sum(holds)) if decode_s else math.nan,
            "hold_max_s": max(holds, default=0.0),
            "max_live": max((sample.n_live for sample in self.samples), default=0),
            "verdicts": dict(Counter(verdict(turn.gap) for turn in self.turns)),
            "events": {kind: kinds[kind] for kind in ("spawn", "settle", "guarantee", "overcommit", "saturated")},
            "error_tps": {kind: [fmean(errors), len(errors)] for kind, errors in self.errors_tps.items() if errors},
        }


class ArmRun:
    """One arm: its pool, its courier, and somebody who looks on."""

    def __init__(self, client: PolyKVClient, work: Work, name: str, floor_tps: float):
        self.client, self.work, self.arm, self.floor_tps = client, work, Arm(name), floor_tps
        self.gated = name in ("settled", "roofline")
        self.began_s = 0.0
        self.lock = threading.Lock()
        self.n_live = 0
        self.over = threading.Event()

    def run(self) -> Arm:
        arm, pool = self.arm, f"courier-{self.arm.name}"
        self.client.create_pool(tokens=self.work.prefix, name=pool)
        if self.gated:
            policy = {"target_tps_per_session": self.floor_tps, "mode": "enforced", "estimator": arm.name}
            self.client.set_admission(pool, policy)
        pacer = AdmissionPacer(self.client, pool, poll_interval=POLL_S)
        if arm.name == "plain":
            pacer = RawMeanPacer(self.client, pool, self.floor_tps)
        courier: Courier[Package, None] = Courier(
            self.client,
            pool,
            self.deliver,
            pacer=pacer,
            session_key=lambda package, _: f"{arm.name}-{package.name}",
            max_workers=N_AT_ONCE if arm.name == "fixed" else None,
        )
        self.began_s = time.monotonic()
        with self.looked_on(pool):
            deliveries = courier.run(self.work.packages)
        arm.wall_s = max(d.ended_s for d in deliveries) - self.began_s
        arm.delivered_s = [d.ended_s - self.began_s for d in deliveries if d.error is None]
        arm.failures = [f"{d.session_id}: {d.error!r}" for d in deliveries if d.error is not None]
        arm.events = [
            {"kind": e.kind, "at_s": e.at_s - self.began_s, "session_id": e.session_id, "reason": e.reason}
            for e in courier.events
        ]
        arm.errors_tps = self.projection_errors()
        self.client.release(pool)
        return arm

    def deliver(self, job: Job[Package]) -> None:
        with self.lock:
            self.n_live += 1
        try:
            for number, turn in enumerate(job.item.turns):
                try:
                    reply = self.client.complete(turn.prompt, pool_id=job.pool_id, session_id=job.session_id, **GREEDY)
                except PoolSaturatedError as error:
                    if number:
                        raise RuntimeError(f"turn {number} of an admitted session was refused: {error}") from error
                    raise
                job.accepted()
                self.turn_done(turn, reply)
                time.sleep(turn.pause_s)
            self.client.drop_session(job.session_id)
        finally:
            with self.lock:
                self.n_live -= 1

    def turn_done(self, turn: Turn, reply: CompletionReply) -> None:
        timings, told = reply.timings or {}, reply.polykv
        hold_s = (told.hold_ms or 0.0) / 1e3 if told is not None else 0.0
        done = TurnRun(turn.gap(reply.tokens or []), timings["predicted_n"], timings["predicted_ms"] / 1e3, hold_s)
        with self.lock:
            self.arm.turns.append(done)

    @contextmanager
    def looked_on(self, pool: str) -> Iterator[None]:
        looking = threading.Thread(target=self.look, args=(pool,), name="look")
        looking.start()
        try:
            yield
        finally:
            self.over.set()
            looking.join()

    def look(self, pool: str) -> None:
        arm, last_s = self.arm, time.monotonic()
        while not self.over.wait(LOOK_S):
            mean_tps = self.client.tps().mean_active_tps
            settling = self.gated and bool(self.client.capacity(pool).settling)
            now_s = time.monotonic()
            arm.samples.append(Sample(now_s - self.began_s, mean_tps, self.n_live, settling))
            if mean_tps is not None:
                arm.under_s += (now_s - last_s) * (mean_tps < self.floor_tps)
                arm.deep_s += (now_s - last_s) * (mean_tps < self.floor_tps / 2)
            last_s = now_s

    def projection_errors(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for request in self.client.requests(last=1000):
            told = request.admission or {}
            settled_tps = told.get("settled_mean_tps")
            if settled_tps is None or not (request.session_id or "").startswith(f"{self.arm.name}-"):
                continue
            for kind in ("model", "measured", "roofline"):
                projected = told.get(f"projected_mean_tps_{kind}")
                if projected is not None:
                    found.setdefault(kind, []).append(abs(projected - settled_tps))
        return found


# The report --------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    machine: str
    floor_tps: float
    speeds: dict[int, float]
    n_packages: int
    n_turns: int
    arms: list[Arm] = field(default_factory=list)

    def arm(self, name: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.name == name), None)

    def broken_promises(self) -> list[str]:
        """What `--assert` demands and this run does not show."""
        said = [f"{arm.name}: {failure}" for arm in self.arms for failure in arm.failures]
        for arm in self.arms:
            n_wrong = sum(verdict(turn.gap) == "wrong" for turn in arm.turns)
            said += [f"{arm.name}: {n_wrong} answers are wrong"] if n_wrong else []
            due = self.n_packages * self.n_turns
            said += [f"{arm.name}: {len(arm.turns)} turns of {due}"] if len(arm.turns) != due else []
        none, settled = self.arm("none"), self.arm("settled")
        if none is not None and settled is not None and settled.under_s >= none.under_s:
            said.append(f"settled was under the floor for {settled.under_s:.1f} s, none for {none.under_s:.1f} s")
        return said


def measure(n_packages: int, n_turns: int, arms: list[str], say: Callable[[str], Any]) -> Found:
    with tempfile.TemporaryDirectory(prefix="polykv-courier-") as logs:
        sizes = ("--parallel", str(N_SLOTS), "--ctx", str(N_CTX))
        with (
            ProxyStack(
                binary_path("patched"), chat_model_path(), "-t", str(N_THREADS), log_dir=Path(logs), up_args=sizes
            ) as stack,
            PolyKVClient(stack.url) as client,
        ):
            work = prepare(client, n_packages, n_turns, say)
            floor_tps, speeds = measure_floor(client, work)
            said = ", ".join(f"{n} at once {tps:.1f}" for n, tps in speeds.items())
            say(f"tokens per second of each: {said}; floor {floor_tps:.1f}")
            found = Found(machine(), floor_tps, speeds, n_packages, n_turns)
            for name in arms:
                arm = ArmRun(client, work, name, floor_tps).run()
                found.arms.append(arm)
                say(f"{name}: {arm.wall_s:.0f} s, {arm.under_s:.0f} s under the floor, {len(arm.turns)} turns")
    return found


def machine() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        cpu = platform.processor() or platform.machine()
    load = f", load average {os.getloadavg()[0]:.1f} at the end of the floor's measurement"
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()} {platform.release()}{load}"


COLUMNS = (
    ("arm", "arm", "{}"),
    ("wall s", "wall_s", "{:.1f}"),
    ("under s", "under_s", "{:.1f}"),
    ("deep s", "deep_s", "{:.1f}"),
    ("p50 delivery s", "p50_delivery_s", "{:.1f}"),
    ("tps", "decode_tps", "{:.1f}"),
    ("eff tps", "effective_tps", "{:.1f}"),
    ("max hold s", "hold_max_s", "{:.1f}"),
    ("most at once", "max_live", "{}"),
)


def table(lines: list[list[str]]) -> str:
    """As markdown, which is readable as it is."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def report(found: Found) -> str:
    rows = [arm.row() for arm in found.arms]
    speeds = ", ".join(f"{tps:.1f} with {n}" for n, tps in found.speeds.items())
    numbers = [[form.format(row[key]) for _, key, form in COLUMNS] for row in rows]
    parts = [
        f"{found.n_packages} packages of {found.n_turns} turns, {N_ANSWER} tokens per answer, pauses of {PAUSE_S} s on "
        f"average (at most {MAX_PAUSE_S:g}). Tokens per second of each who decodes: {speeds}. The floor: "
        f"{found.floor_tps:.1f}.\n\nMachine: {found.machine}; engine with `-t {N_THREADS}`, {N_SLOTS} slots.",
        table([[title for title, _, _ in COLUMNS], *numbers]),
    ]
    plain, settled, roofline = (found.arm(name) for name in ("plain", "settled", "roofline"))
    if plain is not None and settled is not None:
        against = [("settled", settled), *([("roofline", roofline)] if roofline is not None else [])]
        lines = [["against plain", "original run", *(name for name, _ in against)]]
        names = {"under_s": "time under the floor", "deep_s": "deep below it", "p50_delivery_s": "p50 delivery"}
        for key, figure in SEED_FIGURES.items():
            ours = [change(plain.row()[key], arm.row()[key]) for _, arm in against]
            lines.append([names.get(key, "wall"), f"{figure} %", *ours])
        parts.append(table(lines))
    kinds = ("spawn", "settle", "guarantee", "overcommit", "saturated")
    lines = [["arm", *kinds, "exact", "rounding", "wrong", "error of the projection, tokens/s"]]
    for row in rows:
        errors = ", ".join(f"{kind} {error:.1f} (n={n})" for kind, (error, n) in row["error_tps"].items()) or "-"
        verdicts = [str(row["verdicts"].get(kind, 0)) for kind in ("exact", "rounding", "wrong")]
        lines.append([row["arm"], *(str(row["events"][kind]) for kind in kinds), *verdicts, errors])
    parts.append(table(lines))
    return "\n\n".join(parts)


def change(before: float, after: float) -> str:
    return f"{100 * (after - before) / before:+.0f} %" if before else f"{before:.1f} to {after:.1f} s"


def chart(found: Found) -> str:
    strips = [
        Strip(arm.name, f"{arm.wall_s:.0f} s, {arm.under_s:.0f} s under the floor", arm.samples)
        for arm in found.arms
        if arm.samples
    ]
    return svg(strips, found.floor_tps, found.n_packages)


ARMS = ("none", "fixed", "plain", "settled", "roofline")


def main() -> int:
    assert __doc__ is not None
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=int, default=10)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--arms", default=",".join(ARMS), help="which, comma-separated, in this order")
    parser.add_argument("--out", type=Path, help="write the chart here, as SVG")
    parser.add_argument("--report", type=Path, help="write the report here, as markdown")
    parser.add_argument("--assert", dest="strict", action="store_true", help="end with 1 unless it all holds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arms = options.arms.split(",")
    if not set(arms) <= set(ARMS):
        parser.error(f"--arms: there are {', '.join(ARMS)}")
    found = measure(options.packages, options.turns, arms, lambda line: print(line, file=sys.stderr, flush=True))
    broken = found.broken_promises()
    if options.out is not None:
        options.out.write_text(chart(found))
    if options.report is not None:
        options.report.write_text(report(found) + "\n")
    print(json.dumps(asdict(found) | {"broken": broken}) if options.json else report(found))
    for said in broken:
        print(f"not as promised: {said}", file=sys.stderr)
    return 1 if options.strict and broken else 0


if __name__ == "__main__":
    sys.exit(main())
