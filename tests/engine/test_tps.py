"""The rates told while a real engine decodes, against its own counters over the same ten seconds.

Ratios within one run, in the steadiest of a few tries: beside other work a machine is now fast, now slow, and a moving
average lags. What it has yet to show at the end (its gain over the ten seconds, times its window) is added before it is
compared with the counter; with a steady machine that is nothing, and then the plain means are compared, too.
"""

import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from .binaries import binary_path
from .stack import ProxyStack

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LONG_S = 10.0
WITHIN = 0.02
WINDOW_S = 2.0
"""Of a session's average, which the engine is told to end by time only, and of the aggregate."""
STEADY = 0.04
"""Rates of two seconds each differ by so much at most."""
TRIES = 4

Json = dict[str, Any]


@pytest.fixture(scope="module")
def stack(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyStack]:
    args = ("-t", "1", "-c", "32768", "--polykv-tps-window-tokens", "1000000")
    with ProxyStack(binary_path("patched"), chat_model, *args, log_dir=tmp_path_factory.mktemp("tps")) as stack:
        yield stack


class InBackground(ABC):
    """Something in a thread of its own for as long as the block runs."""

    def __init__(self) -> None:
        self.over, self.began = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self.run)

    @abstractmethod
    def run(self) -> None: ...

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.over.set()
        self._thread.join(60)


class Decoding(InBackground):
    """A session that decodes."""

    def __init__(self, stack: ProxyStack, name: str) -> None:
        super().__init__()
        self._url = stack.url
        self._body = {"prompt": f"{name}: count to a million. One, two,", "n_predict": 7000, "session_id": name}
        self._body |= {"stream": True, "ignore_eos": True, "temperature": 0}

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/completion", json=self._body, timeout=120) as answer:
            for n, _ in enumerate(answer.iter_lines()):
                if n == 20:
                    self.began.set()
                if self.over.is_set():
                    return


class Counters(InBackground):
    """The engine's own counters, asked without the proxy: ``at(ts)`` tokens decoded by then, of one slot or of all."""

    def __init__(self, stack: ProxyStack) -> None:
        super().__init__()
        self._url = f"{stack.engine_url}/polykv/engine/stats"
        self._seen: list[Json] = []

    def run(self) -> None:
        with httpx.Client(timeout=20) as http:
            while not self.over.wait(0.1):
                self._seen.append(http.get(self._url).raise_for_status().json())
                self.began.set()

    def at(self, ts: float, slot: int | None) -> float:
        i = bisect_left(self._seen, ts, key=lambda stats: stats["ts"])
        before, after = self._seen[max(0, i - 1)], self._seen[min(i, len(self._seen) - 1)]
        n = [(stats if slot is None else stats["slots"][slot])["n_decoded_cum"] for stats in (before, after)]
        span_s = after["ts"] - before["ts"]
        share = (ts - before["ts"]) / span_s if span_s else 0.0
        return float(n[0] + share * (n[1] - n[0]))

    def rate(self, begin: float, end: float, slot: int | None = None) -> float:
        return (self.at(end, slot) - self.at(begin, slot)) / (end - begin)


def listen(stack: ProxyStack, seconds: float) -> list[Json]:
    """Samples of the stream as they come, ten a second."""
    seen: list[Json] = []
    with httpx.stream("GET", f"{stack.url}/polykv/tps?stream=1&interval_ms=100", timeout=20) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if seen[-1]["ts"] - seen[0]["ts"] >= seconds:
                    break
    return seen


