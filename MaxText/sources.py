# SPDX-License-Identifier: Apache-2.0
"""Where documents come from: the installed Python's library, local files, shards, or rows computed from the seed.

Small corpora are read whole: a row of SOURCES takes `dataset_path` and gives Files; documents() reads them by READERS,
a row of which is a format. Large ones are read while training: tfds(), grain() and hf() give Shards, which any process
reads from any record on; FORMATS has a row for each format of grain(). What reads a format is imported when it is read.
"""

import contextlib
import functools
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import sys
import sysconfig
import tempfile
import zlib
from typing import NamedTuple

import numpy as np

from MaxText.errors import ConfigError, DataError

# Tests, tables and vendored or generated text say little about code.
NOT_LIBRARY = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages", "dist-packages",
               "ensurepip", "encodings", "pydoc_data", "__pycache__"}
STDLIB_CHARS = 4_000_000
FETCHED_BYTES = 1 << 26


class Files(NamedTuple):
  """A corpus before it is read: a phrase that says what it is, its files in reading order, where to stop by default.

  versions: {path: [bytes, what tells its versions apart]} of those on gs://, as they were listed.
  """

  origin: str
  paths: tuple
  max_chars: int
  versions: dict = {}


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
  """Files named by `path`, the value of `key`: files, folders (recursive) and globs, local or gs://, comma separated.

  The same folder gives the same order anywhere. Raises DataError.
  """
  files, versions = [], {}
  for entry in filter(None, path.split(",")):
    if "://" in entry:
      found, missing = _walk_store(entry, key), "no such bucket, file, folder or match"
      versions |= found
    else:
      found = [entry] if os.path.exists(entry) else sorted(glob.glob(entry, recursive=True))
      missing = f"no such file, folder or match in {os.getcwd()}"
    if not found:
      raise DataError(f"{key}={entry}: {missing}. Check the path.")
    for one in found:
      if os.path.isdir(one):
        files += _walk(one, READERS, set())
      elif os.path.splitext(one)[1] in READERS:
        files.append(one)
      elif one == entry:  # a glob may well match other files
        raise DataError(f"{key}={entry}: only {' '.join(READERS)} files can be read. Convert it.")
  if not files:
    raise DataError(f"{key}={path}: holds no {' '.join(READERS)} file. Give another.")
  return Files(path, tuple(dict.fromkeys(files)), 0, versions)


SOURCES = {"stdlib": stdlib, "text": text}


def read_file(file, _path):
  """A file is a document. Bytes that are not UTF-8 become U+FFFD."""
  yield file.read().decode("utf-8", "replace")


def read_jsonl(file, path):
  """A line {"text": ...} is a document; blank lines do not count. Raises DataError with file and line."""
  for number, line in enumerate(file, 1):
    if not line.strip():
      continue
    document = _json_text(line, "text")
    if isinstance(document, Fault):
      raise DataError(f"{path}:{number}: {document.reason}. Mend or drop it.")
    yield document


READERS = {".txt": read_file, ".md": read_file, ".py": read_file, ".jsonl": read_jsonl}


def documents(files, max_chars):
  """Yields the texts of Files in order, empty ones dropped, until `max_chars` (0: files.max_chars, 0: all) are reached.

  The document that reaches the limit is the last, whole. Raises DataError.
  """
  limit, chars = max_chars or files.max_chars, 0
  for path, opened in _open_together(files):
    try:
      with opened() as file:
        for document in READERS[os.path.splitext(path)[1]](file, path):
          if document:
            yield document
            chars += len(document)
            if limit and chars >= limit:
              return
    except DataError:
      raise
    except Exception as error:  # noqa: BLE001, stores raise their own
      if isinstance(error, OSError) or "://" in path:
        raise DataError(f"{path}: cannot be read ({_line(error)}). Mend it or leave it out.") from error
      raise


def _open_together(files):
  """Yields (path, what opens it) of Files. Small ones on gs:// are fetched together, not one by one."""
  groups, room = [], 0
  for path in files.paths:
    size = files.versions[path][0] if path in files.versions else math.inf
    if not groups or size > room:
      groups.append([])
      room = FETCHED_BYTES
    groups[-1].append(path)
    room -= size
  for group in groups:
    if len(group) == 1:
      yield group[0], functools.partial(_open, group[0])
      continue
    store, _ = _store(group[0])
    for path, content in zip(group, store.cat_ranges(group, None, None), strict=True):
      yield path, functools.partial(_opened, content)


