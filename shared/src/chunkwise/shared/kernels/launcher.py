"""Launching Pallas kernels: operands and results by name, and compiled or interpreted by platform."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core

from chunkwise.shared import compat, tuning
from chunkwise.shared.kernels import derivatives, interleaved, matmul
from chunkwise.shared.kernels.spans import joins


def without_float16(x) -> Any:
    """Return an array, or its type, in float32 if it is in float16, which TPU kernels can neither read nor write."""
    if x is None or x.dtype != jnp.float16:
        return x
    return x.update(dtype=jnp.float32) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(jnp.float32)


def _int32_indices(spec: pl.BlockSpec) -> pl.BlockSpec:
    """Return a spec whose index map gives int32: under jax_enable_x64 a Python number would be an int64."""
    index_map: Any = spec.index_map
    if index_map is None:
        return spec

    def typed(*ids):
        return tuple(jnp.int32(i) if isinstance(i, int) else i for i in index_map(*ids))

    return dataclasses.replace(spec, index_map=typed)


def _refusal(name: str) -> str:
    return (
        f'the kernel {name} has no derivative: "fused", "staged" and "pallas" can be differentiated once, in reverse, '
        f'and the serving steps of operators not at all; use implementation="xla", which takes every transformation.'
    )


def _without_derivative(call: Callable, name: str) -> Callable:
    """Return a kernel call whose derivative raises an error, which names the functions that have a derivative."""

    def refuse(primals, tangents):
        raise NotImplementedError(_refusal(name))

    guarded = jax.custom_jvp(call)
    guarded.defjvp(refuse)
    return guarded


def with_gradient_of(plain: Callable, call: Callable, name: str) -> Callable:
    """Return `call`, the kernel of this name, with the gradient of a function in plain JAX of the same arguments."""
    fn = jax.custom_vjp(call)
    fn.defvjp(lambda *args: (call(*args), args), lambda args, cotangents: jax.vjp(plain, *args)[1](cotangents))
    return lambda *args: fn(*derivatives.in_reverse(args, _refusal(name)))


def _interpreted(compiled: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a launch with `interpret` set; a test on the simulated TPU has set it to something else already."""
    eqns = [x.replace(params=x.params | {"interpret": x.params["interpret"] or True}) for x in compiled.eqns]
    return compiled.replace(jaxpr=compiled.jaxpr.replace(eqns=eqns))


def _check_room(name: str, tables: Sequence, scratch_shapes: Sequence) -> None:
    """Raise NotImplementedError if the tables and the scratch of a kernel do not fit into scalar memory."""
    held = [*tables, *(x for x in scratch_shapes if getattr(x, "memory_space", None) is pltpu.SMEM)]
    size = sum(tuning.smem_bytes(*x.shape) for x in held)
    if size > tuning.SMEM_LIMIT_BYTES:
        raise NotImplementedError(
            f"the kernel {name} takes {size} bytes of scalar memory for its tables, and it may take "
            f"{tuning.SMEM_LIMIT_BYTES}: use fewer tokens, sequences or slots in a call, or "
            f'implementation="xla".'
        )


