"""Bad input gets one clear sentence, before anything is computed."""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import causal_conv1d, chunk_h, chunk_o, cumsum, kkt, norm_gated, pipeline, solve_tril, wy_fast
from chunkwise.pipeline.operators import CHUNKED, COMPOSED, OPERATORS, RECURRENT
from chunkwise.shared.call.unknown_arguments import INSTEAD
from chunkwise.shared.testing.inputs import make_inputs

EVERY = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
# What a flag, a size and a promise cannot be.
FLAGS = {
    "output_final_state": "must be True or False, known when the program is built",
    "use_qk_l2norm_in_kernel": "must be True or False, known when the program is built",
}
WRONG = dict(array=jnp.ones((), bool), vector=np.ones(3, bool), text="False", number=1, none=None)


@EVERY
@pytest.mark.parametrize("wrong", WRONG)
def test_flags_are_true_or_false(operator, wrong):
    x = operator.source.inputs(1, 4, 1, 1, 8, 8)
    for flag, message in FLAGS.items():
        if flag in inspect.signature(operator.function).parameters:
            with pytest.raises(ValueError, match=f"`{flag}` {message}; got"):
                operator.function(**x, **{flag: WRONG[wrong]})


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
@pytest.mark.parametrize("wrong", [64.0, 48, "64", True, np.full(2, 64), jnp.array(64)], ids=repr)
def test_chunk_size_is_one_of_four(operator, wrong):
    x = operator.source.inputs(1, 4, 1, 1, 8, 8)
    array = ", known when the program is built" if isinstance(wrong, np.ndarray | jax.Array) else ""
    message = f"`chunk_size` must be one of (16, 32, 64, 128){array}; got"
    with pytest.raises(ValueError, match=re.escape(message)):
        operator.function(**x, chunk_size=wrong)


@pytest.mark.parametrize("operator", RECURRENT, ids=lambda operator: operator.name)
def test_implementations_that_the_token_by_token_form_lacks(operator):
    x = operator.source.inputs(1, 4, 1, 1, 8, 8)
    for implementation in {"staged", "fused"} - set(operator.implementations):
        with pytest.raises(NotImplementedError, match=f"`implementation` must be .*; got '{implementation}'"):
            operator.function(**x, implementation=implementation)


@EVERY
def test_scale_is_one_number(operator):
    x = operator.source.inputs(1, 4, 1, 1, 8, 8)
    for wrong in (jnp.ones(24), "1", True):
        with pytest.raises(ValueError, match="`scale` must be None, a number or a scalar array; got"):
            operator.function(**x, scale=wrong)
    for wrong in (0, np.nan, np.float32(np.inf)):
        with pytest.raises(ValueError, match=f"`scale` must be finite and not 0; got .*{wrong}"):
            operator.function(**x, scale=wrong)


FORMS = "chunk", "recurrent", "ragged"
BOUNDED = [getattr(pipeline, f"{form}_{name}") for name in ("kda", "gdn2", "comba") for form in FORMS]


@pytest.mark.parametrize("function", BOUNDED, ids=lambda function: function.__name__)
def test_the_old_name_of_min_gate(function):
    """It means the same, and warns the caller; a wrong value is named by the new name."""
    operator = OPERATORS[re.sub("^[a-z]+", "chunk", function.__name__)]
    x = operator.source.inputs(1, 4, 1, 1, 8, 8)
    if function.__name__.startswith("ragged"):
        x |= dict(states=jnp.zeros((1, 1, 8, 8)), cu_seqlens=jnp.array([0, 4]), state_indices=jnp.array([0]))
    warns = functools.partial(pytest.warns, DeprecationWarning, match="^`gate_lower_bound` is deprecated: call")
    with warns() as caught:
        jax.eval_shape(lambda: function(**x, gate_lower_bound=-5.0))
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="`min_gate` must be None or a number <= 0"), warns():
        function(**x, gate_lower_bound=1.0)
    with pytest.raises(TypeError, match="got 'min_gate' and 'gate_lower_bound', which is the old name"):
        function(**x, gate_lower_bound=-5.0, min_gate=-5.0)