def _opened(content):
  if isinstance(content, Exception):
    raise content
  return io.BytesIO(content)


def stamps(files):
  """[path, bytes, modification time in ns] of each of Files, on gs:// its generation: what tells that none has changed.

  Raises DataError.
  """
  found = []
  for path in files.paths:
    if path in files.versions:
      found.append([path, *files.versions[path]])
      continue
    try:
      stat = os.stat(path)
    except OSError as error:
      raise DataError(f"{path}: cannot be read ({error.strerror}). Mend it or leave it out.") from error
    found.append([os.path.abspath(path), stat.st_size, stat.st_mtime_ns])
  return found


# --- Shards that are read while training -----------------------------------------------------------------------------


class Fault(NamedTuple):
  """What a format's reader yields for a record that holds no text."""

  reason: str


class Broken(Exception):
  """What a format's reader raises where nothing behind the damage can be read."""


class Shards:
  """A corpus that is read in sequence, shard by shard, by as many processes as want to (picklable).

  origin: what it is, for the log. fingerprint: sha256 over the shards' names and sizes and the field, not their content
  or folder, so that a copy elsewhere is the same corpus. shards: their names, in a fixed order. skipped: records that
  this process left out. reader(name, field, start, step) yields the records' texts, or Faults.
  """

  def __init__(self, origin, files, field, reader, data_errors):
    """files: [(name, bytes, or what else tells versions apart)] in order. data_errors: "raise" or "skip"."""
    identity = json.dumps([field, [(os.path.basename(name), size) for name, size in files]])
    self.origin, self.shards, self.field = origin, tuple(name for name, _ in files), field
    self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
    self.skipped = 0
    self._reader, self._skip, self._warned = reader, data_errors == "skip", set()

  def read(self, shard, start=0, step=1):
    """Yields records start, start + step, ... of shards[shard]: the text ("" too), or None for one that is skipped.

    A step costs less than reading all of them. Raises DataError with file and record number. With data_errors=skip
    that is only for a store that does not answer or a field no record has: a record that is damaged or has no such text
    comes as None, and damage behind which no record can be found ends the shard with a warning on stderr.
    """
    name, number = self.shards[shard], start
    try:
      for text in self._reader(name, self.field, start, step):
        if isinstance(text, Fault):
          if not self._skip:
            raise DataError(f"{name}: record {number}: {text.reason}. Mend the file, or set data_errors=skip.")
          self.skipped += 1
          text = None
        yield text
        number += step
    except Broken as error:
      if not self._skip:
        raise DataError(f"{name}: record {number}: {error}, so nothing behind it can be read. Bring the file back, or"
                        " set data_errors=skip to leave the rest of it out.") from error
      if name not in self._warned:
        self._warned.add(name)
        print(f"data: {name}: record {number}: {error}; the rest of this shard is left out", file=sys.stderr)
    except DataError:
      raise
    except Exception as error:  # noqa: BLE001, stores raise their own
      if isinstance(error, OSError) or "://" in name:
        raise DataError(f"{name}: cannot be read ({_line(error)}). Mend it or leave it out.") from error
      raise


