"""--data, --tensor and --coordinator: the devices, and the hosts, that a model is divided over."""

from __future__ import annotations

import argparse
from functools import partial

import jax
from jax.sharding import Mesh

import specjax
from specjax.checks import shown
from specjax.commands.drafters import make_drafter, read_drafter
from specjax.commands.options import Target, integer, load_target
from specjax.model.params import map_models

_HEARTBEAT = 20  # seconds after which JAX gives up a host that is silent


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument_group("many devices").add_argument
    add("--data", type=integer, metavar="N", help="groups of devices, each with its own rows")
    add("--tensor", type=integer, metavar="N", help="devices of a group, over which the model is "
        "divided; as many as there are, if only --data is given")  # fmt: skip
    add("--coordinator", metavar="HOST:PORT", help="where the first of several hosts waits for the "
        "others; all run the same command, each with its own --process")  # fmt: skip
    add("--processes", type=integer, metavar="N", help="how many hosts there are")
    add("--process", type=integer, metavar="K", help="this host's number; 0 hears the clients")


def join(options: argparse.Namespace) -> str | None:
    """Waits for the other hosts. Returns the first one's name, or None where there is one host.

    Must come before anything asks for devices. Raises ValueError where an option is missing or out
    of its range.
    """
    numbers = options.processes, options.process
    if options.coordinator is None:
        if numbers != (None, None):
            raise ValueError("--processes and --process go with --coordinator HOST:PORT")
        return None
    host, colon, port = options.coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"--coordinator must be HOST:PORT, got {shown(options.coordinator)}")
    if None in numbers or not 0 <= options.process < options.processes:
        raise ValueError(
            "--coordinator needs --processes N and --process K with 0 ≤ K < N, got "
            f"{shown(options.processes)} and {shown(options.process)}"
        )
    jax.distributed.initialize(
        options.coordinator, options.processes, options.process,
        heartbeat_timeout_seconds=_HEARTBEAT,
    )  # fmt: skip
    return str(host)


def make_mesh(options: argparse.Namespace) -> Mesh | None:
    """The mesh that the options name; None: one device."""
    if options.data is None and options.tensor is None and jax.process_count() == 1:
        return None
    return specjax.parallel.mesh(options.data or 1, options.tensor)


def load_on(mesh: Mesh | None, options: argparse.Namespace) -> tuple[Target, specjax.Drafter]:
    """The model and the drafter that the options name, divided over the mesh.

    A model that is quantized or cast is held whole first, on every host. Raises what `load_target`
    and `make_drafter` raise.
    """
    chosen = read_drafter(options)
    whole = mesh is None or options.quantize is not None or bool(chosen.draft)
    target = load_target(
        options.model, options.quantize, options.group_size, mesh=None if whole else mesh
    )
    drafter = make_drafter(chosen, target)
    if mesh is None or not whole:
        return target, drafter

    divided = partial(specjax.parallel.shard, mesh=mesh)
    params, drafter = map_models(divided, (target.params, drafter))
    return target._replace(params=params), drafter
