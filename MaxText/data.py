# SPDX-License-Identifier: Apache-2.0
"""The data contract: documents -> a fixed order -> packed rows -> batches that depend on nothing but the step.

open() reads or prepares the corpus (tokens, document offsets, tokenizer) and keeps a snapshot of it in the run's
directory, so that a resumed run reads the same data whatever became of the source. Packed turns it into rows by index;
batches() puts the rows of each step on the devices. Only that imports jax: a corpus can be prepared while jax compiles.

A document of tokens d[0..n] (BOS and EOS included) is the pairs (d[i], d[i+1]), input and target. An epoch is all pairs
of all documents in that epoch's order; epochs follow each other without a gap, and row r is pairs [r L, (r+1) L) of
that. So long documents are split, no target crosses documents, no row is padded, every pair comes once per epoch.
The rows that begin in an epoch are served in an order of their own, or a batch would often be one long document.
A batch is a dict of arrays [rows, max_target_length]: int32 inputs, targets, positions (from 0 in each piece of a
document), segmentations (1, 2, ... in each row, 0 is padding), and float32 loss_weights (0.0 for padding).
"""

import dataclasses
import hashlib
import json
import os
import queue
import sys
import threading
import time
import weakref
from typing import NamedTuple

import numpy as np
from etils import epath

from MaxText import sources, tokenizer
from MaxText.errors import ConfigError, DataError, StorageError

FORMAT = 1
# The order in which documents and rows come; a run goes on only in the order it began with.
ORDER = 2
# What decides the content of a snapshot; a resumed run must ask for the same.
REQUEST = ("dataset_type", "dataset_path", "eval_dataset_path", "eval_fraction", "max_dataset_chars",
           "max_corpus_chars", "tokenizer_type", "tokenizer_path", "add_bos", "add_eos")
SNAPSHOT_WAIT_SECONDS = 1800


@dataclasses.dataclass(frozen=True)
class Data:
  """Datasets for training and evaluation (None where nothing is held out), and the tokenizer (None: synthetic)."""

  train: object
  eval: object
  tokenizer: object
  identity: dict
  summary: str
  force_resume: bool

  def position(self, step):
    """What a checkpoint after `step` steps stores: JSON-able, under 1 KB. batch(step) is a function of it alone."""
    return {**self.identity, "step": step}

  def check(self, position):
    """Raises ConfigError or DataError when this data does not continue that of `position`, unless force_data_resume."""
    keys = [key for key in self.identity if self.identity[key] != position.get(key)]
    differences = ", ".join(f"{key}={self.identity[key]} (the checkpoint has {position.get(key)})" for key in keys)
    if keys and not self.force_resume:
      raise (DataError if {"corpus", "tokenizer"} & set(keys) else ConfigError)(
          f"{differences}: the run would not see the data it would have seen uninterrupted. Set it back, use another"
          " run_name, or set force_data_resume=true.")
    if keys:
      print(f"data: resumed by force with {differences}", file=sys.stderr)


