"""Names on the Hugging Face Hub, against a server on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints_tools.hub import HubName, parse_hub_name
from tests.conftest import ROOT
from tests.support.gguf_files import fields, random_tensors, write_gguf
from tests.support.hf_directories import write_model
from tests.support.hub_server import hub

SCRIPT = """
import sys, traceback
from checkpoints_tools.sources import locate
from checkpoints_tools.loading import read
for source in sys.argv[1:]:
    try:
        path = locate(source, weights=source.endswith("gguf") or "whole" in source)
        print(path.name if path.is_file() else sorted(each.name for each in path.iterdir()))
        if "whole" in source:
            print(read(source).config.hidden_size)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M", HubName("HuggingFaceTB/SmolLM2-135M", None, None)),
        ("a/b@v1.0", HubName("a/b", "v1.0", None)),
        ("a/b/c.gguf", HubName("a/b", None, "c.gguf")),
        ("a/b@main/q4/c.gguf", HubName("a/b", "main", "q4/c.gguf")),
        *((odd, None) for odd in ("a", "/a/b", "./a/b", "../a", "a/b/c", "a/../b", "a/b@")),
    ],
)
def test_names(source: str, expected: HubName | None) -> None:
    assert parse_hub_name(source) == expected


def _run(home: Path, *sources: str, **environment: str) -> list[str]:
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    settings |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "0")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sources], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | settings | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_models_on_the_hub(tmp_path: Path) -> None:
    """Only the files needed come, once; every refusal is one sentence."""
    root, home = tmp_path / "hub", tmp_path / "home"
    write_model(root / "me" / "whole")
    (root / "me" / "whole" / "tokenizer.json").write_text("{}")
    (root / "me" / "whole" / "pytorch_model.bin").write_text("never")
    (root / "me" / "gated").mkdir()
    (root / "me" / "files").mkdir()
    write_gguf(root / "me" / "files" / "q4.gguf", fields(), random_tensors(kind="Q4_0"))
    with hub(root) as server:
        endpoint = {"HF_ENDPOINT": server.address}
        lines = _run(
            home, "me/whole", "me/files/q4.gguf", "me/files/q5.gguf", "me/nothing", "me/gated",
            "me/whole@v9", **endpoint,
        )  # fmt: skip
        asked = len(server.asked)
        assert not any("pytorch_model" in each for each in server.asked)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    kept = ["config.json", *shards, "model.safetensors.index.json", "tokenizer.json"]
    assert lines == [
        str(kept), "64", "q4.gguf",
        "FileNotFoundError: me/files has no file q5.gguf",
        "FileNotFoundError: the Hub has no model me/nothing, or it is private: check the name, "
        "or set HF_TOKEN",
        "PermissionError: me/gated is gated: accept its terms at huggingface.co/me/gated, then run "
        "`hf auth login` or set HF_TOKEN",
        "FileNotFoundError: me/whole has no revision v9",
    ]  # fmt: skip
    assert asked > 0
    offline = _run(home, "me/whole", "me/other", HF_HUB_OFFLINE="1", **endpoint)
    assert offline == [
        str(kept), "64",
        "OSError: me/other is not in the cache, and the Hub cannot be reached; go online once, "
        "or give a directory or a GGUF file",
    ]  # fmt: skip
