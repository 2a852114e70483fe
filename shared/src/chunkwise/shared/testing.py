"""Seeded inputs, the error metric and its thresholds, for tests, benchmarks and the check command."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared import stage_reference

# err(x, ref) = RMS(x - ref) / RMS(ref): outputs and states, then gradients.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}
GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 8e-3}
GATE_GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}

GATES = ("logsigmoid/10", "logsigmoid", "logsigmoid*10", "logsigmoid*100", "zero", "spikes", "strong")

# What one stage loses on its own arguments; its results are float32 whatever the inputs are.
STAGE_TOLERANCE = 1e-6


def make_gate(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return log decays of `shape` [B, T, ...] in nats.

    Args:
      kind: one of GATES. "logsigmoid*10" is ten times the log sigmoid of a normal variable; "spikes" is the log
        sigmoid with -30 on every seventh token; "strong" is -30 on every token. Or "resets", for operators only: -1e9
        and -inf in turn on every seventh token, which no sum of gates survives.
      rng: source of randomness.
      shape: shape of the result.
    """
    gate = -np.logaddexp(0.0, rng.standard_normal(shape))
    match kind:
        case "zero":
            return np.zeros(shape)
        case "strong":
            return np.full(shape, -30.0)
        case "spikes":
            gate[:, ::7] = -30.0
            return gate
        case "resets":
            gate[:, ::7], gate[:, 7::14] = -1e9, -np.inf
            return gate
    strength = kind.removeprefix("logsigmoid")
    return gate * (1.0 if not strength else float(strength[1:]) if strength[0] == "*" else 1 / float(strength[1:]))


def make_inputs(
    B=1, T=64, H=1, HV=None, K=64, V=64, *, dtype=jnp.float32, seed=0, gate="logsigmoid", per_channel=False,
    num_states=0, repeat_key=False, beta=None, normalise=True,
):  # fmt: skip
    """Return seeded operator inputs: a dict of q, k, v, g, beta and, if asked for, initial_state.

    Args:
      B, T, H, HV, K, V: sizes; HV defaults to H.
      dtype: type of q, k, v and beta; gates and states are float32.
      seed: seed of the generator.
      gate: one of GATES.
      per_channel: gates of shape [B, T, HV, K] instead of [B, T, HV].
      num_states: number of initial states; 0 leaves them out.
      repeat_key: one key for all tokens, the worst case of the inverse.
      beta: a constant beta; by default the sigmoid of a normal variable.
      normalise: scale keys and queries to unit length, as the models do; without it the delta rule diverges.
    """
    rng = np.random.default_rng(seed)
    HV = HV or H
    unit = (lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)) if normalise else (lambda x: x)
    q, k = unit(rng.standard_normal((B, T, H, K))), unit(rng.standard_normal((B, T, H, K)))
    if repeat_key:
        k = np.broadcast_to(k[:, :1], k.shape)
    v = rng.standard_normal((B, T, HV, V))
    g = make_gate(gate, rng, (B, T, HV, K) if per_channel else (B, T, HV))
    rate = 1 / (1 + np.exp(-rng.standard_normal((B, T, HV)))) if beta is None else np.full((B, T, HV), beta)
    inputs = {name: jnp.asarray(x, dtype) for name, x in dict(q=q, k=k, v=v, beta=rate).items()}
    inputs["g"] = jnp.asarray(g, jnp.float32)
    if num_states:
        inputs["initial_state"] = jnp.asarray(rng.standard_normal((num_states, HV, K, V)), jnp.float32)
    return inputs


def spoil_padding(inputs: dict[str, jax.Array], cu_seqlens: jax.Array | None) -> dict[str, jax.Array]:
    """Return the inputs of an operator with NaN in the padding of a pack, which may hold anything."""
    if cu_seqlens is None:
        return inputs
    end = int(cu_seqlens[-1])
    return {
        name: x if name in ("initial_state", "g_gamma") else x.at[:, end:].set(jnp.nan) for name, x in inputs.items()
    }


def with_gradients(fn: Callable) -> Callable:
    """Return a function (x, cu_seqlens, cotangents) with the gradient of every input x beside the results of fn."""

    def run(x, cu_seqlens, cotangents):
        results, pullback = jax.vjp(lambda y: fn(y, cu_seqlens), x)
        return results | {f"d{name}": dx for name, dx in pullback(cotangents)[0].items()}

    return run


