"""Sizes that llama-server would refuse to start with: looked at before it is started."""

from dataclasses import dataclass

from polykv_proxy.doctor.finding import Finding

MAX_SEQUENCES = 256
"""llama.cpp's LLAMA_MAX_SEQ."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    n_slots: int
    max_pools: int
    n_batch: int

    @property
    def n_sequences(self) -> int:
        """One per slot and pool, one to prefill pools with, one spare."""
        return self.n_slots + self.max_pools + 2


def check_sizes(sizes: EngineSizes) -> Finding | None:
    """What llama-server would refuse to start with."""
    if sizes.max_pools <= 0:
        return None
    n = sizes.n_sequences
    if n > MAX_SEQUENCES:
        return Finding(
            "too_many_sequences",
            "error",
            f"{sizes.n_slots} slots + {sizes.max_pools} pools + 2 are {n} sequences",
            f"llama.cpp has {MAX_SEQUENCES}, llama-server will not start",
            f"--max-pools {max(0, MAX_SEQUENCES - 2 - sizes.n_slots)} or fewer; more pools may exist, they take turns",
        )
    if sizes.n_batch < n:
        return Finding(
            "batch_too_small",
            "error",
            f"a batch of {sizes.n_batch} tokens is smaller than the {n} sequences of slots and pools",
            "llama-server will not start",
            f"--batch {n} or more, or fewer --max-pools",
        )
    return None
