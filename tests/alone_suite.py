"""Every argument of every public function of a package, in a process that has imported no other package.

    python tests/alone_suite.py kda

traces the functions; `run` does so in a process of its own.
"""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from typing import Any

import numpy as np

# Sizes: two sequences of 7 and 17 tokens, with states in a pool of 12 slots.
T, H, HV, K, V, C, D, W, N = 24, 1, 2, 16, 16, 16, 8, 4, 2
ENDS, SLOTS = (0, 7, T), 12
CHANNEL_GATES = ("kda", "gdn2", "gla", "dplr_delta_rule", "rwkv7")
# Tile sizes that are not ones.
CONFIGS = {"causal_conv1d": (16, 128), "norm_gated": (16, 1, 16)}
OPERATORS = ("fused_gdn", "fused_gla", "kda", "two_keys", "delta_product", "dplr", "mlstm", "mamba2")
# The packages whose kernels a package runs.
KERNELS_OF = {
    "two_keys": {"kda"}, "delta_product": {"fused_gdn"}, "dplr": {"two_keys", "kda"}, "mlstm": {"fused_gla"},
    "mamba2": {"fused_gla"}, "recipes": {"fused_gla", "kda", "two_keys"},
}  # fmt: skip


def run(package: str) -> None:
    """Trace the functions of a package in another process."""
    done = subprocess.run([sys.executable, __file__, package], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def operands(name: str) -> dict[str, Any]:
    """Return values of all arguments of an operator that are arrays of tokens, belong to heads, or count steps."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32) / 4
    per_channel = name.split("_", 1)[1] in CHANNEL_GATES
    gates = (HV, K) if per_channel else (HV,)
    n = 2 if name.endswith("_delta_product") else 1
    keys = {key: draw(1, T, H, K) for key in "abr"} if "dplr" in name or "rwkv7" in name else {}
    gates_by_name = dict.fromkeys(("gk", "w"), -abs(draw(1, T, HV, K))) if keys else {}
    return {
        "q": draw(1, T, H, K), "k": draw(1, T * n, H, K), "v": draw(1, T * n, HV, V), "p": draw(1, T, H, K),
        "g": -abs(draw(1, T, *gates)), "beta": abs(draw(1, T * n, HV)), "b": abs(draw(1, T, HV, K)),
        "w": abs(draw(1, T, HV, V)), "g_gamma": -abs(draw(HV)), "A_log": draw(HV), "dt_bias": draw(*gates),
        "states": draw(SLOTS, HV, K, V), "num_householder": n, "i": draw(1, T, HV), "f": draw(1, T, HV),
        "x": draw(1, T, HV, V), "dt": abs(draw(1, T, HV)), "A": -abs(draw(HV)), "B": draw(1, T, H, K),
        "C": draw(1, T, H, K), **keys, **gates_by_name,
    }  # fmt: skip


def operator_calls(name: str, config: Any) -> list[dict[str, Any]]:
    """Return what an operator is called with besides its operands; names that it does not have are dropped."""
    from chunkwise.shared.serving import state_pool

    int32 = lambda *values: np.array(values, np.int32)
    x = operands(name)
    ends, ids, pool = int32(*ENDS), np.repeat(int32(0, 1, -1), (7, 14, 3))[None], x["states"]
    states = pool[:N]
    if name.endswith("_mlstm"):
        states = states, states[..., 0], states[..., 0, 0]
    raw = dict(
        use_gate_in_kernel=True, A_log=x["A_log"], dt_bias=x["dt_bias"], lower_bound=-5.0, min_gate=-5.0,
        use_beta_sigmoid_in_kernel=True, use_erase_sigmoid_in_kernel=True, use_write_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )  # fmt: skip
    common = dict(
        g=x["g"], scale=0.5, use_qk_l2norm_in_kernel=True, chunk_size=C, g_gamma=x["g_gamma"], implementation="xla",
        D=x["A"], z=x["x"], dt_softplus=True, dt_limit=(0.0, 1.0),
    )  # fmt: skip
    if not name.startswith("ragged_"):
        step = dict(
            initial_state=states if name.endswith("_mlstm") else pool, state_indices=int32(3, 1),
            has_initial_state=np.array([True, False]), cu_seqlens=ends,
            output_final_state=True,
        )  # fmt: skip
        return [
            dict(common, initial_state=states, output_final_state=True, cu_seqlens=ends, eps=1e-5),
            dict(raw, segment_ids=ids, implementation="fused", config=config, disable_recompute=True),
            dict(raw, sharding="heads", output_final_state=True),
            dict(context_axis="tokens"),
            *([step, step | {"implementation": "fused"}] if name.startswith("recurrent_") else []),
        ]
    step = dict(cu_seqlens=ends, has_initial_state=np.array([True, False]), num_sequences=np.int32(2))
    blocks = dict(block_state_indices=int32(4, 5, 6, 7).reshape(N, 2), block_size=C)
    read = dict(states=pool, state_indices=int32(3, 1), read_indices=int32(2, 1))
    ring = dict(states=state_pool.make_pool(SLOTS, HV, K, V, replay=16, H=H, per_channel=x["g"].ndim == 4))
    wide = dict(states=pool, state_indices=int32(*range(2 * 7)).reshape(2, 7) % SLOTS, num_decodes=np.int32(1))
    decodes = dict(wide, num_accepted_tokens=int32(2, 1))
    return [
        dict(common, **step, **blocks, **read),
        dict(common, **step, **blocks, **read) | {"implementation": "fused"},
        dict(common, **step, **blocks, **ring, state_indices=int32(3, 1)),
        dict(raw, **step, **ring, state_indices=int32(3, 1), decode_tokens=7, num_decodes=np.int32(1)),
        dict(raw, **step, **decodes),
        dict(raw, **step, **read, sharding="heads"),
    ]


def other_calls(name: str, config: Any) -> list[dict[str, Any]]:
    """Return whole calls of the functions that are no operators."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32) / 4
    int32 = lambda *values: np.array(values, np.int32)
    ends, pallas = int32(*ENDS), dict(implementation="pallas", config=config)
    x, weight, rows = draw(1, T, D), draw(D, W), draw(SLOTS, W - 1, D)
    if name == "causal_conv1d":
        ids = np.repeat(int32(0, 1, -1), (7, 14, 3))[None]
        base = dict(x=x, weight=weight, bias=draw(D))
        return [
            dict(base, initial_state=rows[:N], output_final_state=True, activation=None, cu_seqlens=ends),
            dict(base, segment_ids=ids, **pallas),
            dict(base, sharding="channels"),
            dict(base, context_axis="tokens"),
        ]
    if name == "causal_conv1d_update":
        base = dict(x=x, weight=weight, bias=draw(D), states=rows, cu_seqlens=ends, activation="silu")
        step = dict(has_initial_state=np.array([True, False]), num_sequences=np.int32(2), num_decodes=np.int32(1))
        blocks = dict(block_state_indices=int32(4, 5, 6, 7).reshape(N, 2), block_size=C)
        wide = int32(*range(2 * 7)).reshape(2, 7) % SLOTS
        return [
            dict(base, **step, **blocks, state_indices=int32(3, 1), read_indices=int32(2, 1)),
            dict(base, **step, state_indices=wide, num_accepted_tokens=int32(2, 1), implementation="pallas"),
            dict(base, state_indices=int32(3, 1), sharding="channels"),
        ]
    if name == "rms_norm_gated":
        base = dict(x=draw(1, T, HV, V), z=draw(1, T, HV, V), weight=draw(V))
        more = dict(activation="sigmoid", norm_before_gate=False, eps=1e-6, in_place=True)
        return [dict(base, **more), dict(base, **pallas), dict(base, sharding="heads")]
    heads = dict(k=draw(1, T, H, K), v=draw(1, T, HV, V), beta=abs(draw(1, T, HV)), scale=0.5)
    g_cum = -np.cumsum(abs(draw(1, T, HV)), axis=1)
    states = dict(initial_state=draw(N, HV, K, V), output_final_state=True)
    A, chunks = np.zeros((1, T, HV, C), np.float32), T // C + N
    # Rows of chunks that begin with the sequences; what a stage before makes is zeros, or the identity of them.
    A_inv = np.zeros_like(A)
    A_inv[0, np.arange(T), :, np.r_[np.arange(7), np.arange(T - 7) % C]] = 1.0
    given: dict[str, dict[str, Any]] = {
        "chunk_local_cumsum": dict(g=-abs(draw(1, T, HV)), reverse=True),
        "chunk_scaled_dot_kkt": dict(heads, g_cum=g_cum, p=draw(1, T, HV, K)),
        "solve_tril": dict(A=A, A_inv=A_inv),
        "recompute_w_u": dict(heads, A_inv=A_inv, g_cum=g_cum),
        "chunk_gated_delta_rule_fwd_h": dict(heads, w=draw(1, T, HV, K), u=draw(1, T, HV, V), g_cum=g_cum, **states),
        "chunk_fwd_h": dict(heads, g_cum=g_cum, g_gamma=-abs(draw(HV)), **states),
        "chunk_fwd_o": dict(
            heads, q=draw(1, T, H, K), h=draw(1, chunks, HV, K, V), g_cum=g_cum, g_gamma=-abs(draw(HV))
        ),
    }
    call = dict(given[name], cu_seqlens=ends, chunk_size=C)
    per_channel = dict(call, g_cum=None, g_gamma=None, gk_cum=-np.cumsum(abs(draw(1, T, HV, K)), axis=1))
    return [dict(call, implementation="xla"), dict(call, **pallas), *([per_channel] if name == "chunk_fwd_h" else [])]


def recipe_calls(name: str, config: None) -> list[dict[str, Any]]:
    """Return whole calls of a recipe, of which a module of its package has the inputs."""
    import jax

    from chunkwise.shared.testing.definitions import Composition

    modules = [module for key, module in sys.modules.items() if key.startswith("chunkwise.recipes.")]
    found = {x for module in modules for x in vars(module).values() if isinstance(x, Composition)}
    recipe, *_ = (x for x in found if name in (x.chunk.__name__, x.recurrent.__name__))
    x = jax.tree.map(np.asarray, recipe.inputs(1, T, H, H, K, V, num_states=N))
    ends, ids = np.array(ENDS, np.int32), np.repeat(np.array([0, 1, -1], np.int32), (7, 14, 3))[None]
    base = dict(x, scale=0.5, output_final_state=True, x=2.0, eps=1e-5)
    wide = dict(base, initial_state=jax.tree.map(lambda y: y[:1], x["initial_state"]))
    calls = [dict(base, cu_seqlens=ends, implementation="xla"), dict(wide, sharding="heads")]
    return calls if name.startswith("recurrent_") else [*calls, dict(wide, segment_ids=ids, chunk_size=C)]


def trace(function, call: dict[str, Any]) -> None:
    """Trace a call, whose arrays are operands; `sharding` and `context_axis` name the axis of a mesh of one device."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    arrays = {name: x for name, x in call.items() if any(isinstance(y, np.ndarray) for y in jax.tree.leaves(x))}
    arrays |= {name: call[name] for name in call.keys() & {"states", "num_decodes", "num_sequences"}}
    static = {name: x for name, x in call.items() if name not in arrays}
    run = lambda arrays: function(**arrays, **static)
    if axis := static.get("context_axis") or static.get("sharding"):
        mesh = jax.make_mesh((1,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
        if "sharding" in static:
            static["sharding"] = NamedSharding(mesh, PartitionSpec(None, None, axis))
        else:
            split = PartitionSpec(None, axis)
            specs = {
                name: split if x.ndim > 1 and x.shape[1] % T == 0 else PartitionSpec() for name, x in arrays.items()
            }
            first = lambda arrays: function(**arrays, **static)[0]
            run = jax.shard_map(first, mesh=mesh, in_specs=(specs,), out_specs=split)
    assert jax.eval_shape(run, arrays) is not None


def check(package: str) -> None:
    """Trace every public function of a package with every argument."""
    module = importlib.import_module(f"chunkwise.{package}")
    Config = getattr(module, "Config", None)
    # Blocks of heads this narrow have all of them.
    sizes = lambda: (HV if field.name.startswith("heads") else 1 for field in dataclasses.fields(Config))
    config = Config and Config(*CONFIGS.get(package) or sizes())
    for name in module.__all__:
        function = getattr(module, name)
        if not inspect.isfunction(function):
            continue
        parameters, given, optional = inspect.signature(function).parameters, set(), operands(name)
        needed = {y: optional[y] for y, p in parameters.items() if p.default is p.empty and y in optional}
        is_operator = package in OPERATORS
        calls = recipe_calls if package == "recipes" else operator_calls if is_operator else other_calls
        for call in calls(name, config):
            call = {y: x for y, x in ((needed if is_operator else {}) | call).items() if y in parameters}
            try:
                trace(function, call)
            except Exception as error:
                error.add_note(f"{name}({', '.join(call)})")
                raise
            given |= call.keys()
        assert given == parameters.keys(), (name, parameters.keys() - given)
    others = {x.split(".")[1] for x in sys.modules if x.startswith("chunkwise.")} - {package, "shared"}
    assert others <= KERNELS_OF.get(package, set()), others


if __name__ == "__main__":
    check(sys.argv[1])
