# SPDX-License-Identifier: Apache-2.0
"""What the tests here share: train.py started as a user would, what a run leaves behind, PASS or FAIL.

A test takes a recipe, key=value arguments, and options of its own; without a recipe it trains SMALL. Its runs go where
base_output_directory=... says, or to a temporary directory that is removed when the test passes.
"""

import argparse
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from end_to_end import bench

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Seconds on two cores, and all that could make two runs differ: text, dropout, clipping, evaluations.
SMALL = [
    "configs/base.yml", "base_num_decoder_layers=2", "base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2",
    "head_dim=16", "base_mlp_dim=128", "vocab_size=512", "max_target_length=64", "per_device_batch_size=8",
    "max_dataset_chars=400000", "dropout_rate=0.1", "input_dropout_rate=0.1", "eval_steps=2",
    "enable_tensorboard=false",
]  # fmt: skip


class Failed(Exception):
  """The claim does not hold; the message says what was found instead."""


def check(holds, found):
  """Raises Failed with what was found."""
  if not holds:
    raise Failed(found)


class Place:
  """Where the runs of one test go, and the recipe and arguments all of them are started with."""

  def __init__(self, arguments, recipe):
    named = bool(arguments) and arguments[0].endswith((".yml", ".yaml"))
    self.arguments = arguments if named else [*recipe, *arguments]
    given = [argument for argument in arguments if argument.startswith("base_output_directory=")]
    self.logs = tempfile.mkdtemp(prefix="maxtext-")
    self.directory = given[-1].partition("=")[2] if given else self.logs
    if not given:  # caches of the test's own: every start after the first is quick, and none has other code's work
      self.arguments += [f"{key}={self.logs}/{key}" for key in ("jax_cache_dir", "data_cache_dir")]
      self.arguments += [f"base_output_directory={self.directory}"]

  def start(self, name, *more, **environment):
    """A process of train.py for the run `name`; its output is added to log(name)."""
    with open(self._log(name), "ab") as log:
      return subprocess.Popen(
          [sys.executable, "MaxText/train.py", *self.arguments, *more, f"run_name={name}"], cwd=ROOT, stdout=log,
          stderr=subprocess.STDOUT, env={**os.environ, **environment})

  def train(self, name, *more, **environment):
    """Runs train.py to its end. Raises Failed when that is not exit code 0."""
    self.expect(self.start(name, *more, **environment), name, 0)

  def expect(self, process, name, code):
    """Waits for a process of the run `name`. Raises Failed when it ends with another exit code."""
    found = process.wait()
    check(found == code, f"run {name} ended with exit code {found}, not {code}: {self.log(name).strip()[-600:]}")

  def log(self, name):
    """What all starts of a run have printed."""
    with open(self._log(name), encoding="utf-8", errors="replace") as file:
      return file.read()

  def _log(self, name):
    return os.path.join(self.logs, f"{name}.log")

  def rows(self, name, file="metrics.jsonl"):
    """The whole lines of a run's metrics or eval.jsonl, as dicts; none where there is no file yet."""
    from etils import epath

    path = epath.Path(self.directory) / name / "metrics" / file
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

  def last_step(self, name):
    """The last step in a run's metrics, 0 before the first."""
    rows = self.rows(name)
    return rows[-1]["step"] if rows else 0

  def watch(self, name, process, patterns):
    """Returns once one of the globs exists in the run's checkpoint directory, or the process has ended. Local only."""
    patterns = [os.path.join(self.directory, name, "checkpoints", pattern) for pattern in patterns]
    while process.poll() is None and not any(glob.glob(pattern) for pattern in patterns):
      time.sleep(0.0005)

  def checkpoints(self, name):
    """Names in a run's checkpoint directory."""
    from etils import epath

    return sorted(entry.name for entry in (epath.Path(self.directory) / name / "checkpoints").iterdir())

  def state_digest(self, name):
    """(newest step, sha256 over every tensor of its checkpoint: name, type, shape, bits), read by Orbax alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from etils import epath

    step = max(int(entry) for entry in self.checkpoints(name) if entry.isdecimal())
    path = epath.Path(self.directory) / name / "checkpoints" / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as reader:
      tree = reader.metadata(path).item_metadata.tree
      kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
      state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=kinds))
    digest = hashlib.sha256()
    for where, leaf in jax.tree.leaves_with_path(state):
      leaf = np.asarray(leaf)
      digest.update(f"{jax.tree_util.keystr(where)} {leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
    return step, digest.hexdigest()

  def check_equal(self, name, other):
    """(steps, digest of the state) of two runs that logged the same numbers, each step once, and ended in one state.

    Equal is bit for bit. Raises Failed where they differ.
    """
    for file in ("metrics.jsonl", "eval.jsonl"):
      ours, theirs = ([learned(row) for row in self.rows(run, file)] for run in (name, other))
      steps, expected = [row["step"] for row in ours], [row["step"] for row in theirs]
      check(steps == expected, f"{file} of {name} has the steps {steps}, that of {other} {expected}")
      for our, their in zip(ours, theirs, strict=True):
        different = [f"{key} {our.get(key)} is not {their[key]}" for key in their if our.get(key) != their[key]]
        check(not different, f"step {our['step']}: {', '.join(different)}")
    steps = [row["step"] for row in self.rows(name)]
    check(steps == list(range(1, len(steps) + 1)), f"{name} logged the steps {steps}")
    ours, theirs = self.state_digest(name), self.state_digest(other)
    check(ours == theirs, f"the state of {name} after step {ours[0]} is not that of {other} after step {theirs[0]}")
    return ours


def learned(row):
  """A metrics line without what is of its time and place."""
  return {key: value for key, value in row.items() if key not in ("time", "run_name") and not key.startswith("perf/")}


def judge(script, claim, recipe=SMALL, **options):
  """Prints PASS and the figures that claim(place, **options) returns, or FAIL and what was found; exits with 0 or 1.

  recipe: arguments to train with when the command line names no recipe; options: --name=value on the command line, with
  their defaults. With RESULTS=FILE in the environment, a line of JSON is added there.
  """
  name, begin, load = os.path.splitext(os.path.basename(script))[0], time.monotonic(), os.getloadavg()[0]
  parser = argparse.ArgumentParser(
      description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for option, default in options.items():
    parser.add_argument(f"--{option}", type=type(default), default=default)
  own, arguments = parser.parse_known_args()
  if unknown := [argument for argument in arguments if argument.startswith("-")]:
    parser.error(f"unknown option {unknown[0]}")
  place = Place(arguments, recipe)
  try:
    figures, passed = claim(place, **vars(own)), True
  except Failed as failure:
    figures, passed = f"{failure}. Logs: {place.logs}", False
  seconds = time.monotonic() - begin
  print(f"{'PASS' if passed else 'FAIL'} {name}: {figures} ({seconds:.0f} s)", flush=True)
  if os.environ.get("RESULTS"):
    bench.append(os.environ["RESULTS"], {
        "test": name, "passed": passed, "figures": figures, "arguments": sys.argv[1:], "seconds": round(seconds, 1),
        "load_average_start": load, "load_average_end": os.getloadavg()[0], **bench.surroundings()})
  if passed:
    shutil.rmtree(place.logs, ignore_errors=True)
  sys.exit(0 if passed else 1)
