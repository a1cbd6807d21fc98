# SPDX-License-Identifier: Apache-2.0
"""Data that do not fit memory: streams, token files, mixtures and several evaluation sets, by their keys."""

import functools
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import tiny

from MaxText import data, model, pyconfig, sharding, sources, streams, tokenizer, train
from MaxText.errors import ConfigError, DataError

REPO = Path(__file__).parents[1]
LENGTH, ROWS = 32, 8


@pytest.fixture
def files(tmp_path):
  """Folders of four .jsonl.gz shards of 60 documents (a), of two in capitals (b), and a held out one (held)."""
  for folder, shards in (("a", 4), ("b", 2), ("held", 1)):
    (tmp_path / folder).mkdir()
    for shard in range(shards):
      texts = [f"{folder}{shard}.{i} " + "xyz"[i % 3] * (i % 50) for i in range(60)]
      lines = "".join(json.dumps({"text": text.upper() if folder == "b" else text}) + "\n" for text in texts)
      (tmp_path / folder / f"{shard}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
  return tmp_path


def config(files, *arguments, name="run"):
  return pyconfig.resolve(pyconfig.load([
      "configs/base.yml", f"run_name={name}", f"base_output_directory={files}/runs", "tokenizer_type=byte",
      "vocab_size=384", f"max_target_length={LENGTH}", f"per_device_batch_size={ROWS}", "data_cache_dir=",
      *arguments]), [Device()])  # fmt: skip


class Device:
  platform, device_kind = "cpu", "cpu"


def inputs(opened, first, count):
  return [opened.train.rows(step * ROWS, (step + 1) * ROWS)["inputs"].tolist() for step in range(first, first + count)]


def from_json(position):
  return json.loads(json.dumps(position))


# --- Positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [
    ["dataset_path={}/a/*.gz"], ["dataset_path={}/a/*.gz", "packing=best_fit"],
    ["dataset_mixture=[0.7@grain@{0}/a,0.3@grain@{0}/b]"],
], ids=["concat", "best_fit", "mixture"])  # fmt: skip
def test_a_resumed_run_sees_the_batches_it_would_have_seen(files, keys):
  cfg = config(files, "eval_interval=-1", *(key.format(files) for key in keys))
  whole = data.open(cfg)
  before, position = inputs(whole, 0, 5), from_json(whole.position(5))
  after = inputs(whole, 5, 5)
  assert len(json.dumps(position)) < 5000 and before != after
  again = data.open(cfg)
  again.resume(position)
  assert inputs(again, 5, 5) == after


def test_the_run_keeps_its_tokenizer_and_no_tokens(files):
  cfg = config(files, f"dataset_path={files}/a/*.gz", "tokenizer_type=bpe", "eval_interval=-1")
  first = data.open(cfg)
  kept = sorted(path.name for path in (files / "runs/run/data").iterdir())
  assert kept == ["manifest.json", "tokenizer.model"]
  (files / "b").rename(files / "elsewhere")
  again = data.open(config(files, f"dataset_path={files}/a/*.gz", "tokenizer_type=bpe", "eval_interval=-1"))
  assert again.tokenizer.model == first.tokenizer.model == data.open_tokenizer(cfg).model


def test_shards_may_move_but_not_change(files):
  cfg = config(files, f"dataset_path={files}/a/*.gz", "eval_interval=-1")
  opened = data.open(cfg)
  inputs(opened, 0, 3)
  position = from_json(opened.position(3))
  after = inputs(opened, 3, 2)
  shutil.copytree(files / "a", files / "moved")
  moved = data.open(config(files, f"dataset_path={files}/moved/*.gz", "eval_interval=-1"))
  moved.resume(position)
  assert inputs(moved, 3, 2) == after
  with gzip.open(files / "moved/0.jsonl.gz", "at") as file:
    file.write('{"text": "more"}\n')
  changed = data.open(config(files, f"dataset_path={files}/moved/*.gz", "eval_interval=-1"))
  with pytest.raises(DataError, match="corpus="):
    changed.resume(position)
  forced = data.open(config(files, f"dataset_path={files}/moved/*.gz", "eval_interval=-1", "force_data_resume=true"))
  forced.resume(position)
  assert len(inputs(forced, 3, 1)) == 1


