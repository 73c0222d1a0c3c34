"""The values that the fields of a Hugging Face directory's JSON files accept.

Every field that is read is listed here and checked before anything is computed from it. Null means
that the field is absent. Fields that are not listed may hold anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checks import Check, Number, Whole, check_flag, check_text, printable, shown
from specjax.files.json_objects import as_object, read_object
from specjax.model.config import CHECKS, SIZE, TOKEN

Schema = Mapping[str, Check]


def read_fields(file: Path, schema: Schema) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is not a JSON object, or a field has a value that it does not accept.
    """
    fields = read_object(file)
    try:
        check_fields(fields, schema)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return fields


def check_fields(fields: Mapping[str, Any], schema: Schema, place: str = "") -> None:
    """Raises ValueError if a field has a value that the schema does not accept."""
    for name, check in schema.items():
        if fields.get(name) is not None:
            check(f"{place}{name}", fields[name])


@dataclasses.dataclass(frozen=True)
class Object:
    """The check that a field holds an object whose own fields are as `schema` says."""

    schema: Schema

    def __call__(self, name: str, value: Any) -> None:
        """Raises ValueError unless it does."""
        check_fields(as_object(name, value), self.schema, f"{name}.")


@dataclasses.dataclass(frozen=True)
class Each:
    """The check that a field holds an object, or a list if `listed`, of such values."""

    check: Check
    listed: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raises ValueError unless it does."""
        if self.listed and not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {shown(value)}")
        for key, each in enumerate(value) if self.listed else as_object(name, value).items():
            self.check(f"{name}.{printable(key)}", each)


def check_tokens(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a token or a list of tokens."""
    for token in value if isinstance(value, list) else [value]:
        TOKEN(name, token)


_TEXTS = Each(check_text, listed=True)
_BITS = Whole(1, 64)
_GROUP_SIZE = Whole(-1, 2**31 - 1)

_ROPE: Schema = {
    "rope_type": check_text,
    "type": check_text,
    "rope_theta": CHECKS["rope_theta"],
    "partial_rotary_factor": Number(1, above=0),
    "factor": CHECKS["factor"],
    "original_max_position_embeddings": SIZE,
    **{name: CHECKS[name] for name in ("low_freq_factor", "high_freq_factor", "attention_factor")},
    **{name: CHECKS[name] for name in ("beta_fast", "beta_slow", "truncate")},
    **dict.fromkeys(("mscale", "mscale_all_dim"), Number(1e6, least=0)),
}
_WEIGHTS: Schema = {  # of compressed-tensors
    "num_bits": _BITS,
    "type": check_text,
    "strategy": check_text,
    "group_size": _GROUP_SIZE,
    "symmetric": check_flag,
}
_QUANTIZATION: Schema = {
    **dict.fromkeys(("quant_method", "version", "format", "checkpoint_format"), check_text),
    "bits": _BITS,
    "group_size": _GROUP_SIZE,
    "zero_point": check_flag,
    "sym": check_flag,
    "dynamic": Object({}),
    "ignore": _TEXTS,
    "sparsity_config": Object({"format": check_text}),
    "config_groups": Each(
        Object({"targets": _TEXTS, "format": check_text, "weights": Object(_WEIGHTS)})
    ),
}
GENERATION: Schema = {
    "eos_token_id": check_tokens,
    **dict.fromkeys(("pad_token_id", "bos_token_id"), Whole(-1, 2**31 - 1)),  # -1 for none
}
CONFIG: Schema = {
    **GENERATION,
    "architectures": _TEXTS,
    "layer_types": _TEXTS,
    **dict.fromkeys(("model_type", "hidden_act", "dtype", "torch_dtype"), check_text),
    **{name: CHECKS[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
    "num_hidden_layers": CHECKS["num_layers"],
    "num_attention_heads": CHECKS["num_heads"],
    "num_key_value_heads": CHECKS["num_kv_heads"],
    "head_dim": CHECKS["head_dim"],
    "rms_norm_eps": CHECKS["rms_norm_eps"],
    "max_position_embeddings": CHECKS["max_position_embeddings"],
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), check_flag),
    "use_sliding_window": check_flag,
    "sliding_window": Whole(0, 2**31 - 1),  # 0 where it is not in use
    "max_window_layers": Whole(0, 2**31 - 1),
    "rope_theta": CHECKS["rope_theta"],
    "partial_rotary_factor": Number(1, above=0),
    "original_max_position_embeddings": SIZE,
    **dict.fromkeys(("rope_scaling", "rope_parameters"), Object(_ROPE)),
    **dict.fromkeys(("quantization_config", "compression_config"), Object(_QUANTIZATION)),
}