def tfds(path, name, split="train", field="text", data_errors="raise"):
  """Shards of TFRecord as TensorFlow Datasets lays them out: <path>/c4/en/3.0.1/*-<split>.tfrecord-00000-of-01024.

  path: the value of dataset_path, a local folder or gs:// (listed by gcsfs, read by TensorFlow). name: dataset_name,
  "c4/en:3.0.1", "c4/en/3.0.1", or "c4/en" for the newest version there. Read by tf.data with its checksums; a file cut
  within the 12 bytes before a record ends there without a word, as it does for tf.data. Raises ConfigError, DataError.
  """
  _require("tensorflow", "dataset_type=tfds", "tensorflow")
  folder = f"{path.rstrip('/')}/{name.replace(':', '/').strip('/')}"
  said = f"dataset_name={name}"
  if not re.fullmatch(r"\d+\.\d+\.\d+", os.path.basename(folder)):
    versions = [os.path.basename(found) for found, _ in _find(f"{folder}/*", "dataset_path", directories=True)]
    versions = [version for version in versions if re.fullmatch(r"\d+\.\d+\.\d+", version)]
    if not versions:
      raise DataError(f"{said}: there is no version (a folder such as 3.0.1) in {folder}. Check dataset_path={path}.")
    folder += "/" + max(versions, key=lambda version: [int(part) for part in version.split(".")])
  splits, others = {}, 0
  for file, size in _find(f"{folder}/*", "dataset_path"):
    if found := re.fullmatch(r"(.+)-([^-]+)\.tfrecord-(\d+)-of-(\d+)", os.path.basename(file)):
      dataset, which, number, count = found.groups()
      splits.setdefault(which, {}).setdefault((dataset, int(count)), {})[int(number)] = (file, size)
    others += ".array_record" in file
  if split not in splits:
    has = f"it has {', '.join(sorted(splits))}" if splits else "it has no .tfrecord-00000-of-... file"
    way = " dataset_type=grain reads its ArrayRecord files." if others and not splits else " Name one it has."
    raise DataError(f"{said}: no split {split} in {folder}; {has}.{way}")
  if len(splits[split]) > 1:
    several = ", ".join(f"{dataset} of {count}" for dataset, count in sorted(splits[split]))
    raise DataError(f"{said}: {folder} holds several sets of {split} shards ({several}). Keep one.")
  (((_, count), shards),) = splits[split].items()
  missing = [str(number) for number in range(count) if number not in shards]
  if missing:
    raise DataError(f"{said}: {len(missing)} of {count} {split} shards are missing in {folder}: number"
                    f" {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Fetch them.")
  with contextlib.suppress(OSError), _open(f"{folder}/features.json") as file:
    try:
      fields = sorted(json.loads(file.read())["featuresDict"]["features"])
    except (ValueError, TypeError, KeyError):
      fields = [field]  # it only makes for a better message
    if field not in fields:
      raise DataError(f"{said}: no field {field} in {folder}/features.json; it has {', '.join(fields)}. Name one of"
                      " them.")
  return Shards(f"{name} {split}: {count} TFRecord shards in {folder}", [shards[number] for number in range(count)],
                field, read_tfrecord, data_errors)


def grain(path, field="text", data_errors="raise", key="dataset_path"):
  """Shards of ArrayRecord, Parquet, .jsonl, .jsonl.gz, .json.gz or .jsonl.zst files, those of one format in one corpus.

  path: the value of `key`: files, folders (recursive) and globs, comma separated; of each entry in sorted order. Local
  or, but for ArrayRecord, any store fsspec has a package for (gs://, s3://, memory://). Records of ArrayRecord are
  tf.train.Examples, JSON objects with the field, or plain text: the first ones of a file tell. Raises ConfigError,
  DataError.
  """
  files = [(name, size) for entry in filter(None, path.split(",")) for name, size in _find(entry, key)
           if _format(name)]
  files = list(dict.fromkeys(files))
  if not files:
    raise DataError(f"{key}={path}: holds no {' '.join(FORMATS)} file. Give another.")
  formats = sorted({_format(name) for name, _ in files})
  if len(formats) > 1:
    raise DataError(f"{key}={path}: holds {' and '.join(formats)} files. Name those of one format, e.g. *{formats[0]}.")
  reader, package, pip = FORMATS[formats[0]]
  _require(package, f"{key}={path}: reading {formats[0]}", pip)
  if formats == [".array_record"] and any("://" in name for name, _ in files):
    raise DataError(f"{key}={path}: ArrayRecord is read from local paths only. Mount the bucket (gcsfuse) or copy it.")
  return Shards(f"{path}: {len(files)} {formats[0]} shards", files, field, reader, data_errors)


