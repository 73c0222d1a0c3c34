"""A model in a GGUF file: its configuration, and its weights one at a time."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_tools.gguf.blocks import EXACT, HELD_AS, to_weight
from checkpoints_tools.gguf.header import GgufTensor, Header, read_headers
from checkpoints_tools.gguf.metadata import model_config
from checkpoints_tools.lazy_checkpoint import LazyCheckpoint
from checkpoints_tools.prequantized.mxfp4 import NAN
from pallas_kernels.formats import Mxfp4Weight, Quantized
from specjax.model.config import ModelConfig
from specjax.model.weight_names import HEAD, weight_shapes

if TYPE_CHECKING:
    import gguf

OUTER_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    HEAD: "output.weight",
}
LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
ROPE_FREQUENCIES = "rope_freqs.weight"  # the divisors of Llama 3.1's frequencies


@dataclasses.dataclass(frozen=True)
class GgufWeight:
    """A weight that has not been read.

    pairs: a number of heads, if the rows of each head are stored in pairs (2i, 2i + 1) where the
        library keeps halves (i, i + E / 2); None if they are stored in their order.
    """

    tensor: GgufTensor
    header: Header
    kind: gguf.GGMLQuantizationType
    row_bytes: int
    pairs: int | None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.row_bytes * (self.tensor.shape[0] if len(self.tensor.shape) == 2 else 1)

    def weight(self) -> jax.Array | Quantized:
        """Its values. Raises ValueError if they are not finite."""
        raw = self.header.raw(self.tensor.offset, self.nbytes)
        if len(self.tensor.shape) == 2:
            raw = raw.reshape(self.tensor.shape[0], self.row_bytes)
        found = to_weight(raw, self.kind, self.row_bytes)
        if not _is_finite(found):
            raise ValueError(
                f"the tensor {self.tensor.name} in {self.tensor.file} holds NaN or infinity"
            )
        return found if self.pairs is None else _halves(found, self.pairs)


def _is_finite(weight: jax.Array | Quantized) -> bool:
    if isinstance(weight, Mxfp4Weight):
        return not (np.asarray(weight.scales) == NAN).any()
    floats = (x for x in jax.tree.leaves(weight) if jnp.issubdtype(x.dtype, jnp.floating))
    return all(np.isfinite(x).all() for x in floats)


def open_gguf(file: Path) -> LazyCheckpoint:
    """Reads the header of a GGUF file and checks it against the model that it describes.

    Args:
      file: the file, or the first part of a split model.

    Returns:
      The model. No matrix has been read yet.

    Raises:
      FileNotFoundError: the file or a part of it is missing.
      ValueError: a file is damaged, or the model or a weight's format is not supported.
    """
    headers = read_headers(file)
    found = {name: (tensor, each) for each in headers for name, tensor in each.tensors.items()}
    if len(found) < sum(len(each.tensors) for each in headers):
        raise ValueError(f"{file}: two parts hold the same tensor")
    config = model_config(headers[0], found.keys(), _frequency_factors(found))
    expected = {their_name(name): name for name in weight_shapes(config)}
    _check_names(expected, found, config, file)
    shapes = weight_shapes(config)
    weights = {
        ours: _unread(*found[theirs], shapes[ours], _heads(headers[0], ours, config))
        for theirs, ours in expected.items()
    }
    _warn_of_rounding(weights.values(), config, file)
    return LazyCheckpoint(config, weights)


def held_as(model: LazyCheckpoint) -> str:
    """The format in which the first matrix of a GGUF file's model is held, as "int4"; "plain" where
    it is an array."""
    first = model.tensors["layers.0.q.weight"]
    assert isinstance(first, GgufWeight)
    return HELD_AS.get(first.kind.name, "plain")


def their_name(name: str) -> str:
    """GGUF's name for one of the library's (`specjax.model.weight_names`)."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, index, layer, *kind = name.split(".")
    return ".".join(["blk", index, LAYER_NAMES[layer], *kind])


def _heads(header: Header, name: str, config: ModelConfig) -> int | None:
    """The number of heads whose rows are in pairs, as in the llama architecture."""
    layer = name.split(".")[2] if name.startswith("layers.") else ""
    if header.get("general.architecture", str) != "llama" or layer not in ("q", "k"):
        return None
    return config.num_heads if layer == "q" else config.num_kv_heads


@partial(jax.jit, static_argnames="heads")
def _halves(weight: jax.Array | Quantized, heads: int) -> jax.Array | Quantized:
    """Puts the rows of every head into the library's order, in whatever format they are."""

    def reordered(leaf: jax.Array) -> jax.Array:
        parts = leaf.reshape(heads, -1, 2, *leaf.shape[1:])
        return parts.swapaxes(1, 2).reshape(leaf.shape)

    found: jax.Array | Quantized = jax.tree.map(reordered, weight)
    return found


def _check_names(
    expected: Mapping[str, str],
    found: Mapping[str, object],
    config: ModelConfig,
    file: Path,
) -> None:
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys() - {ROPE_FREQUENCIES})
    for names, verb in ((missing, "lacks"), (extra, "has")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            what = "" if verb == "lacks" else f", which a {config.model_type} model does not have"
            raise ValueError(f"{file} {verb} the tensor {names[0]}{more}{what}")


def _unread(
    tensor: GgufTensor, header: Header, shape: tuple[int, ...], pairs: int | None
) -> GgufWeight:
    """The weight of a tensor. Raises ValueError unless its shape, type and place are right."""
    import gguf

    place = f"the tensor {tensor.name} in {tensor.file}"
    if tensor.shape != shape:
        raise ValueError(f"{place} has shape {tensor.shape}, but the metadata says {shape}")
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
    except ValueError:
        raise ValueError(f"{place} has the unknown type {tensor.kind}") from None
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"{place} has rows of {shape[-1]} weights, but blocks of {block}")
    weight = GgufWeight(tensor, header, kind, shape[-1] // block * size, pairs)
    if tensor.offset + weight.nbytes > header.size:
        raise ValueError(
            f"{tensor.file} is truncated: the tensor {tensor.name} ends at byte "
            f"{tensor.offset + weight.nbytes}, the file at {header.size}"
        )
    return weight


def _frequency_factors(
    found: Mapping[str, tuple[GgufTensor, Header]],
) -> np.ndarray | None:
    """The factors that divide the rotary frequencies, f32[E / 2], if the file has some."""
    if ROPE_FREQUENCIES not in found:
        return None
    tensor, header = found[ROPE_FREQUENCIES]
    if tensor.kind != 0 or len(tensor.shape) != 1:
        raise ValueError(f"{ROPE_FREQUENCIES} in {tensor.file} must be a vector of float32")
    return np.asarray(_unread(tensor, header, tensor.shape, None).weight())


def _warn_of_rounding(weights: Collection[GgufWeight], config: ModelConfig, file: Path) -> None:
    """Says which matrices a model in bfloat16 does not hold exactly."""
    matrices = (each.kind.name for each in weights if len(each.tensor.shape) == 2)
    kinds = Counter(kind for kind in matrices if kind not in {*EXACT, "BF16"})
    if kinds and config.dtype == "bfloat16":
        listed = ", ".join(f"{count} in {name}" for name, count in kinds.items())
        warnings.warn(
            f"{file}: a model in bfloat16 rounds these matrices: {listed}; "
            "dtype float32 holds them exactly",
            stacklevel=2,
        )