TOO_LARGE = dict(chunk_gated_delta_rule=257, chunk_kda=257, chunk_gla=2048, chunk_simple_gla=2048)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_states_too_large_for_the_fused_kernels(name):
    """As the docstring says; the stages take them."""
    operator, K = OPERATORS[name], TOO_LARGE[name]
    x = jax.eval_shape(lambda: operator.source.inputs(1, 16, 1, 1, K, K))
    assert 'NotImplementedError: "fused"' in operator.function.__doc__
    with pytest.raises(NotImplementedError, match='"fused"'):
        jax.eval_shape(lambda x: operator.function(**x, implementation="fused"), x)
    jax.eval_shape(lambda x: operator.function(**x, implementation="staged"), x)


def test_pools_of_the_wrong_kind():
    x, pool = make_inputs(3, 1, 1, 1, 16, 16), jnp.zeros((8, 1, 16, 16))
    message = r"`initial_state` must have shape .* = \(3, 1, 16, 16\); got \(8, 1, 16, 16\): a pool of slots comes with"
    with pytest.raises(ValueError, match=message):
        pipeline.recurrent_gated_delta_rule(**x, initial_state=pool)
    step = dict(cu_seqlens=jnp.array([0, 1], jnp.int32), state_indices=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="`states` must be a StatePool of `make_pool` if states are int8; got"):
        pipeline.ragged_gated_delta_rule(**{n: y[:1] for n, y in x.items()}, states=pool.astype(jnp.int8), **step)


WRITTEN_ONCE = "`state_indices` must name a slot that is written only once"


@pytest.mark.parametrize("slots", [[0, 1], [1, 1]], ids=["right", "wrong"])
def test_a_step_that_is_a_constant_of_a_program(slots):
    """Its values are known inside of jit too, and are checked there."""
    step = dict(cu_seqlens=jnp.array([0, 1, 8], jnp.int32), state_indices=jnp.array(slots, jnp.int32), num_decodes=1)
    x = make_inputs(1, 8, 1, 1, 16, 16)

    check = lambda x, states: pipeline.check_step(**step, num_slots=3, num_tokens=8)
    run = lambda x, states: pipeline.ragged_gated_delta_rule(**x, states=states, **step)[1]
    for f in (check, run):
        with contextlib.nullcontext() if slots == [0, 1] else pytest.raises(ValueError, match=WRITTEN_ONCE):
            jax.eval_shape(f, x, jnp.zeros((3, 1, 16, 16)))


# The rates of Mamba-2 tell how many heads there are.
EVERY = [*CHUNKED, *(x for x in COMPOSED.values() if x.chunked and x.name != "chunk_mamba2")]
HEAD_FIRST = pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)


def unlabelled(operator, *sizes) -> dict:
    """Inputs of which none tells heads from tokens by its own dimensions."""
    return {name: y for name, y in operator.source.inputs(*sizes).items() if name != "g_gamma"}


@pytest.mark.parametrize("operator", EVERY, ids=lambda operator: operator.name)
@pytest.mark.parametrize("T", [2, 3])
def test_head_first_tensors_get_a_warning(operator, T):
    x = unlabelled(operator, 1, T, 3, 3, 8, 8)
    message = rf"`q` should have shape \[B, T, H, K\]; got \(1, {T}, 3, 8\), with T = {T} and H = 3: are the tensors"
    with pytest.warns(UserWarning, match=message) as caught:
        jax.eval_shape(lambda: operator.function(**x, **operator.static))
    assert [warning.filename for warning in caught] == [__file__]


@HEAD_FIRST
def test_head_first_tensors_with_groups_of_value_heads(operator):
    x = {name: jnp.swapaxes(y, 1, 2) for name, y in unlabelled(operator, 2, 6, 2, 4, 8, 8).items()}
    message = r"`v` must have shape .* = \(2, 2, any, any\); got \(2, 4, 6, 8\): head-first tensors, .* need `jnp.swap"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: operator.function(**x))


