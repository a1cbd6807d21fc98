# SPDX-License-Identifier: Apache-2.0
"""Every source gives its documents in a fixed order, whole and clean, or says what is wrong with which file."""

import gzip
import hashlib
import importlib.util
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from MaxText import sources
from MaxText.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT / "../shared/data"


def read(path, max_chars=0):
  return list(sources.documents(sources.text(str(path)), max_chars))


def test_the_library_is_read_without_tests_and_foreign_packages():
  files = sources.stdlib("")
  assert len(files.paths) > 100
  assert not [p for p in files.paths if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(p.split(os.sep))]
  texts = list(sources.documents(files, 300_000))
  assert texts == list(sources.documents(sources.stdlib(""), 300_000))
  assert 300_000 <= sum(map(len, texts)) < 300_000 + max(map(len, texts))
  assert sum(map(len, sources.documents(files, 0))) < 5_000_000  # the default limit


def test_without_library_source_the_installed_packages_are_read(tmp_path, monkeypatch):
  paths = sysconfig.get_paths()
  monkeypatch.setattr(sysconfig, "get_paths", lambda: paths | {"stdlib": str(tmp_path)})
  files = sources.stdlib("")
  assert "packages" in files.origin
  assert next(iter(sources.documents(files, 1)))
  monkeypatch.setattr(sysconfig, "get_paths", lambda: paths | {"stdlib": str(tmp_path), "purelib": str(tmp_path)})
  with pytest.raises(DataError, match="dataset_type=text"):
    sources.stdlib("")


def test_files_folders_and_globs_are_read_once_each_in_order(tmp_path):
  (tmp_path / "sub dir é").mkdir()
  (tmp_path / ".git").mkdir()
  for name in ("b.txt", "a.md", "sub dir é/c.py", "d.bin", ".git/e.txt", ".hidden.txt"):
    (tmp_path / name).write_text(name)
  (tmp_path / "z.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
  assert read(tmp_path) == ["a.md", "b.txt", "one", "two", "sub dir é/c.py"]
  assert read(f"{tmp_path}/b.txt,{tmp_path}") == ["b.txt", "a.md", "one", "two", "sub dir é/c.py"]
  assert read(f"{tmp_path}/*.txt,{tmp_path}/**/*.py") == ["b.txt", "sub dir é/c.py"]
  assert read(tmp_path, max_chars=5) == ["a.md", "b.txt"]


def test_a_store_gives_the_texts_of_a_local_folder_in_its_order(tmp_path, monkeypatch):
  import fsspec

  store = fsspec.filesystem("memory")
  for name in ("z.txt", "a.md", "sub/z.txt", "sub/a.txt", "sub dir é/c.py", "sub/deep/b.md", ".git/e.txt",
               ".hidden.txt", "d.bin", "e.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name if name != "e.txt" else "")
  write_rows(tmp_path / "b.jsonl", [{"text": "one"}, b"\n", {"text": "two"}])
  store.put(f"{tmp_path}/", "/texts/", recursive=True)
  for path in ("", "*", "*.txt", "**/*.txt", "s*", "a.md", "sub,a.md,*", "b.jsonl", "[ab].*", ".hidden.txt"):
    both = [",".join(f"{root}/{part}".rstrip("/") for part in path.split(","))
            for root in (tmp_path, "memory://texts")]
    here, there = map(sources.text, both)
    assert [file.removeprefix("memory:///texts") for file in there.paths] == [
        file.removeprefix(str(tmp_path)) for file in here.paths], path
    assert read(both[0]) == read(both[1]) != []
    monkeypatch.setattr(sources, "FETCHED_BYTES", 20)  # a few together
    assert read(both[0]) == read(both[1])
    monkeypatch.undo()
  assert read("memory://texts", max_chars=5) == ["a.md", "one"]
  for name, complaint in (("nowhere", "no such bucket"), ("*.csv", "no such bucket"), ("d.bin", "only .txt")):
    path = f"memory:///texts/{name}"
    refused(lambda path=path: sources.text(path), f"dataset_path={path}: {complaint}")
  files = sources.text("memory://texts")
  assert [size for _, size, _ in sources.stamps(files)] == [os.path.getsize(f"{tmp_path}/{path.split('/texts/')[1]}")
                                                            for path in files.paths]
  for gone in ("a.md", "b.jsonl"):  # fetched with others, and alone
    files = sources.text(f"memory://texts/{gone},memory://texts/sub" if gone == "a.md" else f"memory://texts/{gone}")
    store.rm(f"/texts/{gone}")
    with pytest.raises(DataError, match=f"{gone}: cannot be read"):
      list(sources.documents(files, 0))


def test_texts_come_through_exactly_and_invalid_utf8_is_replaced(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"\tx\r\n\0\xe2\x96\x81 \xf0\x9f\x98\x80\n")
  (tmp_path / "b.txt").write_bytes(b"good \xff\xfe bad \xe2\x96")
  (tmp_path / "c.txt").write_bytes(b"")
  (tmp_path / "d.jsonl").write_bytes(
      b'{"text": "lone \\ud800 half, pair \\ud83d\\ude00"}\n{"text": ""}\n{"text": "\xff"}\n')
  assert read(tmp_path) == [
      "\tx\r\n\0\u2581 😀\n", "good \ufffd\ufffd bad \ufffd", "lone \ufffd half, pair 😀", "\ufffd"]


@pytest.mark.parametrize("row", [
    b"{", b"[1]", b'"text"', b"{}", b'{"text": 3}', b'{"text": null}', b'{"Text": "a"}', b"\xff", b"[" * 100_000,
    b"NaN"])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row):
  (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + row + b"\n")
  with pytest.raises(DataError, match=r"a\.jsonl:3: ") as error:
    read(tmp_path)
  assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_named(tmp_path):
  (tmp_path / "a.parquet").write_bytes(b"PAR1")
  (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
  for path, complaint in (("missing.txt", "no such file"), ("*.csv", "no such file"), ("a.parquet", "only .txt")):
    with pytest.raises(DataError, match=complaint):
      sources.text(str(tmp_path / path))
  for use in (lambda files: list(sources.documents(files, 0)), sources.stamps):
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
      use(sources.text(str(tmp_path)))
  (tmp_path / "empty").mkdir()
  with pytest.raises(DataError, match="holds no"):
    sources.text(str(tmp_path / "empty"))


def test_a_long_document_is_one_document(tmp_path):
  (tmp_path / "a.txt").write_text("0123456789abcdef" * (1 << 19))
  (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * (1 << 20)}))
  assert [len(text) for text in read(tmp_path)] == [1 << 23, 1 << 20]


