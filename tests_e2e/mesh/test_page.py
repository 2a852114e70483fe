"""The page on several devices says what is true on eight: the end-to-end tests run it on one."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/distribution.md"
THOROUGH = dict(test_page=True)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_page():
    blocks, names = BLOCK.findall(PAGE.read_text()), {}
    for (kind, code), (_, promised) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, str(PAGE), "exec"), names)
            assert printed.getvalue() == promised
