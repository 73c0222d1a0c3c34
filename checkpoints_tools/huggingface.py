"""The weights of a Hugging Face directory, one at a time.

`open_checkpoint` reads only the configuration and the headers, and checks them against each other.
`LazyCheckpoint.weights` then reads one weight after another, so a model need not fit into memory.
Layers that are quantized already keep their format (`prequantized`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from checkpoints_tools.huggingface_config import read_config, read_quantization
from checkpoints_tools.lazy_checkpoint import LazyCheckpoint
from checkpoints_tools.prequantized import MAIN_PARTS, Layout, LayoutOf, Part
from checkpoints_tools.tensor_files import FLOATS, Tensor, equal, read_headers
from pallas_kernels.formats import Quantized
from specjax.model.config import ModelConfig
from specjax.model.weight_names import HEAD, is_block_matrix, weight_shapes

__all__ = ["open_checkpoint", "read_config", "their_name"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
HARMLESS = ".rotary_emb.inv_freq"  # a table that old versions saved; it can be computed
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
class PackedTensors:
    """The tensors of a linear layer that is quantized already.

    module: Hugging Face's name of the layer.
    shape: (N, K).
    parts: by their names in the module.
    """

    module: str
    shape: tuple[int, ...]
    layout: Layout
    parts: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    def weight(self) -> Quantized:
        """The weight that the tensors represent.

        Raises ValueError on scales that are not finite and on contradictions.
        """
        arrays = {part: tensor.read() for part, tensor in self.parts.items()}
        n, k = self.shape
        try:
            return self.layout.weight(arrays, n, k)
        except ValueError as error:
            file = self.parts[self.layout.main_part].file
            raise ValueError(f"{self.module} in {file}: {error}") from error


def open_checkpoint(path: str | os.PathLike[str]) -> LazyCheckpoint:
    """Reads the configuration and headers of a directory and checks them against each other.

    Args:
      path: a directory with config.json and model.safetensors, or shards and their index.

    Returns:
      The checkpoint. No weight has been read yet.

    Raises:
      FileNotFoundError: the directory, config.json or a shard is missing.
      ValueError: the model or its quantization is not supported, a file is damaged, or a tensor is
        missing, unknown, or of another shape than the configuration says.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    if not (directory / "config.json").exists() and not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"{directory} is not a checkpoint: it has neither config.json nor *.safetensors"
        )
    config, layout_of = read_config(directory), read_quantization(directory)
    found = read_headers(directory)
    _check_layers(config, found, directory)
    if _layout(HEAD, layout_of, found) is not None:  # a quantized head is never the embedding
        config = dataclasses.replace(config, tie_word_embeddings=False)
    expected = {
        name: _expect(name, shape, layout_of, found)
        for name, shape in weight_shapes(config).items()
    }
    _check_quantization(expected.values(), layout_of, found, directory)
    _check_names(expected.values(), found, config, directory)
    for weight in expected.values():
        _check_tensors(weight, found)
    if config.tie_word_embeddings and HEAD in found:
        _check_tied(found, directory)
    return LazyCheckpoint(config, {name: _source(w, found) for name, w in expected.items()})


