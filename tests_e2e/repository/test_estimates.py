"""What estimates read out of the text of a compiler, bundles, cycles and bytes, and the formula of their times."""

import json
import subprocess
from unittest import mock

import jax
import numpy as np
import pytest

from benchmarks import calibrate, stale, step, tpu, tpu_peers
from benchmarks.cases import CASES
from benchmarks.figures import evidence, serving, tables
from benchmarks.regions import Loop, Region, kernel_bundles, read_loop
from benchmarks.scale import MIB, _sent
from benchmarks.step import Mixture, branch_cycles, prefill_runs
from benchmarks.tpu import counts, launch_bytes, operations
from benchmarks.turns import turns, turns_of
from chunkwise.command import times
from chunkwise.command.models import Layer
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu as compiler
from tests.compiled import traffic


def test_cycles_of_operations():
    cycles = lambda n: f'backend_config={{"estimated_cycles":"{n}"}}'
    inside = f"%fused (x: f32[]) -> f32[] {{\n  ROOT %m = f32[] multiply(%x, %x), {cycles(5)}\n}}\n"
    main = f"%a = f32[] fusion(%x), {cycles(100)}\n  ROOT %b = f32[] add(%a, %a), {cycles(20)}"
    entry = f"\nENTRY %main () -> f32[] {{\n  {main}\n}}"
    assert operations(inside + entry).total() == 120
    # A loop whose turns are known, and one whose turns are not.
    loop = "while(%a), condition=%c, body=%fused"
    three = f'{loop}, "known_trip_count":{{"n":"3"}}'
    assert operations(inside + entry.replace("add(%a, %a)", three)).total() == 120 + 3 * 5
    assert operations(inside + entry.replace("add(%a, %a)", loop)).total() == 120 + 5
    branches = "conditional(%p, %a), branch_computations={%fused, %other}"
    other = inside.replace("fused", "other").replace('"5"', '"7"')
    assert operations(inside + other + entry.replace("add(%a, %a)", branches)).total() == 120 + 7


def test_kinds_of_operations():
    """A fusion with a product is a product, and one that only moves numbers a copy."""
    cycles = lambda n: f', backend_config={{"estimated_cycles":"{n}"}}'
    fusion = lambda name, *lines: f"%{name} (a: f32[2]) -> f32[2] {{\n" + "\n".join(lines) + "\n}\n"
    text = fusion("moves", "  ROOT %p = f32[2]{0:T(8)} pad(%a, %b)")
    text += fusion("multiplies", "  %c = f32[2]{0} convolution(%a, %a)", "  ROOT %d = f32[2]{0} add(%c, %a)")
    text += fusion("adds", "  ROOT %e = f32[2]{0} add(%a, %a)")
    lines = [f"  %f{n} = f32[2]{{0}} fusion(%a), calls=%{x}{cycles(n)}" for n, x in ((1, "moves"), (20, "multiplies"))]
    lines += [f"  %g = f32[2]{{0}} fusion(%a), calls=%adds{cycles(300)}", f"  %h = f32[2]{{0}} copy(%a){cycles(4000)}"]
    text += "ENTRY " + fusion("main", *lines)
    assert operations(text) == {"copies": 4001, "products": 20, "others": 300}


@pytest.mark.parametrize(
    ("inner", "test", "expected"),
    [
        ("", "", (3 * 4, 4)),
        # The branch of the loop over the grid may carry no depth.
        ("", "0x3   :  { %e }", (4 * 4, 4)),
        (">", "", None),
        (">", "0x3   : >> { %q = scmp.ge.s32.totalorder %s, 5 /* loop exit test */ }", (4 * (2 + 2 * 5), 4)),
    ],
    ids=["one loop", "a branch without depth", "a loop in it", "a loop of 5 turns in it"],
)
def test_bundles_of_the_loop_over_the_grid(inner, test, expected, tmp_path):
    lines = ["0   :  { %a }", "0x1 LB: > { %b }", f"0x2   : >{inner} {{ %c }}", *filter(None, [test])]
    lines += ["0x4   : > { %p = scmp.ge.s32.totalorder %s, 6 /* loop exit test */ }", "0x5   :  { %d }"]
    for name in ("kernel.1", "copy.2"):  # the copy is not a kernel
        (tmp_path / f"7-{name}-03-final_bundles.txt").write_text("\n".join(lines))
    for kernels in ({"kernel.1"}, {"kernel.1", "kernel.2"}):
        assert counts(str(tmp_path), kernels) == ({"kernel.1": expected} if expected else {})


