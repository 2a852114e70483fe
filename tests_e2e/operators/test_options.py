"""Every option of every operator changes its program, or the call says that the implementation does not read it."""

import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from chunkwise import fused_gdn, fused_gla, kda, pipeline
from chunkwise.fused_gdn import operator as gdn_operator
from chunkwise.fused_gla import operator as gla_operators
from chunkwise.kda import operator as kda_operator
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.call import signature
from chunkwise.shared.call.arguments import Options
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.operator import Operator
from chunkwise.two_keys import operator as two_keys_operators

RECORDS = {
    "gated_delta_rule": gdn_operator.OPERATOR, "kda": kda_operator.OPERATOR, "gdn2": two_keys_operators.GDN2,
    "comba": two_keys_operators.COMBA, "gla": gla_operators.GLA, "simple_gla": gla_operators.SIMPLE_GLA,
}  # fmt: skip
CONFIGS = {"gated_delta_rule": fused_gdn.Config(1, 1), "gla": fused_gla.Config(1, 1, 1)}
CONFIGS |= {"simple_gla": CONFIGS["gla"]} | dict.fromkeys(("kda", "gdn2", "comba"), kda.Config(1, 1))
HV, T = 2, 32
LAW = dict(use_gate_in_kernel=True, A_log=jnp.zeros(HV))
SIGMOIDS = dict(use_beta_sigmoid_in_kernel=True, use_erase_sigmoid_in_kernel=True)
BLOCKS = dict(chunk_size=16, block_state_indices=jnp.array([[3, 4], [5, 6]], jnp.int32))
HEADS = NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec(None, None, "x"))
# By the name of an option, arguments without it and arguments with it.
VALUES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "output_final_state": ({}, dict(output_final_state=True)),
    "scale": ({}, dict(scale=0.5)),
    "use_qk_l2norm_in_kernel": ({}, dict(use_qk_l2norm_in_kernel=True)),
    "chunk_size": ({}, dict(chunk_size=16)),
    "min_gate": ({}, dict(min_gate=-0.5)),
    "sharding": ({}, dict(sharding=HEADS)),
    "context_axis": ({}, dict(context_axis="x")),
    "block_size": (BLOCKS | dict(block_size=32), BLOCKS | dict(block_size=16)),
    "decode_tokens": ({}, dict(decode_tokens=2)),
    "config": ({}, dict(config=None)),
    "disable_recompute": ({}, dict(disable_recompute=True)),
    "use_gate_in_kernel": ({}, LAW),
    "lower_bound": (LAW, LAW | dict(lower_bound=-5.0)),
    "use_beta_sigmoid_in_kernel": ({}, dict(use_beta_sigmoid_in_kernel=True)),
    "allow_neg_eigval": (SIGMOIDS, SIGMOIDS | dict(allow_neg_eigval=True)),
    "use_erase_sigmoid_in_kernel": ({}, dict(use_erase_sigmoid_in_kernel=True)),
    "use_write_sigmoid_in_kernel": ({}, dict(use_write_sigmoid_in_kernel=True)),
    "erase_before_decay": (dict(erase_before_decay=False), dict(erase_before_decay=True)),
}
# An implementation may make no use of a promise about the values of arguments, which changes no result, and may keep
# for the backward all that it can in any case.
PROMISES = {"min_gate", "disable_recompute"}
FORMS = {"chunk": ("fused", "staged", "xla"), "recurrent": ("fused", "xla"), "ragged": ("fused", "staged", "xla")}
# A step has two branches, and every operator has its own kernels in one of them only.
THOROUGH = dict(test_every_option=lambda name, implementation: name.startswith("ragged_") and implementation != "xla")
FUNCTIONS = [f"{form}_{name}" for name in RECORDS for form in FORMS if f"{form}_{name}" in pipeline.__all__]
PARAMETERS = {name: inspect.signature(getattr(pipeline, name)).parameters for name in FUNCTIONS}
# The options that the record of an operator sets.
OF_RECORDS = {field.name for field in dataclasses.fields(Operator)} & set(Options._fields)


def arrays_of(name: str, ring: bool) -> dict[str, Any]:
    """Return the arrays of a call of a function of the pipeline; with `ring` the pool of a serving step has rings."""
    form, operator = name.split("_", 1)
    entry = OPERATORS[f"chunk_{operator}"]
    x = entry.source.inputs(1, T, 1, HV, 128, 128)
    if form == "ragged":
        pool = pipeline.make_pool(8, HV, 128, 128, replay=8 * ring, H=1, per_channel=entry.per_channel)
        x |= dict(
            states=pool if ring else pool.states,
            cu_seqlens=jnp.array([0, 1, T]),
            state_indices=jnp.arange(2),
            num_decodes=1,
        )
    return x


def program_of(name: str, implementation: str, option: str, options: dict[str, Any]) -> tuple[str, list[bytes]]:
    """Return the program of a call with these options, made so that it may read `option`."""
    form, operator = name.split("_", 1)
    named = {key: parameter.default for key, parameter in PARAMETERS[name].items()}
    named |= arrays_of(name, ring=option == "decode_tokens")
    named |= {key: y for key, y in options.items() if key in named}
    record = dataclasses.replace(RECORDS[operator], **{key: y for key, y in options.items() if key in OF_RECORDS})

    def run(q):
        x, options, _ = signature.to_records(named | dict(q=q))
        return getattr(record, form)(x, options, implementation)

    if option == "context_axis":
        everywhere, mesh = PartitionSpec(), AbstractMesh((2,), ("x",))
        run = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    program = jax.make_jaxpr(run)(named["q"])
    # The addresses of functions are no part of a program, but its constants are.
    constants = [np.asarray(x).tobytes() for x in program.consts]
    return re.sub("0x[0-9a-f]+", "", str(program.jaxpr)), constants


@pytest.mark.parametrize(
    ("name", "implementation"), [(name, each) for name in FUNCTIONS for each in FORMS[name.split("_")[0]]]
)
def test_every_option(name, implementation):
    for option in (*Options._fields, *GateActivation._fields):
        # What has no step sizes erases nothing.
        of_record = option in OF_RECORDS and OPERATORS[name.replace("ragged", "chunk")].delta
        if option not in PARAMETERS[name] and not of_record:
            continue
        without, given = VALUES[option]
        if option == "config":
            given = dict(config=CONFIGS[name.split("_", 1)[1]])
        program = functools.partial(program_of, name, implementation, option)
        before = program(without)
        try:
            after = program(given)
        except NotImplementedError as error:
            assert f'"{implementation}" does not read `{option}`; got ' in str(error)  # noqa: PT017
        else:
            changed = before != after
            assert changed or option in PROMISES, option


def test_the_text_of_a_program_is_that_of_its_next_trace():
    program = functools.partial(program_of, "chunk_kda", "fused", "min_gate", {})
    first = program()
    jax.clear_caches()
    assert program() == first
