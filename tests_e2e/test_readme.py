"""The Python blocks of the root README, run in one go, and the output it promises."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from chunkwise.shared import tpu

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.tpu
@pytest.mark.skipif(not tpu.has_libtpu(), reason="the README compiles for a TPU, which needs libtpu")
def test_readme():
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:```\n(.*?)^```)?", README.read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {}
    for code, promised in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(README), "exec"), names)
        assert printed.getvalue() == promised
