"""Functions of the library as one program each.

Where a test calls them plainly, XLA compiles their operations one by one, and a program of each
operation takes about as long to compile as one of them all.
"""

from __future__ import annotations

import jax

from pallas_kernels import activations, cache_entries, weight_values
from specjax.model import transformer

forward = jax.jit(transformer.forward, static_argnames=("activation", "layers"))
dequantize = jax.jit(weight_values.dequantize)
plain_values = jax.jit(weight_values.plain_values)
take_rows = jax.jit(weight_values.take_rows)
quantize_activations = jax.jit(activations.quantize_activations, static_argnums=(1, 2))
quantize_entries = jax.jit(cache_entries.quantize_entries, static_argnums=1)
dequantize_entries = jax.jit(cache_entries.dequantize_entries)