def hf(path, data_dir="", files="", split="train", field="text", data_errors="raise"):
  """Shards of a Hugging Face dataset, streamed: `path` on the hub, a local folder, or "parquet" or "json" for `files`.

  files: comma separated paths, globs or URLs. Without network it reads local files. Starting late in a shard reads
  what comes before, undecoded. Damage ends the shard, as the library finds no record behind it. Raises ConfigError,
  DataError.
  """
  _require("datasets", "dataset_type=hf", "datasets")
  import datasets

  said = f"dataset_path={path}" + (f" hf_data_dir={data_dir}" if data_dir else "")
  said += f" hf_train_files={files}" if files else ""
  datasets.disable_progress_bars()
  try:
    builder = datasets.load_dataset_builder(path, data_dir=data_dir or None,
                                            data_files=files.split(",") if files else None)
    dataset = builder.as_streaming_dataset(split=split)
  except Exception as error:  # noqa: BLE001, from OSError to StopIteration
    raise DataError(f"{said} split={split}: cannot be opened ({_line(error)}). Check path, files and split.") from error
  fields = dataset.column_names
  if fields and field not in fields:
    raise DataError(f"{said}: no field {field}; it has {', '.join(fields)}. Name one of them.")
  names = list((builder.config.data_files or {}).get(split, []))
  if len(names) != dataset.num_shards:
    names = [f"{path}[{split}][{shard}]" for shard in range(dataset.num_shards)]
  sizes = [os.path.getsize(name) if os.path.exists(name) else name for name in names]  # the hub's hold a revision
  return Shards(f"{said} {split}: {len(names)} shards", list(zip(names, sizes, strict=True)), field,
                Streamed(dataset, tuple(names)), data_errors)


class Streamed(NamedTuple):
  """Reads a shard of a Hugging Face IterableDataset."""

  dataset: object
  names: tuple

  def __call__(self, name, field, start, step):
    shard = self.dataset.shard(num_shards=len(self.names), index=self.names.index(name)).with_format("arrow")
    batches = shard.iter(batch_size=BATCH_RECORDS)
    at = 0
    while True:
      try:
        table = next(batches, None)
      except Exception as error:  # noqa: BLE001, every format and store raises its own
        if _is_damage(error):
          raise Broken(f"the file is damaged at or behind it ({_line(error)})") from error
        raise OSError(_line(error)) from error
      if table is None:
        return
      if field not in table.column_names:
        raise DataError(f"{name}: no field {field}; it has {', '.join(table.column_names)}. Name one of them.")
      rows = table.column(field).combine_chunks()
      for text in _column_texts(rows, field, start - at, step):
        start += step
        yield text
      at += len(table)


# --- Formats of shards -----------------------------------------------------------------------------------------------

# A reader(path, field, start, step) yields the text or Fault of records start, start + step, ... It raises Broken,
# DataError where no record can have the field, and OSError.
BATCH_RECORDS = 256


def read_tfrecord(path, field, start, step):
  """tf.train.Examples in a TFRecord file, local or on gs://, whose checksums tf.data verifies."""
  tf = _import_tensorflow()
  options = tf.data.Options()
  options.autotune.enabled = False
  options.threading.private_threadpool_size = 1  # it would be two threads
  options.experimental_optimization.apply_default_optimizations = False  # 10 ms a shard for nothing here
  read_bytes = 1 << 21 if "://" in path else 1 << 18  # by itself it takes 127 MiB for each file on gs://
  records = tf.data.TFRecordDataset(path, buffer_size=read_bytes).with_options(options)
  number, size = start, BATCH_RECORDS
  data_loss, any_error = tf.errors.DataLossError, tf.errors.OpError  # the module may be gone when this is closed
  while True:
    try:
      for batch in records.skip(number).shard(step, 0).batch(size).as_numpy_iterator():
        for record in batch:
          number += step
          yield _example_text(record, field)
      return
    except data_loss:
      # A batch is lost whole, and so is the file behind the damage: find the record, and begin again behind it.
      if size > 1:
        size = 1
        continue
      try:
        record = next(records.skip(number).take(1).as_numpy_iterator(), None)
        if record is None:  # the damage is in one of the records between this step's
          return
        text = _example_text(record, field)
      except data_loss as error:
        at = re.search(r"record at (\d+)", error.message)[1]
        if "truncated" in error.message:
          raise Broken(f"the file is cut short at byte {at}") from error
        try:
          next(records.skip(number + 1).take(1).as_numpy_iterator(), None)  # skip() follows the lengths
        except data_loss as behind:
          if f"record at {at}" in behind.message:
            raise Broken(f"the record's length is damaged at byte {at}") from error
        text = Fault(f"is damaged at byte {at} (its checksum differs)")
      number, size = number + step, BATCH_RECORDS
      yield text
    except any_error as error:
      raise OSError(error.message) from error


