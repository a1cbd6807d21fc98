# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: save in the background, verify, resume on any mesh, load parameters from elsewhere.

A checkpoint is one directory, written by Orbax and made trustworthy here:

  <checkpoint_directory>/120/state/         the train state, an Orbax PyTree (OCDBT, zarr3)
  <checkpoint_directory>/120/position.json  data position and whatever else the caller must know to go on
  <checkpoint_directory>/120/manifest.json  every tensor's shape and type, every file's size and sha256

It is written as `120.saving` and renamed when complete, so a directory named by a number is whole at any moment a
process may be killed. Object stores (gs://) have no atomic rename of a directory: there `120` is written in place and
manifest.json, written last, is the commit. Their manifest has sizes but no hashes: reading everything back over the
network would cost as much as the save, and the store keeps checksums of its own.
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from MaxText import errors

FORMAT = 1
FAILURES_IN_A_ROW = 3
CHUNK_BYTES = 64 << 20
BEAT_SECONDS, BEATS_TO_WATCH = 20, 3
RUN_HINT = "See to it, or choose another base_output_directory."
LOAD_HINT = "Give a run directory, its checkpoints directory, or one step in it."


class Damaged(Exception):
  """This checkpoint must not be used; the message is the reason."""


class Checkpointer:
  """Saves and restores the checkpoints of one run, and holds the run's lock until close().

  Raises ConfigError when another process holds the lock, StorageError when the directory cannot be written. Leftovers
  of killed runs are removed. Every process of a run makes one; process 0 writes all but the tensors.
  """

  def __init__(self, cfg):
    self.directory = _path(cfg.checkpoint_directory)
    self._remote = _is_remote(cfg.checkpoint_directory)
    self._asynchronous = cfg.async_checkpointing
    self._keep, self._keep_period = cfg.max_num_checkpoints_to_keep, cfg.checkpoint_keep_period
    if "[" in cfg.checkpoint_directory:  # Orbax takes its path for a glob, merges nothing, and reports success
      raise errors.ConfigError(
          f"checkpoint directory {cfg.checkpoint_directory} has a '[' in it, with which Orbax loses tensors. "
          "Choose another base_output_directory or run_name.")
    self._writes = jax.process_index() == 0  # all but the tensors, which every process writes its part of
    self._lock = Lock(cfg.run_directory) if self._writes else None
    self._saver = self._thread = self._error = self._last_step = None
    self._failures = 0
    threading.Thread(target=_orbax, daemon=True).start()  # its import (0.3-0.7 s) runs beside the compilation
    if self._writes:
      with _one_line(errors.StorageError, f"{self.directory} cannot be written", RUN_HINT):
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

  def steps(self):
    """The steps of which there is a checkpoint, ascending."""
    return sorted(_steps(self.directory, self._remote))

  def latest_step(self):
    """The newest of steps(), or None."""
    return max(self.steps(), default=None)

  def save(self, step, state, position, *, wait=False):
    """Saves `state` (a pytree of jax.Arrays) and `position` (a JSON dict) as the checkpoint of `step`.

    Returns once the arrays are copied to host memory, so that they may be donated, and the save before this one is
    finished; the writing goes on in a thread unless async_checkpointing is off. A save that fails costs a warning, the
    third in a row is a StorageError. With wait=True this save is complete when the call returns, or StorageError says
    why not. Saving again the step just saved or restored does nothing.
    """
    self._finish_pending()
    if step == self._last_step:
      return
    start = time.monotonic()
    tensors = {name: [list(x.shape), x.dtype.name] for name, x in named(state)}
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    position = json.dumps(position)  # now: the caller goes on changing it
    target = self.directory / (str(step) if self._remote else f"{step}.saving")
    ocp = _orbax()
    try:
      if self._failures and self._writes:
        self._remove_leftovers()
      self._saver = self._saver or ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True))
      self._saver.save(target / "state", args=ocp.args.PyTreeSave(state))
    except Exception as error:  # noqa: BLE001 whatever a storage layer may raise, the run must outlive it
      self._fail(step, error)
    else:
      self._thread = threading.Thread(target=self._finalize, args=(step, target, tensors, position, size, start))
      self._thread.start()
    if wait or not self._asynchronous:
      self._finish_pending()
    if wait and self._last_step != step:
      raise errors.StorageError(f"step {step} could not be saved in {self.directory}: {self._error}")

  def restore(self, abstract_state):
    """(state, position) of the newest sound checkpoint, or None when the run has none.

    abstract_state: pytree of jax.ShapeDtypeStruct with shardings, those of the present mesh whatever the saving mesh
    was. A damaged checkpoint is renamed N.corrupt with a warning and the one before is taken. Raises CheckpointError
    when all are damaged, ConfigError when the checkpoint's tensors are not those of abstract_state.
    """
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_state))
    start = time.monotonic()
    step = self._newest_sound_step() if self._writes else 0
    if jax.process_count() > 1:
      step = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
      step = None if step < 0 else step
    if self._writes and not self._remote:
      self._note_space(size)
    if step is None:
      return None
    hint = "Use the config this run was started with, or another run_name."
    state, position = _read(self.directory / str(step), abstract_state, hint)
    self._last_step = step
    _say(f"restored step {step} from {self.directory / str(step)} ({time.monotonic() - start:.1f} s, "
         f"{'sizes' if self._remote else 'checksums'} verified)")
    return state, position

  def close(self):
    """Waits for the save in the background and gives the run's lock back. Raises StorageError like save()."""
    try:
      self._finish_pending()
    finally:
      if self._saver:
        self._saver.close()
        self._saver = None
      if self._lock:
        self._lock.release()

  def _finish_pending(self):
    if self._thread:
      self._thread.join()
      self._thread = None
    if self._failures >= FAILURES_IN_A_ROW:
      raise errors.StorageError(
          f"{self._failures} checkpoints in a row could not be saved in {self.directory}: {self._error}. "
          f"The newest one there is of step {self.latest_step()}.")

  def _finalize(self, step, target, tensors, position, size, start):
    try:
      self._saver.wait_until_finished()
      if self._writes:
        _check_tensors(self._saver, target, tensors)
        (target / "position.json").write_text(position)
        _write_manifest(target, step, tensors, hashed=not self._remote)
        if not self._remote:
          target.rename(self.directory / str(step))
    except Exception as error:  # noqa: BLE001 as in save()
      self._fail(step, error)
      return
    self._last_step, self._failures = step, 0
    if self._writes:
      _say(f"saved step {step} to {self.directory / str(step)} "
           f"({time.monotonic() - start:.1f} s, {size / 1e6:.1f} MB, verified)")
      self._remove_old()

  def _fail(self, step, error):
    """One warning line; what was written of the step is removed, and Orbax is started afresh next time."""
    self._error, self._failures, self._saver = _reason(error), self._failures + 1, None
    latest = self._last_step
    # Tensors whose writing did not fail are still being written, and bring directories back.
    for _ in range(10 if self._writes else 0):
      with contextlib.suppress(OSError):  # or the storage is gone altogether; the next save tries again
        latest = self.latest_step()
        if not self._remove_leftovers():
          break
      time.sleep(0.2)
    before = "there is none before it" if latest is None else f"step {latest} stays the newest"
    _warn(f"saving step {step} failed ({self._error}): {before}. "
          f"Failure {self._failures} of {FAILURES_IN_A_ROW} in a row before the run ends.")

  def _remove_leftovers(self):
    """Removes what killed or failed saves and removals left; returns how many directories that were."""
    removed = 0
    for entry in _entries(self.directory):
      killed = re.fullmatch(r"\d+\.(saving|deleting)", entry.name)
      if killed or (self._remote and entry.name.isdecimal() and not (entry / "manifest.json").exists()):
        entry.rmtree(missing_ok=True)
        removed += 1
    return removed

  def _remove_old(self):
    """Keeps the newest max_num_checkpoints_to_keep, and every multiple of checkpoint_keep_period besides."""
    try:
      for step in self.steps()[:-self._keep]:
        if self._keep_period and step % self._keep_period == 0:
          continue
        old = self.directory / str(step)
        if self._remote:
          (old / "manifest.json").unlink()  # no longer a checkpoint, from the first moment on
        else:
          old = old.rename(self.directory / f"{step}.deleting")
        old.rmtree(missing_ok=True)
    except OSError as error:
      _warn(f"old checkpoints in {self.directory} could not be removed ({_reason(error)})")

  def _newest_sound_step(self):
    """The newest step whose files are what its manifest says; damaged ones met on the way are renamed."""
    candidates = sorted(_steps(self.directory, self._remote, sound=False), reverse=True)
    reason = "damaged earlier"
    for i, step in enumerate(candidates):
      try:
        _verify(self.directory / str(step))
        return step
      except Damaged as damage:
        reason = str(damage)
        kept = self._set_aside(step)
        then = f"trying step {candidates[i + 1]}" if i + 1 < len(candidates) else "there is none before it"
        _warn(f"step {step} is damaged ({reason}): kept as {kept}, {then}")
    corrupt = sorted(x.name for x in _entries(self.directory) if re.fullmatch(r"\d+\.corrupt\d*", x.name))
    if corrupt:
      raise errors.CheckpointError(
          f"{self.directory} holds damaged checkpoints only ({', '.join(corrupt)}; {reason}). "
          "Repair one, or choose another run_name to start from the beginning.")
    return None

  def _set_aside(self, step):
    source, kept, n = self.directory / str(step), f"{step}.corrupt", 1
    while (self.directory / kept).exists():
      n += 1
      kept = f"{step}.corrupt{n}"
    with _one_line(errors.StorageError, f"damaged {source} cannot be renamed {kept}", RUN_HINT):
      source.rename(self.directory / kept)
    return kept

  def _note_space(self, size):
    free = shutil.disk_usage(self.directory).free
    needed = size * max(1, self._keep + 1 - len(self.steps()))
    if free < needed:
      _warn(f"{free / 1e9:.2f} GB are free in {self.directory}; {self._keep} checkpoints and the one being written may "
            f"need {needed / 1e9:.2f} GB more. Lower max_num_checkpoints_to_keep or make room.")