def error(x, ref) -> float:
    """Return RMS(x - ref) / RMS(ref) in float64; infinity where x is not finite. A zero reference wants exact zeros."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    if x.shape != ref.shape or not np.isfinite(x).all():
        return float("inf")
    size = np.sqrt(np.mean(ref**2)) if ref.size else 0.0
    wrong = np.sqrt(np.mean((x - ref) ** 2)) if ref.size else 0.0
    return float(wrong / size) if size > 0 else (0.0 if wrong == 0 else float("inf"))


def assert_close(name: str, x, ref, tolerance: float) -> float:
    """Fail unless error(x, ref) <= tolerance, naming the worst coordinate and both values; return the error."""
    x = np.asarray(jnp.asarray(x).astype(jnp.float32) if isinstance(x, jax.Array) else x, np.float64)
    ref = np.asarray(ref, np.float64)
    assert x.shape == ref.shape, f"{name}: shape {x.shape}, reference {ref.shape}"
    err = error(x, ref)
    if not err <= tolerance:
        distance = np.where(np.isfinite(x), np.abs(x - ref), np.inf)
        worst = np.unravel_index(np.argmax(distance), ref.shape)
        raise AssertionError(
            f"{name}: error {err:.3e} > {tolerance:.1e}; worst at {tuple(int(i) for i in worst)}: "
            f"got {x[worst]:.9g}, reference {ref[worst]:.9g}"
        )
    return err


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch to run a stage on: sizes, types, gates, packing.

    Attributes:
      B, T, H, HV, K, V, chunk_size: sizes.
      dtype: type of q, k, v and beta.
      gate: one of GATES.
      lengths: lengths of the sequences of a packed batch; the tokens after them, up to T, are padding.
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

    def __str__(self):
        """Name the case by its sizes."""
        packed = "" if self.lengths is None else f"-packed{len(self.lengths)}"
        sizes = f"B{self.B}-T{self.T}-H{self.H}-HV{self.HV}-K{self.K}-V{self.V}-c{self.chunk_size}"
        return f"{sizes}-{self.dtype}-{self.gate}{packed}"

    @property
    def cu_seqlens(self) -> jax.Array | None:
        """Boundaries int32 [N + 1], None for a batch of equal lengths."""
        return None if self.lengths is None else boundaries(*self.lengths)

    def arguments(self) -> dict[str, jax.Array]:
        """Return the inputs and every intermediate result of the gated delta rule, float32, by name.

        Tokens past the last sequence are NaN: no stage may read them.
        """
        N = self.B if self.lengths is None else len(self.lengths)
        sizes = (self.B, self.T, self.H, self.HV, self.K, self.V)
        x = make_inputs(*sizes, dtype=jnp.dtype(self.dtype), gate=self.gate, num_states=N)
        results = stage_reference.chain(**x, chunk_size=self.chunk_size, cu_seqlens=self.cu_seqlens)
        x |= {name: value.astype(np.float32) for name, value in results.items()}
        if self.lengths is not None:
            for name in x.keys() - {"h", "initial_state", "final_state"}:
                x[name] = np.array(x[name])
                x[name][:, sum(self.lengths) :] = np.nan
        return {name: jnp.asarray(value) for name, value in x.items()}

    def channel_gates(self) -> jax.Array:
        """Return cumulative gates per channel [B, T, HV, K] of gates of 0, -0.001, -2 and -30 nats, mixed.

        They are multiples of 2^-10 and their sums are below 2^14, so float32 holds the sums exactly.
        """
        shape = self.B, self.T, self.HV, self.K
        gates = np.random.default_rng(0).choice([0.0, -(2.0**-10), -2.0, -30.0], shape)
        return jnp.asarray(stage_reference.cumsum(gates, self.chunk_size, self.cu_seqlens), jnp.float32)

    def assert_close(self, name: str, x, ref, tolerance: float = STAGE_TOLERANCE) -> float:
        """Do as the function of this name for x [B, T, ...], and demand exact zeros on padding; return the error."""
        if self.lengths is not None:
            assert not np.asarray(x)[:, sum(self.lengths) :].any(), f"{name}: padding must be zero"
        return assert_close(name, x, ref, tolerance)


# Few, because interpreted kernels are slow; together they hold every chunk size, gate, type and kind of tail, head
# dimensions from 1 to 256, grouped heads, and empty sequences everywhere in a packed batch.
CASES = (
    Case(T=1, K=64, V=128),
    Case(B=2, T=37, HV=2, K=60, V=100, gate="spikes"),
    Case(T=70, H=2, HV=2, K=1, V=60, chunk_size=32, gate="strong"),
    Case(T=64, HV=3, K=128, V=256, chunk_size=32, dtype="bfloat16", gate="logsigmoid*10"),
    Case(T=130, K=100, V=1, chunk_size=128, gate="logsigmoid/10"),
    Case(B=2, T=35, H=2, HV=4, K=256, V=64, chunk_size=16, dtype="bfloat16", gate="zero"),
    Case(T=100, HV=2, K=60, V=64, chunk_size=16, lengths=(1, 0, 17, 32, 0, 33, 3)),
    Case(T=140, K=64, V=100, dtype="bfloat16", gate="logsigmoid*100", lengths=(0, 64, 65, 1, 0)),
    Case(T=20, HV=2, K=128, V=60, chunk_size=128, gate="spikes", lengths=(0, 0, 3, 12, 0)),
)


def spec(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an array, to be checked or compiled for without data."""
    return jax.ShapeDtypeStruct(shape, dtype)