def their_name(name: str) -> str:
    """Hugging Face's name for one of the library's (`specjax.model.weight_names`)."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, index, layer, *kind = name.split(".")
    return ".".join(["model.layers", index, LAYER_NAMES[layer], *kind])


@dataclasses.dataclass(frozen=True)
class _Expected:
    """A weight and the tensors that it must have.

    module: Hugging Face's name of the module that has the weight.
    shape: the weight's.
    layout: how it is quantized, None if it is not.
    parts: by Hugging Face's names.
    """

    module: str
    shape: tuple[int, ...]
    layout: Layout | None
    parts: Mapping[str, Part]


def _expect(
    name: str, shape: tuple[int, ...], layout_of: LayoutOf | None, found: Mapping[str, Tensor]
) -> _Expected:
    layout, module = _layout(name, layout_of, found), their_name(name).rpartition(".")[0]
    if layout is None:
        return _Expected(module, shape, None, {their_name(name): Part(shape, FLOATS)})
    n, k = shape
    parts = {f"{module}.{part}": what for part, what in layout.parts(n, k).items()}
    parts = {part: what for part, what in parts.items() if not what.optional or part in found}
    return _Expected(module, shape, layout, parts)


def _layout(name: str, layout_of: LayoutOf | None, found: Mapping[str, Tensor]) -> Layout | None:
    """How a linear layer is quantized, judged by its tensors; None if it is not."""
    if layout_of is None or not (is_block_matrix(name) or name == HEAD):
        return None
    module = their_name(name).removesuffix(".weight")
    layout = layout_of(module)
    if layout is None or f"{module}.{layout.main_part}" not in found:
        return None
    return layout


def _check_quantization(
    expected: Collection[_Expected],
    layout_of: LayoutOf | None,
    found: Mapping[str, Tensor],
    directory: Path,
) -> None:
    """Raises ValueError unless quantization_config and the tensors agree on what is quantized."""
    plain = [w for w in expected if w.layout is None and f"{w.module}.weight" in w.parts]
    packed = [f"{weight.module}.{part}" for weight in plain for part in MAIN_PARTS]
    for name in packed:
        if name in found:
            raise ValueError(
                f"config.json of {directory} has no quantization_config for the tensor {name}"
            )
    if layout_of is not None and all(weight.layout is None for weight in expected):
        raise ValueError(
            f"config.json of {directory} has a quantization_config, but no tensor is quantized"
        )


def _check_layers(config: ModelConfig, found: Mapping[str, Tensor], directory: Path) -> None:
    """Raises ValueError if config.json says more layers than the tensors have.

    This check comes before any work that takes time or memory for every layer.
    """
    matches = (_LAYER.match(name) for name in found)
    layers = {match[1] for match in matches if match}
    if len(layers) < config.num_layers:
        raise ValueError(
            f"config.json of {directory} says num_hidden_layers {config.num_layers}, "
            f"but there are tensors of {len(layers)} layers"
        )


def _check_names(
    expected: Collection[_Expected],
    found: Mapping[str, Tensor],
    config: ModelConfig,
    directory: Path,
) -> None:
    known = {part for weight in expected for part in weight.parts}
    missing = sorted(known - set(found))
    if missing:
        raise ValueError(f"{directory} lacks {_listed(missing)}")
    known |= {HEAD} if config.tie_word_embeddings else set()
    # AutoGPTQ gave every layer a bias, which is zero where the model has none.
    biases = {f"{weight.module}.bias" for weight in expected if weight.layout is not None}
    extra = sorted(
        name
        for name in set(found) - known
        if not name.endswith(HARMLESS) and not (name in biases and _is_zero(found[name]))
    )
    if extra:
        raise ValueError(
            f"{directory} has {_listed(extra)}, which a {config.model_type} model with this "
            "config.json does not have"
        )


def _is_zero(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS and not tensor.read().any()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the tensor {names[0]}{more}"


def _check_tensors(weight: _Expected, found: Mapping[str, Tensor]) -> None:
    stored_as = "" if weight.layout is None else f" ({weight.layout.description})"
    for name, part in weight.parts.items():
        tensor = found[name]
        if tensor.shape != part.shape:
            raise ValueError(
                f"the tensor {name} in {tensor.file} has shape {tensor.shape}, "
                f"but config.json says {part.shape}{stored_as}"
            )
        if tensor.dtype not in part.dtypes:
            raise ValueError(
                f"the tensor {name} in {tensor.file} has dtype {tensor.dtype}; "
                f"supported: {', '.join(part.dtypes)}{stored_as}"
            )


def _check_tied(found: Mapping[str, Tensor], directory: Path) -> None:
    """Raises ValueError if a tied model has a head that differs from its embedding."""
    if not equal(found[OUTER_NAMES["embedding"]], found[HEAD]):
        raise ValueError(
            f"config.json of {directory} says tie_word_embeddings, but {HEAD} differs from "
            f"{OUTER_NAMES['embedding']}; set tie_word_embeddings to false or remove the tensor"
        )


def _source(weight: _Expected, found: Mapping[str, Tensor]) -> Tensor | PackedTensors:
    if weight.layout is None:
        (name,) = weight.parts
        return found[name]
    parts = {name.rpartition(".")[2]: found[name] for name in weight.parts}
    return PackedTensors(weight.module, weight.shape, weight.layout, parts)
