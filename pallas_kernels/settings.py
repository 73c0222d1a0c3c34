"""The JAX settings under which this package traces its programs.

The code relies on `jnp.arange(n)` being int32, on `jnp.zeros(n)` being float32, and on adding
booleans to integers. `jax.enable_x64` and strict promotion would break this. It also relies on the
first of n random numbers being the same for every n, which partitionable Threefry promises. Every
compiled function therefore traces its body under `own_settings`, and a caller's settings do not
change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Sets 32-bit defaults, standard dtype promotion and partitionable random numbers, as a context
    manager or a decorator.

    As a decorator it goes below `jax.jit`, so it costs nothing once a program is compiled.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.threefry_partitionable(True),
    ):
        yield