class Ten:
    """Ten seconds of ``n`` sessions. ``spread``: of the engine's rates, in pieces as long as a window."""

    def __init__(self, stack: ProxyStack, n: int, attempt: int) -> None:
        self.names = [f"agent-{n}-{attempt}-{i}" for i in range(n)]
        with ExitStack() as running:
            self.counters = running.enter_context(Counters(stack))
            for decoding in [running.enter_context(Decoding(stack, name)) for name in self.names]:
                assert decoding.began.wait(120)
            time.sleep(4 * WINDOW_S)  # what was before is forgotten
            shown = stack.http.get("/polykv/sessions").json()["sessions"]
            self.slot_of = {session["session_id"]: session["slot_id"] for session in shown}
            self.samples = listen(stack, LONG_S)
            time.sleep(0.3)
        self.begin, self.end = self.samples[0]["ts"], self.samples[-1]["ts"]
        pieces = int((self.end - self.begin) / WINDOW_S) + 1
        edges = [self.end - i * WINDOW_S for i in range(pieces + 1)]  # and the two seconds before
        rates = [self.counters.rate(then, now) for now, then in itertools.pairwise(edges)]
        self.spread = (max(rates) - min(rates)) / fmean(rates)

    def mean(self, rate: Callable[[Json], float], *, lag_s: float = 0.0) -> float:
        """Of a rate over time, with what a filter that lags so much has yet to show."""
        area = sum((b["ts"] - a["ts"]) * (rate(a) + rate(b)) / 2 for a, b in itertools.pairwise(self.samples))
        behind = lag_s * (rate(self.samples[-1]) - rate(self.samples[0]))
        return (area + behind) / (self.end - self.begin)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_rates_are_what_the_counters_grew_by(stack: ProxyStack, n: int) -> None:
    tries: list[Ten] = []
    while len(tries) < TRIES and (not tries or tries[-1].spread > STEADY):
        tries.append(Ten(stack, n, len(tries)))
    ten = min(tries, key=lambda ten: ten.spread)
    print(f"{n} sessions: rates of {WINDOW_S:.0f} s differ by {ten.spread:.1%} in the steadiest of {len(tries)} tries")
    check_shape(ten)

    told = {name: ten.mean(lambda s, name=name: rate_of(s, name), lag_s=WINDOW_S) for name in ten.names}
    plain = {name: ten.mean(lambda s, name=name: rate_of(s, name)) for name in ten.names}
    counted = {name: ten.counters.rate(ten.begin, ten.end, ten.slot_of[name]) for name in ten.names}
    in_all = ten.counters.rate(ten.begin, ten.end)
    aggregate = ten.mean(lambda s: s["aggregate_tps"])
    in_windows = ten.mean(lambda s: ten.counters.rate(s["ts"] - WINDOW_S, s["ts"]))
    for name in ten.names:
        print(f"  {name}: told {told[name]:.2f} (plain {plain[name]:.2f}), counted {counted[name]:.2f} tok/s")
    print(f"  sum told {sum(told.values()):.2f} (plain {sum(plain.values()):.2f}), counted {in_all:.2f} tok/s")
    print(f"  aggregate {aggregate:.2f}, counted in the same windows {in_windows:.2f} tok/s")

    assert told == pytest.approx(counted, rel=WITHIN)
    assert sum(told.values()) == pytest.approx(in_all, rel=WITHIN)
    assert aggregate == pytest.approx(in_windows, rel=WITHIN)
    if ten.spread <= STEADY:
        assert plain == pytest.approx(counted, rel=WITHIN)
        assert sum(plain.values()) == pytest.approx(aggregate, rel=WITHIN)


def check_shape(ten: Ten) -> None:
    assert len(ten.samples) > 50
    assert {(s["n_active"], s["n_warming"]) for s in ten.samples} == {(len(ten.names), 0)}
    for sample in ten.samples:
        assert sample["mean_active_tps"] == pytest.approx(fmean(rate_of(sample, name) for name in ten.names))
        for name in ten.names:
            session = of(sample, name)
            assert session["ctx_used"] + session["ctx_headroom_tokens"] == session["ctx_total"]
    for name in ten.names:
        decoded = [of(sample, name)["n_decoded"] for sample in ten.samples]
        assert decoded == sorted(decoded)
        grown = ten.counters.rate(ten.begin, ten.end, ten.slot_of[name]) * (ten.end - ten.begin)
        assert decoded[-1] - decoded[0] == pytest.approx(grown, rel=WITHIN, abs=20)


def of(sample: Json, name: str) -> Json:
    return next(session for session in sample["sessions"] if session["session_id"] == name)


def rate_of(sample: Json, name: str) -> float:
    rate: float = of(sample, name)["tps_ewma"]
    return rate
