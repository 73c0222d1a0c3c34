"""Many devices: tensor and data parallel over a `jax.sharding.Mesh`, on one host or several.

The whole program runs under one `jax.shard_map`: every device runs the same code as a single device
would, on its part of the rows and heads. Kernels and loops know nothing of the mesh.

    data axis      rows are divided; groups of devices decode theirs without communication
    tensor axis    every weight is divided by its outputs, as it is stored; the KV cache by heads

A matrix in 12 bits (`pallas_kernels.bfloat12`) is stored in tiles of 16 outputs. `shard` expands
one whose devices would not get whole tiles to the plain matrix.

No weight is divided by its inputs. An input that a layer reads in full is gathered first, so every
output is one sum on one device, added in the same order as on a single device: the bits are the
same, and scales per token, Hadamard rotations and reordered columns see the whole vector. Adding
partial sums (Megatron's second matrix) would move as many bytes and round differently.

Inside the program an array that is narrower than the model's configuration says is a device's part.
For several hosts call `jax.distributed.initialize` first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import plain_weight
from pallas_kernels.nested import NestedWeight
from pallas_kernels.rounding import round_to
from pallas_kernels.weight_values import plain_values, take_rows
from pallas_kernels.weights import Weight, is_format
from specjax.checks import check_integer
from specjax.model.config import ModelConfig
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params, check_is_params, is_model, map_models, stored

T = TypeVar("T")
DATA, TENSOR = "data", "tensor"
ROWS = P(DATA)
_PER_INPUT = ("order", "columns")  # parts of a weight that count its inputs, not its outputs


def mesh(
    data: int = 1, tensor: int | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes a mesh for `shard` and `specjax.load`, with the axes "data" and "tensor".

    Args:
      data: groups of devices; each decodes its part of the rows.
      tensor: devices per group, over which a model is divided; None: as many as there are.
      devices: the devices to use; None: all devices of all processes.

    Raises:
      ValueError: there are fewer devices than asked for.
    """
    devices = jax.devices() if devices is None else list(devices)
    if tensor is None:
        tensor = max(1, len(devices) // max(1, check_integer("data", data)))
    for name, size in ((DATA, data), (TENSOR, tensor)):
        if check_integer(name, size) < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if data * tensor > len(devices):
        raise ValueError(
            f"a mesh of data={data} × tensor={tensor} needs {data * tensor} devices, "
            f"and there are {len(devices)}"
        )
    return jax.make_mesh(
        (data, tensor), (DATA, TENSOR), (AxisType.Auto,) * 2, devices=devices[: data * tensor]
    )


def shard(params: Params, mesh: Mesh) -> Params:
    """Divides a model over a mesh. The result can be used wherever params can.

    A process gives its own devices their parts of a model that it holds whole. A matrix in 12 bits
    becomes the plain one unless 16 times the tensor axis divides its outputs.
    `specjax.load(…, mesh=mesh)` reads only those parts.

    Args:
      params: a model on one device.
      mesh: a mesh with the axes "data" and "tensor", as `mesh` makes it.

    Raises:
      ValueError: params are divided already, or the tensor axis does not divide the heads.
    """
    check_is_params(params)
    if params.mesh is not None:
        raise ValueError(f"params are divided already, over {params.mesh.shape_tuple}")
    check_model(params.config, mesh)

    def place(leaf: jax.Array, spec: P) -> jax.Array:
        values = np.asarray(leaf)
        return jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, spec), lambda index: values[index]
        )

    params = jax.tree.map(partial(_dividable, mesh=mesh), stored(params), is_leaf=is_format)
    placed = jax.tree.map(place, params, _model_specs(params, mesh))
    model: Params = dataclasses.replace(placed, mesh=mesh)
    return model


def gets_whole_tiles(weight: Weight, mesh: Mesh) -> bool:
    """Whether a matrix in 12 bits can be divided over the mesh as it is; others always can."""
    if isinstance(weight, NestedWeight):
        return gets_whole_tiles(weight.exact, mesh)
    if not isinstance(weight, Bfloat12Weight) or mesh.shape[TENSOR] == 1:
        return True
    parts: int = mesh.shape[TENSOR]
    return weight.shape[0] % (TILE * parts) == 0


