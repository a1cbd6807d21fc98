# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: bytes, a given SentencePiece model, or a BPE trained on the corpus, behind one interface.

Every tokenizer has `kind` (its name in TOKENIZERS), `vocab_size`, `bos_id`, `eos_id` (-1: there is none), `pad_id`,
`dtype` (the smallest unsigned type that holds an id), `fingerprint` (hex SHA-256) and

  encode(text) -> ids [n] of `dtype`                       encode_documents(texts) -> list of such arrays, fast
  decode(ids) -> str, ids that are no piece left out       save(path); load(kind, path) brings it back
"""

import collections
import contextlib
import hashlib
import io
import itertools
import os
import re

import numpy as np
from etils import epath

from MaxText.errors import ConfigError

SPACE = "\u2581"  # SentencePiece's sign for a space
SETTINGS = {
    "model_type": "bpe",
    "byte_fallback": True,
    # Exact round trip: nothing is normalized, added in front or squeezed.
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    # Indentation is one piece; `self.` may be one, digits stay single. On Python source 3.58 characters a token,
    # against 3.31 when pieces may not mix letters and punctuation.
    "allow_whitespace_only_pieces": True,
    "split_by_unicode_script": False,
    "split_digits": True,
    "character_coverage": 1.0,
    "required_chars": SPACE,
    "hard_vocab_limit": False,  # a small corpus gives fewer pieces
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "num_threads": 1,
    "max_sentence_length": 1 << 20,
    "minloglevel": 2,
}
META_PIECES = 4 + 256
SENTENCE_CHARS = 2000
GROUP_CHARS = 4_000_000
# No trained piece has a space behind another character, so words between such places encode on their own, each distinct
# one once (2x the speed). Longer ones are cut: a word of megabytes would take seconds.
WORD_CHARS = 1024
WORD = re.compile(rf"{SPACE}| {{0,{WORD_CHARS}}}[^ {SPACE}]{{1,{WORD_CHARS}}}| {{1,{WORD_CHARS}}}")


class Byte:
  """UTF-8 bytes, shifted by 3 to leave room for pad, BOS and EOS."""

  kind = "byte"
  vocab_size, pad_id, bos_id, eos_id = 259, 0, 1, 2
  dtype = np.dtype("<u2")
  model = b"UTF-8 bytes + 3"
  fingerprint = hashlib.sha256(model).hexdigest()

  def __init__(self, model=model):
    assert model == self.model, model

  def encode(self, text):
    return np.frombuffer(text.encode(), np.uint8).astype(self.dtype) + 3

  def encode_documents(self, texts):
    return [self.encode(text) for text in texts]

  def decode(self, ids):
    ids = np.asarray(ids, np.int64)
    return (ids[(ids >= 3) & (ids < 259)] - 3).astype(np.uint8).tobytes().decode("utf-8", "replace")

  def save(self, path):
    path.write_bytes(self.model)


class SentencePiece:
  """A SentencePiece model as it is (bytes of the .model file): its own normalization decides what survives."""

  kind = "sentencepiece"

  def __init__(self, model):
    import sentencepiece  # 0.07 s that other tokenizers need not pay

    self.model = model
    self.fingerprint = hashlib.sha256(model).hexdigest()
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self.vocab_size = self._processor.vocab_size()
    self.bos_id, self.eos_id = self._processor.bos_id(), self._processor.eos_id()
    self.pad_id = max(self._processor.pad_id(), 0)
    self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

  def encode(self, text):
    return self.encode_documents([text])[0]

  def encode_documents(self, texts):
    return [ids for group in _groups(texts) for ids in self._encode_group(group)]

  def _encode_group(self, texts):
    return [np.array(ids, self.dtype) for ids in self._processor.encode(texts, num_threads=os.cpu_count())]

  def decode(self, ids):
    return self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

  def save(self, path):
    path.write_bytes(self.model)


class Trained(SentencePiece):
  """The BPE that train() makes: any text comes back exactly, U+2581 too, which is escaped as its three byte pieces."""

  kind = "bpe"

  def _encode_group(self, texts):
    index = {}
    words = [[index.setdefault(word, len(index)) for word in WORD.findall(text)] for text in texts]
    pieces = self._processor.encode(list(index), num_threads=1)  # threads cost more than they bring on short words
    if SPACE in index:
      pieces[index[SPACE]] = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
    flat = np.fromiter(itertools.chain.from_iterable(pieces), self.dtype)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    starts = np.cumsum(lengths) - lengths
    return [flat[_ranges(starts[word], lengths[word])] for word in (np.array(w, np.int64) for w in words)]


TOKENIZERS = {tokenizer.kind: tokenizer for tokenizer in (Byte, SentencePiece, Trained)}


def load(kind, path):
  """The tokenizer of `kind` whose model save() wrote at `path` (pathlib or etils.epath)."""
  return TOKENIZERS[kind](path.read_bytes())


def load_given(path):
  """The SentencePiece model at `path` (str, local or gs://). Raises ConfigError."""
  try:
    model = epath.Path(path).read_bytes()
  except OSError as error:
    raise ConfigError(f"tokenizer_path={path}: cannot be read ({error.strerror}). Check the path.") from error
  with contextlib.suppress(RuntimeError):
    if model:
      return SentencePiece(model)
  raise ConfigError(f"tokenizer_path={path}: is no SentencePiece model. Give one, or leave it empty.")


def train(texts, vocab_size, cache_directory=None):
  """A byte-fallback BPE of at most `vocab_size` pieces, a pure function of `texts` (an iterable of str) and the size.

  About 0.7 s per million characters. Kept in `cache_directory` (Path) where one is given. Raises ConfigError.
  """
  if vocab_size <= META_PIECES:
    raise ConfigError(f"vocab_size={vocab_size}: a trained BPE needs more than its {META_PIECES} byte and special"
                      f" pieces. Raise it, or set tokenizer_type=byte, which has {Byte.vocab_size}.")
  text = "".join(texts).replace(SPACE, "").replace("\u2585", "")  # SentencePiece's trainer skips text with these
  key = hashlib.sha256(repr((SETTINGS, SENTENCE_CHARS, vocab_size)).encode() + text.encode()).hexdigest()
  cached = cache_directory / f"{key[:32]}.model" if cache_directory else None
  if cached and cached.exists():
    return load("bpe", cached)

  import sentencepiece

  # Rare characters stay bytes: those in the last 0.01 %, and those that would leave merges under a quarter of the room.
  rare, seen = {}, 0
  for i, (character, count) in enumerate(collections.Counter(text).most_common()):
    if seen >= 0.9999 * len(text) or i >= (vocab_size - META_PIECES) * 3 // 4:
      rare[ord(character)] = None
    seen += count
  text = text.translate(rare) or " "
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=(text[i:i + SENTENCE_CHARS] for i in range(0, len(text), SENTENCE_CHARS)), model_writer=model,
      vocab_size=vocab_size, **SETTINGS)
  trained = Trained(model.getvalue())
  if cached:
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the next run a second, no more
      cache_directory.mkdir(parents=True, exist_ok=True)
      part = cached.with_name(f"{cached.name}.{os.getpid()}.tmp")
      trained.save(part)
      part.replace(cached)
  return trained


def _groups(texts):
  group, size = [], 0
  for text in texts:
    group.append(text)
    size += len(text)
    if size >= GROUP_CHARS:
      yield group
      group, size = [], 0
  if group:
    yield group


def _ranges(starts, lengths):
  """Concatenation of arange(start, start + length) for each pair."""
  ends = np.cumsum(lengths)
  return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
