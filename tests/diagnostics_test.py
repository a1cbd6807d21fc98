# SPDX-License-Identifier: Apache-2.0
"""Stack traces and the profiler window."""

import glob
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from MaxText import diagnostics, errors

TRACED = """
import hashlib, sys, time
from types import SimpleNamespace
from MaxText import diagnostics
begin = time.time()
with diagnostics.stack_traces(SimpleNamespace(
    collect_stack_trace=True, stack_trace_to_cloud=sys.argv[1] == "cloud", stack_trace_interval_seconds=1)):
  def inside_native_code():
    while time.time() - begin < 1.2:
      hashlib.pbkdf2_hmac("sha256", b"", b"", 2_500_000)
  inside_native_code()
time.sleep(1.2)
print("alive")
"""


def traced(where):
  return subprocess.run([sys.executable, "-c", TRACED, where], env=os.environ | {"PYTHONPATH": os.getcwd()}, check=True,
                        text=True, capture_output=True)


def steps(profiler, numbers):
  """Runs a small computation as each step; returns the numbers of those that were recorded."""
  compute = jax.jit(lambda x: jnp.sum(x @ x))
  recorded, x = [], jnp.ones((64, 64))
  for number in numbers:
    with profiler.step(number, x):
      if profiler._recording:
        recorded.append(number)
      jax.block_until_ready(compute(x))
  return recorded


def window(directory, first_step, skip=2, length=3, profiler="xplane"):
  cfg = SimpleNamespace(profiler=profiler, skip_first_n_steps_for_profiler=skip, profiler_steps=length)
  return diagnostics.Profiler(cfg, str(directory), first_step)


def files(directory):
  return glob.glob(f"{directory}/plugins/profile/*/*.xplane.pb")


def names(path):
  """Names of the events in a profile, with repetitions."""
  planes = jax.profiler.ProfileData.from_file(path).planes
  return [event.name for plane in planes for line in plane.lines for event in line.events]


def test_a_resumed_run_records_its_own_window(tmp_path):
  with window(tmp_path, first_step=100) as profiler:
    assert steps(profiler, range(100, 108)) == [102, 103, 104]
  (path,) = files(tmp_path)
  assert names(path).count("train") == 3


def test_a_window_that_the_end_cuts_short_is_kept(tmp_path):
  with pytest.raises(KeyboardInterrupt), window(tmp_path, first_step=0, skip=0, length=100) as profiler:
    steps(profiler, range(2))
    raise KeyboardInterrupt
  (path,) = files(tmp_path)
  assert names(path).count("train") == 2


def test_without_profiler_nothing_is_recorded(tmp_path):
  with window(tmp_path, first_step=0, profiler="") as profiler:
    assert not steps(profiler, range(6))
  assert not files(tmp_path)


def test_a_profile_for_a_remote_directory_is_moved_there(tmp_path, monkeypatch):
  from etils import epath

  monkeypatch.setattr(epath, "Path", lambda path: type(tmp_path)(str(path).replace("gs://bucket", str(tmp_path))))
  with window("gs://bucket/tensorboard", first_step=0, skip=0, length=1) as profiler:
    steps(profiler, range(2))
  assert len(files(tmp_path / "tensorboard")) == 1


@pytest.mark.slow
def test_xprof_opens_a_profile(tmp_path):
  convert = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="xprof is not installed")
  with window(tmp_path, first_step=0) as profiler:
    steps(profiler, range(8))
  assert {"trace_viewer@", "overview_page"} <= set(convert.xspace_to_tool_names(files(tmp_path)))
  overview, kind = convert.xspace_to_tool_data(files(tmp_path), "overview_page", {})
  assert kind == "application/json"
  assert overview


def test_stack_traces_name_the_function_that_hangs_in_native_code_and_stop_with_the_block():
  if importlib.util.find_spec("cloud_tpu_diagnostics") is None:
    pytest.skip("cloud-tpu-diagnostics is not installed")
  done = traced("console")
  assert "in inside_native_code" in done.stderr
  assert "Thread 0x" in done.stderr  # the other threads too
  assert done.stdout.splitlines()[-1] == "alive"


def test_stack_traces_for_the_cloud_land_in_the_file_that_is_announced():
  if importlib.util.find_spec("cloud_tpu_diagnostics") is None:
    pytest.skip("cloud-tpu-diagnostics is not installed")
  done = traced("cloud")
  path = done.stdout.partition(" s to ")[2].partition(";")[0]
  with open(path, encoding="utf-8") as file:
    assert "in inside_native_code" in file.read()
  os.remove(path)


def test_stack_traces_without_their_package_are_a_config_error(monkeypatch):
  monkeypatch.setitem(sys.modules, "cloud_tpu_diagnostics", None)
  cfg = SimpleNamespace(collect_stack_trace=True)
  with pytest.raises(errors.ConfigError, match="pip install cloud-tpu-diagnostics"), diagnostics.stack_traces(cfg):
    pass
