# SPDX-License-Identifier: Apache-2.0
"""What checkpoint.py promises: exact, resumable after any kill, never silently wrong, patient with bad storage."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText import checkpoint, errors

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
PROCESSES = multiprocessing.get_context("forkserver")  # one import of jax for all child processes
PROCESSES.set_forkserver_preload(["jax", "optax", "orbax.checkpoint", "MaxText.checkpoint"])


@dataclasses.dataclass(frozen=True)
class Settings:
  """The keys of the config that checkpoint.py reads."""

  run_directory: str
  async_checkpointing: bool = True
  max_num_checkpoints_to_keep: int = 3
  checkpoint_keep_period: int = 0
  load_parameters_path: str = ""
  load_full_state_path: str = ""

  @property
  def checkpoint_directory(self):
    return os.path.join(self.run_directory, "checkpoints")


@pytest.fixture
def cfg(tmp_path):
  return Settings(str(tmp_path / "ein Lauf ü%20#?"))  # such characters are fine in a path


def place(tree, shape=(8,), axes=("fsdp",)):
  """The tree on a mesh of this shape: matrices sharded over the mesh axes, one per dimension, all else replicated."""
  mesh = Mesh(np.array(jax.devices()[:np.prod(shape)]).reshape(shape), axes)
  spread, whole = NamedSharding(mesh, PartitionSpec(*axes)), NamedSharding(mesh, PartitionSpec())
  return jax.tree.map(lambda x: jax.device_put(x, spread if x.ndim == 2 else whole), tree)


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def make_state(step=0, rows=256, **extra):
  """A train state of about 1 MB whose every value depends on the step."""
  noise = np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)
  params = {"mlp": {"w_em": noise + step}, "norm": {"scale": jnp.full((256,), step, jnp.bfloat16)}, **extra}
  params = jax.tree.map(jnp.asarray, params)
  opt_state = jax.tree.map(lambda x: x + jnp.asarray(step, x.dtype), OPTIMIZER.init(params))
  return place({"params": params, "opt_state": opt_state, "step": jnp.int32(step)})


def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def write(cfg, *steps):
  """Checkpoints of these steps; returns the state of the last."""
  saver = checkpoint.Checkpointer(cfg)
  for step in steps:
    state = make_state(step)
    saver.save(step, state, {"batch": step})
  saver.close()
  return state


def restore(cfg, like=None):
  reader = checkpoint.Checkpointer(cfg)
  try:
    return reader.restore(abstract(like or make_state()))
  finally:
    reader.close()


def names(cfg):
  return sorted(os.listdir(cfg.checkpoint_directory))


def test_a_round_trip_is_bitwise_and_keeps_the_optimizers_structure(cfg):
  odd = np.array([0.0, -0.0, np.nan, np.inf, 1e-45, -1e38], np.float32)
  state = make_state(7, odd=odd, odd_half=jnp.asarray(odd, jnp.bfloat16))
  saver = checkpoint.Checkpointer(cfg)
  assert saver.restore(abstract(state)) is None
  saver.save(7, state, {"batch": 7, "fingerprint": "ab"}, wait=True)
  saver.close()
  restored, position = restore(cfg, state)
  assert position == {"batch": 7, "fingerprint": "ab"}
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert bits(restored) == bits(state)
  assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(state)]


@pytest.mark.parametrize(("shape", "axes"), [((4, 2), ("fsdp", "tensor")), ((2,), ("data",)), ((1,), ("data",))])
def test_a_checkpoint_of_eight_devices_restores_on_another_mesh(cfg, shape, axes):
  state = write(cfg, 3)
  restored, _ = restore(cfg, place(state, shape, axes))
  assert bits(restored) == bits(state)
  assert restored["params"]["mlp"]["w_em"].sharding.mesh.devices.shape == shape


def test_a_donated_state_is_saved_as_it_was_and_save_returns_before_the_write_ends(cfg, monkeypatch):
  step = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 + jnp.asarray(77, x.dtype), state), donate_argnums=0)
  state, other = make_state(1, rows=4096), make_state(2, rows=4096)
  expected, like = bits(state), abstract(state)
  step(other)
  may_end, write_manifest = threading.Event(), checkpoint._write_manifest
  monkeypatch.setattr(checkpoint, "_write_manifest", lambda *a, **k: (may_end.wait(), write_manifest(*a, **k)))
  saver = checkpoint.Checkpointer(cfg)
  saver.save(1, state, {})
  for _ in range(5):
    state = step(state)
  jax.block_until_ready(state)
  assert saver.latest_step() is None
  may_end.set()
  saver.close()
  assert saver.latest_step() == 1
  assert bits(restore(cfg, like)[0]) == expected


def test_the_newest_are_kept_and_multiples_of_the_keep_period(cfg):
  cfg = dataclasses.replace(cfg, max_num_checkpoints_to_keep=2, checkpoint_keep_period=4)
  write(cfg, 2, 4, 6, 8, 10, 12, 14)
  assert names(cfg) == ["12", "14", "4", "8"]


def test_saving_the_step_just_saved_or_restored_does_nothing(cfg, capfd):
  write(cfg, 5)
  saver = checkpoint.Checkpointer(cfg)
  state, position = saver.restore(abstract(make_state()))
  saver.save(5, state, position, wait=True)
  saver.save(6, state, position)
  saver.save(6, state, position, wait=True)
  saver.close()
  assert re.findall(r"saved step (\d)", capfd.readouterr().out) == ["5", "6"]


def test_leftovers_of_killed_runs_are_removed_and_other_files_are_not(cfg):
  write(cfg, 5)
  for name in ("10.saving", "3.deleting"):
    shutil.copytree(os.path.join(cfg.checkpoint_directory, "5"), os.path.join(cfg.checkpoint_directory, name))
  os.mkdir(os.path.join(cfg.checkpoint_directory, "notes.saving"))
  assert restore(cfg)[1] == {"batch": 5}
  assert names(cfg) == ["5", "notes.saving"]


def largest_file(step):
  return max(checkpoint._files(step), key=lambda file: file.stat().length)


def flip(file, at=None, bit=4):
  content = bytearray(file.read_bytes())
  content[len(content) // 2 if at is None else at] ^= 1 << bit
  file.write_bytes(content)


def claim_newer_format(step):
  manifest = json.loads((step / "manifest.json").read_text())["manifest"] | {"format": 2}
  (step / "manifest.json").write_text(json.dumps({"sha256": checkpoint._digest(manifest), "manifest": manifest}))


DAMAGES = {  # what is done to step 20: what the warning says
    "bit flipped in the data": (lambda step: flip(largest_file(step)), "differs from its checksum"),
    "bit flipped in the manifest": (lambda step: flip(step / "manifest.json"), "manifest.json"),
    "bit flipped in Orbax's metadata": (lambda step: flip(step / "state/_METADATA"), "_METADATA differs"),
    "bit flipped in the position": (lambda step: flip(step / "position.json"), "position.json differs"),
    "data truncated": (lambda step: os.truncate(largest_file(step), 1000), "has 1000 of"),
    "data emptied": (lambda step: os.truncate(largest_file(step), 0), "has 0 of"),
    "data deleted": (lambda step: largest_file(step).unlink(), "is missing"),
    "state deleted": (lambda step: (step / "state").rmtree(), "is missing"),
    "manifest deleted": (lambda step: (step / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest truncated": (lambda step: os.truncate(step / "manifest.json", 100), "manifest.json is not readable"),
    "position deleted": (lambda step: (step / "position.json").unlink(), "position.json is missing"),
    "empty directory named by a number": (lambda step: (step.parent / "30").mkdir(), "the directory is empty"),
    "file named by a number": (lambda step: (step.parent / "30").write_text("hello"), "not a directory"),
    "newer format": (claim_newer_format, "format 2 is not known"),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
  cfg = Settings(str(tmp_path_factory.mktemp("two") / "run"))
  write(cfg, 10, 20)
  return cfg.run_directory


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_set_aside_with_one_warning(cfg, two_steps, damage, capfd):
  shutil.copytree(two_steps, cfg.run_directory)
  damage_step, reason = DAMAGES[damage]
  damage_step(checkpoint._path(cfg.checkpoint_directory) / "20")
  newest = max(int(name) for name in names(cfg))
  good = 10 if newest == 20 else 20
  state, position = restore(cfg)
  assert position == {"batch": good}
  assert bits(state) == bits(make_state(good))
  warning, = capfd.readouterr().err.splitlines()
  assert warning.startswith(f"checkpoint: warning: step {newest} is damaged (")
  assert reason in warning
  assert f"kept as {newest}.corrupt, trying step {good}" in warning
  assert f"{newest}.corrupt" in names(cfg)
  assert restore(cfg)[1] == {"batch": good}
  assert capfd.readouterr().err == ""


def test_each_of_100_random_bit_flips_is_found(cfg, two_steps):
  shutil.copytree(two_steps, cfg.run_directory)
  step = checkpoint._path(cfg.checkpoint_directory) / "20"
  files, chance = [file for file in checkpoint._files(step) if file.stat().length], random.Random(0)
  checkpoint._verify(step)
  for _ in range(100):
    file = chance.choice(files)
    at, bit = chance.randrange(file.stat().length), chance.randrange(8)
    flip(file, at, bit)
    with pytest.raises(checkpoint.Damaged):
      checkpoint._verify(step)
    flip(file, at, bit)
  checkpoint._verify(step)


def test_a_file_added_to_a_checkpoint_does_no_harm(cfg, two_steps, capfd):
  shutil.copytree(two_steps, cfg.run_directory)
  for place_it in ("20/.nfs0001", "20/state/notes.txt", "readme"):
    with open(os.path.join(cfg.checkpoint_directory, place_it), "w") as file:
      file.write("hello")
  assert restore(cfg)[1] == {"batch": 20}
  assert capfd.readouterr().err == ""


def test_when_all_are_damaged_the_run_refuses_and_never_starts_from_zero(cfg, two_steps):
  shutil.copytree(two_steps, cfg.run_directory)
  for step in ("10", "20"):
    flip(largest_file(checkpoint._path(cfg.checkpoint_directory) / step))
  for _ in range(2):  # a launcher that tries again meets the same refusal
    with pytest.raises(errors.CheckpointError, match=r"damaged checkpoints only \(10.corrupt, 20.corrupt") as refusal:
      restore(cfg)
    assert refusal.value.exit_code == 3
    assert "\n" not in str(refusal.value)
    assert names(cfg) == ["10.corrupt", "20.corrupt"]


def test_a_changed_config_is_refused_by_tensor_and_nothing_is_set_aside(cfg, two_steps):
  shutil.copytree(two_steps, cfg.run_directory)
  with pytest.raises(errors.ConfigError, match=r"has opt_state/1/0/mu/mlp/w_em as float32\(256, 256\), this config as "
                                               r"float32\(512, 256\).*another run_name"):
    restore(cfg, make_state(rows=512))
  with pytest.raises(errors.ConfigError, match=r"has no tensor opt_state/1/0/mu/extra"):
    restore(cfg, make_state(extra=np.zeros(3)))
  like = make_state()
  del like["params"]["norm"]
  with pytest.raises(errors.ConfigError, match=r"has params/norm/scale as bfloat16\(256,\), this config has no such"):
    restore(cfg, like)
  assert names(cfg) == ["10", "20"]


@pytest.mark.parametrize("suffix", ["", "checkpoints", "checkpoints/20"])
def test_parameters_load_from_a_run_its_checkpoints_or_one_step(two_steps, suffix):
  state = make_state(20)
  params = checkpoint.load_parameters(os.path.join(two_steps, suffix), abstract(place(state["params"], (1,), ("x",))))
  assert bits(params) == bits(state["params"])
  loaded, position = checkpoint.load_full_state(os.path.join(two_steps, suffix), abstract(state))
  assert bits(loaded) == bits(state)
  assert position == {"batch": 20}


def test_loading_other_parameters_names_the_first_tensor_and_casts_types(two_steps, tmp_path):
  wider = {"params": abstract(make_state(rows=512)["params"])}["params"]
  with pytest.raises(errors.ConfigError, match=r"20 has params/mlp/w_em as float32\(256, 256\), this config as float32"
                                               r"\(512, 256\). Give the config of that checkpoint's model") as refusal:
    checkpoint.load_parameters(two_steps, wider)
  assert "\n" not in str(refusal.value)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_state(20)["params"])
  assert bits(checkpoint.load_parameters(two_steps, abstract(half))) == bits(half)
  for nothing in (tmp_path, tmp_path / "missing", tmp_path / "missing/20"):
    with pytest.raises(errors.CheckpointError, match=r"load_parameters_path=.* holds no checkpoint. Give a run"):
      checkpoint.load_parameters(str(nothing), abstract(half))


def test_loading_passes_over_a_damaged_checkpoint_and_leaves_it(cfg, two_steps, capfd):
  shutil.copytree(two_steps, cfg.run_directory)
  os.truncate(os.path.join(cfg.checkpoint_directory, "20/position.json"), 3)
  params = checkpoint.load_parameters(cfg.run_directory, abstract(make_state()["params"]))
  assert bits(params) == bits(make_state(10)["params"])
  assert "position.json has 3 of 13 bytes" in capfd.readouterr().err
  assert names(cfg) == ["10", "20"]
  with pytest.raises(errors.CheckpointError, match="holds no sound checkpoint"):
    checkpoint.load_parameters(os.path.join(cfg.checkpoint_directory, "20"), abstract(make_state()["params"]))


def test_a_run_starts_from_its_own_checkpoint_then_parameters_then_full_state_then_init(cfg, two_steps):
  def start(cfg):
    checkpointer = checkpoint.Checkpointer(cfg)
    state, position = checkpoint.start_state(cfg, checkpointer, abstract(make_state()), lambda: make_state(99))
    checkpointer.close()
    return int(state["params"]["norm"]["scale"][0]), int(state["step"]), position

  assert start(cfg) == (99, 99, None)
  full = dataclasses.replace(cfg, load_full_state_path=two_steps)
  assert start(full) == (20, 20, {"batch": 20})
  both = dataclasses.replace(full, load_parameters_path=two_steps)
  assert start(both) == (20, 99, None)
  write(cfg, 5)
  assert start(both) == (5, 5, {"batch": 5})


def hold_lock(run_directory, connection):
  try:
    checkpoint.Lock(run_directory)
    connection.send("held")
  except errors.ConfigError as error:
    connection.send(str(error))
  time.sleep(60)


def lock_elsewhere(cfg):
  ours, theirs = PROCESSES.Pipe()
  process = PROCESSES.Process(target=hold_lock, args=(cfg.run_directory, theirs), daemon=True)
  process.start()
  return process, ours.recv()


def test_a_second_process_on_a_run_is_refused_until_the_first_is_dead(cfg):
  first, answer = lock_elsewhere(cfg)
  assert answer == "held"
  with pytest.raises(errors.ConfigError, match=rf"is in use by process {first.pid} on .* since .* another run_name"):
    checkpoint.Checkpointer(cfg)
  first.kill()
  first.join()
  mine = checkpoint.Checkpointer(cfg)
  second, answer = lock_elsewhere(cfg)
  assert f"is in use by process {os.getpid()} on" in answer
  second.kill()
  mine.close()
  third, answer = lock_elsewhere(cfg)
  assert answer == "held"
  third.kill()


@pytest.fixture
def object_store(tmp_path, monkeypatch):
  """Takes a local directory for an object store: objects change whole, no renames, no hashes, a lock that beats."""

  def replace(path, text):
    upload = tmp_path / f"upload-{threading.get_ident()}"
    with open(upload, "w") as file:
      file.write(text)
    os.replace(upload, path)

  monkeypatch.setattr(type(checkpoint._path("/")), "write_text", replace)
  monkeypatch.setattr(checkpoint, "_is_remote", lambda path: True)
  monkeypatch.setattr(checkpoint, "BEAT_SECONDS", 0.05)


def test_on_an_object_store_a_beating_lock_refuses_and_a_silent_one_is_taken_over(cfg, object_store, monkeypatch):
  with monkeypatch.context() as elsewhere:
    elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
    first = checkpoint.Lock(cfg.run_directory)
  with monkeypatch.context() as patient:  # a busy machine lets a thread beat late
    patient.setattr(checkpoint, "BEATS_TO_WATCH", 1200)
    with pytest.raises(errors.ConfigError, match=rf"is in use by process {os.getpid()} on elsewhere since"):
      checkpoint.Lock(cfg.run_directory)
  left_behind = first._path.read_text()
  first.release()
  assert not first._path.exists()
  first._path.write_text(left_behind)
  checkpoint.Lock(cfg.run_directory).release()


def test_on_an_object_store_the_manifest_is_the_commit(cfg, object_store):
  cfg = dataclasses.replace(cfg, max_num_checkpoints_to_keep=2)
  state = write(cfg, 1, 2, 3)
  os.makedirs(os.path.join(cfg.checkpoint_directory, "4/state"))  # what a kill leaves there
  restored, _ = restore(cfg)
  assert bits(restored) == bits(state)
  assert names(cfg) == ["2", "3"]


@contextlib.contextmanager
def no_space(kind, directory):
  """Makes writing more than 2 MB in `directory` fail: a small file system, or a limit on the size of files."""
  if kind == "disk":
    os.makedirs(directory)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", directory]
    if not shutil.which("mount") or subprocess.run(mount, check=False, capture_output=True).returncode:
      pytest.skip("mounting a file system needs privileges")

    def make_room():
      subprocess.run(["mount", "-o", "remount,size=64m", directory], check=True)

    try:
      yield make_room
    finally:
      subprocess.run(["umount", "-l", directory], check=True)
  else:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
      yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["disk", "file size"])
def test_without_space_the_run_goes_on_and_the_next_period_tries_again(cfg, kind, capfd):
  small, large = make_state(1, rows=8), make_state(2, rows=4096)
  with no_space(kind, cfg.run_directory) as make_room:
    saver = checkpoint.Checkpointer(cfg)
    saver.save(1, small, {}, wait=True)
    capfd.readouterr()
    for step in (2, 3):
      saver.save(step, large, {})
    saver._finish_pending()
    lines = capfd.readouterr().err.splitlines()
    assert [re.sub(r"\(.*?\)", "()", line) for line in lines] == [
        f"checkpoint: warning: saving step {step} failed (): step 1 stays the newest. "
        f"Failure {step - 1} of 3 in a row before the run ends." for step in (2, 3)]
    assert ("(No space left on device)" if kind == "disk" else "(File too large)") in lines[0]
    assert saver.steps() == [1]
    make_room()
    saver.save(4, large, {"batch": 4})
    saver.close()
    assert names(cfg) == ["1", "4"]
    assert bits(restore(cfg, large)[0]) == bits(large)


def test_three_failures_in_a_row_end_the_run_and_so_does_one_that_was_waited_for(cfg, capfd):
  state = make_state(2, rows=4096)
  with no_space("file size", cfg.run_directory):
    saver = checkpoint.Checkpointer(cfg)
    with pytest.raises(errors.StorageError, match="step 1 could not be saved .*File too large") as refusal:
      saver.save(1, state, {}, wait=True)
    assert refusal.value.exit_code == 4
    for step in (2, 3):
      saver.save(step, state, {})
    with pytest.raises(errors.StorageError, match="3 checkpoints in a row could not be saved"):
      saver.save(4, state, {})
    with pytest.raises(errors.StorageError, match="3 checkpoints in a row"):
      saver.close()
  assert len(capfd.readouterr().err.splitlines()) == 3


def test_too_little_free_space_is_said_at_the_start(cfg, monkeypatch, capfd):
  monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
  restore(cfg)
  assert "0.00 GB are free" in capfd.readouterr().err


def test_a_bucket_without_the_library_for_it_is_one_line_and_tensorflow_is_not_asked(monkeypatch):
  monkeypatch.setitem(sys.modules, "gcsfs", None)
  monkeypatch.setitem(sys.modules, "tensorflow", None)
  with pytest.raises(errors.StorageError, match="gs://bucket/run/lock cannot be written: Please install gcsfs"):
    checkpoint.Checkpointer(Settings("gs://bucket/run"))
  with pytest.raises(errors.CheckpointError, match="load_full_state_path=gs://bucket cannot be read: Please install"):
    checkpoint.load_full_state("gs://bucket", {})


def test_a_directory_that_cannot_be_written_is_one_line(cfg):
  with open(cfg.run_directory, "w") as file:
    file.write("a file where the run directory should be")
  with pytest.raises(errors.StorageError, match="or choose another base_output_directory"):
    checkpoint.Checkpointer(cfg)


def test_a_bracket_in_the_path_is_refused_and_tensors_orbax_lost_are_noticed(cfg, monkeypatch, capfd):
  bracket = dataclasses.replace(cfg, run_directory=cfg.run_directory + "[1]")
  with pytest.raises(errors.ConfigError, match="has a '\\[' in it"):
    checkpoint.Checkpointer(bracket)
  saver = checkpoint.Checkpointer(cfg)
  saver.directory = checkpoint._path(bracket.checkpoint_directory)
  saver.directory.mkdir(parents=True)
  with pytest.raises(errors.StorageError, match="5 tensors are not in what was written"):
    saver.save(1, {"params": make_state()["params"], "more": [jnp.ones(2)] * 3}, {}, wait=True)
  saver.close()
  assert os.listdir(bracket.checkpoint_directory) == []


def train_until_killed(cfg, period, log):
  """Restores, checks every bit, then saves for ever; writes to `log` what has returned."""
  saver = checkpoint.Checkpointer(cfg)
  found = saver.restore(abstract(make_state()))
  state, position = found or (make_state(0), {"batch": 0})
  step = position["batch"]
  sound = bits(state) == bits(make_state(step))
  with open(log, "a") as file:
    print("resumed" if sound else "WRONG", step, file=file, flush=True)
    while True:
      step += 1
      state = make_state(step)
      if step % period == 0:
        saver.save(step, state, {"batch": step})
        print("saved", step, file=file, flush=True)


def survive_kills(cfg, kills, seed, longest=1.0, period=3):
  """Kills a saver `kills` times, within `longest` seconds of its start or, every other time, of its first save.

  Returns the step each start resumed from. Asserts that each start finds a sound checkpoint no older than the one
  before the last whose save() had returned, and that nothing is left over.
  """
  chance, log = random.Random(seed), os.path.join(os.path.dirname(cfg.run_directory), "log")
  resumed, least = [], 0
  for kill in range(kills):
    open(log, "w").close()
    process = PROCESSES.Process(target=train_until_killed, args=(cfg, period, log), daemon=True)
    process.start()
    deadline = time.monotonic() + 60
    while kill % 2 and os.path.getsize(log) < len("resumed 0 saved") and time.monotonic() < deadline:
      time.sleep(0.01)
    time.sleep(chance.uniform(0.0, longest))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with open(log) as file:
      lines = [line.split() for line in file]
    for word, step in lines:
      assert word != "WRONG"
      if word == "resumed":
        assert int(step) >= least
        resumed.append(int(step))
      else:
        least = max(least, int(step) - period)
  state, position = restore(cfg)
  assert position["batch"] >= least
  assert bits(state) == bits(make_state(position["batch"]))
  assert all(name.isdecimal() for name in names(cfg)), names(cfg)
  assert len(names(cfg)) <= cfg.max_num_checkpoints_to_keep + 1  # one more where a kill came before the removal
  return resumed


def test_ten_kills_at_random_moments_leave_a_run_that_resumes(cfg):
  resumed = survive_kills(cfg, kills=10, seed=1)
  assert resumed[-1] > 0
