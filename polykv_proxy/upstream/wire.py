"""What the engine's hooks answer, read once at the border.

Unknown fields are ignored (a newer engine may say more); a missing one that we rely on is an error at this line and
nowhere later. ``epoch`` names one start of one engine: every sequence number only means something within it.
"""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, arbitrary_types_allowed=True)


class Cells(_Wire):
    """Cells of the cache. ``hi``: highest used cell + 1, what every decoder scans."""

    used: int
    total: int
    free: int
    hi: int | None = None
    n_stream: int = 1


class SlotStats(_Wire):
    id: int
    state: str
    """idle, wait_other, started, prompt, done_prompt or generating."""
    id_task: int = -1
    n_ctx: int = 0
    n_tokens: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_pool_shared: int = 0
    pool_seq: int = -1
    n_decoded: int = 0
    """By its present task."""
    n_decoded_cum: int = 0
    tps_ewma: float | None = None

    @property
    def idle(self) -> bool:
        return self.state == "idle"


class ServiceStats(_Wire):
    """The slot that prefills pools. ``seq``: for which sequence, -1 when idle."""

    state: str = "idle"
    seq: int = -1
    n_tokens: int = 0
    n_prompt: int = 0


class FinishedTask(_Wire):
    id_task: int
    id_slot: int = -1
    n_prompt: int
    n_cached: int
    n_pool: int = 0
    n_decoded: int = 0


class ModelInfo(_Wire):
    fingerprint: str = ""
    path: str = ""
    size: int | None = None
    n_vocab: int | None = None
    n_ctx_train: int | None = None


class Swa(_Wire):
    n_swa: int = 0
    full: bool = True


class EngineFlags(_Wire):
    """How llama-server was started, as far as it matters beside pools. None: an engine that does not say."""

    hosts: tuple[str, ...] | None = None
    has_api_key: bool | None = None
    n_batch: int | None = None
    prefill_quota: int | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    cache_ram_mib: int | None = None
    cache_idle_slots: bool | None = None
    cache_reuse: int | None = None
    context_shift: bool | None = None
    sleep_idle_s: int | None = None
    n_draft: int | None = None
    n_lora: int | None = None
    has_media: bool | None = None


class SavedRam(_Wire):
    """Memory for saved states, in bytes. ``n_bytes_max`` 0: none."""

    n_bytes: int = Field(0, alias="bytes")
    n_bytes_max: int = Field(0, alias="max")


class SavedDisk(SavedRam):
    """Disk for saved states, in bytes. ``why_off``: why there is none."""

    why_off: str = ""


class SavedUsage(_Wire):
    """What the engine has for saved states. All zero: an engine that cannot save any, or is asleep."""

    ram: SavedRam = SavedRam()
    disk: SavedDisk = SavedDisk()


class Stats(_Wire):
    """``share``: ``ok``, or the reason why this model and layout cannot share. Asleep, little else is known."""

    epoch: str = ""
    ts: float | None = None
    sleeping: bool = False
    model: ModelInfo = ModelInfo()
    kv_unified: bool = True
    swa: Swa | None = None
    recurrent: bool = False
    share: str = "ok"
    kv_bytes_per_token: float | None = None
    recurrent_bytes_per_seq: int | None = None
    flags: EngineFlags = EngineFlags()
    n_slots: int = 0
    n_ctx_slot: int | None = None
    max_pools: int = 0
    n_deferred: int = 0
    cells: Cells | None = None
    saved: SavedUsage = SavedUsage()
    n_decoded_cum: int = 0
    n_prompt_cum: int = 0
    service: ServiceStats = ServiceStats()
    slots: tuple[SlotStats, ...] = ()
    finished: tuple[FinishedTask, ...] = ()


class PoolSequence(_Wire):
    seq: int
    state: Literal["free", "busy", "ready"]
    gen: int = 0
    tag: str = ""
    n_tokens: int = 0
    tokens_hash: str | None = None
    parent_seq: int = -1
    branch_pos: int = 0
    n_attach: int = 0
    lora_current: bool = True
    """False: made with other adapter scales than the engine's present ones; nobody can attach any more."""


def _as_places(value: Any) -> Any:
    """The list names one place, the answer to a save all of them."""
    return (value,) if isinstance(value, str) else value