def test_bytes_of_launches():
    """Operands and results count by their types; an array in the fast memory, and what no launch reads, do not."""
    kernel = 'custom_call_target="tpu_custom_call"'
    lines = [
        "ENTRY %main {",
        "  %a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)",
        "  %b = f32[16]{0:T(256)S(1)} copy(%c), metadata={}",
        "  %other = f32[1024]{0} parameter(2)",
        f"  %k.1 = (f8e4m3fn[10]{{0}}, /*index=1*/pred[3]{{0}}) custom-call(%a, /*index=1*/%b), {kernel}",
        "  %x = f8e4m3fn[10]{0} get-tuple-element(%k.1), index=0",
        f'  ROOT %k.2 = s32[5]{{0}} custom-call(%x), {kernel}, metadata={{op_name="f(%other)"}}',
    ]
    assert launch_bytes("\n".join(lines)) == {"k.1": 4 * 8 * 2 + 10 + 3, "k.2": 10 + 5 * 4}


def test_regions_that_a_layer_runs():
    """The second path of a gate for every channel is not taken; a branch around a loop runs as often as the grid."""
    regions = lambda *bundles: Loop(10, 0, 5, [Region(0, 9, n) for n in bundles])
    of = lambda name: turns_of(Layer(name, H=4, HV=4, T=256))
    kda, delta, gla = map(of, ("kda", "gated_delta_rule", "simple_gla"))
    # A loop has two turns more than steps.
    assert kda("chunk_kda_fwd_c64.1", regions(3000)) == (8, [0])
    assert kda("chunk_kda_summary_c64.2", regions(3000)) == (8, [0])
    assert kda("chunk_kda_fwd_c64.1", regions()) is None
    assert kda("chunk_kda_bwd_c64.1", regions()) is None
    nested = Loop(10, 0, 5, [Region(0, 3, 30), Region(4, 9, 3000), Region(5, 6, 700)])
    assert kda("chunk_kda_bwd_c64.1", nested) == (8, [8, 0, 0])
    # A forward loads its states once, and a map stores them once, too.
    assert delta("chunk_gated_delta_rule_fwd_c64.1", regions()) is None
    assert delta("chunk_gated_delta_rule_fwd_c64.1", regions(30)) == (8, [1])
    assert delta("chunk_gated_delta_rule_summary_c64.1", regions(30, 40)) == (8, [1, 1])
    assert delta("chunk_gated_delta_rule_bwd_c64.1", regions(30)) is None
    steps, runs = gla("chunk_gla_fwd_c64.1", regions(100, 200))
    # Nor is a small region that holds no other one such a branch.
    branch = Loop(10, 0, 5, [Region(0, 2, 3), Region(3, 9, 3), Region(4, 9, 200)])
    assert gla("chunk_gla_fwd_c64.1", branch) == (steps, [runs[0], steps, runs[1]])
    assert of("gla")("chunk_gla_fwd_c64.1", regions(100, 200, 300)) == (steps, [*runs, 0])


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
    branch = lambda n: [f"   0x1   : > {{ sbr.rel (!%p1) target = $region{n} }}", *["   0x1   : > { %a }"] * 4]
    end = lambda n: [f"   0x1   : > {{ %b }} /* Start/End empty region {n} */"]
    copy = [*branch(1), *branch(2), *end(2), *branch(3), *end(3), *end(1)]
    body = [*branch(4), *["   0x1   : > { %c }"] * 40, *end(4)]
    exit_test = ["   0x1   : > { %q = scmp.ge.s32.totalorder %s, 7 /* loop exit test */ }", "   0x1   :  { %s }"]
    loop = read_loop("\n".join(["   0   :  { %a }", *copy, *body, *exit_test]))
    assert (loop.body, loop.regions) == (40, [])
    assert loop.always == len(copy) + len(body) + 1 - 40


