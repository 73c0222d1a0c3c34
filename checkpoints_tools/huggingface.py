"""The weights of a Hugging Face directory, one at a time.

`open_checkpoint` reads configuration and headers only and reports everything that does not fit
together; `Checkpoint.weights` then reads one tensor after the other, so that a model need not fit
into memory. Left out on purpose: pickled weights (`pytorch_model.bin`) and weights that are
quantized already.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints_tools.huggingface_config import read_config
from specjax.config import ModelConfig
from specjax.weight_names import HEAD, weight_shapes

__all__ = ["Checkpoint", "open_checkpoint", "read_config"]

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
HARMLESS = ".rotary_emb.inv_freq"  # a table that old versions saved; it is computed
ROWS_AT_ONCE = 4096
OUTER_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    HEAD: HEAD,
}
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as its file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A directory whose headers agree with its configuration.

    tensors: by the library's own names (`specjax.weight_names`).
    """

    config: ModelConfig
    tensors: Mapping[str, Tensor]

    def weights(self) -> Iterator[tuple[str, jax.Array]]:
        """Name and array of every tensor, in the file's dtype.

        Raises ValueError on values that are not finite.
        """
        for name, tensor in self.tensors.items():
            yield name, _read(name, tensor.file)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads configuration and headers of a directory and checks them against each other.

    Args:
      path: a directory with config.json and model.safetensors, or shards and their index.

    Returns:
      The checkpoint, of which no weight has been read yet.

    Raises:
      FileNotFoundError: the directory, config.json or a shard is missing.
      ValueError: an unsupported model, a damaged file, or a tensor that is missing, has another
        shape than the configuration says or is not known.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    if not (directory / "config.json").exists() and not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"{directory} is no checkpoint: it has neither config.json nor *.safetensors"
        )
    config = read_config(directory)
    found = _read_headers(_shard_files(directory))
    _check_names(found, config, directory)
    tensors = {ours: found[theirs] for ours, theirs in _names(config).items()}
    _check_tensors(tensors, config)
    if config.tie_word_embeddings and HEAD in found:
        _check_tied(found, directory)
    return Checkpoint(config, tensors)


def _names(config: ModelConfig) -> dict[str, str]:
    """Hugging Face's name for each of the library's."""
    return {name: their_name(name) for name in weight_shapes(config)}


def their_name(name: str) -> str:
    """Hugging Face's name for one of the library's (`specjax.weight_names`)."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, index, layer, *kind = name.split(".")
    return ".".join(["model.layers", index, LAYER_NAMES[layer], *kind])


def _shard_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise FileNotFoundError(
            f"{directory} has neither {single.name} nor {index.name}; "
            "of Hugging Face's formats only safetensors is read"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no valid index of shards: {error}") from error
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{index} names the shard {name}, which does not exist")
    return [directory / name for name in names]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged: {error}") from error


def _read_headers(files: Iterable[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in files:
        with _open(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                header = shard.get_slice(name)
                found[name] = Tensor(file, header.get_dtype(), tuple(header.get_shape()))
    return found


def _check_names(found: Mapping[str, Tensor], config: ModelConfig, directory: Path) -> None:
    expected = set(_names(config).values())
    missing = sorted(expected - set(found))
    if missing:
        raise ValueError(f"{directory} lacks {_listed(missing)}")
    known = expected | ({HEAD} if config.tie_word_embeddings else set())
    extra = sorted(name for name in set(found) - known if not name.endswith(HARMLESS))
    if extra:
        raise ValueError(
            f"{directory} has {_listed(extra)}, which a {config.model_type} model with this "
            "config.json does not have"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the tensor {names[0]}{more}"


def _check_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    for name, shape in weight_shapes(config).items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ValueError(
                f"the tensor {their_name(name)} in {tensor.file} has shape {tensor.shape}, "
                f"but config.json says {shape}"
            )
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(
                f"the tensor {their_name(name)} in {tensor.file} has dtype {tensor.dtype}; "
                f"supported: {', '.join(ITEM_BYTES)}"
            )


def _check_tied(found: Mapping[str, Tensor], directory: Path) -> None:
    """A tied model may repeat its embedding as lm_head.weight, but not have another head."""
    pair = found[OUTER_NAMES["embedding"]], found[HEAD]
    same = pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype
    if not (same and _equal(*pair)):
        raise ValueError(
            f"config.json of {directory} says tie_word_embeddings, but {HEAD} differs from "
            f"{OUTER_NAMES['embedding']}; set tie_word_embeddings to false or remove the tensor"
        )


def _equal(embedding: Tensor, head: Tensor) -> bool:
    with _open(embedding.file) as one, _open(head.file) as other:
        left, right = one.get_slice(OUTER_NAMES["embedding"]), other.get_slice(HEAD)
        rows = embedding.shape[0]
        starts = range(0, rows, ROWS_AT_ONCE)
        parts = [slice(start, min(start + ROWS_AT_ONCE, rows)) for start in starts]
        return all(np.array_equal(left[part], right[part]) for part in parts)


def _read(name: str, file: Path) -> jax.Array:
    # The file is opened for each tensor anew, because what has been read of a mapped file counts as
    # this process's memory until it is closed.
    with _open(file) as shard:
        array = jnp.asarray(shard.get_tensor(their_name(name)))
    if not _all_finite(array):
        raise ValueError(f"the tensor {their_name(name)} in {file} holds NaN or infinity")
    return array


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()
