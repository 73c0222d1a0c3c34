"""A set of prompts through a fixed number of rows, and what each drafter's proposals are worth.

python examples/benchmark_set.py
"""

from __future__ import annotations

from collections.abc import Sequence

import specjax

QUESTIONS = (
    "Tom has 5 apples and buys 7 more. How many apples does Tom have now?",
    "A train goes 60 miles in one hour. How far does it go in 3 hours?",
    "Anna reads 12 pages a day. How many pages does she read in a week?",
    "A box holds 8 eggs. How many boxes do 40 eggs fill?",
)
DRAFTERS = {
    "plain": specjax.Autoregressive(),
    "QSpec, W4A4": specjax.QSpec(draft_length=3, activation="a4"),
}


def main() -> None:
    params = specjax.load("tiny")
    tokenizer = specjax.load_tokenizer("tiny")
    prompts = [tokenizer.encode(f"Question: {text}\nAnswer:") for text in QUESTIONS]
    outputs = []
    for name, drafter in DRAFTERS.items():
        # Two rows decode at a time; a row takes the next prompt as soon as its own is finished.
        results = specjax.decode_many(params, prompts, rows=2, drafter=drafter, max_new_tokens=24)
        print(f"{name}: {describe([result.stats for result in results])}")
        outputs.append([list(result.tokens) for result in results])
    print("identical to plain decoding:", all(output == outputs[0] for output in outputs))
    print(tokenizer.decode(outputs[0][0]))


def describe(stats: Sequence[specjax.Stats]) -> str:
    """Counts of all prompts together."""
    rounds = sum(int(each.rounds) for each in stats)
    drafted = sum(int(each.drafted) for each in stats)
    accepted = sum(int(each.accepted) for each in stats)
    generated = sum(int(each.generated) for each in stats)
    kept = f"{accepted} of {drafted} drafts accepted"
    return f"{generated / rounds:.2f} tokens per verification, {kept}"


if __name__ == "__main__":
    main()