def _dividable(weight: Any, mesh: Mesh) -> Any:
    """The same matrix, in 16 bits unless it gets whole tiles."""
    if gets_whole_tiles(weight, mesh):
        return weight
    if isinstance(weight, NestedWeight):
        return dataclasses.replace(weight, exact=_dividable(weight.exact, mesh))
    return plain_weight(plain_values(weight))


def weight_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns how an array of a model is divided: by its outputs, if the tensor axis divides them.

    name: its path, such as "layers.0.q.weight.packed". Norms, and arrays that are indexed by a
    weight's inputs, are whole on every device.
    """
    last = name.rpartition(".")[2]
    whole = last in _PER_INPUT or last.endswith("norm") or shape[0] % mesh.shape[TENSOR]
    return P() if whole else P(TENSOR)


def check_model(config: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError unless a model of this configuration can be divided over the mesh."""
    if set(mesh.axis_names) != {DATA, TENSOR}:
        raise ValueError(
            f'mesh must have the axes "data" and "tensor", as specjax.parallel.mesh makes it, '
            f"got {mesh.axis_names}"
        )
    if config.num_kv_heads % mesh.shape[TENSOR]:
        raise ValueError(
            f"a tensor axis of {mesh.shape[TENSOR]} does not divide the model's "
            f"{config.num_kv_heads} key-value heads; it must be a divisor of that"
        )


def check_rows(mesh: Mesh | None, rows: int) -> None:
    """Raises ValueError unless rows can be divided over the mesh."""
    if mesh is not None and rows % mesh.shape[DATA]:
        raise ValueError(
            f"{rows} rows cannot be divided over a data axis of {mesh.shape[DATA]}; "
            "they must be a multiple of it"
        )


def whole_rows(mesh: Mesh | None, rows: int) -> int:
    """Returns the smallest number of rows, at least this many, that the mesh can divide."""
    shards = 1 if mesh is None else mesh.shape[DATA]
    return -(-rows // shards) * shards


def check_drafter(params: Params, drafter: Any) -> None:
    """Raises ValueError if a model of the drafter is not on the target's mesh."""
    for model in jax.tree.leaves(drafter, is_leaf=is_model):
        if is_model(model) and model.mesh != params.mesh:
            raise ValueError(
                f"the drafter's model and the target must be divided over the same mesh, got "
                f"{_describe(model.mesh)} and {_describe(params.mesh)}; see specjax.parallel.shard"
            )


def _describe(mesh: Mesh | None) -> str:
    if mesh is None:
        return "none"
    return " × ".join(f"{name}={size}" for name, size in mesh.shape.items())


def on_mesh(
    function: Callable[..., T],
    mesh: Mesh | None,
    shared: tuple[Any, ...],
    rows: tuple[Any, ...],
    out: Any = None,
) -> T:
    """Calls function(*shared, *rows) on every device of a mesh with its own parts.

    Args:
      function: takes arrays and models. Inside, `Params` have no mesh.
      mesh: the mesh of the operands; None: the function is called directly.
      shared: operands that all rows share: models, divided by `weight_spec`, and whole arrays.
      rows: arrays with the rows as their first axis, and caches. A single row is whole on every
      device.
      out: PartitionSpecs of the results; None: as for `rows`, at the price of tracing twice.
    """
    if mesh is None:
        return function(*shared, *rows)
    shared = map_models(partial(dataclasses.replace, mesh=None), shared)
    if out is None:
        out = row_specs(jax.eval_shape(function, *shared, *rows))
    in_specs = (*_model_specs(shared, mesh), *row_specs(rows))
    # All devices of a tensor group return equal results, which JAX cannot know.
    result: T = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False
    )(*shared, *rows)  # fmt: skip
    return result


def _model_specs(tree: Any, mesh: Mesh) -> Any:
    """Returns PartitionSpecs: `Params` anywhere in a tree are divided, all else is whole."""

    def leaf_spec(path: Any, leaf: Any) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return weight_spec(name, leaf.shape, mesh)

    def spec(value: Any) -> Any:
        if is_model(value):
            return jax.tree_util.tree_map_with_path(leaf_spec, value)
        return P()

    return jax.tree.map(spec, tree, is_leaf=is_model)


