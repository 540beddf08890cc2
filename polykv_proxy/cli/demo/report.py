"""How the demo's results look: tables of 80 columns and less, without boxes. Pure: numbers in, rich out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from polykv_proxy.cli.demo.agents import GroupRun

if TYPE_CHECKING:
    from rich.table import Table

_WORDS = 26


def first_words(text: str) -> str:
    """The beginning of an answer on one line."""
    line = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(line.split())
    return line if len(line) <= _WORDS else line[: _WORDS - 1].rsplit(" ", 1)[0] + " …"


def agents_table(runs: Iterable[GroupRun]) -> "Table":
    """One line per agent."""
    table = _table("agent", "TTFT ms", "cache_n", "prefilled", "tok/s", "first words", left=(0, 5))
    for number, run in enumerate(runs):
        if number:
            table.add_row()
        for agent in run.agents:
            table.add_row(
                agent.agent,
                f"{agent.ttft_ms:,.0f}",
                f"{agent.cache_n:,}",
                f"{agent.prompt_n:,}",
                f"{agent.tps:.1f}",
                first_words(agent.text),
            )
    return table


def comparison_table(pooled: GroupRun, alone: GroupRun, *, create_ms: float, used_cells: int | None) -> "Table":
    """The same agents with and without pools: what it took, and how many times less."""
    table = _table("", "with pools", "without", "ratio", left=(0,))

    def add(what: str, mine: float | None, others: float) -> None:
        ratio = "" if not mine else f"{others / mine:,.1f} x"
        table.add_row(what, "?" if mine is None else f"{mine:,.0f}", f"{others:,.0f}", ratio)

    add("slowest TTFT, ms", pooled.slowest_ttft_ms, alone.slowest_ttft_ms)
    add("wall time, pool ready, ms", pooled.wall_ms, alone.wall_ms)
    add("wall time, pool made first, ms", pooled.wall_ms + create_ms, alone.wall_ms)
    add("prompt tokens prefilled by agents", pooled.prefilled_n, alone.prefilled_n)
    add("KV cells in use", used_cells, alone.whole_n)
    return table


def comparison_notes(pooled: GroupRun, alone: GroupRun, again: GroupRun) -> list[str]:
    """What the comparison is, and how many answers are the same.

    ``again``: the plain server once more, with the prompts in its own slots: what differs there is not due to sharing.
    """
    n_all, n_same, n_same_alone = len(pooled.agents), _n_same(pooled, alone), _n_same(again, alone)
    notes = ["Without pools: the same binary as a plain llama-server, its slots empty."]
    if n_same == n_all:
        return [*notes, f"All {n_all} answers are the same on both sides, word for word."]
    return [
        *notes,
        "Tokens are compared exactly before they are shared. What differs is rounding:",
        "sums depend on the cells and batches that a prompt is in, also without pools,",
        "and so small a model often has two words that are almost equally likely.",
        f"The same, word for word: {n_same} of {n_all} answers with and without pools, {n_same_alone} of {n_all}",
        "when the plain server was asked twice, the second time out of its own slots.",
    ]


def _n_same(run: GroupRun, other: GroupRun) -> int:
    answers = {agent.agent: agent.text for agent in other.agents}
    return sum(answers[agent.agent] == agent.text for agent in run.agents)


def _table(*headings: str, left: tuple[int, ...]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right", no_wrap=True, overflow="ellipsis")
    return table