def open(cfg, *, process_index=0, process_count=1):
  """The Data of a resolved config: from the run's snapshot, else from data_cache_dir, else read and tokenized now.

  Process 0 writes the snapshot; the others wait for it. Raises ConfigError, DataError.
  """
  length, seed = cfg.max_target_length, cfg.data_shuffle_seed
  identity = {"corpus": "", "tokenizer": "", "data_shuffle_seed": seed, "max_target_length": length,
              "global_batch_size": cfg.global_batch_size, "enable_data_shuffling": cfg.enable_data_shuffling}
  if cfg.dataset_type == "synthetic":
    train = Whole(sources.Synthetic(cfg.vocab_size, length, seed))
    held_out = Whole(sources.Synthetic(cfg.vocab_size, length, seed, held_out=True), cfg.eval_steps)
    identity |= {"corpus": f"synthetic-{FORMAT}-{cfg.vocab_size}", "tokenizer": "none"}
    summary = (f"data: synthetic, made from data_shuffle_seed={seed}: a perfect model reaches loss"
               f" {sources.Synthetic.ENTROPY:.3f}, a uniform guess {np.log(cfg.vocab_size):.3f}; evaluation:"
               f" {held_out.num_rows} rows of another stream")
    return Data(train, held_out, None, identity, summary, cfg.force_data_resume)

  corpus = _open_corpus(cfg, epath.Path(cfg.run_directory) / "data", process_index, process_count)
  manifest, count = corpus.manifest, corpus.manifest["train_documents"]
  if corpus.tokenizer.vocab_size > cfg.vocab_size:
    raise ConfigError(f"vocab_size={cfg.vocab_size}: the tokenizer has {corpus.tokenizer.vocab_size} pieces. Set"
                      f" vocab_size={-(-corpus.tokenizer.vocab_size // 128) * 128} or choose another tokenizer.")
  train = Packed(corpus.tokens, corpus.offsets[:count + 1], length, seed=seed if cfg.enable_data_shuffling else None)
  held_out = Packed(corpus.tokens, corpus.offsets[count:], length, once=True, eval_steps=cfg.eval_steps)
  if not train.num_pairs:
    raise DataError(f"dataset_path={cfg.dataset_path}: no document has two tokens. Give more text or set add_bos=true.")
  summary = (f"data: {manifest['origin']}: {count} documents, {corpus.offsets[count]} tokens of"
             f" {manifest['bytes'] / len(corpus.tokens):.2f} bytes ({corpus.tokenizer.kind},"
             f" {corpus.tokenizer.vocab_size} pieces), fill 1.000; evaluation: ")
  if held_out.num_pairs:
    summary += (f"{len(corpus.offsets) - 1 - count} documents {manifest['split']}, {held_out.num_pairs} tokens, fill"
                f" {held_out.fill:.3f}")
  else:
    summary += "none, for lack of a second document; set eval_dataset_path"
  return Data(train, held_out if held_out.num_pairs else None, corpus.tokenizer,
              {**identity, "corpus": manifest["fingerprint"], "tokenizer": corpus.tokenizer.fingerprint,
               "data_order": ORDER}, summary, cfg.force_data_resume)


