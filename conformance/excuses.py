"""What may fail, by name and with its reason. An excuse is for what differs by design; anything else is a fault."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from conformance.suite import Outcome


@dataclass(frozen=True)
class Excuse:
    """Why a test may fail, and the failed assertion it is for: no other failure of that test is excused."""

    assertion: str
    reason: str


FULL_CACHE = Excuse(
    'assert res.body["timings"]["predicted_n"] == n_predict',
    "its requests outgrow a unified cache: llama-server fails all of them, and the test takes no answer that is cut "
    "short; with pools one is cut short (truncated) and the others finish",
)
OWN_METRICS = Excuse(
    "assert res.status_code == 501  # ERROR_TYPE_NOT_SUPPORTED",
    "`/metrics` of a server without `--metrics` is 501; the proxy's own are there all the same",
)
_OF_POOLS = {
    f"test_completion::test_completion_unified[256-4-n_predict_vals{case}-expected_success{case}]": FULL_CACHE
    for case in (1, 2)
}
_OF_PROXY = {"test_metrics::test_metrics_disabled": OWN_METRICS}
EXCUSED: dict[str, dict[str, Excuse]] = {
    "patched": _OF_POOLS,
    "proxy": _OF_POOLS | _OF_PROXY,
    "proxy-stock": _OF_PROXY,
}


ELSEWHERE: dict[str, str] = {
    "test_proxy::test_mcp_proxy": "fetches a page from the internet",
    "test_vision_api::test_vision_chat_completion*": "has the server fetch a picture from the hub, or looks for the "
    "words of the model that it downloads",
    "test_chat_completion::test_chat_template": "expects the first token of the model that it downloads",
    "test_completion::test_completion_response_fields*": "expects the first token of the model that it downloads",
    "test_completion::test_completion_prompt_cache": "counts the tokens of the model that it downloads",
    "test_completion::test_n_probs_post_sampling": "needs a model that writes whole characters",
    "test_rerank::test_rerank*": "expects the ranking, or counts the tokens, of the model that it downloads",
    "test_embedding::test_embedding_mixed_input*": "needs a model that puts tokens of its own around an empty text",
    "test_embedding::test_embedding_error_prompt_too_long": "needs a model whose context is longer than its batch",
    "test_basic::test_load_split_model": "needs a model in several files",
    "test_basic::test_no_ui": "needs the web page built into the binary, which our builds leave out",
    "test_security::test_access_static_assets_without_api_key": "needs the web page built into the binary, which our "
    "builds leave out",
    "test_router::test_router_download_model": "downloads a model from the hub",
    "test_router::test_router_remote_preset": "reads a list of models from the hub",
    "test_openai::test_the_clients_helper_for_responses": "the client's helper needs `output_index` and "
    "`content_index`, which llama-server's events do not have",
}
"""Why a test cannot pass in front of stock without the models and the network, by the pattern of its name."""

_WORDS = "looks for the words of the model that it downloads"
_RULES = (
    (r"NameResolutionError|Failed to resolve|Name or service not known|Max retries", "needs the internet"),
    (r"match_regex|re_content|expected_result", _WORDS),
    (r"^(AssertionError: )?assert \d+ (==|>|<|!=) \(?\d+", "counts the tokens of the model that it downloads"),
)


def why_not(name: str, outcome: Outcome) -> str:
    """Why this test does not pass in front of stock here."""
    for pattern, reason in ELSEWHERE.items():
        if fnmatchcase(name, pattern):
            return reason
    if outcome.how == "skipped":
        return f"skipped: {outcome.said.partition(': Command')[0]}"
    for pattern, reason in _RULES:
        if re.search(pattern, outcome.error) or re.search(pattern, outcome.assertion):
            return reason
    return f"`{outcome.assertion}` does not hold ({outcome.error})"
