"""Batches to run a stage on, with every intermediate result of the gated delta rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.testing import compare, inputs, stage_oracle


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch to run a stage on: sizes, types, gates, packing.

    Attributes:
      B, T, H, HV, K, V, chunk_size: sizes.
      dtype: type of q, k, v and beta.
      gate: one of GATES.
      lengths: lengths of the sequences of a packed batch; the tokens after them, up to T, are padding.
      repeats: whether it shows nothing new in plain JAX, so that its test there is a thorough one.
    """

    B: int = 1
    T: int = 64
    H: int = 1
    HV: int = 1
    K: int = 64
    V: int = 64
    chunk_size: int = 64
    dtype: str = "float32"
    gate: str = "logsigmoid"
    lengths: tuple[int, ...] | None = None
    repeats: bool = False

    def __str__(self):
        """Name the case by its sizes."""
        packed = "" if self.lengths is None else f"-packed{len(self.lengths)}"
        sizes = f"B{self.B}-T{self.T}-H{self.H}-HV{self.HV}-K{self.K}-V{self.V}-c{self.chunk_size}"
        return f"{sizes}-{self.dtype}-{self.gate}{packed}"

    @property
    def cu_seqlens(self) -> jax.Array | None:
        """Boundaries int32 [N + 1], None for a batch whose rows are the sequences."""
        return None if self.lengths is None else inputs.boundaries(*self.lengths)

    def arguments(self) -> dict[str, jax.Array]:
        """Return the inputs and every intermediate result of the gated delta rule, float32, by name.

        Tokens past the last sequence are NaN: no stage may read them.
        """
        return dict(_arguments(self))

    def finite_arguments(self, *names: str) -> dict[str, jax.Array]:
        """Return some of the arguments with zeros in the padding; `gk_cum` are the `channel_gates`."""
        x = self.arguments() | {"gk_cum": self.channel_gates()}
        return {name: jnp.nan_to_num(x[name]) for name in names}

    def channel_gates(self) -> jax.Array:
        """Return cumulative gates per channel [B, T, HV, K]; the gates are a mixture of 0, -0.001, -2 and -30 nats.

        They are multiples of 2^-10 and their sums are below 2^14, so float32 holds the sums exactly.
        """
        shape = self.B, self.T, self.HV, self.K
        gates = np.random.default_rng(0).choice([0.0, -(2.0**-10), -2.0, -30.0], shape)
        return jnp.asarray(stage_oracle.cumsum(gates, self.chunk_size, self.cu_seqlens), jnp.float32)

    def assert_close(self, name: str, x, ref, tolerance: float = compare.STAGE_TOLERANCE) -> float:
        """Call `compare.assert_close` for x [B, T, ...], and demand exact zeros on padding; return the error."""
        if self.lengths is not None:
            assert not np.asarray(x)[:, sum(self.lengths) :].any(), f"{name}: padding must be zero"
        return compare.assert_close(name, x, ref, tolerance)


@functools.cache
def _arguments(case: Case) -> dict[str, jax.Array]:
    """Return the result of `Case.arguments`, computed once, because many tests run on the same cases."""
    N = case.B if case.lengths is None else len(case.lengths)
    sizes = (case.B, case.T, case.H, case.HV, case.K, case.V)
    x = inputs.make_inputs(*sizes, dtype=jnp.dtype(case.dtype), gate=case.gate, num_states=N)
    results = stage_oracle.chain(**x, chunk_size=case.chunk_size, cu_seqlens=case.cu_seqlens)
    x |= {name: value.astype(np.float32) for name, value in results.items()}
    if case.lengths is not None:
        for name in x.keys() - {"h", "initial_state", "final_state"}:
            x[name] = np.array(x[name])
            x[name][:, sum(case.lengths) :] = np.nan
    return {name: jnp.asarray(value) for name, value in x.items()}
