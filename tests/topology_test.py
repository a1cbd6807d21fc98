# SPDX-License-Identifier: Apache-2.0
"""Platform selection, peak speeds and named targets."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from MaxText import errors, pyconfig, topology

SIZES = {  # devices and hosts of one slice
    "v4-8": (4, 1), "v4-128": (64, 16), "v4-384": (192, 48), "v4-4096": (2048, 512), "v5p-8": (4, 1),
    "v5p-2048": (1024, 256), "v5e-1": (1, 1), "v5e-4": (4, 1), "v5e-256": (256, 64), "v5litepod-256": (256, 64),
    "v6e-8": (8, 2), "tpu7x-2": (2, 1), "tpu7x-8": (8, 1), "tpu7x-128": (128, 16), "h100-8": (8, 1), "h200-1": (1, 1),
    "b200-16": (16, 2), "a100-40gb-8": (8, 1), "v5p-12288": (6144, 1536), "v4-640": (320, 80), "v7x-8": (8, 1),
    "v7-16": (16, 2), "ironwood-128": (128, 16), "v5e:16x16": (256, 64), "v4:4x4x12": (192, 48), "v4:4x8x12": (384, 96),
    "v5p:4x4x4": (64, 16), "tpu7x:2x2x1": (8, 1), "v7x:1x1x1": (2, 1),
}  # fmt: skip


def python(code, **environment):
  """Stdout of `code` in a new process that knows only `environment`."""
  keep = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
  path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
  return subprocess.run([sys.executable, "-c", code], env=keep | {"PYTHONPATH": path} | environment, check=True,
                        text=True, capture_output=True).stdout.strip()


@pytest.fixture
def machine(monkeypatch):
  """machine(*paths, plugins=...) makes these device files, and these packages, the only ones there are."""

  def make(*paths, plugins=()):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(topology.os.path, "exists", lambda path: path in paths)
    monkeypatch.setattr(topology.glob, "glob", lambda path: [p for p in paths if p.startswith(path.split("[")[0])])
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: name in plugins or None)

  return make


def test_a_laptop_uses_the_cpu(machine):
  machine()
  topology.select_platform()
  assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("path", ["/dev/accel0", "/dev/vfio/0"])
def test_nothing_is_set_on_a_tpu_vm(machine, path):
  machine(path)
  topology.select_platform()
  assert "JAX_PLATFORMS" not in os.environ


def test_a_gpu_with_its_plugin_is_used_and_without_it_a_line_says_what_to_do(machine, capsys):
  machine("/dev/nvidiactl", plugins=["jax_cuda13_plugin"])
  topology.select_platform()
  assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"
  machine("/dev/nvidiactl")
  topology.select_platform()
  assert os.environ["JAX_PLATFORMS"] == "cpu"
  assert "CUDA plugin" in capsys.readouterr().err


def test_a_hidden_gpu_is_left_alone(machine, monkeypatch):
  machine("/dev/nvidiactl", plugins=["jax_cuda12_plugin"])
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
  topology.select_platform()
  assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_given_platform_wins(machine, monkeypatch):
  machine("/dev/nvidiactl", plugins=["jax_cuda12_plugin"])
  monkeypatch.setenv("JAX_PLATFORMS", "tpu")
  topology.select_platform()
  assert os.environ["JAX_PLATFORMS"] == "tpu"


def test_the_module_does_not_import_jax():
  assert python("import sys, MaxText.topology; print('jax' in sys.modules)") == "False"


def test_peaks_are_those_of_the_data_sheets():
  assert topology.peak_flops("TPU v5 lite", "bfloat16") == 197e12
  assert topology.peak_flops("TPU v4", "bfloat16") == 275e12
  assert topology.peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
  assert topology.peak_flops("NVIDIA H200", "float8_e4m3fn") == 1978.9e12
  assert topology.peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
  for kind in topology.DEVICE_KINDS:
    assert topology.peak_flops(kind, "float32") is None


def test_a_device_kind_is_known_by_another_spelling_but_never_by_a_part_of_it():
  assert topology.peak_flops("TPU v5e", "bfloat16") == topology.peak_flops("TPU v5 lite", "bfloat16")
  assert topology.peak_flops("H100-80GB-HBM3", "bfloat16") == 989.4e12
  for kind in ("NVIDIA H200 MIG 1g.18gb", "cpu", "TPU v9", "NVIDIA GeForce RTX 4090"):
    assert topology.peak_flops(kind, "bfloat16") is None


@pytest.mark.parametrize("name", SIZES)
def test_targets_have_their_devices_and_hosts(name):
  devices, hosts = SIZES[name]
  records = topology.target(name, 2)
  assert len(records) == 2 * devices
  assert {d.process_index for d in records} == set(range(2 * hosts))
  assert [d.id for d in records] == list(range(2 * devices))
  gpu = name[0] in "ahb"
  assert {d.platform for d in records} == {"gpu" if gpu else "tpu"}
  assert {d.slice_index for d in records} == set(range(2 * hosts if gpu else 2))  # jax: what NVLink connects is a slice
  assert {d.device_kind for d in records} <= set(topology.DEVICE_KINDS)


@pytest.mark.parametrize("name, says", [
    ("v5e-255", "Sizes: 1, 4, 8"), ("v5e-512", "Sizes"), ("v4-6", "Sizes: 8, 16"), ("h100-9", "multiples of 8"),
    ("v5-256", "v5e-256"), ("v5e", "Families"), ("", "Families"), ("v5e-0", "Sizes"), ("v6-8", "Did you mean v6e-8"),
    ("v4-8200", "multiples of 128 up to 8192"), ("h100-pcie-8", "Did you mean h100-8"), ("h100:8", "h100-8"),
    ("v5e:32x32", "Nearest in chips: v5e:16x16, v5e:8x16"), ("v4:4x12x4", "Nearest in chips: v4:4x4x12"),
    ("v4:4x4x6", "v4:4x4x8"), ("v4:16x16x20", "v4:16x16x16"), ("v5e:16x", "v5e:1x1"), ("v5p:16x16", "v5p:4x8x8"),
    ("v5e:2x4x1", "v5e:2x4"),
])  # fmt: skip
def test_a_target_that_does_not_exist_is_refused_in_one_line(name, says):
  with pytest.raises(errors.ConfigError, match=says) as caught:
    topology.target(name)
  assert str(caught.value).startswith(f"compile_topology={name}")
  assert "\n" not in str(caught.value)


def test_targets_are_those_of_the_tpu_compiler():
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed")
  code = """
