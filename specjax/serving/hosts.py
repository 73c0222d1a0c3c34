"""A server whose model is divided over several hosts.

Every host must run the same programs on its devices in the same order. The first host alone hears
clients and decides; it tells the others each call that it makes to its rows (`Batch`), and they
make the same. What they are told is JSON, over connections with a key that JAX's own runtime has
carried to them. No other call is made, whatever they are told.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from specjax.generation.batch_rows import Waiting
from specjax.generation.kinds import Kind
from specjax.generation.request import THREEFRY
from specjax.serving.asks import arrays_of
from specjax.serving.errors import HostGoneError
from specjax.speculation.sampling import Sampling

_CALLS = ("add", "fill", "launch", "finished", "take", "drop", "renew")
_KEY_BYTES, _PORT_BYTES = 32, 2
_LOOK = 0.05  # seconds between two looks at who is known
_MOST_BYTES = 2**28  # of a call: a prompt is told as text


class Followers:
    """The other hosts, as the first one sees them."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def tell(self, name: str, *arguments: Any) -> None:
        """Has all of them make a call. Raises HostGoneError where one cannot be reached."""
        values = [_written(each) if isinstance(each, Waiting) else each for each in arguments]
        call = json.dumps([name, *values]).encode()
        for connection in self._connections:
            try:
                if connection.poll():  # they never answer: it is the end of the connection
                    raise EOFError
                connection.send_bytes(call)
            except (OSError, EOFError):
                raise HostGoneError("another host of the mesh is gone: the server ends") from None

    def end(self) -> None:
        """Lets all of them end in order."""
        for connection in self._connections:
            try:
                connection.send_bytes(b"[]")
            except OSError:
                continue  # it has ended


class Leader:
    """The first host, as another one sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def calls(self) -> Iterator[list[Any]]:
        """The calls to make, until the first host ends. Raises HostGoneError where it is gone."""
        while call := self._next():
            name, *arguments = call
            if name not in _CALLS:
                raise ValueError(f"the first host told an unknown call: {str(name)[:40]!r}")
            yield [name, *map(_prompt, arguments)] if name == "add" else call

    def _next(self) -> list[Any]:
        try:
            call: list[Any] = json.loads(self._connection.recv_bytes(_MOST_BYTES))
        except (OSError, EOFError):
            raise HostGoneError("the first host of the mesh is gone: this one ends") from None
        return call


def meet(host: str) -> Followers | Leader:
    """Connects the processes of `jax.distributed`. All must call it.

    host: a name or address of the first process's machine, which the others can reach.

    Returns the others, in the first process, or the first one. Raises OSError where the first one
    cannot listen at this address or be reached.
    """
    if jax.process_index():
        invitation = multihost_utils.broadcast_one_to_all(_invitation(b"", 0)).tobytes()
        key, port = invitation[:_KEY_BYTES], int.from_bytes(invitation[_KEY_BYTES:], "big")
        return Leader(Client((host, port), authkey=key))
    key, known = secrets.token_bytes(_KEY_BYTES), list[Connection]()
    with socket.create_server((host, 0), backlog=jax.process_count()) as listener:
        listener.settimeout(_LOOK)
        multihost_utils.broadcast_one_to_all(_invitation(key, listener.getsockname()[1]))
        while len(known) < jax.process_count() - 1:
            with contextlib.suppress(OSError):  # nobody has come, or has gone again
                connection = Connection(listener.accept()[0].detach())
                threading.Thread(target=_greet, args=(connection, key, known), daemon=True).start()
    return Followers(known)


def _greet(connection: Connection, key: bytes, known: list[Connection]) -> None:
    """Adds a connection to those whose other end knows the key. A stranger may send anything, or
    nothing for ever."""
    with contextlib.suppress(AuthenticationError, EOFError, OSError):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        known.append(connection)


def _invitation(key: bytes, port: int) -> np.ndarray:
    """A key and a port, uint8[34]. A process that knows neither gives zeros."""
    return np.frombuffer(key.ljust(_KEY_BYTES, b"\0") + port.to_bytes(_PORT_BYTES, "big"), np.uint8)


def _written(prompt: Waiting) -> dict[str, Any]:
    """A prompt as JSON. It has no guide: a model that is divided takes no grammars."""
    assert prompt.key is not None
    return {
        "number": prompt.number,
        "tokens": prompt.tokens.tolist(),
        "limit": prompt.limit,
        "key": np.asarray(jax.random.key_data(prompt.key)).tolist(),
        "sampling": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(prompt.sampling)],
        "kind": int(prompt.kind),
        "echoes": prompt.echoes,
    }


def _prompt(written: dict[str, Any]) -> Waiting:
    """The prompt that `_written` wrote."""
    leaves, fields = jax.tree.flatten(arrays_of(Sampling()))
    sampling = [
        np.array(values, leaf.dtype)
        for leaf, values in zip(leaves, written["sampling"], strict=True)
    ]
    return Waiting(
        written["number"],
        np.array(written["tokens"], np.int32),
        written["limit"],
        jax.random.wrap_key_data(jnp.array(written["key"], jnp.uint32), impl=THREEFRY),
        jax.tree.unflatten(fields, sampling),
        None,
        Kind(written["kind"]),
        written["echoes"],
    )
