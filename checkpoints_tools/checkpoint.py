"""The library's own checkpoints: a model in any of its weight formats, exactly as it was in memory.

A checkpoint is a directory:

    config.json         format version, `ModelConfig`, and what each quantized weight is
    weights/            the arrays, written by Orbax under the names of `specjax.model.weight_names`
    tokenizer.json, …   copied from the model's source

A checkpoint is written beside its place and moved there when it is whole
(`specjax.files.atomic_directory`). It is read straight into the shards of a mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from checkpoints_tools.gguf.tokenizer import read_gguf_tokenizer
from checkpoints_tools.sources import locate
from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import Bfloat16Weight, Int4Weight, Int8Weight, Mxfp4Weight, Outliers
from pallas_kernels.interleave import by_rows
from pallas_kernels.nested import NestedInt8Weight, NestedWeight
from pallas_kernels.weight_checks import check_arrays
from pallas_kernels.weights import Weight
from specjax.checks import Check, Number, Whole, printable, shown
from specjax.files.atomic_directory import check_replaceable, recover, replacing
from specjax.files.json_objects import as_object, read_object
from specjax.model.config import SIZE, ModelConfig
from specjax.model.parallel import check_model, gets_whole_tiles, weight_spec
from specjax.model.params import Params, check_is_params
from specjax.model.room import check_weights
from specjax.model.weight_names import each_weight, params_from_weights, weight_shapes

if TYPE_CHECKING:
    import orbax.checkpoint as ocp  # which takes half a second to import, so it is when it is used

FORMAT_VERSION = 1
VERSION_FIELD = "specjax_format"
FORMATS = {
    "bfloat16": Bfloat16Weight,
    "int4": Int4Weight,
    "mxfp4": Mxfp4Weight,
    "int8": Int8Weight,
    "outliers": Outliers,
    "bfloat12": Bfloat12Weight,
    "nested16": NestedWeight,
    "nested8": NestedInt8Weight,
}
_CHUNK_BYTES = 2**22  # arrays are stored in pieces of this size; a reader takes whole pieces
OPTIONAL = ("zeros", "minima", "outliers", "order")  # parts that a weight may lack
_STATIC: Mapping[str, Check] = {
    "in_features": SIZE,
    "activation_clip": Number(1, above=0),
    "padded_outputs": Whole(0, TILE - 1),
}
IN_MEMORY = ("out_features",)  # fields of interleaved weights; on disk, no weight is interleaved
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def save(
    params: Params,
    path: str | os.PathLike[str],
    tokenizer_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a checkpoint, whole or not at all.

    Args:
      params: the model.
      path: the directory to make. A checkpoint that is there is replaced in one step.
      tokenizer_dir: a model whose tokenizer is copied along: its name, directory or GGUF file.

    Raises:
      FileNotFoundError: `tokenizer_dir` is not a model.
      ValueError: `path` exists and is not a checkpoint, or other processes hold parts of params.
      OSError: `path` cannot be written; it is as it was before.
    """
    import orbax.checkpoint as ocp

    check_is_params(params)
    if params.mesh is not None and params.mesh.is_multi_process:
        raise ValueError(
            "params are divided over several processes; save a model that one process holds whole"
        )
    with replacing(Path(path), check_target, params.nbytes) as directory:
        if tokenizer_dir is not None:
            copy_tokenizer(tokenizer_dir, directory)
        arrays, formats = take_apart(each_weight(params))
        with _checkpointer() as checkpointer:
            pieces = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
            checkpointer.save(
                directory / "weights", args=ocp.args.StandardSave(arrays, save_args=pieces)
            )
        # This file names the temporary directory, a private path of the machine.
        (directory / "weights" / "commit_success.txt").unlink(missing_ok=True)
        description = {
            VERSION_FIELD: FORMAT_VERSION,
            "model": params.config.to_dict(),
            "quantized": formats,
        }
        (directory / "config.json").write_text(json.dumps(description, indent=1) + "\n")


