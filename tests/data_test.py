# SPDX-License-Identifier: Apache-2.0
"""The data contract: a batch depends on the step alone, and an epoch holds every pair of every document once."""

import collections
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from MaxText import corpus as corpora
from MaxText import data, sources, tokenizer
from MaxText.errors import ConfigError, DataError, StorageError

KEYS = ("inputs", "targets", "positions", "segmentations", "loss_weights")
SHARED = Path(__file__).parents[1] / "../shared/data"


def settings(directory, **overrides):
  """What data.open() reads of a resolved Config, for a byte corpus under `directory`."""
  keys = dict(
      dataset_type="text", dataset_path=f"{directory}/corpus", eval_dataset_path="", eval_fraction=0.2,
      max_dataset_chars=0, max_corpus_chars=100_000, tokenizer_type="byte", tokenizer_path="", vocab_size=512,
      add_bos=True, add_eos=True, max_target_length=16, global_batch_size=8, eval_steps=-1, enable_data_shuffling=True,
      data_shuffle_seed=3, force_data_resume=False, data_cache_dir="", run_directory=f"{directory}/run", num_epoch=0,
      eval_datasets=(), eval_interval=100, eval_rolling=False, reuse_example_batch=False)
  return SimpleNamespace(**keys | overrides)


@pytest.fixture
def corpus(tmp_path):
  """Twenty documents of 0 to 60 characters, and one of 500."""
  (tmp_path / "corpus").mkdir()
  random = np.random.default_rng(0)
  texts = ["".join(map(chr, random.integers(97, 123, n))) for n in [*random.integers(1, 60, 19), 500]]
  (tmp_path / "corpus/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *texts]))
  return tmp_path


def random_corpus(documents, seed=0, longest=40):
  """tokens and offsets of documents of 0 to `longest` tokens, every token different."""
  offsets = np.concatenate([[0], np.cumsum(np.random.default_rng(seed).integers(0, longest + 1, documents))])
  return np.arange(1, offsets[-1] + 1).astype(np.uint32), offsets


def shuffled(items, seed, epoch, stream):
  """Documents (stream 0) or rows (stream 1) of an epoch in the order they come in."""
  keys = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, stream]).random_raw(len(items))
  return [items[i] for i in sorted(range(len(items)), key=lambda i: keys[i])]


def slow_rows(tokens, offsets, length, seed, count, *, once=False):
  """The contract in plain Python: `count` rows as lists of (input, target, position, segment)."""
  documents = [tokens[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True) if b - a > 1]
  pairs = sum(len(document) - 1 for document in documents)
  rows, begun, segment = [], [], 0
  for epoch in range(1 if once else (count + 1) * length // pairs + length // pairs + 2):
    for document in documents if seed is None else shuffled(documents, seed, epoch, 0):
      segment, position = segment + 1, 0
      for pair in zip(document[:-1], document[1:], strict=True):
        if not rows or len(rows[-1]) == length:
          rows.append([])
          begun.append(epoch)
          segment, position = 1, 0
        rows[-1].append((*pair, position, segment))
        position += 1
  if once:
    rows[-1] += [(0, 0, 0, 0)] * (length - len(rows[-1]))
    rows += [[(0, 0, 0, 0)] * length] * count
  if seed is not None:
    rows = [row for epoch in sorted(set(begun)) for row in shuffled(
        [row for row, begun_in in zip(rows, begun, strict=True) if begun_in == epoch], seed, epoch, 1)]
  return rows[:count]


def as_lists(batch):
  return [list(zip(*(batch[key][i].tolist() for key in KEYS[:4]), strict=True)) for i in range(len(batch["inputs"]))]


def equal(one, other):
  return all(np.array_equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in KEYS)


# --- Packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize(
    ("documents", "length", "longest"), [(30, 16, 40), (5, 64, 9), (1, 8, 40), (200, 3, 5), (12, 1, 6)])
def test_rows_equal_a_plain_loop_over_the_documents(documents, length, longest, seed):
  tokens, offsets = random_corpus(documents, seed=documents, longest=longest)
  packed = data.Packed(tokens, offsets, length, seed=seed)
  count = 5 * packed.num_pairs // length + 2
  batch = packed.rows(0, count)
  assert as_lists(batch) == slow_rows(tokens, offsets, length, seed, count)
  assert (batch["loss_weights"] == 1).all()
  assert [batch[key].dtype for key in KEYS] == [np.int32] * 4 + [np.float32]


@pytest.mark.parametrize("length", [1, 7, 16, 500])
def test_one_time_through_equals_a_plain_loop_and_ends_in_padding(length):
  tokens, offsets = random_corpus(25, seed=1)
  packed = data.Packed(tokens, offsets, length, epochs=1)
  batch = packed.rows(0, packed.num_rows + 3)
  assert as_lists(batch) == slow_rows(tokens, offsets, length, None, packed.num_rows + 3, once=True)
  np.testing.assert_array_equal(batch["loss_weights"], batch["segmentations"] > 0)
  assert batch["loss_weights"].sum() == packed.num_pairs
  assert packed.fill == packed.num_pairs / packed.num_rows / length
  assert as_lists(packed.rows(packed.num_rows, packed.num_rows + 2)) == [[(0, 0, 0, 0)] * length] * 2


