import sys

import pytest

from chunkwise import integrations
from tests.hosts import GDN_BACKEND, REPLACED, stand_in, with_functions


@pytest.fixture
def replaced(request, monkeypatch):
    """Return a module of chunkwise, and what it replaces by module and name, of a host that stands in."""
    module = request.param
    theirs = {}
    for path, names in REPLACED[module].items():
        if names[0].endswith("AttnBackend"):
            found = {name: type(name, (), {"__module__": path}) for name in names}
            stand_in(monkeypatch, path, **found)
        elif names == ("__call__",):
            # A class, which is no module, but is found by its path here.
            parent, _, name = path.rpartition(".")
            found = {"__call__": lambda self, run, **options: run()}
            monkeypatch.setitem(sys.modules, path, type(name, (), found | {"__module__": parent}))
            setattr(sys.modules[parent], name, sys.modules[path])
        else:
            found = with_functions(monkeypatch, path, names)
        theirs |= {(path, name): value for name, value in found.items()}
        if path == GDN_BACKEND:
            backend = type("GDNAttnBackend", (), {"_forward_extend_chunked_jax": lambda self: None})
            sys.modules[path].GDNAttnBackend = backend
    yield module, theirs
    # It has the stand-ins in it.
    if sys.modules.pop("chunkwise.integrations.sglang_jax.backends", None):
        del integrations.sglang_jax.backends
