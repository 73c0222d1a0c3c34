"""A set of prompts through several processes, each with a copy of the model, by Ray Data.

An actor that is killed is started again, and its prompts are decoded again: every prompt has one
result, and the result is the same.

pip install -e '.[ray]'
python examples/ray/evaluate_in_actors.py
"""

from __future__ import annotations

from typing import Any

import ray

MODEL, ACTORS, ROWS = "tiny", 2, 4
QUESTIONS = [f"Question: What is {n} plus {n + 1}?\nAnswer:" for n in range(24)]


class Decoder:
    """Holds the model in an actor's process, and decodes batches of prompts."""

    def __init__(self, model: str = MODEL) -> None:
        import specjax

        self.params, self.tokenizer = specjax.load(model), specjax.load_tokenizer(model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import specjax

        texts = [str(text) for text in batch["prompt"]]
        made = specjax.generate(self.params, self.tokenizer, texts, rows=ROWS, max_new_tokens=16)
        return {**batch, "answer": [each.text for each in made]}


def main() -> None:
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    prompts = ray.data.from_items([{"prompt": text} for text in QUESTIONS])
    actors = ray.data.ActorPoolStrategy(size=ACTORS)
    rows = prompts.map_batches(Decoder, batch_size=2 * ROWS, compute=actors, num_cpus=1).take_all()
    alone = Decoder()({"prompt": QUESTIONS})["answer"]
    print("identical to one process:", [row["answer"] for row in rows] == alone)


if __name__ == "__main__":
    main()
