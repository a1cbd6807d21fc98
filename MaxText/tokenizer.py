# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: bytes, a given tokenizer, or a BPE trained on the corpus, behind one interface.

Every tokenizer has `kind` (its name in TOKENIZERS), `vocab_size`, `bos_id`, `eos_id` (-1: there is none), `pad_id`,
`dtype` (the smallest unsigned type that holds an id), `fingerprint` (hex SHA-256) and

  encode(text) -> ids [n] of `dtype`                       encode_documents(texts) -> list of such arrays, fast
  decode(ids) -> str, ids that are no piece left out       save(path); load(kind, path) brings it back

encode adds neither BOS nor EOS. What decode makes of some ids begins what it makes of these and more, but for U+FFFD,
which stands for a character whose last bytes are still to come (with byte pieces, for the whole run of bytes it is in).
"""

import collections
import contextlib
import hashlib
import io
import itertools
import json
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

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # what a folder is searched for
# The tokens that begin and end a text, or fill, where no file beside a tokenizer.json names them.
USUAL = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<|im_end|>"),
    "pad": ("<pad>", "<|pad|>", "[PAD]"),
}


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
  num_threads = os.cpu_count()  # of encode_documents(); a worker process sets its own to 1

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
    encoded = self._processor.encode(texts, out_type="numpy", num_threads=self.num_threads)
    return [ids.astype(self.dtype) for ids in encoded]

  def decode(self, ids):
    return self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

  def save(self, path):
    path.write_bytes(self.model)


class Trained(SentencePiece):
  """The BPE that train() makes: any text comes back exactly, U+2581 too, which is escaped as its three byte pieces."""

  kind = "bpe"

  def pieces(self):
    """The text of each id."""
    return [self._processor.id_to_piece(i) for i in range(self.vocab_size)]

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


class HuggingFace:
  """A Hugging Face tokenizer as it is: its normalization decides what survives, its vocabulary which characters.

  As in `transformers`, special tokens are found in text too: a document that spells "</s>" gets its id. Chat formats
  need it, and scores that are to equal others'. It is the less safe way for training: clean text from strangers of them
  first. Every other kind of tokenizer here reads such text as plain characters. Decoding leaves special tokens out.
  """

  kind = "huggingface"

  def __init__(self, model):
    """model: a line of JSON {"bos_id", "eos_id", "pad_id"}, and behind it the bytes of the tokenizer.json."""
    import tokenizers

    edges, _, text = model.partition(b"\n")
    self.model = model
    self.fingerprint = hashlib.sha256(model).hexdigest()
    self.bos_id, self.eos_id, self.pad_id = (json.loads(edges)[name] for name in ("bos_id", "eos_id", "pad_id"))
    self.backend = tokenizers.Tokenizer.from_str(text.decode())
    self.backend.no_truncation()  # a tokenizer.json keeps the settings of whoever saved it
    self.backend.no_padding()
    self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1  # there may be gaps
    self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

  def encode(self, text):
    return self.encode_documents([text])[0]

  def encode_documents(self, texts):
    encode = self.backend.encode_batch_fast
    return [np.array(encoding.ids, self.dtype)
            for group in _groups(texts) for encoding in encode(group, add_special_tokens=False)]

  def decode(self, ids):
    return self.backend.decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)

  def save(self, path):
    path.write_bytes(self.model)


TOKENIZERS = {tokenizer.kind: tokenizer for tokenizer in (Byte, SentencePiece, Trained, HuggingFace)}


def load(kind, path):
  """The tokenizer of `kind` whose model save() wrote at `path` (pathlib or etils.epath)."""
  return TOKENIZERS[kind](path.read_bytes())


def load_given(path):
  """The tokenizer at `path` (str, local or gs://). Raises ConfigError.

  A SentencePiece model, a tokenizer.json, a GPT-2 vocab.json beside its merges.txt, or a folder that holds one of them.
  BOS, EOS and padding of a Hugging Face tokenizer: as tokenizer_config.json or special_tokens_map.json beside it name
  them (null: there is none), else the ids in generation_config.json or config.json, else the USUAL ones it has.
  """
  file = epath.Path(path)
  try:
    if file.is_dir():
      file = next((file / name for name in FILES if (file / name).exists()), None)
      if file is None:
        raise ConfigError(f"tokenizer_path={path}: holds no {', '.join(FILES[:-1])} or {FILES[-1]}. Check the path.")
    content = file.read_bytes()
    if file.suffix == ".json":
      return _load_json(file, content)
  except (OSError, ImportError) as error:  # buckets give no strerror, and an ImportError where gcsfs is absent
    said = getattr(error, "strerror", None) or f"{type(error).__name__} {error}".splitlines()[0]
    reason = f"{getattr(error, 'filename', None) or file} cannot be read ({said})"
    raise ConfigError(f"tokenizer_path={path}: {reason}. Check the path.") from error
  with contextlib.suppress(RuntimeError):
    if content:
      return SentencePiece(content)
  raise ConfigError(f"tokenizer_path={path}: {file.name} is no SentencePiece model. Give one, or a tokenizer.json,"
                    " which Llama 3 has too, or leave it empty.")


def _load_json(file, content):
  """The HuggingFace of a tokenizer.json or vocab.json. Raises OSError, ConfigError."""
  import tokenizers

  try:
    held = _parse(file, content)
    if "vocab" in file.name and not isinstance(held.get("model"), dict):
      tokenizer = _join_gpt2(file, held)
      content = tokenizer.to_str().encode()
    else:
      tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    if not tokenizer.get_vocab_size():
      raise ValueError("no tokens")
    tokenizer.encode("\U00012000")  # some models fail only at a character they do not know, minutes into a corpus
    edges = {f"{edge}_id": _find_edge(tokenizer, file.parent, edge) for edge in USUAL}
  except (OSError, ConfigError):
    raise
  except Exception as error:  # noqa: BLE001, the library raises nothing more specific
    raise _damaged(file, error) from error
  edges["pad_id"] = max(edges["pad_id"], 0)
  return HuggingFace(json.dumps(edges).encode() + b"\n" + content)


def _join_gpt2(file, vocabulary):
  """The byte-level BPE of GPT-2's two files. Raises OSError, ConfigError, any Exception where they do not fit."""
  import tokenizers

  told = _read_json(file.parent / "tokenizer_config.json")
  owner = told.get("tokenizer_class", "GPT2Tokenizer")
  if owner not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
    raise ConfigError(f"tokenizer_path={file}: belongs to {owner}, which does not split text as GPT-2 does. Give its"
                      " tokenizer.json.")
  merges = file.with_name(file.stem.replace("vocab", "merges") + ".txt").read_bytes().decode().split("\n")
  pairs = [tuple(line.split()) for line in merges if line.strip() and not line.startswith("#version")]
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=told.get("add_prefix_space", False))
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  named = [token for edge in USUAL for token in (_content(told.get(f"{edge}_token")), *USUAL[edge])]
  tokenizer.add_special_tokens([token for token in dict.fromkeys(named) if token in vocabulary])
  return tokenizer


