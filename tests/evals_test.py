# SPDX-License-Identifier: Apache-2.0
"""Scores are those of a plain loop, and the tasks' rules those that are published."""

import json
import math
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_test import opened
from flax import nnx
from tiny import TINY, tiny

from MaxText import data, decode, errors, evals, model, pyconfig, sharding, tokenizer, train

DATA = pathlib.Path(__file__).parent.parent.parent / "shared" / "data" / "eval"
LONGEST = 48


@pytest.fixture(scope="module")
def params():
  return jax.device_get(model.initialize(tiny(max_target_length=LONGEST), jax.random.key(3)))


def random_requests():
  """Requests of many lengths; some share all tokens but the last, one has a target of one token after one."""
  random = np.random.default_rng(0)
  requests = [evals.Request(random.integers(3, 259, a, np.int32), random.integers(3, 259, b, np.int32))
              for a, b in zip(random.integers(1, 30, 20), random.integers(1, 18, 20), strict=True)]
  context, stem = random.integers(3, 259, (2, 7), np.int32)
  requests += [evals.Request(context, np.array([*stem, last], np.int32)) for last in (5, 6, 7)]
  return [*requests, evals.Request(context[:1], stem[:1])]


def by_plain_loop(run, requests):
  """(log-probability, greedy) of each request from the full logits of its own row."""

  @jax.jit
  def forward(params, inputs):
    transformer = nnx.merge(run.graph, params)
    hidden_bte, _ = transformer(inputs, jnp.arange(LONGEST)[None], jnp.ones_like(inputs))
    return jax.nn.log_softmax(transformer.logits(hidden_bte))[0]

  found = []
  for context, target in requests:
    tokens = np.concatenate([context, target])[-LONGEST - 1:]
    inputs = jnp.asarray(np.pad(tokens[:-1], (0, LONGEST - len(tokens) + 1)))[None]
    with sharding.use(run.mesh, run.cfg.logical_axis_rules):
      logprobs = np.asarray(forward(run.params, inputs))[len(tokens) - 1 - len(target):len(tokens) - 1]
    found.append((logprobs[np.arange(len(target)), target].sum(), bool((logprobs.argmax(axis=1) == target).all())))
  return found


@pytest.fixture(scope="module")
def expected(params):
  run = opened(tiny(max_target_length=LONGEST, matmul_precision="highest"), params, jax.devices()[:1])
  requests = random_requests()
  likely = by_plain_loop(run, requests)
  best = int(np.argmax([score for score, _ in likely]))
  return requests, likely, best


@pytest.mark.parametrize("mesh", [
    {}, {"ici_fsdp_parallelism": 8},
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2, "ici_sequence_parallelism": 2},
])
def test_batched_scores_are_those_of_one_full_row_at_a_time(params, expected, mesh):
  devices = jax.devices()[:8 if mesh else 1]
  cfg = tiny(devices=len(devices), max_target_length=LONGEST, matmul_precision="highest", **mesh)
  run = opened(cfg, params, devices)
  requests, want, _ = expected
  scores, cut = evals.Scorer(cfg, run.mesh, run.graph).score(run.params, requests)
  assert cut == 0 and len(scores) == len(requests)
  np.testing.assert_allclose([s.logprob for s in scores], [logprob for logprob, _ in want], rtol=1e-5, atol=1e-4)
  assert [s.greedy for s in scores] == [greedy for _, greedy in want]


def test_greedy_is_seen_when_every_token_of_the_target_is_the_likeliest(params):
  cfg = tiny(max_target_length=LONGEST, matmul_precision="highest")
  run = opened(cfg, params, jax.devices()[:1])
  scorer, tokens = evals.Scorer(cfg, run.mesh, run.graph), [7]
  for _ in range(3):  # what the model itself would say
    options = [evals.Request(np.array(tokens, np.int32), np.array([t], np.int32)) for t in range(cfg.vocab_size)]
    scores, _ = scorer.score(run.params, options)
    assert sum(score.greedy for score in scores) == 1
    assert sum(math.exp(score.logprob) for score in scores) == pytest.approx(1.0, abs=1e-4)
    tokens.append(int(np.argmax([score.logprob for score in scores])))
  target = np.array(tokens[1:], np.int32)
  other = np.array([*target[:-1], (target[-1] + 1) % 300])
  (first, second), _ = scorer.score(run.params, [evals.Request(np.array([7]), x) for x in (target, other)])
  assert first.greedy and not second.greedy and second.logprob < first.logprob


