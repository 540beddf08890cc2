"""The data plane: everything that is llama-server's goes to it; what may share a prefix is read and attached.

relay       the front desk: ours, untouched, or a turn
turn        one attachable request: session, pool, slot, engine, and back
desk        waiting for a slot, cancellable (the rim around ``slots``)
pump        bytes from the engine to the client; what a broken reply looks like
connection  heads that cannot be read, below the application
doors       which door a request target leads to, however it is spelled (pure)
dialects    what a request says, in four dialects (pure)
speakers    who is speaking, by the headers of agents (pure)
normalise   lines that change by themselves, pinned for who asks for it (pure)
hints       where a client says that a cache should end (pure)
fields      the contract's fields in bodies and headers (pure)
rewrite     the request as the engine gets it (pure)
json_bytes  JSON edited in place (pure)
sse         events read while they pass; where our object goes (pure)
usage       what a reply says about itself (pure)
receipt     what we say about it: object and headers (pure)
refusals    errors in each dialect's shape (pure)

``DESIGN.md`` beside this file says why.
"""
