# SPDX-License-Identifier: Apache-2.0
"""Tokenizes a corpus once, on all cores, into token files that training reads by index (dataset_type=tokens).

  python3 MaxText/prepare.py configs/base.yml dataset_path=... tokenizer_path=... prepare_directory=DIR [key=value ...]

DIR gets `tokens` (all documents one after the other, BOS and EOS as add_bos and add_eos say, little endian), `offsets`
(int64 [documents + 1]), `tokenizer.model`, `blocks.jsonl` (a line with the SHA-256 of each block of documents) and last
`manifest.json`, which makes them count. Documents of fewer than two tokens are left out and counted.

Workers walk through the shards of a source and write blocks; a block is claimed by the first of them to reach it, and
where it begins depends on the documents alone. This process appends the blocks in order. So the files do not depend on
the number of workers or on what was interrupted: killed at any moment, the same command goes on where it was.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  CONFIG = interpreter.start(need_run_name=False)

import collections
import contextlib
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import shutil
import signal
import time
from pathlib import Path

import numpy as np

from MaxText import corpus, data, pyconfig, sources, tokenizer
from MaxText.errors import ConfigError, DataError, RunError, StorageError, as_exit_codes

BLOCK_CHARS = 1 << 23  # about two million tokens: what an interruption costs each worker, at most
GROUP_CHARS = 1 << 22  # tokenized in one call
SHARD_FILES = 1024  # small files that make a shard
SAID_EVERY_SECONDS = {True: 0.2, False: 5.0}  # on a terminal, elsewhere
HERE = ("tokenizer.model", "begun.tmp")  # what a command that was cut off at its very beginning leaves


class Texts:
  """sources.Files as a source: a .jsonl file is a shard, and so are up to SHARD_FILES neighbours that are documents."""

  def __init__(self, files):
    def kind(numbered):
      number, path = numbered
      return path if path.endswith(".jsonl") else number // SHARD_FILES

    self._groups = [tuple(path for _, path in group) for _, group in itertools.groupby(enumerate(files.paths), kind)]
    stamps = {path: size for path, (_, size, _) in zip(files.paths, sources.stamps(files), strict=True)}
    self.origin, self.max_chars, self._versions = files.origin, files.max_chars, files.versions
    self.shards = tuple(group[0] for group in self._groups)
    self.sizes = tuple(sum(stamps[path] for path in group) for group in self._groups)
    self.fingerprint = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()

  def read(self, shard, start=0):
    """The documents of a shard from number `start` on. Raises DataError."""
    files = sources.Files(self.origin, self._groups[shard], 0, self._versions)
    return itertools.islice(sources.documents(files, 0), start, None)


def open_source(cfg):
  """The source that dataset_type and dataset_path name. Raises ConfigError, DataError."""
  if cfg.dataset_type in sources.SOURCES:
    return Texts(sources.SOURCES[cfg.dataset_type](cfg.dataset_path))
  if cfg.dataset_type not in pyconfig.STREAMS:
    raise ConfigError(f"dataset_type={cfg.dataset_type} has no documents to tokenize. Set one of"
                      f" {', '.join((*sources.SOURCES, *pyconfig.STREAMS))}.")
  return data.open_reader(cfg, cfg.dataset_type, cfg.dataset_path, cfg.dataset_name, cfg.train_split,
                          cfg.hf_train_files)


# --- Workers: documents -> blocks ------------------------------------------------------------------------------------


class Block:
  """Documents of a shard from one record on, in a file of their own: a line of JSON about it, int64 [documents, 3]
  (tokens, 0 where it is dropped; characters; bytes), and the tokens."""

  def __init__(self, shard, block, record):
    self._about = {"shard": shard, "block": block, "record": record}
    self._table, self._tokens = [], []

  def add(self, documents, words, edges):
    """Tokenizes documents (str or token ids) and returns the numbers of documents, tokens, characters. Raises DataError
    where ids are not those of `words`."""
    encoded = iter(words.encode_documents([document for document in documents if isinstance(document, str)]))
    begin, end = edges
    table = []
    for document in documents:
      if isinstance(document, str):
        ids, size = next(encoded), len(document.encode())
      else:
        ids, size = document, document.nbytes
        if ids.min() < 0 or ids.max() >= words.vocab_size:
          raise DataError(f"shard {self._about['shard']}, from record {self._about['record']} on: a document has token"
                          f" ids from {ids.min()} to {ids.max()}, and the tokenizer has {words.vocab_size} pieces. Give"
                          " the one it was made with.")
      count = len(begin) + len(ids) + len(end)
      table.append((count if count > 1 else 0, len(document), size))
      if count > 1:
        self._tokens += [begin, ids.astype(words.dtype, copy=False), end]
    self._table += table
    return len(table), sum(row[0] for row in table), sum(row[1] for row in table)

  def write(self, directory, next_record, skipped, last):
    """Writes the file, whole or not at all, and returns what it says about itself. Raises OSError."""
    table = np.array(self._table, "<i8").reshape(-1, 3)
    content = table.tobytes() + b"".join(ids.tobytes() for ids in self._tokens)
    about = self._about | {"next_record": next_record, "skipped": skipped, "last": last, "documents": len(table),
                           "chars": int(table[:, 1].sum()), "block_chars": BLOCK_CHARS,
                           "sha256": hashlib.sha256(content).hexdigest()}
    path = part(directory, about["shard"], about["block"])
    with open(f"{path}.tmp", "wb") as file:
      file.write(json.dumps(about).encode() + b"\n" + content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    return about


def part(directory, shard, block):
  """The path of a block's file."""
  return directory / f"{shard:07d}-{block:07d}"


def read_part(path):
  """(about, table, tokens as bytes) of a block's file, or None where it is damaged. Raises OSError."""
  head, _, content = path.read_bytes().partition(b"\n")
  try:
    about = json.loads(head)
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
      return None
  except (ValueError, KeyError):
    return None
  size = about["documents"] * 24
  return about, np.frombuffer(content[:size], "<i8").reshape(-1, 3), content[size:]


def walk(source, shard, block, record, words, edges, directory, claim, tell):
  """Reads a shard from a block's first record on, and writes those of its blocks that claim(shard, block) grants.

  Calls tell("count", shard, (documents, tokens, characters)) and tell("block", what the file says about itself).
  Raises OSError, RunError.
  """
  documents = iter(source.read(shard, record))
  last = False
  while not last:
    made = Block(shard, block, record) if claim(shard, block) else None
    chars, skipped, waiting, waiting_chars = 0, 0, [], 0
    while chars < BLOCK_CHARS and not last:
      document = next(documents, StopIteration)
      last = document is StopIteration
      if not last:
        record += 1
        size = 0 if document is None else len(document)
        chars, waiting_chars, skipped = chars + size, waiting_chars + size, skipped + (document is None)
        if made and size:
          waiting.append(document)
      if made and (waiting_chars >= GROUP_CHARS or chars >= BLOCK_CHARS or last):
        tell("count", shard, made.add(waiting, words, edges))
        waiting, waiting_chars = [], 0
    if made:
      tell("block", shard, made.write(directory, record, skipped, last))
    block += 1


def work(connection, source, kind, model, edges, directory):
  """A worker process: walks from (shard, block, record) as the connection says, until None or nobody is there."""
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  os.environ["TOKENIZERS_PARALLELISM"] = "false"  # other workers have the other cores
  words = tokenizer.TOKENIZERS[kind](model)
  words.num_threads = 1

  def tell(*message):
    connection.send(message)

  def claim(shard, block):
    tell("claim", shard, block)
    return connection.recv()

  try:
    while (task := connection.recv()) is not None:
      try:
        walk(source, *task, words, edges, directory, claim, tell)
        tell("read", task[0], None)
      except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
      except OSError as error:
        tell("failed", task[0], unwritable(directory.parent, error))
      except RunError as error:
        tell("failed", task[0], error)
  except (EOFError, BrokenPipeError, ConnectionResetError):
    pass  # the command was killed


