"""The records of GDN-2 and Comba: their checks, with the kernels and the plain form of KDA."""

from chunkwise.kda import operator as kda
from chunkwise.kda import xla
from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import fused
from chunkwise.shared.implementation.implementations import plain
from chunkwise.shared.operator import Operator, define

_OPTIONS = (*kda.OPTIONS, "erase_before_decay")


def check_gdn2(x: Arguments, options: Options) -> None:
    """Check the tensors of GDN-2, its options, and the promise about its gates."""
    B, T, _, HV, K, V = checks.check_gated(x.q, x.k, x.v, x.g, per_channel=True)
    checks.check_array("b", x.b, "B T HV K", (B, T, HV, K))
    checks.check_array("w", x.w, "B T HV V", (B, T, HV, V))
    checks.check_packed(x.cu_seqlens, B)
    doubled = options.activation.allow_neg_eigval and not options.activation.use_erase_sigmoid_in_kernel
    checks.check(not doubled, "`allow_neg_eigval` must be False without `use_erase_sigmoid_in_kernel`; got True.")
    kda.check_options(options)


def check_comba(x: Arguments, options: Options) -> None:
    """Check the tensors of Comba, and the promise about its gates."""
    B, T, H, _, K, _ = checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens)
    checks.check_array("p", x.p, "B T H K", (B, T, H, K))
    kda.check_options(options)


def define_rule(name: str, check, optional: tuple[str, ...] = (), erase_before_decay: bool = False) -> Operator:
    """Return the record of an operator, with kernels of KDA under the operator's name.

    Args:
      name: the name of the operator.
      check: as in `Operator`.
      optional: as in `fused.Kernels`.
      erase_before_decay: as in `Operator`.
    """
    kernels = kda.kernels(name)._replace(optional=optional)
    return define(
        name,
        check,
        fused.implementation(kernels, *_OPTIONS, raw_gates=True),
        plain(xla.RULE, *_OPTIONS),
        erase_before_decay=erase_before_decay,
    )


# The step sizes of GDN-2 are ones, whose gradient nobody requests.
GDN2 = define_rule("gdn2", check_gdn2, optional=("beta",))
COMBA = define_rule("comba", check_comba, erase_before_decay=True)
