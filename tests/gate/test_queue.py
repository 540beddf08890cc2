"""The line: bounds, order between tenants, places, one answer per ticket."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.gate.queue import GRANT_SERVICE, MAX_TENANTS, Line, Service, Standing, Ticket


def ticket(i: int, tenant: str = "a", arrived_s: float = 0.0, wait_s: float = 1000.0, rank: float = 0.0) -> Ticket:
    return Ticket(i, tenant, arrived_s, arrived_s + wait_s, rank, n_bytes=10)


def order(line: Line, now_s: float = 0.0) -> list[int]:
    return [t.ticket_id for t in line.order(now_s)]


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    line = Line()
    for i in (3, 1, 2):
        line.add(ticket(i, arrived_s=float(i)))
    assert order(line) == [1, 2, 3]
    assert [line.place(i, 0.0) for i in (1, 2, 3, 4)] == [1, 2, 3, None]


def test_tenants_alternate_however_many_one_has_in_line() -> None:
    line = Line()
    for i in range(5):
        line.add(ticket(i, "many", arrived_s=i / 10))
    for i in range(5, 7):
        line.add(ticket(i, "few", arrived_s=i / 10))
    assert order(line) == [0, 5, 1, 6, 2, 3, 4]


def test_the_least_served_tenant_is_next() -> None:
    line = Line()
    line.add(ticket(1, "a"))
    line.add(ticket(2, "b", arrived_s=1.0))
    line.service.charge("a", 5000)
    assert order(line) == [2, 1]


def test_who_comes_new_does_not_overtake_for_having_been_away() -> None:
    line = Line()
    line.service.charge("old", 5000)
    line.add(ticket(1, "old"))
    line.add(ticket(2, "new", arrived_s=1.0))
    assert order(line) == [1, 2]


def test_who_waited_for_half_its_time_is_first() -> None:
    line = Line()
    line.add(ticket(1, "busy", wait_s=60.0))
    line.add(ticket(2, "calm", arrived_s=20.0, wait_s=60.0))
    line.service.charge("busy", 10_000)
    assert order(line, 29.0) == [2, 1]
    assert order(line, 30.0) == [1, 2]


def test_rank_decides_within_a_tenant() -> None:
    line = Line()
    line.add(ticket(1, rank=9.0))
    line.add(ticket(2, arrived_s=5.0, rank=3.0))
    assert order(line) == [2, 1]


def test_number_and_bytes_are_bounded() -> None:
    line = Line(max_bytes=25)
    line.add(ticket(1))
    assert line.has_room(10, max_n=2)
    assert not line.has_room(16, max_n=2)
    assert not line.has_room(10, max_n=1)
    line.add(ticket(2))
    assert line.n_bytes == 20
    assert line.cancel(1)
    assert line.take(2, 0.0, granted=False)
    assert (len(line), line.n_bytes) == (0, 0)


def test_a_ticket_ends_once() -> None:
    line = Line()
    line.add(ticket(1))
    assert line.take(1, 0.0, granted=True)
    assert not line.cancel(1)
    assert not line.take(1, 0.0, granted=True)
    line.add(ticket(2))
    assert line.cancel(2)
    assert not line.take(2, 0.0, granted=True)
    assert line.service.of("a") == GRANT_SERVICE


def test_the_eta_follows_the_pace_and_gets_longer_when_nothing_moves() -> None:
    line = Line()
    for i in range(6):
        line.add(ticket(i, arrived_s=i / 10))
    assert line.eta_s(5, 1.0) is None
    for i in range(3):
        line.take(i, 10.0 * i, granted=True)
    assert line.eta_s(3, 20.0) == pytest.approx(10.0)
    assert line.eta_s(5, 20.0) == pytest.approx(30.0)
    assert line.eta_s(3, 120.0) == pytest.approx(50.0)
    assert line.eta_s(99, 120.0) is None


def test_a_turn_that_comes_after_the_end_is_not_promised() -> None:
    line = Line()
    for i in range(6):
        line.add(ticket(i, wait_s=30.0))
    assert line.standing(5, 1.0) == Standing(6, None, 29.0)  # no pace yet
    for i in range(3):
        line.take(i, 5.0 * i, granted=True)
    assert line.standing(4, 10.0) == Standing(2, 10.0, 20.0)
    assert line.standing(5, 20.0) == Standing(3, None, 10.0, ends_first=True)
    assert line.standing(0, 20.0) == Standing()


def test_expired_are_told_in_order_of_arrival() -> None:
    line = Line()
    line.add(ticket(1, arrived_s=2.0, wait_s=5.0))
    line.add(ticket(2, arrived_s=1.0, wait_s=6.0))
    line.add(ticket(3, arrived_s=0.0, wait_s=60.0))
    assert line.next_deadline_s() == 7.0
    assert [t.ticket_id for t in line.expired(6.9)] == []
    assert [t.ticket_id for t in line.expired(7.0)] == [2, 1]


def test_tenants_that_were_seen_once_are_forgotten() -> None:
    service = Service()
    for i in range(MAX_TENANTS + 10):
        service.charge(str(i), 1.0)
    assert service.of("0") == 0.0
    assert service.of(str(MAX_TENANTS + 9)) == 1.0


tenants = st.lists(st.sampled_from("abc"), min_size=1, max_size=30)


def serve(line: Line, n: int) -> list[Ticket]:
    served = []
    for _ in range(n):
        first = line.order(0.0)[0]
        line.take(first.ticket_id, 0.0, granted=True)
        served.append(first)
    return served


def worst_lead(line: Line, who: list[str]) -> int:
    """By how many grants one tenant ever leads another one that still waits."""
    for i, tenant in enumerate(who):
        line.add(ticket(i, tenant, arrived_s=i / 100))
    had, left, worst = Counter[str](), Counter(who), 0
    for served in serve(line, len(who)):
        had[served.tenant] += 1
        left[served.tenant] -= 1
        waiting = [t for t in left if left[t] > 0]
        worst = max([worst, *(had[served.tenant] - had[t] for t in waiting)])
    return worst


@given(who=tenants)
def test_nobody_who_waits_is_left_behind_by_more_than_one_grant(who: list[str]) -> None:
    assert worst_lead(Line(), who) <= 1


def test_a_plain_fifo_would_leave_some_behind() -> None:
    """The property above does tell a fair line from an unfair one."""

    class Fifo(Line):
        def order(self, now_s: float) -> list[Ticket]:
            return sorted(self._waiting.values(), key=lambda t: t.arrived_s)

    assert worst_lead(Fifo(), ["a"] * 5 + ["b"]) == 5