@pytest.mark.parametrize("key", ["packing=best_fit", "data_shuffle_seed=9", "max_target_length=16"])
def test_what_would_change_the_batches_is_refused(files, key):
  opened = data.open(config(files, f"dataset_path={files}/a/*.gz", "eval_interval=-1"))
  inputs(opened, 0, 1)
  position = from_json(opened.position(1))
  other = data.open(config(files, f"dataset_path={files}/a/*.gz", "eval_interval=-1", key))
  with pytest.raises(ConfigError, match=key.partition("=")[0]):
    other.resume(position)


# --- Mixtures and evaluation -----------------------------------------------------------------------------------------


def test_a_mixture_gives_each_its_share(files):
  opened = data.open(config(files, f"dataset_mixture=[3@grain@{files}/a,1@grain@{files}/b]", "eval_interval=-1"))
  rows_of = {"a": 0, "b": 0}
  for rows in inputs(opened, 0, 50):
    for row in rows:
      rows_of["b" if any(map(str.isupper, tokenizer.Byte().decode(row))) else "a"] += 1
  assert rows_of == {"a": 300, "b": 100}


def test_each_evaluation_set_is_read_once_and_whole(files):
  opened = data.open(config(
      files, f"dataset_path={files}/a/*.gz", f"eval_dataset_path={files}/held",
      f"eval_datasets=[b@grain@{files}/b,again@grain@{files}/held]"))  # fmt: skip
  assert list(opened.evals) == ["", "b", "again"]
  for name, folder in (("", "held"), ("b", "b"), ("again", "held")):
    batch = opened.evals[name].rows(0, opened.evals[name].num_rows)
    counted = int(batch["loss_weights"].sum())
    texts = [json.loads(line)["text"] for path in sorted((files / folder).iterdir())
             for line in gzip.open(path, "rt")]
    assert counted == sum(len(text) + 1 for text in texts)  # the bytes and the EOS, from BOS on


def test_a_number_of_evaluation_batches_needs_no_more_documents(files):
  some = data.open(config(files, f"dataset_path={files}/a/*.gz", f"eval_dataset_path={files}/b", "eval_steps=1"))
  whole = data.open(config(files, f"dataset_path={files}/a/*.gz", f"eval_dataset_path={files}/b", name="other"))
  assert some.eval.num_batches(ROWS) == 1
  assert np.array_equal(some.eval.rows(0, ROWS)["inputs"], whole.eval.rows(0, ROWS)["inputs"])


@pytest.mark.parametrize("arguments, says", [
    (["dataset_mixture=[grain@{0}/a]"], "WEIGHT@TYPE@PATH"),
    (["dataset_mixture=[1@grian@{0}/a]"], "Did you mean grain"),
    (["dataset_mixture=[0@grain@{0}/a]"], "must be a number above 0"),
    (["dataset_mixture=[1@grain@{0}/a]", "num_epoch=2"], "num_epoch=2"),
    (["eval_datasets=[x@grain@{0}/a,x@grain@{0}/b]"], "must be letters, digits, dots, dashes, and not come twice"),
    (["packing=best_fit"], "packing=best_fit is for tfds, grain, hf"),
    (["dataset_type=tfds"], "dataset_type=tfds needs dataset_path"),
    (["eval_rolling=true"], "eval_rolling=true needs eval_steps"),
    (["dataset_type=grain", "dataset_path={0}/nowhere"], "does not exist"),
])  # fmt: skip
def test_a_wrong_key_is_one_line(files, arguments, says):
  with pytest.raises(ConfigError, match=".*") as error:
    config(files, *(argument.format(files) for argument in arguments))
  assert says in str(error.value) and "\n" not in str(error.value)


# --- Whole runs ------------------------------------------------------------------------------------------------------


