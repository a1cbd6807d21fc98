# SPDX-License-Identifier: Apache-2.0
"""The trainer as its users run it: the maths, resuming, signals, skipped steps, evaluation, refusals."""

import contextlib
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny import TINY

from MaxText import checkpoint, data, errors, pyconfig, sharding, train

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = jax.devices()
# Warm-up of 5 steps, then constant: the course of a run does not depend on how long it is to be.
KEYS = TINY | {
    "vocab_size": 64, "logits_via_embedding": True, "embedding_init_std": 0.02, "per_device_batch_size": 1.0,
    "dropout_rate": 0.1, "input_dropout_rate": 0.1,
    "lr_schedule_type": "constant", "warmup_steps": 5, "learning_rate_schedule_steps": 10_000,
    "log_period": 1000, "checkpoint_period": 1000,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory):
  """Runs of one model and mesh compile once: the keys that differ between them are no part of the program."""
  KEYS["jax_cache_dir"] = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))
  before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_compilation_cache_dir", before[0])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
  compilation_cache.reset_cache()
  for number, handler in handlers.items():
    signal.signal(number, handler)


def arguments(directory, **keys):
  """The command line of the tiny run in `directory`."""
  keys = KEYS | {"base_output_directory": directory.parent, "run_name": directory.name} | keys
  return ["configs/base.yml"] + [f"{key}={pyconfig.text(value) if not isinstance(value, pathlib.Path) else value}"
                                 for key, value in keys.items()]


def run(directory, devices=8, **keys):
  """Trains in this process by main(), on the first `devices` devices; returns the metrics by step."""
  if devices == 1:
    keys = {"per_device_batch_size": 8.0} | keys
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: DEVICES[:devices])
    train.main(pyconfig.load(arguments(directory, **keys)))
  return metrics(directory)


def lines(file):
  return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(directory):
  found = lines(directory / "metrics" / "metrics.jsonl")
  assert [line["step"] for line in found] == list(range(found[0]["step"], found[-1]["step"] + 1))  # each once, in order
  return {line["step"]: line for line in found}


def losses(found, steps=None):
  return [found[step]["learning/loss"] for step in steps or sorted(found)]


def state(directory, step, devices=8, **keys):
  """The state in a run's checkpoint, on the host."""
  cfg = pyconfig.load(arguments(directory, **keys))
  if devices == 1:
    cfg = cfg.replace(per_device_batch_size=8.0)
  cfg = pyconfig.resolve(cfg, DEVICES[:devices])
  mesh = sharding.make_mesh(cfg, DEVICES[:devices])
  with sharding.use(mesh, cfg.logical_axis_rules):
    _, abstract = train.abstract_state(cfg, mesh)
    return jax.device_get(checkpoint.load_full_state(str(directory / "checkpoints" / str(step)), abstract)[0])


def assert_same_bits(first, second):
  assert jax.tree.structure(first) == jax.tree.structure(second)
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def refused(directory, kind, **keys):
  """The one line with which the run does not start."""
  with pytest.raises(kind) as error:
    run(directory, **keys)
  assert "\n" not in str(error.value)
  return str(error.value)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  """(directory, metrics) of 40 steps at one go on eight devices, with a checkpoint every 5."""
  directory = tmp_path_factory.mktemp("runs") / "uninterrupted"
  return directory, run(directory, steps=40, checkpoint_period=5, max_num_checkpoints_to_keep=100)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """(directory, metrics) of 10 steps at one go on one device."""
  directory = tmp_path_factory.mktemp("runs") / "one"
  return directory, run(directory, devices=1, steps=10)


@pytest.fixture
def resumable(uninterrupted, tmp_path):
  """A run that ended after 5 steps: a copy."""
  directory = tmp_path / "resumable"
  shutil.copytree(uninterrupted[0], directory, ignore=lambda folder, names: [
      name for name in names if folder.endswith("checkpoints") and name != "5"])
  return directory


# --- Mathematics -----------------------------------------------------------------------------------------------------

