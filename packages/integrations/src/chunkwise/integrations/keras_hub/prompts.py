"""The prompts of keras-hub's Qwen3.5 and Qwen3.5-MoE, of which its layers read every token once.

keras-hub reads whole prompts into its caches, and then once more the last token of the shortest prompt and what follows
it in longer ones. Keys and values are only written again, but a state takes these tokens twice. This module imports
keras-hub; `keras_hub.install` imports this module.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from keras_hub.src.models.qwen3_5.qwen3_5_causal_lm import Qwen3_5CausalLM
from keras_hub.src.models.qwen3_5_moe.qwen3_5_moe_causal_lm import Qwen3_5MoeCausalLM

from chunkwise.integrations.replacing import Place


def _without_what_is_read_again(theirs: Callable) -> Callable:
    """Return keras-hub's method that makes a cache of prompts, for which tokens that are read again are padding."""

    # The signature is keras-hub's.
    @functools.wraps(theirs, assigned=(), updated=())
    def build_cache(self, token_ids, padding_mask, *arguments, **options):
        tokens = jnp.asarray(padding_mask) != 0
        again = jnp.min(jnp.sum(tokens, axis=-1)) - 1
        first = tokens & (jnp.arange(tokens.shape[1]) < again)
        return theirs(self, token_ids, first.astype(jnp.int32), *arguments, **options)

    return build_cache


PLACES = tuple(
    Place(model, "_build_cache", _without_what_is_read_again(model._build_cache))
    for model in (Qwen3_5CausalLM, Qwen3_5MoeCausalLM)
)
