# SPDX-License-Identifier: Apache-2.0
"""Finds, for a target, the batch, rematerialization and mesh with the best estimated speed: compiles many, ranks them.

Each attempt is `train_compile.py` in a process of its own. First come fast compilations, which only say what fits, in
the order of a rough guess; then full ones of the most promising. Every report is kept under a name made of all that
shapes it, so that a plan that is run again goes on where it stopped.
"""

import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from typing import NamedTuple

from MaxText import errors, executable, metrics, pyconfig, topology

BATCHES = (0.0625, 0.125, 0.25, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
REMAT = ("full", "save_qkv_proj", "save_out_proj", "save_dot_except_mlp", "minimal", "none")  # from less memory to more
SAVED = {"full": (), "save_qkv_proj": "qkv", "save_out_proj": "qkvo", "save_dot_except_mlp": "qkvco",
         "minimal": "qkvoug", "none": "qkvcougdnn"}  # fmt: skip
TENSOR = (1, 2, 4, 8, 16)
EFFICIENCY = 0.75  # share of peak that the rough guess takes matrix products to reach
FAST_SHARE = 0.5  # of the time, for fast compilations
MEMORY_PER_PROCESS = 3.0e9  # bytes; a compilation of 30B parameters took 2.3e9


class Choice(NamedTuple):
  """One way to run the config: rows per device and micro-step, remat_policy, devices per slice along three axes."""

  batch: float
  remat: str
  data: int
  fsdp: int
  tensor: int

  def arguments(self):
    return [f"per_device_batch_size={self.batch:g}", f"remat_policy={self.remat}", f"ici_data_parallelism={self.data}",
            f"ici_fsdp_parallelism={self.fsdp}", f"ici_tensor_parallelism={self.tensor}"]

  def __str__(self):
    mesh = " x ".join(f"{axis}={n}" for axis, n in zip(("data", "fsdp", "tensor"), self[2:], strict=True) if n > 1)
    return f"batch {self.batch:g}, remat {self.remat}, {mesh or 'one device'}"


def resolve(cfg, choice):
  """cfg with `choice`, resolved for its target, or None where the two do not go together."""
  try:
    return pyconfig.resolve(cfg.replace(
        per_device_batch_size=choice.batch, remat_policy=choice.remat, ici_data_parallelism=choice.data,
        ici_fsdp_parallelism=choice.fsdp, ici_tensor_parallelism=choice.tensor), [])
  except errors.ConfigError:
    return None


def as_given(cfg):
  """The Choice that cfg, resolved, is itself."""
  sizes = dict(zip(pyconfig.MESH_AXES, cfg.ici_mesh_shape, strict=True))
  return Choice(cfg.per_device_batch_size, cfg.remat_policy, sizes["data"], sizes["fsdp"], sizes["tensor"])


def choices(cfg):
  """All Choices that `plan` asks for, the given one among them, that the target and the model allow."""
  given, found = as_given(cfg), set()
  devices = given.data * given.fsdp * given.tensor
  meshes = [(given.data, given.fsdp, given.tensor)]
  if "mesh" in cfg.plan:
    meshes += [(data, devices // (data * tensor), tensor) for tensor in TENSOR for data in (1, 2, 4, 8)
               if devices % (data * tensor) == 0]
  for mesh in meshes:
    for remat in (given.remat, *REMAT) if "remat" in cfg.plan else (given.remat,):
      for batch in (given.batch, *BATCHES) if "batch" in cfg.plan else (given.batch,):
        choice = Choice(batch, remat, *mesh)
        if choice == given or resolve(cfg, choice):
          found.add(choice)
  return given, found


def least_bytes(cfg):
  """A lower bound of the memory that one device needs for the resolved cfg: state, layer inputs, what is saved."""
  along = dict(zip(pyconfig.MESH_AXES, cfg.mesh_shape, strict=True))
  size, words = (2 if name == "bfloat16" else 4 for name in (cfg.dtype, cfg.weight_dtype))
  shards = along["fsdp"] * along["tensor"] * along["sequence"] * along["expert"] * along["stage"]
  weights = (metrics.model_flops_per_token(cfg, causal=False) - metrics.attention_flops(cfg)) / 6
  width = {"q": cfg.num_query_heads * cfg.head_dim, "c": cfg.num_query_heads * cfg.head_dim, "o": cfg.emb_dim,
           "k": cfg.num_kv_heads * cfg.head_dim, "v": cfg.num_kv_heads * cfg.head_dim, "n": cfg.emb_dim,
           "u": cfg.mlp_dim, "d": cfg.emb_dim, "g": cfg.mlp_dim * (len(cfg.mlp_activations) - 1)}  # fmt: skip
  kept = cfg.emb_dim + sum(width[name] for name in SAVED.get(cfg.remat_policy, ()))
  tokens = cfg.micro_batch_size * cfg.max_target_length / cfg.num_devices
  return 3 * words * weights / shards + size * tokens * cfg.num_decoder_layers * kept


def guess(cfg):
  """Rough tokens/s per device of the resolved cfg, to put candidates in an order; never shown.

  Matrix products at EFFICIENCY of peak; gathers and scatters of weights beside them, exchanges of activations between
  tensor shards after them, on all links of the device.
  """
  along = dict(zip(pyconfig.MESH_AXES, cfg.mesh_shape, strict=True))
  kind = topology.kind(cfg.facts[1])
  peak = kind.peak["bf16"]
  axes = len(topology.torus(cfg.compile_topology)[0]) if cfg.platform == "tpu" else 1
  links = kind.link_bandwidth * axes
  tokens = cfg.global_batch_size * cfg.max_target_length / cfg.num_devices
  compute = metrics.matmul_flops(cfg) / (EFFICIENCY * peak)
  compute += metrics.attention_flops(cfg) / 2 * tokens * 1.8 / (0.45 * peak) * (cfg.attention != "dot")
  weights = (metrics.model_flops_per_token(cfg, causal=False) - metrics.attention_flops(cfg)) / 6
  weights_bytes = 2 * weights / along["tensor"] * cfg.gradient_accumulation_steps
  gathers = 3 * weights_bytes * (along["fsdp"] > 1) + 2 * weights_bytes / along["fsdp"] * (along["data"] > 1)
  between = 8 * 2 * tokens * along["tensor"] * cfg.emb_dim * cfg.num_decoder_layers * (1 - 1 / along["tensor"])
  return tokens / (max(compute, gathers / links) + between / links)


class Plan:
  """A search: what is known of each Choice, and processes that find out more."""

  def __init__(self, cfg, argv):
    self.cfg, self.argv = cfg, argv
    self.start, self.done, self.running = time.monotonic(), 0, 0
    self.reports = {}  # (Choice, mode) -> report
    os.makedirs(cfg.plan_directory, exist_ok=True)
    self.versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")
                     if importlib.util.find_spec(name)] + [executable.fingerprints()]  # fmt: skip

  def left(self):
    """Seconds of plan_minutes that are left."""
    return 60 * self.cfg.plan_minutes - (time.monotonic() - self.start)

  def path(self, choice, mode):
    """Where the report of an attempt is kept: a name made of config, flags, versions and source."""
    ignored = pyconfig.MACHINE_KEYS - {"compile_topology", "compile_topology_num_slices", "attention", "xla_flags",
                                       "libtpu_init_args"}
    shaping = {key: value for key, value in self.cfg.given.items()
               if key not in ignored | {"run_name", "steps"} and not key.endswith(("_directory", "_dir", "_path"))}
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    text = json.dumps([shaping, flags, choice, mode, self.versions], sort_keys=True, default=str)
    return os.path.join(self.cfg.plan_directory, hashlib.sha256(text.encode()).hexdigest()[:24] + ".json")

  def attempt(self, choice, mode):
    """The report of train_compile.py for `choice`, from disk or a new process; None when there was no time left."""
    path, said = self.path(choice, mode), "known"
    if not os.path.exists(path):
      said, start = "", time.monotonic()
      command = [sys.executable, os.path.join(pyconfig.REPO, "train_compile.py"), *self.argv, *choice.arguments(),
                 f"compile_mode={mode}", f"compile_report_file={path}.{os.getpid()}", "compiled_trainstep_file="]
      try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=max(self.left(), 1), check=False)
      except subprocess.TimeoutExpired:
        return None
      if run.returncode not in (errors.DONE, errors.DOES_NOT_FIT) or not os.path.exists(f"{path}.{os.getpid()}"):
        lines = run.stderr.strip().splitlines() or ["no message"]
        self.reports[choice, mode] = {"error": f"exit code {run.returncode}: {lines[-1]}"}
        self.say(choice, mode, time.monotonic() - start)
        return self.reports[choice, mode]
      os.replace(f"{path}.{os.getpid()}", path)
      said = time.monotonic() - start
    with open(path, encoding="utf-8") as file:
      self.reports[choice, mode] = json.load(file)
    self.say(choice, mode, said)
    return self.reports[choice, mode]

  def say(self, choice, mode, took):
    """One line of progress."""
    self.done += 1
    r = self.reports[choice, mode]
    if "error" in r:
      text = r["error"]
    else:
      peak = r["memory"]["peak_bytes"]
      text = "no figure" if peak is None else f"peak {peak / 2**30:.2f} GiB"
      text += {True: "", False: ", does not fit", "unknown": ", may fit", None: ""}[r["memory"]["fits"]]
      if "estimate" in r:
        text += f", {r['estimate']['seconds']:.3f} s, MFU {r['estimate']['mfu']:.1%}"
    how = took if isinstance(took, str) else f"{took:.0f} s"
    minutes = (time.monotonic() - self.start) / 60
    print(f"[{minutes:5.1f} of {self.cfg.plan_minutes:g} min] {mode} {choice}: {text} ({how})", flush=True)

  def processes(self):
    """How many attempts run at once: plan_processes, else as many as memory and processors allow."""
    if self.cfg.plan_processes:
      return self.cfg.plan_processes
    with open("/proc/meminfo", encoding="utf-8") as file:
      available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    return max(1, min(len(os.sched_getaffinity(0)) // 2, int(available / MEMORY_PER_PROCESS)))

  def largest_that_fits(self, batches, mode, until=0.0):
    """Attempts at Choices that differ in batch alone, the largest first, up to one that fits, while time is left."""
    for choice in sorted(batches, reverse=True):
      if self.left() <= until:
        return
      r = self.attempt(choice, mode)
      if r is None or "error" in r or r["memory"]["fits"] is not False:
        return

  def fitting(self, mode):
    """{Choice: report} of attempts that fit, or may."""
    return {c: r for (c, m), r in self.reports.items() if m == mode and "matmul_flops" in r and r["memory"]["fits"]}

  def ranked(self):
    """[(tokens/s per device, Choice, report)], the fastest first, of full compilations that fit."""
    rows = [(r["estimate"]["tokens_per_second_per_device"], c, r) for c, r in self.fitting("full").items()]
    return sorted(rows, key=lambda row: row[:2], reverse=True)


def plan(cfg, argv):
  """Searches as the plan_* keys say, and prints the table of what was compiled and the command of the best.

  Args:
    argv: files and arguments that made cfg, without those about the plan.

  Raises ConfigError without a target, DoesNotFit when nothing that was tried fits.
  """
  if not cfg.compile_topology:
    raise errors.ConfigError("plan needs a target: compile_topology=v5e-256 or another.")
  cfg = pyconfig.resolve(cfg, [])
  search = Plan(cfg, argv)
  limit = topology.kind(cfg.facts[1]).usable_hbm_bytes
  given, every = choices(cfg)
  small = {c for c in every if c == given or least_bytes(resolve(cfg, c)) <= limit}
  guesses = {c: guess(resolve(cfg, c)) for c in small}
  groups = {}
  for c in small:
    groups.setdefault(c[1:], []).append(c)
  print(f"plan: {len(every)} choices, {len(small)} may fit by their sizes, in {len(groups)} groups of batches; "
        f"{search.processes()} at once, {cfg.plan_minutes:g} minutes, reports in {cfg.plan_directory}", flush=True)

  def promise(choice):
    """The guess, corrected by how often the compiler repeats products."""
    flops = search.reports[choice, "fast"]["matmul_flops"]
    return guesses[choice] * flops["expected"] / flops["compiled"]

  search.attempt(given, "full")
  with concurrent.futures.ThreadPoolExecutor(search.processes()) as pool:
    until = 60 * cfg.plan_minutes * (1 - FAST_SHARE)
    order = sorted(groups.values(), key=lambda group: -max(guesses[c] for c in group))
    list(pool.map(lambda group: search.largest_that_fits(group, "fast", until), order))
    order = sorted(search.fitting("fast"), key=promise, reverse=True)
    list(pool.map(lambda best: search.largest_that_fits([c for c in groups[best[1:]] if c <= best], "full"), order))
    # The largest batch is not always the fastest: the compiler repeats products where memory is short.
    while search.left() > 0 and (ranked := search.ranked()):
      batches = sorted(groups[ranked[0][1][1:]])
      at = batches.index(ranked[0][1])
      near = [c for c in batches[max(at - 1, 0):at + 2] if (c, "full") not in search.reports]
      list(pool.map(lambda c: search.attempt(c, "full"), near))
      if not near or search.ranked()[0] == ranked[0]:
        break

  if not search.ranked():
    raise errors.DoesNotFit(f"nothing that was tried fits {cfg.compile_topology}. More plan_minutes, or more devices.")
  print("\nrank  tokens/s/device     MFU   step s  peak GiB  choice")
  for number, (speed, c, r) in enumerate(search.ranked(), 1):
    print(f"{number:4} {speed:16,.0f} {r['estimate']['mfu']:7.1%} {r['estimate']['seconds']:8.3f} "
          f"{r['memory']['peak_bytes'] / 2**30:9.2f}  {c}{' (as given)' if c == given else ''}")
  best = search.ranked()[0][1].arguments()
  replaced = tuple(argument.split("=")[0] + "=" for argument in best)
  print("\nthe best of them, by the estimate that train_compile.py prints:")
  print(shlex.join(["python3", "train_compile.py", *(a for a in argv if not a.startswith(replaced)), *best]))
