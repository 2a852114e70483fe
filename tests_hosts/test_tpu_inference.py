"""tpu-inference's own tests of its kernel, out of its wheel, with ours in its place: `nox -s host-tpu-inference`."""

import unittest

from chunkwise.integrations import tpu_inference
from host import module_of, path_of

_FILE = path_of("tpu-inference", "tests/kernels/gdn_attention_v3_test.py")
_THEIRS = module_of(_FILE, "gdn_attention_v3_test", {"tpu_inference.kernels.gdn.v3.wrapper": tpu_inference})

for _name, _value in vars(_THEIRS).items():
    if isinstance(_value, type) and issubclass(_value, unittest.TestCase):
        globals()[_name] = _value