def test_texts_that_are_too_long_lose_their_beginning_and_are_counted(params):
  cfg = tiny(max_target_length=LONGEST, matmul_precision="highest")
  run = opened(cfg, params, jax.devices()[:1])
  scorer = evals.Scorer(cfg, run.mesh, run.graph)
  context, target = np.arange(100, dtype=np.int32) + 3, np.arange(5, dtype=np.int32) + 9
  (long, short), cut = scorer.score(run.params, [
      evals.Request(context, target), evals.Request(context[-(LONGEST + 1 - 5):], target)])
  assert cut == 1 and long == short


def test_scores_do_not_depend_on_how_many_logits_stand_at_once_or_on_repeated_requests(params, monkeypatch):
  cfg = tiny(max_target_length=LONGEST, matmul_precision="highest")
  run = opened(cfg, params, jax.devices()[:1])
  requests = random_requests()
  want, _ = evals.Scorer(cfg, run.mesh, run.graph).score(run.params, requests)
  monkeypatch.setattr(evals, "LOGITS_BYTES", 1)
  scorer = evals.Scorer(cfg, run.mesh, run.graph)
  assert scorer.piece(16) == 1
  for _ in range(2):  # the second with nothing to compile
    got, _ = scorer.score(run.params, requests * 3)
    np.testing.assert_allclose([s.logprob for s in got], [s.logprob for s in want] * 3, rtol=1e-5)
    assert [s.greedy for s in got] == [s.greedy for s in want] * 3
  assert len(scorer.compiled) <= len(scorer.lengths())


def test_answers_of_one_token_to_one_question_are_one_row(params):
  cfg = tiny(max_target_length=LONGEST)
  run = opened(cfg, params, jax.devices()[:1])
  scorer, context = evals.Scorer(cfg, run.mesh, run.graph), np.arange(3, 23, dtype=np.int32)
  scorer.score(run.params, [evals.Request(context, np.array([t], np.int32)) for t in range(3, 7)])
  assert scorer.tokens == 20


def test_few_lengths_are_compiled_and_none_is_much_longer_than_its_rows():
  cfg = tiny(max_target_length=2048)
  lengths = evals.Scorer(cfg, sharding.make_mesh(cfg, jax.devices()[:1]), model.abstract(cfg)[0]).lengths()
  assert lengths[0] == 16 and lengths[-1] == 2048 and len(lengths) < 30 and lengths == sorted(set(lengths))
  assert all(b <= max(a + 16, 1.2 * a) for a, b in zip(lengths, lengths[1:], strict=False))


# --- Rules -----------------------------------------------------------------------------------------------------------


class Hand:
  """A scorer that answers from a list of log-probabilities (positive: greedy too) and keeps the requests."""

  def __init__(self, *logprobs):
    self.logprobs = logprobs

  def score(self, params, requests):
    del params
    self.texts = [(tokenizer.Byte().decode(r.context), tokenizer.Byte().decode(r.target)) for r in requests]
    assert len(requests) == len(self.logprobs) and all(r.context[0] == 1 for r in requests)
    return [evals.Score(-abs(x), x > 0) for x in self.logprobs], 0


def task(kind, tmp_path, rows, **keys):
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return evals.TASKS[kind](tiny(**keys), tokenizer.Byte(), str(path))


def test_lambada_asks_for_the_last_word_with_its_space_and_wants_every_token_likeliest(tmp_path):
  texts = ("He said \u201cI don\u2019t  know\u201d ", "a b\nc d\n", "x y")
  run = task("lambada", tmp_path, [{"text": text} for text in texts])
  hand = Hand(1.0, -2.0, 3.0)
  found = run(hand, None)
  assert hand.texts == [('He said "I don\'t', ' know"'), ("a b\nc", " d"), ("x", " y")]
  assert found["accuracy"] == 2 / 3 and found["rows"] == 3 and found["perplexity"] == pytest.approx(math.exp(2.0))


def test_boolq_compares_yes_and_no_after_paxs_prompt(tmp_path):
  rows = [{"passage": "P", "question": "is it", "answer": answer} for answer in (True, False, True)]
  hand = Hand(2.0, 1.0, 1.0, 2.0, 1.0, 1.0)  # the wrong and the right answer of each row; a tie is wrong
  found = task("boolq", tmp_path, rows)(hand, None)
  prompt = "P\nquestion: is it?\nanswer:"
  assert hand.texts[:4] == [(prompt, " no"), (prompt, " yes"), (prompt, " yes"), (prompt, " no")]
  assert found["accuracy"] == pytest.approx(1 / 3)


