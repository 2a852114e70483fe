"""Operators on meshes, and what they must be equal to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close, with_gradients
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.compiled import COLLECTIVE

P = PartitionSpec
MODES = ("explicit", "automatic")
# What the dimensions of arguments and results are split like: the letters of v [B, T, HV, V], h key heads, s states.
DIMENSIONS = {
    "q": "bth.", "k": "bth.", "v": "btnd", "g": "btn.", "beta": "btn", "initial_state": "sn.d", "segment_ids": "bt",
    "cu_seqlens": ".", "g_gamma": "n", "A_log": "n", "dt_bias": "n.", "state_indices": "s", "has_initial_state": "s",
    "p": "bth.", "b": "btn.", "w": "btnd", "o": "btnd", "final_state": "sn.d",
}  # fmt: skip


def make_mesh(shape: tuple[int, ...], mode: str):
    """Return a mesh with axes "a", "b", "c", ... of these sizes."""
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    return jax.make_mesh(shape, tuple("abcd"[: len(shape)]), axis_types=(kind,) * len(shape))


def spec_of(name: str, ndim: int, spec: PartitionSpec, packed: bool = False, key_heads=None) -> PartitionSpec:
    """Return how an argument is split if v is split like this."""
    axes = dict(zip("btnd", (*spec, *[None] * 4), strict=False)) | {"h": key_heads}
    axes["s"] = None if packed else axes["b"]
    return P(*(axes.get(letter) for letter in DIMENSIONS[name][:ndim]))


def place(arrays: dict, mesh, spec: PartitionSpec, key_heads=None) -> dict:
    """Return arguments or results that lie on the mesh as v does."""
    of = functools.partial(spec_of, spec=spec, packed="cu_seqlens" in arrays, key_heads=key_heads)
    return {name: jax.device_put(x, NamedSharding(mesh, of(name, x.ndim))) for name, x in arrays.items()}


def inputs_of(name: str, B=2, T=48, H=2, HV=4, K=8, V=8, states: int | None = None, **options) -> dict:
    """Return seeded float32 inputs of an operator, by name; `states` is 0 for none and None for one for every row."""
    operator = OPERATORS[name]
    x = make_inputs(
        B, T, H, HV, K, V, per_channel=operator.per_channel, num_states=B if states is None else states,
        erase=operator.erase, **options,
    )  # fmt: skip
    if not operator.delta:
        del x["beta"]
    return x


@functools.cache
def run_of(name: str, implementation: str, states: bool = True, **options):
    """Return a function of inputs, and of arrays that have no gradient, to o and final_state, by name."""

    options |= dict(output_final_state=states, implementation=implementation)

    def run(x, fixed):
        o, final_state = OPERATORS[name].function(**x, **fixed, **options)
        return dict(o=o, final_state=final_state) if states else dict(o=o)

    return run


def cotangents_of(run, x: dict, fixed: dict) -> dict:
    """Return seeded cotangents of the results."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(run, x, fixed)
    return {name: jnp.asarray(rng.standard_normal(y.shape), y.dtype) for name, y in shapes.items()}


def expected(x: dict, fixed: dict, cotangents: dict) -> dict:
    """Return results and gradients of the float64 recurrence, by name."""
    keywords = {name: np.asarray(y) for name, y in fixed.items()}
    o, states, gradients = reference(**x, **keywords, do=cotangents["o"], dht=cotangents.get("final_state"))
    results = dict(o=o, final_state=states) if "final_state" in cotangents else dict(o=o)
    return results | {f"d{name}": d for name, d in gradients.items()}


def assert_expected(got: dict, want: dict, label: str = "") -> None:
    """Fail unless results and gradients are those of the recurrence."""
    assert got.keys() == want.keys()
    for name, ref in want.items():
        tolerance = GRADIENT_TOLERANCE if name.startswith("d") else TOLERANCE
        assert_close(f"{label} {name}", got[name], ref, tolerance["float32"])


def on_mesh(name: str, implementation: str, mesh, spec: PartitionSpec, mode: str, states: bool = True):
    """Return a function of inputs, fixed arrays and cotangents to results and gradients, divided like this."""
    options = dict(sharding=NamedSharding(mesh, spec)) if mode == "automatic" else {}
    return jax.jit(with_gradients(run_of(name, implementation, states, **options)))


def assert_divided(
    name: str, implementation: str, mesh, spec: PartitionSpec, mode: str, x: dict, fixed: dict | None = None,
    states: bool = True, key_heads=None,
) -> None:  # fmt: skip
    """Fail unless an operator that divides itself gives the results and gradients of the recurrence."""
    fixed = fixed or {}
    cotangents = cotangents_of(run_of(name, implementation, states), x, fixed)
    placed = place(x | fixed, mesh, spec, key_heads)
    arguments = ({n: placed[n] for n in x}, {n: placed[n] for n in fixed})
    # The result of a packed batch has a state for every document, which no axis of rows splits.
    shardings = {n: spec_of(n, y.ndim, spec, "cu_seqlens" in fixed) for n, y in cotangents.items()}
    cotangents_placed = {n: jax.device_put(y, NamedSharding(mesh, shardings[n])) for n, y in cotangents.items()}
    got = on_mesh(name, implementation, mesh, spec, mode, states)(*arguments, cotangents_placed)
    assert_expected(got, expected(x, fixed, cotangents), f"{name} {implementation} {spec}")
    if mode == "explicit":
        for result, sharding in shardings.items():
            assert normal(jax.typeof(got[result]).sharding.spec) == normal(sharding), result


def normal(spec: PartitionSpec) -> list:
    """Return the axes of every dimension, without what is not split at the end."""
    axes = [() if x is None else x if isinstance(x, tuple) else (x,) for x in spec]
    while axes and not axes[-1]:
        axes.pop()
    return axes


def collectives(text: str) -> list[str]:
    """Return the names of the collectives in a compiled program."""
    return [match["kind"] for match in COLLECTIVE.finditer(text)]
