"""The code that the chunkwise packages have in common, in seven rooms. A room may import the rooms above it.

- `chunkwise.shared.kernels`: the parts of kernels: launches, the layout, tiles, products, decays, the inverse.
- `chunkwise.shared.call`: the call of a user: arguments, their checks, signatures.
- `chunkwise.shared.plain`: the recurrences of operators in plain JAX, token by token and chunk by chunk.
- `chunkwise.shared.implementation`: the implementations of an operator, and how one runs.
- `chunkwise.shared.mesh`: operators over the devices of a mesh.
- `chunkwise.shared.serving`: serving steps, pools of states and their slots, decode and rings, with their kernels.
- `chunkwise.shared.testing`: the parts of tests and benchmarks: float64 oracles, seeded inputs, comparisons, and the
  compiler for TPUs that are not here.

`chunkwise.shared.operator` is the record of an operator and the one way from a call to an implementation,
`chunkwise.shared.chips` is the one table of TPU generations, `chunkwise.shared.compat` the one place for differences
between releases of JAX, and `chunkwise.shared.version` the one way to the versions of the distributions.
"""

import sys

from chunkwise.shared import version

__version__ = version.of(__name__)
version.check_siblings(sys.modules["chunkwise"].__path__, __version__)