@HEAD_FIRST
def test_head_first_tensors_beside_gates(operator):
    x = unlabelled(operator, 2, 6, 3, 3, 8, 8)
    x |= {name: jnp.swapaxes(x[name], 1, 2) for name in "qkv"}
    with pytest.raises(
        ValueError, match=r"`g` must have shape .*; got \(2, 6, 3.*seem to be head-first, and need `jnp.sw"
    ):
        operator.function(**x)


@HEAD_FIRST
def test_decays_in_the_place_of_their_logs(operator):
    """They get a warning where their values are known; padding may hold anything."""
    x, ends = operator.source.inputs(1, 6, 1, 2, 8, 8), dict(cu_seqlens=jnp.array([0, 4], jnp.int32))
    run = lambda g, **more: operator.function(**x | dict(g=g), **more, implementation="xla")
    with pytest.warns(UserWarning, match="`g` should be the log of a decay, at most 0; got 0.9.*: is it") as caught:
        run(jnp.full_like(x["g"], 0.9))
    assert [warning.filename for warning in caught] == [__file__]
    run(x["g"].at[:, 4:].set(1.0), **ends)


@HEAD_FIRST
def test_boundaries_in_a_list(operator):
    with pytest.raises(
        ValueError, match=r"`cu_seqlens` must be an int32 .*; got list, of which `jnp.array\(cu_seqlens"
    ):
        operator.function(**operator.source.inputs(1, 6, 1, 2, 8, 8), cu_seqlens=[0, 6])


@pytest.mark.parametrize("name", ["pallas", "mosaic"])
def test_other_names_of_kernels(name):
    with pytest.raises(ValueError, match='; the kernels of Pallas are "fused"; got'):
        pipeline.chunk_kda(**OPERATORS["chunk_kda"].source.inputs(1, 6, 1, 1, 8, 8), implementation=name)


@HEAD_FIRST
def test_short_sequences_get_no_warning(operator):
    """Neither where another argument shows the heads, nor token by token, nor in a serving step."""
    x = unlabelled(operator, 1, 2, 3, 3, 8, 8)
    shown = [dict(cu_seqlens=jnp.array([0, 2], jnp.int32)), dict(segment_ids=jnp.zeros((1, 2), jnp.int32))]
    shown += [dict(initial_state=jnp.zeros((1, 3, 8, 8)))]
    if operator.gates == "constant":
        shown.append(dict(g_gamma=jnp.zeros(3)))
    if operator.delta:
        shown.append(dict(use_gate_in_kernel=True, A_log=jnp.zeros(3)))
    for more in shown:
        jax.eval_shape(lambda more=more: operator.function(**x, **more))
    jax.eval_shape(lambda: operator.function(**unlabelled(operator, 1, 2, 3, 6, 8, 8)))
    name = operator.name.removeprefix("chunk_")
    jax.eval_shape(lambda: OPERATORS[f"recurrent_{name}"].function(**x))
    if name != "gla":
        step = dict(cu_seqlens=jnp.array([0, 2], jnp.int32), state_indices=jnp.zeros(1, jnp.int32))
        ragged = getattr(pipeline, f"ragged_{name}")
        jax.eval_shape(lambda: ragged(**x, states=jnp.zeros((1, 3, 8, 8)), **step))


