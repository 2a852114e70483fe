"""qwix with the modules of flax: it does to their projections what it does to nnx.Linear, and nothing to the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from chunkwise.integrations.nnx import GatedDeltaNet, KimiDeltaAttention, named
from chunkwise.pipeline import chunk_gated_delta_rule
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_inputs
from tests.nnx_modules import CONFIGS

KINDS = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
X = jax.random.normal(jax.random.key(1), (2, 12, 16))
RULES = {
    "int8": dict(weight_qtype="int8"),
    "int4 in tiles": dict(weight_qtype="int4", tile_size=4),
    "fp8": dict(weight_qtype="float8_e4m3fn"),
    "int8 times int8": dict(weight_qtype="int8", act_qtype="int8"),
    "int8 by saved scales": dict(weight_qtype="int8", act_qtype="int8", act_static_scale=True),
}


def ptq(model, x=X, **rule):
    return qwix.quantize_model(model, qwix.PtqProvider([qwix.QuantizationRule(**rule)]), x)


def qat(model, x=X, **rule):
    return qwix.quantize_model(model, qwix.QtProvider([qwix.QuantizationRule(**rule)]), x)


def lora(model, x=X, **rule):
    """Return a model with adapters that are not zero, which depend on nothing but their shapes."""
    provider = qwix.LoraProvider([qwix.LoraRule(rank=2, alpha=3.0, **rule)])
    model = qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(0))
    for _, x in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        x.set_value(0.3 * jax.random.normal(jax.random.key(2), x.shape))
    return model


class Product:
    """A projection as a function that an nnx.Linear computes, which is a model of its own for qwix."""

    def __init__(self, matrix, change, rule):
        self.shape, self.dtype, self.change = matrix.shape, matrix.dtype, lambda model, x: change(model, x, **rule)
        self.linear = nnx.Linear(*matrix.shape, use_bias=False, rngs=nnx.Rngs(0))
        self.linear.kernel.set_value(matrix)
        self.changed = False

    def __call__(self, x):
        if not self.changed:
            self.linear, self.changed = self.change(self.linear, x), True
        return self.linear(x)


def projections(module):
    matrices = [name for name, x in named(module.weights).items() if x.ndim == 2 and not name.startswith("conv")]
    return [name for name in matrices if name not in ("dt_bias", "mix", "r_k")]


def output(model, x=X, **options):
    """Return the output of a module, which in RWKV-7 has the values of the first layer beside it."""
    y = model(x, **options)
    return y[0] if type(y) is tuple else y


def by_linear(module, change, rule):
    """Return a function of hidden states that is the layer with each projection in an nnx.Linear, and these."""
    products = {name: Product(getattr(module, name).get_value(), change, rule) for name in projections(module)}
    weights = module._with_weights(lambda name: products.get(name, nnx.as_pure(getattr(module, name))))
    return lambda x: type(module).run(x, weights, module.config)[0], products


CASES = [(kind, "int8 times int8") for kind in CONFIGS] + [(KimiDeltaAttention, rule) for rule in RULES]


def new(kind):
    return kind(CONFIGS[kind], rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_quantised_as_nnx_linear(kind, rule):
    """The projections are quantised, and no other weight; nothing is lost in jit but what rounding to 8 bits does."""
    module = new(kind)
    expected, products = by_linear(module, ptq, RULES[rule])
    found = ptq(module, **RULES[rule])
    assert_close("y", output(found), expected(X), 1e-6)
    assert_close("y in jit", nnx.jit(output)(found), expected(X), 5e-3)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(found, nnx.Param))]
    assert {path for path in paths if path[-1] == "qvalue"} == {(name, "array", "qvalue") for name in products}
    assert {path[0] for path in paths if len(path) == 1} == set(named(module.weights)) - set(products)


@pytest.mark.parametrize("rule", [{}, dict(weight_qtype="int8")], ids=["lora", "qlora"])
@KINDS
def test_adapters_as_of_nnx_linear(kind, rule):
    """Every projection has adapters, which alone are trained."""
    module = new(kind)
    expected, products = by_linear(module, lora, rule)
    found = lora(module, **rule)
    assert_close("y", output(found), expected(X), 1e-6)
    gradients = nnx.jit(nnx.grad(lambda model: jnp.sum(output(model) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam)))(
        found
    )
    ends = ("_lora_a", "_lora_b")
    assert {path[0] for path, _ in nnx.to_flat_state(gradients)} == {name + end for name in products for end in ends}
    assert all(jnp.any(x.get_value() != 0) for _, x in nnx.to_flat_state(gradients))


def test_hidden_states_of_16_bits_and_weights_of_32():
    """qwix looks for a cast weight by its shape; here every projection has that of others."""
    module, x = new(GatedDeltaNet), X.astype(jnp.bfloat16)
    found = ptq(module, x, weight_qtype="int8")
    assert isinstance(found.q, type(found.out))
    assert found(x).dtype == jnp.bfloat16
    assert_close("y", found(x), module(X), 0.03)


def test_padding_of_adapters():
    """What padding holds reaches no gradient of an adapter, which the layer does not see."""
    ids = jnp.where(jnp.arange(12) < 7, 0, -1)[None].repeat(2, axis=0)
    module = lora(new(GatedDeltaNet))
    loss = lambda model, x: jnp.sum(model(x, segment_ids=ids) ** 2)
    gradient = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))
    holes = jnp.where(ids[..., None] < 0, jnp.nan, X)
    for x, y in zip(*(jax.tree.leaves(gradient(module, x)) for x in (X, holes)), strict=True):
        np.testing.assert_array_equal(x, y)


@KINDS
def test_gradients_of_quantised_training(kind):
    """They are those of a layer whose projections are quantised nnx.Linear."""
    module, rule = new(kind), RULES["int8"]
    expected, products = by_linear(module, qat, rule)
    expected(X)
    found = nnx.grad(lambda model: jnp.sum(output(model) ** 2))(qat(module, **rule))

    def loss(linears):
        for name, linear in linears.items():
            products[name].linear = linear
        return jnp.sum(expected(X) ** 2)

    want = nnx.grad(loss)({name: product.linear for name, product in products.items()})
    for name in products:
        assert_close(name, found[name].get_value(), want[name]["kernel"].get_value(), 1e-5)


class Alone(nnx.Module):
    """An operator in a module, with a weight of the shape of its keys."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones((1, 64, 2, 16)))

    def __call__(self, x):
        return jax.checkpoint(lambda x: chunk_gated_delta_rule(**x)[0])(x)


@pytest.mark.parametrize("change", [ptq, qat])
def test_products_inside_of_an_operator_stay(change):
    """Whether it was traced before or not, and in its gradient, whose rules JAX traces late under `jax.checkpoint`."""
    x = make_inputs(B=1, T=64, H=2, K=16, V=16)
    rule = RULES["int8 times int8"]
    found = change(Alone(), x, **rule)
    run = lambda model: nnx.jit(nnx.value_and_grad(lambda x: jnp.sum(model(x) ** 2)))(x)
    got = run(found)
    for y, ref in zip(*map(jax.tree.leaves, (got, run(Alone()))), strict=True):
        np.testing.assert_array_equal(y, ref)
