# SPDX-License-Identifier: Apache-2.0
"""Tokenized corpora: made of documents once and kept beside the run that reads them, or mapped as prepare.py made them.

open_snapshot() gives a run its own copy, so that a resumed one reads the same data whatever became of the source: of
small corpora tokens, document offsets and tokenizer, of those that are read while training the tokenizer alone.
open_tokens() maps token files of any size.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
from etils import epath

from MaxText import sources, tokenizer
from MaxText.errors import ConfigError, DataError, StorageError

FORMAT = 1
# What decides the content of a snapshot; a resumed run must ask for the same.
TOKENIZER_REQUEST = ("max_corpus_chars", "tokenizer_type", "tokenizer_path", "add_bos", "add_eos")
REQUEST = ("dataset_type", "dataset_path", "eval_dataset_path", "eval_fraction", "max_dataset_chars",
           *TOKENIZER_REQUEST)
SNAPSHOT_WAIT_SECONDS = 1800
SAMPLE_SHARDS = 64
TOKENIZED_TOGETHER = 4096  # documents


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Tokenized documents, those for training first: tokens unsigned [T], offsets int64 [documents + 1]. Both are None
  where a run keeps the tokenizer alone."""

  manifest: dict
  tokens: np.ndarray
  offsets: np.ndarray
  tokenizer: object

  @property
  def origin(self):
    """A phrase that says what it is."""
    return self.manifest["origin"]

  @property
  def fingerprint(self):
    """What no other corpus has."""
    return self.manifest["fingerprint"]

  def write(self, directory):
    """Writes the files, each at once (tmp + rename), and the manifest, which makes them count, last."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").unlink(missing_ok=True)
    contents = {} if self.tokens is None else {"tokens": self.tokens.tobytes(), "offsets": self.offsets.tobytes()}
    contents |= {"tokenizer.model": self.tokenizer.model, "manifest.json": json.dumps(self.manifest, indent=1).encode()}
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
    words = tokenizer.TOKENIZERS[manifest["tokenizer"]](files["tokenizer.model"].tobytes())
    if "tokens" not in files:
      return cls(manifest, None, None, words)
    return cls(manifest, files["tokens"].view(manifest["dtype"]), files["offsets"].view("<i8"), words)


def open_tokens(directory):
  """The Corpus of the token files that prepare.py wrote in the local `directory`: mapped, not read, whatever its size.

  Raises DataError where there is none, or a file has not the size, or a small one not the content, it was written with.
  """
  if "://" in os.fspath(directory):
    raise DataError(f"{directory}: token files are read from a local folder. Mount the bucket (gcsfuse) or copy them.")
  directory = Path(directory)
  again = f"Bring it back, or delete {directory} and prepare it again."
  try:
    manifest = json.loads((directory / "manifest.json").read_text())
    written, sizes, digests = manifest["format"], manifest["sizes"], manifest["sha256"]
  except (FileNotFoundError, NotADirectoryError) as error:
    raise DataError(f"{directory}: holds no finished token files (there is no manifest.json). Let prepare.py end its"
                    f" work with prepare_directory={directory}, or check the path.") from error
  except (ValueError, KeyError) as error:
    raise DataError(f"{directory}/manifest.json: is damaged. {again}") from error
  if written != FORMAT:
    raise DataError(f"{directory}/manifest.json: format={written}, and this version reads {FORMAT}. Use the version"
                    " that wrote it, or prepare it again.")
  files = {}
  try:
    for name, size in sizes.items():
      with (directory / name).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
      if name == "tokens":
        mapped.madvise(mmap.MADV_RANDOM)  # else the system reads up to megabytes around each row
      files[name] = np.frombuffer(mapped, np.uint8)
      if len(mapped) != size:
        raise DataError(f"{directory / name}: has {len(mapped)} bytes, and {size} were written. {again}")
    for name, digest in digests.items():
      files[name] = (directory / name).read_bytes()
      if hashlib.sha256(files[name]).hexdigest() != digest:
        raise DataError(f"{directory / name}: is damaged (SHA-256 differs from manifest.json). {again}")
  except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
    raise DataError(f"{directory / name}: cannot be read ({error}). {again}") from error
  return Corpus(manifest, files["tokens"].view(manifest["dtype"]), files["offsets"].view("<i8"),
                tokenizer.TOKENIZERS[manifest["tokenizer"]](files["tokenizer.model"]))


def open_snapshot(cfg, readers=(), *, process_index=0, process_count=1):
  """The Corpus in the run's directory; process 0 makes it where there is none, or force_data_resume allows another.

  readers: the sources (sources.Shards) and token files (Corpus) of a dataset that is not held in memory. The snapshot
  is their tokenizer alone. Raises ConfigError, DataError, StorageError.
  """
  directory = epath.Path(cfg.run_directory) / "data"
  request = request_of(cfg)
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
      corpus = _alone(choose_tokenizer(cfg, readers), request, readers) if readers else _prepare(cfg, request)
      try:
        corpus.write(directory)
        if not Corpus.read(directory):
          raise FileNotFoundError(0, "what was written is not there")
      except OSError as error:
        raise StorageError(f"{directory}: the run's data cannot be written ({error.strerror}). Make room or set"
                           " base_output_directory.") from error
    elif time.monotonic() > deadline:
      raise DataError(f"{directory}: process {process_index} of {process_count} waited {SNAPSHOT_WAIT_SECONDS} s for"
                      " process 0 to write it. Set base_output_directory to one place that all hosts see.")
    else:
      time.sleep(0.2)


def request_of(cfg):
  """{key: value} of all that a snapshot depends on. Where documents are elsewhere, their fingerprint is in the position
  that checkpoints hold, and they may move."""
  keys = REQUEST if cfg.dataset_type in sources.SOURCES else ("dataset_type", *TOKENIZER_REQUEST)
  request = {key: getattr(cfg, key) for key in keys}
  if request["tokenizer_type"] == "bpe":
    request["vocab_size"] = cfg.vocab_size
  return request


def choose_tokenizer(cfg, readers):
  """The tokenizer of the token files among the readers, the given one, or one trained on them. Raises ConfigError."""
  given = tokenizer.load_given(cfg.tokenizer_path) if cfg.tokenizer_path else None
  words = next((reader.tokenizer for reader in readers if isinstance(reader, Corpus)), given)
  if given and given.fingerprint != words.fingerprint:
    raise ConfigError(f"tokenizer_path={cfg.tokenizer_path}: the token files were made with another. Leave it out.")
  if words is None and cfg.tokenizer_type == "byte":
    words = tokenizer.Byte()
  elif words is None:
    cache = epath.Path(cfg.data_cache_dir) / "tokenizers" if cfg.data_cache_dir else None
    words = tokenizer.train(sample(readers, cfg.max_corpus_chars), cfg.vocab_size, cache)
  return words


def _alone(words, request, readers):
  """A Corpus that is a tokenizer without documents."""
  manifest = {"format": FORMAT, "request": request, "origin": ", ".join(reader.origin for reader in readers),
              "tokenizer": words.kind, "sha256": {"tokenizer.model": words.fingerprint}}
  return Corpus(manifest, None, None, words)


def sample(readers, max_chars):
  """About max_chars characters of the sources, from the beginnings of up to SAMPLE_SHARDS shards of each."""
  chosen = [(reader, shard) for reader in readers
            for shard in range(0, len(reader.shards), -(-len(reader.shards) // SAMPLE_SHARDS))]
  for reader, shard in chosen:
    room = -(-max_chars // len(chosen))
    for document in reader.read(shard):
      if isinstance(document, str):
        yield document[:room]
        room -= len(document)
      if room <= 0:
        break


def tokenize(source, words, *, add_bos, add_eos, max_pairs=0, cache_directory=None):
  """The Corpus of all documents of a source in stored order, of at least max_pairs pairs where not 0; kept in
  `cache_directory` (epath) where one is given. Raises DataError."""
  seen = [FORMAT, source.fingerprint, words.fingerprint, add_bos, add_eos, max_pairs]
  directory = cache_directory / hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32] if cache_directory else None
  with contextlib.suppress(OSError, DataError):
    if directory and (found := Corpus.read(directory)):
      return found
  begin, end = (np.array([edge] if wanted else [], words.dtype) for wanted, edge in (
      (add_bos, words.bos_id), (add_eos, words.eos_id)))
  documents = itertools.chain.from_iterable(source.read(shard) for shard in range(len(source.shards)))
  texts = (text for text in documents if text)
  parts, lengths, pairs = [np.zeros(0, words.dtype)], [], 0
  while (group := list(itertools.islice(texts, TOKENIZED_TOGETHER))) and not 0 < max_pairs <= pairs:
    for ids in words.encode_documents(group):
      count = len(begin) + len(ids) + len(end)
      if count > 1:
        parts += [begin, ids, end]
        lengths.append(count)
    pairs = sum(lengths) - len(lengths)
  tokens, offsets = np.concatenate(parts), np.cumsum([0, *lengths], dtype="<i8")
  manifest = {"format": FORMAT, "origin": source.origin, "fingerprint": source.fingerprint, "tokenizer": words.kind,
              "dtype": words.dtype.str, "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in (
                  ("tokens", tokens), ("offsets", offsets), ("tokenizer.model", words.model))}}
  corpus = Corpus(manifest, tokens, offsets, words)
  if directory:
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the next run its time, no more
      corpus.write(directory)
  return corpus


def _prepare(cfg, request):
  """The corpus from data_cache_dir when the same files (names, sizes, times) were prepared before, else made now."""
  files = sources.SOURCES[cfg.dataset_type](cfg.dataset_path)
  eval_files = sources.text(cfg.eval_dataset_path, "eval_dataset_path") if cfg.eval_dataset_path else None
  given = tokenizer.load_given(cfg.tokenizer_path) if cfg.tokenizer_path else None
  if not cfg.data_cache_dir:
    return build(request, files, eval_files, given, None)
  seen = [FORMAT, tokenizer.SETTINGS, request, files.origin, sources.stamps(files),
          sources.stamps(eval_files) if eval_files else [], given.fingerprint if given else ""]
  cache = epath.Path(cfg.data_cache_dir)
  directory = cache / "corpora" / hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]
  try:
    corpus = Corpus.read(directory)
  except (OSError, DataError):
    corpus = None
  if corpus is None:
    corpus = build(request, files, eval_files, given, cache / "tokenizers")
    try:
      corpus.write(directory)
    except OSError as error:
      print(f"data: data_cache_dir={cache} cannot be written ({error.strerror}): the next run prepares its data again",
            file=sys.stderr)
  return corpus


def build(request, files, eval_files, given, tokenizer_cache):
  """The Corpus of the documents of `files` and `eval_files` (None: hold out a share of `files`).

  request: request_of(); given: the tokenizer of tokenizer_path, or None. Raises ConfigError, DataError.
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
  edges = len(begin) + len(end)
  num_train = sum(len(ids) + edges > 1 for ids in encoded[:num_train])
  if not num_train:
    raise DataError(f"dataset_path={request['dataset_path']}: no document has two tokens. Give more text or set"
                    " add_bos=true.")
  encoded = [ids for ids in encoded if len(ids) + edges > 1]
  tokens = np.concatenate([part for ids in encoded for part in (begin, ids, end)])
  offsets = np.cumsum([0] + [len(ids) + edges for ids in encoded], dtype="<i8")
  manifest = {
      "format": FORMAT,
      "request": request,
      "origin": files.origin,
      "fingerprint": hashlib.sha256(b"".join([*digests[:num_train], b"|", *digests[num_train:]])
                                    + bytes([request["add_bos"], request["add_eos"]])).hexdigest(),
      "train_documents": num_train,
      "eval_documents": len(encoded) - num_train,
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
