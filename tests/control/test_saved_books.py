"""The books of saved states: what the engine's list says, and what happened since it was asked for."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from polykv_proxy.control.saved_books import SavedBooks, pool_tag, session_tag, state_content
from polykv_proxy.ids import SessionId
from polykv_proxy.upstream import SavedState


def state(n: int, *, n_bytes: int = 10, places: tuple = ("ram",), start: int = 0, usable: bool = True) -> SavedState:
    return SavedState.model_validate(
        {
            "tag": pool_tag(n, n, start),
            "from": start,
            "n_tokens": n,
            "tokens_hash": f"{n:016x}",
            "bytes": n_bytes,
            "in": places,
            "usable": usable,
        }
    )


def test_tags_tell_pools_by_content_and_sessions_by_id():
    assert pool_tag(255, 7, 3) == "pool-00000000000000ff-7-3"
    assert session_tag(SessionId("a")) == session_tag(SessionId("a")) != session_tag(SessionId("b"))
    assert len(session_tag(SessionId("x" * 500))) == len("session-") + 16


def test_the_state_that_takes_the_fewest_cells_comes_first():
    books = SavedBooks()
    for start in (0, 5, 3):
        books.enter(state(9, start=start))
    assert [s.start for s in books.of_content(9, 9)] == [5, 3, 0]
    books.leave_out(pool_tag(9, 9, 5))
    assert [s.start for s in books.of_content(9, 9)] == [3, 0]
    assert books.of_content(9, 8) == []


def test_a_list_that_was_asked_for_before_a_change_does_not_undo_it():
    books = SavedBooks()
    books.enter(state(1))
    books.enter(state(2))
    since = books.mark()
    books.leave_out(state(1).tag)
    books.enter(state(3))
    books.found([state(1), state(2), state(4)], since)  # as it was then
    assert [s.n_tokens for s in books] == [4, 2, 3]
    books.found([state(2), state(3)], books.mark())
    assert [s.n_tokens for s in books] == [2, 3]


def test_what_is_expected_of_a_new_start_is_what_outlives_the_last_one_until_the_list_is_there():
    books = SavedBooks()
    books.enter(state(1, places=("ram", "disk")))
    books.enter(state(2, places=("ram",)))
    books.lost(("ram", "disk"))
    assert [books.is_expected((n, n)) for n in (1, 2, 3)] == [True, True, False]
    books.lost(("disk",))
    assert [books.is_expected((n, n)) for n in (1, 2)] == [True, False]
    books.found([], books.mark())
    assert not books.is_expected((1, 1))


def test_files_of_another_model_are_not_ours():
    books = SavedBooks()
    books.found([state(1, usable=False), state(2)], books.mark())
    assert [s.n_tokens for s in books] == [2]


def test_a_list_of_the_engines_last_start_does_not_count():
    books = SavedBooks()
    books.enter(state(1))
    since = books.mark()
    books.lost()
    books.found([state(1)], since)
    assert (list(books), books.known) == ([], False)
    books.found([state(1)], books.mark())
    assert ([s.n_tokens for s in books], books.known) == ([1], True)


def test_victims_are_the_least_recently_used_that_nobody_is_at_and_enough_or_none():
    books = SavedBooks()
    for n, places in ((1, ("ram",)), (2, ("ram", "disk")), (3, ("disk",)), (4, ("ram",))):
        books.enter(state(n, places=places))
    assert [s.n_tokens for s in books.victims("ram", 11)] == [1, 2]
    assert [s.n_tokens for s in books.victims("disk", 1)] == [2]
    assert books.victims("disk", 21) == []
    with books.working_on(state(1).tag):
        assert [s.n_tokens for s in books.victims("ram", 11)] == [2, 4]
    books.enter(state(1))
    assert [s.n_tokens for s in books.victims("ram", 11)] == [2, 4]
    assert (books.n_bytes("ram"), books.n_bytes("disk")) == (30, 20)


def test_what_was_there_once_is_remembered_for_pools_that_are_still_known():
    books = SavedBooks()
    books.enter(state(1))
    books.lost()
    assert (books.was_there((1, 1)), books.was_there((2, 2)), books.known) == (True, False, False)
    books.remember_only({(2, 2)})
    assert not books.was_there((1, 1))


class Machine(RuleBasedStateMachine):
    """The books against an engine that answers lists late."""

    states = Bundle("states")
    lists = Bundle("lists")

    def __init__(self) -> None:
        super().__init__()
        self.books, self.engine, self.gone = SavedBooks(), {}, []
        self.books.on_gone = lambda state: self.gone.append(state.tag)

    @rule(
        target=states, n=st.integers(1, 5), start=st.integers(0, 1), places=st.sampled_from([("ram",), ("ram", "disk")])
    )
    def save(self, n, start, places):
        made = state(n, start=start, places=places)
        self.engine[made.tag] = made
        self.books.enter(made)
        return made

    @rule(made=states)
    def forget(self, made):
        self.engine.pop(made.tag, None)
        self.books.leave_out(made.tag)

    @rule(made=states, place=st.sampled_from(["ram", "disk"]))
    def leave_one_place(self, made, place):
        there = self.engine.get(made.tag)
        self.books.leave_out(made.tag, place)
        if there is not None and place in there.places:
            left = tuple(at for at in there.places if at != place)
            self.engine[made.tag] = there.model_copy(update={"places": left})
            if not left:
                del self.engine[made.tag]

    @rule(target=lists)
    def ask(self):
        return self.books.mark(), list(self.engine.values())

    @rule(asked=lists)
    def answer(self, asked):
        since, listed = asked
        self.books.found(listed, since)

    @invariant()
    def the_books_are_the_engine(self):
        assert {s.tag: s.places for s in self.books} == {tag: s.places for tag, s in self.engine.items()}
        for place in ("ram", "disk"):
            assert self.books.n_bytes(place) == sum(s.n_bytes for s in self.engine.values() if place in s.places)
        for n in range(1, 6):
            wanted = {tag for tag, s in self.engine.items() if state_content(s) == (n, n)}
            assert {s.tag for s in self.books.of_content(n, n)} == wanted


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_damaged_hash_is_no_pools_state():
    damaged = state(7).model_copy(update={"tokens_hash": "t0ffee"})
    assert (state_content(state(7)) is None, state_content(damaged)) == (False, None)
