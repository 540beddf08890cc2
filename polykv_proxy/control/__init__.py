"""Control: the one writer of state, between the doors (relay, routes) and the pure rooms (tree, gate, upstream).

core       ``Control``: what the doors talk to
assembly   how the parts are put together
pools      plan → perform → commit or drop
policies   whose admission policy a pool follows
door       who waits to come in, and which turn waits (``gate_facts``, ``visits``, ``refused``)
watch      what the engine is: reachable, patched, which start of it
lease      one proxy per engine
restore    what earlier runs left: the tree from the journal, for the engine's model, and back into the cache
residency  what the engine holds, and single flight
making     orders to the engine, and room for them
compaction a shorter pool in the place of one
retention  what stays and what goes: grace, pins and their budget
keeping    pin, unpin, evict, flush
ledger     who holds which cells
sequences  the engine's sequences: order, find again, give back
holdings   how many cells pools and slots hold, alone and together
room       cells: does it fit, who leaves, who waits for whom
forecast   cells that are free by the stats, and those that will be taken (pure)
fan_out    requests that begin alike prefill that once
flights    one prefill for all of them: who leads, who waits
alike      which prompts begin alike (pure)
hints      pools where a client's marks are
automatic  pools that nobody ordered, and their ageing
attach     which pool a request gets, how far, and why not further
compare    a prompt against the pools
dry_run    what a request would get
saved      the warm tier: what the engine has saved (``saved_books``, ``warmth``, ``loading``, ``leaving``, ``tier``)
parking    conversations without a slot (``slot_states``)
sources    from prompts, messages and sessions to tokens
snapshots  a slot's context as a pool
seen       conversations that need not be rendered again (pure)
receipts   what became of the last requests
diverged   where a prompt left what it was expected to begin with (``divergence``: pure)
views      questions, answered as JSON
orders     what can be asked, as values
"""

from polykv_proxy.control.core import Control
from polykv_proxy.control.orders import AttachPlan, AttachRequest, Compact, CreatePool, ForkPool, Outcome, Source

__all__ = ["AttachPlan", "AttachRequest", "Compact", "Control", "CreatePool", "ForkPool", "Outcome", "Source"]
