"""Who gets which slot, decided without waiting, sleeping or an engine."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polykv_proxy.conversation import Conversation
from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.slots import Grant, SlotBook, Ticket


def make_book(n: int = 4, live: set[str] | None = None) -> SlotBook:
    book = SlotBook(is_live=lambda session, _now_s: session in (live or set()))
    book.resize(n, 0)
    return book


def chat(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation.of_messages("", [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)])


def take(book: SlotBook, ticket_id: int, session: str | None = None, now_s: float = 0, **kw) -> Grant:
    (grant,) = book.request(Ticket(ticket_id, SessionId(session) if session else None, **kw), now_s)
    return grant


def test_a_session_gets_its_own_slot_again() -> None:
    book = make_book()
    a = take(book, 1, "a")
    b = take(book, 2, "b")
    assert a.slots != b.slots
    book.release(1, 1)
    book.release(2, 2)
    take(book, 3, "c", 3)
    assert take(book, 4, "b", 4).slots == b.slots
    assert take(book, 5, "a", 5).slots == a.slots


def test_second_turn_of_a_running_session_gets_another_slot() -> None:
    book = make_book()
    assert take(book, 1, "a").slots != take(book, 2, "a").slots


def test_first_come_first_served() -> None:
    book = make_book(1)
    take(book, 1)
    for ticket_id in (2, 3, 4):
        assert book.request(Ticket(ticket_id), 0) == []
    order = []
    for ticket_id in (1, 2, 3):
        order += [g.ticket.ticket_id for g in book.release(ticket_id, 1)]
    assert order == [2, 3, 4]


def test_a_request_for_many_slots_is_not_overtaken() -> None:
    book = make_book(4)
    for ticket_id in (1, 2, 3):
        take(book, ticket_id)
    assert book.request(Ticket(4, n=2), 0) == []
    assert book.request(Ticket(5), 0) == []
    grants = book.release(1, 1)
    assert [(g.ticket.ticket_id, len(g.slots)) for g in grants] == [(4, 2)]
    assert book.withdraw(5, 1) == []


def test_whoever_leaves_the_queue_lets_the_next_one_move_up() -> None:
    book = make_book(2)
    take(book, 1)
    assert book.request(Ticket(2, n=2), 0) == []
    assert book.request(Ticket(3), 0) == []
    (grant,) = book.withdraw(2, 0)
    assert grant.ticket.ticket_id == 3


def test_live_sessions_are_displaced_last_and_named() -> None:
    book = make_book(2, live={"a"})
    a = take(book, 1, "a", 0)
    book.release(1, 1)
    b = take(book, 2, "b", 2)
    book.release(2, 9)
    c = take(book, 3, "c", 10)
    assert c.slots == b.slots
    assert c.displaced == (("b", b.slots[0]),)
    d = take(book, 4, "d", 11)
    assert d.slots == a.slots
    assert d.displaced == (("a", a.slots[0]),)
    assert book.slot_of(SessionId("a")) is None


def test_a_conversation_goes_where_its_beginning_is() -> None:
    book = make_book(3)
    said = [chat("x"), chat("y", "yes", "more"), chat("y")]
    slots = [take(book, i, conversation=c).slots for i, c in enumerate(said)]
    for i in range(3):
        book.release(i, i)
    assert take(book, 9, conversation=chat("y", "yes", "more", "ok", "go"), now_s=5).slots == slots[1]
    assert take(book, 10, conversation=chat("y", "yes", "more", "ok", "go"), now_s=5).slots == slots[2]
    assert take(book, 11, conversation=chat("y", "yes"), now_s=5).slots == slots[0]


def test_similarity_never_costs_a_live_session_its_slot() -> None:
    book = make_book(2, live={"a"})
    a = take(book, 1, "a", conversation=chat("shared"))
    book.release(1, 1)
    assert take(book, 2, "b", 2, conversation=chat("shared", "yes", "more")).slots != a.slots


def test_a_slot_that_the_engine_may_still_use_is_closed_until_seen_idle() -> None:
    book = make_book(1)
    take(book, 1)
    assert book.request(Ticket(2), 0) == []
    assert book.release(1, 1, unsure=True) == []
    assert book.needs_look
    assert book.observe({SlotId(0)}, 2) == []
    (grant,) = book.observe(set(), 3)
    assert grant.ticket.ticket_id == 2
    assert not book.unsure


def test_a_slot_that_somebody_names_himself_is_kept_free_for_him() -> None:
    book = make_book(2)
    book.occupy(SlotId(0))
    assert take(book, 1).slots == (1,)
    assert book.request(Ticket(2), 0) == []
    (grant,) = book.vacate(SlotId(0), 1)
    assert grant.slots == (0,)


def test_whoever_chooses_his_slot_displaces_who_rests_there() -> None:
    book = make_book(2)
    a = take(book, 1, "a")
    assert book.occupy(a.slots[0]) == (), "nobody rests where somebody is at work"
    book.vacate(a.slots[0], 1)
    b = take(book, 2, "b")
    book.release(2, 1)
    assert book.occupy(b.slots[0]) == (("b", b.slots[0]),)
    assert book.slot_of(SessionId("b")) is None


def test_a_reserved_slot_is_nobodys_for_so_long() -> None:
    book = make_book(2)
    a = take(book, 1, "a")
    assert not book.reserve(a.slots[0]), "it is in use"
    book.release(1, 1)
    assert book.reserve(a.slots[0])
    assert not book.reserve(a.slots[0])
    assert [slot_id for slot_id, _ in book.resting()] == [1 - a.slots[0]]
    assert take(book, 2, "a", 2).slots != a.slots
    assert book.request(Ticket(3), 2) == []
    (grant,) = book.unreserve(a.slots[0], 3, emptied=False)
    assert (grant.ticket.ticket_id, grant.slots) == (3, a.slots)


def test_an_emptied_slot_is_nobodys_and_is_taken_first() -> None:
    book = make_book(3)
    for i, name in enumerate("abc"):
        take(book, i, name, i)
    for i in range(3):
        book.release(i, 10 + i)
    assert [owner for _, owner in book.resting()] == ["a", "b", "c"]
    book.reserve(SlotId(2))
    book.unreserve(SlotId(2), 20, emptied=True)
    assert book.resting() == [(0, "a"), (1, "b"), (2, None)]
    assert take(book, 9, "d", 21).slots == (2,)


def test_a_restart_ends_reservations() -> None:
    book = make_book(1)
    book.reserve(SlotId(0))
    book.resize(1, 1)
    grant = take(book, 1, "a", 2)
    assert book.unreserve(SlotId(0), 3, emptied=True) == []
    assert (grant.slots, book.owner_of(SlotId(0))) == ((0,), "a")


def test_a_grant_says_whether_the_conversation_is_there() -> None:
    book = make_book(2)
    assert not take(book, 1, "a", conversation=chat("x")).own
    book.release(1, 1)
    assert take(book, 2, "a", 2, conversation=chat("x", "yes", "more")).own
    book.release(2, 3)
    book.forget([SessionId("a")])
    assert take(book, 3, "b", 4, conversation=chat("x", "yes", "more", "ok", "go")).own
    assert not take(book, 4, "c", 5, conversation=chat("z")).own


def test_further_choices_take_the_lowest_free_slots_as_the_engine_does() -> None:
    book = make_book(4)
    take(book, 1, "a")
    last = take(book, 2, "b", n=1)
    book.release(2, 1)
    grant = take(book, 3, "b", 2, n=3)
    assert grant.slots == (last.slots[0], 2, 3)


def test_who_gave_a_slot_back_a_moment_ago_is_not_asked_about() -> None:
    asked: list[str] = []

    def is_live(session: SessionId, _now_s: float) -> bool:
        asked.append(session)
        return False

    book = SlotBook(is_live=is_live, live_s=60)
    book.resize(2, 0)
    a, b = take(book, 1, "a"), take(book, 2, "b")
    book.release(1, 1)
    book.release(2, 2)
    assert take(book, 3, "c", 60.5).slots == a.slots  # both are live: the longest unused
    assert asked == []
    book.release(3, 61)
    assert take(book, 4, "d", 62.5).slots == b.slots  # not live any more, so before what is
    assert asked == ["b"]


def test_a_slot_that_was_passed_on_is_as_live_as_whom_it_was_passed_to() -> None:
    book = SlotBook(is_live=lambda _session, _now_s: False, live_s=60)
    book.resize(2, 0)
    take(book, 1, "a")
    b = take(book, 2, "b")
    book.release(1, 1)
    book.release(2, 2)
    assert book.pass_on(b.slots[0], SessionId("b"), SessionId("heir"))
    assert take(book, 3, "c", 3).slots == b.slots  # a is live, the heir is not


def test_more_than_there_are_means_all() -> None:
    assert sorted(take(make_book(2), 1, n=8).slots) == [0, 1]


def test_without_slots_nobody_is_served_until_the_engine_says_how_many() -> None:
    book = SlotBook()
    assert book.request(Ticket(1), 0) == []
    assert [g.ticket.ticket_id for g in book.resize(2, 1)] == [1]


def test_a_restart_forgets_owners_but_not_who_is_running() -> None:
    book = make_book(2)
    take(book, 1, "a")
    take(book, 2, "b")
    book.release(2, 1)
    book.resize(2, 2)
    assert book.owner_of(SlotId(1)) is None
    assert take(book, 3, "c", 3).slots == (1,)
    assert book.request(Ticket(4), 3) == []
    (grant,) = book.release(1, 4)
    assert grant.slots == (0,)


class Slots(RuleBasedStateMachine):
    """Random traffic: never two on one slot, never out of order, nothing left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.book = make_book(3, live={"a", "b"})
        self.now = 0.0
        self.next_id = 0
        self.queue: list[int] = []
        self.running: dict[int, Grant] = {}
        self.outside: Counter[int] = Counter()
        self.reserved: set[int] = set()

    def heard(self, grants: list[Grant]) -> None:
        for grant in grants:
            assert self.queue.pop(0) == grant.ticket.ticket_id
            assert len(set(grant.slots)) == len(grant.slots) == min(grant.ticket.n, 3)
            taken = {s for g in self.running.values() for s in g.slots} | set(+self.outside) | self.reserved
            assert not taken & set(grant.slots)
            self.running[grant.ticket.ticket_id] = grant

    @rule(session=st.sampled_from([None, "a", "b", "c", "d"]), n=st.integers(1, 4), text=st.sampled_from("xyz"))
    def request(self, session: str | None, n: int, text: str) -> None:
        self.now += 1
        self.next_id += 1
        self.queue.append(self.next_id)
        self.heard(
            self.book.request(Ticket(self.next_id, SessionId(session) if session else None, n, chat(text)), self.now)
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), unsure=st.booleans())
    def release(self, data: st.DataObject, unsure: bool) -> None:
        ticket_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[ticket_id]
        self.heard(self.book.release(ticket_id, self.now, unsure=unsure))

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(self.queue))
        self.queue.remove(ticket_id)
        self.heard(self.book.withdraw(ticket_id, self.now))

    @rule(slot=st.integers(0, 2))
    def occupy(self, slot: int) -> None:
        if slot not in {s for g in self.running.values() for s in g.slots}:
            self.outside[slot] += 1
            self.book.occupy(SlotId(slot))

    @precondition(lambda self: +self.outside)
    @rule(data=st.data())
    def vacate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.outside)))
        self.outside[slot] -= 1
        self.heard(self.book.vacate(SlotId(slot), self.now))

    @rule(busy=st.sets(st.integers(0, 2)))
    def observe(self, busy: set[int]) -> None:
        self.heard(self.book.observe({SlotId(b) for b in busy}, self.now))

    @rule(slot=st.integers(0, 2))
    def reserve(self, slot: int) -> None:
        free = not self.outside[slot] and slot not in {s for g in self.running.values() for s in g.slots}
        if self.book.reserve(SlotId(slot)):
            assert free
            assert slot not in self.reserved
            self.reserved.add(slot)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), emptied=st.booleans())
    def unreserve(self, data: st.DataObject, emptied: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        self.reserved.discard(slot)
        self.heard(self.book.unreserve(SlotId(slot), self.now, emptied=emptied))

    @rule()
    def restart(self) -> None:
        self.reserved.clear()
        self.heard(self.book.resize(3, self.now))

    @invariant()
    def counts_agree(self) -> None:
        assert self.book.n_waiting == len(self.queue)
        assert self.book.n_held == sum(len(g.slots) for g in self.running.values())

    @invariant()
    def what_is_kept_beside_the_slots_is_true_of_them(self) -> None:
        slots = self.book._slots
        assert self.book._free == {slot for slot in slots if slot.free}
        assert {name: {slot.slot_id for slot in owned} for name, owned in self.book._owned.items()} == {
            name: {slot.slot_id for slot in slots if slot.owner == name} for name in {s.owner for s in slots} - {None}
        }

    def teardown(self) -> None:
        for slot in sorted(self.reserved):
            self.reserved.discard(slot)
            self.heard(self.book.unreserve(SlotId(slot), self.now, emptied=False))
        for slot, n in self.outside.items():
            for _ in range(n):
                self.outside[slot] -= 1
                self.heard(self.book.vacate(SlotId(slot), self.now))
        self.heard(self.book.observe(set(), self.now))
        while self.running:
            ticket_id = next(iter(self.running))
            del self.running[ticket_id]
            self.heard(self.book.release(ticket_id, self.now))
        assert not self.queue
        assert self.book.n_held == self.book.n_waiting == 0


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