@pytest.mark.parametrize("vocab_size", [2, 7, 256, 300, 32_768, 200_000])
def test_synthetic_tokens_fill_any_vocabulary_and_depend_on_seed_and_row_alone(vocab_size):
  source = sources.Synthetic(vocab_size, 33, 5)
  tokens = source.tokens(0, 64)
  assert tokens.shape == (64, 34)
  assert tokens.min() >= 0
  assert tokens.max() < vocab_size
  assert len(np.unique(tokens)) > min(vocab_size, 256) * 0.9
  assert tokens.max() >= vocab_size // 2
  for start, stop in ((0, 1), (3, 17), (63, 64)):
    np.testing.assert_array_equal(source.tokens(start, stop), tokens[start:stop])
  assert sources.Synthetic(vocab_size, 33, 5).tokens(10**12, 10**12 + 2).shape == (2, 34)
  assert not np.array_equal(sources.Synthetic(vocab_size, 33, 6).tokens(0, 64), tokens)
  assert not np.array_equal(sources.Synthetic(vocab_size, 33, 5, held_out=True).tokens(0, 64), tokens)


def test_the_synthetic_source_has_the_entropy_it_states():
  tokens = sources.Synthetic(4096, 255, 0).tokens(0, 2000)
  pairs, counts = np.unique(tokens[:, :-1].astype(np.int64) * 4096 + tokens[:, 1:], return_counts=True)
  _, where, firsts = np.unique(pairs // 4096, return_inverse=True, return_counts=True)
  of_first = np.bincount(where, weights=counts)[where]
  entropy = -(counts / counts.sum() * np.log(counts / of_first)).sum()
  assert entropy == pytest.approx(sources.Synthetic.ENTROPY, abs=0.01)
  assert firsts.max() == 4
  unigram = np.bincount(tokens.ravel())
  unigram = unigram[unigram > 0] / tokens.size
  assert -(unigram * np.log(unigram)).sum() > 5.5  # the token before is what helps


# --- Shards that are read while training -----------------------------------------------------------------------------

C4 = SHARED / "c4/en/3.0.1"
needs_c4 = pytest.mark.skipif(not C4.exists(), reason="../shared/data/c4 is absent")


def texts(source, **how):
  return [text for shard in range(len(source.shards)) for text in source.read(shard, **how)]


def damaged(path, at, bit=4):
  content = bytearray(path.read_bytes())
  content[at] ^= bit
  path.write_bytes(content)


def refused(make, *complaints):
  """The one line with which make() or reading all it makes is refused."""
  with pytest.raises((ConfigError, DataError)) as error:
    texts(make())
  assert "\n" not in str(error.value)
  for complaint in complaints:
    assert complaint in str(error.value)
  return str(error.value)


def example(features):
  """A tf.train.Example of texts, as protobuf writes it: each message is a tag, a length and its fields."""

  def field(number, content):
    size, length = len(content), b""
    while size > 127:
      size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + content

  return field(1, b"".join(
      field(1, field(1, key.encode()) + field(2, field(1, b"".join(field(1, value) for value in values))))
      for key, values in features.items()))


def write_rows(path, rows):
  content = b"".join(json.dumps(row).encode() + b"\n" if not isinstance(row, bytes) else row for row in rows)
  if path.suffix == ".gz":
    content = gzip.compress(content)
  if path.suffix == ".zst":
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
      stream.write(content)
    content = sink.getvalue().to_pybytes()
  path.write_bytes(content)
  return path


def write_parquet(path, rows, **how):
  parquet = pytest.importorskip("pyarrow.parquet")
  import pyarrow

  parquet.write_table(pyarrow.Table.from_pylist(rows), path, **how)
  return path


def write_array_record(path, records, group_size=1):
  array_record = pytest.importorskip("array_record.python.array_record_module")
  writer = array_record.ArrayRecordWriter(str(path), f"group_size:{group_size}")
  for record in records:
    writer.write(record)
  writer.close()
  return path


def write_tfrecord(path, records):
  """Returns where each record begins: 8 bytes of length, 4 of its checksum, the record, 4 of its checksum."""
  tf = pytest.importorskip("tensorflow")
  path.parent.mkdir(parents=True, exist_ok=True)
  with tf.io.TFRecordWriter(str(path)) as writer:
    for record in records:
      writer.write(record)
  return np.cumsum([0] + [len(record) + 16 for record in records])[:-1]


DOCUMENTS = [f"{i}: " + "Zeile é 😀\n" * (i % 7) for i in range(600)] + [""]


def write(kind, folder):
  """DOCUMENTS in a file of this kind, in the folder: the file."""
  rows = [{"id": i, "text": text} for i, text in enumerate(DOCUMENTS)]
  path = folder / f"a{kind.split()[0]}"
  if kind == ".parquet":
    return write_parquet(path, rows, row_group_size=100)
  if kind.startswith(".array_record"):
    form = kind.split()[1]
    records = {"example": [example({"id": [b"7"], "text": [text.encode()]}) for text in DOCUMENTS],
               "json": [json.dumps(row).encode() for row in rows], "text": [text.encode() for text in DOCUMENTS]}[form]
    return write_array_record(path, records, group_size=16 if form == "json" else 1)
  return write_rows(path, rows)


KINDS = (".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".parquet", ".array_record example", ".array_record json",
         ".array_record text")


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_each_format_are_read_from_any_record_on_also_in_another_process(tmp_path, kind):
  source = sources.grain(str(write(kind, tmp_path)))
  assert list(source.read(0)) == DOCUMENTS
  for start, step in ((0, 1), (1, 1), (99, 1), (100, 1), (350, 1), (600, 1), (601, 1), (10_000, 1), (0, 3), (7, 100),
                      (250, 299), (600, 2)):
    assert list(source.read(0, start, step)) == DOCUMENTS[start::step], (start, step)
  copy = pickle.loads(pickle.dumps(source))
  assert (copy.shards, copy.fingerprint) == (source.shards, source.fingerprint)
  assert list(copy.read(0, 590)) == DOCUMENTS[590:]


def test_folders_globs_and_lists_give_shards_in_order_whose_copies_have_the_same_fingerprint(tmp_path):
  for name in ("b.jsonl", "sub/a.jsonl", "c.jsonl", ".hidden/d.jsonl", "info.json", "note.txt"):
    (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
    write_rows(tmp_path / "in" / name, [{"text": name}])
  source = sources.grain(str(tmp_path / "in"))
  assert texts(source) == ["b.jsonl", "c.jsonl", "sub/a.jsonl"]
  assert texts(sources.grain(f"{tmp_path}/in/[bc].jsonl")) == ["b.jsonl", "c.jsonl"]
  assert texts(sources.grain(f"{tmp_path}/in/sub,{tmp_path}/in/b.jsonl,{tmp_path}/in")) == [
      "sub/a.jsonl", "b.jsonl", "c.jsonl"]
  shutil.copytree(tmp_path / "in", tmp_path / "copy")
  assert sources.grain(str(tmp_path / "copy")).fingerprint == source.fingerprint
  others = [sources.grain(f"{tmp_path}/in/*.jsonl").fingerprint, sources.grain(str(tmp_path / "in"), "id").fingerprint]
  write_rows(tmp_path / "in/b.jsonl", [{"text": "longer than it was"}])
  others.append(sources.grain(str(tmp_path / "in")).fingerprint)
  assert len({source.fingerprint, *others}) == 4


def test_shards_in_another_store_are_read_through_fsspec(tmp_path):
  import fsspec

  store = fsspec.filesystem("memory")
  for kind in (".jsonl.gz", ".parquet"):
    if kind == ".jsonl.gz" or importlib.util.find_spec("pyarrow"):
      store.pipe(f"/readers/{kind}/b{kind}", write(kind, tmp_path).read_bytes())
      source = sources.grain(f"memory://readers/{kind}")
      assert source.shards == (f"memory:///readers/{kind}/b{kind}",)
      assert list(source.read(0, 123)) == DOCUMENTS[123:]
  refused(lambda: sources.grain("memory://readers/none"), "dataset_path=memory://readers/none: holds no")
  refused(lambda: sources.grain("nostore://a/b"), "dataset_path=nostore://a/b: cannot be listed")


def test_a_store_that_fails_is_no_damage_to_be_skipped(tmp_path, monkeypatch):
  for kind in (".jsonl.gz", ".parquet"):
    if kind == ".parquet" and not importlib.util.find_spec("pyarrow"):
      continue
    source = sources.grain(str(write(kind, tmp_path)), data_errors="skip")

    class Failing(io.BytesIO):
      def read(self, size=-1):
        raise TimeoutError("no answer")

      read1 = read

    monkeypatch.setattr(sources, "_open", lambda name, failing=Failing: failing(b"x" * 1000))
    refused(lambda source=source: source, f"a{kind}: cannot be read (no answer)")
    monkeypatch.undo()


def test_what_is_no_corpus_of_one_format_is_refused_in_a_line(tmp_path):
  write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
  write_rows(tmp_path / "b.jsonl.gz", [{"text": "b"}])
  refused(lambda: sources.grain(str(tmp_path)), f"dataset_path={tmp_path}: holds .jsonl and .jsonl.gz files")
  refused(lambda: sources.grain(f"{tmp_path}/*.csv"), "*.csv: holds no .array_record")
  refused(lambda: sources.grain(f"{tmp_path}/nowhere", key="eval_dataset_path"), "eval_dataset_path=")
  source = sources.grain(f"{tmp_path}/a.jsonl")
  (tmp_path / "a.jsonl").unlink()
  refused(lambda: source, "a.jsonl: cannot be read (No such file or directory)")


def test_a_missing_package_is_named_in_a_line(tmp_path, monkeypatch):
  find_spec = importlib.util.find_spec
  gone = ("tensorflow", "pyarrow", "array_record", "datasets")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name))
  for name in ("a.parquet", "b.array_record-00000-of-00001", "c.jsonl.zst"):
    (tmp_path / name).touch()
  refused(lambda: sources.tfds(str(tmp_path), "c4/en:3.0.1"), "dataset_type=tfds", "pip install tensorflow")
  refused(lambda: sources.grain(str(tmp_path / "a.parquet")), "pip install pyarrow")
  refused(lambda: sources.grain(str(tmp_path / "b*")), "pip install grain")
  refused(lambda: sources.grain(str(tmp_path / "c*")), "pip install pyarrow")
  refused(lambda: sources.hf("json", files=str(tmp_path / "c*")), "pip install datasets")


