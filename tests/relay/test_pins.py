"""Which slot is named in front of a llama-server without hooks, decided by what its slots show."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.pins import Asking, PinBook
from polykv_proxy.upstream.plain import PlainProps, PlainSlot, read_slots


@dataclass
class Stock:
    """The slots of a stock server as ``/slots`` shows them, and a book in front of it."""

    n_slots: int = 4
    empties: bool = False
    live: Callable[[SessionId, float], bool] = lambda _session, _now_s: True
    now_s: float = 0.0
    n_tasks: int = 0
    slots: list[PlainSlot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = PinBook(is_kept=self.live)
        self.restart()
        self.book.reset(self.n_slots)

    def restart(self) -> None:
        self.n_tasks = 0
        self.slots = [PlainSlot(SlotId(i), False) for i in range(self.n_slots)]

    def runs(self, slot_id: int, n_tokens: int) -> None:
        """A request begins there, whoever sent it, and has so many tokens at its end."""
        if self.empties:
            self.slots = [slot if slot.busy else self._emptied(slot) for slot in self.slots]
        self.n_tasks += 10
        self.slots[slot_id] = PlainSlot(SlotId(slot_id), True, self.n_tasks, n_tokens)

    def rests(self, slot_id: int) -> None:
        self.slots[slot_id] = self.slots[slot_id]._replace(busy=False)

    def _emptied(self, slot: PlainSlot) -> PlainSlot:
        return slot._replace(n_tokens=0) if slot.id_task is not None else slot

    def begin(
        self, session: str, *, sees: bool = True, n_elsewhere: int = 0, returns: bool = True, family: int | None = None
    ) -> SlotId | None:
        self.now_s += 1
        who = Asking(SessionId(session), returns, family)
        return self.book.begin(who, list(self.slots) if sees else None, self.now_s, n_elsewhere=n_elsewhere)

    def turn(
        self,
        session: str,
        n_tokens: int,
        *,
        chosen: int | None = None,
        returns: bool = True,
        family: int | None = None,
    ) -> SlotId | None:
        """From its begin to its end. ``chosen``: the slot that the server takes when none is named."""
        slot_id = self.begin(session, returns=returns, family=family)
        at = slot_id if slot_id is not None else chosen
        assert at is not None, "no slot is named, and the test does not say which one is taken"
        self.runs(at, n_tokens)
        self.rests(at)
        self.now_s += 1
        self.book.end(SessionId(session), slot_id, n_tokens + 1, self.now_s)
        return slot_id


def test_a_session_goes_on_where_it_was() -> None:
    stock = Stock()
    assert [stock.turn(name, n) for name, n in (("a", 100), ("b", 200))] == [0, 1]
    assert [stock.turn(name, n) for name, n in (("b", 220), ("a", 120), ("a", 140))] == [1, 0, 0]


def test_a_new_session_displaces_the_longest_unused() -> None:
    stock = Stock(2)
    assert [stock.turn(name, 100 + n) for n, name in enumerate("abc")] == [0, 1, 0]
    assert stock.book.owners == {"b", "c"}


def test_sessions_that_take_turns_do_not_all_displace_each_other() -> None:
    stock = Stock(4)
    there = dict.fromkeys("abcdef", -1)
    hits = 0
    for n_turn in range(10):
        for number, name in enumerate(there):
            held = stock.slots[there[name]].n_tokens if n_turn else None
            n_before = 1000 * number + 10 * (n_turn - 1)
            slot_id = stock.turn(name, 1000 * number + 10 * n_turn)
            assert slot_id is not None
            hits += bool(n_turn) and there[name] == slot_id and held == n_before
            there[name] = slot_id
    # With the longest unused one displaced each time it is none; with a look into the future, three of five.
    assert hits >= 20


def test_a_slot_that_is_in_use_is_never_named() -> None:
    stock = Stock(2)
    stock.turn("a", 100)
    stock.runs(0, 500)  # somebody who talks to the engine itself
    assert stock.begin("b") == 1
    assert stock.begin("c") is None


def test_a_session_whose_slot_is_in_use_names_none() -> None:
    stock = Stock()
    stock.turn("a", 100)
    stock.runs(0, 500)
    assert stock.begin("a") is None


def test_two_turns_at_once_of_one_session_name_one_slot() -> None:
    stock = Stock()
    stock.turn("a", 100)
    assert stock.begin("a") == 0
    assert stock.begin("a") is None


def test_what_somebody_else_left_in_a_slot_is_not_gone_on_with() -> None:
    stock = Stock()
    stock.turn("a", 100)
    stock.runs(0, 700)
    stock.rests(0)
    assert stock.turn("a", 120, chosen=2) is None
    assert stock.turn("a", 140) == 2, "and where the server put it is found by its length"


def test_two_of_the_same_length_are_not_told_apart() -> None:
    stock = Stock()
    stock.begin("a", sees=False)
    stock.begin("b", sees=False)
    for slot_id in (1, 2):
        stock.runs(slot_id, 100)
        stock.rests(slot_id)
    for name in "ab":
        stock.book.end(SessionId(name), None, 101, stock.now_s)
    assert stock.begin("a") is None


def test_nothing_is_named_while_somebody_is_on_the_way_to_any_slot() -> None:
    stock = Stock()
    assert stock.begin("a", n_elsewhere=1) is None
    stock.runs(3, 10)
    assert stock.begin("b", n_elsewhere=1) is None, "one of the two is still on the way, and b is now, too"
    stock.runs(2, 10)
    stock.runs(1, 10)
    assert stock.begin("c", n_elsewhere=1) == 0


def test_without_a_look_nothing_is_named() -> None:
    assert Stock().begin("a", sees=False) is None


def test_a_single_request_displaces_nobody() -> None:
    stock = Stock(2)
    assert [stock.turn("a", 100, returns=False), stock.turn("b", 200, returns=False)] == [0, 1]
    assert stock.turn("c", 300, chosen=1, returns=False) is None
    assert stock.turn("d", 400) == 0


def test_of_those_that_nobody_keeps_the_one_with_the_same_beginning_is_taken() -> None:
    live: set[str] = set()
    stock = Stock(4, live=lambda session, _now_s: session in live)
    stock.turn("a", 100, family=1)
    live.add("a")
    stock.turn("b", 100, family=2)
    assert stock.turn("c", 100, family=2) == 1
    live.add("c")
    assert stock.turn("d", 100, family=1) == 2, "slot 0 is kept, and an empty one is better than another beginning"


def test_an_engine_that_empties_slots_at_rest_gets_no_pins() -> None:
    stock = Stock(empties=True)
    assert [stock.turn("a", 100), stock.turn("b", 100)] == [0, 1]
    assert not stock.book.empties_idle
    assert stock.begin("c") is None
    assert stock.book.empties_idle
    assert stock.begin("b") is None


@pytest.mark.parametrize(
    ("used_before", "empties", "named"),
    [
        ([0, 1], True, None),
        ([1, 2, 0], True, None),
        ([0, 1], False, 2),
        ([0, 0], True, 1),  # nothing was there to be emptied
        ([], True, 0),
    ],
)
def test_that_others_were_emptied_shows_at_the_first_look(
    used_before: list[int], empties: bool, named: int | None
) -> None:
    """As after a restart of the proxy: who comes back may be saved, and is only found when no slot is named."""
    stock = Stock(empties=empties)
    for number, slot_id in enumerate(used_before):
        stock.runs(slot_id, 100 + number)
        stock.rests(slot_id)
    assert stock.begin("a") == named
    assert stock.book.empties_idle == (named is None)


def test_what_the_last_to_begin_did_not_empty_is_kept() -> None:
    stock = Stock(3)
    for slot_id in (0, 1, 2):
        stock.runs(slot_id, 100)
        stock.rests(slot_id)
    stock.slots[1] = stock.slots[1]._replace(n_tokens=0)  # erased, say
    assert stock.begin("a") == 1
    assert not stock.book.empties_idle


def test_slots_that_were_all_erased_show_nothing() -> None:
    """A request that empties others holds something itself."""
    stock = Stock(2)
    for slot_id in (0, 1):
        stock.runs(slot_id, 0)
        stock.rests(slot_id)
    assert stock.begin("a") == 0
    assert not stock.book.empties_idle


def test_a_first_look_that_misled_is_made_good_by_what_sessions_keep() -> None:
    stock = Stock(2)
    stock.runs(1, 50)
    stock.rests(1)
    stock.slots[1] = stock.slots[1]._replace(n_tokens=0)
    stock.runs(0, 60)
    stock.rests(0)
    assert stock.turn("a", 100, chosen=0) is None
    assert stock.turn("b", 200, chosen=1) is None
    assert stock.turn("a", 120) == 0, "it was there while b ran"
    assert stock.turn("b", 220) == 1


def test_only_the_first_look_is_a_guess() -> None:
    stock = Stock(3)
    stock.turn("a", 100)
    stock.runs(1, 50)
    stock.rests(1)
    stock.slots[1] = stock.slots[1]._replace(n_tokens=0)
    stock.runs(0, 900)
    stock.rests(0)
    assert stock.begin("b") == 1
    assert not stock.book.empties_idle


def test_an_engine_that_purges_one_slot_still_gets_them() -> None:
    stock = Stock()
    for number, name in enumerate("abc"):
        stock.turn(name, 100 * (number + 1))
    stock.slots[0] = stock.slots[0]._replace(n_tokens=0)
    assert stock.turn("a", 110, chosen=3) is None, "it may be saved, and is only found when no slot is named"
    assert not stock.book.empties_idle
    assert [stock.begin(name) for name in "cb"] == [2, 1]


def test_another_start_of_the_engine_shows_by_its_tasks() -> None:
    stock = Stock()
    stock.turn("a", 100)
    assert stock.begin("b") == 1
    stock.restart()
    assert stock.begin("a") == 0, "nothing is known of a"
    assert stock.book.owners == {"a"}
    assert not stock.book.empties_idle


def test_a_turn_that_was_cut_is_gone_on_with_where_it_was() -> None:
    stock = Stock()
    stock.turn("x", 50)
    slot_id = stock.begin("a")
    assert slot_id == 1
    stock.runs(1, 333)
    stock.rests(1)
    stock.book.end(SessionId("a"), slot_id, None, stock.now_s)
    assert stock.begin("a") == 1


def test_other_slots_than_those_known_are_not_named() -> None:
    stock = Stock(4)
    stock.slots = stock.slots[:2]
    assert stock.begin("a") is None


def test_who_is_forgotten_keeps_no_slot() -> None:
    stock = Stock(2)
    stock.turn("a", 100)
    stock.turn("b", 100)
    stock.book.forget([SessionId("b")])
    assert stock.begin("c") == 1


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"role": "router"}, PlainProps(0, router=True)),
        ({"total_slots": 3, "default_generation_settings": {"n_ctx": 77}}, PlainProps(3, 77, shows_slots=True)),
        ({"total_slots": 3, "endpoint_slots": False}, PlainProps(3)),
        ({"is_sleeping": True, "media_marker": "x"}, PlainProps(1, shows_slots=True, sleeping=True, start="x")),
        ({"total_slots": "4", "default_generation_settings": 5}, PlainProps(1, shows_slots=True)),
    ],
)
def test_what_a_server_says_of_itself(said: dict[str, object], read: PlainProps) -> None:
    assert PlainProps.read(said) == read


def test_slots_as_old_and_new_servers_show_them() -> None:
    new = {"id": 1, "is_processing": True, "id_task": 5, "n_prompt_tokens": 9, "next_token": [{"n_decoded": 3}]}
    old = {"id": 0, "is_processing": False, "id_task": -1, "next_token": {"n_decoded": 0}}
    assert read_slots([old, new]) == [PlainSlot(SlotId(0), False, None, None, 0), PlainSlot(SlotId(1), True, 5, 9, 3)]
    assert read_slots([{"id": 0, "state": 1}]) is None
    assert read_slots({"error": {}}) is None
