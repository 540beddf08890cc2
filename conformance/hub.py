"""A model hub on the disk: every repository that llama.cpp's tests name, in the layout of the cache they download into.

All are tiny models with random weights (``tests.engine.tiny_models``). The words they write are not those that some
tests look for: such a test fails in front of a stock server, too, and says nothing. A model that writes English makes
no more of them pass.
"""

import base64
import itertools
from collections.abc import Callable
from pathlib import Path

import gguf

from tests.engine.binaries import chat_model_path
from tests.engine.pictures import picture
from tests.engine.tiny_models import (
    TINY_MODELS,
    Draw,
    Tensors,
    TinyModel,
    write_tiny_lora,
    write_tiny_model,
    write_tiny_projector,
)

COMMIT = "0" * 40
N_EMBD = 128
LABELS = ("yes", "no")
# Control tokens of the chat model's vocabulary that nothing else uses.
FILL_IN = {"pre": 7, "suf": 8, "mid": 9}


def _describe_embedding(writer: gguf.GGUFWriter) -> None:
    TINY_MODELS["dense"].describe(writer)
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def _describe_infill(writer: gguf.GGUFWriter) -> None:
    TINY_MODELS["dense"].describe(writer)
    for part, token in FILL_IN.items():
        writer.add_uint32(f"tokenizer.ggml.fim_{part}_token_id", token)


def _describe_reranker(writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(LABELS)


def _reranker_layer(draw: Draw, i: int) -> Tensors:
    blk = f"blk.{i}"
    yield from draw.attention(blk, gain=1.5)
    yield from draw.query_key_norms(blk)
    yield from draw.feed_forward(blk)
    if i == 0:
        yield draw.matrix("cls.output.weight", len(LABELS), N_EMBD)


DENSE = TINY_MODELS["dense"]
EMBEDDING = TinyModel("embedding", "llama", DENSE.n_layer, _describe_embedding, DENSE.layer, DENSE.final_norm)
INFILL = TinyModel("infill", "llama", DENSE.n_layer, _describe_infill, DENSE.layer, DENSE.final_norm)
RERANKER = TinyModel("reranker", "qwen3", 4, _describe_reranker, _reranker_layer, DENSE.final_norm)

REPOSITORIES: dict[str, dict[str, TinyModel | Callable[[Path], object]]] = {
    "ggml-org/test-model-stories260K": {"stories260K-f32.gguf": DENSE},
    "ggml-org/test-model-stories260K-infill": {"stories260K-infill-f32.gguf": INFILL},
    "ggml-org/models": {
        "bert-bge-small/ggml-model-f16.gguf": EMBEDDING,
        "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": RERANKER,
    },
    "ggml-org/stories15M_MOE": {"stories15M_MOE-F16.gguf": DENSE},
    "ggml-org/tinygemma3-GGUF": {"tinygemma3-Q8_0.gguf": DENSE, "mmproj-tinygemma3-Q8_0.gguf": write_tiny_projector},
}
# What the tests download by address, by the last part of it.
DOWNLOADS: dict[str, TinyModel | Callable[[Path], object]] = {
    "moe_shakespeare15M.gguf": write_tiny_lora,
    "stories15M-q4_0.gguf": DENSE,
    "11_truck.png": lambda path: write_picture(path, 11),
    "91_cat.png": lambda path: write_picture(path, 91),
}


def write_picture(path: Path, seed: int) -> None:
    path.write_bytes(base64.b64decode(picture(seed).partition(",")[2]))


def write_hub(folder: Path) -> None:
    """Make ``folder/hub`` (``LLAMA_CACHE`` of the servers) and ``folder/downloads``."""
    vocabulary = chat_model_path()
    numbers = itertools.count()
    written: dict[int, Path] = {}

    def put(what: TinyModel | Callable[[Path], object], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if id(what) not in written:
            written[id(what)] = folder / str(next(numbers))
            if isinstance(what, TinyModel):
                write_tiny_model(what, vocabulary, written[id(what)])
            else:
                what(written[id(what)])
        target.symlink_to(written[id(what)])

    for repository, files in REPOSITORIES.items():
        cached = folder / "hub" / f"models--{repository.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(COMMIT)
        for name, what in files.items():
            put(what, cached / "snapshots" / COMMIT / name)
    for name, made in DOWNLOADS.items():
        put(made, folder / "downloads" / name)