def pallas_call(
    kernel: Callable,
    *operands: jax.Array | None,
    name: str,
    grid: tuple[int | jax.Array, ...],
    dimension_semantics: tuple[Literal["parallel", "arbitrary"], ...],
    in_specs: Sequence[pl.BlockSpec | None],
    out_specs,
    out_shape,
    cost_estimate: pl.CostEstimate,
    scratch_shapes: Sequence = (),
    num_scalar_prefetch: int = 0,
    input_output_aliases: dict[int, int] | None = None,
    in_bounds: bool = False,
):
    """Run a Pallas TPU kernel: compiled where the program is lowered for a TPU, interpreted everywhere else.

    The choice is made when the program is lowered, not when it is traced, so ahead-of-time compilation and
    `jax.export` for a TPU from another host get the real kernel. The kernel is traced once for both, unless its body
    asks `matmul.is_interpreted`. An operand may be None: then its spec is None too, and the kernel receives None in the
    place of a Ref. The kernel sees float16 as float32.

    Args:
      kernel: the body, called with scalar-prefetch Refs, input Refs, output Refs and scratch Refs in this order.
      *operands: scalar-prefetch arrays first, then inputs.
      name: name of the kernel in profiles and in the lowered text.
      grid, in_specs, out_specs, out_shape, scratch_shapes: as in `jax.experimental.pallas.pallas_call`; a traced scalar
        is a size of the grid that only the run tells. An input stays in HBM where its spec says so. Where a spec says
        ANY, XLA may copy an array that fits into fast memory there and back.
      dimension_semantics: "parallel" or "arbitrary" (sequential) for every axis of the grid.
      cost_estimate: the cost of the launch, for XLA's scheduler.
      num_scalar_prefetch: how many leading operands are scalar tables read by the index maps.
      input_output_aliases: operand index to output index, for states updated in place.
      in_bounds: a promise that no index leaves its array, whatever the caller's arrays hold. Then a TPU does not check
        the addresses of copies, which takes some 13 instruction bundles each. Otherwise it checks, and halts at a wrong
        one.

    Returns:
      The outputs, in the structure of `out_shape`.
    """
    _check_room(name, operands[:num_scalar_prefetch], scratch_shapes)
    call = functools.partial(
        pl.pallas_call,
        name=name,
        grid_spec=compat.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalar_prefetch,
            grid=grid,
            in_specs=jax.tree.map(_int32_indices, list(in_specs)),
            out_specs=jax.tree.map(_int32_indices, out_specs),
            scratch_shapes=list(scratch_shapes),
        ),
        out_shape=jax.tree.map(without_float16, out_shape),
        compiler_params=compat.CompilerParams(
            dimension_semantics=dimension_semantics,
            vmem_limit_bytes=tuning.VMEM_LIMIT_BYTES,
            disable_bounds_checks=in_bounds,
        ),
        cost_estimate=cost_estimate,
        input_output_aliases=input_output_aliases or {},
    )
    values: tuple[Any, ...] = tuple(map(without_float16, operands))
    # Each trace gets a new function, because JAX would not trace the same function twice.
    with matmul.kernel_trace(interpreted=False) as asked:
        compiled = jax.make_jaxpr(call(lambda *refs: kernel(*refs)))(*values)
    if asked:
        with matmul.kernel_trace(interpreted=True):
            interpreted = jax.make_jaxpr(call(lambda *refs: kernel(*refs), interpret=True))(*values)
    else:
        interpreted = _interpreted(compiled)
    # A spec says it to Pallas alone; XLA must be told of the array.
    in_hbm = [False] * num_scalar_prefetch + [spec.memory_space is pltpu.HBM for spec in in_specs if spec is not None]

    def on_tpu(*given):
        hold = functools.partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM)
        return core.jaxpr_as_fun(compiled)(*(hold(x) if held else x for x, held in zip(given, in_hbm, strict=True)))

    def elsewhere(*given):
        # As a compiled kernel, an interpreted one gets arrays of which XLA knows nothing, such as cotangents of ones or
        # the states before a first chunk; `chunk_loop.empty_state` says why.
        results = core.jaxpr_as_fun(interpreted)(*lax.optimization_barrier(given))
        return lax.optimization_barrier(results)

    by_platform = functools.partial(lax.platform_dependent, tpu=on_tpu, default=elsewhere)
    results = _without_derivative(by_platform, name)(*jax.tree.leaves(values))
    shapes, structure = jax.tree.flatten(out_shape)
    return structure.unflatten(x.astype(want.dtype) for x, want in zip(results, shapes, strict=True))


def split_scale(scale) -> tuple[float, jax.Array | None]:
    """Return a scale as a number for the kernel and a scalar array, or None, by which `scaled` multiplies after it.

    An array is not for the kernel, which can neither capture a traced scalar nor give it a gradient.
    """
    return (1.0, scale.astype(jnp.float32)) if isinstance(scale, jax.Array) else (float(scale), None)


