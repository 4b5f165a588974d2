"""Servers of the tests have processes of chat templates that start at once."""

from collections.abc import Iterator

import pytest
from tiny.renderers import forked_renderers, forking_server


@pytest.fixture(scope="session")
def forking() -> Iterator[str]:
    with forking_server() as place:
        yield place


@pytest.fixture(scope="module", autouse=True)
def renderers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a server is started: the file's name says so."""
    if "serve" not in request.path.stem:
        yield
        return
    with forked_renderers(request.getfixturevalue("forking")):
        yield
