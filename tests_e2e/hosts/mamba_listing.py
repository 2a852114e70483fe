"""The listing of the paper of Mamba-2 beside ours in the place of its kernel, with the inputs of the listing's test.

The test in the file of the listing computes both, and compares nothing. `test_mamba` runs these in its process.
"""

import pytest
import torch
from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined


@pytest.mark.parametrize("initial", [False, True])
def test_listing(initial):
    torch.manual_seed(42)
    heads, channels, states, tokens = 32, 64, 64, 2048
    x = torch.randn(1, tokens, heads, channels)
    dt = torch.nn.functional.softplus(torch.randn(1, tokens, heads) - 4)
    A = -torch.exp(torch.rand(heads))
    B, C = (torch.randn(1, tokens, 1, states) for _ in range(2))
    before = torch.randn(1, 1, heads, channels, states) if initial else None
    cotangent = torch.randn(1, tokens, heads, channels)
    results = []
    for listing in (True, False):
        inputs = [y.clone().requires_grad_() for y in (x, dt, A, B, C)]
        X, step, rate, keys, queries = inputs
        if listing:
            o, state = ssd_minimal_discrete(X * step[..., None], rate * step, keys, queries, 64, before)
        else:
            first = None if before is None else before[:, 0]
            o, state = mamba_chunk_scan_combined(
                X, step, rate, keys, queries, 64, initial_states=first, return_final_states=True
            )  # fmt: skip
        (o * cotangent).sum().backward()
        results.append([o.detach(), state.detach(), *(y.grad for y in inputs)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