def open_tokenizer(cfg):
  """The tokenizer of the run that `cfg` reopens, or of load_parameters_path: of its own copy of its data, unless
  tokenizer_type or tokenizer_path say another; None where nothing tells. Raises ConfigError, DataError."""
  path = cfg.load_parameters_path.rstrip("/")
  for run in (cfg.run_directory, path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
    manifest = epath.Path(run) / "data" / "manifest.json"
    if run and manifest.exists():
      corpus = Corpus.read(manifest.parent)
      key = "tokenizer_path" if cfg.tokenizer_path else "tokenizer_type"
      if corpus.manifest["request"][key] == getattr(cfg, key):
        return corpus.tokenizer
  if cfg.tokenizer_path:
    return tokenizer.load_given(cfg.tokenizer_path)
  return tokenizer.Byte() if cfg.tokenizer_type == "byte" else None


# --- Rows by index ---------------------------------------------------------------------------------------------------


class Epoch(NamedTuple):
  """The orders of an epoch: of its documents, and of the rows that begin in it (None: as they come)."""

  starts: np.ndarray  # [documents], the first token of each
  edges: np.ndarray  # [documents + 1], where in the epoch's pairs each begins, and the last one ends
  rows: np.ndarray | None


class Packed:
  """Rows of a tokenized corpus: of endless epochs, each in an order of its own, or of `once` through in stored order.

  tokens: unsigned [T]; offsets: int64 [documents + 1]; seed: None keeps the stored order of documents and rows.
  """

  def __init__(self, tokens, offsets, length, *, seed=None, once=False, eval_steps=-1):
    pairs = np.diff(offsets) - 1
    self._tokens, self._once, self._eval_steps = tokens, once, eval_steps
    self._seed = None if once else seed
    self._starts, self._pairs = offsets[:-1][pairs > 0], pairs[pairs > 0]
    self._epochs = {}
    self.length = length
    self.num_pairs = int(self._pairs.sum())
    self.num_rows = -(-self.num_pairs // length) if once else None
    self.fill = self.num_pairs / (self.num_rows * length) if self.num_rows else 1.0

  def num_batches(self, batch_rows):
    """Batches of one evaluation (eval_steps, at most one epoch), or None: training data has no end."""
    return _num_batches(self.num_rows, batch_rows, self._eval_steps)

  def rows(self, start, stop):
    """The batch dict of rows [start, stop), found in O(log documents). Behind the end of `once` rows are padding."""
    row, starts, counts = self._pieces(self._begins(start, stop))
    size, real = (stop - start) * self.length, int(counts.sum())
    piece_at = np.cumsum(counts) - counts
    position = np.arange(real) - np.repeat(piece_at, counts)
    index = position + np.repeat(starts, counts)
    number_in_row = np.arange(len(row)) - np.searchsorted(row, row) + 1

    def batch(values, dtype=np.int32):
      array = np.zeros(size, dtype)
      array[:real] = values
      return array.reshape(stop - start, self.length)

    return {
        "inputs": batch(self._tokens[index]),
        "targets": batch(self._tokens[index + 1]),
        "positions": batch(position),
        "segmentations": batch(np.repeat(number_in_row, counts)),
        "loss_weights": batch(1.0, np.float32),
    }

  def _begins(self, start, stop):
    """The pair with which each row served begins, counted through all epochs: int64 [stop - start]."""
    row = np.arange(start, stop)
    if self._seed is not None:
      epochs = row * self.length // self.num_pairs
      for epoch in np.unique(epochs).tolist():
        here, first = epochs == epoch, self._first_row(epoch)
        row[here] = first + self._epoch(epoch).rows[row[here] - first]
    return row * self.length

  def _pieces(self, begins):
    """The pieces of documents that fill the rows which begin so: their rows, first tokens and numbers of pairs."""
    ends = begins + self.length
    if self._once:
      ends = np.minimum(ends, self.num_pairs)
    parts = []
    for epoch in range(begins.min() // self.num_pairs, -(-ends.max() // self.num_pairs)):
      low, high = np.clip([begins - epoch * self.num_pairs, ends - epoch * self.num_pairs], 0, self.num_pairs)
      row = np.flatnonzero(low < high)
      starts, edges, _ = self._epoch(epoch)
      first = np.searchsorted(edges, low[row], side="right") - 1
      number = np.searchsorted(edges, high[row]) - first  # of documents that the row touches
      document = np.arange(number.sum()) + np.repeat(first - np.cumsum(number) + number, number)
      row = np.repeat(row, number)
      begin, end = np.maximum(low[row], edges[document]), np.minimum(high[row], edges[document + 1])
      parts.append((row, starts[document] + begin - edges[document], end - begin))
    row, starts, counts = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int64)
    order = np.argsort(row, kind="stable")  # a row may reach from one epoch into the next
    return row[order], starts[order], counts[order]

  def _epoch(self, epoch):
    """The Epoch of this number; those of the last two asked for are kept: a row may reach from one into the next."""
    if self._seed is None:
      epoch = 0
    if epoch not in self._epochs:
      order, rows = slice(None), None
      if self._seed is not None:
        order = self._permutation(epoch, 0, len(self._pairs))
        rows = self._permutation(epoch, 1, self._first_row(epoch + 1) - self._first_row(epoch))
      edges = np.concatenate([[0], np.cumsum(self._pairs[order])])
      kept = list(self._epochs.items())[-1:]
      self._epochs = dict([*kept, (epoch, Epoch(self._starts[order], edges, rows))])
    return self._epochs[epoch]

  def _first_row(self, epoch):
    return -(-epoch * self.num_pairs // self.length)

  def _permutation(self, epoch, stream, size):
    # Raw numbers: NumPy promises their stream for ever, and that of permutation() it does not.
    numbers = np.random.Philox(key=[self._seed, epoch], counter=[0, 0, 0, stream]).random_raw(size)
    return np.argsort(numbers, kind="stable")


class Whole:
  """Rows that are one segment each, of a source that computes them: sources.Synthetic."""

  def __init__(self, source, eval_steps=-1):
    self._source, self._eval_steps = source, eval_steps
    self.length, self.num_rows = source.length, source.num_rows

  def num_batches(self, batch_rows):
    """As Packed.num_batches."""
    return _num_batches(self.num_rows, batch_rows, self._eval_steps)

  def rows(self, start, stop):
    """As Packed.rows."""
    tokens = self._source.tokens(start, stop)
    real = np.arange(start, stop)[:, None] < (stop if self.num_rows is None else self.num_rows)
    positions = np.broadcast_to(np.arange(self.length, dtype=np.int32), (stop - start, self.length))
    return {
        "inputs": tokens[:, :-1] * real,
        "targets": tokens[:, 1:] * real,
        "positions": positions * real,
        "segmentations": np.broadcast_to(real, positions.shape).astype(np.int32),
        "loss_weights": np.broadcast_to(real, positions.shape).astype(np.float32),
    }


def _num_batches(num_rows, batch_rows, eval_steps):
  if num_rows is None:
    return None
  epoch = -(-num_rows // batch_rows)
  return epoch if eval_steps == -1 else min(epoch, eval_steps)


# --- Onto the devices ------------------------------------------------------------------------------------------------


class batches:
  """Iterator over global batches (dicts of jax.Array [batch_rows, length]) from `first_step` on, made by a thread.

  dataset: Packed or Whole. batch(step) is its rows [step, step + 1) * batch_rows; each process makes only those of its
  own devices. The thread works `prefetch` batches ahead and ends with close(), the end of a `with` block, or the last
  batch. What it raises is raised by next(). `reuse` gives batch 0 for ever.
  `wait_seconds` adds up the time next() had to wait.
  """

  def __init__(self, dataset, first_step, batch_rows, sharding, *, prefetch=2, reuse=False):
    self.wait_seconds = 0.0
    self._queue = queue.Queue(prefetch)
    self._stop = threading.Event()
    self._finalize = weakref.finalize(self, self._stop.set)
    self._thread = threading.Thread(
        target=_produce, args=(self._queue, self._stop, dataset, first_step, batch_rows, sharding, reuse),
        name="data prefetch", daemon=True)
    self._thread.start()

  def __iter__(self):
    return self

  def __next__(self):
    if self._stop.is_set():
      raise StopIteration
    begin = time.perf_counter()
    item = self._queue.get()
    self.wait_seconds += time.perf_counter() - begin
    if isinstance(item, dict):
      return item
    self.close()
    raise item

  def close(self):
    """Ends the thread. Safe to call again."""
    self._stop.set()
    self._thread.join()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


def _produce(out, stop, dataset, first_step, batch_rows, sharding, reuse):
  """The thread of batches(); it must not know the iterator itself, so that one that is dropped ends it."""
  def put(item):
    while not stop.is_set():
      try:
        return out.put(item, timeout=0.1)
      except queue.Full:
        pass

  try:
    step, last_step = 0 if reuse else first_step, dataset.num_batches(batch_rows)
    while not stop.is_set() and (last_step is None or step < last_step):
      batch = _place(dataset, step, batch_rows, sharding)
      put(batch)
      while reuse and not stop.is_set():
        put(batch)
      step += 1
    put(StopIteration())
  except Exception as error:  # noqa: BLE001, it is the consumer's
    put(error)


def _place(dataset, step, batch_rows, sharding):
  import jax

  parts = {}

  def part(key, index):
    low, high, _ = index[0].indices(batch_rows)
    if (low, high) not in parts:
      parts[low, high] = dataset.rows(step * batch_rows + low, step * batch_rows + high)
    return parts[low, high][key][:, index[1]]

  shape = (batch_rows, dataset.length)
  return {key: jax.make_array_from_callback(shape, sharding, lambda index, key=key: part(key, index))
          for key in ("inputs", "targets", "positions", "segmentations", "loss_weights")}


# --- The corpus ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Tokenized documents, those for training first: tokens unsigned [T], offsets int64 [documents + 1]."""

  manifest: dict
  tokens: np.ndarray
  offsets: np.ndarray
  tokenizer: object

  def write(self, directory):
    """Writes the files, each at once (tmp + rename), and the manifest, which makes them count, last."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").unlink(missing_ok=True)
    contents = {"tokens": self.tokens.tobytes(), "offsets": self.offsets.tobytes(),
                "tokenizer.model": self.tokenizer.model, "manifest.json": json.dumps(self.manifest, indent=1).encode()}
    for name, content in contents.items():
      part = directory / f"{name}.{os.getpid()}.tmp"
      part.write_bytes(content)
      part.replace(directory / name)

  @classmethod
  def read(cls, directory):
    """The corpus in `directory`, None where it has no manifest. Raises DataError when a file has changed since."""
    try:
      manifest = json.loads((directory / "manifest.json").read_text())
      written, digests = manifest["format"], manifest["sha256"]
    except (FileNotFoundError, NotADirectoryError):
      return None
    except (ValueError, KeyError) as error:
      raise DataError(f"{directory}/manifest.json: is damaged. Bring it back, or delete {directory} to have it made"
                      " again from the source.") from error
    if written != FORMAT:
      raise DataError(f"{directory}/manifest.json: format={written}, and this version reads {FORMAT}. Use the version"
                      " that wrote it, or another run_name.")
    files = {}
    for name, digest in digests.items():
      path = directory / name
      if "://" in os.fspath(path):
        files[name] = np.frombuffer(path.read_bytes(), np.uint8)
      else:
        files[name] = np.asarray(np.memmap(path, np.uint8, mode="r"))  # the subclass is slower
      if hashlib.sha256(files[name]).hexdigest() != digest:
        raise DataError(f"{path}: is damaged (SHA-256 differs from manifest.json). Bring it back, or delete"
                        f" {directory} to have it made again from the source.")
    kind = tokenizer.TOKENIZERS[manifest["tokenizer"]]
    return cls(manifest, files["tokens"].view(manifest["dtype"]), files["offsets"].view("<i8"),
               kind(files["tokenizer.model"].tobytes()))


def _open_corpus(cfg, directory, process_index, process_count):
  """The run's snapshot; process 0 makes it where there is none, or where force_data_resume allows another."""
  request = _request(cfg)
  deadline = time.monotonic() + SNAPSHOT_WAIT_SECONDS
  while True:
    corpus = Corpus.read(directory)
    if corpus and corpus.manifest["request"] == request:
      return corpus
    if corpus and not cfg.force_data_resume:
      stored = corpus.manifest["request"]
      key = next(key for key in request | stored if request.get(key) != stored.get(key))
      raise ConfigError(f"{key}={request.get(key)}: the run's data in {directory} was made with"
                        f" {key}={stored.get(key)}. Set it back, use another run_name, or set force_data_resume=true.")
    if process_index == 0:
      corpus = _prepare(cfg, request)
      try:
        corpus.write(directory)
      except OSError as error:
        raise StorageError(f"{directory}: the run's data cannot be written ({error.strerror}). Make room or set"
                           " base_output_directory.") from error
    elif time.monotonic() > deadline:
      raise DataError(f"{directory}: process {process_index} of {process_count} waited {SNAPSHOT_WAIT_SECONDS} s for"
                      " process 0 to write it. Set base_output_directory to one place that all hosts see.")
    else:
      time.sleep(0.2)


def _request(cfg):
  request = {key: getattr(cfg, key) for key in REQUEST}
  if request["tokenizer_type"] == "bpe":
    request["vocab_size"] = cfg.vocab_size
  return request


def _prepare(cfg, request):
  """The corpus from data_cache_dir when the same files (names, sizes, times) were prepared before, else made now."""
  files = sources.SOURCES[cfg.dataset_type](cfg.dataset_path)
  eval_files = sources.text(cfg.eval_dataset_path, "eval_dataset_path") if cfg.eval_dataset_path else None
  given = tokenizer.load_given(cfg.tokenizer_path) if cfg.tokenizer_path else None
  if not cfg.data_cache_dir:
    return _build(request, files, eval_files, given, None)
  seen = [FORMAT, tokenizer.SETTINGS, request, files.origin, sources.stamps(files),
          sources.stamps(eval_files) if eval_files else [], given.fingerprint if given else ""]
  cache = epath.Path(cfg.data_cache_dir)
  directory = cache / "corpora" / hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]
  try:
    corpus = Corpus.read(directory)
  except (OSError, DataError):
    corpus = None
  if corpus is None:
    corpus = _build(request, files, eval_files, given, cache / "tokenizers")
    try:
      corpus.write(directory)
    except OSError as error:
      print(f"data: data_cache_dir={cache} cannot be written ({error.strerror}): the next run prepares its data again",
            file=sys.stderr)
  return corpus


def _build(request, files, eval_files, given, tokenizer_cache):
  """Reads, splits and tokenizes the documents of `files` and `eval_files` (None: hold out a share of `files`).

  given: the tokenizer of tokenizer_path, or None.
  """
  texts = list(sources.documents(files, request["max_dataset_chars"]))
  if not texts:
    raise DataError(f"dataset_path={request['dataset_path']}: no text in its {len(files.paths)} files. Give others.")
  digests = [hashlib.sha256(text.encode()).digest() for text in texts]
  if eval_files:
    held_out = list(sources.documents(eval_files, request["max_dataset_chars"]))
    if not held_out:
      raise DataError(f"eval_dataset_path={request['eval_dataset_path']}: no text in its files. Give others.")
    split, num_train = f"from {eval_files.origin}", len(texts)
    texts, digests = texts + held_out, digests + [hashlib.sha256(text.encode()).digest() for text in held_out]
  else:
    split, fraction = "held out by hash of content", request["eval_fraction"]
    shares = np.array([int.from_bytes(digest[:8], "big") for digest in digests]) / 2.0**64
    out = shares < fraction
    if fraction and len(texts) > 1:  # few documents: at least one on either side
      out[shares.argmin()], out[shares.argmax()] = True, False
    elif len(texts) == 1:
      out[:] = False
    order = np.argsort(out, kind="stable")
    texts, digests, num_train = [texts[i] for i in order], [digests[i] for i in order], int((~out).sum())

  if given:
    words = given
  elif request["tokenizer_type"] == "byte":
    words = tokenizer.Byte()
  else:
    sample = _sample(texts[:num_train], request["max_corpus_chars"])
    words = tokenizer.train(sample, request["vocab_size"], tokenizer_cache)
  for key, edge in (("add_bos", words.bos_id), ("add_eos", words.eos_id)):
    if request[key] and edge < 0:
      raise ConfigError(f"{key}=true: the tokenizer has no such piece. Set {key}=false.")

  begin = np.array([words.bos_id] if request["add_bos"] else [], words.dtype)
  end = np.array([words.eos_id] if request["add_eos"] else [], words.dtype)
  encoded = words.encode_documents(texts)
  tokens = np.concatenate([part for ids in encoded for part in (begin, ids, end)])
  offsets = np.cumsum([0] + [len(begin) + len(ids) + len(end) for ids in encoded], dtype="<i8")
  manifest = {
      "format": FORMAT,
      "request": request,
      "origin": files.origin,
      "fingerprint": hashlib.sha256(b"".join([*digests[:num_train], b"|", *digests[num_train:]])
                                    + bytes([request["add_bos"], request["add_eos"]])).hexdigest(),
      "train_documents": num_train,
      "eval_documents": len(texts) - num_train,
      "split": split,
      "bytes": sum(len(text.encode()) for text in texts),
      "tokenizer": words.kind,
      "dtype": words.dtype.str,
      "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in (
          ("tokens", tokens), ("offsets", offsets), ("tokenizer.model", words.model))},
  }
  return Corpus(manifest, tokens, offsets, words)


def _sample(texts, max_chars):
  """About `max_chars` of the texts, in pieces spread evenly over them: a few long documents are not all of a corpus."""
  share = min(1.0, max_chars / sum(map(len, texts)))
  due = 1.0 - share
  for text in texts:
    for i in range(0, len(text), tokenizer.SENTENCE_CHARS):
      due += share
      if due >= 1.0:
        due -= 1.0
        yield text[i:i + tokenizer.SENTENCE_CHARS]