BAD_ROWS = [b"[1]\n", b"{\n", b'"text"\n', {"Text": "a"}, {"text": 3}, {"text": None}, b"\xff\n",
            b"[" * 100_000 + b"\n"]


@pytest.mark.parametrize("row", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_row_without_text_is_named_or_skipped_and_keeps_its_number(tmp_path, row):
  path = str(write_rows(tmp_path / "a.jsonl.gz", [{"text": "a"}, b"\n", b" \t\r\n", row, {"text": "b"}]))
  refused(lambda: sources.grain(path), "a.jsonl.gz: record 1: ", '"text" (line 4)', "data_errors=skip")
  source = sources.grain(path, data_errors="skip")
  assert list(source.read(0)) == ["a", None, "b"]
  assert source.skipped == 1
  assert list(source.read(0, 2)) == ["b"]


def test_text_that_no_encoder_takes_is_replaced_in_every_format(tmp_path):
  pytest.importorskip("array_record")
  row, bad = b'{"text": "\\ud800 \xff"}\n', b"good \xff\xe2\x96"
  assert texts(sources.grain(str(write_rows(tmp_path / "a.jsonl", [row])))) == ["\ufffd \ufffd"]
  assert texts(sources.grain(str(write_array_record(tmp_path / "a.array_record", [row])))) == ["\ufffd \ufffd"]
  for records in ([bad], [example({"text": [bad]})]):
    path = write_array_record(tmp_path / "b.array_record", records)
    assert texts(sources.grain(str(path))) == ["good \ufffd\ufffd"]
  assert texts(sources.grain(str(write_parquet(tmp_path / "a.parquet", [{"text": bad}])))) == ["good \ufffd\ufffd"]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst"])
def test_a_compressed_file_cut_short_ends_its_shard_with_a_line(tmp_path, capfd, kind):
  texts_in = [hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() * 20 for i in range(1000)]
  path = write_rows(tmp_path / f"a{kind}", [{"text": text} for text in texts_in])
  path.write_bytes(path.read_bytes()[:-path.stat().st_size // 2])
  refused(lambda: sources.grain(str(path)), f"a{kind}: record ", "data_errors=skip")
  source = sources.grain(str(path), data_errors="skip")
  read = list(source.read(0))
  assert read == texts_in[:len(read)]
  assert len(read) > 100
  assert list(source.read(0, 100)) == read[100:]
  said = capfd.readouterr().err.splitlines()
  assert len(said) == 1, said  # also where it is read again
  assert f"a{kind}: record {len(read)}: " in said[0]
  assert "rest of this shard is left out" in said[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_file_holds_no_record_or_is_named(tmp_path, capfd, kind):
  path = write(kind, tmp_path)
  path.write_bytes(b"")
  if kind.startswith(".j"):
    assert texts(sources.grain(str(path))) == []
    return
  refused(lambda: sources.grain(str(path)), f"{path.name}: record 0: the file is damaged")
  assert texts(sources.grain(str(path), data_errors="skip")) == []
  assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_shard_without_records_is_read_as_that(tmp_path):
  pytest.importorskip("array_record")
  write_array_record(tmp_path / "a.array_record", [])
  write_array_record(tmp_path / "b.array_record", [b"one"])
  assert texts(sources.grain(str(tmp_path))) == ["one"]
  write_parquet(tmp_path / "a.parquet", [{"text": "x"}])
  import pyarrow.parquet

  pyarrow.parquet.write_table(pyarrow.parquet.read_table(tmp_path / "a.parquet").slice(1), tmp_path / "a.parquet")
  assert texts(sources.grain(str(tmp_path / "a.parquet"))) == []


@pytest.mark.parametrize("checksum", [False, True])
def test_a_damaged_page_costs_its_row_group(tmp_path, checksum):
  rows = [{"text": hashlib.sha256(bytes([i])).hexdigest() * 9} for i in range(200)]
  path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=50, compression="zstd", use_dictionary=False,
                       write_page_checksum=checksum)
  import pyarrow.parquet

  column = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0)
  for at in range(1 if checksum else 100):
    damaged(path, column.data_page_offset + column.total_compressed_size // 2 + at)
  refused(lambda: sources.grain(str(path)), "a.parquet: record 100: is in the damaged row group 2")
  source = sources.grain(str(path), data_errors="skip")
  expected = [None if 100 <= i < 150 else row["text"] for i, row in enumerate(rows)]
  assert list(source.read(0)) == expected
  assert source.skipped == 50
  assert list(source.read(0, 120, 7)) == expected[120::7]
  path.write_bytes(path.read_bytes()[:-100])
  refused(lambda: sources.grain(str(path)), "a.parquet: record 0: the file is damaged")


def test_a_column_that_is_not_there_null_or_no_text_is_named(tmp_path):
  path = str(write_parquet(tmp_path / "a.parquet", [{"text": "a", "id": 1}, {"text": None, "id": 2}]))
  refused(lambda: sources.grain(path, "body", data_errors="skip"), "no field body; it has text, id")
  refused(lambda: sources.grain(path, "id", data_errors="skip"), "field id is of type int64")
  refused(lambda: sources.grain(path), "record 1: has no text in field text")
  assert texts(sources.grain(path, data_errors="skip")) == ["a", None]


@pytest.mark.parametrize("group_size", [1, 16])
def test_damage_in_an_array_record_costs_its_chunk(tmp_path, group_size):
  records = [hashlib.sha256(bytes([i])).hexdigest() for i in range(200)]
  path = write_array_record(tmp_path / "a.array_record", [text.encode() for text in records], group_size)
  damaged(path, 4000)
  refused(lambda: sources.grain(str(path)), "a.array_record: record ", "is damaged (Corrupted Riegeli")
  source = sources.grain(str(path), data_errors="skip")
  read = list(source.read(0))
  lost = [i for i, text in enumerate(read) if text is None]
  assert len(lost) == source.skipped == group_size
  assert [text for text in read if text] == [text for i, text in enumerate(records) if i not in lost]
  assert list(source.read(0, lost[0] - 3, 2)) == read[lost[0] - 3::2]
  path.write_bytes(path.read_bytes()[:50_000])
  refused(lambda: sources.grain(str(path)), "a.array_record: record 0: the file is damaged")


@pytest.mark.parametrize("features, reason", [
    ({"body": [b"x"]}, "has no text in field text"), ({"text": []}, "has no text in field text"),
    ({"text": [b"x", b"y"]}, "holds several texts"), (None, "is no tf.train.Example")])
def test_an_example_without_one_text_is_named_or_skipped(tmp_path, features, reason):
  odd = b"\n\xff\xff\xff\x7fabc" if features is None else example(features)
  good = example({"text": [b"a" * 300]})
  path = str(write_array_record(tmp_path / "a.array_record", [good, odd, good]))
  refused(lambda: sources.grain(path), "record 1: ", reason)
  assert texts(sources.grain(path, data_errors="skip")) == ["a" * 300, None, "a" * 300]


def test_a_field_that_no_record_has_is_an_error_and_does_not_make_records_plain_text(tmp_path):
  for number, record in enumerate((example({"body": [b"x"]}), b'{"body": "x"}')):
    path = write_array_record(tmp_path / f"{number}.array_record", [record] * 3)
    refused(lambda path=path: sources.grain(str(path)), "record 0: ", "text")
    assert texts(sources.grain(str(path), "body")) == ["x"] * 3


@needs_c4
def test_c4_in_parquet_is_what_pyarrow_reads():
  parquet = pytest.importorskip("pyarrow.parquet")
  folder = C4.parents[1] / "hf"
  assert texts(sources.grain(str(folder))) == parquet.read_table(folder).column("text").to_pylist()


# --- TensorFlow ------------------------------------------------------------------------------------------------------


def write_c4(folder, shards, split="train"):
  """Texts as shards of c4/en:3.0.1 under the folder: [file of each shard], [where each record of it begins]."""
  files = [folder / f"c4/en/3.0.1/c4-{split}.tfrecord-{i:05d}-of-{len(shards):05d}" for i in range(len(shards))]
  return files, [write_tfrecord(file, [example({"text": [text.encode()], "url": [b"http://x"]}) for text in shard])
                 for file, shard in zip(files, shards, strict=True)]


@pytest.mark.slow
@needs_c4
def test_c4_in_tfrecord_is_what_tensorflow_datasets_reads_and_what_array_record_holds():
  pytest.importorskip("array_record")
  reference = pytest.importorskip("tensorflow_datasets")
  builder = reference.builder_from_directory(str(C4))
  for split, count in (("train", 1000), ("validation", 200)):
    order = reference.ReadConfig(interleave_cycle_length=1)
    expected = [row["text"].decode() for row in
                reference.as_numpy(builder.as_dataset(split=split, shuffle_files=False, read_config=order))]
    source = sources.tfds(str(SHARED), "c4/en:3.0.1", split)
    assert len(expected) == count
    assert texts(source) == expected
    assert sorted(texts(sources.grain(f"{C4}/*{split}*"))) == sorted(expected)
    assert [text for shard in range(len(source.shards)) for text in source.read(shard, 30)] == [
        text for shard in range(len(source.shards)) for text in list(source.read(shard))[30:]]
  assert sources.tfds(f"{SHARED}/", "c4/en/3.0.1").fingerprint == sources.tfds(
      str(SHARED), "c4/en:3.0.1").fingerprint


def said_by(capfd):
  """The lines on stderr, without those of a TensorFlow that a test imported noisily."""
  return [line for line in capfd.readouterr().err.splitlines() if "local_rendezvous" not in line]


@pytest.mark.slow
def test_a_damaged_tfrecord_is_named_or_skipped_record_by_record(tmp_path, capfd):
  names = [f"document {i}" for i in range(700)]
  (file,), (begins,) = write_c4(tmp_path, [names])
  whole = file.read_bytes()
  source = sources.tfds(str(tmp_path), "c4/en", data_errors="skip")
  for start, step in ((0, 1), (300, 1), (699, 1), (700, 1), (5000, 1), (0, 16), (255, 256)):
    assert list(source.read(0, start, step)) == names[start::step]
  capfd.readouterr()

  for number in (300, 301, 699):  # two that follow each other, and the last
    damaged(file, begins[number] + 20)
  refused(lambda: sources.tfds(str(tmp_path), "c4/en"), f"-of-00001: record 300: is damaged at byte {begins[300] + 12}")
  expected = [None if i in (300, 301, 699) else name for i, name in enumerate(names)]
  for start, step in ((0, 1), (290, 1), (300, 1), (301, 1), (1, 3), (0, 300)):
    source.skipped = 0
    assert list(source.read(0, start, step)) == expected[start::step]
    assert source.skipped == expected[start::step].count(None)
  assert not said_by(capfd)

  for content in (whole[:begins[500]] + b"\x01" + whole[begins[500] + 1:], whole[:begins[500] + 30]):
    file.write_bytes(content)
    source = sources.tfds(str(tmp_path), "c4/en", data_errors="skip")
    reason = refused(lambda: sources.tfds(str(tmp_path), "c4/en"), "record 500: ", f"at byte {begins[500]}")
    assert ("cut short" if len(content) < len(whole) else "length is damaged") in reason
    assert list(source.read(0)) == names[:500]
    assert list(source.read(0, 450)) == names[450:500]
    assert list(source.read(0, 600)) == []
    said = said_by(capfd)
    assert len(said) == 1, said
    assert "rest of this shard is left out" in said[0]

  file.write_bytes(b"")
  assert texts(sources.tfds(str(tmp_path), "c4/en")) == []
  file.write_bytes(b"this is a text and no TFRecord\n" * 9)
  refused(lambda: sources.tfds(str(tmp_path), "c4/en"), "record 0: the record's length is damaged at byte 0")
  write_tfrecord(file, [example({"text": [b"a"]}), b"no example", example({"Text": [b"a"]})])
  refused(lambda: sources.tfds(str(tmp_path), "c4/en"), "record 1: is no tf.train.Example")
  assert texts(sources.tfds(str(tmp_path), "c4/en", data_errors="skip")) == ["a", None, None]


@pytest.mark.slow
def test_examples_are_parsed_as_tensorflow_parses_them(tmp_path):
  tf = pytest.importorskip("tensorflow")
  random = np.random.default_rng(0)
  for _ in range(500):
    features = {}
    for key in random.permutation(["a", "text", "texts", "url", "n"])[:random.integers(1, 6)]:
      kind = random.integers(4)
      value = "x" * random.choice([0, 1, 127, 128, 20_000]) + "é"
      features[str(key)] = [tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()])), tf.train.Feature(),
                            tf.train.Feature(int64_list=tf.train.Int64List(value=[5, -1])),
                            tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"b"]))][kind]
    record = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    held = list(features["text"].bytes_list.value) if "text" in features else []
    got = sources._example_text(record, "text")
    if len(held) == 1:
      assert got == held[0].decode()
    else:
      assert isinstance(got, sources.Fault)


