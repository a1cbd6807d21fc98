# SPDX-License-Identifier: Apache-2.0
"""Token files: the documents of the corpus in its order, the same for any workers and interruptions, or refused."""

import gzip
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from MaxText import corpus as corpora
from MaxText import data, errors, prepare, pyconfig, sources

ROOT = Path(__file__).parents[1]
FILES = ("tokens", "offsets", "tokenizer.model", "blocks.jsonl", "manifest.json")
# The command with small blocks, so that a small corpus has many; worker processes import it too.
SMALL_BLOCKS = """
import sys
from MaxText import errors, prepare, pyconfig
prepare.BLOCK_CHARS, prepare.GROUP_CHARS, prepare.SHARD_FILES = 4000, 1500, 7
{more}
if __name__ == "__main__":
  with errors.as_exit_codes():
    prepare.main(pyconfig.load(sys.argv[1:], need_run_name=False))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """A folder with a `corpus` of every format: 40 small files, one with a long document, and two .jsonl of 1,500
  documents, some of them empty; and `whole`, which is that corpus prepared by one worker."""
  tmp_path = tmp_path_factory.mktemp("prepare")
  (tmp_path / "corpus").mkdir()
  random = np.random.default_rng(0)
  words = ["".join(map(chr, random.integers(97, 123, n))) for n in random.integers(1, 9, 500)]

  def text(count):
    return " ".join(words[i] for i in random.integers(0, 500, count))

  for i in range(40):
    (tmp_path / f"corpus/{i:02}.txt").write_text(text(i) + "\u00e9")
  for name in ("0a.jsonl", "z.jsonl"):
    rows = [json.dumps({"text": text(n)}) for n in random.integers(0, 40, 1500)]
    (tmp_path / f"corpus/{name}").write_text("\n".join(rows) + "\n")
  (tmp_path / "corpus/long.md").write_text(text(4000))
  assert run(tmp_path, "whole", "prepare_workers=1").stdout.startswith(f"prepare: {tmp_path}/whole is finished: 2,")
  return tmp_path


@pytest.fixture
def copied(corpus, request):
  """A copy of `whole` that the test may damage."""
  copy = corpus / re.sub(r"\W", "-", request.node.name)
  shutil.copytree(corpus / "whole", copy)
  return copy


def command(corpus, name, *arguments, more=""):
  """The command that prepares `corpus` into the folder `name` beside it, in small blocks."""
  script = corpus / "small_blocks.py"
  script.write_text(SMALL_BLOCKS.format(more=more))
  return [sys.executable, str(script), "configs/base.yml", f"dataset_path={corpus}/corpus", "tokenizer_type=byte",
          f"prepare_directory={corpus}/{name}", *arguments]


def run(*arguments, code=0, **options):
  done = subprocess.run(command(*arguments, **{k: options.pop(k) for k in ("more",) if k in options}), cwd=ROOT,
                        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
                        **options)
  assert done.returncode == code, done.stderr
  return done


def contents(directory):
  assert sorted(path.name for path in directory.iterdir()) == sorted(FILES)
  return {name: (directory / name).read_bytes() for name in FILES}


def refusal(done):
  """The one line on stderr."""
  lines = [line for line in done.stderr.splitlines() if not line.startswith("prepare: ")]
  assert len(lines) == 1, done.stderr
  return lines[0]


def test_token_files_hold_the_documents_in_order_with_their_edges(corpus):
  opened = corpora.open_tokens(corpus / "whole")
  texts = list(sources.documents(sources.text(f"{corpus}/corpus"), 0))
  assert len(opened.offsets) == len(texts) + 1
  decoded = [opened.tokens[a:b] for a, b in zip(opened.offsets[:-1], opened.offsets[1:], strict=True)]
  assert all((ids[0], ids[-1]) == (1, 2) for ids in decoded)
  assert [opened.tokenizer.decode(ids) for ids in decoded] == texts
  assert opened.manifest["bytes"] == sum(len(text.encode()) for text in texts)
  assert len((corpus / "whole/blocks.jsonl").read_text().splitlines()) > 50


def test_training_on_them_sees_the_batches_of_the_same_text_tokenized_in_memory(corpus):
  run(corpus, "bare", "add_bos=false", "add_eos=false")
  for name, edges in (("whole", True), ("bare", False)):
    cfg = pyconfig.load([f"dataset_path={corpus}/corpus", "tokenizer_type=byte", "data_cache_dir=", "run_name=x",
                         f"base_output_directory={corpus}/runs", "eval_fraction=0.0", "eval_interval=-1",
                         f"add_bos={edges}", f"add_eos={edges}"])
    given = sources.text(cfg.dataset_path)
    built = corpora.build({**corpora.request_of(cfg)}, given, None, None, None)
    opened = corpora.open_tokens(corpus / name)
    for length, seed in ((64, None), (100, 3)):
      one = data.Packed(opened.tokens, opened.offsets, length, seed=seed)
      other = data.Packed(built.tokens, built.offsets, length, seed=seed)
      assert one.num_pairs == other.num_pairs
      for key, values in one.rows(0, 900).items():
        np.testing.assert_array_equal(values, other.rows(0, 900)[key])


def test_any_number_of_workers_gives_the_same_files(corpus):
  for workers in (2, 4):
    run(corpus, f"out{workers}", f"prepare_workers={workers}")
    assert contents(corpus / f"out{workers}") == contents(corpus / "whole")


def test_killed_again_and_again_it_ends_with_the_files_of_an_uninterrupted_run(corpus):
  out, kills, kept = corpus / "killed", 0, []
  slow = "import time, MaxText.tokenizer as t\n" \
         "def encode(self, texts, quick=t.Byte.encode_documents): time.sleep(0.01); return quick(self, texts)\n" \
         "t.Byte.encode_documents = encode"

  def lines():
    return (out / "blocks.jsonl").read_bytes().count(b"\n") if (out / "blocks.jsonl").exists() else 0

  while not (out / "manifest.json").exists():
    before, deadline = lines(), time.monotonic() + 60
    process = subprocess.Popen(command(corpus, "killed", f"prepare_workers={2 + kills % 2}", more=slow), cwd=ROOT,
                               env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and lines() < before + 25:
      assert time.monotonic() < deadline
      time.sleep(0.005)
    children, listed = [], Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if process.poll() is None:
      children = listed.read_text().split() if listed.exists() else []
      kept.append(lines())
      process.kill()
      kills += 1
    said = process.communicate()[1]
    assert process.returncode in (0, -signal.SIGKILL), said
    assert "goes on behind" in said or not before
    while any(Path(f"/proc/{child}").exists() for child in children):  # no worker goes on alone
      assert time.monotonic() < deadline
      time.sleep(0.01)
    if kills == 1:  # what a machine that fails may leave
      for path in (out / "parts").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
      (out / "parts/0000099-0000000.tmp").write_bytes(b"half")
      for name in ("tokens", "offsets"):
        with (out / name).open("ab") as file:
          file.write(b"more than counts")
      with (out / "blocks.jsonl").open("ab") as file:
        file.write(b'{"shard": 0, "blo')
  assert kills >= 3
  assert kept == sorted(set(kept)), "each start keeps what was done"
  assert contents(out) == contents(corpus / "whole")


def test_a_finished_corpus_is_left_alone_at_once(corpus):
  before = contents(corpus / "whole")
  assert "is finished" in run(corpus, "whole", more="prepare.open_source = None").stdout
  assert contents(corpus / "whole") == before


@pytest.mark.parametrize("unfinished", [False, True])
def test_other_settings_for_the_same_folder_are_refused_with_both_values(corpus, copied, unfinished):
  if unfinished:
    (copied / "manifest.json").rename(copied / "begun.json")
  for argument in ("add_bos=false", "tokenizer_type=bpe"):
    key, value = argument.split("=")
    line = refusal(run(corpus, copied.name, argument, code=errors.CONFIG))
    assert re.match(rf"ConfigError: (?i:{argument}): .*/{copied.name} was begun with {key}=\w", line)


def test_a_folder_of_something_else_is_refused(corpus):
  (corpus / "other").mkdir()
  (corpus / "other/thesis.txt").write_text("my only copy")
  assert "thesis.txt" in refusal(run(corpus, "other", code=errors.CONFIG))


def limit_file_size(size):
  """For subprocess: writing more to a file fails with an OSError, as on a full disk."""
  return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(corpus):
  done = run(corpus, "full", "prepare_workers=1", code=errors.STORAGE, **limit_file_size(30_000))
  assert re.match(r"StorageError: prepare_directory=.*/full: cannot be written \(File too large\)\. Make room",
                  refusal(done))
  assert (corpus / "full/blocks.jsonl").read_text().count("\n") > 1
  assert "goes on behind" in run(corpus, "full").stderr
  assert contents(corpus / "full") == contents(corpus / "whole")


def test_a_source_that_changes_before_the_end_is_refused(corpus):
  run(corpus, "changed", code=errors.STORAGE, **limit_file_size(20_000))
  assert "dataset_path=" in refusal(run(corpus, "changed", code=errors.DATA, more=SOURCE))


def test_two_commands_do_not_work_in_one_folder(corpus):
  (corpus / "locked").mkdir()
  with prepare.locked(corpus / "locked"):
    assert "another command is at work" in refusal(run(corpus, "locked", code=errors.CONFIG))


def test_a_limit_of_characters_ends_behind_the_document_that_reaches_it(corpus):
  for limit in (1, 25_000):
    run(corpus, f"limit{limit}", f"max_dataset_chars={limit}", "prepare_workers=3")
    texts = list(sources.documents(sources.text(f"{corpus}/corpus"), limit))
    opened = corpora.open_tokens(corpus / f"limit{limit}")
    assert opened.tokenizer.decode(opened.tokens) == "".join(texts)
    assert len(opened.offsets) == len(texts) + 1


SOURCE = """
import numpy as np
class Source:
  origin, fingerprint, shards = "three shards", "f" * 64, ("a", "b", "c")
  def read(self, shard, start=0):
    records = [["one", None, "", "x"], [], [np.array([7, 8, 9]), np.array([5]), *["text %d" % i for i in range(5000)]]]
    return iter(records[shard][start:])
