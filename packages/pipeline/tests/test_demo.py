"""The demo on a little text."""

import pytest

from chunkwise.pipeline import demo


@pytest.mark.thorough
def test_demo(tmp_path, capsys):
    assert demo.main(["--tokens", "700", "--slice", "150", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("700 bytes of Python")
    assert "chunk_gated_delta_rule_fwd_h" in printed
    assert "staged, interpreted, 150 tokens" in printed
    assert printed.isascii()
    assert (tmp_path / "demo.png").stat().st_size > 10_000
