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


def comparison_notes(pooled: GroupRun, alone: GroupRun) -> list[str]:
    """What the comparison is, and whether both sides said the same."""
    answers = {agent.agent: agent.text for agent in alone.agents}
    n_same = sum(answers[agent.agent] == agent.text for agent in pooled.agents)
    n_all = len(pooled.agents)
    how_many = {n_all: f"All {n_all} answers are", 0: f"None of the {n_all} answers is", 1: f"1 of {n_all} answers is"}
    notes = [
        "Without pools: the same binary as a plain llama-server, its slots empty.",
        f"{how_many.get(n_same, f'{n_same} of {n_all} answers are')} the same on both sides, word for word.",
    ]
    if n_same < n_all:
        # Seen alike on a stock server, its own prompt cache against a full prefill: 1 of these 4 stays the same.
        notes.append("A quantized model's sums depend on which cells a prompt lies in and on how it is")
        notes.append("cut into batches; the tests compare answers exactly, on f32 models.")
    return notes


def _table(*headings: str, left: tuple[int, ...]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right", no_wrap=True, overflow="ellipsis")
    return table