class Lock:
  """Keeps a second process out of a run directory, until release() or the end of the process.

  On a file system: a POSIX record lock on <run directory>/lock, which the kernel drops however the process dies. On an
  object store: an object rewritten every BEAT_SECONDS; one that does not change for BEATS_TO_WATCH beats is left by a
  dead process and taken over (two processes that find none at the same moment do not notice each other). Raises
  ConfigError naming the holder, StorageError when the directory cannot be written.
  """

  def __init__(self, run_directory):
    self._path = _path(run_directory) / "lock"
    self._me = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    self._file = self._stop = None
    with _one_line(errors.StorageError, f"{self._path} cannot be written", RUN_HINT):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      if _is_remote(run_directory):
        self._take_object()
      else:
        self._take_file()

  def release(self):
    """Gives the lock back. The file stays: removing it would race with a process about to lock it."""
    if self._file is not None:
      os.close(self._file)
      self._file = None
    if self._stop:
      self._stop.set()
      self._thread.join()
      self._stop = None
      self._path.unlink(missing_ok=True)

  def _take_file(self):
    self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      # Not flock: a forked child would keep that one alive after its parent's death.
      fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in (errno.EACCES, errno.EAGAIN):
        os.close(self._file)
        self._refuse(self._path.read_text())
      _warn(f"{self._path} cannot be locked here ({_reason(error)}): see to it that one process alone uses this run")
    os.ftruncate(self._file, 0)
    os.write(self._file, json.dumps(self._me).encode())

  def _take_object(self):
    if self._path.exists():
      found = self._path.read_text()
      if not self._holder_is_gone(found):
        _say(f"{self._path} exists: watching for {BEAT_SECONDS * BEATS_TO_WATCH:.0f} s whether its holder lives")
        for _ in range(BEATS_TO_WATCH):
          time.sleep(BEAT_SECONDS)
          if self._path.exists() and self._path.read_text() != found:
            self._refuse(found)
    self._stop = threading.Event()
    self._beat(0)
    self._thread = threading.Thread(target=self._keep_beating, daemon=True)
    self._thread.start()

  def _holder_is_gone(self, found):
    """True when the holder was a process of this host that no longer lives; in containers often of our own number."""
    try:
      holder = json.loads(found)
      if holder["host"] != self._me["host"]:
        return False
      os.kill(holder["pid"], 0)
      return holder["pid"] == os.getpid()
    except PermissionError:
      return False
    except (ValueError, KeyError, ProcessLookupError):
      return True

  def _beat(self, n):
    self._path.write_text(json.dumps({**self._me, "beat": n}))

  def _keep_beating(self):
    n = 0
    while not self._stop.wait(BEAT_SECONDS):
      n += 1
      try:
        self._beat(n)
      except Exception as error:  # noqa: BLE001 a network hiccup must not end the beat
        _warn(f"{self._path} could not be renewed ({_reason(error)})")

  def _refuse(self, found):
    try:
      holder = "process {pid} on {host} since {since}".format_map(json.loads(found))
    except (ValueError, KeyError):
      holder = "another process"
    raise errors.ConfigError(
        f"run directory {self._path.parent} is in use by {holder}. Stop that process or choose another run_name.")


