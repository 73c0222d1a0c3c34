"""Measures OpenVINO on a stateful int4 model of random weights (groups of 128, int4 head).

The model is Hugging Face's, exported by optimum-intel and compressed by nncf. OpenVINO GenAI reads
the same files, but needs a tokenizer and samples, so the script calls the runtime itself.

    python -m benchmarks.peers.openvino [--batch 1 8] [--context 128 2048]
"""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path

import nncf
import numpy as np
import openvino as ov

from benchmarks import peers

# int8 activations in groups (128 is faster than the default's 32), or none quantized: then
# OpenVINO multiplies in bfloat16 where the processor does.
GROUP_SIZES = {"a8": 128, "a16": 0}
PROMPT_CHUNK = 256  # the exported model returns the logits of every token


def write_model(folder: Path, *, layers: int) -> None:
    """Makes an OpenVINO model of the shape: exported in 16 bits, then compressed."""
    import torch
    from optimum.exporters.openvino import export_from_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = peers.SHAPE
    config = LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"], num_hidden_layers=layers,
        num_attention_heads=shape["num_heads"], num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"], max_position_embeddings=shape["max_position_embeddings"],
        rope_theta=shape["rope_theta"], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with tempfile.TemporaryDirectory(dir=folder.parent) as exported:
        task = "text-generation-with-past"
        export_from_model(model, exported, task=task, patch_16bit_model=True)
        del model
        compressed = nncf.compress_weights(
            ov.Core().read_model(f"{exported}/openvino_model.xml"),
            mode=nncf.CompressWeightsMode.INT4_SYM, group_size=128, ratio=1.0, all_layers=True,
        )  # fmt: skip
        ov.save_model(compressed, folder / "openvino_model.xml")


class Decoder:
    """A request of `batch` sequences, each with `length` tokens of prompt in its own cache."""

    def __init__(self, model: ov.CompiledModel, batch: int, length: int) -> None:
        self.request = model.create_infer_request()
        self.batch, self.position = 1, 0
        self._read(length)
        for state in self.request.query_state():
            state.state = ov.Tensor(np.repeat(state.state.data, batch, axis=0))
        self.batch = batch

    def step(self) -> None:
        """Decodes one new token for each sequence."""
        self._infer(1)

    def read_anew(self, length: int) -> None:
        """Reads a prompt into an emptied cache."""
        self.request.reset_state()
        self.position = 0
        self._read(length)

    def _read(self, length: int) -> None:
        for start in range(0, length, PROMPT_CHUNK):
            self._infer(min(PROMPT_CHUNK, length - start))

    def _infer(self, new: int) -> None:
        """Decodes token 1 `new` times in each sequence."""
        stop = self.position + new
        positions = np.arange(self.position, stop)
        self.request.infer(
            {
                "input_ids": np.ones((self.batch, new), np.int64),
                "attention_mask": np.ones((self.batch, stop), np.int64),
                "position_ids": np.broadcast_to(positions, (self.batch, new)),
                "beam_idx": np.arange(self.batch, dtype=np.int32),
            },
            share_inputs=True,
        )
        self.position = stop


def main() -> None:
    options = peers.parser(__doc__).parse_args()
    folder = peers.made(
        options.models / f"openvino-{options.layers}",
        partial(write_model, layers=options.layers),
    )
    for activation, group_size in GROUP_SIZES.items():
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": peers.CORES,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_size,
        }
        model = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", settings)
        engine = "OpenVINO int4", ov.__version__, "int4", activation
        for batch, context in itertools.product(options.batch, options.context):
            step = Decoder(model, batch, peers.prompt_length(context)).step
            peers.measure(*engine, batch, context, step)
        for length in options.read:
            read = partial(Decoder(model, 1, 0).read_anew, length)
            peers.measure(*engine, 1, 0, read, length)


if __name__ == "__main__":
    main()