GOLDEN = {  # of the first and the tenth step
    "learning/loss": [4.1623688, 3.9486783],
    "learning/raw_grad_norm": [0.92702734, 0.82750899],
    "learning/param_norm": [26.067978, 26.140085],
}


def test_the_first_and_the_tenth_step_are_golden(one_device):
  for name, golden in GOLDEN.items():
    found = [one_device[1][step][name] for step in (1, 10)]
    np.testing.assert_allclose(found, golden, rtol=2e-5, err_msg=(
        f"the maths changed: {name} is {found}. Intended? Then update GOLDEN and say why in CHANGELOG.md."))


def test_eight_devices_train_as_one_dropout_included(one_device, uninterrupted):
  np.testing.assert_allclose(losses(uninterrupted[1], range(1, 11)), losses(one_device[1]), rtol=1e-5)


def test_the_model_learns(tmp_path):
  found = losses(run(tmp_path / "learns", devices=1, steps=150, enable_checkpointing=False))
  assert found[0] == pytest.approx(math.log(64), abs=0.1)
  assert np.mean(found[-10:]) < 1.5  # a perfect model reaches 1.06
  assert not (tmp_path / "learns" / "checkpoints").exists()


# --- Resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 8])
def test_ten_steps_are_five_and_resumed_five_to_the_bit(devices, tmp_path, request, capfd):
  directory, expected = request.getfixturevalue("one_device" if devices == 1 else "uninterrupted")
  run(tmp_path / "halves", devices=devices, steps=5)
  found = run(tmp_path / "halves", devices=devices, steps=10)
  assert "restored step 5" in capfd.readouterr().out
  assert losses(found) == losses(expected, range(1, 11))
  assert_same_bits(state(tmp_path / "halves", 10, devices), state(directory, 10, devices))


def test_a_run_goes_on_with_the_same_losses_on_other_meshes(resumable, uninterrupted):
  run(resumable, steps=8, ici_fsdp_parallelism=2, ici_tensor_parallelism=2, ici_data_parallelism=2)
  found = run(resumable, devices=1, steps=11)
  np.testing.assert_allclose(losses(found, range(6, 12)), losses(uninterrupted[1], range(6, 12)), rtol=1e-5)


def test_a_finished_run_says_so_and_changes_nothing(resumable, capfd):
  before = state(resumable, 5)
  run(resumable, steps=5)
  assert "has done its steps=5" in capfd.readouterr().out
  assert_same_bits(state(resumable, 5), before)


def test_other_data_are_refused_on_resume_unless_forced(resumable):
  config = (resumable / "config.yml").read_text()
  for keys in ({"data_shuffle_seed": 7}, {"per_device_batch_size": 2.0}):
    (key, value), = keys.items()
    line = refused(resumable, errors.ConfigError, steps=6, **keys)
    assert "force_data_resume=true" in line and ("global_batch_size=16" if value == 2.0 else f"{key}=7") in line
  assert (resumable / "config.yml").read_text() == config
  found = run(resumable, steps=6, data_shuffle_seed=7, force_data_resume=True)
  assert sorted(found)[-1] == 6


def test_another_model_is_refused_on_resume(resumable):
  line = refused(resumable, errors.ConfigError, steps=6, base_mlp_dim=128)
  assert "layers/mlp" in line and "64" in line and "128" in line and "run_name" in line


def test_parameters_alone_or_the_whole_state_can_come_from_another_run(uninterrupted, tmp_path):
  source, expected = uninterrupted
  run(tmp_path / "parameters", steps=1, learning_rate=0.0, load_parameters_path=source / "checkpoints" / "10")
  loaded, saved = state(tmp_path / "parameters", 1), state(source, 10)
  assert_same_bits(loaded["params"], saved["params"])
  assert loaded["step"] == loaded["opt_state"].count == 1 and saved["opt_state"].count == 10

  shutil.copytree(source / "checkpoints" / "10", tmp_path / "elsewhere" / "checkpoints" / "10")
  found = run(tmp_path / "whole", steps=12, load_full_state_path=tmp_path / "elsewhere")
  assert sorted(found) == [11, 12] and losses(found) == losses(expected, [11, 12])


