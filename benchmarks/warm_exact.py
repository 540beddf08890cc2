"""Are saved states what was there, to the last byte and digit? A part of ``benchmarks.warm_tier``.

For each type of the cache, on the chat model: a trunk, a branch from inside of it and a slot behind the branch are
computed, read through (greedy answers forced token by token, with their log-probabilities) and saved to disk. Then

bytes      everything is freed, loaded into holes of the cache and saved again: the same three files
readings   the server is killed; a fresh one loads the files into the same cells and is read through in the same way:
           every log-probability is equal, and no token of the pools is computed

A last server reads through a trunk of which one token far back is another one: that must be seen, or equal readings
would say nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.engine.families import (
    N_QUESTION,
    Family,
    clear_all,
    fill,
    load_all,
    make_holes,
    make_pools,
    places,
    readings,
    save_all,
)
from tests.engine.hooks import Engine
from tests.engine.noise import Noise
from tests.engine.state_files import contents

TRUNK_LEN = 600
BRANCH_POS = 400
OWN_LEN = 200
CACHES = {"f16": (), "q8_0": ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on")}

Starter = Callable[[str, Sequence[str]], Engine]
"""Name and flags to a running server; more than one may be started under a name of its own."""


@dataclass
class Exact:
    """One type of the cache. ``n_runs``: in how many pieces the trunk lay when it was loaded into holes; ``n_same``:
    log-probabilities that were compared and equal, of ``n_compared``; ``n_computed``: prompt tokens that the fresh
    server processed, of which ``n_due`` are the questions'."""

    files: dict[str, bool]
    n_bytes: int
    n_runs: int
    same_cells: bool
    n_compared: int
    n_same: int
    n_computed: int
    n_due: int
    sees_a_change: bool

    def broken(self, cache: str) -> list[str]:
        checks = {f"{name}: other bytes after save, load, save": not same for name, same in self.files.items()}
        checks |= {
            "nothing was loaded into holes": self.n_runs < 2,
            "the fresh server used other cells": not self.same_cells,
            f"{self.n_same} of {self.n_compared} log-probabilities are equal": self.n_same < self.n_compared,
            "no log-probabilities": not self.n_compared,
            f"{self.n_computed} tokens computed where {self.n_due} are new": self.n_computed != self.n_due,
            "another token far back is not seen": not self.sees_a_change,
        }
        return [f"{cache}: {said}" for said, broken in checks.items() if broken]


def measure_exact(start: Starter, noise: Noise, folder: Path, say: Callable[[str], Any]) -> dict[str, Exact]:
    found = {}
    for name, flags in CACHES.items():
        say(f"saved states in {name}: bytes and readings")
        states = folder / f"states-{name}"
        disk = ("--polykv-save-path", str(states), "--polykv-save-disk", "1024", "--no-cache-idle-slots")
        number = count(1)

        def server(flags: Sequence[str] = (*flags, *disk), name: str = name, number: "count[int]" = number) -> Engine:
            return start(f"{name}-{next(number)}", flags)

        found[name] = _one_cache(server, noise, states)
    return found


def _one_cache(start: Callable[[], Engine], noise: Noise, states: Path) -> Exact:
    family = Family.draw(noise, 1, trunk_len=TRUNK_LEN, branch_pos=BRANCH_POS, own_len=OWN_LEN)
    first = start()
    pools = make_pools(first, family)
    lies = places(first, *pools)
    computed = readings(first, family, *pools, noise)
    clear_all(first)

    save_all(first, *fill(first, family))
    files = contents(states)
    clear_all(first)
    make_holes(first, noise)
    root, branch = load_all(first)
    n_runs = len(first.runs(root))
    save_all(first, root, branch)
    again = contents(states)
    first.server.kill()

    fresh = start()
    root = fresh.load("trunk")["seq"]
    branch = fresh.load("branch", parent=root)["seq"]
    same_cells = places(fresh, root, branch) == lies
    loaded = readings(fresh, family, root, branch, noise)
    n_computed = fresh.stats()["n_prompt_cum"]
    clear_all(fresh)

    other = Family([family.trunk[1], *family.trunk[1:]], [family.trunk[1], *family.branch[1:]], [], BRANCH_POS)
    changed = readings(fresh, other, *make_pools(fresh, other), noise)
    fresh.server.kill()

    n_compared = n_same = 0
    for name, read in computed.items():
        for mine, theirs in zip(read.at, loaded[name].at, strict=True):
            n_compared += len(mine)
            n_same += sum(theirs.get(token) == value for token, value in mine.items())
    return Exact(
        files={name: again.get(name) == content for name, content in files.items()},
        n_bytes=sum(map(len, files.values())),
        n_runs=n_runs,
        same_cells=same_cells,
        n_compared=n_compared,
        n_same=n_same,
        n_computed=n_computed,
        n_due=len(computed) * N_QUESTION,
        sees_a_change=all(changed[name].at != read.at for name, read in computed.items()),
    )


def lines_of(found: dict[str, Exact]) -> list[str]:
    lines = [f"exact: trunk of {TRUNK_LEN} tokens, branch of {OWN_LEN} more from {BRANCH_POS}, slot behind it"]
    for cache, exact in found.items():
        files = ", ".join(f"{name} {'same' if same else 'OTHER'}" for name, same in exact.files.items())
        lines += [
            f"  {cache:5} save, load into {exact.n_runs} pieces, save: {files} ({exact.n_bytes / 2**20:.1f} MiB)",
            f"  {'':5} fresh process: {exact.n_same} of {exact.n_compared} log-probabilities equal, "
            f"{exact.n_computed} tokens computed ({exact.n_due} new)",
        ]
    return lines
