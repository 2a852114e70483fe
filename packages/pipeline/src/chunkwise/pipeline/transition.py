"""For the packages that do not have `chunk` yet: goes when all have it."""

import functools


from chunkwise import fused_gdn, fused_gla, kda
from chunkwise.fused_gdn import api as gdn_api
from chunkwise.fused_gla import api as gla_api
from chunkwise.kda import api as kda_api
from chunkwise.shared.operators.checks import choose_chunk_size, choose_implementation


def _old(function, names, extra, x, options, implementation, others=None):
    others = others or {}
    chosen = choose_implementation(implementation, ("xla", *others, "fused"), on_tpu="fused")
    C = choose_chunk_size(options.chunk_size, chosen, x.q.shape[1])
    if chosen in others:
        x = x._replace(scale=x.q.shape[-1] ** -0.5 if x.scale is None else x.scale)
        return others[chosen](x, options._replace(chunk_size=C))
    keywords = {name: getattr(options, {"use_qk_l2norm_in_kernel": "normalise"}.get(name, name)) for name in extra}
    return function(
        **{name: getattr(x, name) for name in names}, scale=x.scale, initial_state=x.initial_state,
        output_final_state=options.output_final_state, cu_seqlens=x.cu_seqlens, chunk_size=C,
        implementation="pallas" if chosen == "fused" else "xla", **keywords,
    )  # fmt: skip


def chunk(package):
    api = {fused_gdn: gdn_api, fused_gla: gla_api, kda: kda_api}[package]
    if hasattr(api, "chunk"):
        return api.chunk
    delta = ("q", "k", "v", "g", "beta")
    return {
        fused_gdn: functools.partial(
            _old, getattr(fused_gdn, "fused_chunk_gated_delta_rule"), delta, ("use_qk_l2norm_in_kernel",)
        ),
        kda: functools.partial(_old, kda.fused_chunk_kda, delta, ("use_qk_l2norm_in_kernel", "gate_lower_bound")),
        fused_gla: functools.partial(_old, fused_gla.fused_chunk_gla, ("q", "k", "v", "g", "g_gamma"), ()),
    }[package]


def recurrent(package, function, known):
    api = {fused_gdn: gdn_api, fused_gla: gla_api, kda: kda_api}[package]
    if hasattr(api, "chunk"):
        return function

    @functools.wraps(function)
    def run(*args, implementation=None, **keywords):
        if implementation is not None:
            choose_implementation(implementation, known, "xla")
        return function(*args, implementation={"fused": "pallas"}.get(implementation, implementation), **keywords)

    return run


def cost(package):
    try:
        module = __import__(f"{package.__name__}.cost", fromlist=["cost"])
    except ImportError:
        return None
    return module.cost