@pytest.mark.parametrize("length", [1, 16, 100])
def test_every_pair_comes_once_per_epoch_over_five_epochs(length):
  tokens, offsets = random_corpus(100, seed=2)
  packed = data.Packed(tokens, offsets, length, seed=1)
  documents = zip(offsets[:-1], offsets[1:], strict=True)
  corpus = {(t, t + 1) for a, b in documents for t in range(a + 1, b)}
  assert len(corpus) == packed.num_pairs
  seen, orders, row = collections.Counter(), set(), 0
  for epoch in range(1, 6):
    past = -(-epoch * packed.num_pairs // length)  # the last row of an epoch may hold pairs of the next one
    batch = packed.rows(row, past)
    pairs = list(zip(batch["inputs"].ravel().tolist(), batch["targets"].ravel().tolist(), strict=True))
    seen.update(pairs)
    assert set(seen) == corpus
    assert sum(count - epoch for count in seen.values()) == past * length - epoch * packed.num_pairs < length
    assert set(seen.values()) <= {epoch, epoch + 1}
    orders.add(tuple(pairs))
    row = past
  assert len(orders) == 5


def test_the_rows_of_a_batch_come_from_many_long_documents():
  offsets = np.arange(21) * (50 * 16 + 1)  # 20 documents of 50 rows each
  tokens = np.arange(offsets[-1], dtype=np.uint32)
  batch = data.Packed(tokens, offsets, 16, seed=1).rows(0, 1000)
  documents = (batch["inputs"][:, 0] // offsets[1]).reshape(-1, 8)
  assert np.mean([len(set(of_batch)) for of_batch in documents.tolist()]) > 5  # 6.7 expected; rows as they come: 1.1
  np.testing.assert_array_equal(np.bincount(documents.ravel()), 50)
  assert (batch["segmentations"] == 1).all()


def test_no_target_crosses_a_document():
  tokens, offsets = random_corpus(100, seed=3)
  batch = data.Packed(tokens, offsets, 16, seed=1).rows(0, 500)
  document_of = np.searchsorted(offsets, np.arange(len(tokens)), side="right")
  np.testing.assert_array_equal(document_of[batch["inputs"] - 1], document_of[batch["targets"] - 1])
  np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
  same = np.diff(batch["segmentations"]) == 0
  assert (np.diff(batch["inputs"])[same] == 1).all()
  assert (np.diff(batch["positions"])[same] == 1).all()
  assert (batch["positions"][:, 1:][~same] == 0).all()
  assert (batch["positions"][:, 0] == 0).all()
  assert (batch["segmentations"][:, 0] == 1).all()


def test_fifty_cuts_on_one_to_eight_hosts_give_the_same_rows():
  tokens, offsets = random_corpus(60, seed=4)
  rows, random = 16, np.random.default_rng(0)
  whole = data.Packed(tokens, offsets, 16, seed=9).rows(0, 50 * rows)
  wrong = 0
  for cut in random.integers(0, 49, 50):
    for hosts in (1, 2, 4, 8):
      fresh = data.Packed(tokens, offsets, 16, seed=9)  # a run resumed at this step
      for step in (cut, cut + 1):
        share = rows // hosts
        shards = [fresh.rows(step * rows + h * share, step * rows + (h + 1) * share) for h in range(hosts)]
        for key in KEYS:
          joined = np.concatenate([shard[key] for shard in shards])
          wrong += (joined != whole[key][step * rows:(step + 1) * rows]).any(axis=1).sum()
  assert wrong == 0


def test_a_far_step_is_reached_at_once():
  tokens, offsets = random_corpus(20_000, seed=5)
  packed = data.Packed(tokens, offsets, 256, seed=1)
  packed.rows(0, 8)
  begin = time.perf_counter()
  far = packed.rows(8 * 10**9, 8 * 10**9 + 8)
  assert time.perf_counter() - begin < 0.5  # measured 3 ms, the orders of 20,000 documents and 1,500 rows included
  assert far["inputs"].shape == (8, 256)


def test_the_order_of_documents_and_rows_is_that_of_every_earlier_version():
  tokens, offsets = random_corpus(8, seed=6, longest=6)
  inputs = data.Packed(tokens, offsets, 3, seed=1).rows(0, 8)["inputs"].tolist()
  assert inputs == GOLDEN, "runs in progress would see other batches. Intended? Then say so in CHANGELOG.md."


GOLDEN = [[12, 13, 14], [10, 18, 7], [15, 16, 1], [2, 20, 21], [22, 4, 5], [8, 24, 1], [2, 20, 21], [15, 16, 24]]


def test_evaluation_in_any_batch_size_sums_to_the_same():
  tokens, offsets = random_corpus(40, seed=7)
  packed = data.Packed(tokens, offsets, 16, epochs=1)
  sums = set()
  for batch_rows in range(1, 2 * packed.num_rows + 2, 3):
    total = 0
    for step in range(packed.num_batches(batch_rows)):
      batch = packed.rows(step * batch_rows, (step + 1) * batch_rows)
      assert batch["inputs"].shape == (batch_rows, 16)
      total += int((batch["targets"].astype(np.int64) ** 2 * batch["loss_weights"].astype(np.int64)).sum())
    sums.add(total)
  lengths = np.diff(offsets)
  first = np.zeros(len(tokens), bool)
  first[offsets[:-1][lengths > 0]] = True
  assert sums == {int((tokens.astype(np.int64)[~first] ** 2).sum())}


def test_a_number_of_evaluation_steps_ends_an_evaluation_early():
  tokens, offsets = random_corpus(40, seed=7)
  assert data.Packed(tokens, offsets, 16, epochs=1, eval_steps=2).num_batches(4) == 2
  assert data.Packed(tokens, offsets, 16, epochs=1, eval_steps=1000).num_batches(4) == data.Packed(
      tokens, offsets, 16, epochs=1).num_batches(4)
  assert data.Packed(tokens, offsets, 16).num_batches(4) is None


# --- A number of epochs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize(("epochs", "length"), [(1, 16), (3, 16), (2, 1000), (2, 7)])
def test_epochs_hold_every_pair_as_often_and_end_in_padding(epochs, length, seed, large, monkeypatch):
  tokens, offsets = long_enough_corpus(40)
  monkeypatch.setattr(data.Packed, "LARGE", 10 if large else 1 << 20)
  packed = data.Packed(tokens, offsets, length, seed=seed, epochs=epochs)
  assert packed.num_rows == -(-epochs * packed.num_pairs // length)
  batches = [packed.rows(row, row + 5) for row in range(0, packed.num_batches(5) * 5, 5)]
  whole = {key: np.concatenate([batch[key] for batch in batches]) for key in KEYS}
  real = whole["loss_weights"] > 0
  seen = collections.Counter(zip(whole["inputs"][real].tolist(), whole["targets"][real].tolist(), strict=True))
  assert set(seen.values()) == {epochs}
  assert len(seen) == packed.num_pairs
  assert all((whole[key][~real] == 0).all() for key in KEYS)
  assert not packed.rows(packed.num_rows, packed.num_rows + 2)["loss_weights"].any()
  endless = data.Packed(tokens, offsets, length, seed=seed).rows(0, packed.num_rows)
  full = np.flatnonzero(real[:packed.num_rows].all(axis=1))
  assert len(full) == epochs * packed.num_pairs // length
  if (packed.num_pairs * epochs) % length == 0 or seed is None:
    assert all(np.array_equal(whole[key][full], endless[key][full]) for key in KEYS)


# --- More documents than a computer should sort ----------------------------------------------------------------------


def long_enough_corpus(documents, seed=0, longest=40):
  """As random_corpus, without documents of fewer than two tokens, and not from token 0 on."""
  lengths = np.random.default_rng(seed).integers(2, longest + 1, documents)
  offsets = 11 + np.concatenate([[0], np.cumsum(lengths)])
  return np.arange(1, offsets[-1] + 1).astype(np.uint32), offsets


def slow_permutation(seed, epoch, size):
  """data.Permutation in Python's integers: [where each number goes]."""
  keys = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1]).random_raw(4).tolist()
  base = next(b for b in range(1, size + 1) if b * b >= size)
  high = -(-size // base)

  def once(number):
    left, right = divmod(number, base)
    for i, key in enumerate(keys):
      x = (right ^ key) * 0x9E3779B97F4A7C15 % 2**64
      x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 % 2**64 >> 32
      left, right = right, (left + x) % (base if i % 2 else high)
    return left * base + right

  def walk(number):
    number = once(number)
    return number if number < size else walk(number)

  return [walk(number) for number in range(size)]


def test_the_permutation_of_rows_is_one_for_every_size():
  for size in [*range(1, 300), *np.random.default_rng(0).integers(300, 20_000, 50).tolist(), 1 << 20, (1 << 20) + 7]:
    found = data.Permutation(5, 6, size)[np.arange(size)]
    assert found.dtype == np.int64
    assert (np.bincount(found, minlength=size) == 1).all(), size
    if size < 500:
      assert found.tolist() == slow_permutation(5, 6, size)
  huge = data.Permutation(1, 2, 10**13)
  some = np.concatenate([np.arange(50_000), 10**13 - 1 - np.arange(50_000)])
  assert len(np.unique(huge[some])) == len(some)
  assert (huge[some] >= 0).all()
  assert (huge[some] < 10**13).all()


def test_the_permutation_of_rows_looks_like_chance():
  size, random = 1 << 16, np.random.default_rng(0)
  for epoch in range(20):
    found = data.Permutation(3, epoch, size)[np.arange(size)]
    for places in (found, found[random.permutation(size)]):  # as much chance in the one as in the other
      cells = np.bincount((np.arange(size) * 16 // size) * 16 + places * 16 // size, minlength=256)
      assert 150 < ((cells - 256.0) ** 2 / 256).sum() < 330  # 225 degrees of freedom, standard deviation 21
      assert abs(np.corrcoef(np.arange(size), places)[0, 1]) < 0.02  # standard deviation 0.004
      assert (np.abs(np.diff(places)) == 1).sum() < 14  # 2 expected
      assert abs(np.abs(np.diff(places)).mean() / size - 1 / 3) < 0.006
    assert (found == np.arange(size)).sum() < 9  # 1 expected
  one, other = (data.Permutation(3, epoch, size)[np.arange(size)] for epoch in (0, 1))
  assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(("documents", "length", "longest"), [(30, 16, 40), (200, 64, 3), (200, 3, 5), (12, 1, 6)])
@pytest.mark.parametrize("large", [10, 150])
def test_rows_of_a_large_corpus_equal_a_plain_loop(documents, length, longest, seed, large, monkeypatch):
  tokens, offsets = long_enough_corpus(documents, longest=longest)
  monkeypatch.setattr(data.Packed, "LARGE", large)
  packed = data.Packed(tokens, offsets, length, seed=seed)
  count = 5 * packed.num_pairs // length + 2
  if max(documents, packed.num_pairs // length) <= large:
    assert packed.order == data.ORDER
    assert as_lists(packed.rows(0, count)) == slow_rows(tokens, offsets, length, seed, count)
    return
  assert packed.order == (data.ORDER if seed is None else data.ORDER + 1)
  places = range(count)
  if seed is not None:
    edges = [-(-epoch * packed.num_pairs // length) for epoch in range(8)]
    places = [first + place for epoch, (first, past) in enumerate(zip(edges[:-1], edges[1:], strict=True))
              for place in slow_permutation(seed, epoch, past - first)][:count]
  rows = slow_rows(tokens, offsets, length, None, max(places) + 1)
  assert as_lists(packed.rows(0, count)) == [rows[place] for place in places]


def test_every_pair_of_a_large_corpus_comes_once_per_epoch(monkeypatch):
  monkeypatch.setattr(data.Packed, "LARGE", 100)
  tokens, offsets = long_enough_corpus(3000)
  packed = data.Packed(tokens, offsets, 16, seed=1)
  seen, orders, row = np.zeros(len(tokens) + 2, int), [], 0
  for epoch in (1, 2):
    past = -(-epoch * packed.num_pairs // 16)
    batch = packed.rows(row, past)
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
    seen += np.bincount(batch["inputs"].ravel(), minlength=len(seen))
    lasts = np.setdiff1d(np.arange(12, len(tokens) + 1), offsets[1:])  # all tokens but the last of each document
    assert set(seen[lasts].tolist()) <= {epoch, epoch + 1}
    assert seen.sum() - epoch * packed.num_pairs < 16
    assert seen.sum() == seen[lasts].sum()
    orders.append(batch["inputs"][:1000].tolist())
    row = past
  assert orders[0] != orders[1]


def test_hosts_and_cuts_change_no_row_of_a_large_corpus(monkeypatch):
  monkeypatch.setattr(data.Packed, "LARGE", 100)
  tokens, offsets = long_enough_corpus(500)
  rows, random = 16, np.random.default_rng(0)
  whole = data.Packed(tokens, offsets, 16, seed=9).rows(0, 100 * rows)
  for cut in random.integers(0, 99, 50):
    for hosts in (1, 2, 4, 8):
      fresh, share = data.Packed(tokens, offsets, 16, seed=9), rows // hosts
      shards = [fresh.rows(cut * rows + h * share, cut * rows + (h + 1) * share) for h in range(hosts)]
      for key in KEYS:
        np.testing.assert_array_equal(np.concatenate([shard[key] for shard in shards]),
                                      whole[key][cut * rows:(cut + 1) * rows])


def test_an_epoch_of_a_large_corpus_costs_neither_time_nor_memory(tmp_path):
  documents = 4_000_000
  lengths = np.random.default_rng(0).integers(2, 1000, documents)
  np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tofile(tmp_path / "offsets")
  with (tmp_path / "tokens").open("wb") as file:
    file.truncate(2 * int(lengths.sum()))  # 4 GB with nothing in them
  (tmp_path / "tokenizer.model").write_bytes(tokenizer.Byte.model)
  (tmp_path / "manifest.json").write_text(json.dumps({
      "format": corpora.FORMAT, "tokenizer": "byte", "dtype": "<u2", "sha256": {
          "tokenizer.model": tokenizer.Byte.fingerprint},
      "sizes": {name: (tmp_path / name).stat().st_size for name in ("tokens", "offsets")}}))
  tracemalloc.start()
  try:
    begin = time.process_time()
    held = corpora.open_tokens(tmp_path)
    packed = data.Packed(held.tokens, held.offsets, 1024, seed=1)
    for step in (0, 100_000, 10**9):
      packed.rows(step * 64, step * 64 + 64)
    assert time.process_time() - begin < 0.3  # measured 0.02 s
    assert tracemalloc.get_traced_memory()[1] < 8e6  # a batch is 1.3 MB
  finally:
    tracemalloc.stop()


def test_the_order_of_rows_of_a_large_corpus_is_that_of_every_earlier_version(monkeypatch):
  monkeypatch.setattr(data.Packed, "LARGE", 4)
  tokens, offsets = long_enough_corpus(8, seed=6, longest=6)
  inputs = data.Packed(tokens, offsets, 3, seed=1).rows(0, 8)["inputs"].tolist()
  assert inputs == LARGE_GOLDEN, "runs in progress would see other batches. Intended? Then say so in CHANGELOG.md."


LARGE_GOLDEN = [[36, 37, 38], [24, 25, 27], [12, 13, 14], [39, 41, 42], [20, 21, 22], [28, 29, 30], [16, 17, 18],
                [31, 33, 34]]


# --- Corpora and snapshots -------------------------------------------------------------------------------------------


def test_the_pairs_of_an_epoch_are_the_documents_with_bos_and_eos(corpus):
  opened = data.open(settings(corpus, enable_data_shuffling=False, eval_fraction=0.0))
  texts = list(sources.documents(sources.text(f"{corpus}/corpus"), 0))
  batch = opened.train.rows(0, opened.train.num_pairs // 16)
  stream = [t for text in texts for t in [1, *(byte + 3 for byte in text.encode())]]
  assert batch["inputs"].ravel().tolist() == stream[:batch["inputs"].size]
  stream = [t for text in texts for t in [*(byte + 3 for byte in text.encode()), 2]]
  assert batch["targets"].ravel().tolist() == stream[:batch["targets"].size]
  bare = data.open(settings(corpus, add_bos=False, add_eos=False, eval_fraction=0.0, run_directory=f"{corpus}/bare"))
  assert bare.train.num_pairs == sum(len(text) - 1 for text in texts)
  assert bare.identity["corpus"] != opened.identity["corpus"]


def test_held_out_documents_are_chosen_by_their_content(corpus):
  def held_out(name):
    opened = data.open(settings(corpus, run_directory=f"{corpus}/{name}"))
    batch = opened.eval.rows(0, opened.eval.num_rows)
    return opened.tokenizer.decode(batch["targets"][batch["loss_weights"] > 0])

  before = held_out("before")
  lines = (corpus / "corpus/a.jsonl").read_text().splitlines()
  (corpus / "corpus/a.jsonl").write_text("\n".join(reversed(lines)))
  assert sorted(held_out("reversed")) == sorted(before)
  assert before


def test_two_documents_leave_one_on_either_side_and_one_is_for_training(corpus):
  (corpus / "corpus/a.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
  both = data.open(settings(corpus, eval_fraction=0.01))
  assert {both.train.num_pairs, both.eval.num_pairs} == {6, 7}
  (corpus / "corpus/a.jsonl").write_text('{"text": "first"}\n')
  one = data.open(settings(corpus, eval_fraction=0.9, run_directory=f"{corpus}/one"))
  assert one.eval is None
  assert one.train.num_pairs == 6
  assert "eval_dataset_path" in one.summary


def test_evaluation_files_are_evaluated_whole(corpus):
  (corpus / "held.txt").write_text("abc" * 100)
  opened = data.open(settings(corpus, eval_dataset_path=f"{corpus}/held.txt"))
  assert opened.eval.num_pairs == 301
  texts = list(sources.documents(sources.text(f"{corpus}/corpus"), 0))
  assert opened.train.num_pairs == sum(len(text) + 1 for text in texts)


def test_a_run_resumes_from_its_snapshot_when_the_source_is_gone(corpus):
  first = data.open(settings(corpus, tokenizer_type="bpe", vocab_size=300))
  kept = first.train.rows(5, 50)
  shutil.rmtree(corpus / "corpus")
  again = data.open(settings(corpus, tokenizer_type="bpe", vocab_size=300))
  assert equal(again.train.rows(5, 50), kept)
  assert equal(again.eval.rows(0, 3), first.eval.rows(0, 3))
  assert again.position(7) == first.position(7)
  assert again.tokenizer.model == first.tokenizer.model
  assert again.summary == first.summary


def test_cached_is_fresh_and_a_changed_file_is_read_anew(corpus):
  cfg = dict(tokenizer_type="bpe", vocab_size=300, data_cache_dir=f"{corpus}/cache")
  fresh = data.open(settings(corpus, **cfg | {"data_cache_dir": ""}))
  made = data.open(settings(corpus, **cfg, run_directory=f"{corpus}/made"))
  sources_documents, sources.documents = sources.documents, None  # reading again would fail
  try:
    cached = data.open(settings(corpus, **cfg, run_directory=f"{corpus}/cached"))
  finally:
    sources.documents = sources_documents
  for other in (made, cached):
    assert other.position(1) == fresh.position(1)
    assert equal(other.train.rows(0, 99), fresh.train.rows(0, 99))
  with (corpus / "corpus/a.jsonl").open("a") as file:
    file.write('{"text": "more"}\n')
  changed = data.open(settings(corpus, **cfg, run_directory=f"{corpus}/changed"))
  assert changed.identity["corpus"] != fresh.identity["corpus"]
  assert not list((corpus / "cache").rglob("*.tmp"))


def test_a_damaged_or_unwritable_cache_only_costs_time(corpus, capsys):
  cfg = dict(data_cache_dir=f"{corpus}/cache")
  fresh = data.open(settings(corpus, **cfg))
  for name in ("tokens", "offsets", "manifest.json"):
    path = next((corpus / "cache/corpora").iterdir()) / name
    path.write_bytes(b"{}" if name == "manifest.json" else b"x" * 8)
    again = data.open(settings(corpus, **cfg, run_directory=f"{corpus}/{name}"))
    assert again.position(0) == fresh.position(0)
  (corpus / "file").write_text("")
  cfg = dict(tokenizer_type="bpe", data_cache_dir=f"{corpus}/file/cache", run_directory=f"{corpus}/other")
  again = data.open(settings(corpus, **cfg))
  assert again.train.num_pairs
  assert "data_cache_dir=" in capsys.readouterr().err


def test_a_damaged_snapshot_is_named(corpus):
  data.open(settings(corpus))
  path = corpus / "run/data/tokens"
  content = bytearray(path.read_bytes())
  content[100] ^= 4
  path.write_bytes(content)
  with pytest.raises(DataError, match=r"data/tokens: is damaged") as error:
    data.open(settings(corpus))
  assert "\n" not in str(error.value)


def test_a_snapshot_cut_off_before_its_manifest_is_written_again(corpus):
  first = data.open(settings(corpus))
  (corpus / "run/data/manifest.json").unlink()
  (corpus / "run/data/offsets").write_bytes(b"")
  assert equal(data.open(settings(corpus)).train.rows(0, 20), first.train.rows(0, 20))


def test_a_snapshot_that_cannot_be_written_is_a_storage_error(corpus):
  (corpus / "run").write_text("a file")
  with pytest.raises(StorageError, match="base_output_directory"):
    data.open(settings(corpus))


def test_other_processes_wait_for_the_first_one_to_write(corpus):
  found = []

  def wait(index):
    found.append(data.open(settings(corpus), process_index=index, process_count=3))

  others = [threading.Thread(target=wait, args=(index,)) for index in (1, 2)]
  for other in others:
    other.start()
  time.sleep(0.3)
  assert not found
  first = data.open(settings(corpus), process_count=3)
  for other in others:
    other.join()
  assert [other.position(3) for other in found] == [first.position(3)] * 2
  assert all(equal(other.train.rows(0, 9), first.train.rows(0, 9)) for other in found)


def test_a_process_that_never_sees_the_snapshot_says_why(corpus, monkeypatch):
  monkeypatch.setattr(corpora, "SNAPSHOT_WAIT_SECONDS", 0.1)
  with pytest.raises(DataError, match="process 1 of 2 .* base_output_directory"):
    data.open(settings(corpus), process_index=1, process_count=2)


@pytest.mark.parametrize(("key", "value"), [
    ("dataset_path", "elsewhere.txt"), ("add_bos", False), ("eval_fraction", 0.5), ("tokenizer_type", "bpe")])
def test_other_data_for_a_run_is_refused_unless_forced(corpus, key, value):
  (corpus / "elsewhere.txt").write_text("x" * 1000)
  value = f"{corpus}/{value}" if key == "dataset_path" else value
  first = data.open(settings(corpus))
  with pytest.raises(ConfigError, match=f"^{key}=.*force_data_resume=true") as error:
    data.open(settings(corpus, **{key: value}))
  assert "\n" not in str(error.value)
  forced = data.open(settings(corpus, **{key: value}, force_data_resume=True))
  assert forced.identity != first.identity
  with pytest.raises(DataError, match="(corpus|tokenizer)="):
    data.open(settings(corpus, **{key: value})).check(first.position(3))


@pytest.mark.parametrize(("key", "value"), [
    ("data_shuffle_seed", 4), ("max_target_length", 32), ("global_batch_size", 16), ("enable_data_shuffling", False)])
def test_a_position_of_other_batches_is_refused_unless_forced(corpus, key, value, capsys):
  position = json.loads(json.dumps(data.open(settings(corpus)).position(100_000)))
  assert len(json.dumps(position)) < 1000
  data.open(settings(corpus)).check(position)
  with pytest.raises(ConfigError, match=f"^{key}={value} .*force_data_resume=true") as error:
    data.open(settings(corpus, **{key: value})).check(position)
  assert "\n" not in str(error.value)
  data.open(settings(corpus, **{key: value}, force_data_resume=True)).check(position)
  assert f"{key}={value}" in capsys.readouterr().err


def test_a_position_in_another_order_of_rows_is_refused_unless_forced(corpus):
  opened = data.open(settings(corpus))
  position = opened.position(3) | {"data_order": 1}
  with pytest.raises(ConfigError, match=r"^data_order=2 \(the checkpoint has 1\).*force_data_resume=true"):
    opened.check(position)
  data.open(settings(corpus, force_data_resume=True)).check(position)


def test_a_trained_tokenizer_has_seen_every_long_document(corpus):
  shutil.rmtree(corpus / "corpus")
  (corpus / "corpus").mkdir()
  for name, word in (("a", "alpha "), ("b", "beta "), ("c", "gamma ")):
    (corpus / f"corpus/{name}.txt").write_text(word * 50_000)
  opened = data.open(settings(corpus, tokenizer_type="bpe", max_corpus_chars=20_000, eval_fraction=0.0))
  assert [len(opened.tokenizer.encode(f"x {word} {word}")) for word in ("alpha", "beta", "gamma")] == [3, 3, 3]


def test_a_tokenizer_larger_than_the_model_is_refused(corpus):
  with pytest.raises(ConfigError, match=r"^vocab_size=200: .* 259 pieces. Set vocab_size=384"):
    data.open(settings(corpus, vocab_size=200))


def test_text_with_nothing_in_it_is_refused(corpus):
  (corpus / "corpus/a.jsonl").write_text('{"text": ""}\n')
  with pytest.raises(DataError, match="no text in its 1 files"):
    data.open(settings(corpus))
  (corpus / "corpus/a.jsonl").write_text('{"text": "a"}\n')
  with pytest.raises(DataError, match="add_bos=true"):
    data.open(settings(corpus, add_bos=False, add_eos=False))


def test_a_given_sentencepiece_model_is_used_and_kept(corpus):
  path = SHARED / "tok/mistral-v1.model"
  if not path.exists():
    pytest.skip("../shared/data/tok/mistral-v1.model is absent")
  given = corpus / "given.model"
  shutil.copy(path, given)
  cfg = dict(tokenizer_type="sentencepiece", tokenizer_path=str(given), vocab_size=32_000)
  first = data.open(settings(corpus, **cfg, data_cache_dir=f"{corpus}/cache"))
  given.unlink()
  again = data.open(settings(corpus, **cfg))
  assert again.tokenizer.fingerprint == tokenizer.load_given(str(path)).fingerprint
  assert equal(again.train.rows(0, 9), first.train.rows(0, 9))


def test_the_default_corpus_opens_without_jax_in_seconds(tmp_path):
  code = ("import json, sys, time; from types import SimpleNamespace; from MaxText import data;"
          "begin = time.process_time(); opened = data.open(SimpleNamespace(**json.loads(sys.argv[1])));"
          "assert 'jax' not in sys.modules; opened.train.rows(0, 8);"
          "print(time.process_time() - begin, opened.summary)")
  root = Path(__file__).parents[1]
  seconds = []
  for run in ("run", "run", "other"):
    cfg = settings(tmp_path, dataset_type="stdlib", dataset_path="", max_corpus_chars=1_000_000, tokenizer_type="bpe",
                   vocab_size=4096, data_cache_dir=f"{tmp_path}/cache", run_directory=f"{tmp_path}/{run}")
    result = subprocess.run([sys.executable, "-c", code, json.dumps(vars(cfg))], cwd=root,
                            env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=True)
    seconds.append(float(result.stdout.split()[0]))
    assert "library" in result.stdout
  # Of CPU time, which a busy machine hardly changes. Measured: 1.6, 0.04 for a resumed run, 0.07 for a new one.
  assert seconds[0] < 4
  assert max(seconds[1:]) < 0.5


def test_synthetic_rows_follow_the_step_and_evaluation_ends(tmp_path):
  cfg = settings(tmp_path, dataset_type="synthetic", vocab_size=4096)
  opened = data.open(cfg)
  assert not (tmp_path / "run").exists()
  whole = opened.train.rows(0, 64)
  parts = [opened.train.rows(row, row + 4) for row in range(0, 64, 4)]
  assert equal({key: np.concatenate([part[key] for part in parts]) for key in KEYS}, whole)
  np.testing.assert_array_equal(whole["inputs"][:, 1:], whole["targets"][:, :-1])
  held_out = opened.eval.rows(60, 70)
  assert held_out["loss_weights"].sum() == 4 * 16
  assert (held_out["inputs"][4:] == 0).all()
  assert opened.eval.num_batches(10) == 7
  opened.check(opened.position(3))
  with pytest.raises(DataError, match="corpus="):
    data.open(settings(tmp_path, dataset_type="synthetic", vocab_size=2048)).check(opened.position(3))


# --- Onto the devices ------------------------------------------------------------------------------------------------


def sharding(*shape, spec=("data", None)):
  import jax
  from jax.sharding import Mesh, NamedSharding, PartitionSpec
  devices = np.array(jax.devices()[:int(np.prod(shape))]).reshape(shape)
  return NamedSharding(Mesh(devices, ("data", "sequence")[:len(shape)]), PartitionSpec(*spec))


class Counted:
  """A dataset that notes the rows asked for."""

  def __init__(self, dataset, fail_at=None):
    self.dataset, self.asked, self.fail_at = dataset, [], fail_at
    self.length = dataset.length

  def num_batches(self, batch_rows):
    return self.dataset.num_batches(batch_rows)

  def rows(self, start, stop):
    self.asked.append((start, stop))
    if self.fail_at is not None and start >= self.fail_at:
      raise DataError("disk on fire")
    return self.dataset.rows(start, stop)


@pytest.fixture
def packed():
  tokens, offsets = random_corpus(60, seed=8)
  return data.Packed(tokens, offsets, 16, seed=2)


@pytest.mark.parametrize("prefetch", [1, 2, 7])
@pytest.mark.parametrize(("shape", "spec"), [
    ((1,), ("data", None)), ((8,), ("data", None)), ((8,), ("data",)), ((4, 2), ("data", "sequence")),
    ((2, 4), (None, "sequence")), ((8,), (None, None))])
def test_batches_on_any_mesh_and_prefetch_are_the_rows_of_their_step(packed, prefetch, shape, spec):
  with data.batches(packed, 5, 8, sharding(*shape, spec=spec), prefetch=prefetch) as stream:
    for step in range(5, 9):
      batch = next(stream)
      expected = packed.rows(step * 8, step * 8 + 8)
      assert batch["inputs"].sharding.is_equivalent_to(sharding(*shape, spec=spec), 2)
      assert equal({key: np.asarray(batch[key]) for key in KEYS}, expected)


def test_a_process_makes_only_the_rows_of_its_devices(packed):
  counted = Counted(packed)
  with data.batches(counted, 0, 8, sharding(8), prefetch=1) as stream:
    next(stream)
  assert set(counted.asked[:8]) == {(i, i + 1) for i in range(8)}
  counted = Counted(packed)
  with data.batches(counted, 0, 8, sharding(2, 4, spec=("data", "sequence")), prefetch=1) as stream:
    next(stream)
  assert set(counted.asked[:2]) == {(0, 4), (4, 8)}
  assert counted.asked[2:3] in ([], [(8, 12)])


def test_evaluation_batches_end(packed):
  tokens, offsets = random_corpus(60, seed=8)
  once = data.Packed(tokens, offsets, 16, epochs=1)
  with data.batches(once, 0, 8, sharding(1)) as stream:
    seen = list(stream)
  assert len(seen) == once.num_batches(8)
  assert sum(float(batch["loss_weights"].sum()) for batch in seen) == once.num_pairs


def test_the_example_batch_comes_for_ever(packed):
  with data.batches(packed, 40, 8, sharding(1), reuse=True) as stream:
    for _ in range(5):
      assert equal({key: np.asarray(value) for key, value in next(stream).items()}, packed.rows(0, 8))


def test_an_error_in_the_thread_reaches_the_loop(packed):
  with data.batches(Counted(packed, fail_at=16), 0, 8, sharding(1)) as stream:
    next(stream)
    next(stream)
    with pytest.raises(DataError, match="disk on fire"):
      next(stream)
    assert list(stream) == []


def test_no_thread_outlives_its_iterator(packed):
  def running():
    return [thread for thread in threading.enumerate() if thread.name == "data prefetch"]

  for end in ("close", "with", "drop", "finish"):
    once = data.Packed(*random_corpus(5, seed=8), 16, epochs=1)
    stream = data.batches(once if end == "finish" else packed, 0, 8, sharding(1))
    next(stream)
    if end == "close":
      stream.close()
      stream.close()
    elif end == "with":
      with stream:
        next(stream)
    elif end == "finish":
      list(stream)
    del stream
    deadline = time.monotonic() + 5
    while running() and time.monotonic() < deadline:
      time.sleep(0.01)
    assert not running(), end


def test_the_time_waited_for_data_is_counted(packed):
  class Slow(Counted):
    def rows(self, start, stop):
      time.sleep(0.2)
      return super().rows(start, stop)

  with data.batches(Slow(packed), 0, 8, sharding(1)) as stream:
    next(stream)
    next(stream)
    assert 0.3 < stream.wait_seconds < 2
  with data.batches(packed, 0, 8, sharding(1)) as stream:
    next(stream)
    time.sleep(0.3)
    before = stream.wait_seconds
    next(stream)
    assert stream.wait_seconds - before < 0.1
