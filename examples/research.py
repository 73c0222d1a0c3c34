"""Speculative decoding inside research code: under jit, and under vmap over keys.

python examples/research.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import specjax


def main() -> None:
    params = specjax.load("tiny")
    tokenizer = specjax.load_tokenizer("tiny")
    prompt = jnp.asarray(tokenizer.encode("Once upon a time"))
    drafter = specjax.QSpec(draft_length=3, activation="a8")

    sampling = specjax.Sampling(temperature=0.8, top_p=0.9)

    # The drafter and the sampling are part of the program; the key is its argument.
    @jax.jit
    def sample(key: jax.Array) -> jax.Array:
        result = specjax.decode(
            params, prompt, max_new_tokens=16, drafter=drafter, sampling=sampling, key=key
        )
        return result.tokens[0]

    # Three samples of one prompt.
    keys = jax.random.split(jax.random.key(1), 3)
    for tokens in jax.vmap(sample)(keys):
        print(f"sample: {tokenizer.decode(tokens)!r}")

    # Greedy output does not depend on the drafter, jitted or not.
    plain = specjax.decode(params, prompt, max_new_tokens=16, drafter=specjax.Autoregressive())
    drafted = jax.jit(lambda tokens: specjax.decode(params, tokens, max_new_tokens=16))(prompt)
    print("identical to plain decoding:", bool((plain.tokens == drafted.tokens).all()))


if __name__ == "__main__":
    main()
