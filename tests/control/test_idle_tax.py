"""What idle cells cost is learned from looks at an engine whose cost is known."""

import random

import pytest

from polykv_proxy.control.idle_tax import MIN_SAMPLES, IdleTax, Line, take_sample
from polykv_proxy.upstream import Stats

EPOCH = "e.1"


def look(ts: float, n_decoded: int, hi: int | None, *, n: int = 1, task: int = 7, **kw) -> Stats:
    slots = [{"id": i, "state": "generating" if i < n else "idle", "id_task": task} for i in range(4)]
    cells = {"used": 0, "total": 9999, "free": 9999, "hi": hi}
    return Stats.model_validate(
        {"epoch": EPOCH, "ts": ts, "slots": slots, "cells": cells, "n_decoded_cum": n_decoded, **kw}
    )


class Machine:
    """Decodes in ``a + b * hi`` seconds per step."""

    def __init__(self, tax: IdleTax, a: float, b: float, noise: float = 0.0):
        self.tax, self.a, self.b, self.noise = tax, a, b, noise
        self.ts, self.n_decoded, self.random = 0.0, 0, random.Random(1)

    def run(self, his: list[int], n: int = 1) -> None:
        for hi in his:
            steps = 50
            self.tax.note(look(self.ts, self.n_decoded, hi, n=n, task=self.n_decoded))
            self.ts += steps * (self.a + self.b * hi) * (1 + self.random.gauss(0, self.noise))
            self.n_decoded += steps * n
            self.tax.note(look(self.ts, self.n_decoded, hi, n=n, task=self.n_decoded - steps * n))


def test_the_share_of_a_step_that_idle_cells_take():
    tax = IdleTax()
    Machine(tax, a=0.006, b=3e-7).run([500, 1000, 3000, 9000, 12000] * 4)
    assert tax.estimate(look(0, 0, 12000), 200) == pytest.approx(3e-7 * 11800 / (0.006 + 3e-7 * 12000), rel=1e-6)
    assert tax.estimate(look(0, 0, 200), 200) == pytest.approx(0.0)
    assert tax.estimate(look(0, 0, 100), 200) == 0.0  # never less than nothing


def test_noise_is_averaged_out():
    tax = IdleTax()
    Machine(tax, a=0.006, b=3e-7, noise=0.05).run([500, 3000, 12000] * 40)
    assert tax.estimate(look(0, 0, 12000), 0) == pytest.approx(0.375, abs=0.03)


def test_every_number_of_streams_has_its_own_line():
    tax = IdleTax()
    machine = Machine(tax, a=0.006, b=3e-7)
    machine.run([500, 12000] * 5)
    assert tax.estimate(look(0, 0, 12000, n=4), 0) is None
    machine.a, machine.b = 0.012, 9e-7
    machine.run([500, 12000] * 5, n=4)
    assert tax.estimate(look(0, 0, 12000, n=4), 0) == pytest.approx(9e-7 * 12000 / (0.012 + 9e-7 * 12000))
    assert tax.known() == [1, 4]


def test_nothing_is_said_before_hi_has_varied_enough_or_while_nobody_decodes():
    tax = IdleTax()
    machine = Machine(tax, a=0.006, b=3e-7)
    machine.run([5000] * 50)
    assert tax.estimate(look(0, 0, 5000), 0) is None
    machine.run([5100] * 50)
    assert tax.estimate(look(0, 0, 5000), 0) is None
    machine.run([9000] * 20)
    assert tax.estimate(look(0, 0, 5000), 0) is not None
    assert tax.estimate(look(0, 0, 5000, n=0), 0) is None
    assert tax.estimate(look(0, 0, None), 0) is None


def test_a_slope_that_drowns_in_noise_is_not_told_and_a_flat_one_is_no_tax():
    noisy, flat = Line(), Line()
    dice = random.Random(3)
    for i in range(60):
        noisy.add(1000 * (i % 8), 0.01 * (1 + dice.gauss(0, 0.5)) + 1e-8 * i)
        flat.add(1000 * (i % 8), 0.01)
    assert noisy.fit() is None
    assert flat.fit() == (pytest.approx(0.01), pytest.approx(0.0))


def test_few_samples_say_nothing():
    line = Line()
    for i in range(MIN_SAMPLES - 1):
        line.add(1000 * i, 0.01 + 1e-7 * 1000 * i)
    assert line.fit() is None
    line.add(9000, 0.01 + 1e-7 * 9000)
    assert line.fit() == (pytest.approx(0.01), pytest.approx(1e-7))


def test_the_present_counts_more_than_the_past():
    line = Line()
    for i in range(4000):
        line.add(1000 * (i % 8), 0.02 + 2e-7 * 1000 * (i % 8))
    for i in range(4000):
        line.add(1000 * (i % 8), 0.01 + 1e-7 * 1000 * (i % 8))
    assert line.fit() == (pytest.approx(0.01, rel=0.01), pytest.approx(1e-7, rel=0.01))


def test_only_looks_between_which_nothing_but_decoding_happened_count():
    before, after = look(0, 0, 1000), look(1, 100, 3000)
    sample = take_sample(before, after)
    assert (sample.n_decoding, sample.hi, sample.step_s) == (1, 2000, 0.01)
    prompt = look(1, 100, 3000)
    prompt.slots[0].__dict__["state"] = "prompt"
    for other in (
        look(1, 100, 3000, epoch="e.2"),
        look(1, 100, 3000, task=8),
        look(1, 100, 3000, n=2),
        look(1, 7, 3000),
        look(0, 100, 3000),
        look(1, 100, None),
        look(1, 100, 3000, n_prompt_cum=1),
        look(1, 100, 3000, kv_unified=False),
        look(1, 100, 3000, service={"state": "prompt"}),
        prompt,
    ):
        assert take_sample(before, other) is None
    assert take_sample(look(0, 0, 1000, n=0), look(1, 100, 1000, n=0)) is None
    assert take_sample(look(0, 0, 1000, n=2), look(1, 100, 1000, n=2)).step_s == 0.02
