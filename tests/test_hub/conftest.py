"""The stand-in for the Hub, with the Hub's client pointed at it, and a bundle to send there."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from tiny.hub import TOKEN, serving

GOLDEN = Path(__file__).parents[1] / "golden" / "format-0"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The client reads its environment when it is imported, which was long ago."""
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def golden(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "bundle"))
