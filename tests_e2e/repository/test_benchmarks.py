"""The benchmarks run, on shapes of nothing, and print no ratio for a result that is wrong."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.cases import CASES
from chunkwise.command.models import Layer
from chunkwise.shared import tuning
from chunkwise.shared.testing import tpu as compiler
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.oracle import reference

ROOT = Path(__file__).parents[2]
QUICK_MIXERS = ("gated_delta_rule", "xla"), ("kda", "fused")
THOROUGH = dict(
    test_first_call=True,
    test_bits=True,
    test_time=lambda arguments: "--backward" in arguments,
    test_heads_over_devices=True,
    test_stored_orders_change_no_bit=True,
    test_mixer=lambda operator, implementation: (operator, implementation) not in QUICK_MIXERS,
    test_time_of_a_mixer=lambda operator, implementation: (operator, implementation) != ("gated_delta_rule", "xla"),
    # One operator with each of the mixtures.
    test_time_of_a_step=lambda case, mixture: STEP_CASES.index(case) != STEPS.index(mixture),
    test_tpu_estimate_of_a_step=True,
    test_tpu_count_of_a_packed_batch=True,
    test_tokens_and_heads_over_simulated_devices=True,
)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The benchmarks have small cases here, packed or not."""
    monkeypatch.setitem(CASES, "small", Layer("gated_delta_rule", H=1, HV=2, K=8, V=8, T=64))
    monkeypatch.setitem(CASES, "ragged", Layer("simple_gla", H=1, HV=1, K=8, V=8, T=48, sequences=3, ragged=True))
    monkeypatch.setitem(CASES, "packed", Layer("kda", H=1, HV=1, K=8, V=8, T=48, sequences=3))
    monkeypatch.setattr("benchmarks.timing.machine_peaks", lambda dtype: (1e9, 1e9))
    return command


@pytest.fixture
def run(benchmarks, tmp_path):
    """Run a command; return its exit code and its rows."""

    def run(*arguments):
        path = tmp_path / "result.json"
        code = benchmarks.main([*arguments, "--json", str(path)])
        return code, json.loads(path.read_text())["rows"]

    return run


@pytest.mark.parametrize(
    "arguments",
    [["--case", "small", "--backward"], ["--case", "packed", "--dtype", "bfloat16"]],
    ids=["backward", "packed"],
)
def test_time(run, arguments, capsys):
    code, rows = run("time", *arguments, "--repeats", "1")
    assert code == 0
    assert capsys.readouterr().out.isascii()
    assert [row["implementation"] for row in rows if row["implementation"] != "transformers"] == ["xla", "scan"]
    ours = rows[0]
    assert all(row["correct"] for row in rows)
    assert ours["memory_mib"] > 0
    assert ours["compile_s"] > 0
    assert ours["x scan"] == pytest.approx(rows[-1]["median_ms"] / ours["median_ms"])
    assert ours["tflop_s"] * ours["median_ms"] == pytest.approx(rows[-1]["tflop_s"] * rows[-1]["median_ms"])


def test_time_of_sequences_of_different_lengths(run):
    """The last of them is judged, wherever it begins; the scan, which needs equal lengths, is left out."""
    code, rows = run("time", "--case", "ragged", "--repeats", "1")
    assert code == 0
    assert [(row["implementation"], row["correct"]) for row in rows] == [("xla", True)]


def test_heads_over_devices(tmp_path):
    """A process of its own: a CPU is made into devices before JAX first uses it."""
    path = tmp_path / "result.json"
    # The scan over tokens, a peer, is compiled likewise.
    arguments = ["time", "--case", "two heads", "--devices", "2", "--backward", "--repeats", "1", "--json", str(path)]
    code = f"""
import sys
from benchmarks import __main__ as command, timing
from benchmarks.cases import CASES
from chunkwise.command.models import Layer
CASES["two heads"] = Layer("kda", H=2, HV=2, K=8, V=8, T=32)
timing.machine_peaks = lambda dtype: (1e9, 1e9)
sys.exit(command.main({arguments}))
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    rows = json.loads(path.read_text())["rows"]
    assert all(row["correct"] and row["devices"] == 2 for row in rows)
    assert {"xla", "scan"} <= {row["implementation"] for row in rows}


def test_tokens_and_heads_over_simulated_devices(tmp_path):
    """A process of its own likewise."""
    path = tmp_path / "result.json"
    arguments = ["scale", "--case", "two heads", "--devices", "2", "--backward", "--repeats", "1", "--json", str(path)]
    code = f"""
import sys
from benchmarks import __main__ as command
from benchmarks.cases import CASES
from chunkwise.command.models import Layer
CASES["two heads"] = Layer("gated_delta_rule", H=2, HV=2, K=8, V=8, T=32)
sys.exit(command.main({arguments}))
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["devices"], row["split"]) for row in rows] == [(1, None), (2, "tokens"), (2, "heads")]
    assert all(row["correct"] for row in rows)
    assert [row["to_one_device"] for row in rows] == [row["median_ms"] / rows[0]["median_ms"] for row in rows]


def test_order(run, tmp_path, monkeypatch):
    """The search keeps what is faster, and stores what is faster and right."""
    from benchmarks import order

    path = tmp_path / "orders.json"
    path.write_text("{}")
    # As if products of the chunk before should come first.
    cost = lambda name, order, *_: 1000 + sum(i for i, letter in enumerate(order) if letter == "p")
    monkeypatch.setattr(order, "measure", cost)
    monkeypatch.setattr(order, "path_of", lambda kernel: path)
    monkeypatch.setattr(order, "same_results", lambda kernel, found: sorted(found) == sorted(kernel.otherwise))
    code, rows = run("order", "--kernel", "kda", "--tries", "200", "--write")
    assert code == 0
    assert rows[0]["order"] == "pm" * 8
    assert [row["cycles"] for row in rows] == sorted({row["cycles"] for row in rows}, reverse=True)
    assert json.loads(path.read_text())["fwd"]["heads 16, C 64, K 128"]["v6e"] == rows[-1]["order"] != rows[0]["order"]


