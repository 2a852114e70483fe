"""Both implementations against the definition in float64: values, states and gradients, for every form of a batch."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.causal_conv1d import Config, causal_conv1d, causal_conv1d_update
from chunkwise.shared.testing import conv_norm_oracle
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries
from tests.gradients import numeric_gradients


@dataclass(frozen=True)
class Batch:
    """A batch: sizes, and what its sequences are.

    Attributes:
      B, T, D, W: sizes.
      lengths: of the sequences of a packed batch.
      segments: for every row of the batch the lengths of its segments; negative for padding.
      config: tile sizes, so that a row has several blocks.
    """

    B: int = 1
    T: int = 20
    D: int = 5
    W: int = 4
    lengths: tuple[int, ...] | None = None
    segments: tuple[tuple[int, ...], ...] | None = None
    config: Config | None = None

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    def options(self) -> dict:
        """Return cu_seqlens and segment_ids."""
        ids = None
        if self.segments is not None:
            # Ids repeat, and only their change counts.
            rows = [[(n % 2 + 3 if length > 0 else -1 - n,) * abs(length) for n, length in enumerate(row)]
                    for row in self.segments]  # fmt: skip
            ids = jnp.asarray([sum(row, ()) for row in rows], jnp.int32)
        cu_seqlens = None if self.lengths is None else boundaries(*self.lengths)
        return dict(cu_seqlens=cu_seqlens, segment_ids=ids)

    def padding(self) -> np.ndarray:
        """Return which tokens belong to no sequence, bool [B, T]."""
        free = np.ones((self.B, self.T), bool)
        for x in conv_norm_oracle.sequences(self.B, self.T, **self.options()):
            free[x.row, x.start : x.end] = False
        return free

    def inputs(self, states: bool, dtype=jnp.float32) -> dict:
        rng = np.random.default_rng(0)
        shapes = dict(x=(self.B, self.T, self.D), weight=(self.D, self.W), bias=(self.D,))
        shapes |= dict(initial_state=(self.N, self.W - 1, self.D)) if states else {}
        return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}

    def definition(self, **x):
        """Return y and the final state in float64, token by token."""
        return conv_norm_oracle.causal_conv1d(**x, name="silu", **self.options())


SMALL = Config(32, 128)
BATCHES = {
    "rows": Batch(B=2, T=37, D=8, config=SMALL),
    "two-tokens": Batch(T=2, W=8),
    "several-blocks": Batch(T=128, D=130, W=2, config=SMALL),
    "packed": Batch(T=70, D=130, lengths=(0, 1, 2, 29, 0, 33, 1), config=SMALL),
    "packed-short": Batch(T=40, W=8, lengths=(1, 3, 0, 9, 7, 8, 2), config=Config(16, 128)),
    "segments": Batch(B=2, T=66, W=3, segments=((-3, 2, 30, 1, 20, -10), (33, 2, -5, 1, 25)), config=SMALL),
    "row-of-padding": Batch(B=2, T=18, segments=((-18,), (5, 1, 12))),
}


# The other batches hold other sizes.
THOROUGH = dict(
    test_values=lambda implementation, batch, states: (
        not states or (implementation, batch) not in (("pallas", "packed"), ("pallas", "segments"), ("xla", "segments"))
    ),
    test_activations=lambda bias, activation: not bias or activation != "sigmoid",
    test_gradients_of_plain_jax_are_those_of_the_definition=lambda batch: batch == "row-of-padding",
    test_gradients_of_the_kernel_are_those_of_plain_jax=lambda batch, states: not states or batch != "packed",
)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_values(batch, states, implementation):
    batch = BATCHES[batch]
    for dtype in (jnp.float32, jnp.bfloat16):
        x = batch.inputs(states, dtype)
        spoilt = x | dict(x=jnp.where(batch.padding()[:, :, None], jnp.nan, x["x"]))
        options = dict(
            output_final_state=True, activation="silu", **batch.options(), implementation=implementation,
            config=batch.config if implementation == "pallas" else None,
        )  # fmt: skip
        y, final = causal_conv1d(**spoilt, **options)
        want, state = batch.definition(**x)
        assert y.dtype == final.dtype == dtype
        assert_close("y", y, want, TOLERANCE[dtype.dtype.name])
        assert not np.asarray(y)[batch.padding()].any()
        np.testing.assert_array_equal(np.asarray(final, np.float64), state)


@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_activations(activation, bias, implementation):
    batch = BATCHES["rows"]
    x = batch.inputs(True) | ({} if bias else dict(bias=None))
    y, final = causal_conv1d(**x, activation=activation, implementation=implementation)
    assert final is None
    assert_close("y", y, conv_norm_oracle.causal_conv1d(**x, name=activation)[0], TOLERANCE["float32"])


def test_no_activation_unless_one_is_named():
    """So it is in causal-conv1d and flash-linear-attention."""
    x, weight = jnp.ones((1, 5, 3)), jnp.ones((3, 4))
    y, _ = causal_conv1d(x, weight)
    decoded, _ = causal_conv1d_update(x, jnp.zeros((1, 3, 3)), weight)
    np.testing.assert_array_equal(y[0, :, 0], [1, 2, 3, 4, 4])
    np.testing.assert_array_equal(decoded, y)


@pytest.mark.parametrize("batch", ["rows", "packed-short", "row-of-padding"])
def test_gradients_of_plain_jax_are_those_of_the_definition(batch):
    sizes = {"rows": dict(T=6, D=2, config=None), "packed-short": dict(D=1), "row-of-padding": dict(D=1)}[batch]
    batch = Batch(**vars(BATCHES[batch]) | sizes)
    x = batch.inputs(True)
    cotangents = [np.random.default_rng(1).standard_normal(y.shape) for y in batch.definition(**x)]
    run = lambda x: causal_conv1d(
        **x, output_final_state=True, activation="silu", **batch.options(), implementation="xla"
    )
    (d,) = jax.vjp(run, x)[1](tuple(jnp.asarray(c, jnp.float32) for c in cotangents))
    for name, want in numeric_gradients(batch.definition, x, cotangents).items():
        assert_close(f"d{name}", d[name], want, GRADIENT_TOLERANCE["float32"])


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_gradients_of_the_kernel_are_those_of_plain_jax(batch, states):
    """Plain JAX is differentiated by JAX, and its gradients are compared with the definition above."""
    types = (jnp.float32, jnp.bfloat16) if batch == "segments" else (jnp.float32,)
    batch = BATCHES[batch]
    for dtype in types:
        x = batch.inputs(states, dtype)
        rng = np.random.default_rng(1)
        dy = jnp.asarray(rng.standard_normal(x["x"].shape), dtype)
        dfinal = jnp.asarray(rng.standard_normal((batch.N, batch.W - 1, batch.D)), dtype)

        @functools.partial(jax.jit, static_argnums=0)
        def gradients(implementation, x, cotangents):
            run = lambda x: causal_conv1d(
                **x, output_final_state=True, activation="silu", **batch.options(), implementation=implementation,
                config=batch.config if implementation == "pallas" else None,
            )  # fmt: skip
            return jax.vjp(run, x)[1](cotangents)[0]

        wide = jax.tree.map(lambda y: y.astype(jnp.float32), (x, (dy, dfinal)))
        want = gradients("xla", *wide)
        spoilt = (
            jnp.where(batch.padding()[:, :, None], jnp.nan, x["x"]),
            jnp.where(batch.padding()[:, :, None], jnp.nan, dy),
        )
        for name, d in gradients("pallas", x | dict(x=spoilt[0]), (spoilt[1], dfinal)).items():
            assert d.dtype == dtype
            assert_close(f"d{name}", d, want[name], GRADIENT_TOLERANCE[dtype.dtype.name])


@pytest.mark.parametrize("before", [jnp.float32, jnp.bfloat16, jnp.float16, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("T", [1, 2, 8])
def test_types_of_states(T, dtype, before):
    """Final states have the type of the initial ones, or of x, under every packing; a pool keeps its type."""
    x = jax.ShapeDtypeStruct((1, T, 4), dtype)
    states = None if before is None else jax.ShapeDtypeStruct((1, 3, 4), before)
    weight, ids, cu = jnp.ones((4, 4)), jnp.zeros((1, T), jnp.int32), jnp.array([0, T], jnp.int32)
    for packing in ({}, dict(segment_ids=ids), dict(cu_seqlens=cu)):
        run = lambda x, s, packing=packing: causal_conv1d(x, weight, None, s, True, **packing, implementation="xla")
        y, final = jax.eval_shape(run, x, states)
        assert (y.dtype, final.dtype) == (dtype, before or dtype)
    if states is not None:
        y, pool = jax.eval_shape(lambda x, s: causal_conv1d_update(x, s, weight), x, states)
        assert (y.dtype, pool.dtype) == (dtype, before)
