# SPDX-License-Identifier: Apache-2.0
"""Scores a model: perplexity, last words, choices; of any checkpoint, or at every evaluation of a training run.

  python3 MaxText/evals.py configs/base.yml run_name=NAME eval_tasks=[lambada:lambada_test.jsonl,choice:arc.jsonl]

A task makes requests: a context and what should follow it. Both are tokenized together and cut where the context's own
tokens end; white space at the context's end goes to what follows (as lm-evaluation-harness does). BOS comes first where
documents had one in training. Texts longer than max_target_length lose their beginning. A choice counts by the sum of
the log-probabilities of all its tokens.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  CONFIG = interpreter.start(need_run_name=False, reopen=True)

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from MaxText import data, decode, diagnostics, errors, model, sharding, sources

CPU_TOKENS = 1024  # in a batch: on CPU more at once are no faster
LOGITS_BYTES = 1 << 28  # most float32 logits that stand on a device at once
PIECE = 8  # target tokens of a row whose logits are computed at once, unless that were more bytes
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")


class Request(NamedTuple):
  """Token ids of a context (BOS included, never empty) and of what should follow it (never empty)."""

  context: np.ndarray
  target: np.ndarray


class Interrupted(Exception):
  """stop() of Scorer has said so."""


class Score(NamedTuple):
  """Natural log-probability of the target after its context, and whether each of its tokens was the likeliest."""

  logprob: float
  greedy: bool


# --- The engine ------------------------------------------------------------------------------------------------------


def score_step(cfg, graph, piece, params, tokens_bt, positions_bt, segments_bt, at_bk, targets_bk, count):
  """(log-probability, whether it is the likeliest) [b, k] of token targets_bk[b, k] behind position at_bk[b, k].

  Logits are computed at those positions alone, `piece` of them at a time and of the first `count` pieces only.
  """
  transformer = nnx.merge(graph, params)
  hidden_bte, _ = transformer(tokens_bt, positions_bt, segments_bt)
  head = transformer.head()

  def score_piece(i, found):
    at_bj, targets_bj = (jax.lax.dynamic_slice_in_dim(x_bk, i * piece, piece, axis=1) for x_bk in (at_bk, targets_bk))
    hidden_bje = jnp.take_along_axis(hidden_bte, at_bj[:, :, None], axis=1)
    logits_bjv = model.finish_logits(cfg, model.raw_logits(head, hidden_bje), head.get("b_v"))
    logits_bjv = sharding.shard(logits_bjv, "batch", None, None)
    logprobs_bjv = jax.nn.log_softmax(logits_bjv)
    scores = (jnp.take_along_axis(logprobs_bjv, targets_bj[:, :, None], axis=2)[:, :, 0],
              jnp.argmax(logits_bjv, axis=-1) == targets_bj)
    return jax.tree.map(lambda x_bk, x_bj: jax.lax.dynamic_update_slice_in_dim(x_bk, x_bj, i * piece, axis=1),
                        found, scores)

  nothing = jnp.zeros(at_bk.shape, jnp.float32), jnp.zeros(at_bk.shape, bool)
  return jax.lax.fori_loop(0, count, score_piece, nothing)


def loss_step(cfg, graph, params, batch):
  """{"nll", "correct", "weights"}: sums over the target tokens of a batch as the data room makes it."""
  transformer = nnx.merge(graph, params)
  hidden_bte, _ = transformer(batch["inputs"], batch["positions"], batch["segmentations"])
  _, sums = model.cross_entropy(cfg, transformer.head(), hidden_bte, batch["targets"], batch["loss_weights"])
  return sums | {"weights": jnp.sum(batch["loss_weights"])}


class Row(NamedTuple):
  """Inputs that one row of a batch computes, and the requests they answer: (index, position of the first target
  token, target ids) of each."""

  inputs: np.ndarray
  requests: list

  def slots(self):
    """Target tokens of all requests."""
    return sum(len(target) for _, _, target in self.requests)


class Scorer:
  """Scores requests, and datasets, with a model's parameters. Every process of a run calls it with the same ones.

  Requests are sorted by length and padded to few lengths, each of which compiles once; those whose tokens differ in the
  last one alone (answers of one token to one question) are one row. `tokens` counts what has been computed, without
  padding.
  """

  def __init__(self, cfg, mesh, graph, stop=lambda: False):
    self.stop = stop  # asked before each batch; true raises Interrupted
    self.cfg = cfg.replace(logical_axis_rules=[["length", []]])  # rows are short, and of many lengths
    self.mesh, self.graph, self.tokens = mesh, graph, 0
    self.compiled = {}  # row length -> future of score_step for it
    with sharding.use(mesh, self.cfg.logical_axis_rules):
      self.shards = math.prod(mesh.shape[axis] for axis in sharding.mesh_axes("batch")[0])
      self.by_row = NamedSharding(mesh, sharding.spec("batch", None))
    self.whole = NamedSharding(mesh, PartitionSpec())
    self.loss_step = jax.jit(functools.partial(loss_step, self.cfg, graph), out_shardings=self.whole)
    # Fake CPU devices deadlock when many steps are under way; elsewhere the next is dispatched before the last is read.
    self.in_flight = 0 if cfg.platform == "cpu" else 1

  def lengths(self):
    """The row lengths there are: whole multiples of a unit, each about a fifth more than the one before."""
    unit = {"cpu": 16, "gpu": 64, "tpu": 128}[self.cfg.platform]  # 128: what the TPU kernel takes
    found, most = [unit], self.cfg.max_target_length
    while found[-1] < most:
      found.append(max(found[-1] + unit, found[-1] * 6 // 5 // unit * unit))
    return [*(length for length in found if length < most), most]

  def batch_rows(self, length):
    """Rows of a batch of this row length: a multiple of what the mesh divides."""
    most = CPU_TOKENS if self.cfg.platform == "cpu" else self.cfg.eval_batch_size * self.cfg.max_target_length
    return max(1, most // length // self.shards) * self.shards

  def piece(self, length):
    """Target tokens of a row whose logits are computed at once."""
    return min(PIECE, max(1, LOGITS_BYTES // (4 * self.cfg.vocab_size * self.batch_rows(length) // self.shards)))

  def compile(self, params, lengths):
    """Begins to compile score_step for rows of these lengths, side by side."""
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    with sharding.use(self.mesh, self.cfg.logical_axis_rules):
      for length in sorted(set(lengths) - set(self.compiled), reverse=True):  # as they are needed
        rows, piece = self.batch_rows(length), self.piece(length)
        step = functools.partial(score_step, self.cfg, self.graph, piece)
        ids, slots = (jax.ShapeDtypeStruct((rows, width), jnp.int32, sharding=self.by_row)
                      for width in (length, -(-length // piece) * piece))
        lowered = jax.jit(step, out_shardings=self.whole).lower(
            params, ids, ids, ids, slots, slots, jax.ShapeDtypeStruct((), jnp.int32))
        self.compiled[length] = pool.submit(lowered.compile)
    pool.shutdown(wait=False)

  def score(self, params, requests):
    """(a Score for each Request, how many lost their beginning)."""
    most, cut = self.cfg.max_target_length, 0
    rows, growing = [], {}
    for i, (context, target) in enumerate(requests):
      tokens = np.concatenate([context, target]).astype(np.int32)
      cut += len(tokens) > most + 1
      tokens = tokens[-most - 1:]
      target = tokens[-min(len(target), len(tokens) - 1):]
      inputs = tokens[:-1]
      row = growing.get(inputs.tobytes())
      if row is None or row.slots() + len(target) > len(inputs):
        row = growing[inputs.tobytes()] = Row(inputs, [])
        rows.append(row)
      row.requests.append((i, len(inputs) - len(target), target))

    lengths = self.lengths()
    rows = [(next(n for n in lengths if n >= len(row.inputs)), row) for row in rows]
    rows.sort(key=lambda pair: (pair[0], pair[1].slots()), reverse=True)
    batches = []
    while rows:  # the longest row decides; so only the last batch is not full
      length = rows[0][0]
      count = self.batch_rows(length)
      batches.append((length, [row for _, row in rows[:count]]))
      rows = rows[count:]
    self.compile(params, [length for length, _ in batches])
    scores, waiting = [None] * len(requests), collections.deque()
    for length, batch in batches:
      if self.stop():
        raise Interrupted
      waiting.append(self._dispatch(params, length, batch))
      while len(waiting) > self.in_flight:
        collect(*waiting.popleft(), scores)
    while waiting:
      collect(*waiting.popleft(), scores)
    return scores, cut

  def _dispatch(self, params, length, rows):
    """(rows, the arrays that score_step() makes of a batch of them)."""
    count, piece = self.batch_rows(length), self.piece(length)
    tokens_bt, positions_bt, segments_bt = np.zeros((3, count, length), np.int32)
    at_bk, targets_bk = np.zeros((2, count, -(-length // piece) * piece), np.int32)
    for b, row in enumerate(rows):
      size, slots = len(row.inputs), row.slots()
      tokens_bt[b, :size] = row.inputs
      positions_bt[b, :size] = np.arange(size)
      segments_bt[b, :size] = 1
      at_bk[b, :slots] = np.concatenate([start + np.arange(len(target)) for _, start, target in row.requests])
      targets_bk[b, :slots] = np.concatenate([target for _, _, target in row.requests])
      self.tokens += size
    arrays = [jax.make_array_from_callback(x.shape, self.by_row, x.__getitem__)
              for x in (tokens_bt, positions_bt, segments_bt, at_bk, targets_bk)]
    with sharding.use(self.mesh, self.cfg.logical_axis_rules):
      pieces = np.int32(-(-max(map(Row.slots, rows)) // piece))
      return rows, self.compiled[length].result()(params, *arrays, pieces)

  def loss(self, params, dataset):
    """{"nll", "correct", "weights"}: sums over one epoch of a dataset of the data room (or its eval_steps batches)."""
    sums = collections.Counter()
    with (sharding.use(self.mesh, self.cfg.logical_axis_rules),
          data.batches(dataset, 0, self.cfg.eval_batch_size, self.by_row) as batches):
      for batch in batches:
        if self.stop():
          raise Interrupted
        sums.update({name: float(x) for name, x in jax.device_get(self.loss_step(params, batch)).items()})
    self.tokens += int(sums["weights"])
    return sums


def collect(rows, arrays, scores):
  """Waits for the arrays of a batch and fills in the scores of its rows' requests."""
  logprob_bk, likeliest_bk = jax.device_get(arrays)
  for b, row in enumerate(rows):
    slot = 0
    for i, _, target in row.requests:
      part = slice(slot, slot + len(target))
      scores[i] = Score(float(logprob_bk[b, part].sum(dtype=np.float64)), bool(likeliest_bk[b, part].all()))
      slot = part.stop