def load(path: str | os.PathLike[str], mesh: Mesh | None = None) -> Params:
    """Reads a checkpoint that `save` wrote: the same bits, dtypes and formats.

    The arrays go to the default device or to the devices of a mesh, wherever they were when they
    were written.

    Args:
      path: the checkpoint's directory.
      mesh: devices to divide the model over. Every process reads the parts of its own devices.

    Returns:
      The model.

    Raises:
      FileNotFoundError: nothing is at `path`.
      ValueError: `path` is not a checkpoint, is damaged, or was written by a newer version of
        specjax; or the mesh does not divide the model.
    """
    directory = Path(path).resolve()
    recover(directory)
    config, formats = read_description(directory)
    if mesh is not None:
        check_model(config, mesh)
    with _one_sentence(path):
        wanted = _describe_arrays(directory / "weights", mesh)
    if mesh is None:
        needed = sum(math.prod(each.shape) * each.dtype.itemsize for each in wanted.values())
        check_weights(path, config, needed, layer_by_layer=False)
    with _one_sentence(path):
        arrays = _restore_arrays(directory / "weights", wanted)
        weights = {
            name: _checked(put_together(name, formats.get(name), arrays), name, shape)
            for name, shape in weight_shapes(config).items()
        }
        for name, weight in weights.items():
            if mesh is not None and not gets_whole_tiles(weight, mesh):
                raise ValueError(
                    f"{name} has {weight.shape[0]} outputs in tiles of {TILE}, which the tensor "
                    "axis does not divide; load it without a mesh and call specjax.parallel.shard"
                )
    return dataclasses.replace(params_from_weights(config, weights), mesh=mesh)


@contextlib.contextmanager
def _one_sentence(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns all that goes wrong with a checkpoint's weights into a ValueError."""
    try:
        yield
    except Exception as error:  # Orbax raises Exception itself where a file is damaged
        reason = str(error).partition("\n")[0].partition(". ")[0]  # its first sentence
        raise ValueError(f"the weights of {path} cannot be read: {printable(reason)}") from error


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a checkpoint of this library, in any version."""
    try:
        return VERSION_FIELD in read_object(Path(path) / "config.json")
    except (OSError, ValueError):
        return False


def check_target(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if `path` holds anything that a checkpoint must not replace."""
    check_replaceable(Path(path), "a specjax checkpoint", is_checkpoint)


def read_description(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model and the formats of its quantized weights, from config.json. Raises as `load`."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory")
    if not is_checkpoint(path):
        raise ValueError(f"{path} is not a specjax checkpoint: its config.json does not say so")
    description = read_object(path / "config.json")
    version = description[VERSION_FIELD]
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has checkpoint format {shown(version)}; this version of specjax "
            f"reads formats up to {FORMAT_VERSION}: upgrade specjax"
        )
    try:
        Whole(1, FORMAT_VERSION)(VERSION_FIELD, version)
        model, formats = (as_object(each, description.get(each)) for each in ("model", "quantized"))
        return ModelConfig.from_dict(model), formats
    except ValueError as error:
        raise ValueError(f"config.json of {path} is damaged: {error}") from error


def _checkpointer() -> ocp.Checkpointer:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def take_apart(
    weights: Iterable[tuple[str, Weight]],
) -> tuple[dict[str, jax.Array], dict[str, dict[str, Any]]]:
    """All arrays by name, row by row, and the static fields of every quantized weight."""
    arrays: dict[str, jax.Array] = {}
    formats = {}
    for name, weight in weights:
        if isinstance(weight, jax.Array):
            arrays[name] = weight
        else:
            formats[name] = _part(name, by_rows(weight), arrays)
    return arrays, formats


