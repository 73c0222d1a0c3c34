"""One of the two processes of test_parallel.py, with two devices each.

python -m tests.support.on_processes PORT PROCESS
"""

from __future__ import annotations

import json
import os
import signal
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

import specjax
from specjax.model.parallel import mesh, shard
from tests.support.on_devices import NEW, PROMPTS, SAMPLING, WIDE
from tests.support.random_models import quantized_model, random_prompts


def main(port: str, process: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, process, heartbeat_timeout_seconds=60)
    params = quantized_model(WIDE)
    sampled = {**SAMPLING, "key": jax.random.key(5)}
    many = random_prompts((5, 70, 3), WIDE.vocab_size)
    for data, tensor in ((2, 2), (1, 4)):
        divided = shard(params, mesh(data, tensor))
        for options in ({}, sampled) if data == 2 else ({},):
            one, all_devices = (
                specjax.decode(p, PROMPTS, max_new_tokens=NEW, drafter=specjax.QSpec(), **options)
                for p in (params, divided)
            )
            jax.tree.map(np.testing.assert_array_equal, one, all_devices)
        report(decode=[data, tensor])
        if data == 2:
            one, all_devices = (
                specjax.decode_many(p, many, rows=2, max_new_tokens=NEW) for p in (params, divided)
            )
            for expected, found in zip(one, all_devices, strict=True):
                np.testing.assert_array_equal(found.tokens, expected.tokens)
            report(decode_many=[data, tensor])
    multihost_utils.sync_global_devices("both have reported")
    if process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until JAX notices that the other process is gone
        specjax.decode(divided, PROMPTS, max_new_tokens=NEW).tokens.block_until_ready()


def report(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
