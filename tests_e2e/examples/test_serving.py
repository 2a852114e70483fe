"""The engine of examples/serving.py, and Qwen3.5 of transformers under it, also with speculation.

Greedy generation must not depend on how a text is cut into steps, nor on what else runs in a step.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blocks
import qwen3_5
import serving
from chunkwise.layers import Step, empty_cache, gated_delta_net, ragged_gated_delta_net
from serving import Engine, Request, rms_norm


@pytest.mark.parametrize("ring", [0, 8])
def test_example(ring, capsys):
    model, requests = serving.main(["--ring", str(ring)])
    printed = capsys.readouterr().out
    assert "prompt tokens" in printed
    assert "generated tokens/s" in printed

    @jax.jit
    def follow(model, tokens):
        """Return the greedy tokens after every token of one text, by the chunk operator."""
        x = model.embedding[tokens][None]
        for w in model.layers:
            x = x + gated_delta_net(rms_norm(x), w, serving.CONFIG)[0]
        return jnp.argmax(rms_norm(x[0]) @ model.head, axis=1)

    for r in requests:
        # Texts of one length share a program. What follows a text changes nothing before it.
        text = np.zeros(96, np.int32)
        text[: len(r.prompt) + r.wanted] = r.prompt + r.generated
        following = follow(model, text).tolist()[len(r.prompt) - 1 :]
        assert r.generated == following[: r.wanted]
    # Slots are used again, and the tokens are not always the same few.
    assert len({r.slot for r in requests}) < len(requests)
    assert len({token for r in requests for token in r.generated}) > 20


def run_step(case: "Case", weights, pools, tokens, step, implementation=None):
    """Do as `serving.run_model` does, with Qwen3.5's blocks; the attention of this model adds zeros."""
    x, after, left = weights.embedding[tokens], [], iter(pools)
    norm = lambda x, weight: blocks.rms_norm(x, weight, case.config.eps)
    for b in weights.blocks:
        if not isinstance(b.mixer, qwen3_5.Attention):
            given = norm(x, b.norm), b.mixer, case.config.delta, next(left), step
            y, pool = ragged_gated_delta_net(*given, implementation=implementation)
            x, after = x + y, [*after, pool]
        x = x + blocks.mlp(norm(x, b.mlp_norm), b.mlp)
    return norm(x, weights.norm) @ weights.head, tuple(after)


class Case(NamedTuple):
    """Qwen3.5 as transformers runs it, one text at a time.

    Attributes:
      config, model: the model of examples/qwen3_5.py.
      prompts, generated: texts, and how they go on.
      drafts: for every position of every whole text, what a model of other weights says before it.
    """

    config: qwen3_5.Config
    model: qwen3_5.Model
    prompts: list[list[int]]
    generated: list[list[int]]
    drafts: list[list[int]]

    def requests(self) -> list[Request]:
        """Return a request for each prompt, of which one arrives in every second step."""
        pairs = enumerate(zip(self.prompts, self.generated, strict=True))
        return [Request(i, prompt, len(after), 2 * i) for i, (prompt, after) in pairs]

    def pools(self, slots: int):
        return tuple(empty_cache(self.config.delta, slots) for attention in self.config.attention if not attention)


def test_requests_without_tokens():
    """A prompt is scored without a token after it; an empty one is refused, and the others go on."""
    run = lambda model, pools, tokens, step: (jnp.zeros((1, tokens.shape[1], serving.VOCABULARY)), pools)
    model = serving.random_model(1)
    engine = Engine(model, serving.empty_pools(model, 2), budget=4, run=run)
    requests = [Request(0, [1, 2], 0), Request(1, [], 3), Request(2, [1] * 6, 2)]
    waiting = [*requests]
    with pytest.raises(ValueError, match="`prompt` must have a token; got none in request 1, which is dropped"):
        engine.step(waiting)
    engine.serve(waiting)
    assert [len(request.generated) for request in requests] == [0, 0, 2]
    assert requests[0].computed == 2
    assert sorted(engine.free) == [0, 1]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    from tests_e2e.layers.recording import build, randomise, torch

    # The cache of transformers counts its tokens in a full attention. That of this model, in a third block, adds zeros.
    model = build(
        "qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"], intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=24,
    )  # fmt: skip
    torch.nn.init.zeros_(model.model.layers[2].self_attn.o_proj.weight)
    randomise(*(x for name, x in model.named_parameters() if "norm" in name or "dt_bias" in name))
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.generation_config.eos_token_id = None
    directory = tmp_path_factory.mktemp("qwen3_5")
    model.save_pretrained(directory)
    prompts = [torch.randint(50, (1, length)) for length in (37, 5, 50)]
    # For so little, more threads wait longer than they compute.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        texts = [model.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=True) for prompt in prompts]
        for x in model.parameters():
            x += 0.02 * torch.randn(x.shape)
        # It reads whole texts at once. That changes nothing: what follows a wrong draft is dropped.
        drafts = [[0, *model(text).logits[0, :-1].argmax(1).tolist()] for text in texts]
    torch.set_num_threads(threads)
    generated = [text[0, prompt.shape[1] :].tolist() for prompt, text in zip(prompts, texts, strict=True)]
    assert all(len(set(tokens)) > 8 for tokens in generated)
    return Case(*qwen3_5.load(directory), [prompt[0].tolist() for prompt in prompts], generated, drafts)


