"""Tiny models with random f32 weights, written with the `gguf` package: one per kind of memory llama.cpp has.

dense     llama arch: every layer keeps every cell
sliding   gemma3 arch: five of six layers see the last 64 tokens only
hybrid    lfm2 arch: four short-convolution layers (recurrent state) and two attention layers
recurrent mamba arch: one state and no cells at all

The text they write is noise, and that is their use: in f32, with an attention made sharp on purpose, greedy decoding
repeats itself exactly and reacts to every token of the prefix. The vocabulary and the chat template are copied from
the tests' chat model, so all routes of llama-server work on them. About 30 MB each, made in a second, kept per user.

Every tensor is drawn from a generator seeded with the model's and the tensor's name, so the files are the same on every
machine and a new tensor changes no other. Raise VERSION whenever the bytes of a file change.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from polykv_proxy.engine.paths import cache_dir

VERSION = 1

N_CTX_TRAIN = 8192
N_EMBD = 128
N_FF = 256
N_HEAD = 4
N_HEAD_KV = 2
HEAD_DIM = N_EMBD // N_HEAD
SLIDING_WINDOW = 64

Weights = npt.NDArray[np.float32]
Tensors = Iterator[tuple[str, Weights]]


@dataclass(frozen=True)
class TinyModel:
    """One kind of model: the architecture's name, its own metadata and its layers."""

    name: str
    arch: str
    n_layer: int
    describe: Callable[[gguf.GGUFWriter], None]
    layer: Callable[["Draw", int], Tensors]
    final_norm: str


