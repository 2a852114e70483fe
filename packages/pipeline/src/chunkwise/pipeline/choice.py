"""The names of the implementations, and which of them None means."""

from chunkwise.shared.operators import choose_implementation

IMPLEMENTATIONS = ("xla", "staged", "fused")


def choose(implementation: str | None, fits: bool) -> str:
    """Return the implementation of a chunk operator; on a TPU None means "fused" where its sizes fit."""
    return choose_implementation(implementation, IMPLEMENTATIONS, on_tpu="fused" if fits else "staged")


def choose_recurrent(name: str, implementation: str | None, known: tuple[str, ...] = ("xla", "fused")) -> str | None:
    """Return the name under which a kernel package knows the implementation of its recurrent operator `name`."""
    if implementation is None:
        return None
    choose_implementation(implementation, IMPLEMENTATIONS, on_tpu="xla")
    if implementation not in known:
        raise NotImplementedError(f"`{name}` comes as {' and '.join(map(repr, known))}; got {implementation!r}.")
    return {"xla": "xla", "fused": "pallas"}[implementation]
