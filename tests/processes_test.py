# SPDX-License-Identifier: Apache-2.0
"""Several processes: found out about, one run together, and ended together when one dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from MaxText import processes

REPO = Path(__file__).parents[1]
SMALL = ["base_num_decoder_layers=1", "base_emb_dim=32", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=16",
         "base_mlp_dim=32", "max_target_length=32", "tokenizer_type=byte", "vocab_size=384", "per_device_batch_size=2",
         "enable_tensorboard=false", "max_dataset_chars=200000"]  # fmt: skip


class Processes:
  """train.py in `count` processes of 4 / count fake devices each."""

  def __init__(self, directory, name, count, *arguments):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      port = free.getsockname()[1]
    self.directory, self.name = directory, name
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}"}
    in_environment = "environment" in name  # as multihost_runner.py tells them
    command = [sys.executable, "MaxText/train.py", "configs/base.yml", f"run_name={name}", *SMALL,
               f"base_output_directory={directory}", f"data_cache_dir={directory}/cache", *arguments]
    if in_environment:
      environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_PROCESS_COUNT": str(count)}
    elif count > 1:
      command += [f"jax_coordinator_address=127.0.0.1:{port}", f"jax_process_count={count}"]
    self.started, self.logs = [], []
    for index in range(count):
      self.logs.append(directory / f"{name}.{index}.log")
      with self.logs[-1].open("wb") as log:
        self.started.append(subprocess.Popen(
            [*command, *([f"jax_process_id={index}"] if count > 1 and not in_environment else [])], cwd=REPO,
            env=environment | {"JAX_PROCESS_ID": str(index)}, stdout=log, stderr=subprocess.STDOUT))

  def wait(self, seconds=120):
    """Their exit codes."""
    return [process.wait(seconds) for process in self.started]

  def said(self, index):
    return self.logs[index].read_text(errors="replace")

  def rows(self, file="metrics"):
    path = self.directory / self.name / f"metrics/{file}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

  def wait_for_step(self, step):
    until = time.monotonic() + 120
    while len(self.rows()) < step:
      assert all(process.poll() is None for process in self.started), self.said(0)[-2000:]
      assert time.monotonic() < until
      time.sleep(0.05)

  def kill(self):
    for process in self.started:
      process.kill()
      process.wait()


@pytest.fixture
def start(tmp_path):
  """Starts Processes, none of which outlives the test."""
  everyone = []

  def run(*arguments):
    everyone.append(Processes(tmp_path, *arguments))
    return everyone[-1]

  yield run
  for one in everyone:
    one.kill()


def test_on_one_machine_nothing_is_started(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "TPU_", "KUBERNETES_", "MEGASCALE_")):
      monkeypatch.delenv(name)
  assert processes.detect() == 1


def test_slurm_and_open_mpi_tell_how_many_there_are(monkeypatch):
  for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
                      "SLURM_LOCALID": "0"}.items():  # fmt: skip
    monkeypatch.setenv(name, value)
  assert processes.detect() == 4
  monkeypatch.delenv("SLURM_STEP_NODELIST")  # sbatch without srun: one process
  assert processes.detect() == 1
  monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1:34911")
  monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
  assert processes.detect() == 3


@pytest.mark.parametrize("keys, says", [
    (["jax_coordinator_address=nowhere"], "jax_coordinator_address=nowhere must be host:port"),
    (["jax_process_id=2", "jax_process_count=2"], "jax_process_id=2 must be less than jax_process_count=2"),
])
def test_wrong_keys_are_one_line(start, keys, says):
  one = start("one", 1, *keys)
  assert one.wait() == [2]
  assert says in one.said(0) and one.said(0).count("\n") == 1


def test_losses_evaluations_and_checkpoints_of_two_processes_are_those_of_one(start):
  keys = ["steps=6", "eval_interval=3", "learning_rate_schedule_steps=10"]
  one, two = start("one", 1, *keys), start("two", 2, *keys)
  assert one.wait() == [0] and two.wait() == [0, 0]
  for file in ("metrics", "eval"):
    names = [name for name in one.rows(file)[0] if name.startswith(("learning/loss", "eval/"))]
    for ours, theirs in zip(two.rows(file), one.rows(file), strict=True):
      assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-5)
  on = start("two", 1, "steps=8", *keys[1:])
  assert on.wait() == [0], on.said(0)
  assert [row["step"] for row in on.rows()] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("name, victim", [("run", 0), ("environment", 1)])
def test_when_one_is_killed_the_others_say_who_and_end_with_76(start, name, victim):
  both = start(name, 2, "steps=100000", "eval_interval=-1")
  both.wait_for_step(3)
  both.started[victim].kill()
  begin = time.monotonic()
  codes = both.wait(30)
  assert time.monotonic() - begin < 15
  assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 76
  assert f"process {victim} on " in both.said(1 - victim) and "Traceback" not in both.said(1 - victim)


@pytest.mark.slow
def test_one_that_is_silent_counts_as_dead(start):
  both = start("run", 2, "steps=100000", "eval_interval=-1", "peer_timeout_seconds=4")
  both.wait_for_step(3)
  both.started[1].send_signal(signal.SIGSTOP)
  begin = time.monotonic()
  assert both.started[0].wait(30) == 76
  assert 3 < time.monotonic() - begin < 15
  assert "process 1 on " in both.said(0) and "silent for 4 s" in both.said(0)


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_does_not_come_is_one_line(start, index):
  both = start("run", 2, "steps=1", "jax_initialization_timeout_seconds=6")
  both.started[1 - index].kill()
  assert both.started[index].wait(60) == 76
  assert "jax_initialization_timeout_seconds=6" in both.said(index).splitlines()[-1]


def test_a_signal_to_one_saves_and_stops_all_behind_the_same_step(start):
  both = start("run", 2, "steps=100000", "eval_interval=-1")
  both.wait_for_step(3)
  both.started[1].send_signal(signal.SIGTERM)
  assert both.wait(60) == [75, 75]
  last = both.rows()[-1]["step"]
  for index in range(2):
    assert f"saved step {last} of 100000" in both.said(index)
  assert (both.directory / f"run/checkpoints/{last}").is_dir()
  again = start("run", 2, f"steps={last + 2}", "eval_interval=-1")
  assert again.wait() == [0, 0]
  assert [row["step"] for row in again.rows()] == list(range(1, last + 3))