def _find_edge(tokenizer, folder, edge):
  """The id of the token that `edge` ("bos", "eos", "pad") means, -1: there is none. Raises OSError, ConfigError."""
  for name in ("tokenizer_config.json", "special_tokens_map.json"):
    told = _read_json(folder / name)
    if f"{edge}_token" in told:
      token = _content(told[f"{edge}_token"])
      found = -1 if token is None else tokenizer.token_to_id(token)
      if found is not None:
        return found
  for name in ("generation_config.json", "config.json"):
    ids = _read_json(folder / name).get(f"{edge}_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    if type(first) is int and first >= 0 and tokenizer.id_to_token(first) is not None:
      return first
  added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
  return next((added[token] for token in USUAL[edge] if token in added), -1)


def _content(token):
  """The text of a token as tokenizer_config.json writes it: a string, {"content": string} or null."""
  return token.get("content") if isinstance(token, dict) else token


def _read_json(file):
  """The mapping in a file, {} where there is no file. Raises OSError, ConfigError."""
  return _parse(file, file.read_bytes()) if file.exists() else {}


def _parse(file, content):
  try:
    held = json.loads(content)
  except ValueError as error:
    raise _damaged(file, error) from error
  if not isinstance(held, dict):
    raise _damaged(file, "no JSON object")
  return held


def _damaged(file, reason):
  reason = " ".join(str(reason).split())[:200]
  return ConfigError(f"tokenizer_path={file}: is no tokenizer of Hugging Face or damaged ({reason}). Bring the file"
                     " back from where it came.")


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
