"""docs/conformance.md: what was run, what passes where, and what does not run here, each by name."""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby

from conformance.clients import PROXY_ONLY
from conformance.excuses import why_not
from conformance.upstream import Arm, Found

TITLES = {
    "patched-off": "patched, no pools",
    "patched": "patched, pools",
    "proxy": "A: proxy, pools",
    "proxy-stock": "B: proxy, stock engine",
}
INTRO = """# Conformance

Other people's clients and tests against the proxy, each beside the same in front of a stock llama-server. `make
conformance` runs all of it and writes this page; it ends with 1 when something that passes in front of stock fails
through the proxy and is not excused below. `make conformance ARGS='-k EXPRESSION'` runs a part and writes nothing.
A run that is stopped (Ctrl-C, SIGTERM) ends all it started and says how to go on from there.

In mode A the proxy stands in front of the patched engine with pools, in mode B in front of a stock llama-server. Both
are as they are by default; nothing in the tests knows of them.
"""
UPSTREAM = """## llama.cpp's own server tests

All of `tools/server/tests` of the pinned commit, unchanged, with engine and proxy in the place of the server binary.
The models that they would download are replaced by tiny ones with random weights: dense, seeing, embedding, reranking,
filling in, with an adapter and as a draft. So what looks for the words or counts the tokens of a certain model fails on
stock as well; it says nothing about the proxy and is listed at the end.
"""


def page(upstream: Found, scenarios: Found, *, commit: str, versions: Mapping[str, str]) -> str:
    """The whole page. Both were run against the same arms."""
    arms = list(upstream.arms)
    pinned = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [INTRO, f"This page: llama.cpp {commit[:8]}, {pinned}.\n"]
    parts += [summary(upstream, scenarios, arms)]
    parts += ["## The official clients\n", scenario_table(scenarios, arms)]
    parts += [UPSTREAM, file_table(upstream, arms)]
    parts += [remarks(upstream, scenarios, arms)]
    parts += ["### What passes\n", passing(upstream)]
    parts += ["### What fails or is skipped in front of stock, too\n", elsewhere(upstream)]
    return "\n".join(parts).rstrip() + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def title(arm: str) -> str:
    return TITLES.get(arm, arm)


def summary(upstream: Found, scenarios: Found, arms: list[str]) -> str:
    def row(what: str, found: Found, n: int) -> list[object]:
        passed = [name for name, outcome in found.stock.items() if outcome.how == "passed"]
        return [what, n, len(passed), *(sum(name in found.arms[arm].passed for name in passed) for arm in arms)]

    asked_everywhere = [name for name in scenarios.stock if not name.startswith(PROXY_ONLY)]
    return table(
        ["passes", "all", "stock", *map(title, arms)],
        [
            row("scenarios of the official clients", scenarios, len(asked_everywhere)),
            row("llama.cpp's own tests", upstream, len(upstream.stock)),
        ],
    )


def mark(arm: Arm, name: str) -> str:
    if name in arm.passed:
        return "passes"
    for how in ("excused", "unstable", "disturbed", "unexpected"):
        if name in getattr(arm, how):
            return "**FAILS**" if how == "unexpected" else how
    return "-"


def scenario_table(found: Found, arms: list[str]) -> str:
    def rows() -> Iterable[list[str]]:
        for name, outcome in found.stock.items():
            stock = (
                "-" if outcome.how == "skipped" else outcome.how.replace("passed", "passes").replace("failed", "fails")
            )
            yield [f"`{name.removeprefix('test_')}`", stock, *(mark(found.arms[arm], name) for arm in arms)]

    said = table(["scenario", "stock", *map(title, arms)], rows())
    reasons = [
        f"- `{name.removeprefix('test_')}`: {why_not(name, outcome)}\n"
        for name, outcome in found.stock.items()
        if outcome.how == "failed"
    ]
    return said + ("\nFails in front of stock:\n\n" + "".join(reasons) if reasons else "")


def file_table(found: Found, arms: list[str]) -> str:
    def rows() -> Iterable[list[object]]:
        for file, group in groupby(found.stock, key=file_of):
            names = list(group)
            passed = [name for name in names if found.stock[name].how == "passed"]
            on_arms = (sum(name in found.arms[arm].passed for name in passed) for arm in arms)
            yield [f"`{file}`", len(names), len(passed), *on_arms]

    return table(["file", "tests", "stock", *map(title, arms)], rows())


def remarks(upstream: Found, scenarios: Found, arms: list[str]) -> str:
    """Everything that passes on stock and did not simply pass on an arm."""
    lines = []
    for how, says in (
        ("unexpected", "Fails and should not"),
        ("excused", "Excused, since it differs by design"),
        ("unstable", "Fails in front of stock in the same way now and then"),
        ("disturbed", "Failed once in the whole run and passes alone"),
    ):
        told = [
            f"- {title(arm)}: `{name}`: {why}\n"
            for found in (scenarios, upstream)
            for arm in arms
            for name, why in getattr(found.arms[arm], how).items()
        ]
        if told:
            lines += [f"### {says}\n\n", *told, "\n"]
    return "".join(lines)


def file_of(name: str) -> str:
    return name.partition("::")[0]


def function_of(name: str) -> str:
    return re.sub(r"\[.*", "", name.partition("::")[2], flags=re.DOTALL)


def passing(found: Found) -> str:
    lines = []
    for file, group in groupby(found.stock, key=file_of):
        names = list(group)
        told = []
        for function, same in groupby(names, key=function_of):
            cases = list(same)
            n = sum(found.stock[case].how == "passed" for case in cases)
            if n:
                told.append(f"`{function}`" + counted(n, len(cases)))
        if told:
            lines.append(f"- `{file}`: {', '.join(told)}\n")
    return "".join(lines)


def counted(n: int, n_all: int) -> str:
    if n == n_all:
        return f" ({n} cases)" if n > 1 else ""
    return f" ({n} of {n_all} cases)"


def elsewhere(found: Found) -> str:
    """By reason, then by name."""
    reasons: dict[str, dict[str, int]] = {}
    for name, outcome in found.stock.items():
        if outcome.how != "passed":
            functions = reasons.setdefault(why_not(name, outcome), {})
            key = f"{file_of(name)}::{function_of(name)}"
            functions[key] = functions.get(key, 0) + 1
    lines = []
    for reason, functions in sorted(reasons.items(), key=lambda item: -sum(item[1].values())):
        told = ", ".join(f"`{name}`" + (f" ({n} cases)" if n > 1 else "") for name, n in functions.items())
        lines.append(f"- {reason}: {told}\n")
    return "".join(lines)
