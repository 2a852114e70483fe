"""Whether MaxText's layer calls the functions that chunkwise has put into its module."""

import collections
import functools
from collections.abc import Callable
from typing import Any

from chunkwise.shared.call import checks

# How often these functions have called our operators.
CALLS = collections.Counter()


def must_call(theirs: Callable) -> Callable:
    """Return the call of MaxText's layer, which raises an error if it passes by our functions.

    Under vLLM, which gives metadata of its attention, the layer calls tpu-inference instead.
    """
    if theirs.__module__.startswith("chunkwise."):
        return theirs

    @functools.wraps(theirs)
    def call(*arguments: Any, **options: Any) -> Any:
        before = CALLS.total()
        result = theirs(*arguments, **options)
        called = CALLS.total() > before or options.get("attention_metadata") is not None
        checks.check(called, "MaxText's layer must call chunkwise; got another way, as by `use_gdn_kernel`.")
        return result

    call.__module__ = __name__
    return call