def start_state(cfg, checkpointer, abstract_state, init):
  """(state, position or None) a run starts from.

  Its own newest checkpoint, else load_parameters_path with the rest from init(), else load_full_state_path, or init().
  checkpointer may be None (enable_checkpointing off); init() -> fresh state as abstract_state describes it.
  """
  own = checkpointer.restore(abstract_state) if checkpointer else None
  if own:
    return own
  if cfg.load_parameters_path:
    state = init()
    del state["params"]  # never two sets of parameters in memory
    return {**state, "params": load_parameters(cfg.load_parameters_path, abstract_state["params"])}, None
  if cfg.load_full_state_path:
    return load_full_state(cfg.load_full_state_path, abstract_state)
  return init(), None


def load_parameters(path, abstract_params):
  """The parameters of another checkpoint, read without its optimizer state, cast to the types of abstract_params.

  path: a run directory, its checkpoints directory or one step in it, local or gs://; of several steps the newest sound
  one. abstract_params: pytree of jax.ShapeDtypeStruct with shardings. Raises CheckpointError when none is sound,
  ConfigError naming the first tensor whose name or shape differs.
  """
  return read_parameters(sound_checkpoint(path, f"load_parameters_path={path}"), abstract_params)


def read_parameters(step, abstract_params):
  """load_parameters of one directory that sound_checkpoint() has found."""
  hint = "Give the config of that checkpoint's model."
  state, _ = _read(step, {"params": abstract_params}, hint, part="params/", cast=True)
  _say(f"loaded the parameters of {step}")
  return state["params"]


