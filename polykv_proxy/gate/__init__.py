"""Whether one more session may come in, and whether a turn should wait: decided from facts. Pure.

policy     the policy of a pool, its checks, whose policy a pool inherits
facts      what the gate is told: the engine as measured, a session at the door, a turn about to go out
rate       how fast each session decodes, as it experiences it
settle     the settle window, and what each admission turned out to cost
roofline   the engine's speed as a function of its load, fitted while it runs
verdict    the decision about one more session, with everything it rests on
queue      a bounded, fair line of those who wait
measured   what is known of the engine, and what follows for one more session or turn
entry      the first level: sessions at the door
turns      the second level: holding turns of admitted sessions
outcome    what the gate answers
gate       ``Gate``: all of it together

No asyncio, no HTTP, no logging, no clock in here: time comes in as ``now_s``. ``DESIGN.md`` beside this file tells
the decisions and how it is called.
"""
