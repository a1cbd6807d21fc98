# SPDX-License-Identifier: Apache-2.0
"""Rows of corpora that are read in sequence and tokenized while training; a few integers say where each row begins.

A global batch is V slots of equally many rows, V the largest divisor of its rows up to MAX_SLOTS. Each slot reads
documents of its own, so a host reads only those of its rows, and no batch depends on how many hosts there are.
A shard is cut into k parts, part p = its records i with i % k == p, k the least number that gives the slots equally
many parts, to within a tenth.
Slot v reads the parts v, v + V, v + 2V, ... of an epoch's order, then those of its own next epoch: every document comes
once in each epoch. A part is read in windows of documents, which are shuffled, tokenized and packed:

  concat    pairs (input, target) of the window's documents follow each other without a gap, through windows and epochs
  best_fit  documents go whole where they fit a row, in the fullest row that takes them; longer ones are cut into whole
            rows and a rest. A window ends where its documents fill their rows best

The state of a slot is [epoch, place of the part in the slot's order, record of the part with which the window begins,
pairs (best_fit: rows) of the window that are used]. Going on from one reads that window again, so nothing else is kept.
Batches are those of data.Packed: the same pieces, positions, segments and weights for the same documents in order.
Worker processes make rows ahead. They never change a row, and import only what the source and the tokenizer need.
"""

import bisect
import collections
import fractions
import itertools
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from multiprocessing import connection
from typing import NamedTuple

import numpy as np

from MaxText import tokenizer
from MaxText.errors import ConfigError, DataError

MAX_SLOTS = 128
CHUNK_TOKENS = 16384  # made and handed over at once; row by row, the calls would cost as much as the tokenizer
GROUP = 128  # documents tokenized in one call; best_fit must have its whole window
CHUNKS_AHEAD = 2  # of each slot, made by workers before they are asked for
KEPT_STATES = 64  # batches back from the last one made: the step that is saved is behind those made ahead
EMPTY_EPOCHS = 100  # that a slot passes before it says so: with shuffled shards the next one may hold something
SLACK = 1.004  # best-fit needs so much more than its documents, or a row more. Fill on C4 0.994 at 1,024 to 8,192
MAX_PERIOD = 1 << 16
PACKINGS = ("concat", "best_fit")
PLANES = ("inputs", "targets", "positions", "segmentations")  # of rows in the making: int32 [4, rows, length]


