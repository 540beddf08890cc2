"""The one exception of this room.

These problems never become HTTP answers (that is ``polykv_proxy.errors``): they are what a person at a terminal reads,
so the message is one line that says what is wrong and what to do, and ``detail`` is the output that shows it.
"""


class EngineProblem(Exception):
    """Something on this machine keeps the engine from being fetched, built or started."""

    def __init__(self, message: str, *, detail: str = ""):
        super().__init__(message)
        self.message = message
        self.detail = detail