def read_array_record(path, field, start, step):
  """Examples, JSON objects or plain text in a local ArrayRecord file, whose checksums array_record verifies.

  Its sequential reader takes a third of the time of Grain's data source, which looks up each record by itself.
  """
  from array_record.python import array_record_module

  def open_at(number):
    reader = array_record_module.ArrayRecordReader(
        path, options="readahead_buffer_size:0,max_parallelism:0", file_reader_buffer_size=READ_BYTES)
    if number:
      reader.seek(number)
    return reader

  os.stat(path)
  reader = open_at(0)
  if not reader.ok():  # it says why, and that there are no records, only to those who read one
    try:
      reader.read()
    except RuntimeError as error:
      raise Broken(f"the file is damaged ({_line(error)})") from error
  text_of, count, reader = _look(open_at(0), field), reader.num_records(), None
  for number in range(start, count, step):
    try:
      if reader is None:
        reader = open_at(number)
      elif step > 1:
        reader.seek(number)
      text = text_of(reader.read(), field)
    except RuntimeError as error:
      reader, text = None, Fault(f"is damaged ({_line(error)})")  # a reader that has failed does so for ever
    yield text


def _look(reader, field):
  """What makes text of the records of an ArrayRecord reader: what most of the first few are, with this field or not."""
  votes = {_example_text: 0, _json_text: 0, _plain_text: 0}
  for _ in range(min(16, reader.num_records())):
    try:
      record = reader.read()
    except RuntimeError:
      break
    text_of = _plain_text
    if record[:1] == b"\n" and _example_text(record, field) != NO_EXAMPLE:
      text_of = _example_text
    elif record[:1] == b"{":
      with contextlib.suppress(ValueError, RecursionError):
        json.loads(record.decode("utf-8", "replace"))
        text_of = _json_text
    votes[text_of] += 1
  return max(votes, key=votes.get)


def read_parquet(path, field, start, step):
  """A string or binary column of a Parquet file, from the row group on that holds the first record."""
  import pyarrow
  import pyarrow.parquet

  with _open(path) as source:
    try:
      file = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True, pre_buffer="://" in path)
    except pyarrow.ArrowException as error:
      raise Broken(f"the file is damaged ({_line(error)})") from error
    if field not in file.schema_arrow.names:
      raise DataError(f"{path}: no field {field}; it has {', '.join(file.schema_arrow.names)}. Name one of them.")
    end, number = 0, start
    for group in range(file.num_row_groups):
      at, end = end, end + file.metadata.row_group(group).num_rows
      if number >= end:
        continue
      try:
        for batch in file.iter_batches(BATCH_RECORDS, [group], [field], use_threads=False):
          for text in _column_texts(batch.column(0), field, number - at, step):
            number += step
            yield text
          at += len(batch)
      except (ValueError, OSError) as error:
        if not _is_damage(error):
          raise
        while number < end:
          number += step
          yield Fault(f"is in the damaged row group {group} ({_line(error)})")


def _column_texts(column, field, first, step):
  """The texts in rows first, first + step, ... of an Arrow column."""
  import pyarrow

  if first >= len(column):
    return
  try:
    if pyarrow.types.is_dictionary(column.type):
      column = column.cast(column.type.value_type)
    column = column.take(pyarrow.array(range(first, len(column), step))) if step > 1 else column.slice(first)
    values = column.cast(pyarrow.large_binary()).to_pylist()
  except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid) as error:
    raise DataError(f"field {field} is of type {column.type} and holds no text. Name another.") from error
  for value in values:
    yield Fault(f"has no text in field {field}") if value is None else value.decode("utf-8", "replace")