class Streams:
  """Rows of a source that is read in sequence, batch after batch from the first, or from where seek() says.

  source: `origin`, `fingerprint`, `shards` and read(shard, start, step), which yields for every step-th record from
  `start` on a str, an array of token ids, or None (skipped); it may raise DataError. words: a tokenizer. seed: None
  keeps the stored order. epochs: 0 is endless; a slot that has read so many gives padding for ever. window: documents
  shuffled together. workers: processes that read and tokenize; 0 does it in the calling thread. max_skipped: records
  that may be skipped here before it is a DataError.
  rows() and seek() are for one thread, position() for any. Raises ConfigError.
  """

  num_rows = None

  def __init__(self, source, words, length, batch_rows, *, seed=None, add_bos=False, add_eos=True, packing="concat",
               epochs=0, window=256, workers=0, max_skipped=sys.maxsize):
    assert packing in PACKINGS, packing
    edges = []
    for key, wanted, edge in (("add_bos", add_bos, words.bos_id), ("add_eos", add_eos, words.eos_id)):
      if wanted and edge < 0:
        raise ConfigError(f"{key}=true: the tokenizer has no such piece. Set {key}=false.")
      edges.append([edge] if wanted else [])
    self.length, self.batch_rows, self.epochs = length, batch_rows, epochs
    self.skipped, self._max_skipped, self._origin = 0, max_skipped, source.origin
    self.num_slots = max(n for n in range(1, MAX_SLOTS + 1) if batch_rows % n == 0)
    self.slot_rows = batch_rows // self.num_slots
    plan = Plan(source, words.kind, words.model, length, self.num_slots, seed, *edges, packing, epochs, window,
                -(-CHUNK_TOKENS // length))
    self._makers = _Workers(plan, workers) if workers else _Thread(plan)
    self.seek(0, [[0, 0, 0, 0]] * self.num_slots)

  def num_batches(self, _batch_rows):
    """None: how many there are is known when they have been read."""
    return None

  def rows(self, start, stop):
    """The batch dict of the rows [start, stop), all of one batch: the last one made, or the next. Raises DataError."""
    step, low = divmod(start, self.batch_rows)
    high = low + stop - start
    parts = []
    for slot in self.slots(low, high):
      first = slot * self.slot_rows
      parts.append(self.take(step, slot, self.slot_rows)[:, max(low - first, 0):high - first])
    return _as_batch(np.concatenate(parts, axis=1))

  def slots(self, low, high):
    """The slots that rows [low, high) of a batch belong to; they begin to work, all of them."""
    slots = range(low // self.slot_rows, -(-high // self.slot_rows))
    for slot in slots:
      if slot not in self._stocks:
        self._stocks[slot] = _Stock(self._states[self._first][slot], self._first - 1)
        self._makers.open(slot, self._stocks[slot].state)
    return slots

  def take(self, step, slot, count):
    """The `count` rows that a slot gives to batch `step`, its last one or the next: int32 [4, count, length],
    see PLANES. Raises DataError."""
    stock = self._stocks[slot]
    if stock.step != step:
      assert step == stock.step + 1, f"slot {slot} is at batch {stock.step + 1}, not {step}: seek() first"
      before, parts, missing = stock.state, [np.zeros((len(PLANES), 0, self.length), np.int32)], count
      while missing:
        if stock.next == stock.height:
          chunk = self._makers.chunk(slot)
          self.skipped += chunk.skipped
          if self.skipped > self._max_skipped:
            raise DataError(f"max_skipped_records={self._max_skipped}: {self.skipped} damaged records of {self._origin}"
                            " were skipped in this process. Mend them, or raise it.")
          stock.fill(chunk, self.length)
        parts.append(stock.draw(missing))
        missing -= parts[-1].shape[1]
      stock.step, stock.batch = step, parts[-1] if len(parts) <= 2 else np.concatenate(parts, axis=1)
      self._states.setdefault(step, {})[slot] = before
      self._states.setdefault(step + 1, {})[slot] = stock.state
      self._states.pop(step - KEPT_STATES, None)
    assert stock.batch.shape[1] == count
    return stock.batch

  @property
  def exhausted(self):
    """Whether all slots that gave rows here have ended: what they give from now on is padding."""
    return bool(self._stocks) and all(stock.ended for stock in self._stocks.values())

  def position(self, step):
    """The state before batch `step`, one of the last made or the next: a list with an item for each slot, None for
    those that gave no rows here. JSON-able, under 4 KB. See merge()."""
    states = self._states.get(step)
    assert states, f"the state before batch {step} is not kept"
    return [states.get(slot) for slot in range(self.num_slots)]

  def seek(self, step, position):
    """Goes on with batch `step` from a merged position(step) of any number of hosts. Raises ConfigError."""
    if len(position) != self.num_slots:
      raise ConfigError(f"global_batch_size={self.batch_rows}: reads {self.num_slots} streams, and the checkpoint holds"
                        f" the places of {len(position)}. Set it back, or start a new run from its parameters.")
    assert None not in position, "merge the positions of all hosts"
    self._first = step
    self._states = {step: dict(enumerate(position))}
    self._stocks = {}
    self._makers.reset()

  def close(self):
    """Ends the workers. Safe to call again; no rows come after it."""
    self._makers.close()


class Mixture:
  """Rows of several datasets in exact proportion: after any number of batches, each has given its share of the rows to
  within one.

  datasets: {name: (Streams of the same batch_rows or data.Packed, weight)}; weights are relative. Which dataset the
  rows of a batch come from depends on the number of the batch alone, and every slot meets every dataset.
  Used as Streams is. A dataset that ends before the others gives padding. Raises ConfigError.
  """

  num_rows = None

  def __init__(self, datasets, batch_rows):
    self._datasets = {name: dataset for name, (dataset, _) in datasets.items()}
    self.batch_rows = batch_rows
    self.length, = {dataset.length for dataset in self._datasets.values()}
    assert {stream.batch_rows for stream in self._streams().values()} <= {batch_rows}
    self._shares = _whole_shares({name: weight for name, (_, weight) in datasets.items()})
    self._pattern = _spread(self._shares)
    self._given = [np.concatenate([[0], np.cumsum(self._pattern == i)]) for i in range(len(self._shares))]

  def num_batches(self, _batch_rows):
    """None: a mixture has no known end."""
    return None

  def rows(self, start, stop):
    """As Streams.rows."""
    step, low = divmod(start, self.batch_rows)
    high = low + stop - start
    owners = self._owners(step)
    planes = np.zeros((len(PLANES), stop - start, self.length), np.int32)
    for number, dataset in enumerate(self._datasets.values()):
      if isinstance(dataset, Streams):
        for slot in dataset.slots(low, high):
          first = slot * dataset.slot_rows
          where = first + np.flatnonzero(owners[first:first + dataset.slot_rows] == number)
          rows = dataset.take(step, slot, len(where))
          here = (where >= low) & (where < high)
          planes[:, where[here] - low] = rows[:, here]
      else:
        where = np.flatnonzero(owners == number)
        first, last = np.searchsorted(where, [low, high])
        if first < last:
          before = self._rows_before(number, step * self.batch_rows)
          rows = dataset.rows(before + first, before + last)
          planes[:, where[first:last] - low] = [rows[key] for key in PLANES]
    return _as_batch(planes)

  @property
  def exhausted(self):
    """Whether all datasets have ended: never, where one of them is endless."""
    return all(isinstance(dataset, Streams) and dataset.exhausted for dataset in self._datasets.values())

  @property
  def skipped(self):
    """Records skipped so far, of all datasets."""
    return sum(stream.skipped for stream in self._streams().values())

  def position(self, step):
    """{name: position} of the datasets that are read in sequence; the others' rows follow from the step."""
    return {name: stream.position(step) for name, stream in self._streams().items()}

  def seek(self, step, position):
    """As Streams.seek."""
    for name, stream in self._streams().items():
      stream.seek(step, position[name])

  def close(self):
    """As Streams.close."""
    for stream in self._streams().values():
      stream.close()

  def _streams(self):
    return {name: dataset for name, dataset in self._datasets.items() if isinstance(dataset, Streams)}

  def _rows_before(self, number, row):
    """How many of the rows before `row`, the first one of a batch, are of the dataset of this number."""
    periods, rest = divmod(row, len(self._pattern))
    return periods * self._shares[number] + int(self._given[number][rest])

  def _owners(self, step):
    """The number of the dataset that each row of a batch is of: int [batch_rows].

    The pattern gives how many are of each. It is shuffled, or where its period and the slots have a common divisor a
    slot might never meet a dataset, whose documents of that slot would be lost.
    """
    row = np.arange(step * self.batch_rows, (step + 1) * self.batch_rows)
    return self._pattern[row % len(self._pattern)][_permutation([step, 0], [0, 0, 0, 3], self.batch_rows)]


def merge(positions):
  """The position of a whole run from those of all its hosts at the same step."""
  if isinstance(positions[0], dict):
    return {name: merge([position[name] for position in positions]) for name in positions[0]}
  return [next((state for state in states if state is not None), None) for states in zip(*positions, strict=True)]


def _whole_shares(weights):
  """The weights as the least whole numbers in the same proportion. Raises ConfigError."""
  exact = []
  for name, weight in weights.items():
    try:
      exact.append(fractions.Fraction(str(weight)))
    except ValueError:
      exact.append(0)
    if exact[-1] <= 0:
      raise ConfigError(f"dataset_mixture: {name}={weight}: a weight must be a positive number. Give one, or leave the"
                        " dataset out.")
  whole = math.lcm(*(weight.denominator for weight in exact))
  shares = [int(weight * whole) for weight in exact]
  shares = [share // math.gcd(*shares) for share in shares]
  if sum(shares) > MAX_PERIOD:
    raise ConfigError(f"dataset_mixture: weights {', '.join(map(str, weights.values()))} repeat only after"
                      f" {sum(shares)} rows, over {MAX_PERIOD}. Round them to four digits.")
  return shares


def _spread(shares):
  """A period of numbers 0, 1, ... in which i comes shares[i] times, its count in any beginning of n numbers less than
  1 from n shares[i] / period: each goes to the one with the earliest deadline of those due (Baruah et al. 1996, Pfair).
  """
  period = sum(shares)
  pattern, given = np.zeros(period, np.int64), [0] * len(shares)
  for n in range(period):
    due = (i for i, share in enumerate(shares) if given[i] * period < share * (n + 1))
    pattern[n] = first = min(due, key=lambda i: -(-(given[i] + 1) * period // shares[i]))
    given[first] += 1
  return pattern


def _permutation(key, counter, size):
  # Raw numbers: NumPy promises their stream for ever, and that of permutation() it does not.
  return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(size), kind="stable")


# --- What a slot reads -----------------------------------------------------------------------------------------------


class Plan(NamedTuple):
  """All that decides the rows of every slot, for any process that makes them."""

  source: object
  kind: str  # of the tokenizer
  model: bytes
  length: int
  num_slots: int
  seed: int | None
  begin: list  # ids put before each document
  end: list
  packing: str
  epochs: int
  window: int
  chunk_rows: int  # decides nothing: how many are made at once

  def load_words(self):
    """A tokenizer of its own, which uses one thread."""
    words = tokenizer.TOKENIZERS[self.kind](self.model)
    words.num_threads = 1
    return words


def parts_per_shard(num_shards, num_slots):
  """The least number of parts to cut each shard into: some for every slot, for none over a tenth more than another."""
  return next(k for k in range(-(-num_slots // num_shards), num_slots + 1)
              if -(-k * num_shards // num_slots) <= 1.1 * (k * num_shards // num_slots))


class Chunk(NamedTuple):
  """Rows as a slot makes them: tokens of pieces of documents, n + 1 for the n pairs of each, and where the pairs go."""

  tokens: np.ndarray
  starts: np.ndarray  # pair of the chunk, counted through its rows, with which each piece begins
  counts: np.ndarray  # pairs of each piece, which may reach over rows
  states: list  # before each row, and behind the last
  real: int  # rows that are more than padding
  ended: bool  # nothing comes behind them
  skipped: int  # records


class Slot:
  """Reads, tokenizes and packs the documents of one slot from a state on."""

  def __init__(self, plan, words, number, state):
    self._plan, self._words, self._number = plan, words, number
    self._epoch, self._place, self._record, self._used = state
    self._per_shard = parts_per_shard(len(plan.source.shards), plan.num_slots)
    self._num_parts = self._per_shard * len(plan.source.shards)
    self._begin, self._end = ([np.array(edge, words.dtype)] if edge else [] for edge in (plan.begin, plan.end))
    self._nothing = np.zeros(0, words.dtype)
    self._more = len(plan.begin) + len(plan.end) - 1
    self._unit = plan.length if plan.packing == "concat" else 1  # what `used` counts of a row
    self._window = self._items = self._failure = None
    self._empty_epochs = self._skipped = 0

  def chunk(self):
    """The next rows. Raises DataError, and then again whenever it is asked."""
    if self._failure:
      raise self._failure
    try:
      return self._pack(self._plan.chunk_rows)
    except Exception as error:
      self._failure = error  # the reader that raised it would go on as if its shard ended there
      raise

  def _pack(self, rows):
    pieces, states, filled = [], [], 0
    while (more := self._find()) and filled < rows * self._unit:
      count = min(rows * self._unit - filled, self._window.size - self._used)
      tokens, starts, counts = self._window.cut(self._used, self._used + count)
      pieces.append((tokens, starts + filled * self._plan.length // self._unit, counts))
      while len(states) * self._unit < filled + count:
        states.append([*self._state(), self._used + len(states) * self._unit - filled])
      filled += count
      self._used += count
    states += [[*self._state(), self._used]] * (rows + 1 - len(states))
    pieces = pieces or [(self._nothing, *np.zeros((2, 0), np.int64))]
    tokens, starts, counts = pieces[0] if len(pieces) == 1 else map(np.concatenate, zip(*pieces, strict=True))
    skipped, self._skipped = self._skipped, 0
    return Chunk(tokens, starts, counts, states, -(-filled // self._unit), not more, skipped)

  def _state(self):
    return self._epoch, self._place, self._record

  def _find(self):
    """Goes to the window of the next row and reads it; False: there is none."""
    while not self._plan.epochs or self._epoch < self._plan.epochs:
      if self._window is None:
        self._read()
      while self._used >= self._window.size and self._window.grow():
        pass
      if self._used < self._window.size:
        self._empty_epochs = 0
        return True
      self._go_on()
    return False

  def _go_on(self):
    self._window, self._used, self._record = None, 0, self._next
    if self._last:
      self._items, self._record, self._place = None, 0, self._place + 1
      if self._number + self._place * self._plan.num_slots >= self._num_parts:
        self._place, self._epoch, self._empty_epochs = 0, self._epoch + 1, self._empty_epochs + 1
    if self._empty_epochs > EMPTY_EPOCHS and not self._plan.epochs:
      raise DataError(f"{self._plan.source.origin}: has too few documents for {self._plan.num_slots} streams: number"
                      f" {self._number} found none of two tokens. Use a smaller global_batch_size, or prepare token"
                      " files of it.")

  def _read(self):
    """Reads and packs the window that begins at the record, and sets where the next one begins."""
    plan = self._plan
    shuffled = plan.seed is not None
    place = self._number + self._place * plan.num_slots
    part = int(_permutation([plan.seed, self._epoch], [0, 0, 0, 2], self._num_parts)[place]) if shuffled else place
    if self._items is None:
      shard, first = divmod(part, self._per_shard)
      self._items = plan.source.read(shard, first + self._record * self._per_shard, self._per_shard)
      self._held = []
    read = list(itertools.islice(self._items, plan.window - len(self._held)))
    self._last = len(self._held) + len(read) < plan.window
    self._skipped += sum(item is None for item in read)
    shard = plan.source.shards[part // self._per_shard]
    key, counter = [plan.seed, self._epoch], [0, self._record, part, 0]
    if plan.packing == "concat":
      if shuffled:
        read = [read[i] for i in _permutation(key, counter, len(read))]
      self._next = self._record + len(read)
      self._window = Concat(self._join(self._encode(read[i:i + GROUP], shard)) for i in range(0, len(read), GROUP))
      return

    items = self._held + self._encode(read, shard)
    size = len(items)
    if not self._last:
      fewest = max(1, size * 3 // 4)  # the rest may wait for the next window, or its last row would be half empty
      totals = np.cumsum(list(map(self._count, items)))[fewest - 1:]
      fills = totals / np.maximum(np.ceil(totals * SLACK / plan.length), 1)
      size = fewest + len(fills) - 1 - int(np.argmax(fills[::-1]))
    self._held, self._next = items[size:], self._record + size

    self._window = BestFit(*self._join(items[:size]), plan.length,
                           lambda rows: _permutation(key, [*counter[:3], 1], rows) if shuffled else slice(None))

  def _count(self, ids):
    """The pairs of a document."""
    return len(ids) + self._more if len(ids) else 0

  def _join(self, items):
    """The tokens of the documents that have pairs, joined with their edges, and the number of pairs of each."""
    counts = list(map(self._count, items))
    parts = [part for ids, count in zip(items, counts, strict=True) if count
             for part in (*self._begin, ids, *self._end)]
    return np.concatenate([self._nothing, *parts]), np.array([count for count in counts if count], np.int64)

  def _encode(self, documents, shard):
    """The ids of each document, none for those skipped."""
    encoded = iter(self._words.encode_documents([text for text in documents if isinstance(text, str) and text]))
    items = []
    for document in documents:
      if isinstance(document, np.ndarray):
        if len(document) and not 0 <= document.min() <= document.max() < self._words.vocab_size:
          raise DataError(f"{shard}: token ids from {document.min()} to {document.max()}, and the tokenizer has"
                          f" {self._words.vocab_size}. Give the tokenizer that made them.")
        items.append(document.astype(self._words.dtype))
      else:
        items.append(next(encoded) if document else self._nothing)
    return items


class Concat:
  """A window of documents whose pairs follow each other; counted in pairs.

  groups: an iterator over what _join() gives of them. Each is made when it is needed: the slots' first windows all at
  once would be a long wait for the first batch, and again whenever they are used up.
  """

  def __init__(self, groups):
    self._groups, self._tokens, self._edges, self.size = groups, [], np.zeros(1, np.int64), 0

  def grow(self):
    """Takes in the next group; False: there is none."""
    for tokens, pairs in self._groups:
      self._tokens = np.concatenate([self._tokens, tokens]) if self.size else tokens
      self._edges = np.concatenate([self._edges, self.size + np.cumsum(pairs)])
      self.size = int(self._edges[-1])
      return True
    return False

  def cut(self, start, stop):
    """Tokens, starts and counts, as in Chunk, of the pairs [start, stop)."""
    first = np.searchsorted(self._edges, start, side="right") - 1
    last = np.searchsorted(self._edges, stop)
    bounds = self._edges[first:last + 1] - start
    bounds[0], bounds[-1] = 0, stop - start
    return self._tokens[start + first:stop + last], bounds[:-1], bounds[1:] - bounds[:-1]


class BestFit:
  """A window of documents laid into rows by best-fit decreasing; counted in rows.

  order(rows) -> the order in which they come, for rows that are sorted by their first documents.
  """

  def __init__(self, tokens, pairs, length, order):
    rows, rests = [], []
    for document, count in enumerate(pairs.tolist()):
      whole = count - count % length
      rows += [[(document, begin, length)] for begin in range(0, whole, length)]
      if count > whole:
        rests.append((document, whole, count - whole))
    open_rows = []  # (room left, row), sorted
    for piece in sorted(rests, key=lambda piece: -piece[2]):
      fit = bisect.bisect_left(open_rows, (piece[2], 0))
      if fit == len(open_rows):
        room, row = length, len(rows)
        rows.append([])
      else:
        room, row = open_rows.pop(fit)
      rows[row].append(piece)
      if room > piece[2]:
        bisect.insort(open_rows, (room - piece[2], row))
    rows = sorted(map(sorted, rows))
    self.size = len(rows)
    rows = [rows[i] for i in np.arange(self.size)[order(self.size)]]
    row = np.repeat(np.arange(self.size), list(map(len, rows)))
    document, begin, self._counts = np.array([p for r in rows for p in r], np.int64).reshape(-1, 3).T
    before = np.cumsum(self._counts) - self._counts
    offset = before - before[np.searchsorted(row, row)]
    self._row, self._starts, self._length = row, row * length + offset, length
    first = (np.cumsum(pairs + 1) - pairs - 1)[document] + begin  # token of the window
    self._edges = np.concatenate([[0], np.cumsum(self._counts + 1)])
    self._tokens = tokens[np.arange(self._edges[-1]) + np.repeat(first - self._edges[:-1], self._counts + 1)]

  def grow(self):
    """False: all of it is there."""
    return False

  def cut(self, start, stop):
    """Tokens, starts and counts, as in Chunk, of the rows [start, stop)."""
    first, last = np.searchsorted(self._row, [start, stop])
    return (self._tokens[self._edges[first]:self._edges[last]],
            self._starts[first:last] - start * self._length, self._counts[first:last])


# --- What is done with it --------------------------------------------------------------------------------------------


class _Stock:
  """What has been made of a slot and not been given, and what was given last."""

  def __init__(self, state, step):
    self.step, self.batch = step, None  # the last one given
    self.next = self.height = 0  # rows
    self.ended = False
    self._states, self._real, self._last = [state], 0, False

  @property
  def state(self):
    return self._states[self.next]

  def fill(self, chunk, length):
    self.next, self.height, self._states = 0, len(chunk.states) - 1, chunk.states
    self._planes, self._real, self._last = _expand(chunk, length), chunk.real, chunk.ended

  def draw(self, count):
    """The next rows, at most `count`: what there is."""
    stop = min(self.next + count, self.height)
    rows = self._planes[:, self.next:stop]
    self.next, self.ended = stop, self._last and stop >= self._real
    return rows


def _expand(chunk, length):
  """The rows of a chunk: int32 [4, rows, length]."""
  rows = len(chunk.states) - 1
  first, last = chunk.starts // length, (chunk.starts + chunk.counts - 1) // length  # rows of each piece
  number = last - first + 1
  document = np.arange(len(first)).repeat(number)  # from here on a piece ends with its row
  row = np.arange(len(document)) - (number.cumsum() - last - 1)[document]
  counts = np.minimum((chunk.starts + chunk.counts)[document], (row + 1) * length)
  counts -= np.maximum(chunk.starts[document], row * length)
  places, real = counts.cumsum() - counts, int(counts.sum())  # without the padding
  segment = np.arange(1, len(row) + 1) - row.searchsorted(row)
  past = (chunk.counts + 1).cumsum() - 1  # the last token of each piece, which is no input; nor is its first a target
  flat = np.empty((len(PLANES), real), np.int32)
  flat[0] = np.delete(chunk.tokens, past)
  flat[1] = np.delete(chunk.tokens, past - chunk.counts)
  np.subtract(np.arange(real, dtype=np.int32), places.astype(np.int32).repeat(counts), out=flat[2])
  flat[3] = segment.astype(np.int32).repeat(counts)
  if real == rows * length:
    return flat.reshape(len(PLANES), rows, length)
  planes = np.zeros((len(PLANES), rows, length), np.int32)
  planes[:, np.bincount(row, counts, rows)[:, None] > np.arange(length)] = flat
  return planes


def _as_batch(planes):
  return {**dict(zip(PLANES, planes, strict=True)), "loss_weights": (planes[3] > 0).astype(np.float32)}


# --- Who makes it ----------------------------------------------------------------------------------------------------


class _Maker:
  """Chunks of any slots, made where it is called."""

  def __init__(self, plan):
    self._plan, self._words, self._slots = plan, None, {}

  def open(self, slot, state):
    if self._words is None:
      self._words = self._plan.load_words()
    self._slots[slot] = Slot(self._plan, self._words, slot, state)

  def chunk(self, slot):
    return self._slots[slot].chunk()


class _Thread(_Maker):
  """Makes chunks in the calling thread."""

  def reset(self):
    self._slots = {}

  def close(self):
    self._slots = {}


class _Workers:
  """Makes chunks in processes, some ahead of chunk(); slots go to the processes in turn as they are opened.

  Not of multiprocessing, whose children import the parent's main module, and with train.py jax.
  """

  def __init__(self, plan, count):
    self._plan, self._count = plan, count
    self._started = []  # (Popen, Connection)
    self._finalize = weakref.finalize(self, _stop, self._started)
    self._era = 0
    self.reset()

  def reset(self):
    """Forgets all slots: what is still made of them will be dropped."""
    self._era += 1
    self._owner, self._ready = {}, {}

  def open(self, slot, state):
    while len(self._started) < self._count:
      self._started.append(_start(self._plan))
    self._owner[slot] = len(self._owner) % self._count
    self._ready[slot] = collections.deque()
    self._ask(slot, state)
    for _ in range(CHUNKS_AHEAD):
      self._ask(slot, None)

  def chunk(self, slot):
    ready = self._ready[slot]
    while not ready:
      process, wire = self._started[self._owner[slot]]
      try:
        era, made, item = wire.recv()
      except (EOFError, OSError):
        raise self._died(process) from None
      if era == self._era:
        self._ready[made].append(item)
    if isinstance(ready[0], Exception):
      raise ready[0]
    self._ask(slot, None)
    return ready.popleft()

  def close(self):
    self._finalize()

  def _ask(self, slot, state):
    process, wire = self._started[self._owner[slot]]
    try:
      wire.send((self._era, slot, state))
    except OSError:
      raise self._died(process) from None

  def _died(self, process):
    code = process.wait()
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return DataError(f"{self._plan.source.origin}: one of {self._count} worker processes that read and tokenize (pid"
                     f" {process.pid}) ended {how}. Run again, where memory is short with fewer workers.")


def _start(plan):
  """A process in serve(), and the connection to it."""
  ours, theirs = connection.Pipe()
  code = ("import sys; from multiprocessing.connection import Connection; wire = Connection(int(sys.argv[1]));"
          " sys.path[:] = wire.recv(); from MaxText import streams; streams.serve(wire)")
  # One core each, and should a source import something that knows GPUs, they are not its own.
  environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
  process = subprocess.Popen([sys.executable, "-P", "-c", code, str(theirs.fileno())], stdin=subprocess.DEVNULL,
                             pass_fds=[theirs.fileno()], env=environment)
  theirs.close()  # or the end of the process would not end recv()
  ours.send(sys.path)
  ours.send(plan)
  return process, ours


def _stop(started):
  for _, wire in started:
    wire.close()  # this alone ends them, and so does the end of this process
  for process, _ in started:
    try:
      process.wait(5)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
  started.clear()


def serve(wire):
  """A worker: makes the chunks it is asked for over the connection, in that order, until its other end is closed."""
  for number in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer, which saves before it ends
    signal.signal(number, signal.SIG_IGN)
  maker = _Maker(wire.recv())
  requests, replies = queue.SimpleQueue(), queue.SimpleQueue()
  for work in (_listen, _reply):  # threads, so that what is made ahead need not wait until it is read
    threading.Thread(target=work, args=(wire, requests, replies), daemon=True).start()
  while True:
    era, slot, state = requests.get()
    try:
      if state is not None:
        maker.open(slot, state)
      else:
        replies.put((era, slot, maker.chunk(slot)))
    except Exception as error:  # noqa: BLE001, it is the trainer's
      replies.put((era, slot, _portable(error)))


def _listen(wire, requests, _replies):
  while True:
    try:
      requests.put(wire.recv())
    except (EOFError, OSError):
      os._exit(0)  # at once, be it in the middle of a file


def _reply(wire, _requests, replies):
  while True:
    try:
      wire.send(replies.get())
    except OSError:
      os._exit(0)


def _portable(error):
  """The exception as another process can take it."""
  if not isinstance(error, DataError):
    error.add_note("".join(traceback.format_exception(error)))
  try:
    return pickle.loads(pickle.dumps(error))
  except Exception:  # noqa: BLE001, whatever its class does not support
    return RuntimeError("".join(traceback.format_exception(error)))
