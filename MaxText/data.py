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
import math
import os
import queue
import sys
import threading
import time
import weakref
from typing import NamedTuple

import numpy as np
from etils import epath

from MaxText import corpus, pyconfig, sources, streams, tokenizer
from MaxText.errors import ConfigError, DataError

# The order in which documents and rows come; a run goes on only in the order it began with.
ORDER = 2
SEQUENTIAL = (streams.Streams, streams.Mixture)  # whose state is more than the step


@dataclasses.dataclass(frozen=True)
class Data:
  """The dataset for training, those for evaluation by name ("": the main one), and the tokenizer (None: synthetic)."""

  train: object
  evals: dict
  tokenizer: object
  identity: dict
  summary: str
  force_resume: bool
  reuse: bool = False  # the first batch for ever

  @property
  def eval(self):
    """The main dataset for evaluation, None where there is none."""
    return self.evals.get("")

  def position(self, step):
    """What a checkpoint after `step` steps stores: JSON-able, under 5 KB. batch(step) is a function of it alone.

    Called by all processes, where documents are read while training.
    """
    position = {**self.identity, "step": step}
    if isinstance(self.train, SEQUENTIAL) and not self.reuse:
      position["streams"] = streams.merge(_from_all_processes(self.train.position(step)))
    return position

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

  def resume(self, position):
    """Goes on from a position. Where documents are read while training and force_data_resume has changed what they are,
    from their beginning. Raises as check()."""
    self.check(position)
    if isinstance(self.train, SEQUENTIAL) and not self.reuse:
      same = all(self.identity[key] == position.get(key) for key in self.identity) and "streams" in position
      self.train.seek(position["step"], position["streams"] if same else self.train.position(0))

  def close(self):
    """Ends processes that read and tokenize."""
    if isinstance(self.train, SEQUENTIAL):
      self.train.close()


def _from_all_processes(position):
  """[position] of each process, in order."""
  import jax

  if jax.process_count() == 1:
    return [position]
  from jax.experimental import multihost_utils

  text = np.frombuffer(json.dumps(position).encode(), np.uint8)
  padded = np.zeros(int(multihost_utils.process_allgather(np.int32(len(text))).max()), np.uint8)
  padded[:len(text)] = text
  return [json.loads(bytes(row).rstrip(b"\0")) for row in multihost_utils.process_allgather(padded)]


# --- What the config names -------------------------------------------------------------------------------------------


def open(cfg, *, process_index=0, process_count=1):
  """The Data of a resolved config: from the run's snapshot, else from data_cache_dir, else read and tokenized now.

  Process 0 writes the snapshot; the others wait for it. Raises ConfigError, DataError, StorageError.
  """
  length, seed = cfg.max_target_length, cfg.data_shuffle_seed
  identity = {"corpus": "", "tokenizer": "", "data_shuffle_seed": seed, "max_target_length": length,
              "global_batch_size": cfg.global_batch_size, "enable_data_shuffling": cfg.enable_data_shuffling}
  if cfg.dataset_type == "synthetic":
    train = Whole(sources.Synthetic(cfg.vocab_size, length, seed))
    held_out = Whole(sources.Synthetic(cfg.vocab_size, length, seed, held_out=True), cfg.eval_steps)
    identity |= {"corpus": f"synthetic-{corpus.FORMAT}-{cfg.vocab_size}", "tokenizer": "none"}
    summary = (f"data: synthetic, made from data_shuffle_seed={seed}: a perfect model reaches loss"
               f" {sources.Synthetic.ENTROPY:.3f}, a uniform guess {np.log(cfg.vocab_size):.3f}; evaluation:"
               f" {held_out.num_rows} rows of another stream")
    return Data(train, {"": held_out}, None, identity, summary, cfg.force_data_resume)

  opened = _open_small if cfg.dataset_type in sources.SOURCES else _open_large
  train, held_out, words, told, summary = opened(cfg, process_index, process_count)
  evals = {} if held_out is None else {"": held_out}
  if cfg.eval_interval != -1:
    for part in (pyconfig.dataset("eval_datasets", entry) for entry in cfg.eval_datasets):
      name = part.name or cfg.dataset_name
      reader = open_reader(cfg, part.kind, part.path, name, cfg.eval_split, key="eval_datasets")
      evals[part.label] = _eval_rows(cfg, reader, words)
      summary += f"; {part.label}: {evals[part.label].num_pairs} tokens"
  return Data(train, evals, words, {**identity, "tokenizer": words.fingerprint, **told}, summary, cfg.force_data_resume,
              cfg.reuse_example_batch)