import json
from MaxText import topology
names = ["v4-8", "v4-384", "v5p-128", "v5e-1", "v5e-256", "v6e-8", "tpu7x-2", "tpu7x-128"]
facts = lambda ds: [len(ds), ds[0].device_kind, len({d.process_index for d in ds}), max(d.slice_index for d in ds)]
print(json.dumps([[facts(topology.target(n, 2)), facts(topology.topology_devices(n, 2))] for n in names]))
"""
  for ours, theirs in json.loads(python(code)):
    assert ours == theirs


def test_auto_values_are_those_of_the_target_and_not_of_the_machine_that_compiles():
  here = [topology.Device("cpu", "cpu", 0, 0, 0)]

  def resolve(*keys):
    keys = ["configs/base.yml", "max_target_length=2048", "base_emb_dim=512", "head_dim=128", *keys]
    return pyconfig.resolve(pyconfig.load(keys, need_run_name=False), here)

  tpu = resolve("compile_topology=v5e-256", "compile_topology_num_slices=2", "dcn_data_parallelism=2")
  assert (tpu.platform, tpu.num_devices, tpu.num_slices) == ("tpu", 512, 2)
  assert (tpu.dtype, tpu.attention) == ("bfloat16", "flash")
  gpu = resolve("compile_topology=h100-8")
  assert (gpu.platform, gpu.num_devices, gpu.dtype, gpu.attention) == ("gpu", 8, "bfloat16", "cudnn")
  cpu = resolve()
  assert (cpu.platform, cpu.dtype, cpu.attention) == ("cpu", "float32", "dot")
