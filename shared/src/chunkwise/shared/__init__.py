"""What the chunkwise packages have in common, in three groups.

- `chunkwise.shared.kernels`: what kernels are made of: launches, the layout, tiles, products, decays, the inverse.
- `chunkwise.shared.operators`: what operators are made of: checks, chunk tables, the token recurrence, decode.
- `chunkwise.shared.testing`: what tests and benchmarks use: float64 oracles, seeded inputs, comparisons, and the
  compiler for TPUs that are not here.

`chunkwise.shared.chips` is the one table of TPU generations, `chunkwise.shared.compat` the one place for what differs
between releases of JAX, and `chunkwise.shared.version` the one way to the versions of the distributions.
"""

from chunkwise.shared import version

__version__ = version.of(__name__)
