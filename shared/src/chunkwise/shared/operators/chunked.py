"""The way of an operator over whole sequences from checked arrays to an implementation."""

from collections.abc import Callable, Collection, Mapping

import jax

from chunkwise.shared.operators.arguments import Arguments, Options, Slots, check_shared, scale_of, without_laws
from chunkwise.shared.operators.checks import choose_chunk_size, choose_implementation
from chunkwise.shared.operators.devices import over_devices
from chunkwise.shared.operators.segments import run_segments

# From checked arguments and options to the output [B, T, HV, V] and the final states [N, HV, K, V] or None.
Implementation = Callable[[Arguments, Options], tuple[jax.Array, jax.Array | None]]


def run_chunked(
    x: Arguments,
    options: Options,
    implementation: str | None,
    known: Mapping[str, Implementation],
    on_tpu: str,
    raw_gates: Collection[str] = (),
    segmented: Collection[str] = (),
) -> tuple[jax.Array, jax.Array | None]:
    """Check what all operators share, fill in scale and chunk size, and run an implementation.

    Args:
      x: arguments whose arrays the caller has checked.
      options: as the user gave them.
      implementation: the name of one of `known`, or None for the best.
      known: implementations by name.
      on_tpu: what None means on a TPU; elsewhere it means "xla".
      raw_gates: those of `known` that take raw gates and their law; the others get decays.
      segmented: those that know segments; the others get gates that forget everything where a segment begins.
    """
    check_shared(x, options)
    chosen = choose_implementation(implementation, tuple(known), on_tpu)

    def run(x: Arguments, options: Options, _: Slots) -> tuple[jax.Array, jax.Array | None]:
        return _run(x, options, chosen, known[chosen], chosen in raw_gates, chosen in segmented)

    return over_devices(run, x, options)


def _run(
    x: Arguments, options: Options, chosen: str, implementation: Implementation, raw_gates: bool, segmented: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Run an implementation on the arguments of one device."""
    chunk_size = choose_chunk_size(
        options.chunk_size, chosen, x.q.shape[1],
        per_channel=x.g is not None and x.g.ndim == 4, delta=x.beta is not None,
    )  # fmt: skip
    x, options = x._replace(scale=scale_of(x)), options._replace(chunk_size=chunk_size)
    x, options = without_laws(x, options, raw_gates)
    if x.segment_ids is None or segmented:
        return implementation(x, options)
    # A gate that forgets everything keeps no promise.
    return run_segments(lambda y: implementation(y, options._replace(gate_lower_bound=None)), x)