@pytest.mark.slow
def test_reading_tfrecords_is_quiet_and_takes_neither_devices_nor_many_threads(tmp_path):
  pytest.importorskip("tensorflow")
  files, _ = write_c4(tmp_path, [["a", "b"]] * 17)
  damaged(files[16], 20)
  code = ("import os, sys; from MaxText import sources; source = sources.tfds(sys.argv[1], 'c4/en');"
          "assert 'tensorflow' not in sys.modules; next(source.read(0)); before = len(os.listdir('/proc/self/task'));"
          "readers = [source.read(shard) for shard in range(16)]; print([next(reader) for reader in readers]);"
          "assert len(os.listdir('/proc/self/task')) <= before + 16; import tensorflow as tf;"
          "assert not tf.config.get_visible_devices('GPU'); assert 'TF_CPP_MIN_LOG_LEVEL' not in os.environ;"
          "print(list(sources.tfds(sys.argv[1], 'c4/en', data_errors='skip').read(16)));"
          "print('said', file=sys.stderr)")
  environment = {key: value for key, value in os.environ.items() if not key.startswith("TF_")}
  done = subprocess.run([sys.executable, "-c", code, tmp_path], env=environment | {"PYTHONPATH": str(ROOT)},
                        capture_output=True, text=True, check=False)
  assert (done.stdout, done.stderr, done.returncode) == (f"{['a'] * 16}\n[None, 'b']\n", "said\n", 0)


@pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="TensorFlow is absent")
def test_shards_versions_splits_and_fields_that_are_not_there_are_named(tmp_path):
  folder = tmp_path / "c4/en/3.0.1"
  folder.mkdir(parents=True)
  for number in range(8):
    (folder / f"c4-train.tfrecord-{number:05d}-of-00008").touch()
  path = str(tmp_path)
  assert len(sources.tfds(path, "c4/en").shards) == len(sources.tfds(path, "c4/en:3.0.1").shards) == 8
  refused(lambda: sources.tfds(path, "c4/en:3.0.1", "validation"), "no split validation in", "it has train")
  refused(lambda: sources.tfds(path, "c4/de"), "dataset_name=c4/de: there is no version")
  refused(lambda: sources.tfds(path, "c4/en:3.1.0"), "dataset_name=c4/en:3.1.0: no split train in", "it has no")
  (folder / "features.json").write_text('{"featuresDict": {"features": {"text": {}, "url": {}}}}')
  refused(lambda: sources.tfds(path, "c4/en", field="body"), "no field body in", "it has text, url")
  (folder / "c4-train.tfrecord-00000-of-00001").touch()
  refused(lambda: sources.tfds(path, "c4/en"), "several sets of train shards (c4 of 1, c4 of 8)")
  (folder / "c4-train.tfrecord-00000-of-00001").unlink()
  for number in (2, 5):
    (folder / f"c4-train.tfrecord-{number:05d}-of-00008").unlink()
  refused(lambda: sources.tfds(path, "c4/en"), "2 of 8 train shards are missing in", "number 2, 5")
  (tmp_path / "c4/en/3.0.10").mkdir()
  (tmp_path / "c4/en/3.0.10/c4-train.array_record-00000-of-00001").touch()
  refused(lambda: sources.tfds(path, "c4/en"), "no split train in", "3.0.10", "dataset_type=grain reads")


