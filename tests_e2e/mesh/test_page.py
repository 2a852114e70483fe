"""The pages on several devices say what is true on eight: the end-to-end tests run them on one."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
THOROUGH = dict(test_page=True)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["distribution", "tokens-over-devices"])
def test_page(name):
    blocks, names = BLOCK.findall((DOCS / f"{name}.md").read_text()), {}
    for (kind, code), (_, promised) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, name, "exec"), names)
            assert printed.getvalue() == promised
