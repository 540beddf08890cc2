"""The chart of ``benchmarks.courier``: one strip per arm, over its time."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, STRIP, GAP = 1000, 90, 20, 110, 28


@dataclass(frozen=True)
class Sample:
    """What was seen at one moment. ``mean_tps`` None: nobody decoded. ``n_live``: packages that were worked on."""

    at_s: float
    mean_tps: float | None
    n_live: int
    settling: bool


@dataclass(frozen=True)
class Strip:
    name: str
    said: str
    samples: Sequence[Sample]


def runs(holds: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last index of every stretch in which it holds."""
    found: list[tuple[int, int]] = []
    for i, one in enumerate(holds):
        if one and found and found[-1][1] == i - 1:
            found[-1] = (found[-1][0], i)
        elif one:
            found.append((i, i))
    return found


def svg(strips: Sequence[Strip], floor_tps: float, n_packages: int) -> str:
    """Blue the mean rate of those who decode, red the floor, pink below it, grey while the pool settles."""
    end_s = max(strip.samples[-1].at_s for strip in strips)
    top_tps = 4 * floor_tps
    height = len(strips) * (STRIP + GAP) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>'
    ]

    def at(s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * s / end_s

    def text(x: float, y: float, said: str, anchor: str = "start") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(said)}</text>'

    def level(y: float, colour: str) -> str:
        return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'

    for number, strip in enumerate(strips, 1):
        base = number * (STRIP + GAP)

        def tps(value: float, base: float = base) -> float:
            return base - STRIP * min(value, top_tps) / top_tps

        for colour, top, holds in (
            ("#dddddd", base - STRIP, [s.settling for s in strip.samples]),
            ("#f4c7c3", tps(floor_tps), [s.mean_tps is not None and s.mean_tps < floor_tps for s in strip.samples]),
        ):
            for first, last in runs(holds):
                x, end = at(strip.samples[first].at_s), at(strip.samples[min(last + 1, len(holds) - 1)].at_s)
                place = f'x="{x:.1f}" width="{max(0.3, end - x):.1f}" y="{top:.1f}" height="{base - top:.1f}"'
                parts.append(f'<rect {place} fill="{colour}"/>')
        for first, last in runs([s.mean_tps is not None for s in strip.samples]):
            shown = strip.samples[first : last + 1]
            rate = " ".join(f"{at(s.at_s):.1f},{tps(s.mean_tps or 0.0):.1f}" for s in shown)
            parts.append(f'<polyline points="{rate}" fill="none" stroke="#1a5fb4" stroke-width="1"/>')
        live = " ".join(f"{at(s.at_s):.1f},{base - STRIP * s.n_live / n_packages:.1f}" for s in strip.samples)
        parts += [
            f'<polyline points="{live}" fill="none" stroke="#777" stroke-width="1.2" stroke-dasharray="4 2"/>',
            level(tps(floor_tps), "#c01c28"),
            level(base, "black"),
            text(8, base - STRIP / 2, strip.name),
            text(LEFT + 4, base - STRIP - 4, strip.said),
        ]
    step_s = next(step for step in (5, 10, 20, 30, 60, 120, 300, 10**9) if end_s / step <= 12)
    parts += [text(at(s), height - 30, f"{s} s", "middle") for s in range(0, int(end_s) + 1, step_s)]
    what = (
        f"blue: mean tokens/s of those who decode (0 to {top_tps:.0f}); red: the floor ({floor_tps:.0f}), pink: below "
        f"it; grey: settling; dashed: packages at work (0 to {n_packages})"
    )
    parts.append(text(LEFT, height - 10, what) + "</svg>")
    return "\n".join(parts)
