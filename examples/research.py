"""Speculative decoding inside research code: under jit, and under vmap over keys.

python examples/research.py
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

import specjax


def main() -> None:
    params = specjax.load("tiny")
    tokenizer = specjax.load_tokenizer("tiny")
    prompt = jnp.asarray(tokenizer.encode("Once upon a time"))
    drafter = specjax.QSpec(draft_length=3, activation="a8")

    # The sampling is part of the program; the key is an argument of it.
    @partial(jax.jit, static_argnames="sampling")
    def sample(key: jax.Array, sampling: specjax.Sampling) -> jax.Array:
        result = specjax.decode(
            params, prompt, max_new_tokens=16, drafter=drafter, sampling=sampling, key=key
        )
        return result.tokens[0]

    sampling = specjax.Sampling(temperature=0.8, top_p=0.9)

    # vmap over keys: three samples of one prompt as one program.
    keys = jax.random.split(jax.random.key(1), 3)
    for tokens in jax.vmap(partial(sample, sampling=sampling))(keys):
        print(f"sample: {tokenizer.decode(tokens)!r}")

    # Greedy output does not depend on the drafter, jitted or not.
    plain = specjax.decode(params, prompt, max_new_tokens=16, drafter=specjax.Autoregressive())
    drafted = jax.jit(lambda tokens: specjax.decode(params, tokens, max_new_tokens=16))(prompt)
    print("identical to plain decoding:", bool((plain.tokens == drafted.tokens).all()))


if __name__ == "__main__":
    main()
