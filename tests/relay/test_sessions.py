"""Sessions come, are recognised, go idle, are closed and come back; time is an argument."""

import time

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from polykv_proxy.conversation import Conversation
from polykv_proxy.ids import PoolId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.turns import Session, Turn, Usage

USAGE = Usage(cache_n=100, prompt_n=10, predicted_n=20, tps=30.0)


def chat(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation.of_messages("", [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)])


def text(prompt: str) -> Conversation:
    return Conversation.of_text("", prompt.encode())


def run_turn(book: SessionBook, session: Session, said: Conversation | None, now_s: float = 0) -> None:
    book.end(book.begin(session, now_s), USAGE, now_s, said=said)


def test_a_turn_moves_through_its_states() -> None:
    book = SessionBook()
    session = book.name(SessionId("a"), 0)
    assert session.state == "idle"
    turn = book.begin(session, 1)
    assert session.state == "waiting"
    turn.sent(2, SlotId(3))
    assert session.state == "prefilling"
    turn.first_token(2.5)
    assert (session.state, session.ttft_ms, session.slot_id) == ("decoding", 1500, 3)
    book.end(turn, USAGE, 4)
    assert (session.state, session.ctx_used, session.tps, session.n_decoded) == ("idle", 130, 30.0, 20)
    book.end(turn, USAGE, 5)
    assert session.n_decoded == 20


def test_unknown_usage_leaves_the_last_known() -> None:
    book = SessionBook()
    session = book.name(SessionId("a"), 0)
    run_turn(book, session, None)
    book.end(book.begin(session, 1), Usage(), 2)
    assert (session.ctx_used, session.tps) == (130, 30.0)


def test_how_long_it_decoded_is_what_its_replies_say_else_what_was_seen() -> None:
    book = SessionBook()
    session = book.name(SessionId("s"), 0.0)
    first = book.begin(session, 0.0)
    first.sent(1.0, SlotId(0))
    assert first.decoding_s(3.0) == 0.0
    first.decodes(3.0)
    first.first_token(3.5)
    assert (first.state, first.first_s, first.decoding_s(4.0)) == ("decoding", 3.5, 1.0)
    second = book.begin(session, 3.0)
    book.end(second, Usage(predicted_n=100, tps=50.0), 5.0)
    assert session.first_decoding_s == 0.0, "of turns at the same time only the first is this conversation"
    book.end(first, Usage(cache_n=0, prompt_n=9, predicted_n=40, tps=20.0), 6.0)
    assert (session.n_first_decoded, session.first_decoding_s) == (40, 2.0)
    broken = book.begin(session, 7.0)
    broken.sent(7.0, SlotId(0))
    broken.decodes(8.0)
    book.end(broken, Usage(), 8.5)
    assert session.first_decoding_s == 2.5


def test_windows_live_open_known() -> None:
    book = SessionBook(gap_s=60, idle_s=900, known_s=5000)
    session = book.name(SessionId("a"), 0)
    session.pool_id = PoolId(1)
    turn = book.begin(session, 0)
    assert book.is_live(session.session_id, 10_000)
    assert book.sweep(10_000) == []
    book.end(turn, USAGE, 10_000)
    assert book.is_live(session.session_id, 10_060)
    assert not book.is_live(session.session_id, 10_061)
    assert book.sweep(10_900) == []
    assert book.sweep(10_901) == ["a"]
    assert (session.state, session.pool_id) == ("closed", None)
    assert book.name(SessionId("a"), 11_000) is session
    assert session.state == "idle"
    run_turn(book, session, None, 11_000)
    book.sweep(12_000)
    assert book.get(SessionId("a")) is session
    book.sweep(16_001)
    assert book.get(SessionId("a")) is None


def test_unnamed_sessions_go_after_their_own_window_entirely() -> None:
    book = SessionBook(anonymous_idle_s=30)
    session = book.make(0)
    run_turn(book, session, chat("hi"), 0)
    assert book.sweep(31) == [session.session_id]
    assert len(book) == 0
    assert book.recognise(chat("hi", "yes", "go"), 31) is None


def test_a_continuation_is_recognised_and_claimed_by_one() -> None:
    book = SessionBook()
    session = book.make(0)
    run_turn(book, session, chat("hi"))
    following = chat("hi", "hello", "more")
    assert book.recognise(following, 1) is session
    turn = book.begin(session, 1)
    assert book.recognise(following, 1) is None
    book.end(turn, USAGE, 2, said=following)
    assert book.recognise(following, 2) is None
    assert book.recognise(chat("hi", "hello", "more", "sure", "go on"), 2) is session


