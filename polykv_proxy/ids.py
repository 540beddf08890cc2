"""Distinct types for the numbers and strings that are easy to confuse."""

from typing import NewType

PoolId = NewType("PoolId", int)
"""Stable id of a pool, given by the proxy. Never reused, survives restarts of either side."""

SeqId = NewType("SeqId", int)
"""The engine's sequence that holds a resident pool's cells. Reused; only meaningful together with a generation."""

SlotId = NewType("SlotId", int)
"""A decoding place of llama-server, ``0 .. n_parallel - 1``."""

SessionId = NewType("SessionId", str)
"""One conversation of one agent, named by the client or made up by the proxy."""

ROOT = PoolId(-1)
"""The ``parent`` of a root pool."""