def test_order_ends_where_nothing_is_left_to_try(benchmarks):
    from benchmarks import order

    tried = []
    assert [found for found, _ in order.search("ppm", 100, lambda x: tried.append(x) or 1)] == ["ppm"]
    assert sorted(tried) == ["mpp", "pmp", "ppm"]


@pytest.mark.parametrize("kernel", ["kda", "kda-map", "gdn-map", "gdn-behind-map"])
def test_stored_orders_change_no_bit(kernel):
    from benchmarks import order

    searched = order.KERNELS[kernel]
    orders = json.loads(order.path_of(searched).read_text())[searched.kernel]
    assert all(order.same_results(searched, x) for x in orders[tuning.order_key(*searched.size)].values())


def test_bits(benchmarks, tmp_path, capsys):
    """The same program has the same fingerprints; another result is named."""
    path, only = tmp_path / "bits.json", ["--only", "recurrent_gla, xla, rows"]
    assert benchmarks.main(["bits", *only, "--json", str(path)]) == 0
    assert benchmarks.main(["bits", *only, "--against", str(path)]) == 0
    saved = json.loads(path.read_text())
    name = next(iter(saved))
    path.write_text(json.dumps(saved | {name: "another"}))
    assert benchmarks.main(["bits", *only, "--against", str(path)]) == 1
    assert f"differs: {name}" in capsys.readouterr().out


def test_scan_without_a_topology(benchmarks, capsys):
    with pytest.raises(SystemExit):
        benchmarks.parse(["scale", "--scan", "ring"])
    assert "`--scan` compiles for a `--topology`; got none." in capsys.readouterr().err


GATHERED = "f32[4,32]{1,0:T(8,128)S(1)}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%a.1 = {GATHERED} all-gather(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}", ("all-gather", 384)),
        ("%a = f32[8]{0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}", ("all-gather", 16)),
        (
            "%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), channel_id=1, replica_groups=[1,4]<=[4]",
            ("all-gather", 24),
        ),
        ("ROOT %r = bf16[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", ("all-reduce", 16)),
        ("%r = (f32[8]{0}, f32[4]{0}) all-reduce-start(%x, %y), replica_groups={}", ("all-reduce", 72)),
        ("%s = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}", ("reduce-scatter", 24)),
        ("%p = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}", ("collective-permute", 32)),
        (
            "%p = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%x)",
            ("collective-permute", 32),
        ),
        ("%d = f32[8]{0} all-gather-done(%a)", None),
        ("%f = f32[8]{0} fusion(%all-gather.1), kind=kLoop", None),
    ],
)
def test_bytes_of_collectives(line, expected):
    from chunkwise.shared.testing.compiled import traffic

    assert traffic(f"ENTRY %main () -> f32[] {{\n  {line}\n}}", 4) == ([expected] if expected else [])


def test_bytes_of_scans_and_of_ring_attention():
    from benchmarks.scale import map_bytes, ring_attention_bytes, scan_bytes

    case = Layer("gated_delta_rule", H=1, HV=2, K=8, V=16)
    assert map_bytes(case) == (4 * 2 * 8 * 8, 4 * 2 * 8 * 16)
    assert map_bytes(Layer("gla", H=1, HV=2, K=8, V=16))[0] == 4 * 2 * 8
    assert scan_bytes(case, "all_gather", 8) == 7 * 4 * 2 * 8 * 24
    assert scan_bytes(case, "all_to_all", 2) == 4 * 8 * (8 + 2 * 16)
    # Two heads are one for each of eight devices, of which six are zeros.
    assert scan_bytes(case, "all_to_all", 8) == 7 * 4 * 8 * (8 + 2 * 16)
    assert scan_bytes(case, "doubling", 8) == 4 * 2 * (3 * 8 * 24 + 8 * 16)
    assert scan_bytes(case, "ring", 8) == 7 * 4 * 2 * 8 * 16
    assert ring_attention_bytes(case, 8, T=64, kv_heads=2) == 7 * 64 * 2 * 24 * 2


def test_cost_is_the_packages():
    from benchmarks.cases import CASES

    # 2 T HV (2 C K + 2 C V + 3 K V) flops, and the backward twice as many.
    gdn = Layer("gated_delta_rule", H=1, HV=2, K=8, V=16)
    forward = 2 * 128 * 2 * (2 * 64 * 8 + 2 * 64 * 16 + 3 * 8 * 16)
    assert gdn.cost(128, jnp.bfloat16, backward=False)[0] == forward
    assert gdn.cost(128, jnp.bfloat16, backward=True)[0] == 3 * forward
    for case in CASES.values():
        for one, both in zip(*(case.cost(256, jnp.bfloat16, backward) for backward in (False, True)), strict=True):
            assert 0 < one < both


def small_mixer(operator, **options):
    from benchmarks.mixer import Mixer

    return Mixer(operator, **dict(H=1, HV=2, K=8, V=8, T=16) | options)


@pytest.mark.parametrize(
    ("operator", "activation", "implementation"),
    [
        (operator, activation, implementation)
        for operator, activation in (("gated_delta_rule", "silu"), ("kda", "sigmoid"))
        for implementation in ("xla", "mixed", "fused", "staged")
    ],
)
def test_mixer(operator, activation, implementation):
    mixer = small_mixer(operator, activation=activation)
    x = mixer.inputs(mixer.T, jnp.float32)
    o = jax.jit(mixer.function(implementation))(x, None)["o"]
    assert_close("o", o, mixer.expected(x, None)["o"], TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("operator", "implementation", "dtype", "sequences"),
    [
        ("gated_delta_rule", "xla", "float32", 2),
        ("gated_delta_rule", "fused", "float32", 0),
        ("kda", "xla", "bfloat16", 0),
    ],
)
def test_time_of_a_mixer(run, operator, implementation, dtype, sequences, monkeypatch):
    """Judged with gradients, those of the last of two key heads and the last sequence of a pack; there are no peers."""
    from benchmarks.mixer import MIXERS

    monkeypatch.setitem(MIXERS, "mixer", small_mixer(operator, H=2, HV=4, sequences=sequences))
    arguments = ["--implementation", implementation, "--dtype", dtype, "--backward", "--repeats", "1"]
    code, rows = run("time", "--case", "mixer", *arguments)
    assert code == 0
    assert [(row["implementation"], row["correct"]) for row in rows] == [(implementation, True)]


