"""What a llama-server without hooks says of itself: ``/props``, and ``/slots`` where that is on.

Pure. Older ones leave things out: ``None`` is unknown.
"""

from typing import Any, NamedTuple

from polykv_proxy.ids import SlotId


class PlainProps(NamedTuple):
    """``n_slots``: 0 in router mode, which has slots per model. ``start``: differs between two starts of it."""

    n_slots: int
    n_ctx: int | None = None
    shows_slots: bool = False
    sleeping: bool = False
    router: bool = False
    start: str | None = None

    @classmethod
    def read(cls, answer: dict[str, Any]) -> "PlainProps":
        if answer.get("role") == "router":
            return cls(0, router=True)
        settings, marker = answer.get("default_generation_settings"), answer.get("media_marker")
        return cls(
            _natural(answer.get("total_slots")) or 1,
            n_ctx=_natural(settings.get("n_ctx")) if isinstance(settings, dict) else None,
            # One that does not say whether it shows them is asked, and says it then.
            shows_slots=answer.get("endpoint_slots") is not False,
            sleeping=answer.get("is_sleeping") is True,
            start=marker if isinstance(marker, str) else None,  # made up when the process starts
        )


class PlainSlot(NamedTuple):
    """One slot now. ``id_task``: its last task, None = it had none. ``n_tokens``: what it holds."""

    slot_id: SlotId
    busy: bool
    id_task: int | None = None
    n_tokens: int | None = None
    n_decoded: int | None = None


def read_slots(answer: Any) -> list[PlainSlot] | None:
    """llama-server's ``/slots``; None when it is not a list of slots that say whether they work."""
    if not isinstance(answer, list):
        return None
    slots = []
    for item in answer:
        slot_id = _natural(item.get("id")) if isinstance(item, dict) else None
        if slot_id is None or not isinstance(item.get("is_processing"), bool):
            return None
        following = item.get("next_token")
        following = following[0] if isinstance(following, list) and following else following
        slots.append(
            PlainSlot(
                SlotId(slot_id),
                item["is_processing"],
                id_task=_natural(item.get("id_task")),
                n_tokens=_natural(item.get("n_prompt_tokens")),
                n_decoded=_natural(following.get("n_decoded")) if isinstance(following, dict) else None,
            )
        )
    return slots


def _natural(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
