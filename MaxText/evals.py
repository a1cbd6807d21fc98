# SPDX-License-Identifier: Apache-2.0
"""Scores a model: perplexity, last words, choices; of any checkpoint, or at every evaluation of a training run.

  python3 MaxText/evals.py configs/base.yml run_name=NAME eval_tasks=[lambada:lambada_test.jsonl,choice:arc.jsonl]

A task makes requests: a context and what should follow it. Both are tokenized together and cut where the context's own
tokens end; white space at the context's end goes to what follows (as lm-evaluation-harness does). Texts longer than
max_target_length lose their beginning. A choice counts by the sum of the log-probabilities of all its tokens.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  CONFIG = interpreter.start(need_run_name=False, reopen=True)

import collections
import functools
import hashlib
import itertools
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

CPU_TOKENS = 256  # in a batch: on CPU more at once are no faster, and rows of a batch share its longest one's length
TARGETS = (8, 32, 128, 512)  # target tokens of a row, rounded up to one of these
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


def score_step(cfg, graph, params, tokens_bt, positions_bt, segments_bt, at_bk, targets_bk):
  """(log-probability, whether it is the likeliest) [b, k] of token targets_bk[b, k] behind position at_bk[b, k]."""
  transformer = nnx.merge(graph, params)
  hidden_bte, _ = transformer(tokens_bt, positions_bt, segments_bt)
  hidden_bke = jnp.take_along_axis(hidden_bte, at_bk[:, :, None], axis=1)  # before the logits: only these are computed
  logits_bkv = sharding.shard(transformer.logits(hidden_bke), "batch", None, None)
  logprobs_bkv = jax.nn.log_softmax(logits_bkv)
  logprob_bk = jnp.take_along_axis(logprobs_bkv, targets_bk[:, :, None], axis=2)[:, :, 0]
  return logprob_bk, jnp.argmax(logits_bkv, axis=-1) == targets_bk


def loss_step(cfg, graph, params, batch):
  """{"nll", "correct", "weights"}: sums over the target tokens of a batch as the data room makes it."""
  transformer = nnx.merge(graph, params)
  hidden_bte, _ = transformer(batch["inputs"], batch["positions"], batch["segmentations"])
  _, sums = model.cross_entropy(cfg, transformer.head(), hidden_bte, batch["targets"], batch["loss_weights"])
  return sums | {"weights": jnp.sum(batch["loss_weights"])}


class Scorer:
  """Scores requests, and datasets, with a model's parameters. Every process of a run calls it with the same ones.

  Requests are sorted by length and padded to few lengths, each of which compiles once; those whose tokens differ in the
  last one alone (answers of one token to one question) are one row.
  """

  def __init__(self, cfg, mesh, graph, stop=lambda: False):
    self.stop = stop  # asked before each batch; true raises Interrupted
    self.cfg = cfg.replace(logical_axis_rules=[["length", []]])  # rows are short, and of many lengths
    self.mesh = mesh
    with sharding.use(mesh, self.cfg.logical_axis_rules):
      self.shards = math.prod(mesh.shape[axis] for axis in sharding.mesh_axes("batch")[0])
      self.by_row = NamedSharding(mesh, sharding.spec("batch", None))
    whole = NamedSharding(mesh, PartitionSpec())
    self.score_step = jax.jit(functools.partial(score_step, self.cfg, graph), out_shardings=whole)
    self.loss_step = jax.jit(functools.partial(loss_step, self.cfg, graph), out_shardings=whole)

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

  def score(self, params, requests):
    """(a Score for each Request, how many lost their beginning)."""
    most, cut = self.cfg.max_target_length, 0
    rows = collections.defaultdict(list)  # inputs -> [(index of the request, first target's position, its target ids)]
    for i, (context, target) in enumerate(requests):
      tokens = np.concatenate([context, target]).astype(np.int32)
      cut += len(tokens) > most + 1
      tokens = tokens[-most - 1:]
      target = tokens[-min(len(target), len(tokens) - 1):]
      inputs = tokens[:-1]
      rows[inputs.tobytes()].append((i, len(inputs) - len(target), target))

    def slots(entry):
      return sum(len(target) for _, _, target in entry[1])

    scores = [None] * len(requests)
    work = sorted(rows.items(), key=lambda entry: len(entry[0]))
    lengths = self.lengths()
    for length, group in itertools.groupby(work, key=lambda e: next(n for n in lengths if n >= len(e[0]) // 4)):
      group = sorted(group, key=slots)
      count = self.batch_rows(length)
      for first in range(0, len(group), count):
        if self.stop():
          raise Interrupted
        part = group[first:first + count]
        self._score_rows(params, length, count, part, slots(part[-1]), scores)
    return scores, cut

  def _score_rows(self, params, length, count, group, targets, scores):
    targets = next((n for n in TARGETS if n >= targets), targets)
    tokens_bt, positions_bt, segments_bt = np.zeros((3, count, length), np.int32)
    at_bk, targets_bk = np.zeros((2, count, targets), np.int32)
    where = []
    for row, (inputs, requests) in enumerate(group):
      inputs, slot = np.frombuffer(inputs, np.int32), 0
      tokens_bt[row, :len(inputs)] = inputs
      positions_bt[row, :len(inputs)] = np.arange(len(inputs))
      segments_bt[row, :len(inputs)] = 1
      for i, start, target in requests:
        stop = slot + len(target)
        at_bk[row, slot:stop] = start + np.arange(len(target))
        targets_bk[row, slot:stop] = target
        where.append((i, row, slot, stop))
        slot = stop
    arrays = [jax.make_array_from_callback(x.shape, self.by_row, x.__getitem__)
              for x in (tokens_bt, positions_bt, segments_bt, at_bk, targets_bk)]
    with sharding.use(self.mesh, self.cfg.logical_axis_rules):
      logprob_bk, likeliest_bk = jax.device_get(self.score_step(params, *arrays))
    for i, row, slot, stop in where:
      logprobs, likeliest = logprob_bk[row, slot:stop], likeliest_bk[row, slot:stop]
      scores[i] = Score(float(logprobs.sum(dtype=np.float64)), bool(likeliest.all()))

  def loss(self, params, dataset):
    """{"nll", "correct", "weights"}: sums over one epoch of a dataset of the data room (or its eval_steps batches)."""
    sums = collections.Counter()
    with (sharding.use(self.mesh, self.cfg.logical_axis_rules),
          data.batches(dataset, 0, self.cfg.eval_batch_size, self.by_row) as batches):
      for batch in batches:
        if self.stop():
          raise Interrupted
        sums.update({name: float(x) for name, x in jax.device_get(self.loss_step(params, batch)).items()})
    return sums


# --- Tasks: (cfg, tokenizer, path) -> function (scorer, params) -> {metric: value} -----------------------------------


def encode_pair(cfg, words, context, target):
  """The Request of two texts."""
  stripped = context.rstrip()
  target = context[len(stripped):] + target
  whole, before = words.encode(stripped + target), words.encode(stripped)
  start = [words.bos_id] if cfg.add_bos and words.bos_id >= 0 else []
  if not start and not len(before):  # something must come first
    before = whole[:1]
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
      row = json.loads(line)
      wrong = next((key for key, kind in keys.items() if type(row[key]) is not kind), None)
    except (ValueError, KeyError, TypeError) as error:
      raise errors.DataError(f"{path}:{number}: no row with {' and '.join(keys)}. Mend or drop it.") from error
    if wrong:
      raise errors.DataError(f"{path}:{number}: {wrong} must be of type {keys[wrong].__name__}. Mend or drop the row.")
    rows.append((number, row))
  if not rows:
    raise errors.DataError(f"{path} has no rows. Give a file with some.")
  return rows


def non_empty(request, path, number):
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
    requests.append(non_empty(encode_pair(cfg, words, parts[0].strip(), f" {parts[1]}"), path, number))

  def evaluate(scorer, params):
    scores, cut = scorer.score(params, requests)
    return {"accuracy": np.mean([score.greedy for score in scores]),
            "perplexity": math.exp(-np.mean([score.logprob for score in scores])), "rows": len(scores), "cut": cut}

  return evaluate


def boolq(cfg, words, path):
  """Yes-no questions (Clark et al. 2019): right when the true answer is more probable than the other one.

  Rows {"passage", "question", "answer": bool} with Pax's prompt, or rows as of choice().
  """
  first = read_rows(cfg, path, {})[0][1]
  if not isinstance(first, dict) or "passage" not in first:
    return choice(cfg, words, path)
  rows = []
  for number, row in read_rows(cfg, path, {"passage": str, "question": str, "answer": bool}):
    query = f"{row['passage']}\nquestion: {row['question']}?\nanswer:"
    rows.append((number, {"query": query, "choices": [" no", " yes"], "gold": int(row["answer"])}))
  return choose(cfg, words, path, rows)


def choice(cfg, words, path):
  """Multiple choice, rows {"query", "choices", "gold": index}: nothing is added but a space where none separates."""
  rows = read_rows(cfg, path, {"query": str, "choices": list, "gold": int})
  for number, row in rows:
    query, choices = row["query"], row["choices"]
    if not choices or any(not isinstance(c, str) or not c for c in choices) or not 0 <= row["gold"] < len(choices):
      raise errors.DataError(f"{path}:{number}: choices must be texts and gold the index of one. Mend or drop it.")
    row["choices"] = [c if not query or query[-1].isspace() or c[0].isspace() else f" {c}" for c in choices]
  return choose(cfg, words, path, rows)


def choose(cfg, words, path, rows):
  """Which choice has the highest log-probability, in all ("accuracy") and per character ("accuracy_norm")."""
  requests = [non_empty(encode_pair(cfg, words, row["query"], option), path, number)
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

  "loss" is in nats per token and what training logs as eval/loss; bits_per_byte compares across tokenizers.
  """
  if path:
    texts = list(sources.documents(sources.text(path), 0))[:cfg.max_eval_task_rows or None]
    if not texts:
      raise errors.DataError(f"eval_tasks: {path} holds no text. Give another.")
    begin = [words.bos_id] if cfg.add_bos and words.bos_id >= 0 else []
    end = [words.eos_id] if cfg.add_eos and words.eos_id >= 0 else []
    documents = [np.array([*begin, *ids, *end]) for ids in words.encode_documents(texts)]
    offsets = np.cumsum([0, *map(len, documents)])
    dataset = data.Packed(np.concatenate(documents), offsets, cfg.max_target_length, once=True)
    size = sum(len(text.encode()) for text in texts)
  else:
    if cfg.dataset_type != "synthetic" and not (epath.Path(cfg.run_directory) / "data" / "manifest.json").exists():
      raise errors.ConfigError(f"eval_tasks=[perplexity]: run_name={cfg.run_name} has no data of its own. "
                               "Give files: perplexity:PATH.")
    dataset, size = data.open(cfg).eval, 0
    if dataset is None:
      raise errors.DataError("eval_tasks=[perplexity]: the run holds out no documents. Give files: perplexity:PATH.")

  def evaluate(scorer, params):
    sums = scorer.loss(params, dataset)
    loss = sums["nll"] / sums["weights"]
    found = {"loss": loss, "perplexity": math.exp(loss), "accuracy": sums["correct"] / sums["weights"],
             "tokens": int(sums["weights"])}
    return found | ({"bits_per_byte": sums["nll"] / math.log(2) / size} if size else {})

  return evaluate