def run(files, name, *arguments, code=0):
  """(metrics rows, evaluations, output) of train.py; a small model on one device."""
  done = subprocess.run(
      [sys.executable, "MaxText/train.py", "configs/base.yml", f"run_name={name}",
       f"base_output_directory={files}/runs", "tokenizer_type=byte", "vocab_size=384", f"max_target_length={LENGTH}",
       f"per_device_batch_size={ROWS}", "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=2",
       "head_dim=8", "base_mlp_dim=16", "base_num_decoder_layers=1", "enable_tensorboard=false",
       f"data_cache_dir={files}/cache", f"jax_cache_dir={files}/jax", *arguments],
      cwd=REPO, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}, capture_output=True, text=True, check=False)
  assert done.returncode == code, done.stdout[-500:] + done.stderr[-2000:]
  rows, evals = ([json.loads(line) for line in (files / f"runs/{name}/metrics/{file}.jsonl").read_text().splitlines()]
                 if (files / f"runs/{name}/metrics/{file}.jsonl").exists() else [] for file in ("metrics", "eval"))
  return [(row["step"], row["learning/loss"]) for row in rows], evals, done.stdout + done.stderr


def test_a_streamed_run_that_was_cut_goes_on_bit_for_bit_with_other_workers(files):
  keys = [f"dataset_path={files}/a/*.gz", "eval_interval=-1", "learning_rate_schedule_steps=12"]
  whole, _, _ = run(files, "whole", *keys, "steps=12", "data_workers=2")
  run(files, "cut", *keys, "steps=5")
  cut, _, _ = run(files, "cut", *keys, "steps=12", "data_workers=1")
  assert cut == whole and len(whole) == 12


def test_epochs_end_a_run_and_the_last_evaluation_and_checkpoint_are_of_its_end(files):
  steps, evals, said = run(files, "run", f"dataset_path={files}/b/*.gz", f"eval_dataset_path={files}/held",
                             "num_epoch=2", "steps=1000", "eval_interval=1000", "learning_rate_schedule_steps=50")
  last = steps[-1][0]
  assert 10 < last < 100 and f"num_epoch=2 are over: step {last} is the last" in said
  assert [row["step"] for row in evals] == [last]
  assert (files / f"runs/run/checkpoints/{last}").is_dir()


def test_rolling_evaluations_go_on_where_the_last_one_ended(files):
  keys = [f"dataset_path={files}/a/*.gz", f"eval_dataset_path={files}/held", "eval_interval=2", "learning_rate=0.0",
          "steps=8"]  # fmt: skip
  _, rolling, _ = run(files, "rolling", *keys, "eval_steps=2", "eval_rolling=true")
  _, whole, _ = run(files, "whole", *keys)
  losses = [row["eval/loss"] for row in rolling]
  assert len(set(losses)) == 4  # the model stays as it is: other rows
  assert all(row["eval/total_weights"] == 2 * ROWS * LENGTH for row in rolling)  # around the end without padding
  assert len({row["eval/loss"] for row in whole}) == 1


def test_prepared_token_files_train_to_the_losses_of_nothing_else(files):
  prepare = [sys.executable, "MaxText/prepare.py", "configs/base.yml", "tokenizer_type=byte", "vocab_size=384"]
  for folder in ("a", "held"):
    subprocess.run([*prepare, f"dataset_path={files}/{folder}/*.gz", f"prepare_directory={files}/tokens/{folder}"],
                   cwd=REPO, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True, capture_output=True)
  keys = [f"dataset_path={files}/tokens/a", f"eval_dataset_path={files}/tokens/held", "eval_interval=4",
          "learning_rate_schedule_steps=8"]  # fmt: skip
  whole, evals, said = run(files, "whole", *keys, "steps=8")
  run(files, "cut", *keys, "steps=3")
  cut, _, _ = run(files, "cut", *keys, "steps=8")
  assert cut == whole and len(evals) == 2 and "Traceback" not in said
  shutil.rmtree(files / "tokens/a")
  _, _, said = run(files, "cut", *keys, "steps=9", code=2)
  assert "dataset_type=tokens" in said.strip().splitlines()[-1]