def test_a_wrong_gradient_of_a_mixer_is_found(run, monkeypatch):
    from benchmarks import mixer

    right = mixer.mixer_oracle.causal_conv1d_gradients
    monkeypatch.setattr(mixer.mixer_oracle, "causal_conv1d_gradients", lambda *x: (right(*x)[0], 1.1 * right(*x)[1]))
    monkeypatch.setitem(mixer.MIXERS, "mixer", small_mixer("gated_delta_rule"))
    code, rows = run("time", "--case", "mixer", "--backward", "--repeats", "1")
    assert code == 1
    assert rows[0]["error"] == pytest.approx(0.1 / 1.1, rel=0.1)


def test_heads_of_a_mixer_are_not_split(benchmarks, capsys):
    with pytest.raises(SystemExit):
        benchmarks.parse(["time", "--case", "mixer-kimi-linear", "--devices", "2"])
    assert "`--devices` splits the heads of an operator; got mixer-kimi-linear." in capsys.readouterr().err


def test_the_cost_of_a_mixer_is_that_of_its_parts():
    from benchmarks.mixer import MIXERS

    T, H, HV, K, V, W, size = 64, 1, 2, 8, 8, 4, 2
    mixer, operator = small_mixer("gated_delta_rule"), Layer("gated_delta_rule", H=H, HV=HV, K=K, V=V)
    convolved, rows = T * (2 * H * K + HV * V), T * HV
    for backward, times, moved, norm, moved_by_norm in ((False, 1, 2, 8, 3), (True, 1 + 3, 2 + 3, 8 + 20, 3 + 5)):
        flops, bytes_moved = operator.cost(T, jnp.bfloat16, backward)
        assert mixer.cost(T, jnp.bfloat16, backward) == (
            flops + 2 * W * convolved * times + rows * V * norm,
            bytes_moved + size * (convolved * moved + rows * V * moved_by_norm),
        )
    for mixer in MIXERS.values():
        for one, both in zip(*(mixer.cost(256, jnp.bfloat16, way) for way in (False, True)), strict=True):
            assert 0 < one < both


def test_what_a_layer_keeps():
    """A policy keeps less than no checkpoint, and more than the hidden states alone, or that much on the host."""
    from benchmarks.remat import POLICIES, kept_bytes

    case = Layer("gated_delta_rule", H=1, HV=2)
    grown = {name: np.subtract(kept_bytes(case, name, 128), kept_bytes(case, name, 64)) for name in POLICIES}
    kept = {name: sum(each) for name, each in grown.items()}
    assert tuple(grown["offload_policy"]) == (kept["inputs alone"], kept["remat_policy"] - kept["inputs alone"])
    assert kept["inputs alone"] == 64 * 2 * 128
    assert kept["inputs alone"] < kept["products alone"] < kept["remat_policy"] < kept["no checkpoint"]


def test_a_block_of_a_model():
    """Its cost is that of the operator and of two flops for each weight and token, three times as many backward."""
    from benchmarks.block import Block
    from benchmarks.tpu import can_run, ours

    T, sizes = 64, dict(H=1, HV=2, K=8, V=8)
    block, operator = Block("gated_delta_rule", **sizes, D=32, F=48), Layer("gated_delta_rule", **sizes)
    weights = 32 * (2 * 8 + 2 * 16 + 2 * 2 + 16) + 4 * (2 * 8 + 16) + 2 * 2 + 8 + 2 * 32 + 3 * 32 * 48
    for backward, times in ((False, 1), (True, 3)):
        flops, moved = block.cost(T, jnp.bfloat16, backward)
        assert flops == operator.cost(T, jnp.bfloat16, backward)[0] + times * 2 * T * weights
        assert moved == 2 * (1 + backward) * (weights + 2 * T * 32)
    function, arguments = ours(block, "xla", T, True, None)
    gradients = jax.eval_shape(function, *arguments)
    assert {name.removeprefix("d"): x.shape for name, x in gradients.items()} == {
        name: x.shape for name, x in arguments[0].items()
    }
    assert can_run(block, "fused", True)
    assert not can_run(block, "tokamax", False)


def test_cycles_of_operations():
    from benchmarks.tpu import operations

    cycles = lambda n: f'backend_config={{"estimated_cycles":"{n}"}}'
    inside = f"%fused (x: f32[]) -> f32[] {{\n  ROOT %m = f32[] multiply(%x, %x), {cycles(5)}\n}}\n"
    main = f"%a = f32[] fusion(%x), {cycles(100)}\n  ROOT %b = f32[] add(%a, %a), {cycles(20)}"
    entry = f"\nENTRY %main () -> f32[] {{\n  {main}\n}}"
    assert operations(inside + entry) == 120
    # A loop whose turns are known, and one whose turns are not.
    loop = "while(%a), condition=%c, body=%fused"
    assert operations(inside + entry.replace("add(%a, %a)", f'{loop}, "known_trip_count":{{"n":"3"}}')) == 120 + 3 * 5
    assert operations(inside + entry.replace("add(%a, %a)", loop)) == 120 + 5
    branches = "conditional(%p, %a), branch_computations={%fused, %other}"
    other = inside.replace("fused", "other").replace('"5"', '"7"')
    assert operations(inside + other + entry.replace("add(%a, %a)", branches)) == 120 + 7


