"""A table whose numbers are always there: where its lines are too long for the terminal, first the name is cut, then
the last column wraps. Rich's own table takes from every column alike, which leaves no digit beside a long name.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

_GAP = 2
_DIM = "bright_black"


def wrapped(parts: Iterable[Text], width: int, between: str = " ") -> list[Text]:
    """Lines of parts, each as full as ``width`` lets it be. A part is never broken, so a number keeps its unit."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + cell_len(between) + part.cell_len <= width:
            lines[-1] = Text(between).join([lines[-1], part])
        else:
            lines.append(part)
    return lines


@dataclass(frozen=True, slots=True)
class Label:
    """A name behind its guide: whole as ``text``, or ``short`` with its end cut, but never into ``least``."""

    guide: str
    text: str
    short: str
    least: str
    style: str = ""

    @property
    def width(self) -> int:
        return cell_len(self.guide + self.text)

    @property
    def least_width(self) -> int:
        return min(self.width, cell_len(f"{self.guide}{self.least}…"))

    def at(self, width: int) -> Text:
        text = Text.assemble((self.guide, _DIM), (self.text if self.width <= width else self.short, self.style))
        text.truncate(width, overflow="ellipsis")
        return text


@dataclass(frozen=True, slots=True)
class Row:
    """``numbers``: one for each column but the label and the last. ``last``: parts that are not broken inside."""

    label: Label
    numbers: Sequence[str]
    last: Sequence[Text]


class FittedTable:
    """``label_at``: which column is the label. ``label_keeps``: its width while the last column can still wrap.

    Units:  widths in cells of the terminal. One that is too narrow for the numbers gets lines that run over.
    """

    def __init__(self, headings: Sequence[str], rows: Iterable[Row], *, label_at: int, label_keeps: int):
        self.rows = list(rows)
        self._number_headings = [*headings[:label_at], *headings[label_at + 1 : -1]]
        self._label_heading, self._last_heading = headings[label_at], headings[-1]
        self._label_at, self._label_keeps = label_at, label_keeps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        columns = zip(self._number_headings, *(row.numbers for row in self.rows), strict=True)
        widths = [max(map(cell_len, column)) for column in columns]
        gap, label_width, last_width = self._fit(options.max_width - sum(widths), len(widths) + 1)

        def line(label: Text, numbers: Sequence[str], last: Text, style: str = "") -> Text:
            label.pad_right(label_width - label.cell_len)
            cells = [Text(number.rjust(width)) for number, width in zip(numbers, widths, strict=True)]
            cells.insert(self._label_at, label)
            whole = Text(" " * gap, style=style, no_wrap=True, overflow="ignore").join([*cells, last])
            whole.rstrip()
            return whole

        yield line(Text(self._label_heading), self._number_headings, Text(self._last_heading), _DIM)
        for row in self.rows:
            first, *more = wrapped(row.last, last_width) or [Text()]
            yield line(row.label.at(label_width), row.numbers, first)
            for rest in more:
                yield line(Text(), [""] * len(widths), rest)

    def _fit(self, room: int, n_gaps: int) -> tuple[int, int, int]:
        """Share ``room``, what the numbers leave: width of a gap, of the label, of the last column."""
        label = max([cell_len(self._label_heading), *(row.label.width for row in self.rows)])
        last = max([cell_len(self._last_heading), *(Text(" ").join(row.last).cell_len for row in self.rows)])
        if label + last + _GAP * n_gaps <= room:
            return _GAP, label, last
        room -= n_gaps
        least_label = max([cell_len(self._label_heading), *(row.label.least_width for row in self.rows)])
        parts = [part.plain for row in self.rows for part in row.last]
        least_last = max(map(cell_len, [self._last_heading, *parts]))
        label_width = max(room - last, min(label, self._label_keeps), least_label)
        last_width = max(min(last, room - label_width), least_last)
        return 1, max(min(label, room - last_width), least_label), last_width


class Footer:
    """Facts in a row, on as many lines as they need; none is broken."""

    def __init__(self, facts: Iterable[str], between: str = " · "):
        self.facts, self._between = list(facts), between

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in wrapped(map(Text, self.facts), options.max_width, self._between):
            line.no_wrap, line.overflow = True, "ignore"
            yield line
