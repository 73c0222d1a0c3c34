"""JAX's settings of types under which this package traces its programs, whatever the caller's are.

Code here writes `jnp.arange(n)` for int32 and `jnp.zeros(n)` for float32, and adds a boolean to an
integer. Under `jax.enable_x64` the first two would have 64 bits, and strict promotion refuses the
third. So every compiled function traces its body under `own_settings`, and is the same program
with any settings around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Numbers have 32 bits unless written otherwise, and types mix as NumPy's do.

    A context, and a decorator of functions: it goes below `jax.jit`, so that it costs nothing once
    a program is compiled.
    """
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield
