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


def start(code, *arguments, **environment):
  """A new process that runs `code` and knows only `environment`."""
  keep = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
  path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
  return subprocess.Popen([sys.executable, "-c", code, *arguments], env=keep | {"PYTHONPATH": path} | environment,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def python(code, *arguments, **environment):
  """Its stdout."""
  process = start(code, *arguments, **environment)
  out, err = process.communicate()
  assert process.returncode == 0, err
  return out.strip()


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


def test_what_a_size_names_is_the_shape_most_like_a_cube_and_every_shape_is_sorted():
  assert topology.torus("v5p-2048") == topology.torus("v5p:8x8x16")
  assert topology.torus("v4-512") == topology.torus("v4:4x8x8")
  assert topology.target("v4:4x4x16") != topology.target("v4-384")
  with pytest.raises(errors.ConfigError, match="v4:4x4x12"):
    topology.torus("v4:12x4x4")


@pytest.mark.parametrize("name, shape, closes", [
    ("v5e-256", (16, 16), (True, True)), ("v5e-128", (8, 16), (False, True)), ("v6e-64", (8, 8), (False, False)),
    ("v4-64", (2, 4, 4), (False, False, False)), ("v4-384", (4, 4, 12), (True, True, True)),
    ("v5p:4x4x4", (4, 4, 4), (True, True, True)), ("v7x-8", (2, 2, 1), (False, False, False)),
])  # fmt: skip
def test_rings_close_in_whole_cubes_and_along_sixteen_chips(name, shape, closes):
  assert topology.torus(name) == (shape, closes)


def test_gpus_have_no_torus():
  assert topology.torus("h100-32") is None


@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-8", "v6e-4", "tpu7x-8", "a100-8", "a100-40gb-8", "h100-8",
                                  "h200-8", "b200-8"])
def test_a_target_has_every_figure_that_an_estimate_needs(name):
  device = topology.target(name)[0]
  kind = topology.kind(device.device_kind)
  assert 0.9 * kind.hbm_bytes < kind.usable_hbm_bytes <= kind.hbm_bytes
  assert kind.network_bandwidth < kind.link_bandwidth < kind.hbm_bandwidth
  assert (kind.clock_hz is None) == (device.platform == "gpu")


def test_a_torus_link_has_nine_tenths_of_the_published_bandwidth():
  for kind, published, links in (("TPU v5 lite", 400e9, 4), ("TPU v5", 1200e9, 6), ("TPU v6 lite", 800e9, 4),
                                 ("TPU7x", 1200e9 / 2, 6)):
    assert topology.kind(kind).link_bandwidth == pytest.approx(0.9 * published / links)


def test_an_unknown_device_has_no_figures():
  assert topology.kind("cpu") is None
  assert topology.kind("TPU v5e") is topology.DEVICE_KINDS["TPU v5 lite"]


@pytest.mark.parametrize("name, package", [("v5e-4", "jax[tpu]"), ("h100-8", "jax[cuda13]")])
def test_a_compiler_that_is_not_installed_is_one_line_with_the_command_that_installs_it(machine, name, package):
  machine()
  with pytest.raises(errors.ConfigError) as caught:
    topology.topology_devices(name)
  line = str(caught.value)
  assert line.startswith(f"compile_topology={name} needs") and f'pip install "{package}"' in line and "\n" not in line


ENVIRONMENT = """
import json, os, sys
from MaxText import pyconfig, topology
topology.set_environment(pyconfig.load(["configs/base.yml", *sys.argv[1:]], need_run_name=False))
print(json.dumps(dict(os.environ)))
"""


@pytest.mark.parametrize("given", [{}, {"JAX_PLATFORMS": "tpu"}, {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0"},
                                   {"TPU_WORKER_ID": "3", "TPU_ACCELERATOR_TYPE": "v5p-64", "TPU_SKIP_MDS_QUERY": "0"}])
def test_compiling_for_a_target_leaves_the_devices_of_any_machine_alone(given):
  found = json.loads(python(ENVIRONMENT, "compile_topology=v5e:2x2", **given))
  assert found["JAX_PLATFORMS"] == "cpu" and found["CUDA_VISIBLE_DEVICES"] == ""
  assert found["TPU_SKIP_MDS_QUERY"] == found["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
  assert (found["TPU_WORKER_ID"], found["TPU_ACCELERATOR_TYPE"]) == ("0", "v5litepod-4")


def test_the_quick_level_of_the_cpu_compiler_is_for_training_on_the_cpu_only():
  level = "xla_backend_optimization_level"
  flags = [json.loads(python(ENVIRONMENT, *keys, JAX_PLATFORMS="cpu")).get("XLA_FLAGS", "")
           for keys in ([], ["compile_topology=h100-8"])]
  assert level in flags[0] and level not in flags[1]


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@needs_libtpu
def test_targets_are_those_of_the_tpu_compiler():
  code = """
import json
from MaxText import topology
names = ["v4-8", "v4-384", "v4:4x8x12", "v5p-128", "v5p-12288", "v5e-1", "v5e:16x16", "v6e-8", "tpu7x-2", "v7x-128"]
facts = lambda ds: [len(ds), ds[0].device_kind, len({d.process_index for d in ds}), max(d.slice_index for d in ds)]
print(json.dumps([[facts(topology.target(n, 2)), facts(topology.topology_devices(n, 2))] for n in names]))
"""
  for ours, theirs in json.loads(python(code)):
    assert ours == theirs


@pytest.mark.slow
@needs_libtpu
def test_usable_memory_is_what_the_tpu_compiler_says_when_a_program_is_too_large():
  code = """
import jax
from MaxText import topology
for name in "v4-8", "v5p-8", "v5e-4", "v6e-4", "tpu7x-8":
  device = topology.topology_devices(name)[0]
  x = jax.ShapeDtypeStruct((2**20, 2**17), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
  try:
    jax.jit(lambda x: x + 1).lower(x).compile({"optimization_level": 9})
  except Exception as error:
    says = str(error).partition("exceeds available HBM (")[2].partition("G)")[0]
    print(device.device_kind, says, round(topology.kind(device.device_kind).usable_hbm_bytes / 2**30, 2), sep="=")
"""
  lines = python(code).splitlines()
  assert len(lines) == 5
  for line in lines:
    _, says, ours = line.split("=")
    assert float(says) == pytest.approx(float(ours), abs=0.011), line  # builds of libtpu differ by 0.01


# Compiles the train step for the target, and says how many megabytes each device needs.
STEP = """
import sys
from MaxText import pyconfig, topology
cfg = pyconfig.load(["configs/base.yml", "base_num_decoder_layers=2", "dtype=bfloat16", *sys.argv[1:]],
                    need_run_name=False)
topology.set_environment(cfg)
from MaxText import sharding, train
devices = topology.topology_devices(cfg.compile_topology, cfg.compile_topology_num_slices)
cfg = pyconfig.resolve(cfg, devices)
mesh = sharding.make_mesh(cfg, devices)
with sharding.use(mesh, cfg.logical_axis_rules):
  compiled = train.lower_train_step(cfg, mesh).compile({"optimization_level": 9})
print(cfg.num_devices, cfg.num_slices, compiled.memory_analysis().peak_memory_in_bytes // 2**20)
"""


@pytest.mark.slow
@needs_libtpu
def test_two_processes_compile_at_once_where_the_tpu_is_another_machine_and_say_nothing_on_the_way():
  misleading = {"JAX_PLATFORMS": "tpu", "TPU_WORKER_ID": "7", "TPU_SKIP_MDS_QUERY": "0"}
  both = [start(STEP, "head_dim=128", f"compile_topology={name}", **misleading) for name in ("v5e-4", "v4:2x2x1")]
  for process in both:
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    devices, slices, peak = map(int, out.split())
    assert (devices, slices) == (4, 1) and peak > 50


@pytest.mark.slow
@pytest.mark.skipif(not topology._has_cuda_plugin(), reason="jax's CUDA plugin is not installed")
@pytest.mark.parametrize("name", ["a100-8", "a100-40gb-8", "h100-8", "h100-16", "h200-8", "b200-8"])
def test_the_train_step_compiles_for_gpus_that_are_not_there(name):
  out, err = start(STEP, "head_dim=64", "attention=cudnn", f"compile_topology={name}").communicate()
  assert err == ""
  devices, slices, peak = map(int, out.split())
  assert (devices, slices) == ((16, 2) if name == "h100-16" else (8, 1)) and peak > 50


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
