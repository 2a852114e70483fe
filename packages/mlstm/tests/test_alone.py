"""Every argument of every public function works where no other package is imported."""

from tests import alone_suite


def test_alone():
    alone_suite.run("mlstm")
