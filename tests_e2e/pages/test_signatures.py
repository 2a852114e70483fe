"""What pages say of calls by position is what the functions have, ours and those of transformers.

`nox -s host-flash-linear-attention` compares the page on flash-linear-attention with its functions.
"""

import importlib.util
from pathlib import Path

import pytest

from tests_e2e.pages import signatures


@pytest.mark.parametrize("page", ["from-flash-linear-attention", "from-transformers"])
def test_ours(page):
    rows = signatures.differences(page)
    assert rows
    for row in rows:
        assert row.here == signatures.order_here(row.ours), row.ours


@pytest.mark.torch
def test_transformers():
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("needs transformers")
    models = Path(spec.origin).parent / "models"
    signatures.check(signatures.differences("from-transformers"), sorted(models.glob("*/modeling_*.py")))