def unwritable(directory, error):
  return StorageError(f"prepare_directory={directory}: cannot be written ({error.strerror}). Make room, then run the"
                      " same command again: it goes on from here.")


# --- The token files -------------------------------------------------------------------------------------------------


class Output:
  """The token files while they grow. A block counts once its line is in blocks.jsonl, behind its tokens and offsets.

  `shard`, `block`, `record` are those of the block to come; `chars_of_shards` are in the shards before.
  Raises OSError, DataError.
  """

  def __init__(self, directory, dtype, max_chars):
    self._dtype, self.max_chars = dtype, max_chars
    path = directory / "blocks.jsonl"
    content = path.read_bytes() if path.exists() else b""
    content = content[:content.rfind(b"\n") + 1]  # a line cut off by a crash does not count
    self.lines, self._committed = [], 0
    self.documents = self.tokens = self.chars = self.chars_of_shards = 0
    self.shard = self.block = self.record = 0
    for line in content.splitlines():
      self._count(json.loads(line))
    self._committed = len(self.lines)
    self._files = {}
    for name, size in (("tokens", self.tokens * dtype.itemsize), ("offsets", 8 * (self.documents + 1)),
                       ("blocks.jsonl", len(content))):
      file = self._files[name] = open(directory / name, "ab")
      if name == "offsets" and not self.lines:
        file.truncate(0)
        file.write(bytes(8))
        file.flush()
      if file.tell() < size:
        raise DataError(f"{directory / name}: has {file.tell()} bytes, and blocks.jsonl beside it speaks of {size}."
                        f" Delete {directory} and begin again.")
      file.truncate(size)

  @property
  def full(self):
    return 0 < self.max_chars <= self.chars

  def append(self, about, table, content):
    """Adds a block, of which no more documents than max_chars asks for. It counts from the next commit() on."""
    if self.max_chars:
      before = self.chars + np.cumsum(table[:, 1]) - table[:, 1]
      table = table[before < self.max_chars]
      content = content[:int(table[:, 0].sum()) * self._dtype.itemsize]
    lengths = table[table[:, 0] > 0, 0]
    tokens, chars, size = table.sum(axis=0).tolist()
    ends = self.tokens + np.cumsum(lengths, dtype="<i8")
    self._files["tokens"].write(content)
    self._files["offsets"].write(ends.tobytes())
    self._count({key: about[key] for key in ("shard", "block", "next_record", "skipped", "last")} | {
        "documents": len(lengths), "dropped": len(table) - len(lengths), "tokens": tokens, "chars": chars,
        "bytes": size, "sha256": digest(ends, content)})

  def commit(self):
    """Makes all blocks count that were appended: puts them on the disk, and then the lines that speak of them."""
    lines, self._committed = self.lines[self._committed:], len(self.lines)
    for name, file in self._files.items() if lines else ():
      if name == "blocks.jsonl":  # the last
        file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
      file.flush()
      os.fsync(file.fileno())

  def _count(self, line):
    self.lines.append(line)
    self.documents, self.tokens, self.chars = (
        self.documents + line["documents"], self.tokens + line["tokens"], self.chars + line["chars"])
    if line["last"]:
      self.shard, self.block, self.record, self.chars_of_shards = line["shard"] + 1, 0, 0, self.chars
    else:
      self.shard, self.block, self.record = line["shard"], line["block"] + 1, line["next_record"]

  def close(self):
    for file in self._files.values():
      file.close()


def digest(ends, content):
  """SHA-256 of a block: where its documents end in `tokens`, and its tokens."""
  found = hashlib.sha256(ends)
  found.update(content)
  return found.hexdigest()