TASKS = {"perplexity": perplexity, "lambada": lambada, "boolq": boolq, "choice": choice}


def open_tasks(cfg, mesh, graph, words, stop=lambda: False):
  """evaluate(params) -> {"kind/file/metric": value} of the tasks in eval_tasks, whose files are read and checked now.

  cfg: resolved. graph: of model.abstract(). stop: asked before each batch; when it is true, evaluate gives None.
  Raises ConfigError, DataError.
  """
  if words is None:
    raise errors.ConfigError(f"eval_tasks={','.join(cfg.eval_tasks)} need a tokenizer, and dataset_type="
                             f"{cfg.dataset_type} has none. Give tokenizer_path, or tokenizer_type=byte.")
  tasks = {}
  for entry in cfg.eval_tasks:
    kind, _, path = entry.partition(":")
    if kind not in TASKS:
      raise errors.ConfigError(f"eval_tasks={entry} runs in evals.py only. Leave it out here.")
    tasks[name_of(entry)] = TASKS[kind](cfg, words, os.path.expanduser(path))
  scorer = Scorer(cfg, mesh, graph, stop)

  def evaluate(params):
    try:
      return {f"{name}/{metric}": float(value) for name, task in tasks.items()
              for metric, value in task(scorer, params).items()}
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
  cfg, words = opened.cfg, opened.tokenizer
  scorer, decoder = Scorer(cfg, opened.mesh, opened.graph), decode.Decoder(opened)

  class Model(LM):
    """Texts in, log-probabilities and continuations out."""

    def loglikelihood(self, requests):
      pairs = [encode_pair(cfg, words, *request.args) for request in requests]
      return [tuple(score) for score in scorer.score(opened.params, pairs)[0]]

    def loglikelihood_rolling(self, requests):
      pieces, owner = [], []
      for i, request in enumerate(requests):
        ids, most = decode.encode(opened, request.args[0]), cfg.max_target_length
        for first in range(1, len(ids), most):  # each token once, with what stands before it in its piece
          pieces.append(Request(ids[first - 1:first], ids[first:first + most]))
          owner.append(i)
      sums = [0.0] * len(requests)
      for i, score in zip(owner, scorer.score(opened.params, pieces)[0], strict=True):
        sums[i] += score.logprob
      return sums

    def generate_until(self, requests):
      found = []
      for request in requests:
        context, options = request.args
        most = min(options.get("max_gen_toks", cfg.max_predict_length), cfg.max_target_length - 1)
        if options.get("do_sample") or options.get("temperature"):
          raise errors.ConfigError("lm_eval: only greedy generation is offered. Set do_sample: false in the task.")
        prompt = decode.encode(opened, context)[-(cfg.max_target_length - most):]
        tokens = next(decoder.generate([prompt], max_predict_length=most)).tokens
        text = decode.continuation_text(words, prompt, tokens)
        stops = options.get("until") or []
        for stop in [stops] if isinstance(stops, str) else stops:
          text = text.partition(stop)[0] if stop else text
        found.append(text)
      return found

  return Model()