# --- Tasks: (cfg, tokenizer, path) -> function (scorer, params) -> {metric: value} -----------------------------------


def encode_pair(cfg, words, context, target):
  """The Request of two texts. Without a BOS an empty context is EOS, as lm-evaluation-harness has it, or BOS.

  Where the tokenizer has neither it is the first token of the target.
  """
  stripped = context.rstrip()
  target = context[len(stripped):] + target
  whole, before = words.encode(stripped + target), words.encode(stripped)
  start = [words.bos_id] if cfg.add_bos and words.bos_id >= 0 else []
  if not start and not len(before):  # something must come first
    start = [id for id in (words.eos_id, words.bos_id) if id >= 0][:1]
    before = before if start else whole[:1]
  return Request(np.array([*start, *before], np.int32), np.array(whole[len(before):], np.int32))


def read_rows(cfg, path, keys):
  """The rows of a jsonl file as dicts that have `keys` of those types, at most max_eval_task_rows. Raises DataError."""
  rows = []
  try:
    lines = epath.Path(path).read_text().split("\n")
  except (OSError, UnicodeDecodeError) as error:
    raise errors.DataError(f"eval_tasks: {path} cannot be read as UTF-8 text ({error}). Check the file.") from error
  for number, line in enumerate(lines, 1):
    if not line.strip() or cfg.max_eval_task_rows and len(rows) == cfg.max_eval_task_rows:
      continue
    try:
      row = dict(json.loads(line))
      json.dumps(row, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair, which no encoder takes
      wrong = next((key for key, kind in keys.items() if type(row[key]) is not kind), None)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
      wanted = " with " + " and ".join(keys) if keys else ""
      raise errors.DataError(f"{path}:{number}: no row{wanted}. Mend or drop it.") from error
    if wrong:
      raise errors.DataError(f"{path}:{number}: {wrong} must be of type {keys[wrong].__name__}. Mend or drop the row.")
    rows.append((number, row))
  if not rows:
    raise errors.DataError(f"{path} has no rows. Give a file with some.")
  return rows


def require_target(request, path, number):
  """The request. Raises DataError, naming the row, when nothing is left to be scored."""
  if not len(request.target):
    raise errors.DataError(f"{path}:{number}: what should follow has no token of its own. Mend or drop the row.")
  return request


def lambada(cfg, words, path):
  """The last word of each text after the rest: right when each of its tokens is the likeliest (Paperno et al. 2016).

  Rows {"text"}. As Pax scores it: curly quotes straightened, the rest stripped, the word with one space before it.
  """
  requests = []
  for number, row in read_rows(cfg, path, {"text": str}):
    parts = row["text"].translate(QUOTES).rsplit(None, 1)
    if len(parts) != 2:
      raise errors.DataError(f"{path}:{number}: text has no last word after another one. Mend or drop the row.")
    requests.append(require_target(encode_pair(cfg, words, parts[0].strip(), f" {parts[1]}"), path, number))

  def evaluate(scorer, params):
    scores, cut = scorer.score(params, requests)
    return {"accuracy": np.mean([score.greedy for score in scores]),
            "perplexity": perplexity_of(-np.mean([score.logprob for score in scores])), "rows": len(scores), "cut": cut}

  return evaluate


def boolq(cfg, words, path):
  """Yes-no questions (Clark et al. 2019): right when the true answer is more probable than the other one.

  Rows {"passage", "question", "answer": bool} with Pax's prompt, or rows as of choice().
  """
  if "choices" in read_rows(cfg, path, {})[0][1]:
    return choice(cfg, words, path)
  rows = []
  for number, row in read_rows(cfg, path, {"passage": str, "question": str, "answer": bool}):
    query = f"{row['passage']}\nquestion: {row['question']}?\nanswer:"
    options = [" no", " yes"] if row["answer"] else [" yes", " no"]  # the true one last: it loses a tie, as in Pax
    rows.append((number, {"query": query, "choices": options, "gold": 1}))
  return choose(cfg, words, path, rows)


def choice(cfg, words, path):
  """Multiple choice, rows {"query", "choices", "gold": index}: nothing is added but a space where none separates."""
  rows = read_rows(cfg, path, {"query": str, "choices": list, "gold": int})
  for number, row in rows:
    query, choices = row["query"], row["choices"]
    if (any(not isinstance(text, str) or not text.strip() for text in choices)
        or not 0 <= row["gold"] < len(choices)):
      raise errors.DataError(f"{path}:{number}: choices must be texts and gold the index of one. Mend or drop it.")
    row["choices"] = [c if not query or query[-1].isspace() or c[0].isspace() else f" {c}" for c in choices]
  return choose(cfg, words, path, rows)


def choose(cfg, words, path, rows):
  """Which choice has the highest log-probability, in all ("accuracy") and per character ("accuracy_norm").

  The characters are those of the choice without its one space in front (acc_norm of lm-evaluation-harness).
  """
  requests = [require_target(encode_pair(cfg, words, row["query"], option), path, number)
              for number, row in rows for option in row["choices"]]

  def evaluate(scorer, params):
    scores, cut = scorer.score(params, requests)
    found, right, right_norm = iter(scores), [], []
    for _, row in rows:
      sums = np.array([next(found).logprob for _ in row["choices"]])
      lengths = np.array([len(option.removeprefix(" ")) for option in row["choices"]])
      right.append(np.argmax(sums) == row["gold"])
      right_norm.append(np.argmax(sums / lengths) == row["gold"])
    return {"accuracy": np.mean(right), "accuracy_norm": np.mean(right_norm), "rows": len(rows), "cut": cut}

  return evaluate


def perplexity(cfg, words, path):
  """Perplexity of documents, cut into rows as training cuts them; without a path, of the run's own evaluation set.

  "loss" is in nats per token, EOS included, and what training logs as eval/loss; bits_per_byte, of the text, compares
  across tokenizers.
  """
  if path:
    texts = list(sources.documents(sources.text(path, "eval_tasks"), 0))[:cfg.max_eval_task_rows or None]
    begin = [words.bos_id] if cfg.add_bos and words.bos_id >= 0 else []
    end = [words.eos_id] if cfg.add_eos and words.eos_id >= 0 else []
    documents = [np.array([*begin, *ids, *end], np.int32) for ids in words.encode_documents(texts)]
    offsets = np.cumsum([0, *map(len, documents)])
    dataset = data.Packed(np.concatenate([*documents, []]).astype(np.int32), offsets, cfg.max_target_length, epochs=1)
    if not dataset.num_pairs:
      raise errors.DataError(f"eval_tasks: {path} holds no text of two tokens. Give another.")
    size = sum(len(text.encode()) for text in texts)
  else:
    if cfg.dataset_type != "synthetic" and not (epath.Path(cfg.run_directory) / "data" / "manifest.json").exists():
      raise errors.ConfigError(f"eval_tasks=[perplexity]: run_name={cfg.run_name} has no data of its own. "
                               "Give files: perplexity:PATH.")
    dataset, size = data.open(cfg).eval, 0
    if dataset is None:
      raise errors.DataError("eval_tasks=[perplexity]: the run holds out no documents. Give files: perplexity:PATH.")
    if words:
      rows = dataset.rows(0, dataset.num_batches(cfg.eval_batch_size) * cfg.eval_batch_size)
      size = len(words.decode(rows["targets"][rows["loss_weights"] > 0]).encode())

  def evaluate(scorer, params):
    sums = scorer.loss(params, dataset)
    loss = sums["nll"] / sums["weights"]
    found = {"loss": loss, "perplexity": perplexity_of(loss), "accuracy": sums["correct"] / sums["weights"]}
    return found | ({"bits_per_byte": sums["nll"] / math.log(2) / size, "bytes": size} if size else {})

  return evaluate


def perplexity_of(loss):
  """exp(loss), a number also for a model that has come to nothing."""
  return math.exp(min(loss, 700.0))


TASKS = {"perplexity": perplexity, "lambada": lambada, "boolq": boolq, "choice": choice}


def read_tasks(cfg, words):
  """{"kind/file": task} of eval_tasks, lm_eval's left out, whose files are read and checked now.

  A task is a function (scorer, params) -> {metric: value}. words: the tokenizer, or None.
  Raises ConfigError, DataError.
  """
  tasks = {}
  for entry in cfg.eval_tasks:
    kind, _, path = entry.partition(":")
    name = name_of(entry)
    if name in tasks:
      raise errors.ConfigError(f"eval_tasks={entry}: another is called {name} too. Rename one of the files.")
    if path and words is None:
      raise errors.ConfigError(f"eval_tasks={entry} needs a tokenizer, and dataset_type={cfg.dataset_type} has none. "
                               "Give tokenizer_path, or tokenizer_type=byte.")
    if kind in TASKS:
      tasks[name] = TASKS[kind](cfg, words, os.path.expanduser(path))
  return tasks


def run_task(task, scorer, params):
  """{metric: value} of a task, with the number of tokens computed."""
  before = scorer.tokens
  return task(scorer, params) | {"tokens": scorer.tokens - before}


def open_tasks(cfg, mesh, graph, words, stop=lambda: False):
  """evaluate(params) -> {"kind/file/metric": value} of the tasks in eval_tasks, whose files are read and checked now.

  cfg: resolved. graph: of model.abstract(). stop: asked before each batch; when it is true, evaluate gives None.
  Raises ConfigError, DataError.
  """
  for entry in cfg.eval_tasks:
    if entry.partition(":")[0] not in TASKS:
      raise errors.ConfigError(f"eval_tasks={entry} runs in evals.py only. Leave it out here.")
  tasks, scorer = read_tasks(cfg, words), Scorer(cfg, mesh, graph, stop)

  def evaluate(params):
    try:
      return {f"{name}/{metric}": float(value) for name, task in tasks.items()
              for metric, value in run_task(task, scorer, params).items()}
    except Interrupted:
      return None

  return evaluate


def name_of(entry):
  """kind/file of an entry of eval_tasks."""
  kind, _, path = entry.partition(":")
  return f"{kind}/{os.path.splitext(os.path.basename(path.rstrip('/')))[0]}" if path else kind


# --- lm-evaluation-harness -------------------------------------------------------------------------------------------


def lm_eval_model(opened):
  """An lm_eval.api.model.LM of an Opened. Raises ConfigError when lm_eval is not installed."""
  try:
    from lm_eval.api.model import LM
  except ImportError as error:
    raise errors.ConfigError("eval_tasks=[lm_eval:...] needs a package: pip install lm_eval") from error
  opened = opened._replace(cfg=opened.cfg.replace(decode_sampling_strategy="greedy"))
  cfg, words = opened.cfg, opened.tokenizer
  if words is None:
    raise errors.ConfigError("eval_tasks=[lm_eval:...] needs a tokenizer, and the run has none. Give tokenizer_path, "
                             "or tokenizer_type=byte.")
  scorer, decoder = Scorer(cfg, opened.mesh, opened.graph), decode.Decoder(opened)

  class Model(LM):
    """Texts in, log-probabilities and continuations out."""

    def loglikelihood(self, requests):
      pairs = [encode_pair(cfg, words, *request.args) for request in requests]
      return [tuple(score) for score in scorer.score(opened.params, pairs)[0]]

    def loglikelihood_rolling(self, requests):
      """Each token of a text once, in pieces of max_target_length; the last has as many tokens before it as fit."""
      pieces, owner, most = [], [], cfg.max_target_length
      for i, request in enumerate(requests):
        first, ids = encode_pair(cfg, words, "", request.args[0])
        ids = np.concatenate([first, ids])
        for begin in range(1, len(ids), most):
          end = min(begin + most, len(ids))
          pieces.append(Request(ids[max(end - most - 1, 0):begin], ids[begin:end]))
          owner.append(i)
      sums = [0.0] * len(requests)
      for i, score in zip(owner, scorer.score(opened.params, pieces)[0], strict=True):
        sums[i] += score.logprob
      return sums

    def generate_until(self, requests):
      by_length, texts = collections.defaultdict(list), [""] * len(requests)
      for i, request in enumerate(requests):
        context, options = request.args
        if options.get("do_sample") or options.get("temperature"):
          raise errors.ConfigError("eval_tasks=[lm_eval:...]: decoding is greedy. Set do_sample: false in the task.")
        most = min(options.get("max_gen_toks", cfg.max_predict_length), cfg.max_target_length - 1)
        by_length[most].append((i, decode.encode(opened, context)[-(cfg.max_target_length - most):], options))
      for most, group in by_length.items():
        found = decoder.generate([prompt for _, prompt, _ in group], max_predict_length=most)
        for (i, prompt, options), continuation in zip(group, found, strict=True):
          texts[i] = decode.continuation_text(words, prompt, continuation.tokens)
          stops = options.get("until") or []
          for stop in [stops] if isinstance(stops, str) else stops:
            texts[i] = texts[i].partition(stop)[0] if stop else texts[i]
      return texts

  return Model()


def run_lm_eval(lm, task, limit):
  """{metric: value} of a task of lm-evaluation-harness, given by name or as a YAML file. Raises ConfigError.

  Of a group or tag {"task/metric": value}. limit: most rows of each task, None for all.
  """
  import lm_eval
  from lm_eval.tasks import TaskManager

  given = os.path.isfile(task)
  manager = TaskManager(include_defaults=not given)  # reading the harness's own tasks takes ten seconds
  if not given and task not in manager.all_tasks:
    raise errors.ConfigError(f"eval_tasks=lm_eval:{task} is neither a task of lm_eval nor a YAML file. Check the name.")
  with contextlib.redirect_stdout(sys.stderr):
    results = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, limit=limit, bootstrap_iters=0)
  found = results["results"]
  return {f"{name}/{metric}" if len(found) > 1 else metric: value for name, values in found.items()
          for metric, value in ((metric.removesuffix(",none"), value) for metric, value in values.items())
          if isinstance(value, (int, float)) and "stderr" not in metric}