def test_no_ratio_without_correctness(run, monkeypatch):
    from chunkwise.command import models

    exact = models.reference
    monkeypatch.setattr(models, "reference", lambda **x: (exact(**x)[0] + 1.0, None))
    code, rows = run("time", "--case", "packed", "--repeats", "1")
    assert code == 1
    assert not any(row["correct"] for row in rows)
    assert rows[0]["x scan"] is None


def test_stages(run):
    stages = ["--stage", "chunk_scaled_dot_kkt", "--stage", "chunk_fwd_o"]
    code, rows = run("stages", "--case", "small", "--backward", "--repeats", "1", *stages)
    assert code == 0
    assert [row["stage"] for row in rows] == ["chunk_scaled_dot_kkt", "chunk_fwd_o"]
    assert all(row["correct"] for row in rows)


def test_a_wrong_gradient_of_a_stage_is_found():
    from benchmarks import stages
    from benchmarks.cases import CASES

    case, cumsum = CASES["small"], stages.STAGES[0]
    x = {"g": case.inputs(64, jnp.float32)["g"]}
    cotangents = {"g_cum": jnp.ones_like(x["g"])}
    right = {"g": jnp.broadcast_to(jnp.arange(64.0, 0, -1)[:, None], x["g"].shape)}
    wrong = {"g": 1.01 * right["g"]}
    errors = [next(stages.gradient_errors(case, cumsum, x, cotangents, dg, None)) for dg in (right, wrong)]
    assert errors[0] < 1e-8
    assert errors[1] == pytest.approx(0.01, rel=1e-3)


def test_accuracy(run, monkeypatch):
    from benchmarks import accuracy

    monkeypatch.setattr(accuracy, "STRENGTHS", (0.1, 5.0))
    code, rows = run("accuracy", "gate", "--operator", "simple_gla", "--implementation", "xla", "--tokens", "64")
    assert code == 0
    errors = {(row["form"], row["dtype"], row["point"]): row["error"] for row in rows}
    assert errors["factored form", "float32", 0.1] < 1e-5
    assert errors["factored form", "float32", 5.0] is None
    assert errors["xla", "float32", 5.0] < 1e-5


def test_forms_of_the_inverse():
    from benchmarks import accuracy

    x = accuracy.inputs("gated_delta_rule", 0.01, 0.0, 1.0, jnp.float32, 64, 32)
    forms = accuracy.forms("gated_delta_rule", "repeated keys", ["xla"])
    ours, *others = ((name, jax.jit(fn)(x)) for name, fn in forms.items())
    expected = reference(**x)[0]
    assert_close(*ours, expected, TOLERANCE["float32"])
    # Keys that hardly resemble one another: powers of their products vanish, and every form is right.
    for other in others:
        assert_close(*other, expected, TOLERANCE["float32"])


ROW = {"case": "a", "T": 8, "implementation": "xla", "median_ms": 2.0, "memory_mib": 100.0, "correct": True}
KERNEL = {"case": "a", "chip": "v6e", "kernel_cycles": 100, "around_cycles": 10, "bundles": 90, "temporaries_mib": 0.0}
WITHOUT_CYCLES = KERNEL | {"kernel_cycles": None, "around_cycles": None}


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        (ROW, [ROW], {"median_ms": False, "memory_mib": False}),
        (ROW, [ROW | {"median_ms": 2.1}], {"median_ms": False, "memory_mib": False}),
        (ROW, [ROW | {"median_ms": 2.3}], {"median_ms": True, "memory_mib": False}),
        (ROW, [ROW | {"memory_mib": 120.0}], {"median_ms": False, "memory_mib": True}),
        (ROW, [ROW | {"correct": False}], {"median_ms": True, "memory_mib": True}),
        (ROW, [], {"median_ms": True, "memory_mib": True}),
        (KERNEL, [KERNEL | {"temporaries_mib": 0.5}], {"cycles": False, "temporaries_mib": False}),
        (KERNEL, [KERNEL | {"kernel_cycles": 111}], {"cycles": False, "temporaries_mib": False}),
        (KERNEL, [KERNEL | {"around_cycles": 30}], {"cycles": True, "temporaries_mib": False}),
        (KERNEL, [KERNEL | {"temporaries_mib": 2.0}], {"cycles": False, "temporaries_mib": True}),
        (KERNEL, [WITHOUT_CYCLES], {"cycles": True, "temporaries_mib": False}),
        (WITHOUT_CYCLES, [KERNEL], {"bundles": False, "temporaries_mib": False}),
        (WITHOUT_CYCLES, [KERNEL | {"bundles": 100}], {"bundles": True, "temporaries_mib": False}),
        ({"case": "a", "failed": "no result"}, [KERNEL], {}),
    ],
    ids=[
        "equal", "within", "slower", "memory", "wrong", "missing", "small memory", "cycles within", "around the kernel",
        "temporaries", "no cycles any more", "bundles", "more bundles", "failed",
    ],
)  # fmt: skip
def test_compare(before, now, worse):
    from benchmarks.compare import compare

    assert {line["figure"]: line["worse"] for line in compare(now, [before], tolerance=0.1)} == worse


def test_compare_from_the_command_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.accuracy.STRENGTHS", (0.1,))
    arguments = ["accuracy", "gate", "--operator", "simple_gla", "--implementation", "xla", "--tokens", "64"]
    _, rows = run(*arguments)
    base = tmp_path / "base.json"
    base.write_text(json.dumps({"rows": rows}))
    assert run(*arguments, "--base", str(base))[0] == 0
    base.write_text(json.dumps({"rows": [row | {"error": 1e-12} for row in rows]}))
    assert run(*arguments, "--base", str(base))[0] == 1


