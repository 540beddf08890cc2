"""The books of what the engine has saved outside its cache. They ask nobody; ``saved`` keeps them up.

A state is ours when the engine listed it as usable, or said that it saved it. Files of another model or build are not,
though they lie in the same folder.

A pool's state is named by its content, so that another run of the proxy finds it; a session's by its id. Under one tag
there is one text, in one place or in both.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Literal

import xxhash

from polykv_proxy.ids import SessionId
from polykv_proxy.upstream import SavedState

Place = Literal["ram", "disk"]

Content = tuple[int, int]
"""Hash and number of all tokens: what tells one pool's state from another's."""

POOL = "pool-"


def pool_tag(tokens_hash: int, n_tokens: int, start: int) -> str:
    """The name of a pool's state that begins at ``start``."""
    return f"{POOL}{tokens_hash:016x}-{n_tokens}-{start}"


def session_tag(session_id: SessionId) -> str:
    """The name of a session's state."""
    return f"session-{xxhash.xxh64_hexdigest(session_id.encode())}"


class SavedBooks:
    """Iterates all states that are ours, the least recently used first.

    ``on_changed``: the engine's list was read, or another start of it was seen. ``on_gone``: a state is nowhere now.
    """

    def __init__(self) -> None:
        self._states: dict[str, SavedState] = {}
        self._by_content: dict[Content, set[str]] = {}
        self._n_bytes: dict[Place, int] = {"ram": 0, "disk": 0}
        self._once: set[Content] = set()
        self._busy: Counter[str] = Counter()
        self._changed_at: dict[str, int] = {}
        self._n_changes = self._found_since = 0
        self._expected: dict[str, SavedState] = {}
        self._expected_contents: set[Content] = set()
        self.known = False
        """The engine's list was read since it was started, and nothing was left open since then."""
        self.listed = False
        """The engine's list was read since it was started."""
        self.ever_listed = False
        self.on_changed: Callable[[], None] = lambda: None
        self.on_gone: Callable[[SavedState], None] = lambda _: None

    def __iter__(self) -> Iterator[SavedState]:
        return iter(list(self._states.values()))

    def find(self, tag: str) -> SavedState | None:
        return self._states.get(tag)

    def of_content(self, tokens_hash: int, n_tokens: int) -> list[SavedState]:
        """States of a pool with these tokens, the one that begins last first: it takes the fewest cells."""
        states = [self._states[tag] for tag in self._by_content.get((tokens_hash, n_tokens), ())]
        return sorted(states, key=lambda state: -state.start)

    def was_there(self, content: Content) -> bool:
        """A state of this pool was there once, as far as this proxy knows."""
        return content in self._once

    def is_expected(self, content: Content) -> bool:
        """A state of it was where it outlives the engine's last start, and the list was not read yet."""
        return content in self._expected_contents

    def last_known(self) -> list[SavedState]:
        """What is ours; of a new start that was not listed yet also what should be where it outlives the last one."""
        return [*self._states.values(), *(state for tag, state in self._expected.items() if tag not in self._states)]

    def remember_only(self, contents: Container[Content]) -> None:
        """Others will not be asked for again."""
        self._once = {content for content in self._once if content in contents}

    def n_bytes(self, place: Place) -> int:
        """Bytes that the states take there. One that is in both places takes as much of each."""
        return self._n_bytes[place]

    def last_known_of(self, tag: str) -> SavedState | None:
        """The one of these with this tag."""
        return self._states.get(tag) or self._expected.get(tag)

    # What the engine said ------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """To be taken before the engine is asked for its list: what changes later is newer than that list."""
        return self._n_changes

    def found(self, listed: Iterable[SavedState], since: int) -> None:
        """The engine's list, asked for after ``since`` was marked."""
        if since < self._found_since:
            return  # a newer one was there before
        self._found_since = since
        there: dict[str, SavedState] = {}
        for state in listed:
            if state.usable and not self._is_newer(state.tag, since):
                there.setdefault(state.tag, state)
        there |= {tag: state for tag, state in self._states.items() if self._is_newer(tag, since)}
        before = self._states
        # What was there before this proxy is the oldest.
        order = [*(tag for tag in there if tag not in before), *(tag for tag in before if tag in there)]
        self._states, self._by_content, self._n_bytes = {}, {}, {"ram": 0, "disk": 0}
        for tag in order:
            self._put(there[tag])
        self._changed_at = {tag: at for tag, at in self._changed_at.items() if at > since}
        self.known = self.listed = self.ever_listed = True
        self._expect({})
        self.on_changed()

    def lost(self, stays: Collection[Place] = ()) -> None:
        """Another start of the engine: nothing is known of it yet, and no list that was asked for before counts.

        ``stays``: where what was saved should be there still.
        """
        kept = {state.tag: tuple(place for place in state.places if place in stays) for state in self.last_known()}
        self._expect(
            {
                state.tag: state.model_copy(update={"places": kept[state.tag]})
                for state in self.last_known()
                if kept[state.tag]
            }
        )
        for tag in list(self._states):
            self.leave_out(tag)
        self._n_changes += 1
        self._found_since = self._n_changes
        self._changed_at.clear()
        self.known = self.listed = False
        self.on_changed()

    def enter(self, state: SavedState) -> None:
        """It is there, and the most recently used."""
        self._touched(state.tag)
        self._take(state.tag)
        self._put(state)

    def amend(self, state: SavedState) -> None:
        """It is in other places now than before, which is no use of it."""
        self._touched(state.tag)
        self._put(state)

    def leave_out(self, tag: str, place: Place | None = None) -> None:
        """It is not there any more: nowhere, or in one place."""
        state = self._states.get(tag)
        places = [at for at in state.places if place is not None and at != place] if state is not None else []
        if state is not None and places:
            self.amend(state.model_copy(update={"places": tuple(places)}))
            return
        self._touched(tag)
        if state is None:
            return
        self._take(tag)
        self.on_gone(state)

    # Who goes ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working_on(self, tag: str) -> Iterator[None]:
        """For so long it is not forgotten for others."""
        self._busy[tag] += 1
        try:
            yield
        finally:
            self._busy[tag] -= 1
            if not self._busy[tag]:
                del self._busy[tag]

    def is_idle(self, tag: str) -> bool:
        """Nobody is just saving or loading it."""
        return not self._busy[tag]

    def victims(self, place: Place, n_bytes: int, *, older_than: str | None = None) -> list[SavedState]:
        """What is to be forgotten there for so many bytes; empty when that is not to be had.

        ``older_than``: only what was used before the state with this tag.
        """
        chosen: list[SavedState] = []
        for state in self:
            if n_bytes <= 0 or state.tag == older_than:
                break
            if place in state.places and self.is_idle(state.tag):
                chosen.append(state)
                n_bytes -= state.n_bytes
        return chosen if n_bytes <= 0 else []

    # Inside --------------------------------------------------------------------------------------------------------

    def _expect(self, states: dict[str, SavedState]) -> None:
        self._expected = states
        self._expected_contents = {content for s in states.values() if (content := state_content(s)) is not None}

    def _take(self, tag: str) -> None:
        state = self._states.pop(tag, None)
        if state is None:
            return
        self._count(state, -1)
        content = state_content(state)
        if content is not None:
            self._by_content[content].discard(tag)
            if not self._by_content[content]:
                del self._by_content[content]

    def _count(self, state: SavedState, sign: int) -> None:
        for place in state.places:
            self._n_bytes[place] += sign * state.n_bytes

    def _put(self, state: SavedState) -> None:
        before = self._states.get(state.tag)
        if before is not None:
            self._count(before, -1)
        self._count(state, 1)
        self._states[state.tag] = state
        content = state_content(state)
        if content is not None:
            self._once.add(content)
            self._by_content.setdefault(content, set()).add(state.tag)

    def _touched(self, tag: str) -> None:
        self._n_changes += 1
        self._changed_at[tag] = self._n_changes

    def _is_newer(self, tag: str, since: int) -> bool:
        return self._changed_at.get(tag, 0) > since


def state_content(state: SavedState) -> Content | None:
    """Which pool's state it is; None of a session's, which nobody but the session asks for."""
    if not state.tag.startswith(POOL):
        return None
    try:
        return int(state.tokens_hash, 16), state.n_tokens
    except ValueError:
        return None  # a damaged header: its file is of no use, and forgotten with those that nobody knows
