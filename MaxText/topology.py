# SPDX-License-Identifier: Apache-2.0
"""Devices by name: the platform this machine has, peak speeds, and the targets a step can be compiled for."""

import difflib
import glob
import importlib.util
import math
import os
import re
import sys
from typing import NamedTuple

from MaxText import errors


def select_platform():
  """Sets JAX_PLATFORMS to what this machine has. Called before jax is imported.

  With libtpu installed (ahead-of-time compilation needs it everywhere) jax would look for a TPU on every start: seconds
  of metadata queries and four lines of warnings on a laptop. A JAX_PLATFORMS that is given wins; on a machine with TPU
  device files nothing is set.
  """
  if os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_FORCE_TPU_INIT"):
    return
  if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"):
    return
  # /proc/driver/nvidia is not asked: a container without the GPU sees it too, and "cuda" would then be an error.
  nvidia = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))
  if not nvidia or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
    os.environ["JAX_PLATFORMS"] = "cpu"
  elif _has_cuda_plugin():
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
  else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    print("note: an NVIDIA GPU is here, but jax's CUDA plugin is not: running on the CPU. DEVICE=gpu bash setup.sh"
          " installs it.", file=sys.stderr)


def _has_cuda_plugin():
  return any(importlib.util.find_spec(plugin) for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def set_environment(cfg):
  """select_platform(), or prepare_compiler() where the config names a target, and the config's flags added to those in
  the environment. Called before jax is imported.
  """
  given = os.environ.get("XLA_FLAGS", "")
  if cfg.compile_topology:
    prepare_compiler()
  else:
    select_platform()
  if os.environ.get("JAX_PLATFORMS") == "cpu" and not cfg.compile_topology and (
      "xla_backend_optimization_level" not in given):
    # LLVM's first level compiles the default step in 4.3 s, its third in 5.3, and the steps are as fast (measured).
    os.environ["XLA_FLAGS"] = f"{given} --xla_backend_optimization_level=1".strip()
  for variable, flags in (("XLA_FLAGS", cfg.xla_flags), ("LIBTPU_INIT_ARGS", cfg.libtpu_init_args)):
    if flags:
      os.environ[variable] = f"{os.environ.get(variable, '')} {flags}".strip()
      print(f"{variable}={os.environ[variable]}")


class DeviceKind(NamedTuple):
  """One jax device. What only targets to compile for need is None for the others."""

  name: str
  peak: dict  # dense FLOP/s by "bf16", "fp8", "int8"
  hbm_bytes: int
  hbm_bandwidth: float  # bytes/s
  usable_hbm_bytes: int | None = None  # what a program may take
  clock_hz: float | None = None  # of a TPU's TensorCore: turns XLA's estimated_cycles into seconds; None on GPUs
  # Bytes/s of payload. On a TPU one torus axis, both directions of its closed ring together (half of it where the ring
  # is open); on a GPU NVLink in one direction.
  link_bandwidth: float | None = None
  network_bandwidth: float | None = None  # bytes/s in one direction between TPU slices or GPU hosts


_TERA, _GIGA, _GIB = 10**12, 10**9, 2**30
_GBIT = 10**9 / 8

# By jax's device_kind, per jax device: on TPU v4 and v5p one chip (megacore), on TPU7x half a chip. NVIDIA publishes
# peaks with 2:4 sparsity; these are the dense ones.
#
# TPUs. Usable memory: the compiler's own "exceeds available HBM" for a program that is too large (libtpu 0.0.42.1).
# Clock: bf16 peak / (MXUs x their side squared x 2): 8 of 128 on v4 and v5p, 4 of 128 on v5e; 4 of 256 on v6e and a
# half TPU7x are an assumption (a large matmul's cycles there need more than 3). Link: published inter-chip bandwidth
# (v4 and v5e 50 GB/s per link and direction, the others 100, with 6 links in a 3D and 4 in a 2D torus) x 2 directions
# x 0.9 for payload, an assumption that holds for v4 and v5e. Network: the documentation's "data center network
# bandwidth", per chip, on v5e per pod of 256; v4 publishes none and is assumed to have v5p's.
#
# GPUs. Usable memory: device_memory_size in openxla/xla, xla/backends/gpu/target_config/specs: all that the driver
# gives. jax takes three quarters of it unless XLA_PYTHON_CLIENT_MEM_FRACTION says more. Link and network: DGX A100,
# H100, H200 and B200 datasheets, NVLink (half of the sum of both directions) and the compute network per GPU.
DEVICE_KINDS = {
    # https://cloud.google.com/tpu/docs/v4
    "TPU v4": DeviceKind(
        "v4", {"bf16": 275 * _TERA, "int8": 275 * _TERA}, 32 * _GIB, 1200 * _GIGA,
        int(30.75 * _GIB), 1.05e9, 90 * _GIGA, 50 * _GBIT),
    # https://cloud.google.com/tpu/docs/v5e
    "TPU v5 lite": DeviceKind(
        "v5e", {"bf16": 197 * _TERA, "int8": 393 * _TERA}, 16 * _GIB, 819 * _GIGA,
        int(15.75 * _GIB), 1.5e9, 90 * _GIGA, 6400 * _GBIT / 256),
    # https://cloud.google.com/tpu/docs/v5p (it counts 95 GiB of the 96 GiB there are); fp8 here and for v6e: the
    # comparison in https://cloud.google.com/tpu/docs/tpu7x
    "TPU v5": DeviceKind(
        "v5p", {"bf16": 459 * _TERA, "fp8": 459 * _TERA, "int8": 918 * _TERA}, 96 * _GIB, 2765 * _GIGA,
        int(95.74 * _GIB), 1.75e9, 180 * _GIGA, 50 * _GBIT),
    # https://cloud.google.com/tpu/docs/v6e
    "TPU v6 lite": DeviceKind(
        "v6e", {"bf16": 918 * _TERA, "fp8": 918 * _TERA, "int8": 1836 * _TERA}, 32 * _GIB, 1638 * _GIGA,
        int(31.25 * _GIB), 1.75e9, 180 * _GIGA, 100 * _GBIT),
    # https://cloud.google.com/tpu/docs/tpu7x, halved, links and network too: both halves of a chip share them
    "TPU7x": DeviceKind(
        "tpu7x", {"bf16": 1153.5 * _TERA, "fp8": 2307 * _TERA}, 96 * _GIB, 3690 * _GIGA,
        int(94.75 * _GIB), 2.2e9, 90 * _GIGA, 50 * _GBIT),
    # NVIDIA A100 Tensor Core GPU datasheet
    "NVIDIA A100-SXM4-40GB": DeviceKind(
        "a100-40gb", {"bf16": 312 * _TERA, "int8": 624 * _TERA}, 40 * _GIB, 1555 * _GIGA,
        42331013120, None, 300 * _GIGA, 200 * _GBIT),
    "NVIDIA A100-SXM4-80GB": DeviceKind(
        "a100", {"bf16": 312 * _TERA, "int8": 624 * _TERA}, 80 * _GIB, 2039 * _GIGA,
        85100068864, None, 300 * _GIGA, 200 * _GBIT),
    # NVIDIA H100 Tensor Core GPU architecture, table of specifications (SXM5, PCIe); H100 NVL product brief
    "NVIDIA H100 80GB HBM3": DeviceKind(
        "h100", {"bf16": 989.4 * _TERA, "fp8": 1978.9 * _TERA, "int8": 1978.9 * _TERA}, 80 * _GIB, 3350 * _GIGA,
        84942979072, None, 450 * _GIGA, 400 * _GBIT),
    "NVIDIA H100 PCIe": DeviceKind(
        "h100-pcie", {"bf16": 756 * _TERA, "fp8": 1513 * _TERA, "int8": 1513 * _TERA}, 80 * _GIB, 2000 * _GIGA),
    "NVIDIA H100 NVL": DeviceKind(
        "h100-nvl", {"bf16": 835 * _TERA, "fp8": 1671 * _TERA, "int8": 1671 * _TERA}, 94 * _GIB, 3900 * _GIGA),
    # NVIDIA H200 datasheet (the H100's tensor cores with more and faster memory)
    "NVIDIA H200": DeviceKind(
        "h200", {"bf16": 989.4 * _TERA, "fp8": 1978.9 * _TERA, "int8": 1978.9 * _TERA}, 141 * _GIB, 4800 * _GIGA,
        151397597184, None, 450 * _GIGA, 400 * _GBIT),
    # NVIDIA HGX B200 datasheet, an eighth of the board
    "NVIDIA B200": DeviceKind(
        "b200", {"bf16": 2250 * _TERA, "fp8": 4500 * _TERA, "int8": 4500 * _TERA}, 180 * _GIB, 7700 * _GIGA,
        191514411008, None, 900 * _GIGA, 400 * _GBIT),
}
_ALIASES = {"tpuv5e": "tpuv5lite", "tpuv5p": "tpuv5", "tpuv6e": "tpuv6lite", "tpuv7x": "tpu7x"}


def _plain(device_kind):
  """A device kind without what differs between driver versions: case, blanks, dashes, the maker's name."""
  plain = re.sub(r"[\s\-_]", "", device_kind.lower()).removeprefix("nvidia")
  return _ALIASES.get(plain, plain)


_BY_PLAIN_KIND = {_plain(name): row for name, row in DEVICE_KINDS.items()}


def kind(device_kind):
  """The DeviceKind of a jax device_kind ("TPU v5 lite", "NVIDIA H100 80GB HBM3", "TPU v5e"), or None where unknown."""
  return _BY_PLAIN_KIND.get(_plain(device_kind))


def peak_flops(device_kind, dtype):
  """Dense peak in FLOP/s of one jax device computing in dtype ("bfloat16", "int8", "fp8", ...), or None where unknown.

  float32 has none: what its matrix products run as depends on the precision chosen.
  """
  row = kind(device_kind)
  dtype = {"bfloat16": "bf16", "float16": "bf16"}.get(str(dtype), str(dtype))
  return row and row.peak.get("fp8" if dtype.startswith("float8") else dtype)


class Device(NamedTuple):
  """Stands for a jax device where jax is not imported."""

  platform: str
  device_kind: str
  id: int
  process_index: int
  slice_index: int


def _cubes(most):
  """Slices of up to `most` chips on a 3D torus: what there is below the cube of 4x4x4, and whole cubes A <= B <= C."""
  small = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
  return small + tuple(
      (a, b, c) for a in range(4, most, 4) if a**3 <= most for b in range(a, most // a + 1, 4)
      for c in range(b, most // (a * b) + 1, 4))


_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))


class _Tpu(NamedTuple):
  """One family: what jax calls its devices, what its users count in a name, and its slices in chips."""

  device_kind: str
  devices_per_chip: int
  counted_per_chip: int  # the number in v4-N and v5p-N counts TensorCores, in v5e-N and v6e-N chips, in tpu7x-N devices
  shapes: tuple


# The slices that exist; the compiler accepts others too (v5e:32x32). Shapes on a 3D torus: AxBxC, A <= B <= C, whole
# multiples of 4 above 4 (https://cloud.google.com/tpu/docs/types-topologies), up to the pod, on v5p up to 96 cubes
# (https://cloud.google.com/tpu/docs/v5p).
_TPUS = {
    "v4": _Tpu("TPU v4", 1, 2, _cubes(4096)),
    "v5p": _Tpu("TPU v5", 1, 2, _cubes(6144)),
    "v5e": _Tpu("TPU v5 lite", 1, 1, _SQUARES),
    "v6e": _Tpu("TPU v6 lite", 1, 1, _SQUARES),
    "tpu7x": _Tpu("TPU7x", 2, 2, ((1, 1, 1), *_cubes(9216))),
}
_NICKNAMES = {"v5litepod": "v5e", "v7x": "tpu7x", "v7": "tpu7x", "ironwood": "tpu7x"}


class _Gpu(NamedTuple):
  """What the compiler asks of a GPU that is not there, besides its DeviceKind."""

  device_kind: str
  capability: int
  cores: int
  lanes_per_core: int
  shared_memory_per_core: int
  l2_bytes: int
  clock_ghz: float


# openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb
_GPUS = {
    "a100-40gb": _Gpu("NVIDIA A100-SXM4-40GB", 8, 108, 64, 167936, 40 * 2**20, 1.41),
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167936, 40 * 2**20, 1.41),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233472, 50 * 2**20, 1.98),
    "h200": _Gpu("NVIDIA H200", 9, 132, 128, 233472, 50 * 2**20, 1.98),
    "b200": _Gpu("NVIDIA B200", 10, 148, 128, 233472, 132644864, 1.965),
}
_GPUS_PER_HOST = 8


def _written(shape):
  return "x".join(map(str, shape))


def _sizes(tpu):
  """Slices by the number in their name: of the shapes of one size that most like a cube."""
  return {math.prod(shape) * tpu.counted_per_chip: shape for shape in sorted(tpu.shapes, key=sum, reverse=True)}


def _find(name):
  """"v5e-256" -> ("v5e", (16, 16)), "v5e:16x16" too, "h100-32" -> ("h100", 32). Raises ConfigError on what is none."""
  family, separator, size = re.fullmatch(r"(.*?)(?:([-:])([0-9x]+))?", name).groups()
  family = _NICKNAMES.get(family, family)
  if family in _GPUS and separator == "-" and size.isdecimal():
    count = int(size)
    if count in (1, 2, 4) or (count and count % _GPUS_PER_HOST == 0):
      return family, count
    raise errors.ConfigError(
        f"compile_topology={name}: there is no {family} of that size. Sizes: 1, 2, 4 and multiples of "
        f"{_GPUS_PER_HOST}, the GPUs of a host.")
  if family in _TPUS and separator == ":":
    shapes = _TPUS[family].shapes
    shape = tuple(int(side or 0) for side in size.split("x"))
    if shape in shapes:
      return family, shape
    near = sorted(shapes, key=lambda s: (abs(math.prod(s) - math.prod(shape)), sum(s)))[:3]
    raise errors.ConfigError(f"compile_topology={name}: there is no {family} slice of that shape. Nearest in chips: "
                             f"{', '.join(f'{family}:{_written(s)}' for s in near)}.")
  if family in _TPUS and separator and size.isdecimal():
    sizes = _sizes(_TPUS[family])
    if int(size) in sizes:
      return family, sizes[int(size)]
    below = [n for n in sorted(sizes) if n <= 256]
    more = f" and multiples of 128 up to {max(sizes)}" if max(sizes) > 256 else ""
    raise errors.ConfigError(f"compile_topology={name}: there is no {family} of that size. Sizes: "
                             f"{', '.join(map(str, below))}{more}.")
  names = [f"{f}-{n}" for f, tpu in _TPUS.items() for n in _sizes(tpu) if n <= 512] + [f"{gpu}-8" for gpu in _GPUS]
  near = difflib.get_close_matches(name, names, 4, 0.5) or ["v4-128", "v5e-256", "v5p-128", "v6e-256", "h100-8"]
  raise errors.ConfigError(
      f"compile_topology={name}: no such target. Did you mean {', '.join(near)}? Families: "
      f"{', '.join([*_TPUS, *_GPUS])}; shapes of TPU slices as in v5e:16x16.")


def target(name, num_slices=1):
  """The devices of `num_slices` times a target, as Device records, without jax.

  A target is named as its users do ("v5e-256", "v4-128", "v7x-8"), by the chips of a slice ("v5e:16x16", "v4:4x4x12")
  or by its GPUs ("h100-8"; "h100-32" is four hosts). Each host of GPUs is a slice, as in a job that runs on them
  (openxla/xla, xla/pjrt/distributed/topology_util.cc); the devices of topology_devices() do not say so.
  Raises ConfigError naming the nearest targets, or the sizes there are.
  """
  if num_slices < 1:
    raise errors.ConfigError(f"compile_topology_num_slices={num_slices} must be at least 1.")
  family, size = _find(name)
  if family in _GPUS:
    per_host = min(size, _GPUS_PER_HOST)
    return [Device("gpu", _GPUS[family].device_kind, d, d // per_host, d // per_host) for d in range(num_slices * size)]
  tpu = _TPUS[family]
  devices, per_host = math.prod(size) * tpu.devices_per_chip, 4 * tpu.devices_per_chip
  hosts = -(-devices // per_host)
  return [
      Device("tpu", tpu.device_kind, s * devices + d, s * hosts + d // per_host, s)
      for s in range(num_slices) for d in range(devices)
  ]


def torus(name):
  """(chips along each axis of one slice, whether its ring closes): ((16, 16), (True, True)) for "v5e-256".

  On v4, v5p and tpu7x all rings close in slices of whole 4x4x4 cubes (https://cloud.google.com/tpu/docs/v5p), on v5e
  and v6e those of 16 chips. None for GPUs: the switches of a host connect each with each.
  """
  family, size = _find(name)
  if family in _GPUS:
    return None
  if len(size) == 2:
    return size, tuple(side == 16 for side in size)
  return size, (all(side % 4 == 0 for side in size),) * 3


def prepare_compiler():
  """Sets the environment for compiling for targets: no device of this machine is opened, whatever else it says.

  Called before jax is imported. jax itself gets the CPU. libtpu would ask the TPU VM it is on what it is, print what it
  does not find out, and refuse to be loaded while another process has it, be it one that trains on the TPU there.
  """
  os.environ.update({
      "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1",
      "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"})


def topology_devices(name, num_slices=1):
  """The devices of target(), as jax devices that a step can be compiled for on any machine.

  Raises ConfigError where libtpu (for TPUs) or jax's CUDA plugin (for GPUs) is not installed. It calls
  prepare_compiler(); where jax was imported before, jax keeps the platforms it has.
  """
  records = target(name, num_slices)
  family, size = _find(name)
  if family in _GPUS:
    if not _has_cuda_plugin():
      raise errors.ConfigError(f"compile_topology={name} needs jax's CUDA plugin (no GPU, no driver): "
                               'pip install "jax[cuda13]".')
    per_host = min(size, _GPUS_PER_HOST)
    # Groups of hosts that NVLink connects x hosts in each x GPUs of a host.
    shape = f"{len(records) // per_host}x1x{per_host}"
    options = {"platform": "cuda", "topology": shape, "target_config": _target_config(_GPUS[family])}
  else:
    if importlib.util.find_spec("libtpu") is None:
      raise errors.ConfigError(f'compile_topology={name} needs the TPU compiler (no TPU): pip install "jax[tpu]".')
    options = {"platform": "tpu", "topology_name": f"{family}:{_written(size)}", "num_slices": num_slices}
    if family == "v4":
      options["chip_config_name"] = "megacore"
    if math.prod(size) == 1:  # less than the host of 2x2x1 chips taken by default
      options["chips_per_host_bounds"] = (1, 1, 1)
  prepare_compiler()
  from jax.experimental import topologies

  return topologies.get_topology_desc(**options).devices


def _target_config(gpu):
  """XLA's GpuTargetConfigProto as text: the limits common to all, and what differs."""
  row = DEVICE_KINDS[gpu.device_kind]
  extension = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"  # sm_90a, sm_100a
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_memory_per_core - 1024}
  shared_memory_per_core: {gpu.shared_memory_per_core}
  core_count: {gpu.cores} fpus_per_core: {gpu.lanes_per_core} clock_rate_ghz: {gpu.clock_ghz}
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {extension} }}
  l2_cache_size: {gpu.l2_bytes} memory_bandwidth: {row.hbm_bandwidth} device_memory_size: {row.usable_hbm_bytes}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.device_kind}"
"""