# --- Steps that are skipped ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def infinite_weights(steps):
  """One loss weight of each of these steps (from 1) is infinite, which makes every gradient NaN."""
  rows = data.Whole.rows

  def bad_rows(self, start, stop):
    batch = rows(self, start, stop)
    if start % 8 == 0 and start // 8 + 1 in steps:
      batch["loss_weights"][0, 0] = math.inf
    return batch

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data.Whole, "rows", bad_rows)
    yield


def test_a_nan_step_changes_nothing_is_counted_and_too_many_end_the_run_also_across_a_resume(tmp_path):
  directory = tmp_path / "nan"
  with infinite_weights({3, 5, 6, 7}):
    found = run(directory, steps=6, checkpoint_period=1, max_num_checkpoints_to_keep=100, max_skipped_steps=3)
    assert [found[step]["learning/skipped"] for step in range(1, 7)] == [0, 0, 1, 0, 1, 1]
    for skipped in (3, 5, 6):
      before, after = state(directory, skipped - 1), state(directory, skipped)
      assert_same_bits((after["params"], after["opt_state"]), (before["params"], before["opt_state"]))
      assert after["step"] == before["step"] + 1 == skipped
    assert any((a != b).any() for a, b in zip(*(jax.tree.leaves(state(directory, step)["params"]) for step in (3, 4)),
                                              strict=True))
    line = refused(directory, errors.NumericsError, steps=20, max_skipped_steps=3)  # 5 and 6, and with them 7
  assert errors.NumericsError.exit_code == 5
  assert "max_skipped_steps=3" in line and "step 7" in line and "learning_rate=0.01" in line
  assert json.loads((directory / "summary.json").read_text())["status"] == "NumericsError"


# --- Evaluation ------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_one_epoch_whatever_the_batch_and_the_mesh(tmp_path):
  """Of the 64 held-out rows: 8 batches of 8, 3 of 24 (the last with padding), and 8 of 8 on one device."""
  found = []
  for name, devices, keys in (("by_8", 8, {}), ("by_24", 8, {"eval_per_device_batch_size": 3.0}),
                              ("on_one", 1, {"eval_per_device_batch_size": 8.0})):  # fmt: skip
    run(tmp_path / name, devices=devices, steps=3, eval_interval=2, enable_checkpointing=False, **keys)
    evals = lines(tmp_path / name / "metrics" / "eval.jsonl")
    assert [line["step"] for line in evals] == [2, 3]  # every eval_interval and at the end
    assert {line["eval/total_weights"] for line in evals} == {64 * 32}
    found.append([line["eval/loss"] for line in evals])
  np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
  np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


def test_a_run_stops_at_its_target_eval_loss_with_a_checkpoint(tmp_path, capfd):
  directory = tmp_path / "target"
  assert sorted(run(directory, steps=30, eval_interval=2, target_eval_loss=100.0)) == [1, 2]
  assert "has reached target_eval_loss=100.0" in capfd.readouterr().out
  assert state(directory, 2)["step"] == 2


# --- Real processes --------------------------------------------------------------------------------------------------


