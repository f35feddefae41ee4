"""A model is patched once for all of its tests here, so its graphs outlive a test."""

import pytest


@pytest.fixture(autouse=True)
def _clean_dynamo():
    """Instead of the one that forgets every graph after each test."""