def run_lm_eval(opened, task):
  """{"metric": value} of a task of lm-evaluation-harness: its name, or the path of its YAML file."""
  lm = lm_eval_model(opened)
  import lm_eval
  from lm_eval.tasks import TaskManager

  folder = os.path.dirname(os.path.abspath(task)) if task.endswith((".yaml", ".yml")) else None
  name = os.path.splitext(os.path.basename(task))[0] if folder else task
  results = lm_eval.simple_evaluate(lm, tasks=[name], task_manager=TaskManager(include_path=folder),
                                    limit=opened.cfg.max_eval_task_rows or None, bootstrap_iters=0)
  return {metric.removesuffix(",none"): value for metric, value in results["results"][name].items()
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
    step = None if opened.checkpoint is None else int(opened.checkpoint.name)
    for entry in cfg.eval_tasks:
      kind, _, path = entry.partition(":")
      start = time.perf_counter()
      if kind == "lm_eval":
        values = run_lm_eval(opened, path)
      else:
        evaluate = open_tasks(opened.cfg.replace(eval_tasks=[entry]), opened.mesh, opened.graph, opened.tokenizer)
        values = {name.rpartition("/")[2]: value for name, value in evaluate(opened.params).items()}
      seconds = time.perf_counter() - start
      if jax.process_index() == 0:
        numbers = ", ".join(f"{name}: {value:.5g}" for name, value in values.items())
        print(f"{name_of(entry)}: {numbers} ({seconds:.1f} s)", flush=True)
        record(opened.cfg, {"task": entry, "checkpoint": str(opened.checkpoint or ""), "step": step,
                            "time": time.time(), "sha256": digest(path), "seconds": round(seconds, 3)} | values)


def digest(path):
  """SHA-256 of a task's file; "" of what is no local file."""
  if not os.path.isfile(path):
    return ""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def record(cfg, values):
  """Appends a line to evals.jsonl in the run's directory. Raises StorageError."""
  if not cfg.run_directory:
    return
  path = epath.Path(cfg.run_directory) / "evals.jsonl"
  try:
    before = path.read_text() if path.exists() else ""
    path.write_text(before + json.dumps(values) + "\n")
  except OSError as error:
    raise errors.StorageError(f"{path} cannot be written: {error.strerror}. Make room or allow it.") from error


if __name__ == "__main__":
  with errors.as_exit_codes():
    main(CONFIG)
