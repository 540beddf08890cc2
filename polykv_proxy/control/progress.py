"""Whether the engine gets on with what it has to do. That it answers says nothing about that.

llama-server answers health and stats from other threads than the one that decodes, so one whose decoding hangs looks
alive. What shows is that somebody is at work and no counter moves.
"""

from polykv_proxy.upstream import SlotStats, Stats

HUNG_AFTER_S = 60.0
"""The slowest machine needs seconds for a batch."""

PREFILL_GRACE_S = 10.0
"""Counters move when a batch is done. One with a prompt in it may take so long before they say nothing about now."""

PREFILLING = ("started", "prompt", "done_prompt")


class Progress:
    """``note`` every reading of the engine. Pure.

    Units:  *_s seconds, monotonic
    """

    def __init__(self) -> None:
        self._last: Stats | None = None
        self._moved_s = float("-inf")
        self._prefills = False
        self._same_answer = False

    def note(self, stats: Stats, asked_s: float) -> None:
        """``asked_s``: when the question went out. Readings of an engine that sleeps say nothing."""
        last, self._last = self._last, stats
        self._same_answer = (
            last is not None and stats.ts is not None and (stats.epoch, stats.ts) == (last.epoch, last.ts)
        )
        self._prefills = stats.service.state != "idle" or any(slot.state in PREFILLING for slot in stats.slots)
        if self._same_answer:
            return
        if last is None or not _has_work(stats) or not _has_work(last) or _moved(last, stats):
            self._moved_s = asked_s

    def still_s(self, now_s: float) -> float:
        """For how long there has been something to do and nothing done; 0 while there is nothing to do.

        The same answer as before, to the moment it was taken, is no news: then also of an engine at rest.
        """
        if self._last is None or not (_has_work(self._last) or self._same_answer):
            return 0.0
        return max(0.0, now_s - self._moved_s)

    def late_s(self, now_s: float) -> float:
        """The same, after what a batch with a prompt in it may take."""
        return max(0.0, self.still_s(now_s) - (PREFILL_GRACE_S if self._prefills and not self._same_answer else 0.0))

    def hangs(self, now_s: float) -> bool:
        return self._last is not None and _has_work(self._last) and self.still_s(now_s) >= HUNG_AFTER_S


def _has_work(stats: Stats) -> bool:
    return stats.n_deferred > 0 or stats.service.state != "idle" or any(not slot.idle for slot in stats.slots)


def _moved(before: Stats, now: Stats) -> bool:
    """Something was decoded, or done. A request that comes or goes is neither."""
    if _counters(before) != _counters(now):
        return True
    tasks = {slot.id_task: _of_task(slot) for slot in before.slots if not slot.idle}
    return any(tasks.get(slot.id_task, _of_task(slot)) != _of_task(slot) for slot in now.slots if not slot.idle)


def _counters(stats: Stats) -> tuple[object, ...]:
    last = stats.finished[-1].id_task if stats.finished else None
    return stats.epoch, stats.n_decoded_cum, stats.n_prompt_cum, stats.service.seq, stats.service.n_tokens, last


def _of_task(slot: SlotStats) -> tuple[int, int]:
    return slot.n_tokens, slot.n_decoded