class ParameterWriter:
  """Writes a checkpoint of parameters alone, piece by piece: what is converted need not fit into memory.

  shapes: pytree of jax.ShapeDtypeStruct, where the first dimension of what is under "layers" counts the layers. A
  context manager: the checkpoint of step 0 in `directory` (local) is complete and verified when the block has ended,
  and there is none when it fails. Raises StorageError.
  """

  def __init__(self, directory, shapes):
    self._directory, self._target = _path(directory), _path(directory) / "0.saving"
    self._shapes = dict(named({"params": shapes}))
    # Orbax writes the tree with tensors of one number; those of the right shape take their places.
    tree = jax.tree.map(lambda x: np.zeros(1, x.dtype), {"params": shapes})
    ocp = _orbax()
    with _one_line(errors.StorageError, f"{self._directory} cannot be written"):
      with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as writer:
        writer.save(self._target / "state", args=ocp.args.PyTreeSave(tree))
      self._arrays = {name: _tensorstore(self._target, name, x) for name, x in self._shapes.items()}

  def write(self, name, layer, value):
    """Writes parameter `name` ("layers/mlp/wu_em"), whole or with `layer` not None that of one layer."""
    array = self._arrays[f"params/{name}"]
    array = array if layer is None else array[layer]
    rows = array.chunk_layout.write_chunk.shape[0]
    with _one_line(errors.StorageError, f"{self._directory} cannot be written"):
      for start in range(0, len(value), rows):  # at once, a copy of all chunks would stand in memory
        end = min(start + rows, len(value))
        array[start:end].write(value[start:end]).result()

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    if kind is not None:
      return
    tensors = {name: [list(x.shape), np.dtype(x.dtype).name] for name, x in self._shapes.items()}
    ocp = _orbax()
    with _one_line(errors.StorageError, f"{self._directory} cannot be written"):
      with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as reader:
        _check_tensors(reader, self._target, tensors)
      (self._target / "position.json").write_text("{}")
      _write_manifest(self._target, 0, tensors, hashed=True)
      self._target.rename(self._directory / "0")