def test_turns_of_a_kernel_of_several_chunks():
    """A step takes all 4 chunks of 210 tokens. The backward first goes over all of them but the last one."""
    of = lambda name, kind: turns(Layer(name, H=16, HV=32, T=210), kind, 64)
    assert of("simple_gla", "fwd") == of("simple_gla", "states") == (1, [1, 4])
    assert of("simple_gla", "bwd") == (1, [1, 3, 4])


def test_steps_that_run_the_regions_of_the_kernels():
    """Beside two decodes of 3 tokens: prefills of 70 and 64 tokens, which are 4 pieces of 3 chunks."""
    mixture = Mixture(2, W=3, prefills=(70, 64))
    # Rows 6 to 63, 64 to 75, 76 to 127 and 128 to 139, and one more turn. The first two turns open the first chunk, and
    # begin the first sequence. No chunk is wholly of one piece, and decodes have no turns.
    # A gate for every channel has a second path, which is not taken.
    for name, second in (("qwen3-next-80b", []), ("kimi-linear-48b", [0] * 9)):
        assert prefill_runs(CASES[name], mixture, 64) == (5, [3, 1, 0, *second, 5, 3, 5, *second, 2])
    # A step of simple GLA takes all 3 chunks: 2 and 2 of the two sequences.
    assert prefill_runs(CASES["minimax-text-01"], mixture, 64)[1] == [2, 1, 1, 2, 4, 0, 4, 2]


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
    cycles = {"fusion.1": 1, "broadcast.1": 2, "copy.1": 4, "fused_x.2": 8, "fusion.2": 16, "recurrent_x.1": 32}
    assert branch_cycles(PROGRAM, cycles, wanted) == expected


GATHERED = "f32[4,32]{1,0:T(8,128)S(1)}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%a.1 = {GATHERED} all-gather(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}", ("all-gather", 384)),
        ("%a = f32[8]{0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}", ("all-gather", 16)),
        ("%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4]", ("all-gather", 24)),
        ("ROOT %r = bf16[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", ("all-reduce", 16)),
        ("%r = (f32[8]{0}, f32[4]{0}) all-reduce-start(%x, %y), replica_groups={}", ("all-reduce", 72)),
        ("%s = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}", ("reduce-scatter", 24)),
        ("%p = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}", ("collective-permute", 32)),
        ("%p = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%x)", ("collective-permute", 32)),
        ("%d = f32[8]{0} all-gather-done(%a)", None),
        ("%f = f32[8]{0} fusion(%all-gather.1), kind=kLoop", None),
    ],
)
def test_bytes_of_collectives(line, expected):
    assert traffic(f"ENTRY %main () -> f32[] {{\n  {line}\n}}", 4) == ([expected] if expected else [])


def test_what_a_device_sends():
    lines = [f"%a.{n} = {GATHERED} all-gather(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}" for n in (1, 2)]
    lines += ["%p = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}"]
    text = "\n  ".join(["ENTRY %main () -> f32[] {", *lines])
    assert _sent(f"{text}\n}}", 4) == {"collectives": "2 all-gather, 1 collective-permute", "sent_mib": 800 / MIB}


def test_the_result_of_a_process(monkeypatch):
    """If it takes too long or raises, the row says so."""

    def result(**end):
        monkeypatch.setattr(subprocess, "run", mock.Mock(**end))
        return tpu.result("import a; a.b()", 5)

    ended = lambda *end: dict(return_value=subprocess.CompletedProcess((), *end))
    monkeypatch.setattr(compiler, "has_libtpu", lambda: True)
    assert result(**ended(0, "text\n[1, 2]\n", "")) == [1, 2]
    assert result(side_effect=subprocess.TimeoutExpired("python", 5)) == {"failed": "no result within 5 s"}
    assert result(**ended(1, "", "Traceback\nValueError: no memory\n")) == {"failed": "no memory"}
    assert result(**ended(-9, "", "")) == {"failed": "the compiler ended with -9"}