def verify(directory):
  """Reads the token files whole. Raises DataError that names the places where they are not what was written."""
  width = np.dtype(json.loads((directory / "manifest.json").read_text())["dtype"]).itemsize
  documents = tokens = 0
  with (directory / "tokens").open("rb") as contents, (directory / "offsets").open("rb") as offsets:
    damaged = offsets.read(8) != bytes(8)
    for number, line in enumerate((directory / "blocks.jsonl").read_text().splitlines(), 1):
      line = json.loads(line)
      found = digest(offsets.read(8 * line["documents"]), contents.read(width * line["tokens"]))
      if damaged or found != line["sha256"]:
        raise DataError(f"{directory}/tokens: from {tokens} to {tokens + line['tokens']}, or offsets beside it from"
                        f" {documents} to {documents + line['documents']}, is damaged (SHA-256 differs from line"
                        f" {number} of blocks.jsonl). Bring it back, or delete {directory} and prepare it again.")
      documents, tokens = documents + line["documents"], tokens + line["tokens"]


# --- The command -----------------------------------------------------------------------------------------------------


class Progress:
  """A line on stderr: rewritten on a terminal, a new one every few seconds elsewhere.

  The share is of max_chars, or of what the sizes of the source's shards (1 each, where it knows none) make of the
  characters in those that are done.
  """

  def __init__(self, source, output, ready):
    self._terminal, self._output = sys.stderr.isatty(), output
    self._sizes = getattr(source, "sizes", None) or (1,) * len(source.shards)
    self._guess = 1.0 if hasattr(source, "sizes") else 0.0  # characters in a unit of size
    self._documents = output.documents + sum(about["documents"] for about in ready.values())
    self._chars = output.chars + sum(about["chars"] for about in ready.values())
    self._tokens = 0  # of this start
    self._begin = self._said = time.monotonic()
    self._share_before = self._share()

  def count(self, documents, tokens, chars):
    self._documents, self._tokens, self._chars = (
        self._documents + documents, self._tokens + tokens, self._chars + chars)

  def _share(self):
    """Of the characters there are, those tokenized; 0.0 where that is not known."""
    total, appended = self._output.max_chars, sum(self._sizes[:self._output.shard])
    if not total:
      per_unit = self._output.chars_of_shards / appended if appended else self._guess
      total = per_unit * sum(self._sizes)
    return min(self._chars / total, 1.0) if total else 0.0

  def show(self):
    """Writes the line when it is time."""
    now = time.monotonic()
    if now - self._said < SAID_EVERY_SECONDS[self._terminal]:
      return
    self._said, share = now, self._share()
    line = f"prepare: {self._documents:,} documents, {self._tokens / (now - self._begin) / 1e6:.2f} Mtok/s"
    if share > self._share_before:
      left = int((now - self._begin) * (1 - share) / (share - self._share_before))
      line += f", {100 * share:.1f} %, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
    line = f"\r{line}\x1b[K" if self._terminal else f"{line}\n"
    print(line, end="", file=sys.stderr, flush=True)

  def close(self):
    if self._terminal:
      print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run(source, words, edges, output, directory, workers):
  """Lets worker processes tokenize what `output` lacks of the source, and appends it. Raises OSError, RunError."""
  ready = {}  # what blocks that wait to be appended say about themselves
  for path in sorted(directory.iterdir()):
    found = None if path.suffix else read_part(path)
    about = found[0] if found else {"block_chars": 0}
    if about["block_chars"] == BLOCK_CHARS and (about["shard"], about["block"]) >= (output.shard, output.block):
      ready[about["shard"], about["block"]] = about
    else:  # of another version, appended already, damaged or unfinished
      path.unlink()
  claimed, read = set(ready), set()
  progress = Progress(source, output, ready)
  context = multiprocessing.get_context("spawn")
  walkers, processes = {}, {}  # connection -> the shard it walks through, its process

  def append_ready():
    appended = []
    while (output.shard, output.block) in ready and not output.full:
      path = part(directory, output.shard, output.block)
      found = read_part(path)
      if found is None:
        raise DataError(f"{path}: has changed since it was written. Run the same command again.")
      del ready[output.shard, output.block]
      output.append(*found)
      appended.append(path)
    output.commit()
    for path in appended:
      path.unlink()

  def task():
    """Where to walk next: a shard where nobody is, else where the fewest are; None: all shards have been read."""
    for shard in sorted((shard for shard in range(output.shard, len(source.shards)) if shard not in read),
                        key=collections.Counter(walkers.values()).__getitem__):
      block, record = (output.block, output.record) if shard == output.shard else (0, 0)
      while about := ready.get((shard, block)):
        block, record = block + 1, about["next_record"]
        if about["last"]:
          read.add(shard)
          break
      else:
        return shard, block, record
    return None

  def receive(connection):
    kind, shard, content = connection.recv()
    if kind == "claim":
      connection.send((shard, content) not in claimed)
      claimed.add((shard, content))
    elif kind == "count":
      progress.count(*content)
    elif kind == "block":
      ready[shard, content["block"]] = content
      append_ready()
    elif kind == "read":
      read.add(shard)
      assign(connection)
    else:
      raise content

  def assign(connection):
    walkers.pop(connection, None)
    found = task()
    connection.send(found)
    if found:
      walkers[connection] = found[0]

  append_ready()
  try:
    while output.shard < len(source.shards) and not output.full:
      while len(processes) < workers and task():
        connection, theirs = context.Pipe()
        process = context.Process(target=work, daemon=True, args=(
            theirs, source, words.kind, words.model, edges, directory))
        process.start()
        theirs.close()
        processes[connection] = process
        assign(connection)
      for connection in multiprocessing.connection.wait(list(processes), timeout=0.2):
        try:
          receive(connection)
        except EOFError:
          process = processes.pop(connection)
          process.join()
          if connection in walkers:
            raise RunError(f"a worker process ended with code {process.exitcode}. If that is -9, memory has run out:"
                           f" lower prepare_workers={workers}. The same command goes on from here.") from None
      progress.show()
  finally:
    progress.close()
    for process in processes.values():
      process.terminate()
    for process in processes.values():
      process.join()


