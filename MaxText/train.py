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

import collections
import concurrent.futures
import contextlib
import functools
import math
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from MaxText import (
  checkpoint,
  data,
  diagnostics,
  errors,
  executable,
  metrics,
  model,
  optim,
  processes,
  pyconfig,
  sharding,
)

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
  seed = cfg.init_weights_seed if cfg.dropout_rate or cfg.input_dropout_rate else 0  # a constant of the compiled step
  dropout_key = jax.random.fold_in(jax.random.key(seed), state["step"])

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
  graph, params = model.abstract_parameters(cfg, mesh)
  replicated = NamedSharding(mesh, PartitionSpec())
  scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
  opt_state = optax.ScaleByAdamState(count=scalar, mu=params, nu=params)
  return graph, {"params": params, "opt_state": opt_state, "step": scalar}


def abstract_batch(cfg, mesh, rows):
  """Shapes, types and sharding of a batch of `rows` rows."""
  where = NamedSharding(mesh, sharding.spec("batch", "length"))
  return {name: jax.ShapeDtypeStruct((rows, cfg.max_target_length), dtype, sharding=where)
          for name, dtype in BATCH.items()}


def step_arguments(cfg, mesh):
  """(graph, (state, batch, hyper)): what the train step of the model is called with, without allocating anything."""
  graph, state = abstract_state(cfg, mesh)
  return graph, (state, abstract_batch(cfg, mesh, cfg.global_batch_size), optim.abstract_hyper())


def lower_train_step(cfg, mesh):
  """The train step lowered for `mesh`, state donated. Call within sharding.use(); compile() makes it runnable."""
  graph, arguments = step_arguments(cfg, mesh)
  shardings = jax.tree.map(lambda s: s.sharding, arguments[0])
  step = jax.jit(functools.partial(train_step, cfg, graph), donate_argnums=0,
                 out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())))
  return step.lower(*arguments)


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
  # Optimizing random numbers, wanted once, would take XLA's CPU compiler longer than the train step does.
  options = {"xla_backend_optimization_level": 0} if cfg.platform == "cpu" else None
  build = jax.jit(build, out_shardings=shardings, compiler_options=options)
  return build(jax.random.key(cfg.init_weights_seed), params)


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


def in_thread(function, *args):
  """Future of function(*args): while a thread compiles or reads, the main thread is free to answer signals."""
  executor = concurrent.futures.ThreadPoolExecutor(1)
  future = executor.submit(function, *args)
  executor.shutdown(wait=False)
  return future


def scalars(step_metrics):
  """{name: float} of a step's metrics, the layers' statistics one by one. Waits for the step."""
  values = jax.device_get(step_metrics)
  for name, per_layer in values.pop("layer_stats").items():
    values |= {f"activ_{name}/layer_{layer:03d}": value for layer, value in enumerate(per_layer)}
  return {name: float(value) for name, value in values.items()}


