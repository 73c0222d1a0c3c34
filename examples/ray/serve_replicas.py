"""Replicas of one model behind one address, by Ray Serve. Streams go through.

pip install -e '.[serve,ray]'
python examples/ray/serve_replicas.py
"""

from __future__ import annotations

import os
import time
from typing import Any

from ray import serve

MODEL = os.environ.get("MODEL", "tiny")
ROWS = 4


def build() -> Any:
    """Runs in each replica: loads the model, and compiles before the replica takes requests."""
    import specjax
    from specjax.serving.application import application

    params, tokenizer = specjax.load(MODEL), specjax.load_tokenizer(MODEL)
    return application(params, tokenizer, MODEL, rows=ROWS, context=256)


Replicas = serve.deployment(
    serve.ingress(build)(),
    name="specjax",
    max_ongoing_requests=2 * ROWS,
    # Another replica starts when the ones that run have more requests than rows.
    autoscaling_config={"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": ROWS},
)
app = Replicas.bind()  # `serve run examples.ray.serve_replicas:app` takes this

if __name__ == "__main__":
    serve.run(app)
    print("http://127.0.0.1:8000/v1", flush=True)
    while True:
        time.sleep(3600)
