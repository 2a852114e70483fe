"""Both operators, as their tests see them."""

from typing import Any, NamedTuple

import jax

from chunkwise.shared.operator import Operator
from chunkwise.shared.testing import inputs
from chunkwise.two_keys import chunk_comba, chunk_gdn2, ragged_comba, ragged_gdn2, recurrent_comba, recurrent_gdn2
from chunkwise.two_keys.operator import COMBA, GDN2


class Kind(NamedTuple):
    """An operator, its functions, and what `make_inputs` makes its inputs of."""

    record: Operator
    chunk: Any
    recurrent: Any
    ragged: Any
    options: dict[str, Any]

    def inputs(self, *sizes: int, **options) -> dict[str, jax.Array]:
        """Return inputs by name."""
        return inputs.make_inputs(*sizes, **self.options, **options)


KINDS = {
    "gdn2": Kind(GDN2, chunk_gdn2, recurrent_gdn2, ragged_gdn2, dict(per_channel=True, erase="gate")),
    "comba": Kind(COMBA, chunk_comba, recurrent_comba, ragged_comba, dict(erase="key")),
}
