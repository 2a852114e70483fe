"""examples/evaluate.py: tasks of lm-eval on the models of the examples, `nox -s host-lm-eval`."""

import json
import math

import numpy as np
import pytest
from lm_eval.api.instance import Instance

import evaluate
import generation
import kimi_linear
import mamba2
import olmo_hybrid
import qwen3_5
import xlstm_7b

MODELS = {model.__name__: model for model in (qwen3_5, kimi_linear, mamba2, olmo_hybrid, xlstm_7b)}
PAIRS = [("one and", " two"), ("a context of more words " * 9, " end"), ("x", "yz"), ("", "no context"), ("a ", "b")]
QUESTIONS = [
    dict(text="1 + 1 =", choices=[" 2", " 3"], answer=0),
    dict(text="a", choices=["b", "c"], answer=1),
    dict(text="the same, but longer than", choices=[" the", " a few"], answer=0),
]
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    "target_delimiter: ''\nmetric_list:\n  - metric: acc\n",
    "text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: bits_per_byte\n",
    "answer": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{choices[answer]}}'\n"
    "generation_kwargs:\n  until: ['e']\n  max_gen_toks: 5\nmetric_list:\n  - metric: exact_match\n",
}


@pytest.fixture(scope="module")
def lm_of():
    made = {}

    def make(name):
        return made.setdefault(name, evaluate.of_bytes(MODELS[name], batch=3))

    return make


def ask(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def alone(lm, tokens, count):
    """Return the log-likelihood of the last tokens of a row that is read alone, without padding, and the logits."""
    row = np.array([tokens[:-1]], np.int32)
    x, _ = lm.run(lm.weights, lm.start(1, row.shape[1]), row, np.zeros_like(row))
    logits = np.asarray(generation.logits(x, lm.weights, lm.cap), np.float64)[0, -count:]
    log_p = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    return log_p[np.arange(count), tokens[-count:]].sum(), bool((logits.argmax(1) == tokens[-count:]).all())


@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_are_rows_alone(lm_of, name):
    """Log-likelihoods are those of each row alone, up to 2e-6 of them, in the order of the requests."""
    lm = lm_of(name)
    found = lm.loglikelihood([ask("loglikelihood", *pair) for pair in PAIRS], disable_tqdm=True)
    for (context, continuation), (log_p, likeliest) in zip(PAIRS, found, strict=True):
        # lm-eval counts the spaces at the end of a context to the continuation.
        count = len(continuation) + len(context) - len(context.rstrip())
        tokens = [*context.encode(), *continuation.encode()] if context else [0, *continuation.encode()]
        want, same = alone(lm, tokens, count)
        assert abs(log_p - want) <= 2e-6 * abs(want)
        assert likeliest == same
    texts = [context for context, _ in PAIRS if context]
    found = lm.loglikelihood_rolling([ask("loglikelihood_rolling", text) for text in texts])
    for text, log_p in zip(texts, found, strict=True):
        want, _ = alone(lm, [0, *text.encode()], len(text))
        assert abs(log_p - want) <= 2e-6 * abs(want)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_generates_the_likeliest_tokens(lm_of, name):
    """In a batch as alone, up to the first text that ends an answer, and no more tokens than are asked for."""
    lm, texts = lm_of(name), ["one", "two and some more words", "a", "b"]
    found = lm.generate_until([ask("generate_until", text, dict(max_gen_toks=4 + i)) for i, text in enumerate(texts)])
    for i, (text, said) in enumerate(zip(texts, found, strict=True)):
        tokens, ids = generation.pad([[*text.encode()]], 1)
        past = lm.start(1, tokens.shape[1] + 4 + i)
        new = generation.generate(lm.run, lm.weights, past, tokens, ids, 4 + i, 1)[0].tolist()
        assert said == lm.decode(new[: new.index(0)] if 0 in new else new)
    stop = found[1][1]
    (short,) = lm.generate_until([ask("generate_until", texts[1], dict(max_gen_toks=5, until=[stop]))])
    assert short == found[1].partition(stop)[0] != found[1]
    with pytest.raises(ValueError, match=r"^`do_sample` must be False"):
        lm.generate_until([ask("generate_until", "a", dict(do_sample=True))])


def test_the_program(tmp_path, monkeypatch, capsys):
    """Its results on a task of choices, of texts and of answers are those of rows alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in TASKS.items():
        files = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files: {data}\n  cache_dir: {tmp_path}\ntest_split: train\n"
        )
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{files}{text}")
    found = evaluate.main(["qwen3_5", "--random", "--include", str(tmp_path), "--tasks", *TASKS, "--batch", "2"])
    lm = evaluate.of_bytes(qwen3_5, 1)
    best = lambda q: int(np.argmax([alone(lm, [*(q["text"] + x).encode()], len(x))[0] for x in q["choices"]]))
    assert found["choice"]["acc,none"] == np.mean([best(q) == q["answer"] for q in QUESTIONS])
    total = sum(alone(lm, [0, *q["text"].encode()], len(q["text"]))[0] for q in QUESTIONS)
    bits = -total / sum(len(q["text"]) for q in QUESTIONS) / math.log(2)
    assert abs(found["text"]["bits_per_byte,none"] - bits) < 2e-6 * bits
    assert found["answer"]["exact_match,none"] == 0
    assert "bits_per_byte" in capsys.readouterr().out


def test_a_tokenizer_of_a_checkpoint(tmp_path, monkeypatch):
    """Tokens, and the token that ends a text, are those of the checkpoint's files."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(dict(text_config=dict(eos_token_id=[0, 1]))))
    monkeypatch.setattr(qwen3_5, "load", lambda directory: qwen3_5.random_model(4))
    lm = evaluate.of_checkpoint(qwen3_5, tmp_path, batch=1)
    assert (lm.eot_token_id, lm.tok_encode("two one"), lm.decode([3, 2])) == (0, [2, 1], "three two")
    (found,) = lm.loglikelihood([ask("loglikelihood", "one two", " three")], disable_tqdm=True)
    want, _ = alone(lm, [1, 2, 3], 1)
    assert abs(found[0] - want) <= 2e-6 * abs(want)