def read_rows(path, field, start, step):
  """JSON objects, one a line, blank lines not counted; .gz by gzip, .zst by pyarrow. What comes before is read too."""
  with _open(path) as source:
    if path.endswith(".gz"):
      lines = io.BufferedReader(gzip.GzipFile(fileobj=source), 1 << 17)
    elif path.endswith(".zst"):
      import pyarrow

      lines = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(source), "zstd"), READ_BYTES)
    else:
      lines = source
    number = 0
    try:
      for count, line in enumerate(lines, 1):
        if line.isspace():
          continue
        if number >= start and (number - start) % step == 0:
          text = _json_text(line, field)
          yield Fault(f"{text.reason} (line {count})") if isinstance(text, Fault) else text
        number += 1
    except (EOFError, zlib.error, OSError) as error:
      if not _is_damage(error):
        raise
      raise Broken(f"the file is damaged behind record {number - 1} ({_line(error)})") from error


READ_BYTES = 1 << 15  # larger ones are slower
# Ending -> reader, the package it needs, and what pip calls that.
FORMATS = {
    ".array_record": (read_array_record, "array_record", "grain"),
    ".parquet": (read_parquet, "pyarrow", "pyarrow"),
    ".jsonl": (read_rows, "json", ""),
    ".jsonl.gz": (read_rows, "gzip", ""),
    ".json.gz": (read_rows, "gzip", ""),
    ".jsonl.zst": (read_rows, "pyarrow", "pyarrow"),
}


def _format(name):
  """The ending in FORMATS of a file's name, behind which -00000-of-00008 may stand; None where it has none."""
  name = re.sub(r"-\d+-of-\d+$", "", name)
  return next((ending for ending in FORMATS if name.endswith(ending)), None)


def _json_text(line, field):
  """The text in `field` of a JSON object in UTF-8, or a Fault."""
  try:
    text = json.loads(line.decode("utf-8", "replace"))[field]
    if not isinstance(text, str):
      raise TypeError
  except (ValueError, TypeError, KeyError, RecursionError):
    return Fault(f'a row must be an object with a string "{field}"')
  # JSON can spell half a surrogate pair, which no encoder takes.
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if b"\\u" in line else text


def _plain_text(record, _field):
  return record.decode("utf-8", "replace")


NO_EXAMPLE = Fault("is no tf.train.Example")


def _example_text(record, field):
  """The text in `field` of a serialized tf.train.Example, or a Fault.

  Example{Features 1}, Features{map<string, Feature> 1}, Feature{BytesList 1 | ...}, BytesList{bytes 1}, as in
  tensorflow/core/example/{example,feature}.proto, on the wire as protobuf.dev/programming-guides/encoding says.
  """
  key = field.encode()
  key = b"\n" + bytes([len(key)]) + key  # a map's entry begins with its key
  try:
    _, at, end = _wire_field(record, 0)
    if end != len(record):
      raise ValueError
    while at < end:
      _, begin, at = _wire_field(record, at)
      if record.startswith(key, begin):
        _, begin, stop = _wire_field(record, begin + len(key))  # Feature
        kind, begin, stop = _wire_field(record, begin) if begin < stop else (1, stop, stop)
        if kind != 1:
          return Fault(f"field {field} holds numbers")
        if begin == stop:
          break
        _, begin, first = _wire_field(record, begin)
        if first != stop:
          return Fault(f"field {field} holds several texts")
        return record[begin:first].decode("utf-8", "replace")
  except (ValueError, IndexError):
    return NO_EXAMPLE
  return Fault(f"has no text in field {field}")


def _wire_field(data, at):
  """(number, begin, end) of the length-delimited protobuf field at `at`. Raises IndexError, ValueError."""
  tag, size = data[at], data[at + 1]
  at += 2
  if size > 127:
    size, shift = size & 127, 7
    while True:
      byte = data[at]
      at += 1
      size |= (byte & 127) << shift
      if byte < 128:
        break
      shift += 7
  if tag & 7 != 2 or at + size > len(data):
    raise ValueError
  return tag >> 3, at, at + size


