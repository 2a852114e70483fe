"""Errors by gate strength and by share of repeated keys: ours, and two forms that are often used and fail.

The factored form computes decayed scores as (q e^G)(k e^-G)^T. The truncated series computes (I + M)^-1 as
I - M + M^2 - ... up to a power; the product of powers, (I - M)(I + M^2)(I + M^4)..., is the whole series.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.shared.kernels.matmul import dot, dot_nt, dot_tn
from chunkwise.shared.testing.compare import error
from chunkwise.shared.testing.oracle import reference

STRENGTHS = (0.01, 0.1, 0.5, 1.0, 1.4, 2.0, 5.0, 10.0, 30.0, 80.0)
REPEATED = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
# The names of operators on the command line and in results.
NAMES = tuple(operator.name.removeprefix("chunk_") for operator in CHUNKED)
C = 64
# The mean of the log sigmoid of a normal variable.
_MEAN = 0.806


def factored_scores(q, k, G):
    """Return <q_i, e^(G_i - G_j) k_j>, i >= j, as one product of factors; e^-G overflows."""
    return jnp.tril(dot_nt(q * jnp.exp(G), k * jnp.exp(-G)))


def exact_scores(q, k, G):
    """Return the same scores, with the exponential of the difference of gates."""
    difference = jnp.minimum(G[:, :, None] - G[:, None], 0.0)
    return jnp.tril(jnp.sum(q[:, :, None] * k[:, None] * jnp.exp(difference), axis=-1))


def truncated_series(M, terms=16):
    """Return I - M + M^2 - ..., `terms` terms of the series of (I + M)^-1."""
    X = identity = jnp.eye(C)
    for _ in range(terms - 1):
        X = identity - dot(M, jnp.broadcast_to(X, M.shape))
    return X


def product_of_powers(M):
    """Return (I - M)(I + M^2)(I + M^4)..., exact in algebra."""
    X, power, identity = jnp.eye(C) - M, M, jnp.eye(C)
    for _ in range(C.bit_length() - 2):
        power = dot(power, power)
        X = dot(X, identity + power)
    return X


def chunked(q, k, v, g, beta=None, *, scores, inverse=None):
    """Run an operator chunk by chunk in float32, with these functions for scores and for the inverse; T % C == 0."""
    heads = lambda x: jnp.moveaxis(x[0].astype(jnp.float32), 1, 0)
    q, k, v, g = (heads(x) for x in (q * k.shape[-1] ** -0.5, k, v, g if g.ndim == 4 else g[..., None]))
    beta, outputs = None if beta is None else heads(beta[..., None]), []
    S = jnp.zeros((q.shape[0], k.shape[-1], v.shape[-1]))
    for start in range(0, q.shape[1], C):
        q_c, k_c, v_c, G = (x[:, start : start + C] for x in (q, k, v, g))
        G = jnp.broadcast_to(jnp.cumsum(G, axis=1), k_c.shape)
        if beta is not None:
            b = beta[:, start : start + C]
            X = inverse(jnp.tril(b * scores(k_c, k_c, G), -1))
            v_c = dot(X, b * (v_c - dot(k_c * jnp.exp(G), S)))
        outputs.append(dot(q_c * jnp.exp(G), S) + dot(scores(q_c, k_c, G), v_c))
        S = jnp.exp(G[:, -1, :, None]) * S + dot_tn(k_c * jnp.exp(G[:, -1:] - G), v_c)
    return jnp.moveaxis(jnp.concatenate(outputs, axis=1), 0, 1)[None]


def inputs(operator: str, strength: float, repeated: float, beta, dtype, T: int, K: int) -> dict:
    """Return inputs with this mean strength of gates, in nats a token, and the same key on a share of the tokens."""
    gate = f"logsigmoid*{strength / _MEAN}" if strength else "zero"
    x = OPERATORS[f"chunk_{operator}"].source.inputs(1, T, 1, 1, K, K, dtype=dtype, beta=beta, gate=gate)
    x.pop("g_gamma", None)
    same = np.random.default_rng(3).random(T) < repeated
    x["k"] = jnp.where(same[None, :, None, None], x["k"][:, :1], x["k"])
    return x


def forms(operator: str, sweep: str, implementations) -> dict:
    """Return the forms to compare, by name: functions from inputs to o."""
    run = OPERATORS[f"chunk_{operator}"].function
    ours = {name: lambda x, name=name: run(**x, implementation=name)[0] for name in implementations}
    solve = jnp.linalg.inv
    if sweep == "gate strength":
        inverse = lambda M: solve(jnp.eye(C) + M)
        return ours | {"factored form": lambda x: chunked(**x, scores=factored_scores, inverse=inverse)}
    return ours | {
        "series of 16 terms": lambda x: chunked(**x, scores=exact_scores, inverse=truncated_series),
        "product of powers": lambda x: chunked(**x, scores=exact_scores, inverse=product_of_powers),
    }


def measure(operator: str, sweep: str, implementations, T: int = 256, K: int = 128) -> list[dict]:
    """Return a row for every form, type and point of a sweep: "gate strength" or "repeated keys"."""
    strengths = sweep == "gate strength"
    rows, programs = [], {name: jax.jit(fn) for name, fn in forms(operator, sweep, implementations).items()}
    for dtype in (jnp.float32, jnp.bfloat16):
        for point in STRENGTHS if strengths else REPEATED:
            options = (point, 0.0, None) if strengths else (0.01, point, 1.0)
            x = inputs(operator, *options, dtype, T, K)
            expected = reference(**x)[0]
            for name, program in programs.items():
                if name in implementations or dtype == jnp.float32:
                    err = error(np.asarray(program(x), np.float64), expected)
                    row = {"sweep": sweep, "operator": operator, "form": name, "dtype": jnp.dtype(dtype).name}
                    rows.append(row | {"point": point, "error": err if np.isfinite(err) else None})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Draw the errors of every operator against the points of a sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    operators = list(dict.fromkeys(row["operator"] for row in rows))
    width = 2.6 * len(operators) + 1
    figure, row_of_axes = plt.subplots(
        1, len(operators), figsize=(width, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, operator in zip(row_of_axes[0], operators, strict=True):
        mine = [row for row in rows if row["operator"] == operator]
        # A line without points keeps its colour, so that all pictures of a row have the same colours.
        for index, line in enumerate(dict.fromkeys((row["form"], row["dtype"]) for row in mine)):
            found = [row for row in mine if (row["form"], row["dtype"]) == line and row["error"] is not None]
            if points := sorted((row["point"], row["error"]) for row in found):
                style = {"color": f"C{index}", "marker": "osv^D<>*phX"[index % 11], "markersize": 4}
                axes.plot(*zip(*points, strict=True), label=", ".join(line), **style)
        axes.grid(alpha=0.3)
        strengths = rows[0]["sweep"] == "gate strength"
        axes.set(yscale="log", title=operator, xlabel="mean gate, nats a token" if strengths else "share of equal keys")
        if strengths:
            axes.set_xscale("log")
    row_of_axes[0][0].set_ylabel("RMS error over RMS")
    row_of_axes[0][0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)
