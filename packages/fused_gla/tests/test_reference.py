"""Outputs, states and gradients against the float64 recurrence on the same rounded inputs."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gla import recurrent_gla, recurrent_simple_gla
from chunkwise.shared.testing import cases
from chunkwise.shared.testing.compare import GATE_GRADIENT_TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import GATES, make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.either_gla import chunk_either_gla

# Tighter for bfloat16 than the thresholds that all packages share: without a delta rule nothing amplifies a rounding.
# float16 has four times the digits of bfloat16.
OUTPUT = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
REST = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 5e-3}
# Gates that only say "forget everything", on every seventh token.
RESETS = (-1e5, -1e9, -np.inf)


def normal(x):
    """Return x as float32 flushes it: gradients through gates of -100 are as small as 1e-43."""
    x = np.asarray(x, np.float64)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, 0.0, x)


def retention(H):
    return tuple(np.log(1 - 2.0 ** (-5 - h)) for h in range(H))


def lightning(H, share=0.5):
    return tuple(-(8 / H) * (1 - share) * h for h in range(H))


@dataclass(frozen=True)
class Case(cases.Case):
    """Inputs of the operator.

    gate is one of GATES, or None, or "each": as many heads, one for each, and one for each of RESETS. The tokens after
    the sequences of a pack are padding and NaN.
    """

    gate: str | None = "logsigmoid"
    T: int = 40
    K: int = 8
    V: int = 8
    chunk_size: int = 16
    per_channel: bool = False
    gamma: tuple[float, ...] | None = None
    states: bool = True

    def __str__(self):
        return "-".join(f"{n}={x}" for n, x in vars(self).items() if x != getattr(Case, n))

    def inputs(self):
        N = self.B if self.lengths is None else len(self.lengths)
        sizes = dict(HV=self.HV, K=self.K, V=self.V, dtype=jnp.dtype(self.dtype), per_channel=self.per_channel)
        gates = GATES + RESETS if self.gate == "each" else (self.gate or "zero",)
        heads = [self.head(gate, num_states=N * self.states, **sizes) for gate in gates]
        x = {n: jnp.concatenate([h[n] for h in heads], axis=1 if n == "initial_state" else 2) for n in heads[0]}
        del x["beta"]
        if self.gate is None:
            del x["g"]
        if self.gamma is not None:
            x["g_gamma"] = jnp.asarray(self.gamma, jnp.float32)
        return x

    def head(self, gate, **options):
        if gate not in RESETS:
            return make_inputs(self.B, self.T, self.H, **options, gate=gate)
        x = make_inputs(self.B, self.T, self.H, **options)
        return x | dict(g=x["g"].at[:, ::7].set(gate))

    def check(self, fn):
        x, cu = self.inputs(), self.cu_seqlens
        rng = np.random.default_rng(1)
        do = jnp.asarray(rng.standard_normal(x["v"].shape), self.dtype)
        shape = x["initial_state"].shape if self.states else ()
        dht = jnp.asarray(rng.standard_normal(shape), jnp.float32) if self.states else None
        # e^-10000 is 0 in float64 already, and the reference has no use for an infinite gate.
        exact = {name: jnp.maximum(y, -1e4) if name.startswith("g") else y for name, y in x.items()}
        want = reference(**{"g": jnp.zeros(x["v"].shape[:3])} | exact, cu_seqlens=cu, do=do, dht=dht)
        end = self.T if cu is None else sum(self.lengths)
        poison = lambda y: y.at[:, end:].set(jnp.nan) if y.shape[1:2] == (self.T,) else y
        x = {name: poison(y) for name, y in x.items()}

        @jax.jit
        def run(x, cu, do, dht):
            out, pullback = jax.vjp(lambda x: fn(**x, output_final_state=self.states, cu_seqlens=cu), x)
            return *out, pullback((do, dht))[0]

        o, state, grads = run(x, cu, do, dht)
        assert o.dtype == x["v"].dtype
        assert not np.asarray(o)[:, end:].any(), "padding must be zero"
        for h in range(o.shape[2]):
            assert_close(f"o, head {h}", o[:, :, h], want[0][:, :, h], OUTPUT[self.dtype])
            if self.states:
                assert_close(f"final_state, head {h}", state[:, h], want[1][:, h], OUTPUT[self.dtype])
        for name, grad in grads.items():
            assert grad.dtype == x[name].dtype
            axis = {"g_gamma": 0, "initial_state": 1}.get(name, 2)
            heads = zip(np.moveaxis(np.asarray(grad), axis, 0), np.moveaxis(want[2][name], axis, 0), strict=True)
            # The gradient of a head's gate adds up terms of all channels, which are rounded and cancel.
            cancels = name == "g" and self.dtype == "bfloat16" and not self.per_channel
            limit = GATE_GRADIENT_TOLERANCE[self.dtype] if cancels else REST[self.dtype]
            for h, (got, ref) in enumerate(heads):
                # A head's gradient of g_gamma is one number, a sum over all tokens, of which a tenth may be left.
                assert_close(f"d{name}, head {h}", normal(got), normal(ref), limit)


# Few, because compiling takes long; together they hold every gate, chunk size, type, kind of tail and packing.
CASES = (
    # Heads side by side: four of 32 channels in packed sequences, and two of 64.
    Case(H=2, HV=8, K=16, V=32, T=70, chunk_size=32, lengths=(20, 0, 45)),
    Case(HV=4, K=48, V=64, T=70, chunk_size=64, dtype="bfloat16"),
    Case(HV=4, K=16, V=64, gamma=(-0.1, -1.0, -30.0, -np.inf), T=60, dtype="bfloat16", states=False),
    Case(gate="each", B=2, T=70, chunk_size=32),
    Case(gate="each", per_channel=True, states=False),
    Case(gate="each", lengths=(3, 0, 30)),
    Case(gate="each", per_channel=True, T=70, chunk_size=64, dtype="bfloat16"),
    Case(gate=None, gamma=lightning(4), H=4, HV=4, T=64, dtype="bfloat16"),
    Case(gate=None, gamma=(-1.0, -5.0, -30.0, -np.inf), H=4, HV=4, T=192, chunk_size=64),
    Case(gate=None, dtype="float16"),
    Case(T=1, states=False),
    Case(T=64, lengths=(0, 17, 15, 1, 0), states=False),
    Case(gate="spikes", per_channel=True, T=50, lengths=(16, 0, 1, 20)),
    Case(gate="strong", per_channel=True, T=48, lengths=(16, 0, 32), states=False),
)
# What only the kernels treat in another way: padded heads, blocks of channels, constant gates, sequences of a chunk.
KERNEL_CASES = (
    Case(gate="logsigmoid/10", dtype="bfloat16", T=70, K=60, V=100, chunk_size=64),
    Case(gate="spikes", per_channel=True, dtype="bfloat16", T=70, K=100, V=60, chunk_size=64),
    Case(
        gate="each",
        per_channel=True,
        dtype="bfloat16",
        T=70,
        H=2,
        HV=2,
        lengths=(3, 0, 29, 30),
        chunk_size=64,
        states=False,
    ),
    Case(gate="logsigmoid", gamma=(-0.1, -2.0), H=2, HV=2),
    Case(gate=None, gamma=retention(4), H=4, HV=4, T=64, dtype="bfloat16"),
    # More tokens than channels.
    Case(gate=None, gamma=(-1.0, -30.0), H=2, HV=2, T=150, chunk_size=128),
    Case(T=5, K=256, V=512),
    Case(T=30, K=320, V=129),
    Case(gate=None, gamma=(-0.1,), T=16, K=64, V=256),
    Case(gate="logsigmoid*10", per_channel=True, T=20, K=512, V=8),
    Case(gate=None, gamma=(-0.3,), T=50, lengths=(17, 20), dtype="bfloat16"),
    # XLA has no product of bfloat16 operands on CPUs for such shapes.
    Case(dtype="bfloat16", T=20, V=1),
    Case(dtype="bfloat16", T=20, H=3, HV=3),
    Case(dtype="bfloat16", T=20, V=16),
)
# One of every kind is quick; types, sizes and gates that repeat a kind are thorough.
QUICK = {
    "xla": [CASES[i] for i in (5, 7)],
    "fused": [CASES[2], KERNEL_CASES[1], KERNEL_CASES[5]],
}
THOROUGH = dict(
    test_recurrence=lambda case, implementation: case not in QUICK[implementation],
    test_recurrent=lambda case, implementation: implementation == "xla" and not case.per_channel,
)


@pytest.mark.parametrize(
    ("case", "implementation"),
    [*((case, "xla") for case in CASES), *((case, "fused") for case in CASES + KERNEL_CASES)],
    ids=str,
)
def test_recurrence(case, implementation):
    case.check(lambda **x: chunk_either_gla(**x, chunk_size=case.chunk_size, implementation=implementation))


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize(
    "case",
    [
        Case(gamma=(-0.1, -2.0), dtype="bfloat16", HV=2),
        Case(gate=None, T=20, H=2, HV=4, lengths=(3, 0, 16), states=False),
        Case(gate="each", per_channel=True, T=18, lengths=(3, 0, 13), HV=2),
    ],
    ids=str,
)
def test_recurrent(case, implementation):
    fn = recurrent_gla if case.per_channel else recurrent_simple_gla
    case.check(functools.partial(fn, implementation=implementation))