def _open_small(cfg, process_index, process_count):
  """Of a corpus that is held in memory: (training, evaluation or None, tokenizer, identity, summary)."""
  held = corpus.open_snapshot(cfg, process_index=process_index, process_count=process_count)
  _check_vocabulary(cfg, held.tokenizer)
  manifest, count, length = held.manifest, held.manifest["train_documents"], cfg.max_target_length
  train = Packed(held.tokens, held.offsets[:count + 1], length, seed=_seed(cfg), epochs=cfg.num_epoch or None)
  held_out = _packed_for_eval(cfg, held.tokens, held.offsets[count:])
  summary = (f"data: {manifest['origin']}: {count} documents, {held.offsets[count]} tokens of"
             f" {manifest['bytes'] / len(held.tokens):.2f} bytes ({held.tokenizer.kind},"
             f" {held.tokenizer.vocab_size} pieces), fill 1.000; evaluation: ")
  if held_out.num_pairs:
    summary += (f"{len(held.offsets) - 1 - count} documents {manifest['split']}, {held_out.num_pairs} tokens, fill"
                f" {held_out.fill:.3f}")
  else:
    summary, held_out = f"{summary}none, for lack of a second document; set eval_dataset_path", None
  told = {"corpus": manifest["fingerprint"], "data_order": train.order}
  return train, held_out, held.tokenizer, told, summary


def _open_large(cfg, process_index, process_count):
  """Of token files, of documents that are read while training, or of a mixture: as _open_small."""
  parts = [pyconfig.dataset("dataset_mixture", entry) for entry in cfg.dataset_mixture] or [
      pyconfig.Dataset("1", cfg.dataset_type, cfg.dataset_path, cfg.dataset_name)]
  readers = [open_reader(cfg, part.kind, part.path, part.name or cfg.dataset_name, cfg.train_split, cfg.hf_train_files)
             for part in parts]
  snapshot = corpus.open_snapshot(cfg, readers, process_index=process_index, process_count=process_count)
  words = snapshot.tokenizer
  _check_vocabulary(cfg, words)
  datasets = []
  for part, reader in zip(parts, readers, strict=True):
    if isinstance(reader, corpus.Corpus):
      _check_words(reader, words, part.path)
      datasets.append(Packed(reader.tokens, reader.offsets, cfg.max_target_length, seed=_seed(cfg),
                             epochs=cfg.num_epoch or None))
    else:
      datasets.append(streams.Streams(
          reader, words, cfg.max_target_length, cfg.global_batch_size, seed=_seed(cfg), add_bos=cfg.add_bos,
          add_eos=cfg.add_eos, packing=cfg.packing, epochs=cfg.num_epoch, workers=cfg.data_workers,
          max_skipped=cfg.max_skipped_records))
  train = datasets[0] if not cfg.dataset_mixture else streams.Mixture(
      {str(i): (dataset, part.label) for i, (part, dataset) in enumerate(zip(parts, datasets, strict=True))},
      cfg.global_batch_size)
  told = {"corpus": _join(reader.fingerprint for reader in readers), "packing": cfg.packing,
          "dataset_mixture": [part.label for part in parts],
          "data_order": [getattr(dataset, "order", ORDER) for dataset in datasets]}
  origins = [reader.origin for reader in readers] if len(parts) == 1 else [
      f"{part.label} of {reader.origin}" for part, reader in zip(parts, readers, strict=True)]
  pieces = f"{words.kind}, {words.vocab_size} pieces"
  summary = f"data: {', '.join(origins)} ({pieces}), packing {cfg.packing}; evaluation: "
  reader = _open_eval_reader(cfg) if cfg.eval_interval != -1 else None
  if reader is None:
    return train, None, words, told, summary + "none; set eval_dataset_path"
  held_out = _eval_rows(cfg, reader, words)
  return train, held_out, words, told, f"{summary}{held_out.num_pairs} tokens of {reader.origin}"


