"""Models by their Hugging Face id, downloaded into the hub's own cache.

Owns: which files are fetched, and what is said when that fails. huggingface_hub is imported when needed.
"""

from __future__ import annotations

import re
from pathlib import Path

from tinsmith.errors import InvalidInputError, TinkerError

FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str) -> bool:
    return _HUB_ID.fullmatch(source) is not None


def fetch(hub_id: str, revision: str | None = None) -> Path:
    """The local directory of a model on the hub; from the cache if it is there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise TinkerError(f"{hub_id} is on the hub: pip install huggingface_hub, or give a directory") from error
    if not is_hub_id(hub_id):
        raise InvalidInputError(f"{hub_id!r} is neither a directory, a .gguf file nor a hub id (owner/name)")
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:
        raise TinkerError(
            f"{hub_id} could not be fetched from the hub ({type(error).__name__}: {error}); check the name and the "
            "network, set HF_TOKEN for gated models, or give a local directory"
        ) from error
