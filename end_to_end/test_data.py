# SPDX-License-Identifier: Apache-2.0
"""Claims about data, on CPU: read, tokenized and packed on one core, documents come at --at_least=0.85 of the speed of
the tokenizer alone; worker processes add to it; rows of token files come at --tokens_at_least=70 million tokens a
second, and step 100,000 in less than a second; 50 random cuts between 1, 2, 4 and 8 hosts change no batch; and a run of
train.py waits for less than --wait_at_most=0.01 of its loop.

  python3 end_to_end/test_data.py [--data=PATH] [--tokenizers=MODEL,MODEL] [recipe.yml] [key=value ...]

PATH: documents as dataset_type=grain takes them; without it, the source of Python's library in pieces. They are written
anew in every format whose package is installed, repeated until files are long. MODEL: tokenizer_path; without it, a BPE
trained on the documents. One core: of CPU time of a process that is held on it, so that what else runs counts little.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()
  os.environ["JAX_PLATFORMS"] = "cpu"

import gzip
import importlib.util
import itertools
import json
import random
import shutil
import statistics
import subprocess
import time

import numpy as np

from end_to_end import runs

FILES, COPIES = 16, 4  # shards of each format, a slot for each; so many of them are copies of one
FILE_CHARS = 8_000_000
BATCH, LENGTH = 16, 2048
ROUND_SECONDS = 0.15
PACKAGES = {"TFRecord": "tensorflow", "ArrayRecord": "array_record", "Parquet": "pyarrow", "jsonl.gz": "gzip"}


def example(features):
  """A serialized tf.train.Example of {name: bytes}, as tensorflow/core/example/example.proto says."""
  def field(number, content):
    size, head = len(content), bytes([number << 3 | 2])
    while size > 127:
      head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + content

  return field(1, b"".join(field(1, field(1, name.encode()) + field(2, field(1, field(1, content))))
                           for name, content in features.items()))


def write(form, path, documents):
  """Writes a shard with what C4 has beside the text."""
  more = {"content-length": "", "content-type": "", "timestamp": "2019-04-24T00:00:00Z", "url": "https://example.com/a"}
  if form == "jsonl.gz":
    with gzip.open(path, "wt", 6, encoding="utf-8") as file:
      file.writelines(json.dumps({"text": text, **more}, ensure_ascii=False) + "\n" for text in documents)
  elif form == "Parquet":
    import pyarrow
    import pyarrow.parquet

    columns = {"text": documents, **{name: [value] * len(documents) for name, value in more.items()}}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1000)
  else:
    examples = (example({**{name: value.encode() for name, value in more.items()}, "text": text.encode()})
                for text in documents)
    if form == "TFRecord":
      from MaxText import sources

      with sources._import_tensorflow().io.TFRecordWriter(path) as writer:
        for record in examples:
          writer.write(record)
    else:
      from array_record.python import array_record_module

      writer = array_record_module.ArrayRecordWriter(path, "group_size:1")  # as TensorFlow Datasets and Grain have it
      for record in examples:
        writer.write(record)
      writer.close()


def write_all(folder, documents, files, copies, chars):
  """{format: source} of `files` shards of each available format, every one at least so long, in `folder`."""
  from MaxText import sources

  made, order = {}, random.Random(0)
  contents = []
  for _ in range(files // copies):
    few = []
    while sum(map(len, few)) < chars:
      few += order.sample(documents, len(documents))
    contents.append(few)
  for form, package in PACKAGES.items():
    if importlib.util.find_spec(package) is None:
      continue
    place = os.path.join(folder, form, *(["c4", "en", "3.0.1"] if form == "TFRecord" else []))
    os.makedirs(place)
    endings = {"TFRecord": f"c4-train.tfrecord-%05d-of-{files:05d}", "ArrayRecord": "%05d.array_record",
               "Parquet": "%05d.parquet", "jsonl.gz": "%05d.jsonl.gz"}
    names = [os.path.join(place, endings[form] % i) for i in range(files)]
    for i, name in enumerate(names):
      if i < len(contents):
        write(form, name, contents[i])
      else:
        shutil.copy(names[i % len(contents)], name)
    made[form] = (sources.tfds(os.path.join(folder, form), "c4/en:3.0.1") if form == "TFRecord"
                  else sources.grain(os.path.join(folder, form)))
  return made


def read_documents(path):
  from MaxText import sources

  if path:
    source = sources.grain(path)
    return [text for shard in range(len(source.shards)) for text in source.read(shard) if text]
  whole = "".join(sources.documents(sources.stdlib(""), 0))
  return [whole[i:i + 2000] for i in range(0, len(whole), 2000)]


class Pace:
  """Tokens a second of CPU time, in rounds: of each round what work() says it made, and how long it took."""

  def __init__(self, work, clock=time.process_time):
    self._work, self._clock, self.rounds = work, clock, []
    work()

  def run(self, seconds=ROUND_SECONDS):
    begin, made = self._clock(), 0
    while (spent := self._clock() - begin) < seconds:
      made += self._work()
    self.rounds.append(made / spent / 1e6)


def tokenizer_alone(words, documents):
  """Tokenizes a group of documents, the next ones with each call, in groups as streams does."""
  from MaxText import streams

  groups = itertools.cycle([documents[i:i + streams.GROUP] for i in range(0, len(documents), streams.GROUP)])
  return lambda: sum(map(len, words.encode_documents(next(groups))))


def streamed(stream):
  """Makes the batches in which every slot uses up a chunk, the next ones with each call."""
  from MaxText import streams

  # Or all slots would read a window at the same time, and a round hold some more of them than another.
  stream.seek(0, [[0, 0, 0, slot * 100_000 // stream.num_slots] for slot in range(stream.num_slots)])
  steps, count = itertools.count(), streams.CHUNK_TOKENS // stream.length

  def work():
    for step in itertools.islice(steps, count):
      stream.rows(step * stream.batch_rows, (step + 1) * stream.batch_rows)
    return count * stream.batch_rows * stream.length

  return work


def grain_pipeline(words, source):
  """The same with Grain over ArrayRecord: shuffle, tokenize, concat and split, batch, in the calling thread."""
  import grain

  from MaxText import sources

  def encode(record):
    return {"tokens": np.append(words.encode(sources._example_text(record, "text")), words.eos_id).astype(np.int32)}

  packed = grain.experimental.ConcatThenSplitIterDataset(
      grain.MapDataset.source(grain.sources.ArrayRecordDataSource(list(source.shards))).seed(0).shuffle().repeat()
      .map(encode).to_iter_dataset(grain.ReadOptions(num_threads=0)), length_struct={"tokens": LENGTH})
  batches = iter(packed.batch(BATCH))
  return lambda: sum(next(batches)["tokens"].size for _ in range(8))


def tf_pipeline(words, source):
  """The same with tf.data over TFRecords and tensorflow-text, documents cut at the ends of rows, without shuffling."""
  from MaxText import sources

  tf = sources._import_tensorflow()
  import tensorflow_text

  encoder = tensorflow_text.SentencepieceTokenizer(words.model, add_eos=True)
  features = {"text": tf.io.FixedLenFeature([], tf.string)}
  rows = (tf.data.TFRecordDataset(list(source.shards)).repeat().batch(256)
          .map(lambda records: encoder.tokenize(tf.io.parse_example(records, features)["text"]).flat_values)
          .unbatch().batch(LENGTH, drop_remainder=True).batch(BATCH))
  options = tf.data.Options()
  options.experimental_optimization.inject_prefetch = False  # its thread would work in the others' rounds
  batches = rows.with_options(options).as_numpy_iterator()
  return lambda: sum(next(batches).size for _ in range(8))  # not only those that are there already


def on_one_core(made, words, times):
  """(figures, least ratio) of each format beside the tokenizer, and of what else there is."""
  from MaxText import streams

  documents = [text for text in itertools.islice(next(iter(made.values())).read(0), 4096) if text]
  paces = {"alone": Pace(tokenizer_alone(words, documents))}
  for form, source in made.items():
    paces[form] = Pace(streamed(streams.Streams(source, words, LENGTH, BATCH, seed=0)))
  others = []
  if "ArrayRecord" in made and importlib.util.find_spec("grain"):
    others.append("Grain")
    paces["Grain"] = Pace(grain_pipeline(words, made["ArrayRecord"]))
  if "TFRecord" in made and words.kind == "sentencepiece" and importlib.util.find_spec("tensorflow_text"):
    others.append("tf.data")
    paces["tf.data"] = Pace(tf_pipeline(words, made["TFRecord"]))
  for _ in range(times):
    for pace in paces.values():
      pace.run()
  alone = paces.pop("alone").rounds
  figures, ratios = [f"tokenizer {statistics.median(alone):.2f} Mtok/s ({min(alone):.2f} to {max(alone):.2f})"], {}
  for name, pace in paces.items():
    shares = [ours / its for ours, its in zip(pace.rounds, alone, strict=True)]
    ratios[name] = statistics.median(shares)
    figures.append(f"{name} {statistics.median(pace.rounds):.2f} = {ratios[name]:.2f} ({min(shares):.2f} to"
                   f" {max(shares):.2f})")
  return ", ".join(figures), min(ratio for name, ratio in ratios.items() if name not in others)


def with_workers(source, words, cores):
  """{workers: Mtok/s of wall time}, medians of three rounds, behind what is made ahead at the start."""
  from MaxText import streams

  counts, found = [n for n in (1, 2, 4) if n <= cores], {}
  for count in counts * 3:
    stream = streams.Streams(source, words, LENGTH, BATCH, seed=0, workers=count)
    work = streamed(stream)
    for _ in range(streams.CHUNKS_AHEAD + 2):
      work()
    pace = Pace(work, time.perf_counter)
    pace.run(3 * ROUND_SECONDS)
    stream.close()
    found.setdefault(count, []).extend(pace.rounds)
  return {count: statistics.median(rounds) for count, rounds in found.items()}


def token_files(place, made, tokenizer_path):
  """(corpus.Corpus of the token files that prepare.py makes of a few shards, what it said last)."""
  from MaxText import corpus

  form = "jsonl.gz"
  folder = os.path.join(place.logs, "tokens")
  said = subprocess.run(
      [sys.executable, "MaxText/prepare.py", "configs/base.yml", "dataset_type=grain",
       f"dataset_path={','.join(made[form].shards[:4])}", f"tokenizer_path={tokenizer_path}",
       f"prepare_directory={folder}"], cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
      check=False)
  runs.check(said.returncode == 0, f"prepare.py: {said.stdout[-600:]}")
  return corpus.open_tokens(folder)


def indexed(held, times):
  """(Mtok/s of rows of 1,024 tokens from a memory map, seconds to step 100,000 of a new dataset)."""
  from MaxText import data

  rows, length = 64, 1024
  packed = data.Packed(held.tokens, held.offsets, length, seed=0)
  steps = itertools.count()

  def work():
    step = next(steps)
    packed.rows(step * rows, (step + 1) * rows)
    return rows * length

  pace = Pace(work)
  for _ in range(times):
    pace.run()
  begin = time.perf_counter()
  data.Packed(held.tokens, held.offsets, length, seed=0).rows(100_000 * rows, 100_001 * rows)
  return statistics.median(pace.rounds), time.perf_counter() - begin


def cut_at_random(make, cuts=50):
  """Goes from 1, 2, 4 or 8 hosts to others, and returns how many batches were compared. Raises Failed."""
  from MaxText import streams

  order, step, compared = random.Random(0), 0, 0
  whole, position = make(), None
  for _ in range(cuts):
    hosts = order.choice([1, 2, 4, 8])
    datasets = [make() for _ in range(hosts)]
    share = whole.batch_rows // hosts
    for dataset in datasets:
      if position is not None:
        dataset.seek(step, position)
    for _ in range(order.randint(1, 4)):
      first = step * whole.batch_rows
      expected = whole.rows(first, first + whole.batch_rows)
      parts = [dataset.rows(first + i * share, first + (i + 1) * share) for i, dataset in enumerate(datasets)]
      for key, values in expected.items():
        runs.check(np.array_equal(np.concatenate([part[key] for part in parts]), values),
                   f"batch {step} of {hosts} hosts has other {key}")
      step, compared = step + 1, compared + 1
    position = json.loads(json.dumps(streams.merge([dataset.position(step) for dataset in datasets])))
  return compared


def waiting(place, source, steps=200):
  """The share of its loop that train.py waits for documents that are read meanwhile, from the third step on."""
  arguments = ["dataset_type=grain", f"dataset_path={os.path.dirname(source.shards[0])}", "eval_interval=-1",
               "enable_checkpointing=false"]
  seconds = {}
  for name, count in (("first", 2), ("short", 2), ("long", steps)):  # the first one fills the caches
    place.train(name, *arguments, f"steps={count}")
    with open(os.path.join(place.directory, name, "summary.json"), encoding="utf-8") as file:
      seconds[name] = json.load(file)["seconds"]
  wait, step = (seconds["long"][kind] - seconds["short"][kind] for kind in ("data_wait", "step"))
  return max(wait, 0.0) / (wait + step)


def claim(place, data, tokenizers, at_least, tokens_at_least, wait_at_most, times):
  from MaxText import streams, tokenizer

  documents = read_documents(data)
  paths = [path for path in tokenizers.split(",") if path]
  if not paths:
    paths = [os.path.join(place.logs, "tokenizer.model")]
    trained = tokenizer.train((text for text in documents[:500]), 8192)
    with open(paths[0], "wb") as file:
      file.write(trained.model)
  cores = os.sched_getaffinity(0)
  made = write_all(os.path.join(place.logs, "long"), documents, FILES, COPIES, FILE_CHARS)
  few = write_all(os.path.join(place.logs, "short"), documents[:120], 6, 1, 1)

  figures, least = [], {}
  for path in paths:
    words = tokenizer.load_given(path)
    words.num_threads = 1
    os.sched_setaffinity(0, {min(cores)})
    said, least[path] = on_one_core(made, words, times)
    os.sched_setaffinity(0, cores)
    figures.append(f"{os.path.basename(path)} on one core: {said}")
  workers = with_workers(made["jsonl.gz"], words := tokenizer.load_given(paths[0]), len(cores))
  figures.append("jsonl.gz with workers: " + ", ".join(f"{n}: {rate:.2f} Mtok/s" for n, rate in workers.items()))

  held = token_files(place, made, paths[0])
  os.sched_setaffinity(0, {min(cores)})
  rate, seek = indexed(held, times)
  os.sched_setaffinity(0, cores)
  figures.append(
      f"token files of {len(held.tokens) / 1e6:.0f} Mtok: {rate:.0f} Mtok/s, step 100,000 after {seek:.3f} s")

  compared = {form: cut_at_random(lambda source=source, packing=packing: streams.Streams(
      source, words, 64, 8, seed=1, packing=packing, window=16))
              for (form, source), packing in zip(few.items(), itertools.cycle(streams.PACKINGS))}
  figures.append(f"50 cuts over hosts: 0 of {sum(compared.values())} batches differ ({', '.join(compared)})")
  wait = waiting(place, made["jsonl.gz"])
  figures.append(f"train.py waits {wait:.2%}")
  figures = "; ".join(figures)
  runs.check(min(least.values()) >= at_least, f"{figures}: less than {at_least} of the tokenizer")
  runs.check(rate >= tokens_at_least and seek < 1, f"{figures}: token files are slower than {tokens_at_least} Mtok/s")
  runs.check(wait <= wait_at_most, f"{figures}: waits more than {wait_at_most:.0%}")
  return figures


if __name__ == "__main__":
  runs.judge(__file__, claim, ["configs/base.yml"], data="", tokenizers="", at_least=0.85, tokens_at_least=70.0,
             wait_at_most=0.01, times=25)