class Draw:
    """Draws the weights of one model, each tensor from its own seed."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> tuple[str, Weights]:
        """Rows of norm ``gain``: a normalised input gives outputs of about that size."""
        rng = np.random.default_rng(zlib.crc32(f"{self.model_name}/{name}".encode()))
        scale = np.float32(gain / np.sqrt(n_in))
        return name, rng.standard_normal((n_out, n_in), dtype=np.float32) * scale

    def norm(self, name: str, n: int, gain: float = 1.0) -> tuple[str, Weights]:
        return name, np.full(n, gain, np.float32)

    def feed_forward(self, blk: str) -> Tensors:
        yield self.norm(f"{blk}.ffn_norm.weight", N_EMBD)
        yield self.matrix(f"{blk}.ffn_gate.weight", N_FF, N_EMBD)
        yield self.matrix(f"{blk}.ffn_up.weight", N_FF, N_EMBD)
        yield self.matrix(f"{blk}.ffn_down.weight", N_EMBD, N_FF)

    def attention(self, blk: str, gain: float) -> Tensors:
        """``gain`` of queries and keys sets how far the softmax is from a plain mean over the prefix."""
        yield self.norm(f"{blk}.attn_norm.weight", N_EMBD)
        yield self.matrix(f"{blk}.attn_q.weight", N_EMBD, N_EMBD, gain)
        yield self.matrix(f"{blk}.attn_k.weight", N_HEAD_KV * HEAD_DIM, N_EMBD, gain)
        yield self.matrix(f"{blk}.attn_v.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
        yield self.matrix(f"{blk}.attn_output.weight", N_EMBD, N_EMBD)

    def query_key_norms(self, blk: str) -> Tensors:
        yield self.norm(f"{blk}.attn_q_norm.weight", HEAD_DIM, gain=2)
        yield self.norm(f"{blk}.attn_k_norm.weight", HEAD_DIM, gain=2)


# Dense -------------------------------------------------------------------------------------------------------------


def _describe_dense(writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)


def _dense_layer(draw: Draw, i: int) -> Tensors:
    blk = f"blk.{i}"
    yield from draw.attention(blk, gain=1.5)
    yield from draw.feed_forward(blk)


# Sliding window ----------------------------------------------------------------------------------------------------


def _describe_sliding(writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(SLIDING_WINDOW)


def _sliding_layer(draw: Draw, i: int) -> Tensors:
    """Gemma multiplies embeddings by sqrt(N_EMBD); the norms after the two halves of a layer must keep up with that, or
    the model repeats its last token whatever the prefix says."""
    blk = f"blk.{i}"
    yield from draw.attention(blk, gain=2)
    yield from draw.query_key_norms(blk)
    yield draw.norm(f"{blk}.post_attention_norm.weight", N_EMBD, gain=2)
    yield from draw.feed_forward(blk)
    yield draw.norm(f"{blk}.post_ffw_norm.weight", N_EMBD, gain=2)


# Hybrid ------------------------------------------------------------------------------------------------------------

ATTENTION_LAYERS = (2, 4)
CONV_WIDTH = 3


def _describe_hybrid(writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv([N_HEAD_KV if i in ATTENTION_LAYERS else 0 for i in range(6)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_shortconv_l_cache(CONV_WIDTH)


def _hybrid_layer(draw: Draw, i: int) -> Tensors:
    blk = f"blk.{i}"
    if i in ATTENTION_LAYERS:
        yield from draw.attention(blk, gain=2)
        yield from draw.query_key_norms(blk)
    else:
        yield draw.norm(f"{blk}.attn_norm.weight", N_EMBD)
        yield draw.matrix(f"{blk}.shortconv.conv.weight", N_EMBD, CONV_WIDTH)
        yield draw.matrix(f"{blk}.shortconv.in_proj.weight", 3 * N_EMBD, N_EMBD)
        yield draw.matrix(f"{blk}.shortconv.out_proj.weight", N_EMBD, N_EMBD)
    yield from draw.feed_forward(blk)


# Recurrent ---------------------------------------------------------------------------------------------------------

SSM_INNER = 2 * N_EMBD
SSM_STATE = 16
SSM_CONV = 4
SSM_DT_RANK = 8


def _describe_recurrent(writer: gguf.GGUFWriter) -> None:
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(SSM_CONV)
    writer.add_ssm_inner_size(SSM_INNER)
    writer.add_ssm_state_size(SSM_STATE)
    writer.add_ssm_time_step_rank(SSM_DT_RANK)


def _recurrent_layer(draw: Draw, i: int) -> Tensors:
    """Time steps of about 0.01 and decays from 0.05 to 1: what was read a thousand tokens ago is still in the state."""
    blk = f"blk.{i}"
    yield draw.norm(f"{blk}.attn_norm.weight", N_EMBD)
    yield draw.matrix(f"{blk}.ssm_in.weight", 2 * SSM_INNER, N_EMBD, gain=2)
    yield draw.matrix(f"{blk}.ssm_conv1d.weight", SSM_INNER, SSM_CONV, gain=2)
    yield f"{blk}.ssm_conv1d.bias", np.zeros(SSM_INNER, np.float32)
    yield draw.matrix(f"{blk}.ssm_x.weight", SSM_DT_RANK + 2 * SSM_STATE, SSM_INNER, gain=4)
    yield draw.matrix(f"{blk}.ssm_dt.weight", SSM_INNER, SSM_DT_RANK)
    yield f"{blk}.ssm_dt.bias", np.full(SSM_INNER, -4.6, np.float32)  # softplus of it is 0.01
    yield f"{blk}.ssm_a", -np.tile(np.linspace(0.05, 1, SSM_STATE, dtype=np.float32), (SSM_INNER, 1))
    yield f"{blk}.ssm_d", np.ones(SSM_INNER, np.float32)
    yield draw.matrix(f"{blk}.ssm_out.weight", N_EMBD, SSM_INNER, gain=2)


# Files -------------------------------------------------------------------------------------------------------------

TINY_MODELS = {
    model.name: model
    for model in (
        TinyModel("dense", "llama", 4, _describe_dense, _dense_layer, "output_norm.weight"),
        TinyModel("sliding", "gemma3", 6, _describe_sliding, _sliding_layer, "output_norm.weight"),
        TinyModel("hybrid", "lfm2", 6, _describe_hybrid, _hybrid_layer, "token_embd_norm.weight"),
        TinyModel("recurrent", "mamba", 4, _describe_recurrent, _recurrent_layer, "output_norm.weight"),
    )
}


def tiny_model_path(name: str, vocabulary_of: Path) -> Path:
    """Return the file of a tiny model, writing it first if this user has none of this VERSION."""
    path = cache_dir() / "tiny-models" / f"v{VERSION}" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        write_tiny_model(TINY_MODELS[name], vocabulary_of, unfinished)
        unfinished.replace(path)
    return path


def write_tiny_model(model: TinyModel, vocabulary_of: Path, path: Path) -> None:
    source = gguf.GGUFReader(vocabulary_of)
    n_vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(path, model.arch)
    _copy_tokenizer(source, writer)
    writer.add_name(f"polykv tiny {model.name} v{VERSION}")
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(model.n_layer)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_vocab_size(n_vocab)
    model.describe(writer)
    for name, weights in _tensors(model, n_vocab):
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_lora(path: Path, rank: int = 4) -> None:
    """An adapter for the dense model that changes what it reads and writes in every layer."""
    draw = Draw("lora")
    writer = gguf.GGUFWriter(path, TINY_MODELS["dense"].arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, rank)
    for i in range(TINY_MODELS["dense"].n_layer):
        for part, n_out in (("attn_k", N_HEAD_KV * HEAD_DIM), ("attn_v", N_HEAD_KV * HEAD_DIM)):
            name = f"blk.{i}.{part}.weight"
            writer.add_tensor(*draw.matrix(f"{name}.lora_a", rank, N_EMBD))
            writer.add_tensor(*draw.matrix(f"{name}.lora_b", n_out, rank))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: TinyModel, n_vocab: int) -> Tensors:
    draw = Draw(model.name)
    # The embedding is the output matrix too. Its gain sets the spread of the logits: peaked enough that two tokens
    # are never within rounding of each other, flat enough that a distribution has many tokens to compare.
    yield draw.matrix("token_embd.weight", n_vocab, N_EMBD, gain=4)
    yield draw.norm(model.final_norm, N_EMBD)
    for i in range(model.n_layer):
        yield from model.layer(draw, i)


def _copy_tokenizer(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            value: Any = field.contents()
            item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, field.types[0], item_type)


# Vision ------------------------------------------------------------------------------------------------------------

VISION_N_EMBD = 64
VISION_N_FF = 128
VISION_N_LAYER = 2
IMAGE_SIZE, PATCH_SIZE = 56, 14
IMAGE_N_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2


def write_tiny_projector(path: Path) -> None:
    """A LLaVA-style vision encoder and projector for any of the tiny models: every image becomes IMAGE_N_TOKENS tokens.

    The encoder leaves its last layer out, as LLaVA's does. The projector's gain gives an image embeddings of about the
    size of a token's: neither then drowns in the other.
    """
    draw = Draw("projector")
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(IMAGE_SIZE)
    writer.add_vision_patch_size(PATCH_SIZE)
    writer.add_vision_embedding_length(VISION_N_EMBD)
    writer.add_vision_feed_forward_length(VISION_N_FF)
    writer.add_vision_block_count(VISION_N_LAYER)
    writer.add_vision_head_count(N_HEAD)
    writer.add_vision_projection_dim(N_EMBD)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    for name, weights in _vision_tensors(draw):
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vision_tensors(draw: Draw) -> Tensors:
    n = VISION_N_EMBD
    name, flat = draw.matrix("v.patch_embd.weight", n, 3 * PATCH_SIZE**2)
    yield name, flat.reshape(n, 3, PATCH_SIZE, PATCH_SIZE)
    yield draw.matrix("v.position_embd.weight", IMAGE_N_TOKENS, n)
    for i in range(VISION_N_LAYER):
        blk = f"v.blk.{i}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield draw.matrix(f"{blk}.{part}.weight", n, n)
        for part in ("ln1", "ln2"):
            yield draw.norm(f"{blk}.{part}.weight", n)
            yield f"{blk}.{part}.bias", np.zeros(n, np.float32)
        yield draw.matrix(f"{blk}.ffn_up.weight", VISION_N_FF, n)
        yield draw.matrix(f"{blk}.ffn_down.weight", n, VISION_N_FF)
    yield draw.norm("v.post_ln.weight", n)
    yield "v.post_ln.bias", np.zeros(n, np.float32)
    yield draw.matrix("mm.0.weight", n, n)
    yield "mm.0.bias", np.zeros(n, np.float32)
    yield draw.matrix("mm.2.weight", N_EMBD, n, gain=0.5)
    yield "mm.2.bias", np.zeros(N_EMBD, np.float32)
