"""The way of an operator over whole sequences from checked arrays to an implementation."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from chunkwise.shared.operators import arguments, checks, context, devices, segments

# From checked arguments and options to the output [B, T, HV, V] and the final states [N, HV, K, V] or None.
Implementation = Callable[[arguments.Arguments, arguments.Options], tuple[jax.Array, jax.Array | None]]


class Launches(NamedTuple):
    """What an implementation does where tokens are split over devices, see `context.Form`; options as they are there.

    Attributes:
      run: from arguments, options and what was kept.
      summary: from arguments and options.
      state_gradient: from arguments, options, what was kept, and the cotangents; None where JAX takes it from `run`.
      at_once: whether kernels make all gradients of `run` at once, so that for that of the initial states JAX would
        launch them, and those that make what they read, once more. It is then taken from all gradients of `run`.
    """

    run: Callable[[arguments.Arguments, arguments.Options, Any], tuple[jax.Array, Any]]
    summary: Callable[[arguments.Arguments, arguments.Options], context.Summary]
    state_gradient: Callable[[arguments.Arguments, arguments.Options, Any, jax.Array, jax.Array], jax.Array] | None = (
        None
    )
    at_once: bool = False


def prepare(
    x: arguments.Arguments, options: arguments.Options, implementation: str, raw_gates: bool = False
) -> tuple[arguments.Arguments, arguments.Options]:
    """Return the arguments and options that an implementation gets: with a scale, a chunk size, and final gates."""
    chunk_size = checks.choose_chunk_size(
        options.chunk_size, implementation, x.q.shape[1],
        per_channel=x.g is not None and x.g.ndim == 4, delta=x.beta is not None,
    )  # fmt: skip
    x, options = x._replace(scale=arguments.scale_of(x)), options._replace(chunk_size=chunk_size)
    return arguments.without_laws(x, options, raw_gates)


def run_chunked(
    x: arguments.Arguments,
    options: arguments.Options,
    implementation: str | None,
    known: Mapping[str, Implementation],
    on_tpu: str,
    raw_gates: Collection[str] = (),
    segmented: Collection[str] = (),
    over_tokens: Mapping[str, Launches] = MappingProxyType({}),
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
      over_tokens: what some of `known` have for tokens that are split over devices; the others run as they are.
    """
    arguments.check_shared(x, options)
    chosen = checks.choose_implementation(implementation, tuple(known), on_tpu)

    def prepared(x: arguments.Arguments, options: arguments.Options) -> tuple[arguments.Arguments, arguments.Options]:
        return prepare(x, options, chosen, chosen in raw_gates)

    def apart(run: Callable, over_segments: Callable, x: arguments.Arguments, options: arguments.Options) -> Any:
        """Run on prepared arguments, by `over_segments` if there are segments and the implementation knows of none."""
        x, options = prepared(x, options)
        if x.segment_ids is None or chosen in segmented:
            return run(x, options)
        # A gate that forgets everything keeps no promise.
        return over_segments(lambda y: run(y, options._replace(gate_lower_bound=None)), x)

    def run(
        x: arguments.Arguments, options: arguments.Options, _: arguments.Slots
    ) -> tuple[jax.Array, jax.Array | None]:
        return apart(known[chosen], segments.run_segments, x, options)

    def form(options: arguments.Options) -> context.Form:
        launches = over_tokens[chosen]

        def run(x: arguments.Arguments, kept: Any) -> tuple[jax.Array, Any]:
            return apart(lambda y, options: launches.run(y, options, kept), segments.run_segments, x, options)

        def summary(x: arguments.Arguments) -> context.Summary:
            return apart(launches.summary, segments.summarise_segments, x, options)

        if launches.state_gradient is None:
            return context.Form(run, summary, None if launches.at_once else context.state_gradient_of(run))
        own: Any = launches.state_gradient
        return context.Form(run, summary, lambda x, kept, do, dstates: own(*prepared(x, options), kept, do, dstates))

    return devices.over_devices(run, x, options, form=form if chosen in over_tokens else None)