def test_a_repeated_question_is_no_continuation() -> None:
    book = SessionBook()
    run_turn(book, book.make(0), chat("hi"))
    assert book.recognise(chat("hi"), 1) is None
    user_twice = Conversation.of_messages("", [{"role": "user", "content": text} for text in ("hi", "hello?")])
    assert book.recognise(user_twice, 1) is None


def test_of_several_that_said_the_same_one_goes_on_of_which_something_is_left() -> None:
    book = SessionBook()
    lost, saved, in_slot = (book.make(0) for _ in range(3))
    for session in (lost, saved, in_slot):
        run_turn(book, session, chat("hi"))
    following = chat("hi", "hello", "more")
    assert book.recognise(following, 1) is lost
    book.set_saved(saved, 1)
    assert book.recognise(following, 1) is saved
    in_slot.slot_id = SlotId(0)
    assert book.recognise(following, 1) is in_slot


def test_the_longest_match_wins() -> None:
    book = SessionBook()
    short, long = book.make(0), book.make(0)
    run_turn(book, short, chat("hi"))
    run_turn(book, long, chat("hi", "yes", "more"))
    assert book.recognise(chat("hi", "yes", "more", "ok", "go"), 1) is long
    assert book.recognise(chat("hi", "no", "why"), 1) is short


def test_what_is_nested_too_deep_to_be_written_is_like_nothing_else() -> None:
    deep = orjson.loads(b"[" * 300 + b"]" * 300)
    messages = [{"role": "user", "content": deep}, {"role": "assistant", "content": "x"}, {"role": "user"}]
    book = SessionBook()
    run_turn(book, book.make(0), Conversation.of_messages("", messages[:1]))
    assert book.recognise(Conversation.of_messages("", messages), 1) is None


def test_plain_prompts_are_recognised_by_their_text() -> None:
    book = SessionBook()
    session = book.make(0)
    run_turn(book, session, text("Once upon"))
    assert book.recognise(text("Once upon a time"), 1) is session
    assert book.recognise(text("Once upo"), 1) is None
    assert book.recognise(text("Once upon"), 1) is None
    assert book.recognise(Conversation.of_text("other", b"Once upon a time"), 1) is None


def test_a_failed_turn_is_not_continued() -> None:
    book = SessionBook()
    session = book.make(0)
    run_turn(book, session, None)
    assert book.recognise(chat("hi", "yes", "go"), 1) is None


def test_named_sessions_are_never_recognised_by_content() -> None:
    book = SessionBook()
    run_turn(book, book.name(SessionId("a"), 0), chat("hi"))
    assert book.recognise(chat("hi", "yes", "go"), 1) is None


def test_delete_while_running_leaves_nothing() -> None:
    book = SessionBook()
    session = book.make(0)
    turn = book.begin(session, 0)
    assert book.drop(session.session_id) is session
    book.end(turn, USAGE, 1, said=chat("hi"))
    assert book.recognise(chat("hi", "yes", "go"), 2) is None
    assert len(book) == 0


def test_an_unnamed_session_stays_as_long_as_its_state_is_kept() -> None:
    book = SessionBook(idle_s=900, anonymous_idle_s=30)
    session = book.make(0)
    run_turn(book, session, chat("hi"))
    book.set_saved(session, 0)
    assert book.sweep(800) == []
    assert book.recognise(chat("hi", "hello", "more"), 800) is session
    assert book.sweep(901) == [session.session_id]

    other = book.make(1000)
    run_turn(book, other, chat("hi"), 1000)
    book.set_saved(other, 0)
    book.set_saved(other, None)
    assert book.recognise(chat("hi", "hello", "more"), 1031) is None
    assert book.sweep(1031) == [other.session_id]


def test_who_may_come_back() -> None:
    book = SessionBook()
    assert book.name(SessionId("a"), 0).may_return
    session = book.make(0)
    run_turn(book, session, chat("hi"))
    assert not session.may_return
    run_turn(book, session, chat("hi", "hello", "more"))
    assert session.may_return
    late = book.make(0)
    run_turn(book, late, chat("hi", "hello", "more"))
    assert late.may_return, "it goes on with something, wherever that began"
    once = book.make(0)
    run_turn(book, once, text("Once upon a time"))
    assert not once.may_return
    once.pool_id = PoolId(1)
    assert once.may_return, "an agent of that pool"