# --- The command -----------------------------------------------------------------------------------------------------


def main(cfg):
  """Runs the tasks of `cfg` (loaded, not yet resolved). Raises errors.RunError for what a user can mend."""
  if not cfg.eval_tasks:
    raise errors.ConfigError("eval_tasks=[] asks for nothing. Name some: "
                             "eval_tasks=[perplexity,lambada:lambada_test.jsonl], see configs/base.yml.")
  hint = "eval_per_device_batch_size decides the memory: lower it, or use more devices."
  with diagnostics.memory_errors_explained(hint):
    opened = decode.open_run(cfg)
    tasks, scorer = read_tasks(opened.cfg, opened.tokenizer), Scorer(opened.cfg, opened.mesh, opened.graph)
    lm = lm_eval_model(opened) if len(tasks) < len(cfg.eval_tasks) else None
    for entry in cfg.eval_tasks:
      start = time.perf_counter()
      if name_of(entry) in tasks:
        values = run_task(tasks[name_of(entry)], scorer, opened.params)
      else:
        path = os.path.expanduser(entry.partition(":")[2])
        values = run_lm_eval(lm, path, cfg.max_eval_task_rows or None)
      if jax.process_index() == 0:
        report(opened, entry, values, time.perf_counter() - start)


def report(opened, entry, values, seconds):
  """Prints a task's values in a line and adds them to evals.jsonl in the run's directory. Raises StorageError."""
  numbers = ", ".join(f"{name}: {value:,.5g}" if value < 1e4 else f"{name}: {value:,.0f}"
                      for name, value in values.items())
  rates = ", ".join(f"{values[name] / seconds:,.{digits}f} {name}/s" for name, digits in (("rows", 1), ("tokens", 0))
                    if name in values)
  print(f"{name_of(entry)}: {numbers} ({seconds:.1f} s{', ' if rates else ''}{rates})", flush=True)
  if not opened.cfg.run_directory:
    return
  kind, _, path = entry.partition(":")
  path, checkpoint = os.path.expanduser(path), opened.checkpoint
  line = {"task": kind, "path": path, "sha256": digest(path), "checkpoint": str(checkpoint or ""),
          "step": checkpoint and int(checkpoint.name), "time": time.time(), "seconds": round(seconds, 3),
          **{name: float(value) for name, value in values.items()}}
  record = epath.Path(opened.cfg.run_directory) / "evals.jsonl"
  try:
    record.parent.mkdir(parents=True, exist_ok=True)
    before, part = record.read_text() if record.exists() else "", record.with_name(f"{record.name}.{os.getpid()}.tmp")
    part.write_text(before + json.dumps(line) + "\n")
    part.replace(record)
  except OSError as error:
    raise errors.StorageError(f"{record} cannot be written: {error.strerror}. Make room or allow it.") from error


def digest(path):
  """SHA-256 of a task's file; "" of what is no local file."""
  if not os.path.isfile(path):
    return ""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
  with errors.as_exit_codes():
    main(CONFIG)
