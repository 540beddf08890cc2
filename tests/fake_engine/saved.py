"""What the fake engine keeps of pools and slots outside its cache. The hooks are in ``saving``.

Memory survives a sleep and no restart, files survive both; a file belongs to the fingerprint it was saved under. Only
the own range ``[from, n_tokens)`` has bytes. As in the engine, nothing clears idle slots for a load, a load takes the
lowest free cells, and one that fails leaves its destination as it was.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.fake_engine.cache import OutOfCells, PoolSeq, Sequence, Slot, lcp, tokens_hash

if TYPE_CHECKING:
    from tests.fake_engine.server import FakeEngine

BYTES_PER_CELL = 1024
BYTES_PER_TOKEN = 4
FILE_OVERHEAD = 256
"""Header and checksum of a file."""


class HookError(Exception):
    def __init__(self, status: int, message: str, **extra: Any):
        super().__init__(message)
        self.status, self.message, self.extra = status, message, extra

    def as_json(self) -> dict[str, Any]:
        return {"code": self.status, "message": self.message, "type": "polykv_error", **self.extra}


@dataclass
class State:
    tag: str
    start: int
    tokens: list[int]
    fingerprint: str
    damaged: bool = False
    """Of a file: its checksum is wrong, which only reading it shows."""

    def is_same(self, other: "State") -> bool:
        """What is saved under a tag in one place and not the same in the other goes there."""
        return (self.start, self.tokens) == (other.start, other.tokens)

    @property
    def n_cell_bytes(self) -> int:
        return (len(self.tokens) - self.start) * BYTES_PER_CELL

    @property
    def n_bytes(self) -> int:
        return self.n_cell_bytes + len(self.tokens) * BYTES_PER_TOKEN

    @property
    def n_file_bytes(self) -> int:
        return self.n_bytes + FILE_OVERHEAD

    def as_json(self) -> dict[str, Any]:
        return {
            "tag": self.tag,
            "from": self.start,
            "n_tokens": len(self.tokens),
            "tokens_hash": tokens_hash(self.tokens),
            "n_ckpt": 0,
            "bytes": self.n_bytes,
        }


class SavedStates:
    """``ram`` by tag; ``files`` oldest first.

    ``ram_max``, ``disk_max``  budgets in bytes, 0 = none; tests set them at any time
    ``disk_fails``             what every write fails with, as on a full disk
    """

    def __init__(self, engine: "FakeEngine", ram_max: int, disk_max: int):
        self.engine, self.ram_max, self.disk_max = engine, ram_max, disk_max
        self.disk_fails: str | None = None
        self.ram: dict[str, State] = {}
        self.files: list[State] = []
        self.n_loaded = 0
        self._changes: Counter[str] = Counter()

    def restarted(self) -> None:
        """Memory is gone; what is more than the disk's budget, which may be another now, or none, goes oldest first."""
        self.ram.clear()
        while self._n_disk() > self.disk_max:
            del self.files[0]

    # what a test does to files ---------------------------------------------------------------------------------------

    def damage(self, tag: str) -> None:
        """Flip a bit of its file: it is listed until somebody reads it."""
        self._file(tag).damaged = True

    def remove_file(self, tag: str) -> None:
        """As somebody who deletes it behind the engine's back, or a start that found it torn."""
        self.files.remove(self._file(tag))

    def _file(self, tag: str) -> State:
        return next(f for f in self.files if f.tag == tag)

    # the books -------------------------------------------------------------------------------------------------------

    def _usable(self, file: State) -> bool:
        return file.fingerprint == self.engine.fingerprint

    def _n_ram(self, but_tag: str | None = None) -> int:
        return sum(s.n_bytes for s in self.ram.values() if s.tag != but_tag)

    def _n_disk(self, but_tag: str | None = None) -> int:
        return sum(f.n_file_bytes for f in self.files if f.tag != but_tag or not self._usable(f))

    def usage(self) -> dict[str, Any]:
        why_off = "" if self.disk_max else "the server was started without --polykv-save-disk"
        return {
            "ram": {"bytes": self._n_ram(), "max": self.ram_max},
            "disk": {"bytes": self._n_disk() if self.disk_max else 0, "max": self.disk_max, "why_off": why_off},
        }

    def list(self) -> list[dict[str, Any]]:
        in_ram = [s.as_json() | {"in": "ram", "usable": True} for _, s in sorted(self.ram.items())]
        files = self.files if self.disk_max else []
        return in_ram + [
            f.as_json() | {"in": "disk", "usable": self._usable(f), "bytes": f.n_file_bytes} for f in files
        ]

    def check_ram(self, state: State) -> None:
        free = max(self.ram_max - self._n_ram(state.tag), 0)
        if state.n_cell_bytes > free:
            said = f"not enough memory for saved states: need {state.n_cell_bytes} bytes, have {free}"
            raise HookError(507, said, need=state.n_cell_bytes, free=free)

    def write(self, state: State) -> None:
        need = state.n_file_bytes
        while self._n_disk(state.tag) + need > self.disk_max:
            foreign = next((f for f in self.files if not self._usable(f)), None)
            if foreign is None:
                free = max(self.disk_max - self._n_disk(state.tag), 0)
                said = f"not enough disk for saved states: need {need} bytes, have {free}"
                raise HookError(507, said, need=need, free=free)
            self.files.remove(foreign)
        if self.disk_fails is not None:
            raise HookError(507, self.disk_fails)
        self.files = [f for f in self.files if f.tag != state.tag or not self._usable(f)]
        self.files.append(replace(state))
        if state.tag in self.ram and not self.ram[state.tag].is_same(state):
            del self.ram[state.tag]

    def read(self, tag: str) -> State:
        named = [f for f in self.files if f.tag == tag] if self.disk_max else []
        usable = [f for f in named if self._usable(f)]
        if named and not usable:
            raise HookError(409, f"'{tag}' was saved by another model, build or cache layout")
        if not usable:
            raise HookError(410, f"nothing is saved under '{tag}'")
        if usable[0].damaged:
            self.files.remove(usable[0])
            raise HookError(410, f"the file of '{tag}' has a wrong checksum")
        return usable[0]

    def forget(self, tag: str, place: str | None = None) -> None:
        """In memory (``ram``), on ``disk``, or in both."""
        if place not in ("ram", "disk", None):
            raise HookError(400, '"in" must be "ram" or "disk", both without it')
        there = False
        if place != "disk":
            there = self.ram.pop(tag, None) is not None
        if place != "ram":
            self._changes[tag] += 1
        if place != "ram" and self.disk_max:
            n_before = len(self.files)
            self.files = [f for f in self.files if f.tag != tag]
            there = there or len(self.files) < n_before
        if not there:
            where = {"ram": " in memory", "disk": " on disk", None: ""}[place]
            raise HookError(410, f"nothing is saved under '{tag}'{where}")

    def n_changes(self, tag: str) -> int:
        """Counts what takes the place of a file that is being written: such a write ends with 410."""
        return self._changes[tag]

    # save and load ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self.ram_max and not self.disk_max:
            raise HookError(
                501,
                "saved states have no memory and no disk: start the server with --polykv-save-ram or "
                "--polykv-save-path and --polykv-save-disk",
            )

    def save(self, source: PoolSeq | Slot | None, asked: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        """Copy a range out of the cache; into memory if that is asked for. Without a source take what is there already.

        The caller writes the file.
        """
        self._check()
        to = asked["to"]
        if to != "disk" and not self.ram_max:
            raise HookError(501, "saved states have no memory: start the server with --polykv-save-ram")
        if to != "ram" and not self.disk_max:
            raise HookError(501, f"saved states have no disk: {self.usage()['disk']['why_off']}")
        if source is None:
            return self._in_memory(asked["tag"])
        if isinstance(source, PoolSeq) and source.state != "ready":
            raise HookError(410, f"there is no pool in sequence {source.seq}")
        if isinstance(source, Slot) and source.state == "started":
            raise HookError(409, f"slot {source.id} has not started its prompt yet")
        n_all = len(source.tokens)
        n = n_all if asked["n_tokens"] < 0 else asked["n_tokens"]
        if n > n_all or asked["from"] >= n:
            said = f"[{asked['from']}, {n}) is not in a sequence of {n_all} tokens"
            raise HookError(409, said, n_tokens=n_all)
        state = State(asked["tag"], asked["from"], source.tokens[:n], self.engine.fingerprint)
        if to != "disk":
            self.check_ram(state)
            self.files = [f for f in self.files if f.tag != state.tag or not self._usable(f) or f.is_same(state)]
            self._changes[state.tag] += to == "ram"
            self.ram[state.tag] = state
        return state, state.as_json() | {"in": [] if to == "disk" else ["ram"], "t_copy_ms": 0.1, "t_ms": 0.2}

    def _in_memory(self, tag: str) -> tuple[State, dict[str, Any]]:
        if tag not in self.ram:
            raise HookError(410, f"nothing is saved under '{tag}' in memory")
        state = self.ram[tag]
        return state, state.as_json() | {"in": [], "t_copy_ms": 0.0, "t_ms": 0.1}

    def check_load(self, state: State, asked: dict[str, Any]) -> int:
        """Where the parent's part ends: it may have some of the saved range as well."""
        self._check()
        n, limit = len(state.tokens), self.engine.n_ctx_slot
        is_within = asked["parent_seq"] >= 0 and state.start < asked["branch_pos"] < n
        branch_pos = int(asked["branch_pos"]) if is_within else state.start
        if asked["branch_pos"] >= 0 and asked["branch_pos"] != branch_pos:
            said = f"the saved range starts at {state.start}, not at {asked['branch_pos']}"
            raise HookError(409, said, **{"from": state.start})
        if n >= limit:
            said = f"the saved state ({n} tokens) exceeds the context of a slot ({limit} tokens)"
            raise HookError(400, said, n_tokens=n, n_ctx=limit)
        return branch_pos

    def parent_of(self, state: State, parent_seq: int, branch_pos: int) -> PoolSeq | None:
        if branch_pos == 0:
            return None
        parent = next((p for p in self.engine.ready_pools() if p.seq == parent_seq), None)
        if parent is None:
            raise HookError(410, f"there is no parent pool in sequence {parent_seq}")
        equal = lcp(parent.tokens, state.tokens)
        if equal < branch_pos:
            said = f"the tokens differ from the parent at {equal}, before {branch_pos}"
            raise HookError(409, said, divergence_pos=equal)
        return parent

    def load(self, state: State, parent: PoolSeq | None, into: Sequence, branch_pos: int | None = None) -> None:
        """All of the state comes in first, so all of it needs room, and takes the lowest cells."""
        branch_pos = state.start if branch_pos is None else branch_pos
        own = state.tokens[state.start :]
        try:
            cells = self.engine.cache.lowest_free(len(own))
        except OutOfCells as e:
            said = f"not enough KV cells: need {e.need}, have {e.free}"
            raise HookError(507, said, need=e.need, free=e.free) from e
        into.tokens = list(state.tokens)
        into.cells = (parent.cells[:branch_pos] if parent is not None else []) + cells[branch_pos - state.start :]
        self.n_loaded += 1