class Process:
  """`python train.py argv` in `cwd`, its output read line by line."""

  def __init__(self, argv, cwd=ROOT):
    self.process = subprocess.Popen(
        [sys.executable, ROOT / "MaxText" / "train.py", *argv], cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.process.kill()
    self.process.communicate()

  def wait_for(self, text):
    """Reads up to the first line of stdout with `text`."""
    for line in self.process.stdout:
      if text in line:
        return line
    raise AssertionError(f"no {text!r} before the end: {self.process.stderr.read()}")

  def send(self, *numbers):
    for number in numbers:
      self.process.send_signal(number)

  def end(self):
    """(exit code, stdout, lines of stderr, seconds until the end)."""
    begin = time.monotonic()
    out, err = self.process.communicate(timeout=120)
    return self.process.returncode, out, err.splitlines(), time.monotonic() - begin


def losses_at_one_go(step, uninterrupted, tmp_path):
  """Losses of an uninterrupted run of at least `step` steps."""
  found = uninterrupted[1]
  return losses(found if step in found else run(tmp_path / "long", steps=step), range(1, step + 1))


def test_sigterm_saves_the_current_step_and_the_run_goes_on_as_if_nothing_had_been(uninterrupted, tmp_path):
  """From another directory, by the path MaxText/configs/base.yml, while a second process is refused."""
  directory = tmp_path / "runs" / "stopped"
  argv = arguments(directory, steps=100_000, base_output_directory="runs")
  argv[0] = "MaxText/configs/base.yml"
  with Process(argv, cwd=tmp_path) as first:
    first.wait_for("completed step: 2/")
    first.send(signal.SIGSTOP)
    with Process(argv, cwd=tmp_path) as second:
      code, _, err, _ = second.end()
      assert code == 2 and len(err) == 1
      assert "in use by process" in err[0] and str(first.process.pid) in err[0] and "run_name" in err[0]
    first.send(signal.SIGTERM, signal.SIGCONT)
    code, out, err, _ = first.end()
  assert code == 75
  assert [line for line in err if "SIGTERM" in line] == err[-1:]
  done = int(err[-1].split("saved step ")[1].split()[0])
  assert f"saved step {done} " in out and out.count("saved step") == 1 and sorted(metrics(directory))[-1] == done
  found = run(directory, steps=done + 3)
  assert losses(found) == losses_at_one_go(done + 3, uninterrupted, tmp_path)


def test_sigint_saves_too_and_the_runs_own_config_resumes_it_until_two_signals_stop_it_at_once(uninterrupted, tmp_path):
  directory = tmp_path / "interrupted"
  with Process(arguments(directory, steps=100_000)) as process:
    process.wait_for("completed step: 2/")
    process.send(signal.SIGINT)
    code, _, err, _ = process.end()
  assert code == 75 and "Stopped: SIGINT: saved step" in err[-1]
  done = int(err[-1].split("saved step ")[1].split()[0])

  assert pyconfig.load([str(directory / "config.yml")]) == pyconfig.load(arguments(directory, steps=100_000))
  with Process([directory / "config.yml"]) as process:
    process.wait_for(f"completed step: {done + 3}/")
    process.send(signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT)
    code, out, _, seconds = process.end()
  assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT) and seconds < 2
  assert "saved step" not in out
  assert losses(metrics(directory))[:done + 3] == losses_at_one_go(done + 3, uninterrupted, tmp_path)


def test_a_signal_while_compiling_ends_the_process_at_once(tmp_path):
  argv = arguments(tmp_path / "early", jax_cache_dir="", base_num_decoder_layers=30, scan_layers=False)
  with Process(argv) as process:
    process.wait_for("devices: 8 x cpu")
    process.send(signal.SIGTERM)
    code, out, err, seconds = process.end()
  assert code == 75 and seconds < 2 and "completed step" not in out
  assert err[-1] == "Stopped: SIGTERM before the first step: nothing to save. Run the same command again."


def test_what_a_user_gets_wrong_is_one_line_and_exit_code_2(tmp_path):
  for keys, seconds, expected in (
      ({"learning_rat": 1}, 0.5, "learning_rat"),
      ({"ici_tensor_parallelism": 3}, 3.0, "ici_tensor_parallelism=3 must divide the 8 devices per slice found"),
      ({"compile_topology": "v5e-256"}, 3.0, "compile_topology=v5e-256 is for compiling ahead of time"),
  ):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Process(arguments(tmp_path / "wrong", **keys)) as process:
      code, out, err, _ = process.end()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (code, len(err), out) == (2, 1, "") and expected in err[0]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * seconds  # on a busy machine
  assert not (tmp_path / "wrong").exists()
