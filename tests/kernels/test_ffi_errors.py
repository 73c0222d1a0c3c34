"""The C++ handlers reject invalid operands with an XLA error and do not end the process.

The tests call the handlers without the Python checks in front of them. `test_matmul.py` and
`test_cpu_attention.py` test the errors of the Python functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.cpu.native import HANDLERS

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ library was not built")


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def zeros(*dims: int, dtype: Any = jnp.float32) -> np.ndarray:
    return np.zeros(dims, dtype)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one handler with its operands and attributes in order. None omits one."""

    handler: str
    operands: dict[str, np.ndarray | None]
    results: tuple[jax.ShapeDtypeStruct, ...]
    attributes: dict[str, Any]

    def run(self, changes: dict[str, Any]) -> Any:
        operands = {name: changes.get(name, value) for name, value in self.operands.items()}
        attributes = {name: changes.get(name, value) for name, value in self.attributes.items()}
        call = jax.ffi.ffi_call(self.handler, changes.get("results", self.results))
        buffers = [value for value in operands.values() if value is not None]
        given = {name: value for name, value in attributes.items() if value is not None}
        return jax.block_until_ready(jax.jit(lambda *x: call(*x, **given))(*buffers))


MATMUL = Call(
    "specjax_matmul",
    {
        "x": zeros(3, 300),
        "packed": zeros(40, 256, dtype=jnp.uint8),
        "scales": zeros(40, 4, dtype=jnp.bfloat16),
        "others": None,
        "number": None,
    },
    (shape(3, 40),),
    {
        "levels": numbers(7),
        "instruction_set": "",
        "kinds": numbers(0),
        "group_sizes": numbers(128),
        "points": numbers(0),
        "outputs": numbers(0),
        "stacked": numbers(0),
    },
)
STACKED = dataclasses.replace(
    MATMUL,
    operands=MATMUL.operands
    | {
        "packed": zeros(5, 40, 256, dtype=jnp.uint8),
        "scales": zeros(5, 40, 4, dtype=jnp.bfloat16),
        "number": zeros(dtype=jnp.int32),
    },
    attributes=MATMUL.attributes | {"stacked": numbers(1)},
)
INTERLEAVED = dataclasses.replace(
    MATMUL,
    operands=MATMUL.operands
    | {
        "packed": zeros(3, 64, 64, dtype=jnp.uint8),
        "scales": zeros(3, 4, 16, dtype=jnp.bfloat16),
    },
    attributes=MATMUL.attributes | {"outputs": numbers(40)},
)
ATTENTION = Call(
    "specjax_attention",
    {
        "queries": zeros(2, 3, 4, 16),
        "keys": zeros(2, 5, 256, 2, 16),
        "values": zeros(2, 5, 256, 2, 16),
        "lengths": zeros(2, dtype=jnp.int32),
        "positions": zeros(2, 3, dtype=jnp.int32),
        "layer": zeros(dtype=jnp.int32),
        "ancestors": None,
        "another": None,
    },
    (shape(2, 3, 4, 16),),
    {"window": np.int64(-1), "sinks": np.int64(0), "scale": np.float32(1), "instruction_set": ""},
)
CODES = dataclasses.replace(
    ATTENTION,
    operands=ATTENTION.operands
    | {name: zeros(2, 5, 256, 2, 8, dtype=jnp.uint8) for name in ("keys", "values")}
    | {
        "key scales": zeros(2, 5, 256, 2),
        "key zeros": zeros(2, 5, 256, 2, dtype=jnp.uint8),
        "value scales": zeros(2, 5, 256, 2),
        "value zeros": zeros(2, 5, 256, 2, dtype=jnp.uint8),
    },
)
NORM = Call(
    "specjax_rms_norm",
    {"x": zeros(2, 3, 16), "scale": zeros(16)},
    (shape(2, 3, 16),),
    {"eps": np.float32(1e-5)},
)
ROTATE = Call(
    "specjax_rotate",
    {"x": zeros(2, 3, 16), "cos": zeros(2, 8), "sin": zeros(2, 8)},
    (shape(2, 3, 16),),
    {},
)
SWIGLU = Call(
    "specjax_swiglu", {"gate": zeros(2, 3, 16), "up": zeros(2, 3, 16)}, (shape(2, 3, 16),), {}
)
LAYERS = Call(
    "specjax_layers",
    {
        "x": zeros(2, 3, 16),
        "keys": zeros(2, 5, 256, 2, 8),
        "values": zeros(2, 5, 256, 2, 8),
        "ancestors": None,
        "lengths": zeros(2, dtype=jnp.int32),
        "positions": zeros(2, 3, dtype=jnp.int32),
        "cos": zeros(2, 3, 4),
        "sin": zeros(2, 3, 4),
        "attention_norm": zeros(5, 16),
        "mlp_norm": zeros(5, 16),
        "q_norm": None,
        "k_norm": None,
        "q": zeros(5, 32, 16),
        "q_bias": None,
        "k": zeros(5, 16, 16),
        "v": zeros(5, 16, 16),
        "o": zeros(5, 16, 32),
        "gate": zeros(5, 24, 16),
        "up": zeros(5, 24, 16),
        "down": zeros(5, 16, 24),
        "another": None,
    },
    (shape(2, 3, 16), shape(2, 5, 256, 2, 8), shape(2, 5, 256, 2, 8)),
    {
        "instruction_set": "",
        "kinds": numbers(*[5] * 7),
        **{name: numbers(*[0] * 7) for name in ("group_sizes", "points", "outputs", "levels")},
        "stacked": numbers(*[1] * 7),
        "biased": numbers(*[0] * 7),
        "numbers": numbers(0, 4),
        "windows": numbers(-1, 3),
        "sinks": numbers(0, 2),
        "tree": False,
        "head_norms": False,
        "eps": np.float32(1e-5),
        "scale": np.float32(1),
    },
)
HADAMARD = Call(
    "specjax_hadamard",
    {"x": zeros(3, 24, 2), "matrix": zeros(12, 12)},
    (shape(3, 24, 2),),
    {"scale": np.float32(1)},
)
READ = Call("specjax_probe_read", {"data": zeros(2**18, dtype=jnp.uint8)}, (shape(),), {})
MULTIPLY = Call(
    "specjax_probe_multiply",
    {},
    (shape(), shape()),
    {"arithmetic": np.int64(0), "count": np.int64(1)},
)