def _open_eval_reader(cfg):
  """The source or token files of the main evaluation set, None where the config names none."""
  kind, path, name = cfg.dataset_type, cfg.eval_dataset_path, cfg.eval_dataset_name or cfg.dataset_name
  if kind == "mixture" and path:
    kind = pyconfig.dataset_type(path, name)
  if not path and kind in ("tfds", "hf"):
    path = cfg.dataset_path
  return open_reader(cfg, kind, path, name, cfg.eval_split, cfg.hf_eval_files, "eval_dataset_path") if path else None


def open_reader(cfg, kind, path, name, split, files="", key="dataset_path"):
  """The source (sources.Shards) or token files (corpus.Corpus) at `path`. Raises ConfigError, DataError."""
  if kind == "tokens":
    return corpus.open_tokens(path)
  how = {"field": cfg.dataset_text_field, "data_errors": cfg.data_errors}
  if kind == "tfds":
    return sources.tfds(path, name, split, **how)
  if kind == "hf":
    return sources.hf(path, cfg.hf_data_dir, files, split, **how)
  return sources.grain(path, key=key, **how)


def _eval_rows(cfg, reader, words):
  """The Packed of a set for evaluation, as much of it as eval_steps asks for. Raises DataError, ConfigError."""
  if isinstance(reader, corpus.Corpus):
    _check_words(reader, words, reader.origin)
    return _packed_for_eval(cfg, reader.tokens, reader.offsets)
  all_of_it = cfg.eval_steps == -1 or cfg.eval_rolling
  held = corpus.tokenize(
      reader, words, add_bos=cfg.add_bos, add_eos=cfg.add_eos,
      max_pairs=0 if all_of_it else cfg.eval_steps * cfg.eval_batch_size * cfg.max_target_length,
      cache_directory=epath.Path(cfg.data_cache_dir) / "corpora" if cfg.data_cache_dir else None)
  rows = _packed_for_eval(cfg, held.tokens, held.offsets)
  if not rows.num_pairs:
    raise DataError(f"{reader.origin}: no document has two tokens to evaluate on. Give others or set eval_interval=-1.")
  return rows


def _packed_for_eval(cfg, tokens, offsets):
  return Packed(tokens, offsets, cfg.max_target_length, epochs=None if cfg.eval_rolling else 1,
                eval_steps=cfg.eval_steps)


def _seed(cfg):
  return cfg.data_shuffle_seed if cfg.enable_data_shuffling else None


def _join(fingerprints):
  first, *others = fingerprints
  return hashlib.sha256("".join([first, *others]).encode()).hexdigest() if others else first


def _check_vocabulary(cfg, words):
  if words.vocab_size > cfg.vocab_size:
    raise ConfigError(f"vocab_size={cfg.vocab_size}: the tokenizer has {words.vocab_size} pieces. Set"
                      f" vocab_size={-(-words.vocab_size // 128) * 128} or choose another tokenizer.")


def _check_words(held, words, path):
  if held.tokenizer.fingerprint != words.fingerprint:
    raise ConfigError(f"{path}: was prepared with another tokenizer than the run has. Prepare it again with"
                      " tokenizer_path=data/tokenizer.model of the run.")