class SavedState(_Wire):
    """The range ``[start, n_tokens)`` of a sequence, kept outside the cache. Behind others' ``[0, start)`` it is whole.

    ``tokens_hash`` is that of ``[0, n_tokens)``, ``n_bytes`` the size of one copy. Not ``usable``: a file of another
    model, build or cache layout; the engine removes it when it needs the room.
    """

    tag: str
    start: int = Field(0, alias="from")
    n_tokens: int = 0
    tokens_hash: str = ""
    n_ckpt: int = 0
    n_bytes: int = Field(0, alias="bytes")
    places: Annotated[tuple[Literal["ram", "disk"], ...], BeforeValidator(_as_places)] = Field((), alias="in")
    usable: bool = True


class DiskError(_Wire):
    """Why a state is in memory only, not on disk as well. ``need``, ``free``: bytes, when it was the budget."""

    code: int
    message: str = ""
    need: int | None = None
    free: int | None = None


class Saved(SavedState):
    """The answer to a save. ``t_copy_ms``: how long the cache was held for it."""

    disk_error: DiskError | None = None
    cells: Cells | None = None
    t_copy_ms: float | None = None
    t_write_ms: float | None = None
    t_ms: float | None = None


def _merged(given: tuple[SavedState, ...]) -> tuple[SavedState, ...]:
    """The same state in memory and in a file is one. Other content under its tag, or a foreign file, stays apart."""
    found: dict[tuple[Any, ...], SavedState] = {}
    for state in given:
        key = (state.tag, state.start, state.n_tokens, state.tokens_hash, state.usable)
        same = found.get(key)
        found[key] = state if same is None else same.model_copy(update={"places": (*same.places, *state.places)})
    return tuple(found.values())


class PoolList(_Wire):
    """``saved``: those in memory first. Asleep, none of it is known: what was saved may still be there."""

    epoch: str = ""
    sleeping: bool = False
    cells: Cells | None = None
    pools: tuple[PoolSequence, ...] = ()
    saved: Annotated[tuple[SavedState, ...], AfterValidator(_merged)] = ()


class SequenceCells(_Wire):
    """Where a pool's sequence lies: (start, end, first cell) of stretches of positions. Of a slot: ``id``."""

    runs: tuple[tuple[int, int, int], ...] = ()
    seq: int = -1
    gen: int = -1
    id: int = -1
    id_task: int = -1


class CellMap(_Wire):
    """Which cells each sequence holds. Two share a cell when both have it at the same position."""

    epoch: str = ""
    pools: tuple[SequenceCells, ...] = ()
    slots: tuple[SequenceCells, ...] = ()


class Materialized(_Wire):
    """A pool that the engine holds now. ``branch_pos`` is the real one: models with checkpoints may give less."""

    seq: int
    gen: int
    epoch: str | None = None
    tag: str = ""
    n_tokens: int
    tokens_hash: str
    parent_seq: int = -1
    branch_pos: int = 0
    n_cached: int = 0
    n_processed: int = 0
    cells: Cells | None = Field(None, description="Only of one that was loaded.")
    t_ms: float | None = None
    tokens: tuple[int, ...] | None = Field(None, description="Only of a snapshot that asked for them.")


class LoadedSlot(_Wire):
    """A slot that holds a saved state again: ``[0, branch_pos)`` shared with its parent pool, the rest its own."""

    id_slot: int
    tag: str = ""
    n_tokens: int
    tokens_hash: str
    parent_seq: int = -1
    branch_pos: int = 0
    n_pool_shared: int = 0
    cells: Cells | None = None
    t_ms: float | None = None


class Cleared(_Wire):
    """An idle slot that was emptied. ``n_tokens``: what it held; ``n_cells_freed``: what nobody else holds of that."""

    id_slot: int
    n_tokens: int = 0
    n_cells_freed: int = 0
    cells: Cells | None = None


class Freed(_Wire):
    seq: int
    n_tokens: int = 0
    cells: Cells | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A body exactly as its route would tokenize it. ``prompts``: all of them, ``tokens`` the first."""

    tokens: Tokens
    has_media: bool
    n_prompts: int
    prompts: tuple[Tokens, ...] = ()

    @classmethod
    def read(cls, answer: dict[str, Any]) -> "Rendered":
        tokens = array("i", answer["tokens"])
        prompts = tuple(array("i", prompt) for prompt in answer.get("prompts") or ()) or (tokens,)
        return cls(tokens, bool(answer.get("has_media")), int(answer.get("n_prompts", 1)), prompts)
