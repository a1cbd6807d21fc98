# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache is the full forward pass, and what it prints can be relied on."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sharding_test import LAYOUTS, MODEL
from tiny import TINY, tiny

from MaxText import data, decode, errors, model, optim, pyconfig, sharding, tokenizer, train

ROOT = pathlib.Path(__file__).parent.parent
SIZES = {"max_target_length": 192, "base_num_query_heads": 4, "base_num_kv_heads": 2, "per_device_batch_size": 2.0,
         "eval_per_device_batch_size": 8.0, "matmul_precision": "highest"}  # fmt: skip
VARIANTS = {
    "rope, grouped heads, norms on queries and keys": {"use_qk_norm": True},
    "rope of Llama 3.1, one head for all": {
        "base_num_kv_heads": 1, "rope_scaling": "llama3", "rope_scaling_original_length": 64},
    "interleaved rope, layers unrolled, query scale": {
        "position_embedding": "rope_interleaved", "scan_layers": False, "query_scaling": "per_dim"},
    "learned positions, biases, layer norms": {
        "position_embedding": "learned", "normalization": "layer", "attention_bias": "all", "mlp_bias": True,
        "base_num_kv_heads": 4, "logits_bias": True},
    "sinusoidal positions, parallel block, caps": {
        "position_embedding": "sinusoidal", "block_layout": "parallel", "attn_logits_soft_cap": 20.0,
        "final_logits_soft_cap": 10.0},
    "relative bias, tied logits": {
        "position_embedding": "relative_bias", "logits_via_embedding": True, "normalize_embedding_logits": True},
    "no positions": {"position_embedding": "none"},
}  # fmt: skip
PROMPT_LENGTHS = (1, 3, 64, 65, 100)


def train_steps(cfg, steps):
  """Parameters after `steps` steps on synthetic data, on one device."""
  mesh = sharding.make_mesh(cfg, jax.devices()[:1])
  with sharding.use(mesh, cfg.logical_axis_rules):
    state = train.fresh_state(cfg, train.abstract_state(cfg, mesh)[1])
    step = train.lower_train_step(cfg, mesh).compile()
    where = train.abstract_batch(cfg, mesh, cfg.global_batch_size)["inputs"].sharding
    with data.batches(data.open(cfg).train, 0, cfg.global_batch_size, where) as batches:
      for done in range(steps):
        state, _ = step(state, next(batches), optim.hyper(cfg, done))
  return jax.device_get(state["params"])


def opened(cfg, params, devices):
  """An Opened of parameters in memory."""
  cfg = cfg.replace(logical_axis_rules=[["length", []]])
  mesh = sharding.make_mesh(cfg, devices)
  with sharding.use(mesh, cfg.logical_axis_rules):
    graph, abstract = model.abstract_parameters(cfg, mesh)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, abstract)
  return decode.Opened(cfg, mesh, graph, params, None, None)


def prompts_of(cfg, lengths=PROMPT_LENGTHS):
  rows = data.open(cfg).eval.rows(0, len(lengths))["inputs"]
  return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def full_logprobs(run, tokens):
  """Log-probabilities [t, v] of a whole text by one forward pass without cache."""

  @jax.jit
  def forward(params, tokens_bt):
    transformer = nnx.merge(run.graph, params)
    hidden_bte, _ = transformer(tokens_bt, jnp.arange(tokens_bt.shape[1])[None], jnp.ones_like(tokens_bt))
    return jax.nn.log_softmax(transformer.logits(hidden_bte))

  tokens = np.pad(tokens, (0, run.cfg.max_target_length - len(tokens)))  # one compilation
  with sharding.use(run.mesh, run.cfg.logical_axis_rules):
    return np.asarray(forward(jax.device_get(run.params), tokens[None]))[0]


# --- Cached = full ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_a_batch_of_uneven_prompts_is_the_full_forward_pass_token_for_token(variant):
  cfg = tiny(**(SIZES | VARIANTS[variant]))
  run = opened(cfg, train_steps(cfg, 8), jax.devices()[:1])
  prompts = prompts_of(cfg)
  found = list(decode.Decoder(run).generate(prompts, max_predict_length=40))
  assert len({tuple(x.tokens) for x in found}) > 1  # they say something of their own
  for prompt, continuation in zip(prompts, found, strict=True):
    assert len(continuation.tokens) == 40 and not continuation.ended
    logprobs = full_logprobs(run, np.concatenate([prompt, continuation.tokens]))
    logprobs = logprobs[len(prompt) - 1:len(prompt) + 39]
    np.testing.assert_array_equal(continuation.tokens, logprobs.argmax(axis=1))
    np.testing.assert_allclose(continuation.logprobs, logprobs[np.arange(40), continuation.tokens], atol=2e-5)