def scaled(o: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Return the output of a kernel times the scalar array of `split_scale`; o itself for None."""
    return o if scale is None else (o.astype(jnp.float32) * scale).astype(o.dtype)


def launch(
    body: Callable,
    refs: Callable[..., Any],
    *,
    name: str,
    grid: tuple[int | jax.Array, ...],
    inputs: Mapping[str, tuple[jax.Array | None, pl.BlockSpec | None]],
    outputs: Mapping[str, tuple[pl.BlockSpec, Sequence[int], Any]],
    cost_estimate: pl.CostEstimate,
    tables: Mapping[str, jax.Array | None] = MappingProxyType({}),
    scratch: Mapping[str, Any] = MappingProxyType({}),
    requested: Collection[str] | None = None,
    in_place: Mapping[str, str] = MappingProxyType({}),
    like: Mapping[str, Any] = MappingProxyType({}),
    dimension_semantics: tuple[Literal["parallel", "arbitrary"], ...] = ("parallel", "parallel", "arbitrary"),
    in_bounds: bool = True,
) -> dict[str, jax.Array]:
    """Run a kernel whose Refs are the fields of a NamedTuple, and return its outputs by name.

    A field is None where the launch has no such Ref. An output with the name of an input is the field `<name>_out`.
    Of an `Interleaved`, the Ref has all tokens.

    Args:
      body: called with the Refs.
      refs: the NamedTuple of the Refs: a field for every table, input, output and buffer; or a function of the Refs by
        their names.
      name, grid, cost_estimate, dimension_semantics, in_bounds: as in `pallas_call`. By default the last axis of the
        grid is sequential: rows of the batch and blocks of heads are independent, and grid steps pass a state on; and
        every index is promised to be in bounds, because tables hold only what exists.
      inputs: by name, an array or None, and how it is cut.
      outputs: by name, how an output is cut, its shape and its type.
      tables: by name, an array in scalar memory, which index maps read, or None.
      scratch: by name, a buffer: the shape of a float32 buffer, or an object that `pallas_call` takes.
      requested: the outputs to compute; None for all.
      in_place: from the name of an input to the output that takes its memory.
      like: by name of an output, the array whose tokens it has, where only some tokens have results.
    """
    tables = {key: x for key, x in tables.items() if x is not None}
    present, joined = joins.split_interleaved({key: y for key, y in inputs.items() if y[0] is not None})
    written, parted = joins.split_interleaved(_written(outputs, requested, like))
    fields = *tables, *present, *(f"{key}_out" if key in inputs else key for key in written), *scratch, *joined, *parted
    missing = dict.fromkeys(getattr(refs, "_fields", ()))
    read, operands = [*tables, *present], (*tables.values(), *(x for x, _ in present.values()))

    def run(*values) -> None:
        named: dict[str, Any] = missing | dict(zip(fields, values, strict=True))
        loads = [joins.refs_of(named, key, inputs[key][0]) for key in inputs if key in joined]
        stores = [joins.refs_of(named, key, like[key]) for key in outputs if key in parted]
        for load in loads:
            joins.join(*load)
        body(refs(**named))
        for store in stores:
            joins.separate(*store)

    results = pallas_call(
        run,
        *operands,
        name=name,
        grid=grid,
        dimension_semantics=dimension_semantics,
        in_specs=[spec for _, spec in present.values()],
        out_specs=[spec for _, spec in written.values()],
        out_shape=[compat.out_struct(x.shape, x.dtype, *operands) for x, _ in written.values()],
        scratch_shapes=[
            pltpu.VMEM(x, jnp.float32) if isinstance(x, tuple) else x
            for x in (*scratch.values(), *joined.values(), *parted.values())
        ],
        num_scalar_prefetch=len(tables),
        input_output_aliases={read.index(x): [*written].index(y) for x, y in in_place.items()},
        cost_estimate=cost_estimate,
        in_bounds=in_bounds,
    )
    named: dict[str, Any] = dict(zip(written, results, strict=True))
    for key in parted:
        if key in outputs:
            named[key] = interleaved.Interleaved(*joins.take_arrays(named, key, len(like[key].arrays)))
    return named | {key: like[key].of(named[key]) for key in written if isinstance(like.get(key), interleaved.InLanes)}


def _written(outputs: Mapping[str, tuple], requested: Collection[str] | None, like: Mapping[str, Any]) -> dict:
    """Return the types of the requested outputs of `launch` by name, each with its spec."""
    written = {}
    for key, (spec, shape, dtype) in outputs.items():
        if requested is None or key in requested:
            x = jax.ShapeDtypeStruct(tuple(shape), dtype)
            model = like.get(key)
            if isinstance(model, interleaved.Interleaved):
                x = model.like(x.update(shape=(shape[0], shape[1] // len(model.arrays), *shape[2:])))
            written[key] = x, spec
    return written