def test_boolq_takes_rows_of_choices_too(tmp_path):
  found = task("boolq", tmp_path, [{"query": "Q", "choices": ["no", "yes"], "gold": 1}])(Hand(2.0, 1.0), None)
  assert found["accuracy"] == 1.0 and found["rows"] == 1


def test_a_choice_counts_by_its_sum_and_by_its_sum_per_character(tmp_path):
  rows = [{"query": "Q:", "choices": ["ab", "abcdefgh"], "gold": 1}, {"query": "Q\n", "choices": ["x", "y"], "gold": 0}]
  hand = Hand(4.0, 5.0, 1.0, 2.0)
  found = task("choice", tmp_path, rows)(hand, None)
  assert hand.texts == [("Q:", " ab"), ("Q:", " abcdefgh"), ("Q", "\nx"), ("Q", "\ny")]
  assert found == {"accuracy": 0.5, "accuracy_norm": 1.0, "rows": 2, "cut": 0}


def test_context_and_target_are_tokenized_together_and_cut_where_the_context_ends():
  cfg, words = tiny(), tokenizer.train(["the cat sat on the mat. " * 50], 280)
  for context, target in (("the cat", " sat"), ("the cat ", "sat"), ("", "the")):
    pair = evals.encode_pair(cfg, words, context, target)
    assert pair.context[0] == words.bos_id
    assert words.decode([*pair.context, *pair.target]) == context + target
    if context:
      np.testing.assert_array_equal(pair.context[1:], words.encode(context.rstrip()))
  pair = evals.encode_pair(tiny(add_bos=False), words, "", "the cat")
  assert pair.context.tolist() == [words.eos_id] and words.decode(pair.target) == "the cat"


@pytest.mark.parametrize("kind, line, message", [
    ("lambada", '{"text": 1}', "rows.jsonl:2: text must be of type str"),
    ("lambada", "{", "rows.jsonl:2: no row with text"),
    ("lambada", '{"text": "one"}', "rows.jsonl:2: text has no last word"), ("lambada", "[]", "rows.jsonl:2: no row"),
    ("choice", '{"query": "q", "choices": ["a"], "gold": 1}', "rows.jsonl:2: choices must be texts and gold"),
    ("choice", '{"query": "q", "choices": [], "gold": 0}', "rows.jsonl:2: choices must be texts"),
    ("choice", '{"query": "q", "choices": ["a"], "gold": true}', "gold must be of type int"),
    ("choice", '{"query": "q", "choices": [" ", "b"], "gold": 0}', "rows.jsonl:2: choices must be texts"),
    ("choice", '{"query": "\\ud800", "choices": ["b"], "gold": 0}', "rows.jsonl:2: no row with query"),
    ("lambada", "[" * 100_000, "rows.jsonl:2: no row with text"),
])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, kind, line, message):
  good = {"lambada": '{"text": "a b"}', "choice": '{"query": "q", "choices": ["a", "b"], "gold": 1}'}[kind]
  path = tmp_path / "rows.jsonl"
  path.write_text(f"{good}\n{line}\n")
  with pytest.raises(errors.DataError) as error:
    evals.TASKS[kind](tiny(), tokenizer.Byte(), str(path))
  assert message in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("kind", evals.TASKS)
def test_a_file_without_rows_is_one_line(tmp_path, kind):
  path = tmp_path / "empty.jsonl"
  path.write_text("\n\n")
  with pytest.raises(errors.DataError, match="empty.jsonl (has no rows|holds no text)") as error:
    evals.TASKS[kind](tiny(), tokenizer.Byte(), str(path))
  assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("entry, message", [
    ("lambda:x.jsonl", "eval_tasks=lambda:x.jsonl must begin with one of .* Did you mean lambada"),
    ("lambada", "eval_tasks=lambada needs a path"), ("lambada:none.jsonl", "the file does not exist"),
])
def test_a_wrong_task_is_refused_before_jax_is_imported(entry, message):
  with pytest.raises(errors.ConfigError, match=message):
    pyconfig.load([f"eval_tasks=[{entry}]"], need_run_name=False)