@pytest.fixture(scope="module")
def small():
  """(config keys, parameters, prompts, Continuations on one device) of the model that every mesh is tried with."""
  keys = MODEL | {"max_target_length": 192, "per_device_batch_size": 2.0, "matmul_precision": "highest"}
  cfg = tiny(**keys)
  params, prompts = train_steps(cfg, 8), prompts_of(cfg, (1, 3, 64, 65, 100, 7, 8, 9))
  run = opened(cfg.replace(eval_per_device_batch_size=8.0), params, jax.devices()[:1])
  return keys, params, prompts, list(decode.Decoder(run).generate(prompts, max_predict_length=20))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_this_mesh_decodes_what_one_device_does(layout, small):
  keys, params, prompts, expected = small
  cfg = tiny(devices=8, **(keys | {"eval_per_device_batch_size": 1.0} | LAYOUTS[layout] | {
      "per_device_batch_size": 1.0, "gradient_accumulation_steps": 1}))
  run = opened(cfg, params, jax.devices())
  for got, want in zip(decode.Decoder(run).generate(prompts, max_predict_length=20), expected, strict=True):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


def test_the_loss_of_training_is_what_the_cached_steps_assign():
  """Token by token through the cache, the evaluation set costs what eval_step says it does."""
  cfg = tiny(**(SIZES | {"max_target_length": 32, "eval_steps": 1}))
  run = opened(cfg, train_steps(cfg, 8), jax.devices()[:1])
  batch = data.open(cfg).eval.rows(0, 8)
  with sharding.use(run.mesh, run.cfg.logical_axis_rules):
    sums = train.eval_step(run.cfg, run.graph, run.params, jax.tree.map(jnp.asarray, batch))
    extend = jax.jit(functools.partial(decode.extend, run.cfg, run.graph))
    cache, nll = model.empty_cache(run.cfg, 8, 32), 0.0
    for at in range(32):
      token, position, segment = (batch[name][:, at:at + 1] for name in ("inputs", "positions", "segmentations"))
      logits_bv, cache = extend(run.params, cache, token, position, segment)
      nll -= float(jax.nn.log_softmax(logits_bv)[np.arange(8), batch["targets"][:, at]].sum())
  assert nll == pytest.approx(float(sums["nll"]), rel=1e-6) and nll < 8 * 32 * np.log(cfg.vocab_size)


# --- Batches and compilation -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytes_run():
  """An Opened with a byte tokenizer and untrained weights: every token is about as likely as any other."""
  cfg = tiny(vocab_size=300, max_target_length=256, eval_per_device_batch_size=4.0, embedding_init_std=0.5)
  run = opened(cfg, jax.device_get(model.initialize(cfg, jax.random.key(1))), jax.devices()[:1])
  return run._replace(tokenizer=tokenizer.Byte())


def with_keys(run, **keys):
  return run._replace(cfg=run.cfg.replace(**keys))


def test_prompts_of_all_lengths_share_one_compilation(bytes_run):
  decoder = decode.Decoder(bytes_run)
  for length in (1, 2, 63, 64, 17):
    list(decoder.generate([np.arange(length) + 3], max_predict_length=length % 7 + 1))
  assert len(decoder.compiled) == 1


