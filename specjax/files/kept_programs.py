"""Programs that outlast the process, so that a new one neither traces nor compiles them.

JAX keeps what XLA has compiled, but finds it by the lowered program. To trace and to lower a decode
takes longer than all the rest of its start. Here a program is found by what its trace depends on:
the function, the types and static values of its arguments, JAX's settings, and the sources.

A program that depends on anything else is not kept: a drafter of the caller's own, whose source
nobody watches, a mesh, a call inside another trace. Neither is one that JAX itself has from an
earlier process: XLA writes a program out whole only after it has compiled it.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import platform
from collections import Counter
from collections.abc import Callable, Hashable
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jaxlib.mlir import ir

from specjax.files.machine import machine
from specjax.files.outputs import replacing_file
from specjax.files.user_cache import place_of_programs
from specjax.version import __version__

_MOST_LOADED = 64  # programs; one that is needed again is loaded again
_DIGEST_BYTES = hashlib.sha256().digest_size
_SOURCES = "specjax", "pallas_kernels"  # packages that programs are traced from
_WATCHED = {*_SOURCES, "jax", "jaxlib", "numpy", "builtins", "functools", "types"}

_FOUND = "/jax/compilation_cache/cache_hits"  # what JAX reports when it need not compile

_compiled_here: set[str] = set()
_events: Counter[str] = Counter()  # that JAX has reported


def kept(program: Any, *args: Any, **static: Hashable) -> Callable[..., Any]:
    """Returns a function that runs a program: from an earlier process, or else compiled now.

    Args:
      program: a function that `jax.jit` made.
      args: its arguments. None of them is used up.
      static: its static arguments, by name.

    Returns:
      A function of arguments of the same types, without the static ones.
    """
    usual: Callable[..., Any] = partial(program, **static)
    leaves, tree = jax.tree.flatten((args, {}))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return usual
    types = tuple((value.shape, value.dtype, value.weak_type) for value in map(jax.typeof, leaves))
    settings = jax.config.values
    if settings["jax_disable_jit"]:
        return usual
    name = _name(program, tree, types, tuple(static.items()), tuple(settings.values()))
    place = place_of_programs()
    if name is None or name in _compiled_here or place is None:
        return usual
    try:
        return _loaded(place / name, tree)
    except Exception:  # it is not there; or damaged, as only its reader can tell
        _compile_and_keep(program, args, static, place / name)
        return usual


def forget() -> None:
    """Drops the programs loaded from files. One that is needed again is loaded again."""
    _loaded.cache_clear()


@lru_cache(maxsize=256)
def _name(
    program: Any, tree: Any, types: Hashable, static: Hashable, settings: tuple[Hashable, ...]
) -> str | None:
    """The name of the file that keeps a program; None if the program is not to be kept."""
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return None
    told = io.BytesIO()
    pickler = _Pickler(told)
    try:
        pickler.dump((tree, static))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return None
    if not pickler.modules <= _WATCHED:
        return None
    function = f"{program.__module__}.{program.__qualname__}"
    rest = repr((function, types, settings, _surroundings()))
    return hashlib.sha256(told.getvalue() + rest.encode()).hexdigest()[:32]


class _Pickler(pickle.Pickler):
    """Writes equal values alike, and notes the packages whose classes and functions they hold."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True  # writes a value again instead of pointing to the place where it was
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        named = value if isinstance(value, type) else type(value)
        self.modules.add(named.__module__.partition(".")[0])
        return NotImplemented


@cache
def _surroundings() -> tuple[object, ...]:
    """All that a program depends on beside its arguments and JAX's settings."""
    sources = hashlib.sha256()
    for package in _SOURCES:
        found = find_spec(package)
        assert found is not None and found.origin is not None
        root = Path(found.origin).parent
        for file in sorted(root.rglob("*")):
            if file.suffix in (".py", ".h", ".cc"):
                sources.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return (
        sources.hexdigest(), __version__,
        jax.__version__, jaxlib.version.__version__, np.__version__,
        platform.python_version(), os.environ.get("XLA_FLAGS"), machine(),
    )  # fmt: skip


@lru_cache(maxsize=_MOST_LOADED)
def _loaded(file: Path, tree: Any) -> jax.stages.Compiled:
    """The program in a file. Raises any exception if the file is missing or damaged."""
    written = file.read_bytes()
    digest, rest = written[:_DIGEST_BYTES], written[_DIGEST_BYTES:]
    if hashlib.sha256(rest).digest() != digest:
        raise ValueError(f"{file} is damaged")
    executable, result = pickle.loads(rest)
    program: jax.stages.Compiled = deserialize_and_load(executable, tree, result)
    return program


def _compile_and_keep(
    program: Any, args: tuple[Any, ...], static: dict[str, Hashable], file: Path
) -> None:
    """Compiles a program where `jax.jit` will find it, and keeps it; not on a disk that is full."""
    _compiled_here.add(file.name)
    lowered = program.lower(*args, **static)
    module = lowered.compiler_ir()
    with module.context:  # JAX has no program of this name from other sources
        title = f"{ir.StringAttr(module.operation.attributes['sym_name']).value}_{file.name}"
        module.operation.attributes["sym_name"] = ir.StringAttr.get(title)
    before = _events[_FOUND]
    compiled = lowered.compile()
    if _events[_FOUND] > before:
        return
    try:
        executable, _, result = serialize(compiled)
        rest = pickle.dumps((executable, result))
        with replacing_file(file) as new:
            new.write_bytes(hashlib.sha256(rest).digest() + rest)
    except (OSError, ValueError, NotImplementedError):  # of a program that JAX cannot write out
        return


def _count(event: str, **_: object) -> None:
    _events[event] += 1


jax.monitoring.register_event_listener(_count)