def boundaries(*lengths: int) -> jax.Array:
    """Return cu_seqlens int32 [N + 1] of sequences of these lengths."""
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def _vmapped(fn, args):
    singles = jax.tree.map(lambda x: x[:, None], args)
    return jax.tree.map(lambda x: x[:, 0], jax.vmap(fn)(*singles))


def _exported(fn, args):
    return jax.export.export(jax.jit(fn))(*args).call(*args)


# Ways to run fn(*args) that must not change its result, for functions that map a batch [B, ...] row by row.
TRANSFORMS = {
    "jit": lambda fn, args: jax.jit(fn)(*args),
    "vmap": _vmapped,
    "remat": lambda fn, args: jax.checkpoint(fn)(*args),
    "export": _exported,
}


def assert_transform(transform: str, fn, args) -> None:
    """Fail unless fn(*args) is the same under a transform of TRANSFORMS, and of the types that eval_shape promises."""
    expected = fn(*args)
    promised = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(fn, *args))
    assert promised == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(TRANSFORMS[transform](fn, args)), strict=True):
        assert_close(transform, got, want, 1e-6)


def assert_traced_once(fn, *batches: tuple) -> None:
    """Fail unless jit(fn) serves all argument tuples with a single trace, equals fn, and calls nothing on the host."""
    traces = []

    def counted(*args):
        traces.append(args)
        return fn(*args)

    compiled = jax.jit(counted)
    for args in batches:
        for want, got in zip(jax.tree.leaves(fn(*args)), jax.tree.leaves(compiled(*args)), strict=True):
            assert_close("under jit", got, want, 1e-6)
    assert len(traces) == 1, f"traced {len(traces)} times"
    assert "callback" not in compiled.lower(*batches[0]).as_text()


def numeric_gradients(fn, args: dict, cotangents) -> dict[str, np.ndarray]:
    """Return the gradients of sum(fn(**args) * cotangents) by central differences of a float64 numpy function."""
    args = {name: np.array(x, np.float64) for name, x in args.items()}

    def loss():
        return sum(np.sum(y * c) for y, c in zip(jax.tree.leaves(fn(**args)), cotangents, strict=True))

    grads = {name: np.zeros(x.shape) for name, x in args.items()}
    step = 1e-5
    for name, x in args.items():
        for at in np.ndindex(x.shape):
            middle = x[at]
            x[at] = middle + step
            above = loss()
            x[at] = middle - step
            grads[name][at] = (above - loss()) / (2 * step)
            x[at] = middle
    return grads


def assert_gradients(fn, definition, args: dict, tolerance: float = GRADIENT_TOLERANCE["float32"]) -> None:
    """Fail unless the gradients of fn(**args), plain and under remat, are the numeric ones of its numpy definition."""
    rng = np.random.default_rng(1)
    cotangents = [jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in jax.tree.leaves(fn(**args))]

    def loss(run, args):
        outputs = jax.tree.leaves(run(**args))
        return sum(jnp.vdot(y, c) for y, c in zip(outputs, cotangents, strict=True))

    expected = numeric_gradients(definition, args, [np.asarray(c, np.float64) for c in cotangents])
    for label, run in (("", fn), (" under remat", jax.checkpoint(fn))):
        grads = jax.grad(loss, argnums=1)(run, args)
        for name, want in expected.items():
            assert_close(f"d{name}{label}", grads[name], want, tolerance)


def text_for_tpu(fn, *args) -> str:
    """Return the program that is lowered for a TPU: it names the kernels that were launched."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