def row_specs(tree: Any) -> Any:
    """Returns PartitionSpecs of arrays with rows first; a cache is also divided by its heads."""

    def leaf_spec(leaf: Any) -> P:
        return ROWS if leaf.shape[0] > 1 else P()

    def spec(value: Any) -> Any:
        if not isinstance(value, KVCache):
            return leaf_spec(value)
        heads = P(*(leaf_spec(value.lengths) or (None,)), None, None, TENSOR)
        return jax.tree.map(lambda leaf: heads if leaf.ndim > 1 else leaf_spec(leaf), value)

    return jax.tree.map(spec, tree, is_leaf=lambda value: isinstance(value, KVCache))


def blank_rows(build: Callable[[], T], mesh: Mesh | None) -> T:
    """Calls `build`; every device makes its own part of the arrays, which have rows first."""
    if mesh is None:
        return build()
    specs = row_specs(jax.eval_shape(build))
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    blanks: T = jax.jit(build, out_shardings=shardings)()
    return blanks


def bound(tree: T, models: Any) -> T:
    """Binds arrays to a device if any of the models is bound to one.

    The results of programs over those models are bound too, and JAX compiles a program anew for
    arrays that are: one whose results are its next arguments would be compiled twice.
    """
    arrays = [leaf for leaf in jax.tree.leaves(models) if isinstance(leaf, jax.Array)]
    devices = {device for each in arrays if each.committed for device in each.devices()}
    if len(devices) != 1:  # none, or a mesh
        return tree
    there: T = jax.device_put(tree, devices.pop())
    return there


def readable(tree: T, mesh: Mesh | None) -> T:
    """Returns the same arrays, whole in every process."""
    if mesh is None or not mesh.is_multi_process:
        return tree
    whole: T = _replicate(tree, mesh)
    return whole


@partial(jax.jit, static_argnames="mesh")
def _replicate(tree: Any, mesh: Mesh) -> Any:
    return lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


# The functions below run inside `on_mesh`. Without a mesh every vector is whole, and they do
# nothing.


def gather(x: jax.Array, size: int, axis: int = -1) -> jax.Array:
    """Returns all `size` entries of an axis of which the device may hold a part."""
    if x.shape[axis] == size:
        return x
    whole: jax.Array = lax.all_gather(x, TENSOR, axis=axis % x.ndim, tiled=True)
    return whole


def own_part(x: Shaped[Array, "*rows _"], size: int) -> Shaped[Array, "*rows {size}"]:
    """Selects the `size` entries of the last axis that belong to the device's part of a weight."""
    if x.shape[-1] == size:
        return x
    return lax.dynamic_slice_in_dim(x, lax.axis_index(TENSOR) * size, size, axis=-1)


def embed(
    embedding: Weight, tokens: Int32[Array, "*rows"], config: ModelConfig
) -> Float[Array, "*rows D"]:
    """Looks up tokens in an embedding of which the device may hold a part. [...] -> [..., D].

    The values are rounded to the model's dtype, as all values between its layers are.
    """
    held = embedding.shape[0]
    if held == config.vocab_size:
        return round_to(take_rows(embedding, tokens), config.dtype)
    own = tokens - lax.axis_index(TENSOR) * held
    is_own = (own >= 0) & (own < held)
    x = round_to(take_rows(embedding, jnp.where(is_own, own, 0)), config.dtype)
    # Only one term of the sum is not zero, so it is exact.
    found: jax.Array = lax.psum(jnp.where(is_own[..., None], x, 0), TENSOR)
    return found


def own_row(row: Int32[Array, ""], rows: int, mesh: Mesh | None) -> Int32[Array, ""]:
    """Returns the index of row `row` among a device's `rows`, or `rows` if another device has
    it."""
    if mesh is None:
        return row
    own = row - lax.axis_index(DATA) * rows
    return jnp.where((own >= 0) & (own < rows), own, rows)


def everywhere(flag: Bool[Array, ""], mesh: Mesh | None) -> Bool[Array, ""]:
    """Whether a flag is set in every group of devices."""
    if mesh is None:
        return flag
    every: jax.Array = lax.pmin(flag.astype(jnp.int32), DATA) > 0
    return every
