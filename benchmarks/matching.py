"""What it costs to find the longest match of a long prompt among many pools, to hash tokens, and to change the index.

    python -m benchmarks.matching [--pools 10000] [--tokens 100000] [--rounds 30] [--json] [--assert]

Trees of several shapes, each asked for prompts that are bad for it; the time includes laying the prompt out as bytes,
as ``PoolTree.match`` does. Beside it, in the same run, one memcmp of the whole prompt. Then 10,000 pools are inserted,
re-ranked and released, and a quarter as many, to see whether the cost of one stays the same. Times are those of the
processor, so that a busy machine does not count.
With --assert, exit 1 when a median match costs more than 2 x memcmp + 1 ms, hashing makes less than 2 million tokens
per second, or four times the pools cost more than 12 times as much to change (16 would be quadratic).
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from polykv_proxy.ids import PoolId
from polykv_proxy.tree.index import Key, PrefixIndex
from polykv_proxy.tree.prefix import Tokens, cumulative_hashes

N_VOCAB = 150_000
MAX_EXTRA_MS, MAX_MEMCMPS, MIN_HASHED_PER_S, MAX_GROWTH = 1.0, 2, 2e6, 12.0
OWN = 20
"""Tokens that a pool has for itself where the shape does not say otherwise."""


@dataclass(frozen=True)
class NewPool:
    """``own`` tokens behind the first ``branch_pos`` of pool ``parent``."""

    own: Tokens
    parent: int | None = None
    branch_pos: int = 0


Shape = Callable[[random.Random, int, Tokens], Iterator[NewPool]]


def unrelated(rng: random.Random, n: int, path: Tokens) -> Iterator[NewPool]:
    """Nothing in common; one of them is the prompt's."""
    yield NewPool(path)
    for _ in range(n - 1):
        yield NewPool(words(rng, 200))


def families(rng: random.Random, n: int, path: Tokens) -> Iterator[NewPool]:
    """200 system prompts, each with its agents."""
    n_families = min(200, n)
    yield NewPool(path)
    for _ in range(n_families - 1):
        yield NewPool(words(rng, 1000))
    for i in range(n - n_families):
        family = i % n_families
        yield NewPool(words(rng, OWN), family, len(path) if family == 0 else 1000)


