"""Connections whose reading was never held up, which is nearly all of them.

aiohttp tells its parser to go on after every read of a body, in case that was held up: with small bodies a twentieth of
what a request costs. On a connection that was never paused there is nothing to go on with. On one that was, now or long
ago, it is done as aiohttp does it: its parser may still believe it is paused when the connection is not.
"""

from aiohttp.base_protocol import BaseProtocol


class Unpaused(BaseProtocol):
    """To be put in front of one of aiohttp's connections. ``_was_paused``: kept by whoever inherits, False at first."""

    __slots__ = ()
    _was_paused: bool

    def _pause_transport_reading(self) -> None:
        self._was_paused = True  # type: ignore[misc] # a slot of who inherits
        super()._pause_transport_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._was_paused:
            super().resume_reading(resume_parser)
