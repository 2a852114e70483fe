"""What the tests of operators that run another operator share: the definition in float64 on hard batches and steps."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.serving import state_pool
from chunkwise.shared.testing import definitions
from chunkwise.shared.testing.compare import GATE_GRADIENT_TOLERANCE, TOLERANCE, assert_close, by_part, tolerance
from chunkwise.shared.testing.inputs import boundaries, poison_padding

T = 44
PACKED = boundaries(1, 17, 0, 12, 8)  # an empty sequence, sequences that begin inside of a chunk, six tokens of padding
IDS = jnp.asarray(np.repeat([[3, 5, -1, 6]], [1, 17, 4, T - 22], axis=1), jnp.int32)
# Options of a call, and how many states it has.
FORMS = {
    "rows": ({}, 1),
    "stream": (dict(cu_seqlens=PACKED), 0),
    "sequences": (dict(cu_seqlens=PACKED), 5),
    "segments": (dict(segment_ids=IDS), 1),
}


class Kind(NamedTuple):
    """An operator: its functions, its definition, its gates and static arguments, and its inputs.

    Attributes:
      chunk, recurrent, ragged: its functions; a recipe has no serving step.
      definition: one of `definitions`.
      inputs: from the rows, tokens and sizes (H, HV, K, V), and named type, gate, seed and states, to inputs by name.
      gates: the names of inputs whose gradients have the tolerance of gates.
      static: static arguments of all functions.
      names: the names of its arguments by those of the definition, where they differ.
      scale: its default scale; None for K ** -0.5.
    """

    chunk: Callable
    recurrent: Callable
    ragged: Callable | None
    definition: definitions.TokenRule
    inputs: Callable[..., dict[str, jax.Array]]
    gates: tuple[str, ...]
    static: Mapping[str, Any] = MappingProxyType({})
    names: Mapping[str, str] = MappingProxyType({})
    scale: float | None = None

    def expected(self, x: dict, **options):
        """Return o, states and gradients of the definition."""
        back = {theirs: ours for ours, theirs in self.names.items()}
        named = {back.get(name, name): y for name, y in x.items()}
        o, states, gradients = definitions.reference(self.definition, named, scale=self.scale, **options)
        return o, states, {self.names.get(name, name): y for name, y in gradients.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _values_and_gradients(function, static, implementation, x, fixed, do, dht):
    def run(x):
        return function(**x, **fixed, **dict(static), output_final_state=dht is not None, implementation=implementation)

    found, pull = jax.vjp(run, x)
    return found, pull((do, dht))[0]


def assert_values_and_gradients(kind: Kind, call: str, form: str, implementation: str, dtype=jnp.float32, **options):
    """Compare outputs, states and all gradients with the definition; padding is NaN, and gives zeros."""
    fixed, states = FORMS[form]
    x = kind.inputs(1, T, 1, 2, 24, 16, dtype=dtype, num_states=states, **options)
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal((1, T, 2, 16)), dtype)
    draw = lambda y: jnp.asarray(rng.standard_normal(y.shape), jnp.float32)
    dht = jax.tree.map(draw, x["initial_state"]) if states else None
    static = tuple(((dict(chunk_size=16) if call == "chunk" else {}) | dict(kind.static)).items())
    (o, final), grads = _values_and_gradients(
        getattr(kind, call), static, implementation, poison_padding(x, **fixed), fixed, do, dht
    )
    flags = {name: y for name, y in kind.static.items() if name == "use_qk_l2norm_in_kernel"}
    wanted, after, gradients = kind.expected(x, **fixed, **flags, do=do, dht=dht)
    name = jnp.dtype(dtype).name
    assert_close("o", o, wanted, TOLERANCE[name])
    if states:
        after = by_part({"final_state": after})
        for part, y in by_part({"final_state": final}).items():
            assert_close(part, y, after[part], TOLERANCE[name])
    gradients = by_part(gradients)
    for each, y in by_part(grads).items():
        limit = GATE_GRADIENT_TOLERANCE[name] if each in kind.gates else tolerance(f"d{each}", name)
        # A gradient may be the difference of sums near 1, whose rounding is 1e-7: of e^-30 where all gates are strong.
        size = np.sqrt(np.mean(np.square(gradients[each])))
        assert_close(f"d{each}", y, gradients[each], max(limit, 1e-7 / size) if size else limit)


CALLS = [("chunk", form) for form in FORMS] + [("recurrent", form) for form in ("rows", "sequences")]
_QUICK = (
    *(("xla", form, "resets", jnp.float32) for form in FORMS),
    ("xla", "rows", "strong", jnp.float32),
    ("fused", "sequences", "resets", jnp.float32),
)
implementations = pytest.mark.parametrize("implementation", ["xla", "fused"])


class CompositionTests:
    """Values, gradients and serving steps of an operator that takes two tokens of another one, which a package sets.

    Attributes:
      kind: the operator; raw: the same with keys and queries that it scales itself, if it does.
      per_channel: whether rings have gates per channel.
    """

    kind: ClassVar[Kind]
    raw: ClassVar[Kind]
    per_channel: ClassVar[bool] = False
    THOROUGH: ClassVar = dict(
        test_steps_in_the_kernel_for_decodes=True,
        test_values_and_gradients=lambda implementation, call, form, gate, dtype: (
            (implementation, form, gate, dtype) not in _QUICK or (implementation, call) == ("fused", "recurrent")
        ),
    )

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("gate", ["logsigmoid", "strong", "resets"])
    @pytest.mark.parametrize(("call", "form"), CALLS)
    @implementations
    def test_values_and_gradients(self, implementation, call, form, gate, dtype):
        options = dict(gate=gate) | ({} if self.raw is self.kind else dict(normalise=False))
        assert_values_and_gradients(self.raw, call, form, implementation, dtype, **options)

    @implementations
    def test_steps(self, implementation):
        assert_steps(self.kind, implementation)

    @implementations
    def test_rings(self, implementation):
        assert_ring(self.kind, 2, self.per_channel, implementation)

    @pytest.mark.parametrize("decodes", [{}, dict(num_decodes=0), dict(num_decodes=jnp.int32(0))])
    def test_a_ring_without_decodes(self, decodes):
        assert_prefill_after_guesses(self.kind, 2, self.per_channel, decodes)

    def test_steps_in_the_kernel_for_decodes(self):
        """It takes heads of whole registers, and the tokens that two tokens become."""
        assert_steps(self.kind, "fused", sizes=(128, 128))


# A serving step: a decode of two tokens, one of one token that starts from zeros, and a prefill. The last row is of no
# sequence.
LENGTHS, DECODES, SLOTS = (2, 1, 9), 2, 12
TABLE = np.array([[4, 7], [0, 9], [3, 5], [1, 1]], np.int32)


def assert_steps(kind: Kind, implementation: str, sizes=(8, 16), dtype=jnp.float32, tokens: int = 14) -> None:
    """Two steps, of which the second continues from accepted tokens: outputs and states, and other slots untouched."""
    K, V = sizes
    pool = jnp.asarray(np.random.default_rng(5).standard_normal((SLOTS, 2, K, V)), dtype)
    cu, kept = boundaries(*LENGTHS), np.array([True, False, True])
    has, given = jnp.asarray([*kept, True]), jnp.append(cu, 0)

    @jax.jit
    def run(x, pool, **slots):
        return kind.ragged(
            **x, **kind.static, states=pool, cu_seqlens=given, num_decodes=jnp.int32(DECODES),
            num_sequences=jnp.int32(3), implementation=implementation, chunk_size=16, **slots,
        )  # fmt: skip

    flags = {name: y for name, y in kind.static.items() if name == "use_qk_l2norm_in_kernel"}
    # The state after each token of the first step is in its column; the second step starts from them.
    for step, accepted in enumerate(np.array([[1, 1, 1, 1], [2, 1, 1, 1]], np.int32)):
        x = kind.inputs(1, tokens, 1, 2, K, V, seed=step)
        before = np.asarray(pool.astype(jnp.float32))
        o, pool = run(
            poison_padding(x, cu), pool, state_indices=jnp.asarray(TABLE),
            has_initial_state=has, num_accepted_tokens=jnp.asarray(accepted),
        )  # fmt: skip
        start = np.where(kept[:, None, None, None], before[TABLE[np.arange(3), accepted[:3] - 1]], 0.0)
        want, states, _ = kind.expected(x | dict(initial_state=start), cu_seqlens=cu, **flags)
        # The first decode again, after its first token.
        _, once, _ = kind.expected(x | dict(initial_state=start), cu_seqlens=np.array([0, 1, 1, 1]), **flags)
        limit = TOLERANCE["float32" if dtype == jnp.float32 else "bfloat16"]
        assert_close("o", o, want, TOLERANCE["float32"])
        after, expected = np.asarray(pool.astype(jnp.float32)), before.copy()
        expected[4], expected[7], expected[0], expected[3] = once[0], *states
        for slot in range(SLOTS):
            if slot in (0, 3, 4, 7):
                assert_close(f"slot {slot}", after[slot], expected[slot], limit)
            else:
                np.testing.assert_array_equal(after[slot], before[slot], err_msg=f"slot {slot} has changed")


def assert_ring(kind: Kind, n: int, per_channel: bool, implementation: str) -> None:
    """Decodes over a pool with rings, of which tokens are rejected: a token takes n tokens of the ring."""
    K = V = 16
    pool = state_pool.make_pool(3, 2, K, V, replay=4 * n, H=1, per_channel=per_channel)
    pool = state_pool.write_states(
        pool,
        jnp.arange(3, dtype=jnp.int32),
        jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, K, V)), jnp.float32),
    )
    states = np.asarray(pool.states)[:2]
    cu, slots = boundaries(2, 2), jnp.arange(2, dtype=jnp.int32)
    run = jax.jit(
        lambda x, pool, accepted: kind.ragged(
            **x, **kind.static, states=pool, cu_seqlens=cu, state_indices=slots, num_decodes=2, decode_tokens=2,
            num_accepted_tokens=accepted, implementation=implementation,
        )
    )  # fmt: skip
    flags = {name: y for name, y in kind.static.items() if name == "use_qk_l2norm_in_kernel"}
    accepted = np.array([2, 2], np.int32)
    for step in range(4):
        x = kind.inputs(1, 4, 1, 2, K, V, seed=step)
        o, pool = run(x, pool, jnp.asarray(accepted))
        want = kind.expected(x | dict(initial_state=states), cu_seqlens=np.asarray(cu), **flags)[0]
        assert_close(f"o of step {step}", o, want, TOLERANCE["float32"])
        accepted = np.array([1, 2] if step % 2 else [2, 1], np.int32)
        # Each decode up to its last accepted token; the rejected tokens are sequences of their own.
        ends = np.array([0, accepted[0], 2, 2 + accepted[1], 4])
        states = kind.expected(x | dict(initial_state=np.repeat(states, 2, axis=0)), cu_seqlens=ends, **flags)[1][::2]


def assert_prefill_after_guesses(kind: Kind, n: int, per_channel: bool, decodes: dict[str, Any]) -> None:
    """A prefill, and a read, of which each goes on after the first of three guesses over a ring of 3 n tokens."""
    K, slot = 4, jnp.zeros(1, jnp.int32)
    step = functools.partial(kind.ragged, **kind.static, state_indices=slot, decode_tokens=3, implementation="xla")
    guesses, more = (kind.inputs(1, T, 1, 1, K, K, seed=T) for T in (3, 2))
    pool = state_pool.make_pool(2, 1, K, K, replay=3 * n, H=1, per_channel=per_channel)
    _, pool = step(**guesses, states=pool, cu_seqlens=boundaries(3), num_decodes=1)
    once = kind.expected(guesses, cu_seqlens=np.array([0, 1, 3]))[1][:1]
    accepted = jnp.ones(1, jnp.int32)
    assert_close("read", state_pool.read_states(pool, slot, accepted), once, TOLERANCE["float32"])
    with pytest.raises(ValueError, match=r"from 1 to the tokens .* had, \[3\]; got \[4\]\."):
        state_pool.read_states(pool, slot, 4 * accepted)
    _, pool = step(**more, states=pool, cu_seqlens=boundaries(2), num_accepted_tokens=accepted, **decodes)
    after = kind.expected(more | dict(initial_state=once), cu_seqlens=np.array([0, 2]))[1]
    assert_close("state", state_pool.read_states(pool, slot), after, TOLERANCE["float32"])
