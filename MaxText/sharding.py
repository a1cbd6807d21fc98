# SPDX-License-Identifier: Apache-2.0
"""The device mesh, and where every array lives on it: logical axis names -> mesh axes, by the rules of the config."""

import contextlib
import contextvars
import math
import os
import sys

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from MaxText import errors, processes, pyconfig
from MaxText.pyconfig import MESH_AXES

_RULES = contextvars.ContextVar("logical axis rules")


def start(cfg, log=sys.stdout):
  """(cfg resolved on the devices found, mesh): sets jax up as `cfg` says; process 0 writes what was decided to `log`.

  Raises ConfigError when cfg does not fit the devices, or the platform asked for is not there.
  """
  if cfg.compile_topology:
    raise errors.ConfigError(f"compile_topology={cfg.compile_topology} is for compiling ahead of time. Leave it out: "
                             "this runs on the devices it finds.")
  if cfg.jax_cache_dir:
    jax.config.update("jax_compilation_cache_dir", cfg.jax_cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  jax.config.update("jax_default_matmul_precision", cfg.matmul_precision)
  processes.join(cfg)
  devices = find_devices()
  cfg = pyconfig.resolve(cfg, devices)
  if jax.process_index() == 0:
    print("\n".join(pyconfig.describe(cfg)), file=log, flush=True)
  return cfg, make_mesh(cfg, devices)


def find_devices():
  """jax.devices(). Raises ConfigError when the platform asked for is not there."""
  try:
    return jax.devices()
  except RuntimeError as error:
    platforms, reason = os.environ.get("JAX_PLATFORMS", ""), str(error).splitlines()[0]
    raise errors.ConfigError(
        f"JAX_PLATFORMS={platforms} finds no device: JAX_PLATFORMS=cpu runs anywhere. jax says: {reason}") from error


def make_mesh(cfg, devices):
  """The mesh of a resolved config over `devices`: hybrid (dcn x ici) when they span several slices.

  Axis types are Auto: our own constraints decide, XLA's partitioner fills in the rest.
  """
  if math.prod(cfg.dcn_mesh_shape) > 1 and len({getattr(d, "slice_index", 0) for d in devices}) > 1:
    grid = mesh_utils.create_hybrid_device_mesh(
        cfg.ici_mesh_shape, cfg.dcn_mesh_shape, devices, allow_split_physical_axes=True)
  elif math.prod(cfg.dcn_mesh_shape) > 1:  # slices emulated on devices that know of none (CPU, GPU): outermost first
    grid = np.asarray(devices).reshape(*cfg.dcn_mesh_shape, *cfg.ici_mesh_shape)
    order = [axis for pair in zip(range(6), range(6, 12), strict=True) for axis in pair]
    grid = grid.transpose(order).reshape([d * i for d, i in zip(cfg.dcn_mesh_shape, cfg.ici_mesh_shape, strict=True)])
  else:
    grid = mesh_utils.create_device_mesh(cfg.ici_mesh_shape, devices, allow_split_physical_axes=True)
  return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@contextlib.contextmanager
def use(mesh, rules):
  """Makes `mesh` and the logical axis `rules` (pairs of name and mesh axes) those that spec() and shard() obey."""
  token = _RULES.set(dict(rules))
  try:
    with jax.set_mesh(mesh):
      yield mesh
  finally:
    _RULES.reset(token)


def mesh_axes(*axes):
  """Per logical axis (None: not sharded) the tuple of mesh axes that shard it. Raises KeyError on an unknown name.

  A mesh axis can shard only one dimension of an array: it counts where it first appears.
  """
  rules, used, parts = _RULES.get(), set(), []
  for axis in axes:
    parts.append(tuple(a for a in (rules[axis] if axis is not None else ()) if a not in used))
    used.update(parts[-1])
  return parts


def spec(*axes):
  """PartitionSpec of an array with these logical axes. Raises KeyError on an unknown name."""
  return PartitionSpec(*(part or None for part in mesh_axes(*axes)))


def placed(mesh, shapes, axes):
  """`shapes`, a tree of jax.ShapeDtypeStruct, with the shardings on `mesh` of their logical `axes`.

  Raises ConfigError naming a parameter with a dimension that its mesh axes do not divide.
  """

  def place(path, shape, axes):
    for size, name, along in zip(shape.shape, axes, mesh_axes(*axes), strict=True):
      if size % math.prod(mesh.shape[axis] for axis in along):
        devices = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in along)
        raise errors.ConfigError(
            f"parameter {jax.tree_util.keystr(path, simple=True, separator='/')} has {size} in dimension {name}, which "
            f"the mesh axes {devices} do not divide. Change the mesh, the size or logical_axis_rules.")
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec(*axes)))

  return jax.tree.map_with_path(place, shapes, axes)


def shard(x, *axes):
  """Constrains activation x to the mesh by logical axis names. Raises KeyError on an unknown name."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size == 1:
    _ = spec(*axes)  # a typo fails on a laptop too
    return x
  return jax.lax.with_sharding_constraint(x, spec(*axes))


def on_cpu():
  """Whether the devices of the mesh in use are CPUs; they need not be those of this process."""
  mesh = jax.sharding.get_abstract_mesh()
  return (jax.default_backend() if mesh.empty else mesh.abstract_device.platform) == "cpu"


def weight(rngs, shape, axes, init, dtype):
  """Declares a weight: its shape, the logical axis of each dimension, and init(key, shape, dtype)."""
  assert len(shape) == len(axes), (shape, axes)
  return nnx.Param(init(rngs.params(), shape, dtype), logical_axes=axes)


def stacked(make, rngs, count):
  """`count` modules make(rngs) as one module whose weights have a leading "layers" dimension."""
  keys = jax.random.split(rngs.params(), count)
  build = nnx.vmap(lambda key: make(nnx.Rngs(params=key)), transform_metadata={nnx.PARTITION_NAME: None})
  module = build(keys)
  for _, param in nnx.iter_graph(module):
    if isinstance(param, nnx.Param):
      param.set_metadata("logical_axes", ("layers", *param.get_metadata("logical_axes")))
  return module
