"""The real model, fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.engine.models.load import LoadedModel, load_model
from tinsmith.engine.models.sources import default_model

CACHE = Path.home() / ".cache" / "tinsmith"


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32."""
    return load_model(default_model(CACHE), cache_dir=CACHE)