def begin(cfg, directory, request):
  """(source, words): what is to be prepared in `directory`, with begun.json written or checked.

  Raises ConfigError, DataError, OSError.
  """
  source = open_source(cfg)
  path = directory / "begun.json"
  begun = json.loads(path.read_text()) if path.exists() else None
  if begun:
    words = tokenizer.load(begun["tokenizer"], directory / "tokenizer.model")
    given = tokenizer.load_given(cfg.tokenizer_path) if cfg.tokenizer_path else words
    for key, now, then in (("dataset_path", source.fingerprint, begun["source"]),
                           ("tokenizer_path", given.fingerprint, begun["tokenizer_fingerprint"])):
      if now != then:
        raise DataError(f"{key}={getattr(cfg, key)}: has changed (SHA-256 {now[:16]}) since {directory} was begun"
                        f" ({then[:16]}). Bring it back, or give another prepare_directory.")
    return source, words
  words = corpus.choose_tokenizer(cfg, [source])
  edges_of(cfg, words)
  words.save(directory / "tokenizer.model")
  write_json(path, {"request": request, "source": source.fingerprint, "tokenizer": words.kind,
                    "tokenizer_fingerprint": words.fingerprint})
  return source, words


def edges_of(cfg, words):
  """What goes before and behind each document: arrays of one token or none. Raises ConfigError."""
  for key, edge in (("add_bos", words.bos_id), ("add_eos", words.eos_id)):
    if getattr(cfg, key) and edge < 0:
      raise ConfigError(f"{key}=true: the tokenizer has no such piece. Set {key}=false.")
  return (np.array([words.bos_id] if cfg.add_bos else [], words.dtype),
          np.array([words.eos_id] if cfg.add_eos else [], words.dtype))


def write_json(path, content):
  part_path = path.with_suffix(".tmp")
  part_path.write_text(json.dumps(content, indent=1))
  part_path.replace(path)


