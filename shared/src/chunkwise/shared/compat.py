"""The JAX names that differ between the supported releases, and how arrays vary over a mesh and its axes."""

import contextlib
import io
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

CompilerParams = pltpu.CompilerParams
PrefetchScalarGridSpec = pltpu.PrefetchScalarGridSpec


def axis_type(mesh, name: str) -> jax.sharding.AxisType:
    """Return whether an axis of a mesh is automatic, explicit or manual."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[name]


def varying_axes(*operands: object) -> frozenset[str]:
    """Return the mesh axes over which any array varies; it has some only under a checking `shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)))


def vary_over(axes: Collection[str], x: object) -> Any:
    """Return a tree of arrays that vary over these mesh axes too."""

    def widen(y):
        missing = tuple(set(axes) - varying_axes(y))
        return lax.pcast(y, missing, to="varying") if missing else y

    return jax.tree.map(widen, x)


def varying_zeros(shape: Sequence[int], *operands: jax.Array | None) -> jax.Array:
    """Return float32 zeros that vary over the mesh axes of `operands`: the first carry of a scan under `shard_map`."""
    return vary_over(varying_axes(*operands), jnp.zeros(shape, jnp.float32))


def vary_alike(*operands: jax.Array | None) -> tuple[Any, ...]:
    """Return the operands, each varying over the mesh axes of all of them.

    A custom_vjp under `shard_map` needs this: the gradients that its kernel returns vary over all axes, and for an
    operand that was replicated before, JAX then sums the gradient over the devices.
    """
    return vary_over(varying_axes(*operands), operands)


def out_struct(shape: Sequence[int], dtype, *operands: jax.Array | None) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel output that varies over the mesh axes of all `operands`.

    Under `shard_map` an output must say over which mesh axes it varies; elsewhere there are no such axes.
    """
    kinds = [jax.typeof(x).manual_axis_type for x in operands if x is not None]
    kind = type(kinds[0])(varying=frozenset().union(*(kind.varying for kind in kinds))) if kinds else None
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=kind)


def cores() -> int:
    """Return how many cores of the device share the grid of a launch: 1 where it is no TPU."""
    return _of_tpu("num_cores", 1)


def matrix_columns() -> int:
    """Return how many columns a matrix unit of the device has: those of a v6e where it is no TPU."""
    return _of_tpu("mxu_column_size", 256)


def _of_tpu(name: str, otherwise: int) -> int:
    """Return what is known of the device by this name, if it is a TPU."""
    try:
        return getattr(pltpu.get_tpu_info(), name)
    except (ValueError, NotImplementedError):
        return otherwise


# Whether a forward rule of a custom_vjp with `optimize_remat` may have side effects, as a simulated kernel has.
EFFECTS_UNDER_OPTIMIZE_REMAT = jax.__version_info__ >= (0, 12)


@contextlib.contextmanager
def races_raised() -> Iterator[None]:
    """Raise a RuntimeError at the end if the simulated TPU printed that it saw a race; jax 0.12 raises one itself."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
            # The kernels run on other threads, and print there.
            jax.effects_barrier()
    finally:
        print(printed.getvalue(), end="")
    if "RACE DETECTED" in printed.getvalue():
        raise RuntimeError(printed.getvalue())