@pytest.mark.slow
@needs_c4
def test_sentencepiece_gives_the_ids_of_tensorflow_text_on_c4_but_for_ties():
  tf_text = pytest.importorskip("tensorflow_text")
  sentencepiece = pytest.importorskip("sentencepiece")
  model = (SHARED / "tok/maxtext_tokenizer.default.model").read_bytes()
  reference = tf_text.SentencepieceTokenizer(model=model)
  documents = texts(sources.grain(f"{C4}/*train*"))
  ours = sentencepiece.SentencePieceProcessor(model_proto=model)
  pairs = zip(ours.encode(documents), reference.tokenize(documents).to_list(), strict=True)
  differ = [pair for pair in pairs if pair[0] != pair[1]]
  assert len(differ) <= 0.01 * len(documents)
  for one, other in differ:  # two splits of a word with the same score: "mm m" or "m mm", which versions choose anew
    assert ours.decode(one) == ours.decode(other)
    assert sum(map(ours.get_score, one)) == pytest.approx(sum(map(ours.get_score, other)), rel=1e-6)


# --- Hugging Face datasets -------------------------------------------------------------------------------------------

needs_datasets = pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="datasets is absent")


@needs_datasets
def test_hugging_face_streams_shard_by_shard_from_any_record_on(tmp_path):
  import datasets

  for number in range(3):
    write_parquet(tmp_path / f"part-{number}.parquet",
                  [{"text": f"{number} {text}", "id": number} for text in DOCUMENTS], row_group_size=100)
  source = sources.hf(str(tmp_path))
  assert [os.path.basename(name) for name in source.shards] == [f"part-{number}.parquet" for number in range(3)]
  assert texts(source) == [row["text"] for row in datasets.load_dataset(str(tmp_path), split="train", streaming=True)]
  for start, step in ((0, 1), (255, 1), (256, 1), (599, 1), (5000, 1), (3, 16), (0, 500)):
    assert list(source.read(1, start, step)) == [f"1 {text}" for text in DOCUMENTS][start::step]
  copy = pickle.loads(pickle.dumps(source))
  assert list(copy.read(2, 590)) == [f"2 {text}" for text in DOCUMENTS][590:]
  assert sources.hf("parquet", files=f"{tmp_path}/*.parquet").fingerprint == source.fingerprint
  assert sources.hf("parquet", files=f"{tmp_path}/part-[01].parquet").fingerprint != source.fingerprint
  refused(lambda: sources.hf(str(tmp_path), split="validation"), "split=validation: cannot be opened (Bad split")
  refused(lambda: sources.hf(str(tmp_path), field="body"), "no field body; it has", "text")
  refused(lambda: sources.hf(str(tmp_path / "nowhere")), "dataset_path=", "cannot be opened")
  refused(lambda: sources.hf("json", files=f"{tmp_path}/*.jsonl"), "cannot be opened (StopIteration)")


@needs_datasets
def test_damage_ends_a_hugging_face_shard_with_a_line(tmp_path, capfd):
  texts_in = [hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() * 2000 for i in range(300)]
  path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts_in])
  path.write_bytes(path.read_bytes()[:-5000])  # a row cut in two
  refused(lambda: sources.hf("json", files=str(path)), "a.jsonl: record ", "data_errors=skip")
  capfd.readouterr()
  read = texts(sources.hf("json", files=str(path), data_errors="skip"))
  assert read == texts_in[:len(read)]
  assert [line for line in capfd.readouterr().err.splitlines() if "rest of this shard is left out" in line]
  write_rows(path, [{"text": "a"}, {"text": None}])
  assert texts(sources.hf("json", files=str(path), data_errors="skip")) == ["a", None]
