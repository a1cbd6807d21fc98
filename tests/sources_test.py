# SPDX-License-Identifier: Apache-2.0
"""Every source gives its documents in a fixed order, whole and clean, or says what is wrong with which file."""

import json
import os
import sysconfig

import numpy as np
import pytest

from MaxText import sources
from MaxText.errors import DataError


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