# Speculation reads prompts in chunks too.
THOROUGH = dict(test_chunked_prefill=True, test_speculation=lambda implementation: implementation == "fused")
implementations = pytest.mark.parametrize("implementation", [None, "fused"])


@implementations
@pytest.mark.torch
def test_chunked_prefill(case, implementation):
    requests = case.requests()
    engine = Engine(case.model, case.pools(2), 16, functools.partial(run_step, case, implementation=implementation))
    engine.serve(requests)
    assert [r.generated for r in requests] == case.generated
    assert engine.traces == 1
    assert max(r.steps - r.wanted for r in requests) >= 2  # Some prompts took several steps.


@implementations
@pytest.mark.torch
def test_speculation(case, implementation):
    T, W, requests, drafts = 24, 3, case.requests(), case.drafts
    N, accepted, counts, steps = len(requests), [1] * len(requests), set(), 0
    # Every request has a slot for the state after each of W tokens.
    pools = case.pools(N * W)
    step = jax.jit(functools.partial(run_step, case, implementation=implementation), donate_argnums=1)

    while not all(len(r.generated) >= r.wanted for r in requests):
        running = [r for r in requests if r.arrival <= steps and len(r.generated) < r.wanted]
        parts, room = [], T
        for r in sorted(running, key=lambda r: not r.generated):
            known = len(r.prompt + r.generated)
            part = (r.rest() + (drafts[r.id][known : known + W - 1] if r.generated else []))[:room]
            if part:
                parts.append((r, part))
                room -= len(part)

        n, tokens = len(parts), np.zeros((1, T), np.int32)
        ends = np.cumsum([0, *(len(part) for _, part in parts)])
        tokens[0, : ends[-1]] = [token for _, part in parts for token in part]
        at = Step(
            cu_seqlens=np.full(N + 1, ends[-1], np.int32), state_indices=np.full((N, W), -1, np.int32),
            has_initial_state=np.zeros(N, bool), num_accepted_tokens=np.ones(N, np.int32), num_sequences=np.int32(n),
            num_decodes=np.int32(sum(bool(r.generated) for r, _ in parts)),
        )  # fmt: skip
        at.cu_seqlens[: n + 1] = ends
        at.state_indices[:n] = [range(r.id * W, r.id * W + W) for r, _ in parts]
        at.has_initial_state[:n] = [r.computed > 0 for r, _ in parts]
        at.num_accepted_tokens[:n] = [accepted[r.id] for r, _ in parts]
        logits, pools = step(case.model, pools, tokens, at)

        following = jnp.argmax(logits[0], axis=1).tolist()
        for (r, part), start, end in zip(parts, ends, ends[1:], strict=False):
            after, count = following[start:end], len(part)
            if r.generated:
                # A draft holds as long as it is what the model says, and so do those before it.
                count = 1
                while count < len(part) and part[count] == after[count - 1]:
                    count += 1
                r.generated += after[:count]
                accepted[r.id] = count
                counts.add(count)
            elif r.computed + count == len(r.prompt):
                r.generated.append(after[-1])
            r.computed += count
        steps += 1

    assert [r.generated[: r.wanted] for r in requests] == case.generated
    assert counts == {1, 2, 3}
    assert step._cache_size() == 1
