"""Checks of tile sizes, the argument `config` of operators, stages and parts of layers."""

from chunkwise.shared import tuning
from chunkwise.shared.call import checks


def choose_stage(implementation: str | None, config, tiles) -> str:
    """Return the implementation of a stage to run; tile sizes, see `check_config`, ask for the kernel.

    Raises:
      ValueError: there is no implementation of this name, or `config` is wrong.
      NotImplementedError: the implementation does not read `config`, or is one of whole operators.
    """
    check_config(config, tiles)
    chosen = checks.choose_implementation(implementation, ("pallas", "xla"), on_tpu="pallas")
    if config is not None and implementation == "xla":
        raise NotImplementedError(f'"xla" does not read `config`; got {config}.')
    return chosen if config is None else "pallas"


def check_config(config, tiles) -> None:
    """Check that tile sizes are None, or the `Config` of `tiles`, the module of a package, of whole numbers above 0."""
    package = tiles.__name__.rpartition(".")[0]
    right = config is None or isinstance(config, tiles.Config)
    checks.check(right, f"`config` must be None or a {package}.Config; got {checks.shown(config)}.")
    for name, size in {} if config is None else vars(config).items():
        checks.check_size(f"config.{name}", size)


def check_blocks(config, H: int, HV: int, K: int = tuning.LANES, V: int = tuning.LANES) -> None:
    """Check that the value heads of a grid step are as `tuning.divides_groups` says."""
    for name in ("heads", "heads_bwd"):
        heads = getattr(config, name, 1)
        checks.check(
            tuning.divides_groups(heads, H, HV, K, V),
            f"`config.{name}` must divide {HV} value heads in whole groups of {HV // H} or inside of one, and with K = "
            f"{K} and V = {V} in multiples of {tuning.LANES} channels or all heads; got {heads}.",
        )


def check_divides(name: str, size: int, count: int, what: str) -> None:
    """Check that a tile size of a stage divides the number of things that it cuts: a rest would not be computed."""
    checks.check(count % size == 0, f"`config.{name}` must divide {count} {what}; got {size}.")
