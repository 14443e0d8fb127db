from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Server, serving, talking_model

pytest.importorskip("fastapi", reason="trilobite[serve] is not installed")


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("serve") / "talking")


@pytest.fixture(scope="session")
def server(talking: Path) -> Iterator[Server]:
    """Four slots, of a model with a chat template."""
    with serving(talking, "--slots", 4) as found:
        yield found
