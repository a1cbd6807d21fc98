# SPDX-License-Identifier: Apache-2.0
"""Devices by name: the platform this machine has, peak speeds, and the targets a step can be compiled for."""

import difflib
import glob
import importlib.util
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
  elif any(importlib.util.find_spec(plugin) for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
  else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    print("note: an NVIDIA GPU is here, but jax's CUDA plugin is not: running on the CPU. DEVICE=gpu bash setup.sh"
          " installs it.", file=sys.stderr)


def set_environment(cfg):
  """select_platform(), and the flags of the config added to those in the environment. Called before jax is imported."""
  select_platform()
  given = os.environ.get("XLA_FLAGS", "")
  if os.environ.get("JAX_PLATFORMS") == "cpu" and "xla_backend_optimization_level" not in given:
    # LLVM's first level compiles the default step in 4.3 s, its third in 5.3, and the steps are as fast (measured).
    os.environ["XLA_FLAGS"] = f"{given} --xla_backend_optimization_level=1".strip()
  for variable, flags in (("XLA_FLAGS", cfg.xla_flags), ("LIBTPU_INIT_ARGS", cfg.libtpu_init_args)):
    if flags:
      os.environ[variable] = f"{os.environ.get(variable, '')} {flags}".strip()
      print(f"{variable}={os.environ[variable]}")


class DeviceKind(NamedTuple):
  """One jax device: short name, dense peak FLOP/s by "bf16", "fp8", "int8", memory in bytes and bytes/s."""

  name: str
  peak: dict
  hbm_bytes: int
  hbm_bandwidth: float


_TERA, _GIGA, _GIB = 10**12, 10**9, 2**30

# By jax's device_kind, per jax device: on TPU v4 and v5p one chip (megacore), on TPU7x half a chip. NVIDIA publishes
# peaks with 2:4 sparsity; these are the dense ones.
DEVICE_KINDS = {
    # https://cloud.google.com/tpu/docs/v4
    "TPU v4": DeviceKind("v4", {"bf16": 275 * _TERA, "int8": 275 * _TERA}, 32 * _GIB, 1200 * _GIGA),
    # https://cloud.google.com/tpu/docs/v5e
    "TPU v5 lite": DeviceKind("v5e", {"bf16": 197 * _TERA, "int8": 393 * _TERA}, 16 * _GIB, 819 * _GIGA),
    # https://cloud.google.com/tpu/docs/v5p; fp8 here and for v6e: the comparison in https://cloud.google.com/tpu/docs/tpu7x
    "TPU v5": DeviceKind(
        "v5p", {"bf16": 459 * _TERA, "fp8": 459 * _TERA, "int8": 918 * _TERA}, 95 * _GIB, 2765 * _GIGA),
    # https://cloud.google.com/tpu/docs/v6e
    "TPU v6 lite": DeviceKind(
        "v6e", {"bf16": 918 * _TERA, "fp8": 918 * _TERA, "int8": 1836 * _TERA}, 32 * _GIB, 1638 * _GIGA),
    # https://cloud.google.com/tpu/docs/tpu7x, halved
    "TPU7x": DeviceKind("tpu7x", {"bf16": 1153.5 * _TERA, "fp8": 2307 * _TERA}, 96 * _GIB, 3690 * _GIGA),
    # NVIDIA A100 Tensor Core GPU datasheet
    "NVIDIA A100-SXM4-40GB": DeviceKind(
        "a100-40gb", {"bf16": 312 * _TERA, "int8": 624 * _TERA}, 40 * _GIB, 1555 * _GIGA),
    "NVIDIA A100-SXM4-80GB": DeviceKind("a100", {"bf16": 312 * _TERA, "int8": 624 * _TERA}, 80 * _GIB, 2039 * _GIGA),
    # NVIDIA H100 Tensor Core GPU architecture, table of specifications (SXM5, PCIe); H100 NVL product brief
    "NVIDIA H100 80GB HBM3": DeviceKind(
        "h100", {"bf16": 989.4 * _TERA, "fp8": 1978.9 * _TERA, "int8": 1978.9 * _TERA}, 80 * _GIB, 3350 * _GIGA),
    "NVIDIA H100 PCIe": DeviceKind(
        "h100-pcie", {"bf16": 756 * _TERA, "fp8": 1513 * _TERA, "int8": 1513 * _TERA}, 80 * _GIB, 2000 * _GIGA),
    "NVIDIA H100 NVL": DeviceKind(
        "h100-nvl", {"bf16": 835 * _TERA, "fp8": 1671 * _TERA, "int8": 1671 * _TERA}, 94 * _GIB, 3900 * _GIGA),
    # NVIDIA H200 datasheet (the H100's tensor cores with more and faster memory)
    "NVIDIA H200": DeviceKind(
        "h200", {"bf16": 989.4 * _TERA, "fp8": 1978.9 * _TERA, "int8": 1978.9 * _TERA}, 141 * _GIGA, 4800 * _GIGA),
    # NVIDIA HGX B200 datasheet, an eighth of the board
    "NVIDIA B200": DeviceKind(
        "b200", {"bf16": 2250 * _TERA, "fp8": 4500 * _TERA, "int8": 4500 * _TERA}, 180 * _GIGA, 7700 * _GIGA),
}
_ALIASES = {"tpuv5e": "tpuv5lite", "tpuv5p": "tpuv5", "tpuv6e": "tpuv6lite", "tpuv7x": "tpu7x"}


def _plain(kind):
  """A device kind without what differs between driver versions: case, blanks, dashes, the maker's name."""
  plain = re.sub(r"[\s\-_]", "", kind.lower()).removeprefix("nvidia")
  return _ALIASES.get(plain, plain)


_BY_PLAIN_KIND = {_plain(kind): row for kind, row in DEVICE_KINDS.items()}


def peak_flops(device_kind, dtype):
  """Dense peak in FLOP/s of one jax device computing in dtype ("bfloat16", "int8", "fp8", ...), or None where unknown.

  float32 has none: what its matrix products run as depends on the precision chosen.
  """
  row = _BY_PLAIN_KIND.get(_plain(device_kind))
  dtype = {"bfloat16": "bf16", "float16": "bf16"}.get(str(dtype), str(dtype))
  return row and row.peak.get("fp8" if dtype.startswith("float8") else dtype)


class Device(NamedTuple):
  """Stands for a jax device where jax is not imported."""

  platform: str
  device_kind: str
  id: int
  process_index: int
  slice_index: int


class _Family(NamedTuple):
  """TPUs of one kind: shapes by public name, devices per 2x2x1 host, and what the compiler calls them."""

  device_kind: str
  devices_per_chip: int
  shapes: dict
  options: dict


_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 192: "4x4x12", 256: "4x8x8",
          512: "8x8x8", 768: "8x8x12", 1024: "8x8x16", 2048: "8x16x16"}  # chips: shape
