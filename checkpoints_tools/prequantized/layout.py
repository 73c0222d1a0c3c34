"""The interface of layouts of quantized tensors, and the packing that they share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Float, Int8, Int32, UInt8

from pallas_kernels.formats import (
    GROUP_SIZES,
    Int4Weight,
    Int8Weight,
    Quantized,
    int4_from_integers,
    int8_from_integers,
)
from specjax.checks import shown

INTEGERS = ("I32",)  # as safetensors names dtypes
BITS = (4, 8)


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a stored weight: its shape and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Layout(Protocol):
    """How one linear layer is stored.

    description: text for messages, such as "gptq, 4 bits, groups of 128".
    main_part: the tensor that every quantized module has.
    """

    @property
    def description(self) -> str: ...

    @property
    def main_part(self) -> str: ...

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        """The tensors of a layer with N outputs and K inputs, by their names in the module."""
        ...

    def weight(self, parts: Mapping[str, np.ndarray], n: int, k: int) -> Quantized:
        """The weight (N, K) that the tensors represent. Raises ValueError on contradictions."""
        ...


def check_option(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Raises ValueError unless an option of quantization_config has an accepted value."""
    if value not in accepted:
        raise ValueError(
            f"quantization_config: {name} {shown(value)} is not supported; "
            f"supported: {', '.join(map(str, accepted))}"
        )


def read_group_size(value: Any) -> int | None:
    """Inputs per scale; None for -1, one scale per output. Raises ValueError on other sizes."""
    check_option("group_size", value, (-1, *filter(None, GROUP_SIZES)))
    return None if value == -1 else value


def describe(method: str, bits: int, group_size: int | None) -> str:
    """A layout in words."""
    scales = "one scale per output" if group_size is None else f"groups of {group_size}"
    return f"{method}, {bits} bits, {scales}"


def groups(k: int, group_size: int | None) -> int:
    """The number of groups of K inputs; the last group may be shorter."""
    return -(-k // (group_size or k))


def words(count: int, bits: int) -> int:
    """The number of 32-bit words that hold `count` integers."""
    return -(-count * bits // 32)


def unpack_integers(
    packed: UInt8[np.ndarray, "*rows W"] | Int32[np.ndarray, "*rows W"], bits: int, count: int
) -> UInt8[np.ndarray, "*rows {count}"]:
    """The unsigned integers in bytes or words, the lowest bits first. [..., W] -> u8[..., count].

    bits: 4 or 8.
    """
    integers = np.ascontiguousarray(packed).view(np.uint8)  # little-endian, as safetensors
    if bits == 4:
        pairs = np.stack((integers & 0xF, integers >> 4), axis=-1)
        integers = pairs.reshape(*packed.shape[:-1], -1)
    return integers[..., :count]


def pack_integers(
    integers: UInt8[np.ndarray, "*rows count"], bits: int
) -> Int32[np.ndarray, "*rows words"]:
    """The inverse of `unpack_integers`, in words. u8[..., count] -> i32[..., words]."""
    count = integers.shape[-1]
    padding = words(count, bits) * 32 // bits - count
    padded = np.pad(integers, ((0, 0),) * (integers.ndim - 1) + ((0, padding),))
    if bits == 4:
        padded = padded[..., ::2] | padded[..., 1::2] << 4
    return np.ascontiguousarray(padded).view(np.int32)


def signed(integers: UInt8[np.ndarray, "*shape"], bits: int) -> Int8[np.ndarray, "*shape"]:
    """u - 2^(bits - 1) modulo 2^8, the library's form of an unsigned integer. u8 -> i8."""
    return (integers - np.uint8(1 << bits - 1)).view(np.int8)


def unsigned(integers: Int8[np.ndarray, "*shape"], bits: int) -> UInt8[np.ndarray, "*shape"]:
    """The inverse of `signed`. i8 -> u8."""
    return integers.view(np.uint8) + np.uint8(1 << bits - 1)


def column_order(
    group_of_input: Int32[np.ndarray, " K"], group_size: int | None
) -> Int32[np.ndarray, " K"] | None:
    """The order of the columns that makes the groups consecutive, None if they already are.

    Args:
      group_of_input: i32[K], the group of every input (`g_idx`).
      group_size: inputs per group, None for a single group.

    Returns:
      i32[K] or None.

    Raises:
      ValueError: a group has more or fewer inputs than `group_size`.
    """
    k = len(group_of_input)
    consecutive = np.arange(k) // (group_size or k)
    if np.array_equal(group_of_input, consecutive):
        return None
    order = np.argsort(group_of_input, kind="stable").astype(np.int32)
    if not np.array_equal(group_of_input[order], consecutive):
        raise ValueError(
            f"g_idx must divide the {k} inputs into groups of {group_size or k}, but does not"
        )
    return order


def build(
    bits: int,
    q: Int8[np.ndarray, "N K"],
    scales: Float[np.ndarray, "N G"],
    group_size: int | None,
    zeros: Int8[np.ndarray, "N G"] | None = None,
    order: Int32[np.ndarray, " K"] | None = None,
) -> Int4Weight | Int8Weight:
    """The weight made of the integers q.

    Args:
      bits: 4 or 8.
      q: i8[N, K], its columns in the model's order.
      scales: bf16, f16 or f32[N, groups].
      group_size: inputs per scale, None for one scale per output.
      zeros: i8[N, groups] or None.
      order: the result of `column_order`.
    """
    if order is not None:
        q = q[:, order]
    arrays = (None if a is None else jax.device_put(a) for a in (q, scales, zeros, order))
    weight: Int4Weight | Int8Weight = _build(bits, group_size, *arrays)
    return weight


@functools.partial(jax.jit, static_argnums=(0, 1))
def _build(
    bits: int,
    group_size: int | None,
    q: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    order: jax.Array | None,
) -> Int4Weight | Int8Weight:
    from_integers = int4_from_integers if bits == 4 else int8_from_integers
    return from_integers(q, scales, group_size, zeros, order)
