"""PolyKV: shared-prefix KV pools in front of a patched llama-server.

Five nouns:

pool      an immutable token prefix ``[0, L)``. It inherits ``[0, D)`` from its parent and owns ``[D, L)``.
sequence  the engine's name for a row of the KV cache. A resident pool lives in one above the slots.
slot      an ordinary decoding place of llama-server. The proxy hands them out.
session   one conversation of one agent. It keeps its slot between turns and attaches to a pool.
attach    the slot shares the cells of ``[0, P)`` with the pool: no copy, no prefill. The engine compares the
          tokens itself before it shares, so an answer is never wrong because of sharing.

Rooms: ``tree`` (pools, hashes, matching; pure), ``gate`` (admission; pure), ``upstream`` (everything that talks
to llama-server), ``store`` (the journal that pools survive restarts in), ``control`` (the one writer of state),
``relay`` (the data plane), ``routes`` (the control plane), ``engine`` (fetch, patch, build and supervise llama-server),
``cli`` (``polykvctl``), ``client`` (the Python SDK; knows none of the others).
"""

__version__ = "0.1.0"
