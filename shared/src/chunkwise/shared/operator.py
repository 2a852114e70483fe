"""One record for every operator, and the one way from the call of a user to an implementation.

A package has the checks and the implementations of an operator. The code around them is here, the same for all
operators: the checks that they share, the choice of an implementation, meshes, whole sequences, a few tokens, and
serving steps.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.shared.call import arguments, checks
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import implementations
from chunkwise.shared.implementation.implementations import Implementation, Plan
from chunkwise.shared.kernels import chunking, derivatives, interleaved
from chunkwise.shared.mesh import devices, partition
from chunkwise.shared.serving import few_tokens, run

# The options that are read where an operator runs token by token.
_OF_TOKENS = frozenset({"use_qk_l2norm_in_kernel", "min_gate", "erase_before_decay"})

Results = tuple[jax.Array, jax.Array | None]


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator, as its package defines it.

    Attributes:
      name: a part of the names of its functions and kernels.
      check: raises ValueError where its tensors, their gates or its options are wrong.
      implementations: by name, the best for a TPU first.
      erase_before_decay: whether its erase keys read the state before the decay of their token.
      warns: whether it warns of tensors that seem to be head-first; of several in one call, one does.
    """

    name: str
    check: Callable[[Arguments, Options], None]
    implementations: dict[str, Implementation]
    erase_before_decay: bool = False
    warns: bool = True

    def chunk(self, x: Arguments, options: Options, implementation: str | None) -> Results:
        """Run the operator over whole sequences, chunk by chunk; the output has the tokens that q has."""
        x, options = self._checked(x, options)
        checks.check_initial_state(x.initial_state, (x.num_states, *x.v.shape[2:3], x.q.shape[3], x.channels))
        x = arguments.check_shared(x, options)
        if self.warns:
            arguments.warn_head_first(x, options)
            arguments.warn_decays(x, options)
        chosen = implementations.choose(self.implementations, implementation, x, options)
        if chosen.name != "fused" and isinstance(x.cu_seqlens, jax.core.Tracer):
            # The tables of the kernels of "fused" take a boundary that falls, which no program can refuse, as risen.
            T = x.q.shape[1] * lax.axis_size(checks.check_context_axis(options.context_axis))
            x = x._replace(cu_seqlens=chunking.rising(x.cu_seqlens, T))
        name = f"chunk_{self.name}"
        o, states = _bound_to_devices(chosen, x, options, implementations.run, name)()
        return interleaved.select_queries(x.q, o), states

    def recurrent(self, x: Arguments, options: Options, implementation: str | None) -> Results:
        """Run the operator over a few tokens of every sequence, token by token; without any slot there is no pool."""
        if all(y is None for y in x.slots):
            x = x._replace(slots=None)
        x, options = self._checked(x, options)
        x = arguments.check_shared(x, options)
        few_tokens.check_states(x)
        name, strict = f"recurrent_{self.name}_fwd", implementation == "fused"
        known = {
            each: Implementation(each, functools.partial(few_tokens.run_tokens, name, each, strict), options=_OF_TOKENS)
            for each in ("fused", "xla")
        }
        chosen = implementations.choose(known, implementation, x, options)
        name = f"recurrent_{self.name}"
        return _bound_to_devices(chosen, x, options, implementations.run, name)()

    def ragged(self, x: Arguments, options: Options, implementation: str | None) -> tuple[jax.Array, Any]:
        """Run a serving step; `x.initial_state` is the pool."""
        x, options = self._checked(x, options)
        x = arguments.check_shared(x, options)
        x, options = run.check_step(x, options)
        chosen = implementations.choose(self.implementations, implementation, x, options)
        name, strict = f"recurrent_{self.name}_fwd", implementation == "fused"
        step = functools.partial(run.run_step, name=name, strict=strict)
        o, pool = _bound_to_devices(chosen, x, options, step, pool="states")()
        assert pool is not None
        return o, pool

    def _checked(self, x: Arguments, options: Options) -> tuple[Arguments, Options]:
        """Return checked arguments, and options with the law of the operator."""
        x, options = x.with_int32(), options._replace(erase_before_decay=self.erase_before_decay)
        self.check(x, options)
        return x, options


def _bound_to_devices(
    implementation: Implementation,
    x: Arguments,
    options: Options,
    run: Callable[[Plan, Arguments], Results],
    name: str | None = None,
    pool: str = "initial_state",
) -> Callable[[], Results]:
    """Return a function that calls `run` where the arguments lie: on one device, or on all devices of a mesh.

    What is run is planned there, too: by the sizes of one device.
    `name` is the function that the user called, None if it has no derivative, and `pool` its name of the argument
    `initial_state`. On a mesh, every device gets its part of the arguments.
    Without a mesh, nothing stands between the call and `run`.
    """
    # Outside of jit, arrays may be numpy arrays, such as the arrays of a scheduler and a pool from a file.
    x = jax.tree.map(lambda y: jnp.asarray(y) if isinstance(y, np.ndarray) else y, x)
    places = devices.find_places(x, options, pool)
    if places[1]:
        # The tokens of a device may begin inside of a token of the user.
        x = interleaved.whole(x)
    divided = places != (None, ())
    if name is not None:
        x = _in_reverse(x, name, implementation.name, divided)
    if not divided:
        return functools.partial(run, implementations.plan(implementation, x, options), x)
    checks.check(
        x.initial_state is None or "initial_state" in x.arrays(),
        f"`{pool}` must be an array where the operator divides itself over devices; got a StatePool: call the operator "
        f"inside of a shard_map, where every device has a pool of its own heads.",
    )
    compute = devices.on_device(implementation, x, options, places, run)
    return functools.partial(partition.over_mesh, compute, x.arrays(), *places, bool(options.output_final_state))


def _in_reverse(x: Arguments, name: str, implementation: str, divided: bool) -> Arguments:
    """Return arguments whose derivatives that the function of this name lacks are an error."""
    forward = f'{name} has no forward-mode derivative under "{implementation}"; use implementation="xla".'
    if implementation != "xla":
        again = f'{name} can be differentiated only once under "{implementation}"; use implementation="xla".'
        return derivatives.in_reverse(x, forward, again)
    over_devices = f"{name} has no forward-mode derivative where it divides itself over devices; take one in reverse."
    return derivatives.in_reverse(x, over_devices) if divided else x


def define(
    name: str,
    check: Callable[[Arguments, Options], None],
    *known: Implementation,
    erase_before_decay: bool = False,
) -> Operator:
    """Return the record of an operator with these implementations, the best for a TPU first."""
    return Operator(name, check, {each.name: each for each in known}, erase_before_decay)


def register(operator: Operator, implementation: Implementation) -> None:
    """Add an implementation to an operator, before "xla", which takes all sizes."""
    known = operator.implementations
    plain = known.pop("xla")
    known[implementation.name] = implementation
    known["xla"] = plain