CALLS = [
    MATMUL, STACKED, INTERLEAVED, ATTENTION, CODES, NORM, ROTATE, SWIGLU, LAYERS, HADAMARD, READ,
    MULTIPLY,
]  # fmt: skip
REFUSED = [  # call, changes, error message
    (MATMUL, {"x": zeros(3, 300, dtype=jnp.float16)}, "x must be a bfloat16 or float32 matrix"),
    (MATMUL, {"x": zeros(3, 2, 300)}, r"x must be .* got \[3, 2, 300\]"),
    (MATMUL, {"x": zeros(3, 0)}, "a weight for 0 inputs does not fit"),
    (MATMUL, {"x": zeros(3, 600)}, r"a weight for 600 inputs does not fit: got \[40, 256\]"),
    (MATMUL, {"packed": zeros(256, dtype=jnp.uint8)}, r"does not fit: got \[256\]"),
    (MATMUL, {"packed": zeros(dtype=jnp.uint8)}, r"does not fit: got \[\]"),
    (MATMUL, {"packed": zeros(0, 256, dtype=jnp.uint8)}, r"does not fit: got \[0, 256\]"),
    (MATMUL, {"packed": zeros(40, 256, dtype=jnp.int8)}, "does not fit"),
    (MATMUL, {"scales": zeros(40, 3)}, r"scales must be \[40, 4\], got \[40, 3\]"),
    (MATMUL, {"scales": zeros(160)}, r"scales must be \[40, 4\], got \[160\]"),
    (MATMUL, {"scales": zeros(40, 4, dtype=jnp.int16)}, "scales have an unknown type"),
    (MATMUL, {"scales": zeros(40, 4, dtype=jnp.uint8)}, "scales have another format's type"),
    (MATMUL, {"scales": None}, "Index out of range"),
    (MATMUL, {"others": zeros(40, 4, dtype=jnp.int8)}, "too many buffers"),
    (MATMUL, {"points": numbers(1)}, "Index out of range"),
    (
        MATMUL,
        {"points": numbers(1), "others": zeros(40, 3, dtype=jnp.int8)},
        "zeros must be int8 like the scales",
    ),
    (MATMUL, {"points": numbers(2), "others": zeros(40, 4)}, "minima must be like the scales"),
    (
        MATMUL,
        {"points": numbers(2), "others": zeros(40, 3, dtype=jnp.bfloat16)},
        r"minima must be like the scales, got \[40, 3\]",
    ),
    (
        MATMUL,
        {
            "kinds": numbers(1),
            "group_sizes": numbers(32),
            "scales": zeros(40, 16, dtype=jnp.uint8),
            "points": numbers(2),
            "others": zeros(40, 16, dtype=jnp.uint8),
        },
        "MXFP4 has groups of 32 without zeros or minima",
    ),
    (
        MATMUL,
        {
            "kinds": numbers(1),
            "group_sizes": numbers(64),
            "scales": zeros(40, 8, dtype=jnp.uint8),
        },
        "MXFP4 has groups of 32",
    ),
    (MATMUL, {"points": numbers(3)}, "unknown kind of points"),
    (MATMUL, {"points": numbers(-1)}, "unknown kind of points"),
    (MATMUL, {"results": (shape(3, 41),)}, r"a result does not fit: got \[3, 41\]"),
    (MATMUL, {"results": (shape(120),)}, "a result does not fit"),
    (MATMUL, {"results": (shape(3, 40, dtype=jnp.bfloat16),)}, "a result does not fit"),
    (MATMUL, {"results": (shape(3, 40), shape(3, 40))}, "do not fit together"),
    (MATMUL, {"kinds": numbers(7)}, "unknown kind of weight"),
    (MATMUL, {"kinds": numbers(-1)}, "unknown kind of weight"),
    (MATMUL, {"kinds": numbers(4)}, "integer products need a quantized weight"),
    (MATMUL, {"kinds": numbers(2)}, "integer products need .* of one plane"),
    (
        MATMUL,
        {"kinds": numbers(2), "levels": numbers(0), "others": zeros(40, 128, dtype=jnp.uint8)},
        r"the planes of a weight do not fit: got \[40, 128\]",
    ),
    (MATMUL, {"kinds": numbers(0, 0)}, "do not fit together"),
    (MATMUL, {"points": numbers()}, "do not fit together"),
    (MATMUL, {"group_sizes": numbers(-128)}, "unknown group size -128"),
    (MATMUL, {"levels": numbers(128)}, "do not fit together"),
    (MATMUL, {"levels": numbers(-1)}, "do not fit together"),
    (MATMUL, {"levels": np.array([7], np.float32)}, "Wrong .* data type"),
    (MATMUL, {"levels": None}, "Wrong number of attributes"),
    (MATMUL, {"instruction_set": "abacus"}, "this machine cannot run abacus"),
    (MATMUL, {"outputs": numbers(40)}, r"does not fit: got \[40, 256\]"),
    (MATMUL, {"outputs": numbers(40, 40)}, "do not fit together"),
    (INTERLEAVED, {"outputs": numbers(0)}, r"does not fit: got \[3, 64, 64\]"),
    (INTERLEAVED, {"outputs": numbers(49)}, r"does not fit: got \[3, 64, 64\]"),
    (INTERLEAVED, {"outputs": numbers(-40)}, r"does not fit: got \[3, 64, 64\]"),
    (INTERLEAVED, {"x": zeros(3, 600)}, r"does not fit: got \[3, 64, 64\]"),
    (INTERLEAVED, {"scales": zeros(40, 4)}, r"scales must be \[3, 4, 16\], got \[40, 4\]"),
    (STACKED, {"number": np.int32(5)}, "there is no matrix 5 in a stack of 5"),
    (STACKED, {"number": np.int32(-1)}, "there is no matrix -1 in a stack"),
    (STACKED, {"number": np.float32(1)}, "a matrix's number has another type"),
    (STACKED, {"number": None}, "Index out of range"),
    (STACKED, {"stacked": numbers()}, "do not fit together"),
    (STACKED, {"scales": zeros(4, 40, 4), "number": np.int32(4)}, "matrix 4 in a stack of 4"),
    (STACKED, {"packed": zeros(dtype=jnp.uint8)}, "a stack has no axes"),
    (STACKED, {"packed": zeros(0, 40, 256, dtype=jnp.uint8)}, "matrix 0 in a stack of 0"),
    (STACKED, {"stacked": numbers(0)}, "does not fit"),
    (ATTENTION, {"layer": np.int32(5)}, "layer must be in 0 … 4, got 5"),
    (ATTENTION, {"layer": np.int32(-1)}, "layer must be in 0 … 4, got -1"),
    (ATTENTION, {"layer": np.float32(1)}, "layer has another type"),
    (ATTENTION, {"sinks": np.int64(65)}, "sinks must be in 0 … 64, got 65"),
    (ATTENTION, {"keys": zeros(2, 256, 2, 16)}, "keys must be float32"),
    (ATTENTION, {"results": (shape(2, 3, 64),)}, "the result must be"),
    (ATTENTION, {"results": (shape(2, 3, 4, 16, dtype=jnp.bfloat16),)}, "result has another type"),
    (ATTENTION, {"keys": zeros(2, 5, 256, 0, 16), "values": zeros(2, 5, 256, 0, 16)}, "do not fit"),
    (ATTENTION, {"positions": None}, "Wrong number of arguments"),
    (
        ATTENTION,
        {name: zeros(2, 3, 3, dtype=jnp.int32) for name in ("ancestors", "another")},
        "the number of buffers does not fit",
    ),
    (ATTENTION, {"ancestors": zeros(2, 3, 3, dtype=jnp.bool_)}, "ancestors has another type"),
    (ATTENTION, {"ancestors": zeros(2, 4, 3, dtype=jnp.int32)}, r"ancestors must be \[2, 3, 3\]"),
    (ATTENTION, {"ancestors": zeros(dtype=jnp.int32)}, "ancestors must be"),
    (ATTENTION, {"keys": zeros(2, 5, 256, 2, 16, dtype=jnp.int8)}, "keys must be"),
    (CODES, {"keys": zeros(2, 5, 256, 2, 9, dtype=jnp.uint8)}, "do not fit queries"),
    (CODES, {"keys": zeros(1, 5, 256, 2, 16, dtype=jnp.uint8)}, "do not fit queries"),
    (CODES, {"values": zeros(2, 5, 256, 2, 16, dtype=jnp.uint8)}, "values must be"),
    (CODES, {"key scales": zeros(2, 5, 256, 1)}, "scales must be"),
    (CODES, {"value scales": zeros(2, 5, 256, 2, dtype=jnp.bfloat16)}, "scales has another type"),
    (CODES, {"key zeros": zeros(2, 5, 255, 2, dtype=jnp.uint8)}, "zeros must be"),
    (CODES, {"value zeros": zeros(2, 5, 256, 2, dtype=jnp.int8)}, "zeros has another type"),
    (CODES, {"value zeros": None}, "the number of buffers does not fit"),
    (ATTENTION, {"scale": np.float64(1)}, "Wrong scalar data type"),
    (ATTENTION, {"instruction_set": "abacus"}, "this machine cannot run abacus"),
    (NORM, {"x": zeros(2, 3, 16, dtype=jnp.float16)}, "x must be bfloat16 or float32"),
    (NORM, {"x": zeros()}, "x must be bfloat16 or float32"),
    (NORM, {"scale": zeros(15)}, "scale must be bfloat16 or float32"),
    (NORM, {"scale": zeros(16, dtype=jnp.int32)}, "scale must be bfloat16 or float32"),
    (NORM, {"scale": zeros(4, 16)}, "4 scales do not fit 6 rows"),
    (NORM, {"results": (shape(2, 3, 15),)}, "the result must be"),
    (NORM, {"results": (shape(2, 3, 16, dtype=jnp.float16),)}, "the result has another type"),
    (NORM, {"eps": np.float64(1)}, "Wrong scalar data type"),
    (ROTATE, {"x": zeros(2, 3, 16, dtype=jnp.bfloat16)}, "x must be float32"),
    (ROTATE, {"x": zeros(2, 3, 15)}, "x must be .* an even E"),
    (ROTATE, {"x": zeros(16)}, "x must be float32"),
    (ROTATE, {"cos": zeros(2, 16)}, r"cos must be \[2, 8\], got \[2, 16\]"),
    (ROTATE, {"sin": zeros(3, 8)}, r"sin must be \[2, 8\], got \[3, 8\]"),
    (ROTATE, {"sin": zeros(2, 8, dtype=jnp.int32)}, "sin has another type"),
    (ROTATE, {"results": (shape(2, 3, 8),)}, "the result must be"),
    (ROTATE, {"results": (shape(2, 3, 16, dtype=jnp.int32),)}, "the result has another type"),
    (SWIGLU, {"gate": zeros(2, 3, 16, dtype=jnp.bfloat16)}, "gate has another type"),
    (SWIGLU, {"up": zeros(2, 3, 15)}, r"up must be \[2, 3, 16\], got \[2, 3, 15\]"),
    (SWIGLU, {"results": (shape(2, 3, 8),)}, "the result must be"),
    (LAYERS, {"x": zeros(6, 16)}, r"x must be .* got \[6, 16\]"),
    (LAYERS, {"x": zeros(2, 3, 16, dtype=jnp.bfloat16)}, "keys must be .* like x"),
    (LAYERS, {"x": zeros(3, 3, 16)}, "keys must be .* like x"),
    (LAYERS, {"keys": zeros(2, 5, 256, 0, 8)}, "keys must be"),
    (LAYERS, {"keys": zeros(2, 5, 256, 2, 7)}, "keys must be"),
    (LAYERS, {"values": zeros(2, 5, 255, 2, 8)}, "values must be"),
    (LAYERS, {"lengths": zeros(2)}, "lengths has another type"),
    (LAYERS, {"positions": zeros(2, 2, dtype=jnp.int32)}, "positions must be"),
    (LAYERS, {"cos": zeros(2, 3, 8)}, "cos must be"),
    (LAYERS, {"mlp_norm": zeros(4, 16)}, r"mlp_norm must be \[5, 16\], got \[4, 16\]"),
    (LAYERS, {"attention_norm": zeros(5, 16, dtype=jnp.int32)}, "norm has another type"),
    (LAYERS, {"tree": True}, "ancestors must be"),
    (LAYERS, {"head_norms": True}, "q_norm must be"),
    (LAYERS, {"q": zeros(5, 31, 16)}, "linear layer 0 does not fit the others"),
    (LAYERS, {"q": zeros(5, 8, 16)}, "linear layer 0 does not fit the others"),
    (LAYERS, {"v": zeros(5, 32, 16)}, "linear layer 2 does not fit the others"),
    (LAYERS, {"o": zeros(5, 16, 31)}, "a weight for 32 inputs does not fit"),
    (LAYERS, {"up": zeros(4, 24, 16)}, "linear layer 5 does not fit the others"),
    (LAYERS, {"down": None}, "Index out of range"),
    (LAYERS, {"another": zeros(1)}, "too many buffers"),
    (LAYERS, {"biased": numbers(1, 0, 0, 0, 0, 0, 0)}, r"a bias must be \[5, 32\]"),
    (LAYERS, {"biased": numbers(0)}, "must describe seven linear layers"),
    (LAYERS, {"levels": numbers(0)}, "must describe seven linear layers"),
    (LAYERS, {"levels": numbers(*[7] * 7)}, "integer products need a quantized weight"),
    (LAYERS, {"stacked": numbers(*[0] * 7)}, "does not fit"),
    (LAYERS, {"numbers": numbers(0, 5)}, "there is no layer 5"),
    (LAYERS, {"numbers": numbers(-1, 4)}, "there is no layer -1"),
    (LAYERS, {"numbers": numbers(0)}, "must be of one length"),
    (LAYERS, {"sinks": numbers(0, 65)}, "sinks must be in 0 … 64"),
    (LAYERS, {"results": LAYERS.results[1:] + LAYERS.results[:1]}, "the result must be"),
    (LAYERS, {"instruction_set": "abacus"}, "this machine cannot run abacus"),
    (HADAMARD, {"x": zeros(3, 24, 2, dtype=jnp.bfloat16)}, "x must be float32"),
    (HADAMARD, {"x": zeros(24)}, "x must be float32"),
    (
        HADAMARD,
        {"x": zeros(3, 20, 2), "results": (shape(3, 20, 2),)},
        r"a matrix does not fit: got \[12, 12\]",
    ),
    (
        HADAMARD,
        {"x": zeros(3, 36, 2), "results": (shape(3, 36, 2),)},
        "no power of two is left: 3",
    ),
    (HADAMARD, {"matrix": zeros(12, 6)}, "a matrix does not fit"),
    (HADAMARD, {"matrix": zeros(12, 12, dtype=jnp.int8)}, "a matrix does not fit"),
    (HADAMARD, {"matrix": zeros()}, "a matrix does not fit"),
    (HADAMARD, {"results": (shape(3, 24, 3),)}, "the result must be"),
    (READ, {"data": zeros(2**18, dtype=jnp.int8)}, "Wrong buffer dtype"),
    (READ, {"results": (shape(1),)}, "Wrong buffer rank"),
    (MULTIPLY, {"arithmetic": np.int64(3)}, "unknown arithmetic"),
    (MULTIPLY, {"results": (shape(), shape(1))}, "Wrong buffer rank"),
]


def test_every_handler_is_here() -> None:
    assert {call.handler for call in CALLS} == set(HANDLERS)


@pytest.mark.parametrize("call", CALLS)
def test_what_is_changed_below_is_accepted_as_it_stands(call: Call) -> None:
    call.run({})


@pytest.mark.parametrize(("call", "changes", "message"), REFUSED)
def test_it_is_refused(call: Call, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call.run(changes)