@functools.cache
def _import_tensorflow():
  """TensorFlow without this machine's accelerators, which are jax's, with one thread of its own, and quiet."""
  # Its libraries talk on file descriptor 2 before any setting reaches them: what others say meanwhile is kept.
  before = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
  sys.stderr.flush()
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as said:
    os.dup2(said.fileno(), 2)
    try:
      import tensorflow as tf

      with contextlib.suppress(RuntimeError):  # somebody uses it already
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.set_visible_devices([], "GPU")
        tf.config.set_visible_devices([], "TPU")
        tf.constant(0)  # makes it look at the devices now
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      os.environ.pop("TF_CPP_MIN_LOG_LEVEL")
      if before is not None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = before
      said.seek(0)
      for line in said:
        if not re.match(rb"WARNING: All log messages before|[IWE]\d{4} |To enable the following", line):
          os.write(2, line)
  return tf


def _require(package, said, pip):
  """Raises ConfigError where a package is not installed."""
  if importlib.util.find_spec(package) is None:
    raise ConfigError(f"{said} needs the package {pip}, which is not installed. pip install {pip}")


def _find(entry, key, directories=False):
  """[(name, bytes)] in sorted order of the files (or directories) that a path, folder or glob in a store means."""
  return [(name, info["size"] or 0) for name, info in sorted(_list(entry, key).items())
          if (info["type"] == "directory") == directories]


def _list(entry, key):
  """{name: what the store knows of it} of the files and, of a glob, directories that an entry of `key` means."""
  try:
    store, inner = _store(entry)
    if _is_glob(inner):
      found = store.glob(inner, detail=True)
    elif store.isdir(inner):
      found = store.find(inner, detail=True)
    else:
      found = {inner: store.info(inner)}
  except FileNotFoundError:
    found = {}
  except ImportError as error:
    raise ConfigError(f"{key}={entry}: a package is not installed. {_line(error)}.") from error
  except Exception as error:  # noqa: BLE001, each store raises its own
    raise DataError(f"{key}={entry}: cannot be listed ({_line(error)}). Check the path and its permissions.") from error
  name_of = store.unstrip_protocol if "://" in entry else str
  start, left_out = len(re.split(r"[*?[]", inner)[0].rstrip("/")), re.compile(r"/\.|/$")  # hidden; what marks a folder
  return {name_of(name): info for name, info in found.items() if not left_out.search(name[start:])}


def _is_glob(path):
  return any(sign in path for sign in "*?[")


def _open(name):
  """A binary file, local or in any store that fsspec has a package for."""
  if "://" not in name:
    return open(name, "rb")
  store, inner = _store(name)
  # By itself gcsfs reads up to 256 MiB ahead of each of up to 128 open files, and logs tracebacks of what it raises.
  # The lines of a store's file, which Python code looks for, take 50 times as long.
  return io.BufferedReader(store.open(inner, "rb", cache_type="readahead"), READ_BYTES)


def _store(name):
  """(fsspec's file system, the path in it)."""
  import fsspec

  return fsspec.core.url_to_fs(name.rstrip("/") or "/")


def _is_damage(error):
  """Whether an error tells of a damaged file, not of a store that fails: Arrow raises ValueErrors and bare OSErrors."""
  damages = (EOFError, zlib.error, gzip.BadGzipFile, ValueError)
  return isinstance(error, damages) or (type(error) is OSError and error.errno is None)


def _line(error):
  """An exception in one short line."""
  text = getattr(error, "strerror", None) or " ".join(str(error).split())
  return (text or type(error).__name__)[:200]


# --- Rows computed from the seed -------------------------------------------------------------------------------------


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


def _walk_store(entry, key):
  """{file: [bytes, generation]} of what an entry of `key` means on gs://, in the order in which local ones come."""
  def in_folders(name):  # as _walk(): the files of a folder, then its folders
    *folders, file = name.split("/")
    return [*((1, folder) for folder in folders), (0, file)]

  listed, found = _list(entry, key), {}
  for name in sorted(listed, key=None if _is_glob(entry) else in_folders):
    info = listed[name]
    if info["type"] == "file":
      found[name] = [info["size"], info.get("generation", str(info.get("mtime")))]
    elif _is_glob(entry) and not _is_glob(name):
      found |= _walk_store(name, key)
  return found