_SQUARES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
# The number in v4-N and v5p-N counts TensorCores, two per chip; in v5e-N and v6e-N chips; in tpu7x-N jax devices. The
# compiler accepts shapes that do not exist (v5e:32x32), so only these names are.
_FAMILIES = {
    "v4": _Family("TPU v4", 1, {2 * chips: shape for chips, shape in _CUBES.items()}, {"chip_config_name": "megacore"}),
    "v5p": _Family("TPU v5", 1, {2 * chips: shape for chips, shape in _CUBES.items()}, {}),
    "v5e": _Family("TPU v5 lite", 1, _SQUARES, {}),
    "v6e": _Family("TPU v6 lite", 1, _SQUARES, {}),
    "tpu7x": _Family("TPU7x", 2, {2: "1x1x1"} | {2 * chips: shape for chips, shape in _CUBES.items()}, {}),
}
_GPUS = {row.name: kind for kind, row in DEVICE_KINDS.items() if kind.startswith("NVIDIA")}
_GPUS_PER_HOST = 8


def _split(name):
  """"v5e-256" -> ("v5e", 256). Raises ConfigError on what is not a target."""
  family, _, count = name.replace("v5litepod-", "v5e-").rpartition("-")
  counts = [1, 2, 4, 8, 16, 32, 64] if family in _GPUS else []
  if family in _FAMILIES:
    counts = list(_FAMILIES[family].shapes)
  count = int(count) if count.isdecimal() else 0
  if count in counts or (family in _GPUS and count and count % _GPUS_PER_HOST == 0):
    return family, count
  if counts:
    more = f" and multiples of {_GPUS_PER_HOST}" if family in _GPUS else ""
    raise errors.ConfigError(
        f"compile_topology={name}: there is no {family} of that size. Sizes: {', '.join(map(str, counts))}{more}.")
  names = [f"{f}-{n}" for f, row in _FAMILIES.items() for n in row.shapes] + [f"{gpu}-8" for gpu in _GPUS]
  near = difflib.get_close_matches(name, names, 4, 0.5) or ["v4-128", "v5e-256", "v5p-128", "v6e-256", "h100-8"]
  raise errors.ConfigError(
      f"compile_topology={name}: no such target. Did you mean {', '.join(near)}? Families: "
      f"{', '.join([*_FAMILIES, *_GPUS])}.")


def target(name, num_slices=1):
  """The devices of `num_slices` slices of a named target ("v5e-256", "h100-8"), as Device records, without jax.

  Raises ConfigError naming the nearest targets, or the sizes there are.
  """
  if num_slices < 1:
    raise errors.ConfigError(f"compile_topology_num_slices={num_slices} must be at least 1.")
  family, count = _split(name)
  if family in _GPUS:
    platform, kind, devices, per_host = "gpu", _GPUS[family], count, _GPUS_PER_HOST
  else:
    row = _FAMILIES[family]
    chips = 1
    for side in row.shapes[count].split("x"):
      chips *= int(side)
    platform, kind, devices, per_host = "tpu", row.device_kind, chips * row.devices_per_chip, 4 * row.devices_per_chip
  hosts = -(-devices // per_host)
  return [
      Device(platform, kind, s * devices + d, s * hosts + d // per_host, s)
      for s in range(num_slices) for d in range(devices)
  ]


def topology_devices(name, num_slices=1):
  """The same as jax devices a step can be compiled for: TPU targets, from any machine with libtpu installed.

  Without a TPU it sets the environment that keeps libtpu from asking for one, and from refusing to be loaded by two
  processes at once; that works until the first use of libtpu in this process.
  """
  records = target(name, num_slices)
  family, count = _split(name)
  if family not in _FAMILIES:
    raise errors.ConfigError(f"compile_topology={name}: devices to compile for exist for TPU targets only.")
  if not glob.glob("/dev/accel[0-9]*") and not glob.glob("/dev/vfio/[0-9]*"):
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
      os.environ.setdefault(key, value)
  if importlib.util.find_spec("libtpu") is None:
    raise errors.ConfigError(f"compile_topology={name} needs the TPU compiler: pip install libtpu.")
  from jax.experimental import topologies

  row = _FAMILIES[family]
  options = dict(row.options)
  if len(records) == num_slices * row.devices_per_chip:  # one chip is less than the host of 2x2x1 taken by default
    options["chips_per_host_bounds"] = (1, 1, 1)
  description = topologies.get_topology_desc(
      platform="tpu", topology_name=f"{family}:{row.shapes[count]}", num_slices=num_slices, **options)
  return description.devices
