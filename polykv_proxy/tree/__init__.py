"""The tree of pools: what exists, who inherits from whom, and which pool a prompt starts with. Pure.

prefix      tokens as int32 arrays, cumulative XXH64, longest common prefix
pool        one pool, and the plan of one that is still being made
index       the longest-prefix index over all pools: exact tokens, cost by the prompt's length
run         the stretches of tokens that the index is made of
lookup      ``PoolLookup``: every question to the pools there are, matching among them
tree        ``PoolTree``, above it: plan, commit, drop, restore, release
cells       which cells each sequence and slot holds: a shadow of the engine's cache
accounting  who owns which KV cells, by ownership and never by membership
eviction    who stays, who leaves the cache first, and how many cells the pools hold
view        the JSON of ``GET /polykv/pools`` from plain facts

No asyncio, no HTTP, no logging, no clock in here: time comes in as ``now_s``. ``DESIGN.md`` beside this file tells
the decisions.
"""
