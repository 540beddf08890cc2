"""What passes in front of a stock server passes on the other arms: each file of llama.cpp's tests, one after the other.

Every test starts its server with its own flags; what is added is in ``server``. What fails on stock says nothing and is
not run on the others. What fails on another arm is repeated: on stock, since a test that fails there in the same way
now and then (its model ends an answer by chance) is unstable, and on its own arm, since a busy machine disturbs tests
that count on times.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from conformance import suite
from conformance.excuses import EXCUSED
from conformance.suite import Outcome, Suite, pytest_name

N_AGAIN = 4


@dataclass
class Arm:
    """What one arm made of the tests that pass on stock. ``unstable`` and ``disturbed`` are explained above."""

    passed: list[str] = field(default_factory=list)
    excused: dict[str, str] = field(default_factory=dict)
    unstable: dict[str, str] = field(default_factory=dict)
    disturbed: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)

    def add(self, other: "Arm") -> None:
        self.passed += other.passed
        self.excused |= other.excused
        self.unstable |= other.unstable
        self.disturbed |= other.disturbed
        self.unexpected |= other.unexpected


@dataclass
class Found:
    """Outcomes on stock, and what the other arms made of what passes there."""

    stock: dict[str, Outcome] = field(default_factory=dict)
    arms: dict[str, Arm] = field(default_factory=dict)

    def add(self, other: "Found") -> None:
        self.stock |= other.stock
        for name, arm in other.arms.items():
            self.arms.setdefault(name, Arm()).add(arm)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        said = json.loads(text)
        return cls(
            {name: Outcome(**outcome) for name, outcome in said["stock"].items()},
            {name: Arm(**arm) for name, arm in said["arms"].items()},
        )

    @property
    def differs(self) -> bool:
        return any(arm.unexpected for arm in self.arms.values())


def judged(arm: str, wanted: Sequence[str], outcomes: dict[str, Outcome]) -> Arm:
    """Sort what passes on stock by what this arm made of it."""
    found = Arm()
    for name in wanted:
        outcome = outcomes.get(name, Outcome("missing"))
        excuse = EXCUSED.get(arm, {}).get(name)
        if outcome.how == "passed":
            found.passed.append(name)
        elif excuse is not None and outcome.assertion == excuse.assertion:
            found.excused[name] = excuse.reason
        else:
            found.unexpected[name] = f"{outcome.how}: {outcome.assertion or outcome.said[-300:] or 'see --keep'}"
            if outcome.error:
                found.unexpected[name] += f" ({outcome.error})"
    return found


def set_aside(
    arm: Arm, name: str, failed: Outcome | None, on_stock: Sequence[Outcome], on_arm: Sequence[Outcome]
) -> None:
    """Take a test off the unexpected ones when its repetitions say that it is not this arm that it minds."""
    assertion = failed.assertion if failed else ""
    n_same = sum(outcome.how == "failed" and outcome.assertion == assertion for outcome in on_stock)
    if assertion and n_same:
        why = arm.unexpected.pop(name)
        arm.unstable[name] = f"{why}; on stock it fails so, too: {n_same} of {len(on_stock)} times"
    elif on_arm and all(outcome.how == "passed" for outcome in on_arm):
        why = arm.unexpected.pop(name)
        arm.disturbed[name] = f"{why}; alone it passes {len(on_arm)} of {len(on_arm)} times"


def compare_file(suite_: Suite, file: str, arms: Sequence[str], folder: Path, *, keyword: str | None = None) -> Found:
    """Run one file on stock, then what passes there on the other arms.

    Raises:  CannotRunError
    """
    tests = suite.lay_out(suite_, folder / "tree" / file)
    numbers = itertools.count()

    def run(arm: str, selected: Sequence[str], *, keyword: str | None = None) -> dict[str, Outcome]:
        logs = folder / "logs" / file / f"{next(numbers)}-{arm}"
        return suite.run(suite_, arm, tests, selected, logs, keyword=keyword)

    found = Found(run("stock", [f"unit/{file}.py"], keyword=keyword))
    passing = [name for name, outcome in found.stock.items() if outcome.how == "passed"]
    found.arms = {arm: Arm() for arm in arms}
    for arm in arms if passing else ():
        outcomes = run(arm, [pytest_name(name) for name in passing])
        judgement = found.arms[arm] = judged(arm, passing, outcomes)
        for name in list(judgement.unexpected):

            def once(at: str, name: str = name) -> Outcome:
                return run(at, [pytest_name(name)]).get(name, Outcome("missing"))

            again = {at: list(repeated(partial(once, at))) for at in (arm, "stock")}
            set_aside(judgement, name, outcomes.get(name), again["stock"], again[arm])
    return found


def repeated(run: Callable[[], Outcome]) -> Iterator[Outcome]:
    """Up to ``N_AGAIN`` times, or until it fails: one failure decides."""
    for _ in range(N_AGAIN):
        outcome = run()
        yield outcome
        if outcome.how != "passed":
            return


def remembered(store: Path | None, name: str, arms: Sequence[str], run: Callable[[], Found]) -> Found:
    """What an earlier run found, if it is in ``store`` and has all arms; else what this one finds, kept there."""
    if store is None:
        return run()
    path = store / f"{name}.json"
    if path.is_file() and set(arms) <= (found := Found.from_json(path.read_text())).arms.keys():
        return Found(found.stock, {arm: found.arms[arm] for arm in arms})
    found = run()
    store.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(found.to_json())
    os.replace(whole, path)  # a run may be ended at any moment
    return found


def compare(
    suite_: Suite,
    files: Sequence[str],
    arms: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
    *,
    keyword: str | None = None,
    n_jobs: int = 2,
    store: Path | None = None,
) -> Found:
    """All files, ``n_jobs`` of them at a time; those that are in ``store`` are not run.

    When one cannot be run, or the run is stopped, the others end with it.

    Raises:  CannotRunError, Stopped
    """
    whole = Found(arms={arm: Arm() for arm in arms})

    def one(file: str) -> Found:
        found = remembered(store, file, arms, lambda: compare_file(suite_, file, arms, folder, keyword=keyword))
        n_passed = sum(outcome.how == "passed" for outcome in found.stock.values())
        others = ", ".join(f"{arm} {len(judgement.passed)}" for arm, judgement in found.arms.items())
        say(f"{file}: {len(found.stock)} tests, stock passes {n_passed}" + (f", {others}" if others else ""))
        return found

    pool = ThreadPoolExecutor(n_jobs)
    try:
        futures = [pool.submit(one, file) for file in files]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        for future in futures:
            whole.add(future.result())
    except BaseException:
        suite_.children.end_all()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return whole
