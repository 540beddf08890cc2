"""What the engine's hooks answer, read once at the border.

Unknown fields are ignored (a newer engine may say more); a missing one that we rely on is an error at this line and
nowhere later. ``epoch`` names one start of one engine: every sequence number only means something within it.
"""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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


class PoolList(_Wire):
    epoch: str = ""
    sleeping: bool = False
    cells: Cells | None = None
    pools: tuple[PoolSequence, ...] = ()


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
    t_ms: float | None = None
    tokens: tuple[int, ...] | None = Field(None, description="Only of a snapshot that asked for them.")


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