@pytest.mark.skipif(not DATA.exists(), reason="the evaluation files are not here")
@pytest.mark.parametrize("kind, name, rows", [
    ("lambada", "lambada_test", 5153), ("boolq", "boolq", 3270), ("choice", "arc_easy", 2376),
    ("choice", "piqa", 1838)])
def test_every_row_of_the_real_files_is_read(kind, name, rows):
  class Count:
    def score(self, params, requests):
      del params
      return [evals.Score(-1.0, False)] * len(requests), 0

  found = evals.TASKS[kind](tiny(), tokenizer.Byte(), str(DATA / f"{name}.jsonl"))(Count(), None)
  assert found["rows"] == rows


# --- In training, and alone ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """A directory of runs with one run, "mine", that had tasks at its evaluations; and the tasks' file."""
  directory = tmp_path_factory.mktemp("evals")
  (directory / "last.jsonl").write_text('{"text": "import jax"}\n{"text": "def test_it"}\n{"text": "a b"}\n')
  keys = TINY | {"run_name": "mine", "base_output_directory": directory, "dataset_type": "text", "steps": 4,
                 "dataset_path": pathlib.Path(data.__file__).parent, "eval_interval": 2, "max_target_length": 64,
                 "per_device_batch_size": 1.0, "eval_tasks": [f"lambada:{directory}/last.jsonl"]}  # fmt: skip
  train.main(pyconfig.load(["configs/base.yml"] + [f"{key}={pyconfig.text(value)}" for key, value in keys.items()]))
  return directory


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_tasks_run_at_each_evaluation_and_stand_in_its_record(runs):
  found = lines(runs / "mine" / "metrics" / "eval.jsonl")
  assert [row["step"] for row in found] == [2, 4]
  assert all(row["eval/lambada/last/rows"] == 3 and 0 <= row["eval/lambada/last/accuracy"] <= 1 for row in found)
  assert found[0]["eval/lambada/last/perplexity"] != found[1]["eval/lambada/last/perplexity"]


def test_alone_they_give_what_training_logged_and_leave_a_record(runs, capsys):
  evals.main(pyconfig.load(
      ["run_name=mine", f"base_output_directory={runs}", f"eval_tasks=[perplexity,lambada:{runs}/last.jsonl]",
       "jax_cache_dir=", "eval_per_device_batch_size=1.0"], reopen=True))
  out = capsys.readouterr().out.splitlines()
  assert out[0].startswith("perplexity: loss: ") and out[1].startswith("lambada/last: accuracy: ")
  logged = lines(runs / "mine" / "metrics" / "eval.jsonl")[-1]
  loss, last = lines(runs / "mine" / "evals.jsonl")
  assert loss["loss"] == pytest.approx(logged["eval/loss"], rel=1e-6) and loss["step"] == 4
  assert loss["accuracy"] == pytest.approx(logged["eval/accuracy"], rel=1e-6)
  assert last["perplexity"] == pytest.approx(logged["eval/lambada/last/perplexity"], rel=1e-5)
  assert last["task"] == "lambada" and last["path"] == f"{runs}/last.jsonl" and len(last["sha256"]) == 64
  assert last["tokens"] == 10 + 11 + 3 and "rows/s" in out[1] and "tokens/s" in out[0]


def test_perplexity_of_a_file_is_in_bits_per_byte_too(runs, tmp_path, capsys):
  (tmp_path / "text.txt").write_text("some text \u00e9 " * 40)
  evals.main(pyconfig.load(
      ["run_name=mine", f"base_output_directory={runs}", "jax_cache_dir=", "eval_per_device_batch_size=1.0",
       f"eval_tasks=[perplexity:{tmp_path}/text.txt]"], reopen=True))
  found = lines(runs / "mine" / "evals.jsonl")[-1]
  size = len(("some text \u00e9 " * 40).encode())
  assert found["tokens"] == size + 1  # BOS and EOS, and one less to predict
  assert found["bits_per_byte"] == pytest.approx(found["loss"] * (size + 1) / math.log(2) / size)
  assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and capsys.readouterr().out


def test_a_signal_ends_the_tasks_between_two_batches(params, tmp_path):
  (tmp_path / "last.jsonl").write_text('{"text": "a b"}\n')
  cfg = tiny(eval_tasks=[f"lambada:{tmp_path}/last.jsonl"], max_target_length=LONGEST)
  run = opened(cfg, params, jax.devices()[:1])
  assert evals.open_tasks(cfg, run.mesh, run.graph, tokenizer.Byte(), lambda: True)(run.params) is None
  assert evals.open_tasks(cfg, run.mesh, run.graph, tokenizer.Byte())(run.params)["lambada/last/rows"] == 1


