"""Fixtures for all tests. The factories behind them are plain functions in `tests/tiny.py`."""

import os

import pytest
import torch
from hypothesis import settings

# Random examples would make a red run impossible to repeat; the database is a local file.
settings.register_profile("hf_domino", deadline=None, derandomize=True, database=None)
settings.load_profile("hf_domino")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--generate-examples",
        type=int,
        default=int(os.environ.get("HF_DOMINO_GENERATE_EXAMPLES", "60")),
        help="how many combinations of generate arguments the property tests try",
    )


@pytest.fixture
def generate_examples(request: pytest.FixtureRequest) -> int:
    """How many combinations of generate arguments a property test tries."""
    return request.config.getoption("--generate-examples")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
