# SPDX-License-Identifier: Apache-2.0
"""Where documents come from: the installed Python's library, local files, or rows computed from the seed.

A row of SOURCES takes `dataset_path` and gives Files; documents() reads them by READERS, a row of which is a format.
"""

import glob
import json
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.errors import DataError

# Tests, tables and vendored or generated text say little about code.
NOT_LIBRARY = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages", "dist-packages",
               "ensurepip", "encodings", "pydoc_data", "__pycache__"}
STDLIB_CHARS = 4_000_000


class Files(NamedTuple):
  """A corpus before it is read: a phrase that says what it is, its files in reading order, where to stop by default."""

  origin: str
  paths: tuple
  max_chars: int


def stdlib(_path):
  """Source text of this Python's library or, where that is stripped or zipped, of the packages installed beside it.

  Raises DataError when there is neither.
  """
  paths = sysconfig.get_paths()
  version = sysconfig.get_python_version()
  for origin, root, skip in ((f"source of the Python {version} library", paths["stdlib"], NOT_LIBRARY),
                             (f"source of the packages installed for Python {version}, as its library has none",
                              paths["purelib"], {"test", "tests", "__pycache__"})):
    files = tuple(_walk(root, {".py"}, skip))
    if sum(os.path.getsize(file) for file in files) > 100_000:
      return Files(origin, files, STDLIB_CHARS)
  raise DataError(f"dataset_type=stdlib: no Python source under {paths['stdlib']} or {paths['purelib']}."
                  " Set dataset_type=text and dataset_path to files of your own.")


def text(path, key="dataset_path"):
  """Files named by `path`, the value of `key`: files, folders (recursive), globs, comma separated. Raises DataError."""
  files = []
  for entry in filter(None, path.split(",")):
    found = [entry] if os.path.exists(entry) else sorted(glob.glob(entry, recursive=True))
    if not found:
      raise DataError(f"{key}={entry}: no such file, folder or match in {os.getcwd()}. Check the path.")
    for one in found:
      if os.path.isdir(one):
        files += _walk(one, READERS, set())
      elif os.path.splitext(one)[1] in READERS:
        files.append(one)
      elif one == entry:  # a glob may well match other files
        raise DataError(f"{key}={entry}: only {' '.join(READERS)} files can be read. Convert it.")
  if not files:
    raise DataError(f"{key}={path}: holds no {' '.join(READERS)} file. Give another.")
  return Files(path, tuple(dict.fromkeys(files)), 0)


SOURCES = {"stdlib": stdlib, "text": text}


def read_file(path):
  """A file is a document. Bytes that are not UTF-8 become U+FFFD."""
  yield Path(path).read_bytes().decode("utf-8", "replace")


def read_jsonl(path):
  """A line {"text": ...} is a document; blank lines do not count. Raises DataError with file and line."""
  with Path(path).open("rb") as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      try:
        document = json.loads(line.decode("utf-8", "replace"))["text"]
        if not isinstance(document, str):
          raise TypeError
      except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}:{number}: a row must be an object with a string \"text\". Mend or drop it.") from error
      # JSON can spell half a surrogate pair, which no encoder takes.
      yield document if document.isascii() else document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


READERS = {".txt": read_file, ".md": read_file, ".py": read_file, ".jsonl": read_jsonl}


def documents(files, max_chars):
  """Yields the texts of Files in order, empty ones dropped, until `max_chars` (0: files.max_chars, 0: all) are reached.

  The document that reaches the limit is the last, whole. Raises DataError.
  """
  limit, chars = max_chars or files.max_chars, 0
  for path in files.paths:
    try:
      for document in READERS[os.path.splitext(path)[1]](path):
        if document:
          yield document
          chars += len(document)
          if limit and chars >= limit:
            return
    except OSError as error:
      raise DataError(f"{path}: cannot be read ({error.strerror}). Mend it or leave it out.") from error


def stamps(files):
  """[path, bytes, modification time in ns] of each of Files: what tells that none has changed. Raises DataError."""
  found = []
  for path in files.paths:
    try:
      stat = os.stat(path)
    except OSError as error:
      raise DataError(f"{path}: cannot be read ({error.strerror}). Mend it or leave it out.") from error
    found.append([os.path.abspath(path), stat.st_size, stat.st_mtime_ns])
  return found


class Synthetic:
  """Rows computed from (seed, row): a random walk over up to 256 symbols with steps of unequal chance.

  The next token is one of four that follow from the last, so the loss can fall from log(vocab_size) to ENTROPY (in nats
  per token). The symbols are spread over the whole vocabulary, in an order drawn from the seed.
  """

  CHANCES = np.array([0.6, 0.2, 0.15, 0.05])
  ENTROPY = float(-(CHANCES * np.log(CHANCES)).sum())
  HELD_OUT_ROWS = 64

  def __init__(self, vocab_size, length, seed, *, held_out=False):
    symbols = min(256, vocab_size)
    order = np.argsort(np.random.Philox(key=[seed, 2]).random_raw(symbols), kind="stable")
    self.length = length
    self.num_rows = self.HELD_OUT_ROWS if held_out else None
    self._token = (order * (vocab_size // symbols)).astype(np.int32)
    self._limits = (np.cumsum(self.CHANCES)[:3] * 2.0**64).astype(np.uint64)
    self._key = [seed, int(held_out)]

  def tokens(self, start, stop):
    """int32 [stop - start, length + 1]: the tokens of these rows."""
    width = -(-(self.length + 1) // 4)  # Philox makes four numbers a count; each row has counts of its own
    generator = np.random.Philox(key=self._key, counter=start * width)
    raw = generator.random_raw((stop - start) * width * 4).reshape(stop - start, -1)[:, :self.length + 1]
    walk = 1 + np.searchsorted(self._limits, raw, side="right")
    walk[:, 0] = raw[:, 0] % np.uint64(len(self._token))  # where the row begins
    return self._token[np.cumsum(walk, axis=1) % len(self._token)]


def _walk(root, suffixes, skip):
  for directory, folders, names in os.walk(root):
    folders[:] = sorted(f for f in folders if f not in skip and not f.startswith((".", "config-")))
    yield from (os.path.join(directory, name) for name in sorted(names)
                if os.path.splitext(name)[1] in suffixes and not name.startswith("."))