def finish(directory, request, source, words, output):
  """Writes the manifest, for which a corpus counts, and removes what is not needed any more. Returns it."""
  if not output.documents:
    raise DataError(f"dataset_path={request['dataset_path']}: no document has two tokens. Give more text or set"
                    " add_bos=true.")
  contents = {name: (directory / name).read_bytes() for name in ("tokenizer.model", "blocks.jsonl")}
  manifest = {
      "format": corpus.FORMAT,
      "request": request,
      "origin": source.origin,
      "fingerprint": hashlib.sha256("".join(line["sha256"] for line in output.lines).encode()).hexdigest(),
      "train_documents": output.documents,
      "eval_documents": 0,
      "split": "",
      **{key: sum(line[key] for line in output.lines) for key in ("bytes", "dropped", "skipped")},
      "tokenizer": words.kind,
      "dtype": words.dtype.str,
      "sizes": {name: (directory / name).stat().st_size for name in ("tokens", "offsets")},
      "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
  }
  write_json(directory / "manifest.json", manifest)
  return manifest


def prepare(cfg, directory, request):
  """The manifest of the finished token files in `directory`. Raises OSError, RunError."""
  held = next((directory / name for name in ("manifest.json", "begun.json") if (directory / name).exists()), None)
  if held:
    then = json.loads(held.read_text())["request"]
    for key in request | then:
      if request.get(key) != then.get(key):
        raise ConfigError(f"{key}={request.get(key)}: {directory} was begun with {key}={then.get(key)}. Set it back, or"
                          " give another prepare_directory.")
  elif others := sorted(path.name for path in directory.iterdir() if path.name not in HERE):
    raise ConfigError(f"prepare_directory={directory} holds {others[0]}, which is no token file. Give a new folder.")
  parts = directory / "parts"
  if held and held.name == "manifest.json":
    manifest = corpus.open_tokens(directory).manifest
  else:
    source, words = begin(cfg, directory, request)
    parts.mkdir(exist_ok=True)
    max_chars = cfg.max_dataset_chars or getattr(source, "max_chars", 0)
    workers = cfg.prepare_workers or len(os.sched_getaffinity(0))
    if hasattr(source, "sizes"):
      workers = min(workers, -(-sum(source.sizes) // BLOCK_CHARS))
    with contextlib.closing(Output(directory, words.dtype, max_chars)) as output:
      if output.lines:
        print(f"prepare: goes on behind {output.documents:,} documents, {output.tokens:,} tokens", file=sys.stderr)
      run(source, words, edges_of(cfg, words), output, parts, workers)
    manifest = finish(directory, request, source, words, output)
  shutil.rmtree(parts, ignore_errors=True)
  (directory / "begun.json").unlink(missing_ok=True)
  return manifest


def main(cfg):
  """Prepares, goes on preparing, or says that it is done. Raises RunError for what a user can mend."""
  if not cfg.prepare_directory or "://" in cfg.prepare_directory:
    raise ConfigError(f"prepare_directory={cfg.prepare_directory} must be a local folder for the token files.")
  directory = Path(cfg.prepare_directory).expanduser()
  request = {key: value for key, value in corpus.request_of(cfg).items() if not key.startswith("eval_")}
  begun = time.monotonic()
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
      manifest = prepare(cfg, directory, request)
      if cfg.prepare_verify:
        verify(directory)
  except OSError as error:
    raise unwritable(directory, error) from error
  tokens = manifest["sizes"]["tokens"] // np.dtype(manifest["dtype"]).itemsize
  print(f"prepare: {directory} is finished{' and whole' if cfg.prepare_verify else ''}:"
        f" {manifest['train_documents']:,} documents, {tokens:,} tokens of {manifest['bytes'] / tokens:.2f} bytes"
        f" ({manifest['tokenizer']}); {manifest['dropped']:,} documents of fewer than two tokens and"
        f" {manifest['skipped']:,} damaged records left out; {time.monotonic() - begun:.1f} s. Train on it with"
        f" dataset_type=tokens dataset_path={directory}")


@contextlib.contextmanager
def locked(directory):
  """Keeps other commands out of the directory, until this process ends in whatever way. Raises ConfigError."""
  lock = os.open(directory, os.O_RDONLY)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
  except BlockingIOError:
    raise ConfigError(f"prepare_directory={directory}: another command is at work in it. Wait for its end.") from None
  finally:
    os.close(lock)


if __name__ == "__main__":
  with as_exit_codes():
    main(CONFIG)
