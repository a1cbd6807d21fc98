# SPDX-License-Identifier: Apache-2.0
"""Trains the model: devices -> mesh -> model -> state -> data -> loop.

  python3 MaxText/train.py configs/base.yml [recipe.yml ...] run_name=NAME [key=value ...]
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  CONFIG = interpreter.start()  # answers a wrong command line before jax is imported

import concurrent.futures
import functools
import math
import signal
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from MaxText import checkpoint, data, diagnostics, errors, metrics, model, optim, pyconfig, sharding

BATCH = {"inputs": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "segmentations": jnp.int32,
         "loss_weights": jnp.float32}


# --- The step: pure functions of (state, batch, hyper) -------------------------------------------------------------


def token_sums(cfg, graph, params, batch, dropout_key=None):
  """(objective, {"nll", "correct"}): sums over the batch's target tokens."""
  transformer = nnx.merge(graph, params)
  hidden_bte, layer_stats = transformer(batch["inputs"], batch["positions"], batch["segmentations"], dropout_key)
  objective, sums = model.cross_entropy(
      cfg, transformer.head(), hidden_bte, batch["targets"], batch["loss_weights"])
  return objective, sums | {"layer_stats": layer_stats}


def train_step(cfg, graph, state, batch, hyper):
  """One optimizer step: (state, metrics).

  Args:
    state: {"params", "opt_state", "step"}.
    batch: arrays [global_batch_size, max_target_length] named as in BATCH.
    hyper: the scalars of optim.hyper().
  """
  params = state["params"]
  total = jnp.maximum(jnp.sum(batch["loss_weights"]), 1.0)
  dropout_key = jax.random.fold_in(jax.random.key(cfg.init_weights_seed), state["step"])

  def mean_objective(params, batch, key):
    objective, sums = token_sums(cfg, graph, params, batch, key)
    return objective / total, sums

  gradient = jax.grad(mean_objective, has_aux=True)
  count = cfg.gradient_accumulation_steps
  if count == 1:
    grads, sums = gradient(params, batch, dropout_key)
  else:

    def micro_step(carry, micro):
      micro_batch, index = micro
      return jax.tree.map(jnp.add, carry, gradient(params, micro_batch, jax.random.fold_in(dropout_key, index))), None

    # Every count-th row, so that the rows of one micro-step are spread over all devices as those of the batch are.
    rows = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, x.shape[1]), 1, 0), batch)
    rows = jax.tree.map(lambda x: sharding.shard(x, None, "batch", "length"), rows)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(
        gradient, params, jax.tree.map(lambda x: x[0], rows), dropout_key))
    (grads, sums), _ = jax.lax.scan(micro_step, zeros, (rows, jnp.arange(count)))
    sums["layer_stats"] = jax.tree.map(lambda x: x / count, sums["layer_stats"])

  params, opt_state, step_metrics = optim.apply(cfg, grads, state["opt_state"], params, hyper)
  step_metrics |= {
      "loss": sums["nll"] / total,
      "accuracy": sums["correct"] / total,
      "total_weights": total,
      "layer_stats": sums["layer_stats"],
  }
  return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, step_metrics


def eval_step(cfg, graph, params, batch):
  """{"nll", "correct", "weights"}: sums over the batch's target tokens."""
  _, sums = token_sums(cfg, graph, params, batch)
  return {"nll": sums["nll"], "correct": sums["correct"], "weights": jnp.sum(batch["loss_weights"])}


# --- Shapes, shardings and compilation, shared with ahead-of-time compilation ---------------------------------------


def abstract_state(cfg, mesh):
  """(graph, state): the model's graph and the state's shapes, types and shardings, without allocating anything."""
  graph, shapes, axes = model.abstract(cfg)
  check_divisible(mesh, shapes, axes)

  def with_sharding(shape, axes):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, sharding.spec(*axes)))

  params = jax.tree.map(with_sharding, shapes, axes)
  replicated = NamedSharding(mesh, PartitionSpec())
  scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
  opt_state = optax.ScaleByAdamState(count=scalar, mu=params, nu=params)
  return graph, {"params": params, "opt_state": opt_state, "step": scalar}


def check_divisible(mesh, shapes, axes):
  """Raises ConfigError naming a parameter with a dimension that its mesh axes do not divide."""

  def check(path, shape, axes):
    for size, name, mesh_axes in zip(shape.shape, axes, sharding.mesh_axes(*axes), strict=True):
      if size % math.prod(mesh.shape[axis] for axis in mesh_axes):
        devices = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in mesh_axes)
        raise errors.ConfigError(
            f"parameter {jax.tree_util.keystr(path, simple=True, separator='/')} has {size} in dimension {name}, which "
            f"the mesh axes {devices} do not divide. Change the mesh, the size or logical_axis_rules.")

  jax.tree.map_with_path(check, shapes, axes)


