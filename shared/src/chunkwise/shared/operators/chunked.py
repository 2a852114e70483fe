"""The way of an operator over whole sequences from checked arrays to an implementation."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from chunkwise.shared.operators.arguments import Arguments, Options, Slots, check_shared, scale_of, without_laws
from chunkwise.shared.operators.checks import choose_chunk_size, choose_implementation
from chunkwise.shared.operators.context import Form, Summary, state_gradient_of
from chunkwise.shared.operators.devices import over_devices
from chunkwise.shared.operators.segments import run_segments, summarise_segments

# From checked arguments and options to the output [B, T, HV, V] and the final states [N, HV, K, V] or None.
Implementation = Callable[[Arguments, Options], tuple[jax.Array, jax.Array | None]]


class Launches(NamedTuple):
    """What an implementation does where tokens are split over devices, see `context.Form`; options as they are there.

    Attributes:
      run: from arguments, options and what was kept.
      summary: from arguments and options.
      state_gradient: from arguments, options, what was kept, and the cotangents; None where JAX takes it from `run`.
      at_once: whether kernels make all gradients of `run` at once, so that for that of the initial states JAX would
        launch them, and those that make what they read, once more. It is then taken from all gradients of `run`.
    """

    run: Callable[[Arguments, Options, Any], tuple[jax.Array, Any]]
    summary: Callable[[Arguments, Options], Summary]
    state_gradient: Callable[[Arguments, Options, Any, jax.Array, jax.Array], jax.Array] | None = None
    at_once: bool = False


def prepare(x: Arguments, options: Options, implementation: str, raw_gates: bool = False) -> tuple[Arguments, Options]:
    """Return the arguments and options that an implementation gets: with a scale, a chunk size, and final gates."""
    chunk_size = choose_chunk_size(
        options.chunk_size, implementation, x.q.shape[1],
        per_channel=x.g is not None and x.g.ndim == 4, delta=x.beta is not None,
    )  # fmt: skip
    x, options = x._replace(scale=scale_of(x)), options._replace(chunk_size=chunk_size)
    return without_laws(x, options, raw_gates)


def run_chunked(
    x: Arguments,
    options: Options,
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
    check_shared(x, options)
    chosen = choose_implementation(implementation, tuple(known), on_tpu)

    def prepared(x: Arguments, options: Options) -> tuple[Arguments, Options]:
        return prepare(x, options, chosen, chosen in raw_gates)

    def apart(run: Callable, over_segments: Callable, x: Arguments, options: Options) -> Any:
        """Run on prepared arguments, by `over_segments` if there are segments and the implementation knows of none."""
        x, options = prepared(x, options)
        if x.segment_ids is None or chosen in segmented:
            return run(x, options)
        # A gate that forgets everything keeps no promise.
        return over_segments(lambda y: run(y, options._replace(gate_lower_bound=None)), x)

    def run(x: Arguments, options: Options, _: Slots) -> tuple[jax.Array, jax.Array | None]:
        return apart(known[chosen], run_segments, x, options)

    def form(options: Options) -> Form:
        launches = over_tokens[chosen]

        def run(x: Arguments, kept: Any) -> tuple[jax.Array, Any]:
            return apart(lambda y, options: launches.run(y, options, kept), run_segments, x, options)

        def summary(x: Arguments) -> Summary:
            return apart(launches.summary, summarise_segments, x, options)

        if launches.state_gradient is None:
            return Form(run, summary, None if launches.at_once else state_gradient_of(run))
        own: Any = launches.state_gradient
        return Form(run, summary, lambda x, kept, do, dstates: own(*prepared(x, options), kept, do, dstates))

    return over_devices(run, x, options, form=form if chosen in over_tokens else None)
