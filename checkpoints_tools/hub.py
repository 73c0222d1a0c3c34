"""Models by their names on the Hugging Face Hub.

`huggingface_hub` downloads them to its own cache and finds them there again. It reads HF_TOKEN,
HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from specjax.checks import printable

CONFIGURATION = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_PART = r"[A-Za-z0-9][\w.\-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w.\-]+))?(?:/([\w.\-/]+\.gguf))?")
_SPLIT = re.compile(r"(.*)-00001-of-(\d{5}\.gguf)")


class HubName(NamedTuple):
    """A repository, its revision (None: main), and the GGUF file in it (None: a directory)."""

    repository: str
    revision: str | None
    file: str | None


def parse_hub_name(source: str) -> HubName | None:
    """Reads owner/name, owner/name@revision and owner/name/file.gguf; None for anything else."""
    match = _NAME.fullmatch(source)
    return None if match is None or ".." in source else HubName(*match.groups())


def download(name: HubName, weights: bool = True) -> Path:
    """Downloads the files of a model that the cache lacks.

    Args:
      name: the model's.
      weights: with its weights; otherwise the configuration and the tokenizer alone. A GGUF file is
        always downloaded whole.

    Returns:
      The directory or the GGUF file.

    Raises:
      FileNotFoundError: the model, revision or file does not exist.
      PermissionError: the model is gated, and no token allows it.
      OSError: the Hub cannot be reached, and the cache lacks the model.
    """
    import huggingface_hub  # here, because it takes a while
    from huggingface_hub import errors

    wanted = [*CONFIGURATION, *TOKENIZER, *(WEIGHTS if weights else ())]
    if name.file is not None:
        parts = _SPLIT.fullmatch(name.file)
        wanted = [name.file if parts is None else f"{parts[1]}-*-of-{parts[2]}"]
    what = name.repository if name.revision is None else f"{name.repository}@{name.revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            name.repository, revision=name.revision, allow_patterns=wanted
        )
    except errors.GatedRepoError:
        raise PermissionError(
            f"{what} is gated: accept its terms at huggingface.co/{name.repository}, then run "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{name.repository} has no revision {name.revision}") from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"the Hub has no model {what}, or it is private: check the name, or set HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise OSError(
            f"{what} is not in the cache, and the Hub cannot be reached; "
            "go online once, or give a directory or a GGUF file"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise OSError(f"{what} cannot be downloaded: {printable(error)}") from error
    path = Path(folder) if name.file is None else Path(folder, name.file)
    if not path.exists():
        raise FileNotFoundError(f"{what} has no file {name.file}")
    return path