def test_rows_of_an_earlier_result_are_kept(run, tmp_path, monkeypatch):
    """Those that the run has no newer ones of, if the result is of the same command."""
    errors = itertools.count(1.0)
    monkeypatch.setattr(
        "benchmarks.accuracy.measure", lambda operator, *_: [{"operator": operator, "error": next(errors)}]
    )
    found = lambda *arguments: [tuple(row.values()) for row in run("accuracy", "gate", "--operator", *arguments)[1]]
    assert found("simple_gla") == [("simple_gla", 1.0)]
    assert found("kda", "--keep") == [("simple_gla", 1.0), ("kda", 2.0)]
    assert found("simple_gla", "--keep") == [("kda", 2.0), ("simple_gla", 3.0)]
    (tmp_path / "result.json").write_text(json.dumps({"command": "step", "rows": []}))
    with pytest.raises(ValueError, match="`--keep` adds to a result of the same kind; got"):
        found("kda", "--keep")


TIMED = {"T": 8, "implementation": "xla", "correct": True, "median_ms": 1.0, "memory_mib": 2.0}
SWEPT = {"sweep": "gate strength", "operator": "kda", "form": "xla", "dtype": "float32", "point": 1.0, "error": 1e-7}
ESTIMATED = {"case": "a", "pass": "forward", "implementation": "fused", "kernel_cycles": 10, "around_cycles": 1}


