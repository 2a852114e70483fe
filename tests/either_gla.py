"""GLA and simple GLA as one function, by the gates that it gets: they share their kernels and most tests."""

from chunkwise.fused_gla import chunk_gla, chunk_simple_gla


def chunk_either_gla(q, k, v, g=None, g_gamma=None, *others, **options):
    if g is not None and g.ndim == 4:
        assert g_gamma is None, "chunk_gla has no constant gates"
        return chunk_gla(q, k, v, g, *others, **options)
    return chunk_simple_gla(q, k, v, g, g_gamma, *others, **options)