prepare.open_source = lambda cfg: Source()
"""


def test_any_source_of_shards_can_be_prepared(corpus):
  made = []
  for workers in (1, 4):
    done = run(corpus, f"source{workers}", "add_bos=false", "add_eos=false", f"prepare_workers={workers}", more=SOURCE)
    assert "2 documents of fewer than two tokens and 1 damaged records left out" in done.stdout
    opened = corpora.open_tokens(corpus / f"source{workers}")
    documents = [opened.tokens[a:b].tolist() for a, b in zip(opened.offsets[:-1], opened.offsets[1:], strict=True)]
    assert documents == [[*(c + 3 for c in b"one")], [7, 8, 9], *([c + 3 for c in b"text %d" % i] for i in range(5000))]
    made.append(contents(corpus / f"source{workers}"))
  assert made[0] == made[1]


def test_shards_that_streams_read_can_be_prepared(corpus):
  (corpus / "shards").mkdir()
  for name in ("0a", "z"):
    (corpus / f"shards/{name}.jsonl.gz").write_bytes(gzip.compress((corpus / f"corpus/{name}.jsonl").read_bytes()))
  grain = f"from MaxText import sources\nprepare.open_source = lambda cfg: sources.grain('{corpus}/shards')"
  run(corpus, "zipped", more=grain)
  run(corpus, "plain", f"dataset_path={corpus}/corpus/0a.jsonl,{corpus}/corpus/z.jsonl")
  for name in ("tokens", "offsets"):
    assert (corpus / "zipped" / name).read_bytes() == (corpus / "plain" / name).read_bytes()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_one_now_and_then_elsewhere(monkeypatch, terminal):
  screen, clock = io.StringIO(), iter(0.25 * i for i in range(200))
  screen.isatty = lambda: terminal
  monkeypatch.setattr(sys, "stderr", screen)
  monkeypatch.setattr(prepare.time, "monotonic", lambda: next(clock))
  output = SimpleNamespace(documents=1000, chars=2000, chars_of_shards=0, max_chars=0, shard=0)
  progress = prepare.Progress(SimpleNamespace(shards=("a", "b"), sizes=(20_000, 20_000)), output, {})
  for _ in range(190):
    progress.count(5, 1_000_000, 100)
    progress.show()
  assert (screen.getvalue().count("\n"), screen.getvalue().count("\r")) == ((0, 190) if terminal else (9, 0))
  assert re.search(r"prepare: 1,9\d\d documents, 4\.00 Mtok/s, 5\d\.\d %, 0:00:(47|50) left", screen.getvalue())
  progress.close()
  assert screen.getvalue().endswith("\r\x1b[K") == terminal


def test_what_is_wrong_with_a_source_reaches_the_terminal_as_one_line(corpus):
  (corpus / "bad.jsonl").write_text('{"text": "fine"}\n{"body": 1}\n')
  assert "bad.jsonl:2" in refusal(run(corpus, "bad", f"dataset_path={corpus}/bad.jsonl", code=errors.DATA))
  ids = SOURCE.replace("[7, 8, 9]", "[7, 8, 259]")
  assert "259 pieces" in refusal(run(corpus, "ids", code=errors.DATA, more=ids))
  none = SOURCE.replace("records[shard]", "[]")
  assert "no document has two tokens" in refusal(run(corpus, "none", code=errors.DATA, more=none))
  dies = SOURCE + "import os\nSource.read = lambda self, shard, start=0: os._exit(9)\n"
  assert "prepare_workers=" in refusal(run(corpus, "dies", code=1, more=dies))


def test_a_damaged_file_is_refused_by_its_name(copied):
  for name in FILES:
    path = copied / name
    content = path.read_bytes()
    for changed in (b"", content[:-1], content + b"x"):
      path.write_bytes(changed)
      with pytest.raises(errors.DataError, match=f"{copied.name}/{name}: ") as error:
        corpora.open_tokens(copied)
      assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(errors.DataError, match=rf"{copied.name}(/{name}: cannot be read|: holds no finished)"):
      corpora.open_tokens(copied)
    path.write_bytes(content)
  corpora.open_tokens(copied)


def test_a_flipped_bit_is_found_when_asked_for(corpus, copied):
  assert "is finished and whole" in run(corpus, copied.name, "prepare_verify=true").stdout
  for name, at in (("tokens", 50_001), ("offsets", 801)):
    path = copied / name
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(errors.DataError, match=rf"{name}.* from \d+ to \d+.* is damaged"):
      prepare.verify(copied)
    content[at] ^= 1
    path.write_bytes(content)


def test_a_tokenizer_is_trained_on_the_beginnings_of_the_shards(corpus):
  run(corpus, "trained", "tokenizer_type=bpe", "vocab_size=400", "max_corpus_chars=20000")
  opened = corpora.open_tokens(corpus / "trained")
  assert opened.tokenizer.vocab_size == 400
  assert opened.tokenizer.decode(opened.tokens) == "".join(sources.documents(sources.text(f"{corpus}/corpus"), 0))


def test_opening_takes_no_longer_for_a_large_corpus(copied):
  documents = 100_000_000
  manifest = json.loads((copied / "manifest.json").read_text())
  manifest["sizes"] = {"tokens": 2 * 400 * documents, "offsets": 8 * (documents + 1)}
  for name, size in manifest["sizes"].items():
    with (copied / name).open("r+b") as file:
      file.truncate(size)  # 80 GB with nothing in them
  (copied / "manifest.json").write_text(json.dumps(manifest))
  begin = time.process_time()
  opened = corpora.open_tokens(copied)
  assert time.process_time() - begin < 0.2
  assert len(opened.tokens) == 400 * documents
  assert len(opened.offsets) == documents + 1