SIMULATED = {"case": "a", "pass": "forward", "devices": 1, "split": None, "to_one_device": 1.0}
ALONE = {"topology": "v5p:2x2x1", "devices": 1, "tokens_each": 8, "bundles": 5, "sent_mib": 0.0}
DIVIDED = ALONE | {"devices": 4, "bundles": 12, "summary_bundles": 6, "sent_mib": 3.0, "ring_attention_2_mib": 9.0}
DIVIDED |= {"all_gather_mib": 3.0, "all_to_all_mib": 1.25, "doubling_mib": 2.5, "ring_mib": 1.5}
SCANNED = {"scan": "ring", "devices": 4, "sent_mib": 1.0, "temporaries_mib": 2.0}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("time", [TIMED, TIMED | {"T": 16}]),
        ("accuracy", [SWEPT, SWEPT | {"form": "factored form", "error": None}]),
        ("tpu", [ESTIMATED | {"chip": "v5e", "kernel_cycles": None, "bundles": 7}, ESTIMATED | {"chip": "v6e"}]),
        ("scale", [SIMULATED, SIMULATED | {"devices": 2, "split": "tokens", "to_one_device": 1.5}]),
        ("scale", [ALONE, DIVIDED]),
        ("scale", [SCANNED, SCANNED | {"devices": 8}]),
    ],
)
def test_plot(benchmarks, kind, rows, tmp_path):
    saved, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    saved.write_text(json.dumps({"command": kind, "rows": rows}))
    assert benchmarks.main(["plot", str(saved), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_static_figures(tmp_path):
    from benchmarks.tpu import _static

    name = "0-kernel-1-final_hlo-static-per-bundle-utilization.txt"
    head = "\nMXU, VALU, VSTORE:SPILL\n 2 4 1\n== UTILIZATION:\n"
    (tmp_path / name).write_text(head + "2 0 0\n0 4 1\n1 1 1\n1 0 0\n")
    assert _static(str(tmp_path)) == {"spills": 2, "matrix_use": 0.5}


@pytest.mark.parametrize(
    ("inner", "test", "expected"),
    [
        ("", "", (3 * 4, 4)),
        # The branch of the loop over the grid may carry no depth.
        ("", "0x3   :  { %e }", (4 * 4, 4)),
        (">", "", (None, None)),
        (">", "0x3   : >> { %q = scmp.ge.s32.totalorder %s, 5 /* loop exit test */ }", (4 * (2 + 2 * 5), 4)),
    ],
    ids=["one loop", "a branch without depth", "a loop in it", "a loop of 5 turns in it"],
)
def test_bundles_of_the_loop_over_the_grid(inner, test, expected, tmp_path):
    from benchmarks.tpu import bundles

    lines = ["0   :  { %a }", "0x1 LB: > { %b }", f"0x2   : >{inner} {{ %c }}", *filter(None, [test])]
    lines += ["0x4   : > { %p = scmp.ge.s32.totalorder %s, 6 /* loop exit test */ }", "0x5   :  { %d }"]
    for name in ("kernel.1", "copy.2"):  # the copy is not a kernel
        (tmp_path / f"7-{name}-03-final_bundles.txt").write_text("\n".join(lines))
    assert bundles(str(tmp_path), {"kernel.1"}) == expected
    assert bundles(str(tmp_path), {"kernel.1", "kernel.2"}) == (None, None)


def test_regions_that_a_layer_runs():
    """The second path of a gate for every channel is not taken; a branch around a loop runs as often as the grid."""
    from benchmarks.regions import Loop, Region
    from benchmarks.tpu import turns_of

    regions = lambda *bundles: Loop(10, 0, 5, [Region(0, 9, n) for n in bundles])
    kda, delta, gla = (
        turns_of(Layer(name, H=4, HV=4, T=256)) for name in ("kda", "gated_delta_rule", "simple_gla")
    )  # fmt: skip
    assert kda("chunk_kda_fwd_c64.1", regions(3000)) == (5, [0])
    assert kda("chunk_kda_summary_c64.2", regions(3000)) == (5, [0])
    assert kda("chunk_kda_fwd_c64.1", regions()) is None
    assert kda("chunk_kda_bwd_c64.1", regions(3000)) is None
    assert delta("chunk_gated_delta_rule_fwd_c64.1", regions(30)) is None
    steps, runs = gla("chunk_gla_fwd_c64.1", regions(100, 200))
    assert gla("chunk_gla_fwd_c64.1", regions(100, 3, 200)) == (steps, [runs[0], steps, runs[1]])


STEPS = [dict(decodes=3), dict(decodes=2, W=3, pool="bfloat16"), dict(prefills=(5, 70))]
STEP_CASES = "small", "packed", "ragged"


@pytest.mark.parametrize("mixture", STEPS, ids=["0", "1", "2"])
@pytest.mark.parametrize("case", STEP_CASES)
def test_time_of_a_step(run, case, mixture, monkeypatch):
    from benchmarks.step import MIXTURES, Mixture

    monkeypatch.setitem(MIXTURES, "some", Mixture(**mixture))
    code, rows = run("step", "--case", case, "--mixture", "some", "--repeats", "1")
    assert code == 0
    assert [(row["implementation"], row["correct"]) for row in rows] == [("xla", True)]
    assert rows[0]["tokens_s"] == pytest.approx(1e3 * rows[0]["tokens"] / rows[0]["median_ms"])


def test_a_wrong_state_of_a_step_is_found(run, monkeypatch):
    from benchmarks import step

    exact = step.reference
    monkeypatch.setattr(step, "reference", lambda *x, **y: (exact(*x, **y)[0], exact(*x, **y)[1] + 0.1))
    monkeypatch.setitem(step.MIXTURES, "some", step.Mixture(1, prefills=(9,)))
    code, rows = run("step", "--case", "small", "--mixture", "some", "--repeats", "1")
    assert code == 1
    assert not rows[0]["correct"]


# A loop of 5 grid steps: what every step runs has a region with a loop in it, and one in one.
KERNEL_CODE = """\
     0   :  { %a }
   0x1 LB: > { %b /* bounds:
 no bundle */ }
   0x2   : > { %c = sbr.rel (%p0) target = $region9 }
   0x3   :  {}
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   : > { %d } /* Start region 8 */
   0x8   : > { %e = sbr.rel (!%p1) target = $region3 ;; %f }
   0x9   :  {}
   0xa   :  {}
   0xb   :  {}
   0xc   :  {}
   0xd   : > { %g = sbr.rel (%p2) target = $region4 }
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   : > { %h }
  0x13   : > { %i }
  0x14 LB: >> { %j } /* Start region 6 */
  0x15   :  {}
  0x16   : >> { %k = scmp.ge.s32.totalorder %s, 32 /* loop exit test */ }
  0x17   : >> { %l = sbr.rel (!%p3) target = $region6 }
  0x18   :  {}
  0x19   : > { %t }
  0x1a   :  {}
  0x1b   :  {}
  0x1c PF: > { %m } /* Start/End empty region 4 :: Start region 5 */
  0x1d PF: > { %n } /* Start/End empty region 3 */
  0x1e PF: > { %o } /* Start/End empty region 9 */
  0x1f   : > { %q = scmp.ge.s32.totalorder %s, 7 /* loop exit test */ }
  0x20   : > { %r = sbr.rel (!%p4) target = $region2 }
  0x21   :  { %s }
"""


def test_loop_of_a_kernel():
    from benchmarks.regions import kernel_bundles, read_loop

    loop = read_loop(KERNEL_CODE)
    # The first bundle, the branch with its delay, and three bundles at the end; a region starts after the delay.
    assert (loop.turns, loop.always) == (7, 1 + 5 + 3)
    # Its own bundle, the first branch and the end; the outer region without the one in it; two bundles and the loop, of
    # which one that runs with the branch back has the depth of what follows.
    assert loop.body == 1 + 5 + 1
    assert [region.bundles for region in loop.regions] == [5 + 1, 2 + 32 * 8]
    assert kernel_bundles(loop, 5, [3, 2]) == 7 * 9 + 5 * 7 + 3 * 6 + 2 * 258
    with pytest.raises(ValueError, match="5 steps and 2 regions"):
        kernel_bundles(loop, 5, [3])
    # A small region that follows those of the kernel cuts the last block.
    cut = loop._replace(regions=[*loop.regions, loop.regions[0]])
    assert kernel_bundles(cut, 5, [3, 2]) == kernel_bundles(cut, 5, [3, 2, 5])


def test_body_of_a_loop_that_has_fewer_regions_than_a_copy():
    """A branch with two in it stands before the body, as those that copy blocks do, which may have none."""
    from benchmarks.regions import read_loop

    branch = lambda n: [f"   0x1   : > {{ sbr.rel (!%p1) target = $region{n} }}", *["   0x1   : > { %a }"] * 4]
    end = lambda n: [f"   0x1   : > {{ %b }} /* Start/End empty region {n} */"]
    copy = [*branch(1), *branch(2), *end(2), *branch(3), *end(3), *end(1)]
    body = [*branch(4), *["   0x1   : > { %c }"] * 40, *end(4)]
    exit_test = ["   0x1   : > { %q = scmp.ge.s32.totalorder %s, 7 /* loop exit test */ }", "   0x1   :  { %s }"]
    loop = read_loop("\n".join(["   0   :  { %a }", *copy, *body, *exit_test]))
    assert (loop.body, loop.regions) == (40, [])
    assert loop.always == len(copy) + len(body) + 1 - 40


def test_turns_that_run_the_regions_of_packed_batches():
    """Sequences of 70 and 140 tokens: pieces of 64, 6, 58, 64 and 18 rows, and one that is empty."""
    from benchmarks.packed import case_of, turns

    delta, kda, gla = (lambda n, name=name: case_of(name, n, 210) for name in ("gated_delta_rule", "kda", "simple_gla"))
    # One turn more than pieces. Only the first turn has whole chunks alone, and only the last one has the piece that is
    # empty alone. A forward has no branch where a sequence starts; one of a gate for every channel has a second path.
    assert turns(delta(2), "fwd", 64) == turns(delta(2), "states", 64) == (7, [1, 6, 1, 5])
    assert turns(kda(2), "fwd", 64) == (7, [1, 0, 6, 1, 5, 0])
    for case in (delta(2), kda(2)):
        assert turns(case, "bwd", 64) == (6, [3, 2, 4, 1, 3])
    assert turns(delta(0), "fwd", 64) == (5, [])
    assert turns(kda(0), "fwd", 64) == (5, [0])
    assert turns(kda(0), "bwd", 64) == (4, [1])
    # A step takes 4 chunks: 2 and 3 of the two sequences, of which 1 and 1 are whole, and one that is empty. The
    # backward first goes over all but the last chunk of each.
    assert turns(gla(2), "fwd", 64) == (3, [2, 1, 2, 5, 2, 3])
    assert turns(gla(2), "bwd", 64) == (3, [3, 1, 2, 3, 2, 1, 2, 5, 2, 3])
    assert turns(gla(0), "bwd", 64) == (1, [1, 3, 4])


def test_steps_that_run_the_regions_of_the_kernels():
    """Two decodes of 3 tokens, and prefills of 70 and 64 tokens, which are 4 pieces of 3 chunks."""
    from benchmarks.cases import CASES
    from benchmarks.step import Mixture, decode_runs, prefill_runs
    from chunkwise.shared.call.arguments import Slots
    from chunkwise.shared.serving.step_table import find_step

    mixture = Mixture(2, W=3, prefills=(70, 64))
    step = jax.tree.map(jnp.asarray, mixture.step())
    found = find_step(step.pop("cu_seqlens"), Slots(**step), None, mixture.T)
    # The first step zeroes the outputs, and keeps the block that it reads, which it also writes.
    assert decode_runs(found.decodes) == (12, [1, 1, 4, 6, 6])
    # Rows 6 to 63, 64 to 75, 76 to 127 and 128 to 139, and one more turn. The first two turns open the first chunk.
    # No chunk is wholly of one piece. Two turns open the first one, and the rows after the last token need no zeros.
    # A gate for every channel has a second path, which is not taken.
    for name, second in (("qwen3-next-80b", []), ("kimi-linear-48b", [0])):
        turns, runs = prefill_runs(CASES[name], found.prefills, mixture.T, 64)
        assert runs == [2, 1, 0, *second, turns, 3, 5, *second, 2]
        assert turns > 5
    # A step of simple GLA takes all 3 chunks: 2 and 2 of the two sequences.
    assert prefill_runs(CASES["minimax-text-01"], found.prefills, mixture.T, 64)[1] == [2, 1, 1, 2, 4, 0, 4, 2]


PROGRAM = """\
%wanted.1 (a: f32[]) -> f32[] {
  ROOT %recurrent_x.1 = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
}
%nothing.1 (a: f32[]) -> f32[] {
  ROOT %broadcast.1 = f32[8]{0} broadcast(%a)
}
%other.1 (a: f32[]) -> f32[] {
  %copy.1 = f32[8]{0:T(8,128)S(1)} copy(%a)
  ROOT %fused_x.2 = f32[8]{0} custom-call(%copy.1), custom_call_target="tpu_custom_call"
}
%nothing.2 (a: f32[]) -> f32[] {
  ROOT %fusion.2 = (f32[8]{0}, s32[]) fusion(%a), kind=kLoop, calls=%inner
}

ENTRY %main (a: f32[]) -> f32[] {
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%inner
  %fusion.3 = f32[8]{0} fusion(%a), kind=kLoop, calls=%inner
  %cond.1 = f32[8]{0} conditional(%p, %a, %a), branch_computations={%nothing.1, %wanted.1}
  ROOT %cond.2 = f32[8]{0} conditional(%p, %a, %a), true_computation=%other.1, false_computation=%nothing.2
}
"""


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [({"recurrent_x.1"}, 2 + 16), ({"fused_x.2"}, 2 + 2 + 4), ({"recurrent_x.1", "fused_x.2"}, 2 + 4), (set(), 20)],
    ids=["decodes", "prefills", "both", "none"],
)
def test_cycles_of_the_branches_that_run(wanted, expected):
    """The third fusion is not profiled, because it is the same code as the first."""
    from benchmarks.step import branch_cycles

    cycles = {"fusion.1": 1, "broadcast.1": 2, "copy.1": 4, "fused_x.2": 8, "fusion.2": 16, "recurrent_x.1": 32}
    assert branch_cycles(PROGRAM, cycles, wanted) == expected


def test_bytes_of_a_step():
    from benchmarks.step import Mixture, moved_bytes

    case, state = Layer("gated_delta_rule", H=1, HV=2, K=8, V=16), 2 * 8 * 16
    token = 2 * (2 * 8 + 2 * 2 * 16) + 4 * 2 * 2
    decodes, prefills = moved_bytes(case, Mixture(3, W=2, prefills=(5, 6), pool="float16"))
    assert decodes == 3 * (2 * token + 3 * 2 * state)
    assert prefills == 11 * token + 2 * 2 * 2 * state


@pytest.mark.tpu
@pytest.mark.skipif(not compiler.has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize(
    "operator",
    ["gated_delta_rule", "kda", "simple_gla"],
)
def test_tpu_estimate_of_a_step(operator):
    """Both kernels of one program, whose regions are as many as those counted."""
    from benchmarks.step import Mixture, estimate

    row = estimate(Layer(operator, H=2, HV=4), Mixture(9, prefills=(70,)), "v6e", timeout=300)
    assert not row.get("failed")
    assert row["decode_bundles"] > 0
    assert row["prefill_bundles"] > 0
    assert row["cycles"] > row["around_cycles"] + row["decode_floor"] + row["prefill_floor"]


@pytest.mark.tpu
@pytest.mark.skipif(not compiler.has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize(
    ("operator", "sequences"),
    [(operator, n) for operator in ("gated_delta_rule", "kda", "simple_gla", "gla") for n in (3, 1, 0)],
)
def test_tpu_count_of_a_packed_batch(operator, sequences):
    """The regions of every launch are as many as those counted, in a packed batch and in one that is not."""
    from benchmarks.packed import run_count

    case = Layer(operator, H=2, HV=4, T=1024, sequences=sequences, ragged=True)
    counts = run_count(case, "v6e", timeout=300)
    assert not counts.get("failed")
    assert set(counts) == {"fwd", "bwd"} | ({"states"} if operator == "gated_delta_rule" else set())
    assert all(bundles > 0 for bundles in counts.values())


def test_ratios_of_a_packed_batch(run, monkeypatch):
    """To the first form; a form that failed has none."""
    from benchmarks import packed

    results = iter([{"fwd": 20, "bwd": 40}, {"failed": "no result"}, {"fwd": 10, "bwd": 40}])
    monkeypatch.setattr(packed, "run_count", lambda *_: next(results))
    code, rows = run("packed", "--operator", "kda", "--tokens", "64")
    assert code == 0
    assert [row.get("forward_ratio") for row in rows] == [1.0, None, 2.0]
    assert [row.get("ratio") for row in rows] == [1.0, None, 1.2]
    assert rows[1]["failed"] == "no result"


def test_no_estimate_without_the_compiler(benchmarks, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "has_libtpu", lambda: False)
    for arguments in (["tpu", "--case", "small", "--chip", "v6e"], ["packed"]):
        with pytest.raises(SystemExit, match="An estimate needs the TPU compiler: `python -m pip install libtpu`"):
            benchmarks.main(arguments)


def test_peers_on_tpus():
    from benchmarks import tpu_peers
    from benchmarks.cases import CASES

    tokamax, deltanet = tpu_peers.PEERS["tokamax"], tpu_peers.PEERS["deltanet-tpu"]
    assert [x.has(CASES["kimi-linear-48b"], backward=True) for x in (tokamax, deltanet)] == [False, True]
    assert not deltanet.has(CASES["gla"], backward=False)
    assert not deltanet.has(CASES["qwen3-next-80b-ragged"], backward=False)
    assert not deltanet.has(Layer("kda", H=1, HV=1, K=64), backward=False)
    with tpu_peers.on_a_tpu():
        assert jax.default_backend() == "tpu"
    assert jax.default_backend() == "cpu"


def test_calibrate(run, monkeypatch, capsys):
    """Points are scaled from the tokens that were compiled, and the fit finds the numbers that made the times."""
    from benchmarks import calibrate

    call, factor, step = 0.2, 1.5, 0.4
    monkeypatch.setattr(calibrate, "copied", lambda: [])
    monkeypatch.setattr("benchmarks.tpu_peers.is_installed", lambda name: name != "tokamax")
    monkeypatch.setattr("benchmarks.calibrate.metadata.version", lambda name: "1.0")
    some = [one for one in calibrate.PUBLISHED if one.peer == "deltanet-tpu"][:3]
    some += [dataclasses.replace(one, fitted=True) for one in calibrate.PUBLISHED if one.peer == "sglang-jax"]
    counts = [
        dict(bundles=1000 * (n + 1), grid_steps=7 * n * n + 1, around_cycles=100 * n, compile_s=1.0)
        for n in range(len(some))
    ]
    ms = []
    for one, row in zip(some, counts, strict=True):
        times = 1 if one.sequences else 2
        cycles = times * (row["bundles"] + row["around_cycles"])
        ms.append(call * one.blocking + factor * cycles / 1.75e6 + times * step * row["grid_steps"] / 1e3)
    some = [dataclasses.replace(one, ms=x) for one, x in zip(some, ms, strict=True)]
    tokamax = next(one for one in calibrate.PUBLISHED if one.peer == "tokamax")
    monkeypatch.setattr(calibrate, "PUBLISHED", [*some, tokamax])
    left = iter(counts)
    monkeypatch.setattr("benchmarks.tpu.first_result", lambda codes, timeout: next(left))
    code, rows = run("calibrate", "--tokens", "4096")
    assert code == 0
    assert [row["bundles"] for row in rows] == [2000, 4000, 6000, 4000, 5000, 6000]
    found = calibrate.fit(rows)
    assert found[:3] == pytest.approx((call, factor, step))
    assert found.ratios == pytest.approx(np.ones(6))
    printed = capsys.readouterr().out
    assert "time = 0.200 ms of a blocking call + 1.500 x" in printed
    assert "deltanet-tpu 1.0, predicted from the others: 1.00 to 1.00." in printed
    assert "tokamax is not installed." in printed


def test_the_formula_is_the_fit():
    """The numbers of the package are the fit to docs/data, rounded, and so are its errors; times are made of them."""
    from benchmarks import calibrate, pages, step
    from chunkwise.command import times
    from chunkwise.shared.chips import CHIPS

    inside, _ = pages.points()
    found = calibrate.fit(inside)
    rounded = (times.CALL_MS, times.FACTOR, times.STEP_US)
    assert rounded == tuple(round(x, 2) for x in found[:3])
    assert (
        round(found.spread, 3), tuple(round(float(x), 2) for x in (found.ratios.min(), found.ratios.max()))
    ) == (times.SPREAD, times.WORST)  # fmt: skip
    for name in ("tpu-layers", "tpu-kda"):
        for row in pages.rows_of(name):
            counts = (row[key] for key in ("bundles", "around_cycles", "grid_steps", "floor_ms"))
            assert row["estimate_ms"] == pytest.approx(times.device_ms(CHIPS[row["chip"]], *counts))
    for chip in CHIPS:
        for row in pages.rows_of(f"step-{chip}"):
            if row.get("cycles"):
                assert row["estimate_ms"] == pytest.approx(step.step_ms(row, chip))


@pytest.mark.tpu
@pytest.mark.skipif(not compiler.has_libtpu(), reason="needs libtpu")
def test_tpu_estimate():
    """A process of its own for the compiler; one head of a kernel that it profiles."""
    from benchmarks import tpu

    row = tpu.measure(Layer("gla", H=1, HV=1), "fused", "v6e", 1024, backward=False, profile=True, timeout=300)
    assert not row.get("failed")
    assert row["kernel_cycles"] > 0
    assert row["bundles"] > 0
    assert row["estimate_ms"] > row["floor_ms"] > 0
    assert 0 < row["matrix_use"] < 1


def test_first_call(run):
    """Every call is a process of its own; one that finds its program in the cache computes less."""
    code, rows = run("first-call", "--operator", "chunk_simple_gla", "--repeats", "1")
    assert code == 0
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    assert all(row["cold_cpu_s"] > row["cached_cpu_s"] > 0 for row in rows)