def test_neither_batch_nor_order_changes_what_is_drawn(bytes_run):
  run = with_keys(bytes_run, decode_sampling_strategy="weighted", decode_seed=7)
  prompts = [bytes_run.tokenizer.encode(text) for text in ("a", "bcd", "a" * 50, "xyz", "q")]
  together = list(decode.Decoder(run).generate(prompts, max_predict_length=12))  # batches of 4 and 1
  assert len({x.tokens.tobytes() for x in together}) == 5
  alone = [next(decode.Decoder(run).generate([p], seeds=[i], max_predict_length=12)) for i, p in enumerate(prompts)]
  for one, other in zip(together, alone, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
  again = list(decode.Decoder(with_keys(run, decode_seed=8)).generate(prompts, max_predict_length=12))
  assert all(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(again, together, strict=True))


def test_a_text_ends_with_eos_while_others_go_on(bytes_run):
  prompts = [bytes_run.tokenizer.encode(text) for text in ("a", "bcd", "xyz")]
  plain = list(decode.Decoder(bytes_run).generate(prompts, max_predict_length=30))
  stop = int(plain[1].tokens[4])

  class Words(tokenizer.Byte):
    eos_id = stop

  found = list(decode.Decoder(bytes_run._replace(tokenizer=Words())).generate(prompts, max_predict_length=30))
  for got, want in zip(found, plain, strict=True):
    length = want.tokens.tolist().index(stop) + 1 if stop in want.tokens else 30
    np.testing.assert_array_equal(got.tokens, want.tokens[:length])
    np.testing.assert_allclose(got.logprobs, want.logprobs[:length], atol=1e-6)
    assert got.ended == (stop in want.tokens)
  assert len(found[1].tokens) <= 5 and found[1].ended


def test_ids_that_are_no_piece_are_never_chosen(bytes_run):
  run = with_keys(bytes_run, decode_sampling_strategy="weighted", decode_sampling_temperature=100.0)
  found = list(decode.Decoder(run).generate([[5]] * 4, max_predict_length=200))
  tokens = np.concatenate([x.tokens for x in found])
  assert tokens.max() < 259 < run.cfg.vocab_size and len(set(tokens.tolist())) > 150


def test_a_prompt_that_leaves_no_room_is_refused(bytes_run):
  message = "max_predict_length=57: with a prompt of 200 tokens .* max_target_length=256"
  with pytest.raises(errors.ConfigError, match=message):
    list(decode.Decoder(bytes_run).generate([np.full(200, 5)], max_predict_length=57))


# --- Sampling, against NumPy -----------------------------------------------------------------------------------------

LOGITS = np.array([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 0.4, 1.0], np.float32)


def draws(**keys):
  """(how often each of 20,000 draws gave each token, log-probabilities reported)."""
  cfg = tiny(vocab_size=8, **keys)
  count = 20_000
  logits_bv = jnp.tile(jnp.asarray(LOGITS), (count, 1))
  tokens, logprobs = decode.sample(cfg, 8, logits_bv, jnp.arange(count, dtype=jnp.uint32), 3)
  np.testing.assert_allclose(logprobs, (LOGITS - np.log(np.exp(LOGITS).sum()))[np.asarray(tokens)], atol=1e-6)
  return np.bincount(tokens, minlength=8) / count


def softmax(logits):
  weights = np.exp(logits - logits.max())
  return weights / weights.sum()


def assert_drawn_from(found, probs):
  np.testing.assert_array_equal(found[probs == 0], 0)
  assert np.all(np.abs(found - probs) < 5 * np.sqrt(probs * (1 - probs) / 20_000) + 1e-9), (found, probs)  # 5 sigma


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_weighted_draws_follow_the_softmax_at_the_temperature(temperature):
  found = draws(decode_sampling_strategy="weighted", decode_sampling_temperature=temperature)
  assert_drawn_from(found, softmax(LOGITS / temperature))


@pytest.mark.parametrize("k", [1, 3, 8, 100])
def test_topk_draws_only_from_the_k_likeliest(k):
  probs = softmax(LOGITS)
  probs[np.argsort(-LOGITS)[k:]] = 0
  assert_drawn_from(draws(decode_sampling_strategy="topk", decode_sampling_top_k=k), probs / probs.sum())


@pytest.mark.parametrize("p", [1e-6, 0.4, 0.75, 0.9, 1.0])
def test_nucleus_draws_only_from_the_fewest_that_reach_the_probability(p):
  probs, total, kept = softmax(LOGITS), 0.0, []
  for token in np.argsort(-LOGITS):
    if total < p:
      kept.append(token)
    total += probs[token]
  assert 1 <= len(kept) <= 8
  probs[[t for t in range(8) if t not in kept]] = 0
  assert_drawn_from(draws(decode_sampling_strategy="nucleus", decode_sampling_nucleus_p=p), probs / probs.sum())


def test_greedy_takes_the_likeliest():
  assert draws(decode_sampling_strategy="greedy").tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """A directory of runs with one run, "mine": 20 steps on our source, bytes as tokens."""
  directory = tmp_path_factory.mktemp("runs")
  keys = TINY | {"run_name": "mine", "base_output_directory": directory, "dataset_type": "text", "steps": 20,
                 "dataset_path": ROOT / "MaxText", "max_target_length": 128, "per_device_batch_size": 1.0,
                 "checkpoint_period": 20, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2,
                 "ici_data_parallelism": 2}  # fmt: skip
  train.main(pyconfig.load(["configs/base.yml"] + [f"{key}={pyconfig.text(value)}" for key, value in keys.items()]))
  return directory


def load(runs, *argv):
  argv = [f"base_output_directory={runs}", "jax_cache_dir=", *argv]
  return pyconfig.load(["configs/base.yml", *argv], need_run_name=False, reopen=True)


def test_a_prompt_is_continued_with_the_runs_own_model_and_tokenizer(runs, capsys):
  decode.main(load(runs, "run_name=mine", "prompt=base_", "max_predict_length=9"))
  out, err = capsys.readouterr()
  assert out.startswith("base_") and out.endswith("\n") and "warning" not in err
  assert "mine/checkpoints/20" in err and "decode: prefill 6 tokens" in err and "then 8 tokens" in err
  run = decode.open_run(load(runs, "run_name=mine"))
  prompt = decode.encode(run, "base_")
  assert prompt.tolist() == [1, *(b + 3 for b in b"base_")]
  found = next(decode.Decoder(run).generate([prompt], max_predict_length=9))
  assert out == "base_" + decode.continuation_text(run.tokenizer, prompt, found.tokens) + "\n"


def test_several_prompts_come_out_one_after_the_other_and_as_json(runs, tmp_path, capsys):
  (tmp_path / "prompts.jsonl").write_text('{"prompt": "steps: "}\n\n{"prompt": "two\\nlines é"}\n')
  decode.main(load(runs, "run_name=mine", f"prompt_file={tmp_path}/prompts.jsonl", "max_predict_length=5",
                   f"decode_output_file={tmp_path}/out.jsonl", "decode_num_samples=2"))
  out = capsys.readouterr().out
  rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
  assert [row["prompt"] for row in rows] == ["steps: "] * 2 + ["two\nlines é"] * 2
  assert all(len(row["tokens"]) == len(row["logprobs"]) <= 5 for row in rows)
  assert out == "".join(f"--- {i + 1} of 4\n{row['prompt']}{row['text']}\n" for i, row in enumerate(rows))


def test_parameters_from_a_path_bring_their_config_and_tokenizer(runs, capsys):
  decode.main(load(runs, f"load_parameters_path={runs}/mine", "prompt=base_", "max_predict_length=5"))
  named = capsys.readouterr().out
  decode.main(load(runs, "run_name=mine", "prompt=base_", "max_predict_length=5"))
  assert capsys.readouterr().out == named


def test_random_weights_come_with_a_warning(runs, capsys):
  decode.main(load(runs, *(f"{key}={pyconfig.text(value)}" for key, value in (TINY | {"run_name": ""}).items()),
                   "max_target_length=128", "max_predict_length=3", "prompt=x", "eval_per_device_batch_size=1.0"))
  out, err = capsys.readouterr()
  assert out.startswith("x") and "warning: these are random weights. Give run_name or load_parameters_path" in err


@pytest.mark.parametrize("argv, kind, message", [
    (["run_name=other"], errors.CheckpointError, "run_name=other: .*other holds no checkpoint. Train it first"),
    (["run_name=mime"], errors.CheckpointError, "Did you mean mine"),
    (["load_parameters_path=tests"], errors.CheckpointError, "load_parameters_path=tests holds no checkpoint"),
    (["run_name=mine", "base_emb_dim=64"], errors.ConfigError,
     r"embedding_ve as float32\(320, 32\), this config as .*\(320, 64\)"),
    (["run_name=mine", "max_predict_length=500"], errors.ConfigError, "predict_length=500: .* max_target_length=128"),
    (["run_name=mine", "add_bos=false", "prompt="], errors.ConfigError, "prompt= has no token"),
    (["run_name=mine", "decode_output_file=/nowhere/x"], errors.StorageError, "file=/nowhere/x cannot be"),
])
def test_what_cannot_be_decoded_is_said_in_one_line(runs, argv, kind, message):
  with pytest.raises(kind, match=message) as error:
    decode.main(load(runs, *argv))
  assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', 'a.jsonl line 2 is no {"prompt"'),
    ("a.jsonl", "{\n", "line 1 is no"), ("a.txt", "\n \n", "has no text in it"),
    ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
])
def test_a_bad_prompt_file_is_one_line(tmp_path, name, content, message):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(errors.DataError) as error:
    decode.read_prompts(pyconfig.load([f"prompt_file={path}"], need_run_name=False))
  assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_half_a_character_in_a_prompt_is_replaced(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"prompt": "a\\ud800b \\ud83d\\ude00"}\n')
  cfg = pyconfig.load([f"prompt_file={tmp_path}/a.jsonl"], need_run_name=False)
  assert decode.read_prompts(cfg) == ["a\ufffdb \U0001f600"]
  assert decode.read_prompts(pyconfig.load(["prompt=a\udcffb"], need_run_name=False)) == ["a\ufffdb"]


def test_the_command_ends_with_the_documented_exit_codes(runs):
  environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}

  def run(*argv):
    command = [sys.executable, ROOT / "MaxText" / "decode.py", "configs/base.yml", f"base_output_directory={runs}"]
    return subprocess.run([*command, *argv], cwd=runs, env=environment, capture_output=True, text=True, check=False)

  done = run("run_name=mine", "prompt=base_", "max_predict_length=4")  # on one device; it was trained on eight
  assert done.returncode == 0 and done.stdout.startswith("base_") and "devices: 1 x cpu" in done.stderr
  gone = run("run_name=gone")
  assert gone.returncode == 3 and gone.stderr.splitlines()[-1].startswith("CheckpointError: run_name=gone: ")
  wrong = run("run_name=mine", "decode_sampling_strategy=top")
  assert wrong.returncode == 2 and "must be one of" in wrong.stderr and "Traceback" not in wrong.stderr