def test_no_task_and_no_tokenizer_are_one_line():
  with pytest.raises(errors.ConfigError, match=r"eval_tasks=\[\] asks for nothing"):
    evals.main(pyconfig.load([], need_run_name=False))
  cfg = tiny()
  with pytest.raises(errors.ConfigError, match="dataset_type=synthetic has none"):
    evals.read_tasks(cfg.replace(eval_tasks=[f"lambada:{__file__}"]), None)


def test_two_tasks_of_one_name_are_refused(tmp_path):
  paths = [tmp_path / name / "rows.jsonl" for name in "ab"]
  for path in paths:
    path.parent.mkdir()
    path.write_text('{"text": "a b"}\n')
  with pytest.raises(errors.ConfigError, match="b/rows.jsonl: another is called lambada/rows too"):
    evals.read_tasks(tiny(eval_tasks=[f"lambada:{path}" for path in paths]), tokenizer.Byte())


def test_a_run_on_computed_data_has_a_perplexity_but_no_bytes(params):
  cfg = tiny(eval_tasks=["perplexity"], max_target_length=LONGEST)
  run = opened(cfg, params, jax.devices()[:1])
  found = evals.open_tasks(cfg, run.mesh, run.graph, None)(run.params)
  assert found["perplexity/tokens"] == 64 * LONGEST and "perplexity/bytes" not in found


# --- lm-evaluation-harness -------------------------------------------------------------------------------------------


@pytest.fixture
def lm(monkeypatch):
  """The adapter, on a class LM that knows nothing; the harness itself runs in end_to_end/test_evals.py."""
  module = types.ModuleType("lm_eval.api.model")
  module.LM = object
  for name, value in (("lm_eval", types.ModuleType("lm_eval")), ("lm_eval.api", types.ModuleType("lm_eval.api")),
                      ("lm_eval.api.model", module)):
    monkeypatch.setitem(sys.modules, name, value)
  cfg = tiny(max_target_length=128, per_device_batch_size=1.0, embedding_init_std=0.5)
  run = opened(cfg, jax.device_get(model.initialize(cfg, jax.random.key(5))), jax.devices()[:1])
  run = run._replace(tokenizer=tokenizer.Byte())
  return run, evals.lm_eval_model(run)


def asked(*args):
  return types.SimpleNamespace(args=args)


def test_a_whole_text_is_scored_in_pieces_each_token_once(lm):
  run, lm = lm
  text = "".join(chr(97 + i * i % 26) for i in range(300))
  (short, long) = lm.loglikelihood_rolling([asked(text[:100]), asked(text)])
  assert short == pytest.approx(lm.loglikelihood([asked("", text[:100])])[0][0], abs=1e-4)
  ids = [1, *run.tokenizer.encode(text)]
  pieces = [(ids[:1], ids[1:129]), (ids[128:129], ids[129:257]), (ids[172:257], ids[257:])]
  scores, _ = evals.Scorer(run.cfg, run.mesh, run.graph).score(
      run.params, [evals.Request(np.array(a), np.array(b)) for a, b in pieces])
  assert long == pytest.approx(sum(score.logprob for score in scores), abs=1e-4)
  assert lm.loglikelihood_rolling([asked("")]) == [0.0]


def test_generation_is_greedy_and_ends_before_a_stop(lm):
  run, lm = lm
  whole, = lm.generate_until([asked("ab", {"max_gen_toks": 20})])
  prompt = decode.encode(run, "ab")
  found = next(decode.Decoder(run).generate([prompt], max_predict_length=20))
  assert whole == decode.continuation_text(run.tokenizer, prompt, found.tokens) and len(whole) > 2
  stop = whole[2]
  options = {"max_gen_toks": 20, "until": [stop, "\n\n"], "do_sample": False}
  assert lm.generate_until([asked("xyz", {"max_gen_toks": 5}), asked("ab", options)])[1] == whole.split(stop)[0]
  with pytest.raises(errors.ConfigError, match="decoding is greedy"):
    lm.generate_until([asked("ab", {"do_sample": True})])


def test_the_harness_is_asked_for_in_one_line_where_it_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  with pytest.raises(errors.ConfigError, match="pip install lm_eval"):
    evals.lm_eval_model(None)