class Run:
  """A run of a resolved config on a mesh. Reading the data, compiling and restoring the state go on side by side."""

  def __init__(self, cfg, mesh, signals):
    self.cfg, self.mesh, self.signals = cfg, mesh, signals
    self.ledger = metrics.Ledger()
    self.chief = jax.process_index() == 0
    if cfg.compiled_trainstep_file:  # refused here, before anything is opened or written
      _, arguments = step_arguments(cfg, mesh)
      prepare = functools.partial(self.load, arguments, *executable.read(
          cfg.compiled_trainstep_file, cfg, mesh, arguments))
    else:
      prepare = functools.partial(self.compile, lower_train_step)
    self.checkpointer = checkpoint.Checkpointer(cfg) if cfg.enable_checkpointing else None
    opening = in_thread(functools.partial(
        data.open, cfg, process_index=jax.process_index(), process_count=jax.process_count()))
    starting, preparing = in_thread(self.start_state), in_thread(prepare)
    self.data = opening.result()
    self.say(self.data.summary)
    self.state, position = starting.result()
    if position:
      self.data.resume(position)
    if self.chief:  # not before all that could refuse this config for this run
      directory = epath.Path(cfg.run_directory)
      directory.mkdir(parents=True, exist_ok=True)
      (directory / "config.yml").write_text(pyconfig.as_yaml(cfg))
    self.done = int(self.state["step"])
    self.skipped_in_a_row = position.get("skipped_in_a_row", 0) if position else 0
    self.eval_owed = position.get("eval_owed", False) if position else False  # a signal cut the last evaluation short
    self.evaluated = -1  # the step of the last one
    with self.ledger.measure("compile"):
      self.train_step = preparing.result()
    # Behind the train step, and needed only after many of them.
    evaluates = cfg.eval_interval != -1 and self.data.evals
    self.eval_step = in_thread(self.compile, lower_eval_step) if evaluates else None
    self.tasks = None  # parameters -> {name: value} of eval_tasks, or None when a signal cut it short
    self.num_parameters = sum(x.size for x in jax.tree.leaves(self.state["params"]))
    self.say(f"parameters: {self.num_parameters:,}")
    if cfg.log_parameter_table:
      self.say("\n".join(parameter_table(self.state)))
    self.pending = collections.deque()  # (step, metrics, is_anybody_stopping) dispatched and not yet reported
    self.several = jax.process_count() > 1
    self.agreed = False  # of several processes one has received a signal, and all know of it
    # Fake CPU devices deadlock when many steps are under way; elsewhere the next is dispatched before the last is read.
    self.in_flight = 0 if cfg.platform == "cpu" else 1

  def say(self, line):
    if self.chief:
      print(line, flush=True)

  @property
  def stopping(self):
    """Whether to save and stop behind the step that was just reported: the same in all processes."""
    return self.agreed if self.several else bool(self.signals.received)

  def ask(self):
    """An array that is 1 where any process has received a signal. It goes beside a step, and waits for nobody."""
    if not self.several:
      return 0
    everywhere = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
    flags = jax.make_array_from_callback((self.mesh.size,), everywhere, lambda index: np.full(
        len(range(self.mesh.size)[index[0]]), self.signals.received is not None, np.int32))
    return jax.jit(jnp.max, out_shardings=NamedSharding(self.mesh, PartitionSpec()))(flags)

  def compile(self, lower):
    """The step that lower(cfg, mesh) gives, compiled."""
    with sharding.use(self.mesh, self.cfg.logical_axis_rules):
      return lower(self.cfg, self.mesh).compile()

  def load(self, arguments, header, payload):
    """The train step of compiled_trainstep_file, which has been checked."""
    begin, path = time.perf_counter(), self.cfg.compiled_trainstep_file
    step = executable.load(path, header, payload, self.mesh, arguments)
    self.say(f"loaded the compiled train step from {path} in {time.perf_counter() - begin:.1f} s")
    return step

  def start_state(self):
    """(state, position or None): the run's newest checkpoint, or what the config says to start from."""
    with sharding.use(self.mesh, self.cfg.logical_axis_rules):
      _, abstract = abstract_state(self.cfg, self.mesh)
      return checkpoint.start_state(self.cfg, self.checkpointer, abstract, lambda: fresh_state(self.cfg, abstract))

  def train(self):
    """Steps, evaluations and checkpoints up to cfg.steps, target_eval_loss or a signal."""
    cfg, ledger = self.cfg, self.ledger
    where = NamedSharding(self.mesh, sharding.spec("batch", "length"))
    device = self.mesh.devices.flat[0]
    with (
        contextlib.closing(self.checkpointer) if self.checkpointer else contextlib.nullcontext(),
        contextlib.closing(self.data),
        metrics.Recorder(cfg, self.num_parameters, self.mesh.size, device.device_kind, ledger=ledger,
                         done=self.done, process_index=jax.process_index()) as self.recorder,
        diagnostics.Profiler(cfg, cfg.tensorboard_directory, self.done) as profiler,
        data.batches(self.data.train, self.done, cfg.global_batch_size, where, prefetch=cfg.prefetch_batches,
                     reuse=cfg.reuse_example_batch) as batches,
    ):
      if self.done >= cfg.steps:
        self.recorder.note(f"the run has done its steps={cfg.steps}. Raise steps to go on.")
      self.signals.in_loop = True
      self.last_end = time.perf_counter()
      finished = self.done >= cfg.steps
      if self.eval_owed and (self.eval_step or self.tasks):
        with ledger.measure("eval"):
          finished = self.evaluate(where) or finished
      while not finished and not self.stopping:
        with ledger.measure("data_wait"):
          batch = next(batches, None)
        with ledger.measure("step"), profiler.step(self.done, self.state):
          if batch is None:
            self.recorder.note(f"num_epoch={cfg.num_epoch} are over: step {self.done} is the last")
          else:
            self.state, step_metrics = self.train_step(self.state, batch, optim.hyper(cfg, self.done))
            self.done += 1
            self.pending.append((self.done, step_metrics, self.ask()))
          finished = batch is None or self.done == cfg.steps
          evaluates = (self.eval_step or self.tasks) and cfg.eval_interval != -1 and self.evaluated != self.done
          self.eval_owed = bool(evaluates and (finished or self.done % cfg.eval_interval == 0))
          save_due = self.done % cfg.checkpoint_period == 0 or finished and cfg.save_checkpoint_on_completion
          self.report(0 if self.eval_owed or save_due or finished or self.stopping else self.in_flight)
          if self.stopping:  # as a step that is reported has told
            self.report(0)
        if self.eval_owed:
          with ledger.measure("eval"):
            reached = self.evaluate(where)
          save_due, finished = save_due or reached, finished or reached
        if self.checkpointer and (save_due or self.stopping):
          self.recorder.flush()
          with ledger.measure("save"):
            position = self.data.position(self.done) | {
                "skipped_in_a_row": self.skipped_in_a_row, "eval_owed": self.eval_owed}
            self.checkpointer.save(self.done, self.state, position, wait=bool(finished or self.stopping))
        self.last_end = time.perf_counter()
      if self.stopping and (self.eval_owed or not finished):
        processes.part()
        step = f"step {self.done} of {cfg.steps}"
        saved = f"saved {step}" if self.checkpointer else f"lost {step}, with enable_checkpointing=false"
        why = self.signals.received or "a signal to another process"
        raise errors.Stopped(f"{why}: {saved}. Run the same command again to go on.")

  def report(self, keep):
    """Waits for and records all dispatched steps but the `keep` newest. Raises NumericsError."""
    while len(self.pending) > keep:
      step, step_metrics, is_anybody_stopping = self.pending.popleft()
      values = scalars(step_metrics) | {"current_learning_rate": optim.learning_rate(self.cfg, step - 1)}
      self.agreed = self.agreed or bool(is_anybody_stopping)
      now = time.perf_counter()
      self.recorder.step(step, values, now - self.last_end)
      self.last_end = now
      self.skipped_in_a_row = self.skipped_in_a_row + 1 if values["skipped"] else 0
      if self.skipped_in_a_row >= self.cfg.max_skipped_steps:
        raise errors.NumericsError(
            f"max_skipped_steps={self.cfg.max_skipped_steps} steps in a row, up to step {step}, changed nothing: "
            f"the gradient norm is {values['raw_grad_norm']}. Lower learning_rate={self.cfg.learning_rate}.")

  def evaluate(self, where):
    """One evaluation; True when it reached target_eval_loss. One that a signal cuts short is owed by the next start."""
    cfg, values, reached = self.cfg, {}, False
    first, count = 0, None
    if cfg.eval_rolling:
      first, count = (-(-self.done // cfg.eval_interval) - 1) * cfg.eval_steps, cfg.eval_steps
    for name, dataset in self.data.evals.items() if self.eval_step else ():
      with self.ledger.measure("compile"):
        eval_step = self.eval_step.result()
      sums = []
      with data.batches(dataset, first, cfg.eval_batch_size, where, prefetch=cfg.prefetch_batches,
                        count=count) as batches:
        for batch in batches:
          sums.append(jax.device_get(eval_step(self.state["params"], batch)))
          if self.signals.received and not self.several:
            return False
      nll, correct, weights = (sum(float(s[key]) for s in sums) for key in ("nll", "correct", "weights"))
      found = {"loss": nll / weights, "accuracy": correct / weights, "total_weights": weights}
      values |= {f"eval/{name}/{key}": value for key, value in found.items()} if name else found
      reached = reached or not name and nll / weights <= cfg.target_eval_loss
    if self.tasks:
      found = self.tasks(self.state["params"])
      if found is None:
        return False
      values |= {f"eval/{name}": value for name, value in found.items()}
    self.eval_owed, self.evaluated = False, self.done
    self.recorder.eval(self.done, values)
    if reached:
      loss, target = values["loss"], cfg.target_eval_loss
      self.recorder.note(f"eval loss {loss:.4f} has reached target_eval_loss={target}: finished")
    return reached


def memory_errors_explained(cfg):
  """diagnostics.memory_errors_explained with the keys that make a training run smaller."""
  return diagnostics.memory_errors_explained(
      f"per_device_batch_size={cfg.per_device_batch_size} remat_policy={cfg.remat_policy} run out of device memory: "
      "lower the first, set remat_policy=full, or use more devices.")


def main(cfg):
  """Trains as `cfg` (loaded, not yet resolved) says. Raises errors.RunError for what a user can mend."""
  signals = Signals()
  cfg, mesh = sharding.start(cfg)
  with sharding.use(mesh, cfg.logical_axis_rules), diagnostics.stack_traces(cfg), memory_errors_explained(cfg):
    run = Run(cfg, mesh, signals)
    if cfg.eval_tasks:
      from MaxText import evals

      run.tasks = evals.open_tasks(cfg, mesh, model.abstract(cfg)[0], run.data.tokenizer,
                                   lambda: signals.received and not run.several)
    run.train()


if __name__ == "__main__":
  with errors.as_exit_codes():
    main(CONFIG)
