"""Settings of the proxy: default < TOML file (``--config``) < environment ``POLYKV_*`` < flag.

Every field says in one sentence what it is for, with its unit. ``load_settings`` is the one way in; a value that does
not fit ends in ``ConfigError`` with one line that names the setting as the person wrote it. A variable that nobody
reads is a warning only (``unread_variables``): it may be there for something else.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from polykv_proxy.gate.policy import MAX_TPS

ENV_PREFIX = "POLYKV_"
MEMORY_STATE = ":memory:"


class ConfigError(Exception):
    """A setting that cannot be used. The message is one line for a person."""


class Settings(BaseSettings):
    """All settings. Build it with ``load_settings``."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True)

    host: str = Field(
        "127.0.0.1",
        description="Addresses the proxy listens on, comma-separated; the first is the one it names.",
    )
    port: int = Field(8090, ge=0, le=65535, description="Port on all these addresses; 0 = a free one.")
    upstream_url: str = Field("http://127.0.0.1:8080", description="The llama-server.")
    upstream_api_key: SecretStr | None = Field(
        None, description="Key sent upstream; a client's own key is never forwarded."
    )
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="Data-plane keys, comma-separated; none = open."
    )
    admin_key: SecretStr | None = Field(
        None,
        description="Control-plane key. None: data-plane keys may manage pools, and without any key the control "
        "plane answers only loopback peers.",
    )
    mode: Literal["auto", "explicit"] = Field(
        "auto",
        description="auto: sessions keep their slot and requests attach to what matches. explicit: only requests that "
        "carry a field are touched, everything else is relayed byte for byte.",
    )
    state: str | None = Field(
        None,
        description="SQLite journal of pools; none = ~/.local/state/polykv/<upstream>.db; ':memory:' = keep nothing.",
    )
    grace_ttl_s: float = Field(
        300, ge=0, description="Seconds a pool nobody uses stays resident after its last descendant or session left."
    )
    warm_after_s: float = Field(
        20,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after which idle unpinned pools and parked sessions leave the cache for the engine's "
        "memory; 0 = never for being idle.",
    )
    warm_ram_bytes: int = Field(
        2 << 30, ge=0, description="Budget in bytes of saved state in the engine's memory; 0 = none."
    )
    warm_disk_bytes: int = Field(
        0, ge=0, description="Budget in bytes of saved state on disk, beside the journal; 0 = none."
    )
    session_gap_s: float = Field(60, ge=0, description="Seconds for which a session counts as live after a turn ended.")
    session_idle_s: float = Field(900, gt=0, description="Seconds after which an idle session's books are closed.")
    auto_pool_min_tokens: int = Field(
        256, ge=0, description="In auto mode, shared prefixes of so many tokens become automatic pools; 0 = off."
    )
    tps_window_tokens: int = Field(
        128, ge=1, description="EWMA window of tokens per second, in tokens (or tps_window_ms, whichever is first)."
    )
    tps_window_ms: int = Field(2000, ge=1, description="EWMA window of tokens per second, in milliseconds.")
    pin_max_fraction: float = Field(0.5, ge=0, le=1, description="Pinned cells at most this share of the cache.")
    default_target_tps: float | None = Field(
        None,
        gt=0,
        le=MAX_TPS,
        allow_inf_nan=False,
        description="Floor in tokens per second per session of pools without a policy; none = no gate.",
    )
    default_mode: Literal["advisory", "enforced"] | None = Field(
        None, description="Admission mode of pools without a policy of their own; needs default_target_tps."
    )
    metrics_aliases: Literal["vllm"] | None = Field(
        None, description="Gauges of /metrics also under the names that another server gives them; none = ours only."
    )
    rewrite_tool_choice: bool = Field(True, description="A named tool_choice reaches the engine as 'required'.")
    normalise: Annotated[tuple[Literal["billing", "date"], ...], NoDecode] = Field(
        (),
        description="Lines of system prompts that are pinned to what came first, comma-separated: billing, date; "
        "none = nothing is rewritten.",
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, description="Larger bodies in bytes on the routes that are parsed get 413."
    )
    client_head_s: float = Field(
        10, gt=0, allow_inf_nan=False, description="Seconds a client may take for the head of a request."
    )
    client_body_idle_s: float = Field(
        30, gt=0, allow_inf_nan=False, description="Seconds without a byte of a body after which it is a 408."
    )
    client_stall_s: float = Field(
        60, gt=0, allow_inf_nan=False, description="Seconds a client may take nothing of its reply before it is cut."
    )

    @field_validator("host", mode="before")
    @classmethod
    def _tidy_hosts(cls, value: Any) -> Any:
        """One comma-separated string (environment, flag) or a list (TOML); spaces, gaps and repetitions go."""
        if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
            value = ",".join(value)
        if not isinstance(value, str):
            return value
        hosts = dict.fromkeys(part.strip() for part in value.split(",") if part.strip())
        if not hosts:
            raise ValueError("needs at least one address")
        for host in hosts:
            if host.endswith(".sock"):
                raise ValueError(f"{host}: the proxy listens on IP addresses, not on UNIX sockets")
        return ",".join(hosts)

    @field_validator("api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        """Keys come as one comma-separated string (environment, flag) or as a list (TOML)."""
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        if value is None:
            return ()
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("normalise", mode="before")
    @classmethod
    def _split_kinds(cls, value: Any) -> Any:
        """One comma-separated string (environment, flag) or a list (TOML); repetitions go."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) else value

    @field_validator(
        *("upstream_api_key", "admin_key", "state", "default_target_tps", "default_mode", "metrics_aliases"),
        mode="before",
    )
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        """An empty environment variable means that nothing was set."""
        return None if isinstance(value, str) and not value.strip() else value

    @field_validator("upstream_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        parts = urlsplit(value)
        try:
            port_ok = parts.port is None or parts.port > 0
        except ValueError:
            port_ok = False
        if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok or parts.query or parts.fragment:
            raise ValueError("must be like http://127.0.0.1:8080")
        return value.rstrip("/")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses of ``host``, at least one."""
        return tuple(self.host.split(","))

    @property
    def data_keys(self) -> tuple[str, ...]:
        return tuple(k.get_secret_value() for k in self.api_key)

    @property
    def state_path(self) -> str:
        """Where the journal lives, with the default filled in; ``:memory:`` stays."""
        if self.state is not None:
            return self.state if self.state == MEMORY_STATE else str(Path(self.state).expanduser())
        parts = urlsplit(self.upstream_url)
        name = f"{parts.hostname}_{parts.port or {'http': 80, 'https': 443}[parts.scheme]}"
        return str(Path.home() / ".local" / "state" / "polykv" / f"{name.replace(':', '_')}.db")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags first, then the environment, then the file (which travels in the init values, see load_settings)."""
        given = dict(init_settings())
        from_file: Mapping[str, Any] = given.pop(_FILE, {})
        return (
            InitSettingsSource(settings_cls, given),
            env_settings,
            InitSettingsSource(settings_cls, dict(from_file)),
        )


READ_ELSEWHERE = {
    *("URL", "BASE_URL", "ENGINE", "CACHE", "CMAKE_ARGS"),  # commands, SDK, build of the engine
    *("BUILD_IMAGE", "RUN_IMAGE", "PUBLISH", "MODELS", "MODEL"),  # these and the next: compose.yaml
    *("ENGINE_PORT", "PARALLEL", "CTX", "BATCH", "MAX_POOLS", "SAVE_RAM_MIB", "SAVE_DISK_MIB"),
    *("TEST_ENGINE", "TEST_STOCK", "TEST_SEED"),
}
"""Variables that are no settings of the proxy, without ``POLYKV_``."""

_ALIKE = 0.4
"""Of names that are shortened as well as misspelt: WRAM and WARM_RAM_BYTES are 0.44."""


def unread_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables named like settings that nothing reads → a line about each, without its value.

    Empty ones do not count: nothing was set.
    """
    lines = {}
    settings = [name.upper() for name in Settings.model_fields]
    for variable, value in sorted(environment.items()):
        name = variable.upper().removeprefix(ENV_PREFIX)
        if not value or name == variable.upper() or name in READ_ELSEWHERE or name in settings:
            continue
        nearest = difflib.get_close_matches(name, settings, n=1, cutoff=_ALIKE)
        hint = f"did you mean {ENV_PREFIX}{nearest[0]}?" if nearest else "see the settings in docs/api.md"
        lines[variable] = f"{variable} is in the environment, and there is no such setting: {hint}"
    return lines


_FILE = "_polykv_file"
_FLAGS = {"upstream_url": "--upstream"}
"""Flags that are not called like their setting."""


def load_settings(config_file: Path | str | None = None, **overrides: Any) -> Settings:
    """Read all sources in their order. An override of None counts as not given.

    Raises:  ConfigError
    """
    from_file = _read_file(Path(config_file)) if config_file is not None else {}
    flags = {k: v for k, v in overrides.items() if v is not None}
    values: dict[str, Any] = flags | {_FILE: from_file}
    try:
        return Settings(**values)
    except ValidationError as e:
        raise ConfigError(_one_line(e, flags, from_file)) from e


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}") from e


def _one_line(error: ValidationError, flags: Mapping[str, Any], from_file: Mapping[str, Any]) -> str:
    parts = []
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0]) if item["loc"] else "settings"
        if name in flags:
            where = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        elif name in from_file:
            where = f"{name} (config file)"
        else:
            where = ENV_PREFIX + name.upper()
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "no such setting"
        elif name.endswith("_bytes") and item["type"].startswith("int_"):
            message = "is a whole number of bytes, like 1073741824 for 1 GiB"
        shown = "" if "key" in name or item["type"] == "extra_forbidden" else f" (got {item['input']!r})"
        parts.append(f"{where}: {message}{shown}")
    return "; ".join(parts)