def abstract_batch(cfg, mesh, rows):
  """Shapes, types and sharding of a batch of `rows` rows."""
  where = NamedSharding(mesh, sharding.spec("batch", "length"))
  return {name: jax.ShapeDtypeStruct((rows, cfg.max_target_length), dtype, sharding=where)
          for name, dtype in BATCH.items()}


def lower_train_step(cfg, mesh):
  """The train step lowered for `mesh`, state donated. Call within sharding.use(); compile() makes it runnable."""
  graph, state = abstract_state(cfg, mesh)
  shardings = jax.tree.map(lambda s: s.sharding, state)
  step = jax.jit(functools.partial(train_step, cfg, graph), donate_argnums=0,
                 out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())))
  return step.lower(state, abstract_batch(cfg, mesh, cfg.global_batch_size), optim.hyper(cfg, 0))


def lower_eval_step(cfg, mesh):
  """The eval step lowered for `mesh`."""
  graph, state = abstract_state(cfg, mesh)
  step = jax.jit(functools.partial(eval_step, cfg, graph), out_shardings=NamedSharding(mesh, PartitionSpec()))
  return step.lower(state["params"], abstract_batch(cfg, mesh, cfg.eval_batch_size))


def fresh_state(cfg, state, params=None):
  """A new state in the shardings of abstract `state`: random parameters (or `params`), zero moments, step 0."""

  def build(key, params):
    params = model.initialize(cfg, key) if params is None else params
    return {"params": params, "opt_state": optim.initialize(params), "step": jnp.int32(0)}

  shardings = jax.tree.map(lambda s: s.sharding, state)
  return jax.jit(build, out_shardings=shardings)(jax.random.key(cfg.init_weights_seed), params)


def parameter_table(state):
  """Lines of a table: name, shape, sharding and bytes per device of every parameter."""
  rows = [("parameter", "shape", "spec", "bytes/device")]
  total = 0
  for path, leaf in jax.tree.leaves_with_path(state["params"]):
    shard_shape = leaf.sharding.shard_shape(leaf.shape)
    size = leaf.dtype.itemsize * math.prod(shard_shape)
    total += size
    axes = ", ".join("-" if a is None else a if isinstance(a, str) else "+".join(a) for a in leaf.sharding.spec)
    rows.append((jax.tree_util.keystr(path, simple=True, separator="/"), str(leaf.shape), f"({axes})", f"{size:,}"))
  rows.append(("total", "", "", f"{total:,}"))
  widths = [max(len(row[i]) for row in rows) for i in range(4)]
  return ["  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)) + "  "
          + row[3].rjust(widths[3]) for row in rows]


# --- The run -------------------------------------------------------------------------------------------------------


class Signals:
  """SIGTERM and SIGINT: before the loop they end the process at once, in the loop after saving the current step.

  A second signal ends the process without waiting for anything.
  """

  def __init__(self):
    self.received = None
    self.in_loop = False
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self.handle)

  def handle(self, number, _frame):
    if self.received is not None:
      os._exit(128 + number)
    self.received = signal.Signals(number).name
    if not self.in_loop:
      raise errors.Stopped(f"{self.received} before the first step: nothing to save. Run the same command again.")
    print(f"{self.received}: saving the current step, then stopping. Once more stops at once.", flush=True)


def main(cfg):
  """Trains as `cfg` (a loaded, not yet resolved config) says. Raises errors.RunError for what a user can mend."""
  signals = Signals()
  if cfg.compile_topology:
    raise errors.ConfigError(f"compile_topology={cfg.compile_topology} only compiles; training runs on the devices here."
                             " Leave it out.")
  ledger = metrics.Ledger()
  if cfg.jax_cache_dir:
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cfg.jax_cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  jax.config.update("jax_default_matmul_precision", cfg.matmul_precision)
  cfg = pyconfig.resolve(cfg, jax.devices())
  mesh = sharding.make_mesh(cfg, jax.devices())
  with sharding.use(mesh, cfg.logical_axis_rules), diagnostics.stack_traces(cfg):
    return train(cfg, mesh, ledger, signals)


def in_thread(function, *args):
  """Future of function(*args): the main thread stays free to answer signals while XLA compiles."""
  executor = concurrent.futures.ThreadPoolExecutor(1)
  future = executor.submit(function, *args)
  executor.shutdown(wait=False)
  return future


def train(cfg, mesh, ledger, signals):
  """The run itself, within sharding.use(mesh, rules)."""
  chief = jax.process_index() == 0
  say = functools.partial(print, flush=True) if chief else lambda *_: None
  say(f"{cfg.num_devices} x {jax.devices()[0].device_kind}, mesh " + (
      ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "of one device"))
  for line in pyconfig.describe(cfg):
    say(line)
