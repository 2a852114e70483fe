"""flash-linear-attention's layers out of its wheel, beside ours: `nox -s host-flash-linear-attention`.

Its modules and operators are Triton's. Modules of plain torch, and the recurrences in float64, take their places here.
"""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from chunkwise import layers
from chunkwise.shared.testing import oracle
from chunkwise.shared.testing.compare import assert_close
from tests_e2e.hosts.host import load

D = 24
SHARED = dict(hidden_size=D, num_heads=2, conv_size=3, norm_eps=1e-3)
GROUPED = SHARED | dict(num_v_heads=4, head_dim=8, expand_v=1.5)
# By the type of a model: its layer, ours, and settings of both.
DOORS = {
    "gated_deltanet": ("GatedDeltaNet", "gated_delta_net", GROUPED | dict(output_gate_activation="sigmoid")),
    "kda": ("KimiDeltaAttention", "kimi_delta_attention", GROUPED | dict(safe_gate=True, lower_bound=-4.0)),
    "gdn2": ("GatedDeltaNet2", "gated_delta_net2", GROUPED | dict(allow_neg_eigval=True)),
    "comba": ("Comba", "comba_layer", GROUPED | dict(use_output_gate=False)),
    "delta_net": ("DeltaNet", "gated_delta_product", SHARED | dict(expand_k=0.5, allow_neg_eigval=True, use_gate=True)),
    "gla": ("GatedLinearAttention", "gated_linear_attention", dict(hidden_size=D, num_heads=2, norm_eps=1e-3)),
    "mamba2": (
        "Mamba2", "mamba2_mixer",
        dict(hidden_size=D, head_dim=6, state_size=10, conv_kernel=3, norm_before_gate=True, norm_eps=1e-3, n_groups=2),
    ),
}  # fmt: skip
OPERATORS = "gated_delta_rule", "kda", "gdn2", "comba", "delta_rule", "gla"
ACTIVATIONS = {"silu": functional.silu, "swish": functional.silu, "sigmoid": torch.sigmoid}


class Norm(torch.nn.Module):
    """The norm of a head, with a gate or without; with `group_size` of Mamba-2, whose gate may come before the norm."""

    def __init__(self, hidden_size, eps=1e-5, activation="swish", norm_before_gate=True, group_size=None, **_):
        super().__init__()
        self.weight, self.eps, self.act = torch.nn.Parameter(torch.ones(hidden_size)), eps, ACTIVATIONS[activation]
        self.before, self.size = norm_before_gate, group_size or hidden_size

    def forward(self, x, gate=None):
        gate = torch.ones_like(x) if gate is None else self.act(gate)
        x = x if self.before else x * gate
        groups = x.unflatten(-1, (-1, self.size))
        x = (groups * torch.rsqrt((groups**2).mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight
        return x * gate if self.before else x


class Convolution(torch.nn.Conv1d):
    """A short convolution of every channel, and its activation."""

    backend, activation = "torch", "silu"

    def __init__(self, hidden_size, kernel_size, bias, activation):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1)

    def forward(self, x, **_):
        return causal_conv1d(x, self.weight[:, 0], self.bias)[0], None


def causal_conv1d(x, weight, bias, **_):
    x = functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return functional.silu(functional.conv1d(x, weight[:, None], bias, groups=len(weight)).transpose(1, 2)), None


def operator(
    q, k, v, g=None, beta=None, *, gk=None, A_log=None, dt_bias=None, lower_bound=None, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, use_qk_l2norm_in_kernel=False, b=None, w=None, p=None,
    **_,
):  # fmt: skip
    """Return the output of an operator of flash-linear-attention, with its arguments, and no state."""
    g = gk if g is None else g
    if use_gate_in_kernel:
        raw = g + dt_bias.reshape(g.shape[2:])
        rate = A_log.exp().reshape(-1, *[1] * (g.ndim - 3))
        g = -rate * functional.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    if use_beta_sigmoid_in_kernel:
        beta = (1 + allow_neg_eigval) * beta.sigmoid()
    named = {key: x for key, x in dict(q=q, k=k, v=v, g=g, beta=beta, b=b, w=w, p=p).items() if x is not None}
    o = oracle.reference(
        **{key: x.detach().double().numpy() for key, x in named.items()},
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )[0]  # fmt: skip
    return torch.from_numpy(np.array(o)).to(v.dtype), None


def modules() -> dict[str, types.ModuleType]:
    """Return the modules that its layers import."""
    of = lambda **names: types.SimpleNamespace(**names)
    forms = "chunk", "fused_recurrent", "fused_chunk"
    ops = {f"fla.ops.{name}": of(**dict.fromkeys([f"{form}_{name}" for form in forms], operator)) for name in OPERATORS}
    logger = of(warning_once=lambda *_: None, warning=lambda *_: None)
    return ops | {
        "fla.modules": of(FusedRMSNormGated=Norm, RMSNorm=Norm, ShortConvolution=Convolution),
        "fla.modules.activations": of(ACT2FN=ACTIVATIONS, elu_p1=None),
        "fla.modules.convolution": of(causal_conv1d=causal_conv1d, causal_conv1d_update=None),
        "fla.modules.layernorm_gated": of(RMSNormGated=functools.partial(Norm, activation="silu")),
        "fla.layers.utils": of(
            get_layer_cache=lambda *_, **__: None, update_layer_cache=lambda *_, **__: None,
            unpad_hidden_states=lambda hidden_states, *_, **__: (hidden_states, None, None),
            repad_hidden_states=lambda hidden_states, *_, **__: hidden_states,
        ),
        "transformers.utils": of(logging=of(get_logger=lambda name: logger)),
    }  # fmt: skip


def token_by_token(layer, x):
    """Return the outputs of its Mamba-2, whose heads of a group are neighbours in its kernels and in a decode.

    Its prefill in torch repeats the groups as a whole, so that head h has group h % n_groups: outputs differ by 4%.
    """
    conv, outputs = x.new_zeros(len(x), layer.conv_dim, layer.conv_kernel_size), []
    state = x.new_zeros(len(x), layer.num_heads, layer.head_dim, layer.ssm_state_size)
    for token in x.split(1, dim=1):
        y, conv, state = layer.torch_forward(token, dict(conv_state=conv, recurrent_state=state))
        outputs.append(y)
    return torch.cat(outputs, dim=1)


@pytest.mark.filterwarnings("ignore:The correction_factor is set to 1")
@pytest.mark.parametrize("model", DOORS)
def test_the_layer(model):
    """The settings and the arrays of its layer make ours, whose outputs are those of the layer in float64."""
    theirs, ours, settings = DOORS[model]
    torch.manual_seed(0)
    layer = getattr(load("flash-linear-attention", f"fla.layers.{model}", modules()), theirs)(**settings)
    with torch.no_grad():
        for x in layer.parameters():
            x += 0.1 * torch.randn_like(x)
        named = {name: x.numpy().copy() for name, x in layer.state_dict().items()}
        x = torch.randn(2, 70, D)
        run = functools.partial(token_by_token, layer.double()) if model == "mamba2" else layer.double()
        want = run(x.double())
    config = layers.config_from(settings | {"model_type": model})
    weights = getattr(layers, f"load_{ours}")(named, config)
    y, _ = getattr(layers, ours)(jnp.asarray(x.numpy()), weights, config)
    assert_close("y", y, (want[0] if isinstance(want, tuple) else want).numpy(), 1e-5)
