"""A line of those who wait: bounded in number, bytes and time, fair between tenants.

Order: who has waited for more than half of the longest wait goes first, by arrival. Then by what each tenant had so
far (least attained service), then by rank, then by arrival. A tenant that comes new starts with what the least served
one in line has had, so that it does not overtake everybody for having been away.

A ticket ends exactly once: ``take`` (granted, refused, or expired: the caller says which) or ``cancel``, whichever
comes first; the other one is told that it came too late.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_BYTES = 256 * 1024 * 1024
GRANT_SERVICE = 256.0
"""Tokens that a grant counts as until its own are known: two grants in one step go to two tenants."""
MAX_TENANTS = 4096


@dataclass(frozen=True, slots=True)
class Ticket:
    """``rank``: lower goes first among tickets of one tenant. ``n_bytes``: of the request that waits."""

    ticket_id: int
    tenant: str
    arrived_s: float
    deadline_s: float
    rank: float = 0.0
    n_bytes: int = 0

    def is_overdue(self, now_s: float) -> bool:
        return now_s - self.arrived_s >= (self.deadline_s - self.arrived_s) / 2


@dataclass(frozen=True, slots=True)
class Standing:
    """How it looks for one in line. ``place`` 1 is the next one, 0: it does not wait. ``eta_s``: until its turn comes,
    None = no pace is known, or not before its time in line is over in ``left_s`` (``ends_first``).
    """

    place: int = 0
    eta_s: float | None = None
    left_s: float | None = None
    ends_first: bool = False


@dataclass(slots=True)
class Service:
    """What each tenant has had, in tokens. The longest unused are forgotten."""

    _had: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def of(self, tenant: str) -> float:
        return self._had.get(tenant, 0.0)

    def charge(self, tenant: str, n_tokens: float) -> None:
        self._had[tenant] = self.of(tenant) + n_tokens
        self._had.move_to_end(tenant)
        while len(self._had) > MAX_TENANTS:
            self._had.popitem(last=False)

    def lift(self, tenant: str, to: float) -> None:
        self.charge(tenant, max(0.0, to - self.of(tenant)))


@dataclass(slots=True)
class Line:
    service: Service = field(default_factory=Service)
    max_bytes: int = MAX_BYTES
    n_bytes: int = 0
    _waiting: dict[int, Ticket] = field(default_factory=dict)
    _grants_s: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket_id: int) -> bool:
        return ticket_id in self._waiting

    def get(self, ticket_id: int) -> Ticket | None:
        return self._waiting.get(ticket_id)

    def has_room(self, n_bytes: int, max_n: int) -> bool:
        return len(self._waiting) < max_n and self.n_bytes + n_bytes <= self.max_bytes

    def add(self, ticket: Ticket) -> None:
        assert ticket.ticket_id not in self._waiting
        if all(t.tenant != ticket.tenant for t in self._waiting.values()):
            least = min((self.service.of(t.tenant) for t in self._waiting.values()), default=0.0)
            self.service.lift(ticket.tenant, least)
        self._waiting[ticket.ticket_id] = ticket
        self.n_bytes += ticket.n_bytes

    def cancel(self, ticket_id: int) -> bool:
        """False: it is not in line any more."""
        return self._remove(ticket_id) is not None

    def take(self, ticket_id: int, now_s: float, *, granted: bool) -> bool:
        """Take it out for good; False: somebody did before."""
        ticket = self._remove(ticket_id)
        if ticket is not None and granted:
            self.service.charge(ticket.tenant, GRANT_SERVICE)
            self._grants_s = [*self._grants_s[-7:], now_s]
        return ticket is not None

    def _remove(self, ticket_id: int) -> Ticket | None:
        ticket = self._waiting.pop(ticket_id, None)
        if ticket is not None:
            self.n_bytes -= ticket.n_bytes
        return ticket

    def order(self, now_s: float) -> list[Ticket]:
        """Everybody, the next one first.

        Tenants alternate: each ticket ahead of one counts as a grant to its tenant.
        """
        overdue = [t for t in self._waiting.values() if t.is_overdue(now_s)]
        overdue.sort(key=lambda t: (t.arrived_s, t.ticket_id))
        rest = [t for t in self._waiting.values() if not t.is_overdue(now_s)]
        rest.sort(key=lambda t: (t.rank, t.arrived_s, t.ticket_id))
        n_before: dict[str, int] = {}
        keys: dict[int, float] = {}
        for ticket in rest:
            n = n_before.get(ticket.tenant, 0)
            n_before[ticket.tenant] = n + 1
            keys[ticket.ticket_id] = self.service.of(ticket.tenant) + n * GRANT_SERVICE
        rest.sort(key=lambda t: (keys[t.ticket_id], t.rank, t.arrived_s, t.ticket_id))
        return overdue + rest

    def expired(self, now_s: float) -> list[Ticket]:
        """Whose time is over, in order of arrival."""
        over = [t for t in self._waiting.values() if t.deadline_s <= now_s]
        return sorted(over, key=lambda t: (t.arrived_s, t.ticket_id))

    def next_deadline_s(self) -> float | None:
        return min((t.deadline_s for t in self._waiting.values()), default=None)

    def place(self, ticket_id: int, now_s: float) -> int | None:
        """1 for the next one; None: not in line."""
        return next((i for i, t in enumerate(self.order(now_s), 1) if t.ticket_id == ticket_id), None)

    def interval_s(self, now_s: float) -> float | None:
        """The usual time between grants, never less than what passed since the last one shows. None: too few so far."""
        if len(self._grants_s) < 2:
            return None
        usual = (self._grants_s[-1] - self._grants_s[0]) / (len(self._grants_s) - 1)
        return max(usual, (now_s - self._grants_s[-1]) / 2)

    def eta_s(self, ticket_id: int, now_s: float) -> float | None:
        """When its turn comes, at the pace of the last grants; None: no pace yet."""
        place, interval = self.place(ticket_id, now_s), self.interval_s(now_s)
        return place * interval if place is not None and interval is not None else None

    def standing(self, ticket_id: int, now_s: float) -> Standing:
        ticket, place = self.get(ticket_id), self.place(ticket_id, now_s)
        if ticket is None or place is None:
            return Standing()
        eta_s, left_s = self.eta_s(ticket_id, now_s), max(0.0, ticket.deadline_s - now_s)
        ends_first = eta_s is not None and eta_s > left_s
        return Standing(place, None if ends_first else eta_s, left_s, ends_first)
