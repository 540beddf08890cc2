"""The request as the engine gets it: our fields out, the engine's in, every other byte as it was.

Pure.
"""

from typing import Any

import orjson

from polykv_proxy.control import AttachPlan
from polykv_proxy.ids import SlotId
from polykv_proxy.relay.dialects import Call
from polykv_proxy.relay.fields import ENGINE_FIELDS
from polykv_proxy.relay.json_bytes import append_to_object, edit


def rewrite(call: Call, plan: AttachPlan | None, slot_id: SlotId | None) -> bytes:
    """``plan`` with a pool: attach. ``slot_id``: pin, unless the request is a list of prompts."""
    attached = plan is not None and plan.pool_id is not None and plan.seq_id is not None
    if not attached and not call.explicit and slot_id is not None and "id_slot" not in call.body:
        # The common case of the automatic mode: nothing to share yet, only a slot.
        return append_to_object(call.raw, b'"id_slot":%d' % slot_id) if call.n_prompts == 1 else call.raw
    add: list[tuple[str, Any]] = []
    if slot_id is not None and call.n_prompts == 1:
        add.append(("id_slot", slot_id))
    if plan is not None and attached:
        add += [
            ("shared_pool_slot", plan.seq_id),
            ("shared_prefix_n_tokens", plan.prefix_n_tokens if plan.exact else -1),
            ("shared_pool_gen", plan.gen),
            ("shared_pool_epoch", plan.epoch),
        ]
    touched = attached or call.explicit
    remove = (call.carried | (ENGINE_FIELDS & call.body.keys())) if touched else frozenset[str]()
    if slot_id is not None and "id_slot" in call.body:
        remove |= {"id_slot"}  # -1: any slot
    return edit(
        call.raw,
        remove=remove,
        replace=call.replace if touched else None,
        add=[(key, orjson.dumps(value)) for key, value in add],
    )
