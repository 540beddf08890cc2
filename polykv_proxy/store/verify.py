"""Rows of the journal's file as pools, or what is wrong with them."""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from polykv_proxy.ids import PoolId
from polykv_proxy.store.rows import TOKEN_BYTES, PoolRow, unpack_tokens, unseal_policy


class Damaged(Exception):
    """The file is not, or not entirely, a journal as this version writes it. The message says what is wrong."""


def policy_of(pool_id: PoolId, text: object) -> tuple[dict[str, Any], int]:
    """Raises Damaged."""
    try:
        return unseal_policy(pool_id, text)
    except ValueError as e:
        raise Damaged(str(e)) from e


def row_of(values: Sequence[Any], own: bytes) -> PoolRow:
    """Raises Damaged when the tokens are not as many as the row says."""
    pool_id, _, parent, branch_pos, prefix_len, tokens_hash, name, pin, ttl_s, auto, created_ts, last_access_ts = values
    if len(own) % TOKEN_BYTES or not own or branch_pos + len(own) // TOKEN_BYTES != prefix_len:
        raise Damaged(f"pool {pool_id} has {len(own)} bytes of tokens for [{branch_pos}, {prefix_len})")
    return PoolRow(
        pool_id=PoolId(pool_id),
        parent=PoolId(parent),
        branch_pos=branch_pos,
        own=unpack_tokens(own),
        tokens_hash=tokens_hash % (1 << 64),
        name=name,
        pin=bool(pin),
        ttl_s=ttl_s,
        auto=bool(auto),
        created_ts=created_ts,
        last_access_ts=last_access_ts,
    )


def check_prefix(row: PoolRow, own: bytes, above: Mapping[PoolId, PoolRow], raw: Mapping[PoolId, bytes]) -> None:
    """Compare the tokens of [0, L), put together from the ancestors, with their hash. Raises Damaged."""
    parent = above.get(row.parent)
    reach = parent.prefix_len if parent is not None else 0
    if not 0 <= row.branch_pos <= reach:
        raise Damaged(f"pool {row.pool_id} does not belong to its parent")
    parts, end = [memoryview(own)], row.branch_pos
    while parent is not None and end > 0:
        if parent.branch_pos < end:
            parts.append(memoryview(raw[parent.pool_id])[: (end - parent.branch_pos) * TOKEN_BYTES])
            end = parent.branch_pos
        parent = above.get(parent.parent)
    hasher = xxhash.xxh64()
    for part in reversed(parts):
        hasher.update(part)
    if hasher.intdigest() != row.tokens_hash:
        raise Damaged(f"the tokens of pool {row.pool_id} are not those it was made of")
