"""What the page on moving here says of calls by position is what functions of transformers have, and ours have not.

`nox -s host-flash-linear-attention` compares the page on flash-linear-attention with its functions.
"""

import importlib.util
from pathlib import Path

import pytest

from tests_e2e.pages import signatures


@pytest.mark.parametrize("library", ["flash-linear-attention", "transformers"])
def test_ours(library):
    rows = signatures.differences(library)
    assert rows
    for row in rows:
        assert row.there != signatures.order_here(row.ours)[: len(row.there)], row.ours


@pytest.mark.torch
def test_transformers():
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("needs transformers")
    models = Path(spec.origin).parent / "models"
    signatures.check(signatures.differences("transformers"), sorted(models.glob("*/modeling_*.py")))
