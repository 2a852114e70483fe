"""The contract: documentation, argument checks and the choice of implementation."""

import functools
import numbers
import string
from dataclasses import replace

import jax
import jax.numpy as jnp

from chunkwise.norm_gated import config as tiles
from chunkwise.norm_gated import tile, vjp, xla
from chunkwise.shared import compat
from chunkwise.shared.call import checks, configs, unknown_arguments
from chunkwise.shared.kernels import derivatives
from chunkwise.shared.layer_part import LayerPart, PartOptions, Results
from chunkwise.shared.mesh import partition


@unknown_arguments.explained
def rms_norm_gated(
    x: jax.Array,
    z: jax.Array | None,
    weight: jax.Array,
    *,
    activation: str | None = "silu",
    norm_before_gate: bool = True,
    eps: float = 1e-6,
    implementation: str | None = None,
    sharding: checks.Sharding | None = None,
    config: tiles.Config | None = None,
    in_place: bool = False,
) -> jax.Array:
    """Return the RMSNorm of x over its last axis, times a gate.

        y = weight * x / sqrt(mean(x^2) + eps) * act(z)

    Shapes: x, z, y [B, T, H, D], with any dimensions before D; weight [D], or [H, D].

        y = rms_norm_gated(x, z, weight)

    act is the activation. If norm_before_gate is False, with u = x * act(z)::

        y = weight * u / sqrt(mean(u^2) + eps)

    Dims: D channels; [B, T, H, D] is how the operators of chunkwise return their output.

    Args:
      x: [..., D], float32, bfloat16 or float16; computed in float32. Under "xla" entries may be as large as 1e30; the
        kernel squares them as they are, so there the mean of x^2 must not overflow in float32.
      z: the gate before its activation, of the shape of x and any of these types. None for a norm without a gate, which
        reads neither activation nor norm_before_gate.
      weight: [D], or [H, D] with an entry for each channel of the last two dimensions of x; of any of these types.
      activation: "silu", "sigmoid" or None, with which z itself is the gate; static.
      norm_before_gate: whether x is normed before the gate multiplies it, or after; static. Qwen3-Next and Kimi-Linear
        do the first, Mamba-2 does the second.
      eps: added to the mean of the squares, a number, at least 0; static.
      implementation: "pallas" (one TPU kernel for each direction, interpreted elsewhere), "xla" (plain JAX), None (the
        best for the backend).
      sharding: how x is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. With explicit axes the type of x says how. All dimensions but the last may be split; every device
        computes its part, and only the gradient of weight is a sum over devices.
      config: tile sizes of the kernels, for which "xla" is a NotImplementedError; None for the best.
      in_place: whether the kernel may write y into the memory of x where it has no gradient; static. XLA copies an x
        that is read again.

    Returns:
      y [..., D] in the type of x. x, z and weight have gradients under both implementations, over a mesh in reverse
      mode only; the gradient of weight is summed in float32.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.

    Accuracy: 2e-7 relative to the definition in float64 for float32 inputs, 2e-3 for bfloat16 inputs, whose result is
    rounded to bfloat16; gradients 3e-7 and 3e-3.
    Cost: 8 R D flops for R rows of D channels; x and z are read and y is written once. The backward reads x, z and
    dy and writes dx and dz once. Without a gate nothing is read or written for it.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); the gate comes from Gated Delta Networks
      (2024) and Mamba-2 (2024).
    """
    return LayerPart(_layout(getattr(x, "ndim", 1), _by_group(x, weight)), _check, _run)(locals())[0]


def _by_group(x, weight) -> bool:
    """Return whether every group of channels of a row has a weight of its own."""
    return getattr(weight, "ndim", 1) == 2 and getattr(x, "ndim", 1) > 1


def _check(arrays: partition.Arrays, options: PartOptions) -> tuple[partition.Arrays, PartOptions]:
    """Check the arguments of `rms_norm_gated`."""
    x, z, eps = arrays["x"], arrays["z"], options.eps
    shape = checks.check_floating("x", x, "[..., D]")
    checks.check(len(shape) >= 1, f"`x` must have shape [..., D]; got {shape}.")
    checks.check(all(shape), f"`x` must not be empty; got {shape}.")
    if z is not None:
        checks.check_floating("z", z, "[..., D]")
        checks.check(tuple(z.shape) == shape, f"`z` must have the shape of `x` {shape}; got {tuple(z.shape)}.")
    dims = "H D" if _by_group(x, arrays["weight"]) else "D"
    checks.check_array("weight", arrays["weight"], dims, shape[-len(dims.split()) :])
    checks.check_activation(options.activation)
    checks.check_flags(norm_before_gate=options.norm_before_gate, in_place=options.in_place)
    number = isinstance(eps, numbers.Real) and not isinstance(eps, bool)
    checks.check(
        number and eps >= 0, f"`eps` must be a number, at least 0{checks.when_built(eps)}; got {checks.shown(eps)}."
    )
    implementation = configs.choose_stage(options.implementation, options.config, tiles)
    if (config := options.config) is not None:
        groups = _groups(x, arrays["weight"])
        fits = config.strip % 16 == config.rows % config.strip == groups % config.groups == 0
        rule = f"a strip of a multiple of 16 rows, rows of whole strips, and a divisor of {groups} groups"
        checks.check(fits, f"`config` must have {rule}; got {config}.")
    return arrays, replace(options, implementation=implementation)


def _groups(x, weight) -> int:
    """Return the groups of channels of a row: heads lie side by side, as projections produce them."""
    return x.shape[-2] if x.ndim > 3 or _by_group(x, weight) else 1


def _layout(ndim: int, by_group: bool) -> partition.Layout:
    """Return how x may be split: along all dimensions but the last one, over which the mean is taken.

    `by_group` says that the weight has the last two dimensions of x.
    """
    letters = string.digits[: ndim - 1]
    return partition.Layout(
        leading="x",
        meanings={letter: f"a dimension {letter}" for letter in letters},
        arguments={"x": letters, "z": letters, "weight": letters[-1:] if by_group else ""},
        results=(letters + ".",),
    )


@functools.partial(jax.jit, static_argnums=1)
def _run(arrays: partition.Arrays, options: PartOptions) -> Results:
    """Run the norm on one device."""
    x, z, weight = arrays["x"], arrays.get("z"), arrays["weight"]
    s = tile.NormStatic(x.shape[-1], options.activation, bool(options.norm_before_gate), float(options.eps))
    if options.implementation == "xla":
        return xla.norm(x, z, weight, s), None
    groups = _groups(x, weight)
    config = options.config or tiles.default_for(groups, s.D, max(y.dtype.itemsize for y in (x, z) if y is not None))
    lanes = weight.astype(jnp.float32)
    lanes = lanes.reshape(1, -1) if lanes.ndim == 2 else jnp.tile(lanes, groups)[None]  # [1, groups D]
    rows, gates = jax.tree.map(lambda y: y.reshape(-1, groups * s.D), (x, z))
    rows, gates, lanes = derivatives.of_kernel("rms_norm_gated", compat.vary_alike(rows, gates, lanes))
    return vjp.norm(rows, gates, lanes, s, config, bool(options.in_place)).reshape(x.shape), None