def comb(rng: random.Random, n: int, path: Tokens, order: Callable[[list[int]], list[int]]) -> Iterator[NewPool]:
    """All branch off one long pool, each at another position."""
    yield NewPool(path)
    step = max(1, len(path) // n)
    for at in order(list(range(step, n * step, step))):
        yield NewPool(words(rng, OWN), 0, min(at, len(path) - 1))


def comb_from_the_end(rng: random.Random, n: int, path: Tokens) -> Iterator[NewPool]:
    """The long pool's branches, the deepest first: the best one of a prefix changes each time."""
    return comb(rng, n, path, lambda at: at[::-1])


def comb_at_random(rng: random.Random, n: int, path: Tokens) -> Iterator[NewPool]:
    """The long pool's branches in any order."""
    return comb(rng, n, path, lambda at: rng.sample(at, len(at)))


def zigzag(rng: random.Random, n: int, path: Tokens) -> Iterator[NewPool]:
    """The same positions, but nobody is there first: each goes a little further along the path, and leaves it."""
    step = max(1, len(path) // n)
    for i in range(n):
        yield NewPool(path[i * step : (i + 1) * step] + words(rng, OWN), i - 1 if i else None, i * step)


def chain(rng: random.Random, n: int, path: Tokens) -> Iterator[NewPool]:
    """Each one extends the one before."""
    step = max(1, len(path) // n)
    for i in range(n):
        yield NewPool(path[i * step : (i + 1) * step], i - 1 if i else None, i * step)


def twins(rng: random.Random, n: int, path: Tokens) -> Iterator[NewPool]:
    """All tokens but the last in common."""
    yield NewPool(path[:-1])
    for i in range(n - 1):
        yield NewPool(array("i", [N_VOCAB + i]), 0, len(path) - 1)


SHAPES: dict[str, Shape] = {
    make.__name__: make for make in (unrelated, families, comb_from_the_end, comb_at_random, zigzag, chain, twins)
}


def words(rng: random.Random, n: int) -> Tokens:
    return array("i", rng.choices(range(N_VOCAB), k=n))


def prompts(path: Tokens) -> dict[str, Tokens]:
    """What is asked of every shape."""
    missed, left = array("i", path), array("i", path)
    missed[0] = left[len(path) // 2] = left[-1] = -1
    return {
        "all": path,
        "longer": path + path[:1000],
        "miss at 0": missed,
        "leaves midway": left,
        "leaves at the end": path[:-1] + left[-1:],
    }


def fill(pools: list[NewPool]) -> tuple[PrefixIndex, list[Key], float]:
    """An index with these pools, their keys, and the seconds it took."""
    index, keys, depths = PrefixIndex(), [], []
    began = time.process_time()
    for i, pool in enumerate(pools):
        depths.append(0 if pool.parent is None else depths[pool.parent] + 1)
        keys.append(Key(3, depths[-1], PoolId(i)))
        parent = PoolId(pool.parent) if pool.parent is not None else None
        index.insert(keys[-1], pool.own.tobytes(), parent=parent, branch_pos=pool.branch_pos)
    return index, keys, time.process_time() - began


def median_ms(rounds: int, work: Callable[[], object]) -> float:
    took = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        took.append((time.process_time() - began) * 1e3)
    return statistics.median(took)


def measure_matches(rounds: int, index: PrefixIndex, path: Tokens) -> dict[str, float]:
    return {
        name: median_ms(rounds, lambda prompt=prompt: index.longest(prompt.tobytes()))
        for name, prompt in prompts(path).items()
    }


def measure_changes(pools: list[NewPool]) -> dict[str, float]:
    """The better of two rounds of changes."""
    one, other = change(pools), change(pools)
    return {name: min(one[name], other[name]) for name in one}


def change(pools: list[NewPool]) -> dict[str, float]:
    """Seconds for inserting all of them, making each resident and cold again, and releasing the oldest first."""
    index, keys, inserted_s = fill(pools)
    began = time.process_time()
    for key in keys[::-1]:
        index.rekey(key._replace(rank=0))
    for key in keys:
        index.rekey(key)
    reranked = time.process_time()
    for key in keys:
        index.remove(key.pool_id)
    return {"insert": inserted_s, "re-rank": reranked - began, "release": time.process_time() - reranked}


def measure_shape(make: Shape, n: int, rounds: int, path: Tokens) -> dict[str, object]:
    pools = list(make(random.Random(1), n, path))
    index, _keys, _ = fill(pools)
    matches = measure_matches(rounds, index, path)
    del index
    few = measure_changes(list(make(random.Random(1), n // 4, path)))
    full = measure_changes(pools)
    return {
        "match_ms": {name: round(ms, 4) for name, ms in matches.items()},
        "change_us": {name: round(s / len(pools) * 1e6, 1) for name, s in full.items()},
        "growth": {name: round(full[name] / few[name], 2) for name in full},
    }


def bytes_per_token(path: Tokens) -> float:
    """Host memory of the index for each token of one long pool."""
    own = path.tobytes()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixIndex()
    index.insert(Key(3, 0, PoolId(1)), own, parent=None, branch_pos=0)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / len(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--assert", action="store_true", dest="check")
    asked = parser.parse_args()
    path = words(random.Random(0), asked.tokens)
    one, other = path.tobytes(), path.tobytes()
    memcmp_ms = median_ms(asked.rounds, lambda: one == other)
    hashed_per_s = asked.tokens / median_ms(max(3, asked.rounds // 3), lambda: cumulative_hashes(path)) * 1e3
    gc.disable()  # as timeit does: a round of the collector costs what all objects of the process cost
    shapes = {name: measure_shape(make, asked.pools, asked.rounds, path) for name, make in SHAPES.items()}
    slowest_ms = max(ms for shape in shapes.values() for ms in shape["match_ms"].values())
    growth = max(ratio for shape in shapes.values() for ratio in shape["growth"].values())
    limit_ms = MAX_MEMCMPS * memcmp_ms + MAX_EXTRA_MS
    result = {
        "memcmp_ms": round(memcmp_ms, 4),
        "limit_ms": round(limit_ms, 4),
        "slowest_match_ms": slowest_ms,
        "hashed_tokens_per_s": round(hashed_per_s),
        "largest_growth": growth,
        "index_bytes_per_token": round(bytes_per_token(path), 2),
        "shapes": shapes,
    }
    if asked.json:
        print(json.dumps(result))
    else:
        for name, shape in shapes.items():
            print(f"{name:<18} match ms  {shown(shape['match_ms'])}")
            print(f"{'':<18} change us {shown(shape['change_us'])}   four times the pools: x {shown(shape['growth'])}")
        print(f"slowest match: {slowest_ms:.3f} ms (at most {limit_ms:.3f}; one memcmp is {memcmp_ms:.4f})")
        print(f"hashing: {hashed_per_s / 1e6:.1f} million tokens/s (at least {MIN_HASHED_PER_S / 1e6:.0f})")
        print(f"four times the pools cost {growth:.2f} times as much to change (at most {MAX_GROWTH})")
        print(f"index: {result['index_bytes_per_token']} bytes per token")
    good = slowest_ms <= limit_ms and hashed_per_s >= MIN_HASHED_PER_S and growth <= MAX_GROWTH
    return int(asked.check and not good)


def shown(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in numbers.items())


if __name__ == "__main__":
    sys.exit(main())
