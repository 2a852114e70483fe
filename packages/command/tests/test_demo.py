"""The demo: as many lines as the command stores, and fewer tokens."""

import re

import pytest
from rich.console import Console

from chunkwise.command import cli, demo


@pytest.fixture(scope="module")
def facts():
    return demo.read_facts(16)


def test_facts_are_lines_of_the_library(facts):
    assert len(facts) == 16
    assert all(len(line) == demo.WIDTH and line.isascii() for line in facts.values())


THOROUGH = dict(
    # The sessions `oldest` and `build` run the demo as a user does.
    test_demo=True,
    # They draw the picture, or all but the picture, a second time.
    test_no_picture_without_matplotlib=True,
)


def test_a_library_without_lines(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text("TABLE = 1\n")
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=r"^The standard library must have docstrings; got none in .*\.$"):
        demo.read_facts(4)


def test_bits_spell_the_line():
    line = "Uuencode file".ljust(demo.WIDTH)
    assert demo.line_of(demo.bits_of(line)) == line
    assert demo.line_of(demo.bits_of("\n" * demo.WIDTH)) == "?" * demo.WIDTH


def test_the_delta_rule_recalls_more(facts):
    few, many = demo.recall(facts, (4, 16))
    assert list(many.answers) == ["delta rule", "linear attention"]
    assert few.right_lines("delta rule") == 4
    assert many.right_lines("delta rule") == 16
    assert many.right_lines("linear attention") < 8
    assert many.right_characters("linear attention") < many.right_characters("delta rule") == 1


def test_a_wrong_result_is_judged():
    lines = {"name": "a line"}
    runs = [demo.Run(way, 64, seconds, 1e-7) for way, seconds in (("chunk by chunk", 1.0), ("token by token", 8.0))]
    right = demo.Recall(lines, {"delta rule": ["a line"], "linear attention": ["a lint"]})
    good, sentence = demo.judge(right, runs)
    assert good
    assert "8.0 times as fast" in sentence
    assert not demo.judge(right, [*runs[:1], demo.Run("token by token", 64, 8.0, 1e-3)])[0]
    assert not demo.judge(demo.Recall(lines, {key: ["a line"] for key in right.answers}), runs)[0]


def test_demo(tmp_path, capsys):
    assert demo.run(tmp_path, Console(width=150), lengths=(32, 64)) == 0
    printed = capsys.readouterr()
    assert printed.out.isascii()
    assert printed.out.startswith("The text: the standard library of Python")
    assert "Judgement: of 32 lines the delta rule gives back 32" in printed.out
    assert "storing lines" in printed.err
    words = " ".join(printed.out.split())
    assert re.search(r"128 channels held at most \d+ whole lines: the delta rule gives back 4 of 4", words)
    assert "the gated delta rule works on this machine" in words
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_no_picture_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert demo.run(tmp_path, Console(width=150), counts=(4, 16), lengths=(32,)) == 0
    assert "There is no picture, because matplotlib is missing." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_command_knows_the_demo():
    assert cli.make_parser().parse_args(["demo", "--output", "here"]).output.name == "here"