# The arguments of fla-core 0.5 and of its copies in vLLM and SGLang that no operator has.
ELSEWHERE = {
    "chunk": "safe_gate disable_recompute return_intermediate_states state_v_first cu_seqlens_cpu chunk_indices "
    "chunk_offsets cp_context transpose_state_layout head_first offsets initial_state_indices",
    "recurrent": "gk gv reverse state_v_first transpose_state_layout head_first offsets ssm_state_indices "
    "inplace_final_state query key value precision",
}
# Of the stages, and of the convolution.
OF_PARTS = "chunk_indices cu_seqlens_cpu head_first residual cache backend prenorm"
OPERATIONS = [getattr(pipeline, name) for name in pipeline.__all__ if name.startswith(FORMS)]
PARTS = [
    causal_conv1d.causal_conv1d, causal_conv1d.causal_conv1d_update, chunk_h.chunk_fwd_h,
    chunk_h.chunk_gated_delta_rule_fwd_h, chunk_o.chunk_fwd_o, cumsum.chunk_local_cumsum, kkt.chunk_scaled_dot_kkt,
    solve_tril.solve_tril, wy_fast.recompute_w_u, norm_gated.rms_norm_gated,
]  # fmt: skip
# What people type, by the kind of the function, and the argument that is nearly that; None where `INSTEAD` has a text.
SLIPS = {
    "chunk": {"attention_mask": None, "states": None, "use_qk_l2norm": "use_qk_l2norm_in_kernel"},
    "recurrent": {"attention_mask": None, "segment_ids": None, "states": None, "state_index": "state_indices"},
    "ragged": {"attention_mask": None, "segment_ids": None, "initial_state": None, "output_final_state": None,
               "use_qk_l2norm": "use_qk_l2norm_in_kernel"},
}  # fmt: skip


@pytest.mark.parametrize("function", OPERATIONS, ids=lambda function: function.__name__)
def test_arguments_of_another_name(function):
    for name, near in SLIPS[function.__name__.partition("_")[0]].items():
        if near is not None and near not in inspect.signature(function).parameters:
            continue
        end = f". Did you mean '{near}'?" if near else f": {INSTEAD[name]}"
        message = f"{function.__name__}() got an unexpected keyword argument '{name}'{end}"
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            function(None, **{name: None})


@pytest.mark.parametrize("function", OPERATIONS + PARTS, ids=lambda function: function.__name__)
def test_arguments_of_flash_linear_attention(function):
    """The error comes first, whatever the tensors are."""
    kind = function.__name__.partition("_")[0]
    every = OF_PARTS if function in PARTS else ELSEWHERE.get(kind, " ".join(ELSEWHERE.values()))
    for name in set(every.split()) - inspect.signature(function).parameters.keys():
        message = f"{function.__name__}() got an unexpected keyword argument '{name}': {INSTEAD[name]}"
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            function(None, **{name: None})


@pytest.mark.parametrize("name", OPERATORS)
def test_what_int32_does_not_count(name):
    """Tokens of a row and of all rows, and the slots of a pool, are counted in int32."""
    operator, limit = OPERATORS[name], 2**31
    x = operator.source.inputs(1, 4, 1, 1, 8, 8)
    of = lambda y, *BT: jax.ShapeDtypeStruct((*BT, *y.shape[2:]) if y.ndim > 1 else y.shape, y.dtype)
    sized = lambda B, T: {key: of(y, B, T) for key, y in x.items()}
    run = lambda x: operator.function(**x)
    for B, T, label in ((1, limit, "T"), (limit, 1, "B"), (2**15, 2**16, "B T")):
        with pytest.raises(ValueError, match=rf"must have {label} of at most 2147483647, which int32 counts; got"):
            jax.eval_shape(run, sized(B, T))
    if operator.chunked:
        return
    pool, slot = jax.ShapeDtypeStruct((limit, 1, 8, 8), jnp.float32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="`initial_state` must have N of at most 2147483647"):
        jax.eval_shape(lambda x, pool: run(x | dict(initial_state=pool, state_indices=slot)), sized(1, 4), pool)


@pytest.mark.parametrize("made", [lambda states: states, lambda states: pipeline.StatePool(states)])
def test_slots_of_a_step_that_int32_does_not_count(made):
    states = jax.ShapeDtypeStruct((2**31, 1, 8, 8), jnp.float32)
    x = OPERATORS["recurrent_gated_delta_rule"].source.inputs(1, 4, 1, 1, 8, 8)
    step = dict(cu_seqlens=jnp.array([0, 4], jnp.int32), state_indices=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="`states` must have slots of at most 2147483647"):
        jax.eval_shape(lambda states: pipeline.ragged_gated_delta_rule(**x, states=made(states), **step), states)
    with pytest.raises(ValueError, match="`slots` must be at most 2147483647, which int32 counts"):
        pipeline.make_pool(2**31, 1, 8, 8)
