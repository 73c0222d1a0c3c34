"""`specjax serve`: answers OpenAI's clients over HTTP."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specjax
from specjax.checks import shown
from specjax.commands.drafters import add_drafter
from specjax.commands.meshes import add_mesh, join, load_on, make_mesh
from specjax.commands.options import add_cache_bits, add_quantize, integer

if TYPE_CHECKING:
    from specjax.serving.engine import Engine

_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")
_KEY = "SPECJAX_API_KEY"


def add(commands: Any) -> None:
    """Adds the command."""
    help_ = "answer OpenAI's clients over HTTP"
    _add_serve(commands.add_parser("serve", help=help_, description=help_))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_ = 'a directory, a GGUF file, a name on the Hub, or "smollm2"; "tiny" if left out'
    add("model", nargs="?", default="tiny", metavar="MODEL", help=help_)
    add_quantize(parser)
    add_cache_bits(parser)
    add("--name", help="the model's name for clients; the last part of MODEL if left out")
    add("--host", default="127.0.0.1", help="the address to listen on; 127.0.0.1 if left out")
    add("--port", type=integer, default=8000, help="the port; 8000 if left out")
    for name, default, help_ in (
        ("--rows", None, "outputs made at a time; 8 if left out"),
        ("--context", None, "tokens of a prompt and its output; 2048, or the model's"),
        ("--queue", 64, "outputs that may wait for a row; 64 if left out"),
        ("--max-logprobs", 20, "log-probabilities that one may ask for per token; 20"),
        ("--max-body", 1_048_576, "bytes of a request; 1048576 if left out"),
    ):
        add(name, type=integer, default=default, metavar="N", help=help_)
    add("--cache-memory", type=float, metavar="GB", help="for all KV caches: as many rows as fit")
    add("--prefix-memory", type=float, default=0.25, metavar="GB", help="for prompts that begin "
        "alike; 0.25 if left out, 0 for none")  # fmt: skip
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="time to finish; 30")
    add("--log-prompts", action="store_true", help="write prompts into the log")
    add_drafter(parser)
    add_mesh(parser)
    parser.epilog = f"Clients must send the key in the environment variable {_KEY}, if it is set."
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve needs {', '.join(missing)}: pip install 'specjax[serve]'")
    _check(options)
    from specjax.serving.app import LOG, Door, make_app
    from specjax.serving.hosts import Leader, meet
    from specjax.serving.server import make_server

    first = join(options)
    hosts = None if first is None else meet(first)
    if isinstance(hosts, Leader):
        _make_engine(options).follow(hosts.calls())
        return
    with _bound(options.host, options.port) as socket_:
        engine = _make_engine(options, None if hosts is None else hosts.tell)
        tokenizer = specjax.load_tokenizer(options.model)
        rows, context = engine.plan.rows, engine.plan.context
        print(f"compiling for {rows} rows of {context} tokens", flush=True)
        engine.start()
        name = options.name or Path(options.model).name
        door = Door(name, options.max_body, os.environ.get(_KEY) or None, options.log_prompts)
        host, port, *_ = socket_.getsockname()
        line = f"{name} is served at http://{host}:{port}/v1"
        ready = partial(print, line, flush=True)
        _show_requests(logging.getLogger(LOG))
        app = make_app(engine, tokenizer, door)
        make_server(app, engine, options.grace, ready).run([socket_])
    if engine.gone is not None:
        raise engine.gone
    if hosts is not None:
        hosts.end()


def _make_engine(options: argparse.Namespace, told: Callable[..., None] | None = None) -> Engine:
    from specjax.serving.application import make_engine

    target, drafter = load_on(make_mesh(options), options)
    memory = options.cache_memory
    return make_engine(
        target.params, drafter=drafter, cache_bits=options.cache_bits, rows=options.rows,
        context=options.context, most_bytes=None if memory is None else int(memory * 1e9),
        queue=options.queue, prefix_bytes=int(options.prefix_memory * 1e9),
        logprobs=options.max_logprobs, told=told,
    )  # fmt: skip


def _bound(host: str, port: int) -> socket.socket:
    """A socket at the address, before the model is read. Raises OSError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        raise OSError(f"{host}, port {port}: {error.strerror or error}") from None
    return made


def _show_requests(log: logging.Logger) -> None:
    """Shows what this logger gets as it is, for programs that read JSON."""
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError where a number is too small or too large."""
    for name, least, most in (
        ("port", 0, 65535), ("queue", 0, 10**6), ("max_logprobs", 0, 20), ("max_body", 1, 2**31),
        ("cache_memory", 0, 1e6), ("prefix_memory", 0, 1e6), ("grace", 0, 1e6),
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be in {least} … {most:g}, got {shown(value)}")
