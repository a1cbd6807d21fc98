# SPDX-License-Identifier: Apache-2.0
"""standalone_dataloader.py: the input of a run alone, as a user types it."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from MaxText import standalone_dataloader, tokenizer

REPO = Path(__file__).parents[1]
ROWS = ["tokenizer_type=byte", "vocab_size=384", "max_target_length=64", "per_device_batch_size=8"]


@pytest.fixture
def files(tmp_path):
  """Four files of 200 documents, as .jsonl and, for streams, gzipped."""
  for shard in range(4):
    lines = "".join(json.dumps({"text": f"Document {shard}.{i} " + "x" * (i % 90)}) + "\n" for i in range(200))
    (tmp_path / f"{shard}.jsonl").write_text(lines)
    (tmp_path / f"{shard}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
  return tmp_path


def run(*arguments, code=0):
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  done = subprocess.run(
      [sys.executable, "MaxText/standalone_dataloader.py", "configs/base.yml", *map(str, arguments)], cwd=REPO,
      env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == code, done.stderr
  return done.stdout if code == 0 else done.stderr


def shown(text):
  """The segments shown, by batch, in order."""
  return re.findall(r"(?m)^(?:batch \d+:|    segment .*)$", text)


@pytest.mark.parametrize("kind", ["text", "grain"])
def test_the_hosts_rows_one_after_the_other_are_those_of_a_batch(files, kind):
  path = f"{files}/*.jsonl" if kind == "text" else f"{files}/*.gz"
  keys = [*ROWS, f"dataset_type={kind}", f"dataset_path={path}", "steps=3", "standalone_show_batches=3",
          "eval_interval=-1"]  # fmt: skip
  whole = shown(run(*keys))
  hosts = [shown(run(*keys, "standalone_process_count=4", f"standalone_process_index={i}")) for i in range(4)]
  by_batch = [[] for _ in range(3)]
  for host in hosts:
    number = -1
    for line in host:
      if line.startswith("batch"):
        number += 1
      else:
        by_batch[number].append(line)
  assert whole == [line for i, lines in enumerate(by_batch) for line in (f"batch {i}:", *lines)]
  assert any("Document" in line for line in whole)


@pytest.mark.parametrize("kind", ["text", "grain"])
def test_it_begins_where_it_is_told_to(files, kind):
  path = f"{files}/*.jsonl" if kind == "text" else f"{files}/*.gz"
  keys = [*ROWS, f"dataset_type={kind}", f"dataset_path={path}", "eval_interval=-1", "standalone_show_batches=9"]
  all_of_it, late = run(*keys, "steps=4"), run(*keys, "steps=2", "standalone_first_step=2")
  assert shown(all_of_it)[shown(all_of_it).index("batch 2:"):] == shown(late)


def test_it_says_how_fast_it_is_and_leaves_nothing_behind(files):
  before = set(files.iterdir())
  text = run(*ROWS, f"dataset_path={files}/*.jsonl", f"base_output_directory={files}/runs", "steps=20")
  assert re.search(r"20 batches, 10,240 tokens, fill 1\.0000; the first after", text)
  assert re.search(r"[\d,]+ tokens/s; a batch takes [\d.]+ ms \(median\)", text)
  assert set(files.iterdir()) == before
  waiting = run(*ROWS, f"dataset_path={files}/*.jsonl", "steps=20", "standalone_step_seconds=0.01")
  assert re.search(r"waited [\d.]+ s of [\d.]+ s \([\d.]+%\) for batches between steps of 0.01 s", waiting)


@pytest.mark.parametrize("index, count", [(2, 2), (0, 3)])
def test_a_host_that_there_is_not_is_one_line(files, index, count):
  error = run(*ROWS, f"dataset_path={files}/*.jsonl", f"standalone_process_index={index}",
              f"standalone_process_count={count}", code=2)
  assert error.count("\n") == 1 and f"standalone_process_count={count}" in error


def test_rows_are_shown_with_segments_positions_weights_and_text():
  words = tokenizer.Byte()
  ids = np.array([[*words.encode("ab"), 2, *words.encode("c"), 0, 0]], np.int32)
  batch = {"inputs": ids, "targets": np.roll(ids, -1, 1), "positions": np.array([[0, 1, 2, 0, 0, 0]]),
           "segmentations": np.array([[1, 1, 1, 2, 0, 0]]), "loss_weights": np.array([[1, 1, 1, 1, 0, 0]], np.float32)}
  lines = list(standalone_dataloader.describe(batch, words))
  assert lines[0] == "  row 0: 4 of 6 targets count"
  assert lines[1] == "    segment 1, columns 0 to 2, positions 0 to 2, weight 3: 'abc'"
  assert lines[2] == "    segment 2, columns 3 to 3, positions 0 to 0, weight 1: 'c'"
