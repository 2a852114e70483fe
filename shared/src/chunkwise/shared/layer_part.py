"""One record for the parts of a layer beside its operator, and the one way from a call to an implementation.

The parts are the short convolution and the gated norm.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.shared.call.checks import Sharding
from chunkwise.shared.mesh import partition
from chunkwise.shared.mesh.devices import Places
from chunkwise.shared.mesh.partition import Arrays

# The output, and the states: it depends on the part whether there are any, and a type cannot say that.
Results = tuple[jax.Array, Any]


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """The static arguments of all parts, as the user gave them; those that a part does not have keep their defaults.

    Attributes:
      implementation: after the checks it is the name of the implementation that runs.
      activation, config: of every part.
      sharding, context_axis, output_final_state: as for an operator.
      norm_before_gate, eps, in_place: of the norm.
      block_size: of the convolution, tokens of a block after which a state is stored; None for no blocks.
      final: of the convolution, the type of the final states of whole sequences; None if nobody asks for them. The
        check chooses it.
    """

    implementation: str | None
    activation: str | None
    config: Any = None
    sharding: Sharding | None
    context_axis: str | tuple[str, ...] | None = None
    output_final_state: bool = False
    norm_before_gate: bool = True
    eps: float = 0.0
    in_place: bool = False
    block_size: int | None = None
    final: jax.Array | None = None


@dataclass(frozen=True, eq=False)
class LayerPart:
    """A part of a layer, as its package defines it.

    Attributes:
      layout: which dimensions of its arrays are split alike over a mesh; it names all of them.
      check: raises ValueError where arguments or options are wrong. Returns the arguments as `run` takes them, which
        may be None, and the options with the name of an implementation.
      run: from arguments by name, without those that are None, and options to the output and the states, or None.
      check_places: raises ValueError where the arguments cannot be divided so.
      on_device: runs instead of `run` on every device of a mesh; it also takes how the part is divided.
    """

    layout: partition.Layout
    check: Callable[[Arrays, PartOptions], tuple[Arrays, PartOptions]]
    run: Callable[[Arrays, PartOptions], Results]
    check_places: Callable[[Arrays, Places], None] | None = None
    on_device: Callable[[Arrays, PartOptions, Places], Results] | None = None

    def __call__(self, named: dict[str, Any]) -> Results:
        """Run the part where its arguments lie: on one device, or on all devices of a mesh.

        `named` has all arguments of the call by name.
        """
        static = PartOptions(**{field.name: named[field.name] for field in fields(PartOptions) if field.name in named})
        arrays, options = self.check({name: named[name] for name in self.layout.arguments}, static)
        arrays = {name: y for name, y in arrays.items() if y is not None}
        # Weights become float32 before devices share them, so that sums of their gradients are rounded only once.
        arrays |= {name: arrays[name].astype(jnp.float32) for name in ("weight", "bias") if name in arrays}
        division = partition.find_division(arrays, self.layout, options.sharding)
        places = division, partition.token_axes(division, options.context_axis)
        if self.check_places is not None:
            self.check_places(arrays, places)
        options = replace(options, sharding=None, context_axis=None)
        if places == (None, ()):
            return self.run(arrays, options)
        on_device = self.on_device
        run = lambda arrays: self.run(arrays, options) if on_device is None else on_device(arrays, options, places)
        return partition.over_mesh(run, arrays, *places, options.output_final_state)
