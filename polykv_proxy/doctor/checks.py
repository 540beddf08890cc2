"""Every check there is. A fact that is not known makes no finding.

To add one, write a function in the module it belongs to and put it into its list here. Ids are stable.
"""

from collections.abc import Callable

from polykv_proxy.doctor import flags, layout, use
from polykv_proxy.doctor.facts import Facts
from polykv_proxy.doctor.finding import SEVERITIES, Finding

Check = Callable[[Facts], Finding | None]

ALWAYS: list[Check] = [
    use.no_admin_key,
    use.engine_key_for_all,
    use.journal,
    use.damaged_journal,
    use.pools_of_other_models,
    use.default_mode_alone,
    use.warm,
    use.warm_disk,
    use.left_states,
    use.warm_under_pressure_only,
]

WITHOUT_ENGINE: list[Check] = [layout.engine_unreachable, layout.engine_key, layout.engine_hangs]

WITHOUT_HOOKS: list[Check] = [layout.engine_without_pools, layout.sessions_not_pinned]

OF_ENGINE: list[Check] = [
    layout.engine_hangs,
    layout.not_owner,
    layout.sharing_refused,
    flags.engine_open,
    flags.sleeping,
    layout.split_cache,
    layout.split_context,
    layout.recurrent_state,
    flags.large_batch,
    flags.quota_off,
    flags.cache_idle_slots,
    flags.cache_ram,
    flags.context_shift,
    flags.cache_reuse,
    flags.adapters,
    flags.media,
]

OF_USE: list[Check] = [
    use.idle_pools,
    use.orphaned_pins,
    use.more_pools_than_sequences,
    use.more_sessions_than_slots,
]


def examine(facts: Facts) -> list[Finding]:
    """Run every check that the facts allow, worst first."""
    checks = list(ALWAYS)
    if facts.engine != "ready":
        checks += WITHOUT_ENGINE
    elif not facts.hooks:
        checks += WITHOUT_HOOKS
    else:
        checks += [*OF_ENGINE, *OF_USE]
    findings = [finding for check in checks if (finding := check(facts)) is not None]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