def open_tokenizer(cfg):
  """The tokenizer of the run that `cfg` reopens, or of load_parameters_path: of its own copy of its data, unless
  tokenizer_type or tokenizer_path say another; None where nothing tells. Raises ConfigError, DataError."""
  path = cfg.load_parameters_path.rstrip("/")
  for run in (cfg.run_directory, path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
    manifest = epath.Path(run) / "data" / "manifest.json"
    if run and manifest.exists():
      held = corpus.Corpus.read(manifest.parent)
      key = "tokenizer_path" if cfg.tokenizer_path else "tokenizer_type"
      if held.manifest["request"][key] == getattr(cfg, key):
        return held.tokenizer
  if cfg.tokenizer_path:
    return tokenizer.load_given(cfg.tokenizer_path)
  return tokenizer.Byte() if cfg.tokenizer_type == "byte" else None


# --- Rows by index ---------------------------------------------------------------------------------------------------


class Epoch(NamedTuple):
  """The orders of an epoch: of its documents, and of the rows that begin in it (None: as they come)."""

  documents: object  # Ordered or Stored
  rows: object  # what gives the places of rows, in stored order, by their numbers in the epoch: array or Permutation


class Ordered(NamedTuple):
  """Documents in an order of their own, those without a pair left out."""

  starts: np.ndarray  # [documents], the first token of each
  edges: np.ndarray  # [documents + 1], where in the epoch's pairs each begins, and the last one ends

  def find(self, pair):
    """The document that holds each pair of the epoch."""
    return np.searchsorted(self.edges, pair, side="right") - 1

  def look_up(self, document):
    """First token of each document, and the pairs of the epoch at which it begins and ends."""
    return self.starts[document], self.edges[document], self.edges[document + 1]


class Stored(NamedTuple):
  """Documents of two tokens or more in stored order, by nothing but their offsets: a file that may exceed memory."""

  offsets: np.ndarray  # [documents + 1]

  def find(self, pair):
    """As Ordered.find: the last document with offsets[document] - document <= pair."""
    first, last, documents = int(self.offsets[0]), int(self.offsets[-1]), len(self.offsets) - 1
    token = pair + first
    document = (pair * (documents / (last - first - documents))).astype(np.int64)  # if all were equally long
    while True:  # each round divides what it is off by at least by two, mostly by a document's length
      found = self.offsets.searchsorted(token + document, side="right") - 1
      if (found == document).all():
        return found + (self.offsets[found + 1] <= token + found + 1)
      document = found

  def look_up(self, document):
    """As Ordered.look_up."""
    start, end = self.offsets[document], self.offsets[document + 1]
    before = document + self.offsets[0]
    return start, start - before, end - before - 1


class Permutation:
  """A permutation of range(size) from (seed, epoch), computed for the numbers it is indexed with: an array of them.

  A Feistel network on the two digits of a number in base sqrt(size), walked on while a result is not below `size`
  (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). Its hash is wrapping integer arithmetic, so it is
  the same with every NumPy.
  """

  ROUNDS = 4

  def __init__(self, seed, epoch, size):
    base = math.isqrt(size - 1) + 1
    self._size, self._base = np.uint64(size), np.uint64(base)
    self._digits = (np.uint64(-(-size // base)), self._base)  # how many values each of the two has
    self._keys = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1]).random_raw(self.ROUNDS)

  def __getitem__(self, numbers):
    found = self._encrypt(np.asarray(numbers, np.uint64))
    while (beyond := found >= self._size).any():
      found[beyond] = self._encrypt(found[beyond])
    return found.astype(np.int64)

  def _encrypt(self, numbers):
    changed, other = np.divmod(numbers, self._base)
    for i, key in enumerate(self._keys):
      hashed = (other ^ key) * np.uint64(0x9E3779B97F4A7C15)
      hashed ^= hashed >> np.uint64(32)
      hashed *= np.uint64(0xD6E8FEB86659FD93)
      changed, other = other, (changed + (hashed >> np.uint64(32))) % self._digits[i % 2]
    return changed * self._base + other


class Packed:
  """Rows of a tokenized corpus: of `epochs` epochs, the last row padded, or of endless ones (None).

  tokens: integers [T]; offsets: int64 [documents + 1]; either may be a file in a memory map. seed: None keeps the
  stored order of documents and rows, a number gives each epoch orders of its own.

  Where documents or the rows of an epoch are more than LARGE, documents keep their stored order and the order of rows
  is a Permutation: no epoch costs time or memory. More than LARGE documents must have two tokens or more each.
  """

  LARGE = 1 << 20

  def __init__(self, tokens, offsets, length, *, seed=None, epochs=None, eval_steps=-1):
    self._seed, self._tokens, self._offsets, self._eval_steps = seed, tokens, offsets, eval_steps
    self._epochs = {}
    self.length = length
    documents = len(offsets) - 1
    if documents > self.LARGE:
      self._pairs = None
      self.num_pairs = int(offsets[-1] - offsets[0]) - documents
    else:
      pairs = np.diff(offsets) - 1
      self._starts, self._pairs = offsets[:-1][pairs > 0], pairs[pairs > 0]
      self.num_pairs = int(self._pairs.sum())
    self._large = max(documents, self.num_pairs // length) > self.LARGE
    self._end = np.iinfo(np.int64).max if epochs is None else epochs * self.num_pairs
    self.num_rows = None if epochs is None else -(-self._end // length)
    self.fill = self._end / (self.num_rows * length) if self.num_rows else 1.0
    self.order = ORDER + 1 if self._large and self._seed is not None else ORDER

  def num_batches(self, batch_rows):
    """Batches until the rows end (at most eval_steps), or None: endless epochs."""
    return _num_batches(self.num_rows, batch_rows, self._eval_steps)

  def rows(self, start, stop):
    """The batch dict of rows [start, stop), found in O(log documents). Behind the last row are rows of padding."""
    row, starts, counts = self._pieces(self._begins(start, stop))
    ends = counts.cumsum()
    places, real = ends - counts, int(counts.sum())  # in the batch without its padding
    inputs = self._tokens[np.arange(real) + (starts - places).repeat(counts)].astype(np.int32)
    targets = np.empty_like(inputs)
    targets[:-1] = inputs[1:]
    targets[ends - 1] = self._tokens[starts + counts]
    number_in_row = np.arange(1, len(row) + 1) - row.searchsorted(row)
    flat = {
        "inputs": inputs,
        "targets": targets,
        "positions": np.arange(real, dtype=np.int32) - places.astype(np.int32).repeat(counts),
        "segmentations": number_in_row.astype(np.int32).repeat(counts),
        "loss_weights": np.ones(real, np.float32),
    }
    shape = (stop - start, self.length)
    if real == (stop - start) * self.length:
      return {key: values.reshape(shape) for key, values in flat.items()}
    filled = np.bincount(row, counts, stop - start)[:, None] > np.arange(self.length)
    padded = {key: np.zeros(shape, values.dtype) for key, values in flat.items()}
    for key, values in flat.items():
      padded[key][filled] = values
    return padded

  def _begins(self, start, stop):
    """The pair with which each row served begins, counted through all epochs: int64 [stop - start]."""
    row = np.arange(start, stop)
    if self._seed is not None:
      epochs = row * self.length // self.num_pairs
      for epoch in sorted(set(epochs.tolist())):
        if epoch * self.num_pairs < self._end:
          here, first = epochs == epoch, self._first_row(epoch)
          row[here] = first + self._epoch(epoch).rows[row[here] - first]
    return row * self.length

  def _pieces(self, begins):
    """The pieces of documents that fill the rows which begin so: their rows, first tokens and numbers of pairs."""
    ends = np.minimum(begins + self.length, self._end)
    parts = []
    for epoch in range(begins.min() // self.num_pairs, -(-ends.max() // self.num_pairs)):
      low = np.maximum(begins - epoch * self.num_pairs, 0)
      high = np.minimum(ends - epoch * self.num_pairs, self.num_pairs)
      row = (low < high).nonzero()[0]
      low, high, documents = low[row], high[row], self._epoch(epoch).documents
      first, last = documents.find(np.concatenate([low, high - 1])).reshape(2, -1)
      number = last - first + 1  # of documents that the row touches
      past = number.cumsum()
      heads, tails = past - number, past - 1  # its first and last among all pieces
      start, begin, end = documents.look_up(np.arange(past[-1] if len(row) else 0) + (first - heads).repeat(number))
      start[heads] += low - begin[heads]
      begin[heads], end[tails] = low, high
      parts.append((row.repeat(number), start, end - begin))
    if len(parts) == 1:
      return parts[0]
    row, starts, counts = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int64)
    order = np.argsort(row, kind="stable")  # a row may reach from one epoch into the next
    return row[order], starts[order], counts[order]

  def _epoch(self, epoch):
    """The Epoch of this number; those of the last two asked for are kept: a row may reach from one into the next."""
    if self._seed is None:
      epoch = 0
    if epoch not in self._epochs:
      kept = list(self._epochs.items())[-1:]
      self._epochs = dict([*kept, (epoch, Epoch(self._order_documents(epoch), self._order_rows(epoch)))])
    return self._epochs[epoch]

  def _order_documents(self, epoch):
    if self._pairs is None:
      return Stored(self._offsets)
    order = slice(None)
    if self._seed is not None and not self._large:
      order = self._sort_randomly(epoch, 0, len(self._pairs))
    return Ordered(self._starts[order], np.concatenate([[0], np.cumsum(self._pairs[order])]))

  def _order_rows(self, epoch):
    size = self._first_row(epoch + 1) - self._first_row(epoch)
    if self._seed is None:
      return None
    return Permutation(self._seed, epoch, size) if self._large else self._sort_randomly(epoch, 1, size)

  def _first_row(self, epoch):
    return -(-epoch * self.num_pairs // self.length)

  def _sort_randomly(self, epoch, stream, size):
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

  dataset: Packed, Whole, Streams or Mixture. batch(step) is its rows [step, step + 1) * batch_rows; each process makes
  only those of its own devices. The thread works `prefetch` batches ahead and ends with close(), the end of a `with`
  block, the last batch, or the first that is all padding, on all processes. What it raises is raised by next().
  `reuse` gives the first batch for ever, `count` so many, whatever the dataset has. local_rows (low, high): numpy
  arrays of these rows instead, on no device. `wait_seconds` adds up the time next() had to wait.
  """

  def __init__(self, dataset, first_step, batch_rows, sharding, *, prefetch=2, reuse=False, count=None,
               local_rows=None):
    self.wait_seconds = 0.0
    self._ends = isinstance(dataset, streams.Streams) and dataset.epochs > 0  # where is known when it is read
    self._queue = queue.Queue(prefetch)
    self._stop = threading.Event()
    self._finalize = weakref.finalize(self, self._stop.set)
    self._thread = threading.Thread(
        target=_produce, name="data prefetch", daemon=True,
        args=(self._queue, self._stop, dataset, first_step, batch_rows, sharding, reuse, count, local_rows))
    self._thread.start()

  def __iter__(self):
    return self

  def __next__(self):
    if self._stop.is_set():
      raise StopIteration
    begin = time.perf_counter()
    item = self._queue.get()
    self.wait_seconds += time.perf_counter() - begin
    if isinstance(item, tuple):
      batch, is_real = item
      if not self._ends or any(_from_all_processes(is_real)):
        return batch
      item = StopIteration()
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


def _produce(out, stop, dataset, first_step, batch_rows, sharding, reuse, count, local_rows):
  """The thread of batches(); it must not know the iterator itself, so that one that is dropped ends it."""
  def put(item):
    while not stop.is_set():
      try:
        return out.put(item, timeout=0.1)
      except queue.Full:
        pass

  try:
    step, last_step = 0 if reuse else first_step, dataset.num_batches(batch_rows)
    if count is not None:
      last_step = step + count
    while not stop.is_set() and (last_step is None or step < last_step):
      if local_rows:
        batch = dataset.rows(*(step * batch_rows + row for row in local_rows))
        batch = batch, bool(batch["loss_weights"].any())
      else:
        batch = _place(dataset, step, batch_rows, sharding)
      put(batch)
      while reuse and not stop.is_set():
        put(batch)
      step += 1
    put(StopIteration())
  except Exception as error:  # noqa: BLE001, it is the consumer's
    put(error)


def _place(dataset, step, batch_rows, sharding):
  """(batch of a step, whether this process's rows hold more than padding)."""
  import jax

  parts = {}

  def part(key, index):
    low, high, _ = index[0].indices(batch_rows)
    if (low, high) not in parts:
      parts[low, high] = dataset.rows(step * batch_rows + low, step * batch_rows + high)
    return parts[low, high][key][:, index[1]]

  shape = (batch_rows, dataset.length)
  batch = {key: jax.make_array_from_callback(shape, sharding, lambda index, key=key: part(key, index))
           for key in ("inputs", "targets", "positions", "segmentations", "loss_weights")}
  return batch, any(bool(rows["loss_weights"].any()) for rows in parts.values())
