"""What one look at the engine says of cells that are free, and of those that requests on their way will take. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from polykv_proxy.control.holdings import NOT_STARTED, Holdings, n_in_batch
from polykv_proxy.ids import SlotId
from polykv_proxy.upstream import SlotStats, Stats

GROWTH_CELLS = 256
"""What a running request may add between two looks at the engine: a second at 256 tokens per second."""

GROWTH_MIN_CELLS, LOOK_AHEAD_S = 32, 2.0

FIRST_CELLS = 32
"""Who would leave less than this for the beginning of its answer, or for each answer under way, waits for them to end:
the engine would cut somebody short, or refuse the prompt itself, as soon as it is in."""


@dataclass(frozen=True, slots=True)
class Known:
    """What one look at the engine says, for all who ask before the next. ``n_spare``: with the margin for growth."""

    stats: Stats
    n_spare: int
    running: frozenset[int]

    @classmethod
    def read(cls, stats: Stats, n_free: int) -> "Known":
        busy = [slot for slot in stats.slots if not slot.idle]
        coming = sum(still_to_come(slot) for slot in busy) + n_of_started(stats)
        return cls(stats, n_free - coming - GROWTH_CELLS * len(busy), running_slots(stats))


def n_free_or_idle(stats: Stats, holdings: Holdings) -> int:
    n_free = stats.cells.free if stats.cells is not None else 0
    return n_free - n_in_batch(stats) + holdings.n_resting_alone()


def still_to_come(slot: SlotStats) -> int:
    """Prompt tokens that a slot has yet to take cells for."""
    return max(0, slot.n_prompt - slot.n_tokens) if slot.state == "prompt" else 0


def n_of_started(stats: Stats, besides: Collection[SlotId | None] = ()) -> int:
    """Cells for prompts that the engine has, and of which no token was decoded. Theirs too who were never counted."""
    return sum(slot.n_prompt for slot in stats.slots if slot.state == "started" and slot.id not in besides)


def running_slots(stats: Stats) -> frozenset[int]:
    return frozenset(slot.id for slot in stats.slots if slot.state not in NOT_STARTED)


def n_growing(stats: Stats) -> int:
    """What the answers under way take soon."""
    return FIRST_CELLS * sum(slot.state == "generating" for slot in stats.slots)


def growth(slot: SlotStats) -> float:
    """Cells that a busy slot may take until the heartbeat after the next one."""
    return max(GROWTH_MIN_CELLS, LOOK_AHEAD_S * (slot.tps_ewma or 0.0))