def open_parameters(step):
  """{"layers/mlp/wu_em": tensor} of a checkpoint that sound_checkpoint() has found; tensor[3].read().result() reads the
  part asked for alone."""
  names = [name for name in _manifest(step)["tensors"] if name.startswith("params/")]
  with _one_line(errors.CheckpointError, f"{step} is sound but cannot be read"):
    return {name.removeprefix("params/"): _tensorstore(step, name) for name in names}


def _tensorstore(directory, name, create=None):
  """One tensor in a checkpoint's state, as Orbax lays it out; `create`: made anew with this shape and type."""
  import tensorstore

  base = str(directory / "state")
  base = base if _is_remote(base) else f"file://{base}"
  spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"{base}/", "path": f"{name.replace('/', '.')}/"}}
  context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
  if create is None:
    return tensorstore.open(spec, open=True, read=True, context=context).result()
  chunk = list(create.shape)
  if name.startswith("params/layers/"):
    chunk[0] = 1
  while np.prod(chunk) * np.dtype(create.dtype).itemsize > CHUNK_BYTES and max(chunk) > 1:
    chunk[int(np.argmax(chunk))] = -(-max(chunk) // 2)
  spec["metadata"] = {
      "shape": list(create.shape), "data_type": np.dtype(create.dtype).name,
      "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
      "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
  }
  return tensorstore.open(spec, create=True, delete_existing=True, context=context).result()


def load_full_state(path, abstract_state):
  """(state, position) of another run's checkpoint; path and errors as in load_parameters, and types must agree too."""
  step = sound_checkpoint(path, f"load_full_state_path={path}")
  loaded = _read(step, abstract_state, "Give the config of that run, or use load_parameters_path.")
  _say(f"loaded the full state of {step}")
  return loaded


def sound_checkpoint(path, what, hint=LOAD_HINT):
  """The directory of the checkpoint meant by `path`, `what` in messages and `hint` their way out, as load_parameters
  takes it.

  Only looks: a damaged one is passed over, not renamed. Raises CheckpointError.
  """
  root, candidates, reasons = _path(path), [], []
  with _one_line(errors.CheckpointError, f"{what} cannot be read", hint):
    for parent in (root / "checkpoints", root):
      steps = sorted(_steps(parent, _is_remote(path), sound=False), reverse=True)
      candidates = candidates or [parent / str(step) for step in steps]
    if not candidates and root.name.isdecimal() and root.exists():
      candidates = [root]
  for step in candidates:
    try:
      _verify(step)
      return step
    except Damaged as damage:
      reasons.append(f"step {step.name}: {damage}")
      _warn(f"{step} is damaged ({damage}), passed over")
  why = f"holds no sound checkpoint ({reasons[0]})" if reasons else "holds no checkpoint"
  raise errors.CheckpointError(f"{what} {why}. {hint}")


def _read(step, abstract, hint, part="", cast=False):
  """(state, position) of one verified checkpoint. `part`: restores only the tensors whose names start so."""
  saved = {name: what for name, what in _manifest(step)["tensors"].items() if name.startswith(part)}
  for name, x in named(abstract):
    shape, dtype = saved.pop(name, (None, None))
    if shape is None:
      raise errors.ConfigError(f"{step} has no tensor {name}, which this config needs with shape {x.shape}. {hint}")
    if tuple(shape) != x.shape or (dtype != x.dtype.name and not cast):
      raise errors.ConfigError(
          f"{step} has {name} as {dtype}{tuple(shape)}, this config as {x.dtype.name}{x.shape}. {hint}")
  if saved:
    name, (shape, dtype) = next(iter(saved.items()))
    raise errors.ConfigError(f"{step} has {name} as {dtype}{tuple(shape)}, this config has no such tensor. {hint}")
  ocp = _orbax()
  arguments = ocp.args.PyTreeRestore(
      item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=bool(part))
  # The files are as they were written, so what fails now is memory, network or version: no reason to set them aside.
  with _one_line(errors.CheckpointError, f"{step} is sound but cannot be read"):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as reader:
      state = reader.restore(step / "state", args=arguments)
    return state, json.loads((step / "position.json").read_text())


def _check_tensors(reader, directory, tensors):
  """Raises OSError unless Orbax, asked for what it has just written, knows every tensor by name, shape and type."""
  found = reader.metadata(directory / "state").item_metadata
  found = {name: [list(x.shape), np.dtype(x.dtype).name] for name, x in named(found.tree)} if found else {}
  wrong = [name for name, what in tensors.items() if found.get(name) != what]
  if wrong:
    raise OSError(f"{len(wrong)} tensors are not in what was written, {wrong[0]} among them")


def _write_manifest(directory, step, tensors, hashed):
  with concurrent.futures.ThreadPoolExecutor() as pool:
    files = dict(pool.map(lambda file: _describe(file, directory, hashed), list(_files(directory))))
  manifest = {"format": FORMAT, "step": step, "tensors": tensors, "files": files}
  (directory / "manifest.json").write_text(json.dumps({"sha256": _digest(manifest), "manifest": manifest}))
  _describe(directory / "manifest.json", directory, hashed)  # for its fsync


def _manifest(step):
  """The manifest of a checkpoint directory. Raises Damaged."""
  if not step.is_dir():
    raise Damaged("not a directory")
  if not _entries(step):
    raise Damaged("the directory is empty")
  try:
    with _damage(step / "manifest.json", step):
      content = json.loads((step / "manifest.json").read_text())
    if _digest(content["manifest"]) != content["sha256"]:
      raise Damaged("manifest.json differs from its checksum")
  except (KeyError, TypeError):
    raise Damaged("manifest.json is not readable") from None
  if content["manifest"]["format"] != FORMAT:
    raise Damaged(f"its format {content['manifest']['format']} is not known here, only {FORMAT}")
  return content["manifest"]


def _verify(step):
  """Raises Damaged unless the files of a checkpoint are as its manifest says; others beside them do no harm."""
  wanted = _manifest(step)["files"]

  def check(item):
    name, (size, digest) = item
    with _damage(step / name, step):
      _, (found_size, found_digest) = _describe(step / name, step, digest is not None, durable=False)
    if found_size != size:
      raise Damaged(f"{name} has {found_size} of {size} bytes")
    if found_digest != digest:
      raise Damaged(f"{name} differs from its checksum")

  with concurrent.futures.ThreadPoolExecutor() as pool:
    list(pool.map(check, wanted.items()))


@contextlib.contextmanager
def _damage(file, directory):
  """A file that is gone, garbled or on a bad medium is damage; other trouble in reading is not its fault."""
  name = file.relative_to(directory)
  try:
    yield
  except FileNotFoundError:
    raise Damaged(f"{name} is missing") from None
  except Exception as error:
    if isinstance(error, ValueError) or getattr(error, "errno", None) == errno.EIO:
      raise Damaged(f"{name} is not readable") from None
    raise errors.CheckpointError(f"{file} cannot be read: {_reason(error)}") from error


def _describe(file, directory, hashed, durable=True):
  """(name, [size, sha256 or None]) of a file; `durable` has it on disk first, lest a power cut follow the rename."""
  name, size = str(file.relative_to(directory)), file.stat().length
  if not hashed:
    return name, [size, None]
  with open(file, "rb") as content:
    if durable:
      os.fsync(content.fileno())
    return name, [size, hashlib.file_digest(content, "sha256").hexdigest()]


def _digest(manifest):
  return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _entries(directory):
  """The paths in a directory; none when it is missing, as an empty one is on an object store."""
  try:
    return list(directory.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    return []


def _files(directory):
  for entry in _entries(directory):
    if entry.is_dir():
      yield from _files(entry)
    else:
      yield entry


def _steps(directory, remote, sound=True):
  """Yields the steps in a directory: those named by a number; not `sound`: also what only looks like one."""
  for entry in _entries(directory):
    number = entry.name.isdecimal() and entry.name == str(int(entry.name))
    if number and ((entry / "manifest.json").exists() or (not sound and not remote)):
      yield int(entry.name)


def named(tree):
  """Pairs of name ("params/layers/wq_enh") and leaf."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


@functools.cache
def _orbax():
  """orbax.checkpoint, imported late because it is slow, and made quiet: what it logs becomes one line of ours."""
  import orbax.checkpoint as ocp
  from absl import logging as absl_logging

  def is_from_others(record):
    return "orbax" not in record.pathname and "orbax" not in record.getMessage()

  absl_logging.get_absl_logger().addFilter(is_from_others)
  logging.getLogger("asyncio").addFilter(is_from_others)  # "Task exception was never retrieved"
  report = sys.unraisablehook

  def report_others(unraisable):
    # When one write fails, the others end after Orbax has closed their event loop: five lines of traceback for each.
    if str(unraisable.exc_value) != "Event loop is closed":
      report(unraisable)

  sys.unraisablehook = report_others
  return ocp


def _is_remote(path):
  return "://" in str(path)


def _path(path):
  """An absolute path: what Orbax demands of local ones."""
  return epath.Path(path) if _is_remote(path) else epath.Path(path).expanduser().absolute()


def _reason(error):
  """An error in a few words: the system's where a system error is behind it, else its own first line."""
  text = str(error).strip() or type(error).__name__
  hidden = re.search(r"os_error_code='(\d+)'", text)  # TensorStore's way of saying so
  code = int(hidden[1]) if hidden else getattr(error, "errno", None)
  return os.strerror(code) if code else text.splitlines()[0][:200]


@contextlib.contextmanager
def _one_line(kind, what, hint=""):
  """Turns whatever a storage library raises, and the ones behind gs:// raise anything, into one line of `kind`."""
  try:
    yield
  except errors.RunError:
    raise
  except Exception as error:
    raise kind(f"{what}: {_reason(error)}. {hint}".strip()) from error


def _say(text):
  if jax.process_index() == 0:
    print(f"checkpoint: {text}", flush=True)


def _warn(text):
  if jax.process_index() == 0:
    print(f"checkpoint: warning: {text}", file=sys.stderr, flush=True)