def test_what_a_slot_should_hold_is_what_the_last_turn_said() -> None:
    book = SessionBook()
    session = book.name(SessionId("a"), 0)
    turn = book.begin(session, 0)
    turn.sent(1, SlotId(0))
    assert (session.is_sent, session.n_sent) == (True, 1)
    book.end(turn, USAGE, 2)
    assert (session.is_sent, session.held_n_tokens, session.held_s) == (False, 130, 2)
    book.end(book.begin(session, 3), Usage(), 4)
    assert (session.held_n_tokens, session.n_sent) == (130, 1), "it never reached the slot"
    turn = book.begin(session, 5)
    turn.sent(5, SlotId(0))
    book.end(turn, Usage(), 6)
    assert session.held_n_tokens is None


def test_whoever_is_forgotten_is_told() -> None:
    told: list[str] = []
    book = SessionBook(anonymous_idle_s=30, idle_s=90, known_s=200, max_known=2)
    book.on_forgotten = lambda session: told.append(session.session_id)
    unnamed = book.make(0)
    run_turn(book, unnamed, None)
    for name in "abcd":
        run_turn(book, book.name(SessionId(name), 0), None)
    book.drop(SessionId("d"))
    assert told == ["d"]
    book.sweep(31)
    assert told == ["d", unnamed.session_id]
    book.sweep(100)
    assert told[2:] == ["a"]
    book.sweep(201)
    assert told[3:] == ["b", "c"]


def test_names_are_bounded() -> None:
    book = SessionBook(max_known=10)
    for i in range(50):
        run_turn(book, book.name(SessionId(str(i)), i), None, i)
    book.sweep(2000)
    assert sorted(int(s.session_id) for s in book) == list(range(40, 50))


def test_release_and_restart_detach() -> None:
    book = SessionBook()
    session = book.name(SessionId("a"), 0)
    session.pool_id, session.slot_id = PoolId(4), SlotId(1)
    assert book.live_in(PoolId(4), 1) == [session]
    book.released(PoolId(4))
    book.engine_restarted()
    assert (session.pool_id, session.slot_id) == (None, None)


def test_a_sweep_looks_at_nobody_whose_time_has_not_come() -> None:
    """It runs in the heartbeat: with many clients it must not hold up the replies."""
    book = SessionBook()
    for i in range(50_000):
        session = book.make(i / 1000)
        book.end(book.begin(session, i / 1000), Usage(), i / 1000)
    began = time.perf_counter()
    assert book.sweep(50) == [f"anon-{book.run}-{i + 1}" for i in range(20_000)]
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    assert book.sweep(50) == []
    assert time.perf_counter() - began < first_s / 100


class Lives(RuleBasedStateMachine):
    """The book's lines against a plain look at everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SessionBook(idle_s=90, anonymous_idle_s=30, known_s=300, max_known=6)
        self.now_s = 0.0
        self.running: list[Turn] = []

    @rule(name=st.sampled_from("abcdefgh"), s=st.integers(0, 40))
    def named(self, name: str, s: int) -> None:
        self.now_s += s
        self.running.append(self.book.begin(self.book.name(SessionId(name), self.now_s), self.now_s))

    @rule(s=st.integers(0, 40))
    def anonymous(self, s: int) -> None:
        self.now_s += s
        self.running.append(self.book.begin(self.book.make(self.now_s), self.now_s))

    @rule(which=st.integers(0, 99), s=st.integers(0, 40))
    def over(self, which: int, s: int) -> None:
        self.now_s += s
        if self.running:
            self.book.end(self.running.pop(which % len(self.running)), Usage(), self.now_s)

    @rule(which=st.integers(0, 99))
    def dropped(self, which: int) -> None:
        every = list(self.book)
        if every:
            self.book.drop(every[which % len(every)].session_id)

    @rule(s=st.integers(0, 200))
    def swept(self, s: int) -> None:
        self.now_s += s
        before = list(self.book)
        idle_s = {session.session_id: self.now_s - session.last_s for session in before if not session.turns}
        due = {
            session.session_id
            for session in before
            if not session.closed and idle_s.get(session.session_id, 0) > (90 if session.named else 30)
        }
        assert set(self.book.sweep(self.now_s)) == due
        left = {session.session_id for session in self.book}
        assert {s.session_id for s in before if s.turns or (idle_s[s.session_id] <= 90 and s.named)} <= left
        assert not [s for s in self.book if not s.named and s.closed]
        assert not [s for s in self.book if s.closed and self.now_s - s.last_s > 300]
        assert len(left) <= 6 or not [s for s in self.book if s.closed]


TestLives = Lives.TestCase