# --- Packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_document_in_a_packed_row_has_the_loss_that_it_has_alone(packing, tmp_path):
  lengths = np.random.default_rng(0).integers(3, 30, 24)
  texts = ["".join(chr(97 + (i * 7 + j * j) % 26) for j in range(n)) for i, n in enumerate(lengths)]
  (tmp_path / "texts.jsonl.gz").write_bytes(gzip.compress("".join(
      json.dumps({"text": text}) + "\n" for text in texts).encode()))
  cfg = tiny(max_target_length=64, add_bos=True)
  with sharding.use(sharding.make_mesh(cfg, jax.devices()[:1]), cfg.logical_axis_rules):
    graph, abstract, *_ = model.abstract(cfg)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0.0, 0.2, x.shape).astype(x.dtype), abstract)
    sums = jax.jit(functools.partial(train.eval_step, cfg, graph))
    words = tokenizer.Byte()
    packed = streams.Streams(sources.grain(f"{tmp_path}/*.gz"), words, 64, 8, packing=packing, epochs=1, add_bos=True)
    whole = {}  # text -> its loss in a row with others
    for step in range(100):
      batch = packed.rows(step * 8, step * 8 + 8)
      for row in range(8):
        for segment in range(1, int(batch["segmentations"][row].max()) + 1):
          here = np.zeros_like(batch["loss_weights"])
          here[row] = batch["segmentations"][row] == segment
          ids = [*batch["inputs"][here > 0], batch["targets"][here > 0][-1]]
          if ids[0] == words.bos_id and ids[-1] == words.eos_id:
            whole[words.decode(ids)] = float(sums(params, batch | {"loss_weights": here})["nll"])
      if packed.exhausted:
        break
    assert len(whole) == len(texts) if packing == "best_fit" else len(whole) > len(texts) / 2
    for text, loss in whole.items():
      ids = np.array([words.bos_id, *words.encode(text), words.eos_id])
      alone = {key: np.zeros((8, 64), np.float32 if key == "loss_weights" else np.int32) for key in batch}
      for key, values in (("inputs", ids[:-1]), ("targets", ids[1:]), ("positions", np.arange(len(ids) - 1)),
                          ("segmentations", 1), ("loss_weights", 1.0)):
        alone[key][0, :len(ids) - 1] = values
      assert loss == pytest.approx(float(sums(params, alone)["nll"]), rel=1e-5)


# --- Several processes -----------------------------------------------------------------------------------------------

# Process sys.argv[1] of sys.argv[2]: the rows its devices get of three batches, and the position behind them.
PROCESS = """
import json, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
index, count, port, *argv = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
from jax.sharding import NamedSharding, PartitionSpec
from MaxText import data, pyconfig, sharding
cfg = pyconfig.resolve(pyconfig.load(argv), jax.devices())
mesh = sharding.make_mesh(cfg, jax.devices())
with sharding.use(mesh, cfg.logical_axis_rules):
  opened = data.open(cfg, process_index=jax.process_index(), process_count=jax.process_count())
  where = NamedSharding(mesh, sharding.spec("batch", "length"))
  rows, steps = {}, 0
  with data.batches(opened.train, 0, cfg.global_batch_size, where) as batches:
    for batch in batches:
      for shard in batch["inputs"].addressable_shards:
        for row, ids in zip(range(cfg.global_batch_size)[shard.index[0]], shard.data.tolist()):
          rows[f"{steps}.{row}"] = ids
      steps += 1
      if steps == int(sys.argv[-1].partition("=")[2]):
        break
  print(json.dumps([rows, steps, opened.position(steps)]))
"""


def processes(files, count, name, *arguments):
  """What PROCESS prints in each of `count` processes of 4 / count fake devices."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  command = [sys.executable, "-c", PROCESS]
  keys = ["configs/base.yml", f"run_name={name}", f"base_output_directory={files}/runs", "tokenizer_type=byte",
          "vocab_size=384", f"max_target_length={LENGTH}", "per_device_batch_size=2", "data_cache_dir=",
          "eval_interval=-1", f"dataset_path={files}/a/*.gz", *arguments]  # fmt: skip
  environment = os.environ | {
      "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
      "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
  started = [subprocess.Popen([*command, str(i), str(count), str(port), *keys], cwd=REPO, env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(count)]
  found = []
  for process in started:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-2000:]
    found.append(json.loads(out.splitlines()[-1]))
  return found


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["steps=3"], ["num_epoch=1", "steps=1000"]], ids=" ".join)
def test_processes_make_the_batches_of_one_and_agree_on_the_position_and_the_end(files, keys):
  (whole,) = processes(files, 1, "one", *keys)
  for count in (2, 4):
    parts = processes(files, count, f"of{count}", *keys)
    assert {row: ids for part in parts for row, ids in part[0].items()} == whole[0]
    assert sum(len(part[0]) for part in parts) == len(whole[0])
    assert all(part[1:] == whole[1:] for part in parts)