def test_peers_on_tpus():
    both = "tokamax", "deltanet-tpu"
    assert [tpu.can_run(CASES["kimi-linear-48b"], x, backward=True) for x in both] == [False, True]
    for case in (CASES["gla"], CASES["qwen3-next-80b-ragged"], Layer("kda", H=1, HV=1, K=64)):
        assert not tpu.can_run(case, "deltanet-tpu", backward=False)
        assert tpu.can_run(case, "fused", backward=True)
    with tpu_peers.on_a_tpu():
        assert jax.default_backend() == "tpu"
    assert jax.default_backend() == "cpu"


def test_a_fit_finds_the_numbers_that_made_the_times():
    call, factor, step = 0.2, 1.5, 0.4
    rows = [dict(bundles=900 * n, around_cycles=100 * n, chip="v6e", blocking=n > 4) for n in range(1, 7)]
    for n, row in enumerate(rows):
        row["grid_steps"] = 7 * n * n + 1
        row["published_ms"] = call * (n > 3) + factor * 1000 * (n + 1) / 1.75e6 + step * row["grid_steps"] / 1e3
    found = calibrate.fit(rows)
    assert found[:3] == pytest.approx((call, factor, step))
    assert found.ratios == pytest.approx(np.ones(6))


def test_the_formula_is_the_fit():
    """The numbers of the package are the fit to docs/data, rounded, and so are its errors; times are made of them."""
    inside, _ = evidence.points()
    found = calibrate.fit(inside)
    rounded = (times.CALL_MS, times.FACTOR, times.STEP_US)
    assert rounded == tuple(round(x, 2) for x in found[:3])
    assert round(found.spread, 3) == times.SPREAD
    assert tuple(round(float(x), 2) for x in (found.ratios.min(), found.ratios.max())) == times.WORST
    for name in ("tpu-layers", "tpu-kda"):
        for row in tables.rows_of(name):
            # A program with one launch moves its own bytes alone.
            launches = row.get("launches") or {"": (row["bundles"], row["grid_steps"])}
            launches = [times.Launch(*x) for x in launches.values()]
            counts = (launches, row["around_cycles"], row["floor_ms"])
            assert row["estimate_ms"] == pytest.approx(times.device_ms(CHIPS[row["chip"]], *counts))
    for chip in CHIPS:
        for row in serving.step_rows(chip):
            if row.get("cycles"):
                assert row["estimate_ms"] == pytest.approx(step.step_ms(row, chip))


@pytest.mark.tpu
@pytest.mark.skipif(not compiler.has_libtpu(), reason="needs libtpu")
def test_tpu_estimate():
    """A process of its own for the compiler; one head of a kernel."""
    row = tpu.measure(Layer("gla", H=1, HV=1), "fused", "v6e", 1024, backward=False, timeout=300)
    assert not row.get("failed")
    assert row["bundles"] > 0
    assert row["estimate_ms"] > row["floor_ms"] > 0


def test_rows_of_other_programs(benchmarks, tmp_path, monkeypatch):
    """They are rows of an estimate, of this version of JAX and not of a peer; the command returns 1 for them."""

    monkeypatch.setattr(stale, "trace", lambda command, row: command)
    monkeypatch.setattr(tpu, "digest", lambda program: program)
    file = tmp_path / "rows.json"

    def found(command, version=jax.__version__, **row):
        rows = [{"case": "a", "traced": "earlier"} | row]
        file.write_text(json.dumps({"command": command, "jax": version, "rows": rows}))
        return stale.measure(file)

    all_the_same = {"rows": 1, "without_digest": 0}
    for command in ("tpu", "scale", "step"):
        assert found(command, traced=command) == [all_the_same]
        assert found(command) == [{"case": "a", "current": False}, all_the_same]
        assert benchmarks.main(["stale", str(file)]) == 1
    assert found("tpu", version="0.1") == [{"rows": 1, "without_digest": 1}]
    assert found("tpu", implementation="tokamax") == [{"rows": 0, "without_digest": 0}]
    assert found("time") == []


@pytest.mark.tpu
def test_a_step_over_rings_has_a_kernel_in_the_place_of_its_prefills():
    traced = step.trace_step(CASES["qwen3-next-80b-tp8"], Mixture(2, pool="bfloat16", replay=16), "v6e")
    assert "nothing_c0" in str(traced.jaxpr)
