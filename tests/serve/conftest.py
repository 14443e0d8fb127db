from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.serving import TINY, Server, serving, talking_model
from trilobite import compress, load_recipe


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("serve") / "talking")


@pytest.fixture(scope="session")
def server(talking: Path) -> Iterator[Server]:
    """Four slots, of a model with a chat template."""
    with serving(talking, "--slots", 4) as found:
        yield found


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in 3 bits."""
    folder = tmp_path_factory.mktemp("serve") / "packed"
    compress(str(TINY), folder, load_recipe("rtn3"))
    return folder