def _part(name: str, weight: Any, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Adds the arrays of a weight, or of a part of one, to `arrays`; returns the static fields."""
    kind = next(key for key, cls in FORMATS.items() if isinstance(weight, cls))
    static = {field: getattr(weight, field) for field in _fields(type(weight), static=True)}
    description = {"format": kind} | static
    for field in _fields(type(weight), static=False):
        value = getattr(weight, field)
        if isinstance(value, jax.Array):
            arrays[f"{name}.{field}"] = value
        elif value is not None:
            description[field] = _part(f"{name}.{field}", value, arrays)
    return description


def put_together(
    name: str, description: Mapping[str, Any] | None, arrays: Mapping[str, jax.Array]
) -> Any:
    """The inverse of `take_apart` for one weight, or a part of one."""
    if description is None:
        return arrays[name]
    format_class = FORMATS[description["format"]]
    # A static field that is missing was unknown to an older version: it takes its default.
    static = _fields(format_class, static=True)
    values = {field: description[field] for field in static if field in description}
    for field in _fields(format_class, static=False):
        inner = description.get(field)
        if inner is not None or f"{name}.{field}" in arrays or field not in OPTIONAL:
            values[field] = put_together(f"{name}.{field}", inner, arrays)
    return format_class(**values)


def _checked(weight: Weight, name: str, shape: tuple[int, ...]) -> Weight:
    """Returns the weight. Raises ValueError unless it has this shape and matches its format."""
    for part in (weight.exact, weight.draft) if isinstance(weight, NestedWeight) else (weight,):
        for field, check in _STATIC.items():
            if hasattr(part, field):
                check(f"{field} of {name}", getattr(part, field))
    if weight.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {weight.shape}")
    check_arrays(weight)
    return weight


def _fields(format_class: type[Any], *, static: bool) -> list[str]:
    fields = dataclasses.fields(format_class)
    return [
        f.name
        for f in fields
        if bool(f.metadata.get("static")) == static and f.name not in IN_MEMORY
    ]


def _describe_arrays(path: Path, mesh: Mesh | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Every array under `path`, for the default device or a mesh, not for the writer's devices."""
    here = jnp.zeros(()).sharding

    def sharding(name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        return here if mesh is None else NamedSharding(mesh, weight_spec(name, shape, mesh))

    with _checkpointer() as checkpointer:
        found = checkpointer.metadata(path).item_metadata
        if found is None:
            raise ValueError(f"{path.name} is missing or incomplete")
        return {
            name: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=sharding(name, array.shape)
            )
            for name, array in found.tree.items()
        }


def _restore_arrays(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        restored: dict[str, jax.Array] = checkpointer.restore(
            path, args=ocp.args.StandardRestore(wanted)
        )
        return restored


def check_tokenizer(path: Path) -> None:
    """Raises ValueError if `copy_tokenizer` refuses a model's directory or GGUF file."""
    if path.is_file():
        read_gguf_tokenizer(path)
    _tokenizer_files(path)


def copy_tokenizer(source: str | os.PathLike[str], target: Path) -> None:
    """Copies the tokenizer files of the model `source`, or makes those of a GGUF file.

    Raises as `locate` and `check_tokenizer`.
    """
    path = locate(source, weights=False)
    if path.is_file():
        read_gguf_tokenizer(path).save(target)
    for file in _tokenizer_files(path):
        shutil.copyfile(file, target / file.name)


def _tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer files in a directory; a GGUF file has none.

    Raises ValueError if one is a link out of the directory, because a stranger's directory must not
    choose what of this machine goes into a checkpoint. Hugging Face's cache has its files in a
    folder `blobs` beside `snapshots`, which holds the directory.
    """
    folder = path.resolve()
    places = [folder]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    files = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    for file in files:
        if not any(file.resolve().is_relative_to(place) for place in places):
            raise ValueError(
                f"{printable(file)} is a link to {printable(file.resolve())}, which lies outside "
                "of the model's directory; put the file itself there, or remove the link"
            )
    return files
