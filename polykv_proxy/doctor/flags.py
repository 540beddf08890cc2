"""Flags of llama-server that are dangerous or useless beside pools."""

from polykv_proxy.doctor.facts import Facts, is_loopback
from polykv_proxy.doctor.finding import Finding

DEFAULT_CACHE_RAM_MIB = 8192
"""llama-server's own."""

LARGE_BATCH = 512
"""Tokens. A batch of so many is a second or two on a processor; orders and new tokens wait for its end."""


def sleeping(facts: Facts) -> Finding | None:
    if facts.sleeping:
        return Finding(
            "engine_sleeps",
            "info",
            "the engine sleeps",
            "its cache is gone; the next request wakes it and brings its pool back by a prefill",
            "nothing, if that is what --sleep-idle-seconds is for",
        )
    seconds = facts.flags.sleep_idle_s
    if seconds is None or seconds <= 0:
        return None
    return Finding(
        "sleep_loses_pools",
        "warning",
        f"the engine goes to sleep after {seconds} idle seconds",
        "all pools leave the cache then, pinned ones too, and are prefilled again on the next request",
        "start llama-server without --sleep-idle-seconds, or accept the prefill",
    )


def large_batch(facts: Facts) -> Finding | None:
    n_batch = facts.flags.n_batch
    if n_batch is None or n_batch <= LARGE_BATCH:
        return None
    return Finding(
        "batch_large",
        "warning",
        f"the batch is {n_batch} tokens",
        "everything but the statistics waits for the end of a batch: tokens of others, new pools, clients that leave",
        "start llama-server with --batch-size 256; on a GPU, measure before",
    )


def quota_off(facts: Facts) -> Finding | None:
    if facts.flags.prefill_quota != 0:
        return None
    return Finding(
        "prefill_quota_off",
        "warning",
        "--polykv-prefill-quota is 0",
        "a pool that is made while others decode takes whole batches, and they stand still for so long",
        "--polykv-prefill-quota 256, the default",
    )


def cache_ram(facts: Facts) -> Finding | None:
    mib = facts.flags.cache_ram_mib
    if not mib:
        return None
    if mib == DEFAULT_CACHE_RAM_MIB and facts.flags.cache_idle_slots is False:
        return None  # as `polykvctl up` and compose.yaml start it: nobody chose it, and nobody has to change it
    return Finding(
        "cache_ram_unpooled_only",
        "info",
        f"llama-server keeps up to {f'{mib} MiB' if mib > 0 else 'any amount'} of old prompts in memory (--cache-ram)",
        "slots that share a pool are neither saved there nor restored from it; only unpooled conversations gain",
        "--cache-ram 0 if nearly all requests attach to pools",
    )


def cache_idle_slots(facts: Facts) -> Finding | None:
    if not facts.flags.cache_idle_slots or facts.kv_unified is False:
        return None
    return Finding(
        "idle_slots_cleared",
        "warning",
        "llama-server empties idle slots whenever a request starts (--cache-idle-slots, its default)",
        "a session without a pool comes back by a copy from host memory, or by a prefill once --cache-ram is full, and "
        "from_session finds its slot empty",
        "--no-cache-idle-slots, as `polykvctl up` does",
    )


def context_shift(facts: Facts) -> Finding | None:
    if not facts.flags.context_shift:
        return None
    return Finding(
        "context_shift_not_for_pools",
        "warning",
        "--context-shift is on",
        "shared cells cannot be moved: a pooled session ends at its context with finish_reason length instead",
        "nothing, or leave the flag out so that all sessions end alike",
    )


def cache_reuse(facts: Facts) -> Finding | None:
    if not facts.flags.cache_reuse:
        return None
    return Finding(
        "cache_reuse_not_for_pools",
        "info",
        f"--cache-reuse {facts.flags.cache_reuse} is on",
        "moving cells inside a shared prefix would change what others read: such slots go without it",
        "nothing; unpooled conversations still use it",
    )


def adapters(facts: Facts) -> Finding | None:
    if not facts.flags.n_lora:
        return None
    return Finding(
        "adapters_bind_pools",
        "info",
        f"the engine has {facts.flags.n_lora} LoRA adapter{'s' if facts.flags.n_lora > 1 else ''}",
        "a pool is bound to the scales it was made with: requests with a `lora` of their own go unpooled, and after "
        "POST /lora-adapters pools are made anew",
        "nothing, if scales change seldom",
    )


def media(facts: Facts) -> Finding | None:
    if not facts.flags.has_media:
        return None
    return Finding(
        "media_unpooled",
        "info",
        "the engine takes images or audio",
        "pools hold text: a request with media is served without one",
        "nothing",
    )


def engine_open(facts: Facts) -> Finding | None:
    hosts = facts.flags.hosts
    if hosts is None or facts.flags.has_api_key is not False or all(is_loopback(host) for host in hosts):
        return None
    return Finding(
        "engine_open",
        "warning",
        f"llama-server listens on {', '.join(hosts)} without a key",
        "whoever reaches it reads prompts in /slots and can change pools behind the proxy's back",
        "--host 127.0.0.1, or --api-key there and POLYKV_UPSTREAM_API_KEY here, or a network of their own",
    )
