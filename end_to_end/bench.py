# SPDX-License-Identifier: Apache-2.0
"""Measures the train step of a recipe: step time, tokens/s, TFLOP/s and MFU, memory, compile time, waiting for data.

  python3 end_to_end/bench.py configs/rosetta_gpt_126m.yml [key=value ...] [--steps=20] [--warmup=3] [--name=NAME]
  python3 end_to_end/bench.py --set=gpu [key=value ...]    the runs of SETS, each in a process of its own; or --set=cpu

The step is train.py's own, on batches from train.py's own reader, synthetic unless the arguments say otherwise. A
step's time is from the end of the one before to its own end: on CPU each is waited for before the next is dispatched,
elsewhere the next is dispatched first, as in training. Nothing is saved; the result is a table and a line of JSON.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import argparse
import collections
import datetime
import importlib.metadata
import itertools
import json
import math
import platform
import shlex
import statistics
import subprocess
import tempfile
import time
from typing import NamedTuple

from MaxText import errors, pyconfig, topology

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = "end_to_end/results/bench.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin",
            "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_PLATFORMS")


class Member(NamedTuple):
  """A run of a set: its arguments, more of them for a card it does not fit, and what was published for its like."""

  name: str
  arguments: str
  smaller: str = ""
  tokens_per_second: float | None = None  # per device
  tflops: float | None = None  # per device, by the count of matrix products that is not causal


_ONE_CARD = "ici_fsdp_parallelism=-1 dcn_fsdp_parallelism=1"
_126M = "configs/rosetta_gpt_126m.yml ici_data_parallelism=-1 dcn_data_parallelism=1"
_21M = ("configs/base.yml base_emb_dim=256 base_num_query_heads=4 base_num_kv_heads=4 head_dim=64 base_mlp_dim=1024 "
        "base_num_decoder_layers=4 vocab_size=32768 logits_via_embedding=false mlp_activations=[silu,linear] "
        "max_target_length=256 per_device_batch_size=4 dtype=float32")
# Published: NVIDIA Rosetta on H100 with Transformer Engine, BF16, 64 GPUs (126M) and 256 (5B, 175B). A two-layer 175B
# has no tokens/s to compare. gpt_5b and gpt_175b_2_layers need 80.8 and 68.3 GB for parameters, moments and gradients.
SETS = {
    "gpu": (
        Member("gpt_126m_dot", _126M, "", 150_692, 145.9),
        Member("gpt_126m", f"{_126M} attention=auto", "", 150_692, 145.9),
        Member("gpt_126m_32_rows", f"{_126M} attention=auto per_device_batch_size=32", "per_device_batch_size=16",
               150_692, 145.9),
        Member("llama_1b", f"configs/llama2_7b.yml {_ONE_CARD} base_emb_dim=2048 base_num_query_heads=16 "
               "base_num_kv_heads=16 base_mlp_dim=5632 base_num_decoder_layers=22 max_target_length=2048 "
               "per_device_batch_size=8 scan_layers=true"),
        Member("gpt_5b", f"configs/rosetta_gpt_5b.yml {_ONE_CARD}", "base_num_decoder_layers=12", 13_258, 432.8),
        Member("gpt_175b_2_layers", f"configs/rosetta_gpt_175b.yml {_ONE_CARD} base_num_decoder_layers=2",
               "base_num_decoder_layers=1", None, 439.2),
    ),
    # The first has the sizes of a record of MaxText 0.2.5 (21.0M parameters, bfloat16) on two quiet cores.
    "cpu": (Member("cpu_21m", _21M, "", 1_325), Member("default", "configs/base.yml")),
}


# --- One run -------------------------------------------------------------------------------------------------------


def measure(cfg, steps, warmup):
  """{figure: value} of `steps` steps of cfg (loaded, not resolved) after `warmup` others.

  Raises ConfigError, DoesNotFit, or NumericsError where a loss or a gradient is not finite.
  """
  import jax
  from jax.sharding import NamedSharding

  from MaxText import data, metrics, sharding, train

  if cfg.jax_cache_dir:
    jax.config.update("jax_compilation_cache_dir", cfg.jax_cache_dir)
  jax.config.update("jax_default_matmul_precision", cfg.matmul_precision)
  load_before = os.getloadavg()[0]
  devices = sharding.find_devices()
  cfg = pyconfig.resolve(cfg, devices)
  print("\n".join(pyconfig.describe(cfg)), flush=True)
  mesh = sharding.make_mesh(cfg, devices)
  device = mesh.devices.flat[0]
  with sharding.use(mesh, cfg.logical_axis_rules), train.memory_errors_explained(cfg):
    _, abstract = train.abstract_state(cfg, mesh)
    check_fits(abstract, device)
    begin = time.perf_counter()
    train_step = train.lower_train_step(cfg, mesh).compile()
    compile_seconds = time.perf_counter() - begin
    state = train.fresh_state(cfg, abstract)
    num_parameters = sum(x.size for x in jax.tree.leaves(state["params"]))
    dataset = data.open(cfg, process_index=jax.process_index(), process_count=jax.process_count()).train
    where = NamedSharding(mesh, sharding.spec("batch", "length"))
    in_flight = 0 if cfg.platform == "cpu" else 1
    with data.batches(dataset, 0, cfg.global_batch_size, where, prefetch=cfg.prefetch_batches,
                      reuse=cfg.reuse_example_batch) as batches:
      loss_start, _, _, state = time_steps(cfg, train_step, state, batches, range(warmup), in_flight)
      warmup_wait, warmup_cpu = batches.wait_seconds, time.process_time()
      _, loss_end, step_seconds, _ = time_steps(
          cfg, train_step, state, batches, range(warmup, warmup + steps), in_flight)
      wait_seconds, cpu_seconds = batches.wait_seconds - warmup_wait, time.process_time() - warmup_cpu

  median = statistics.median(step_seconds)
  tokens = cfg.global_batch_size * cfg.max_target_length / median
  result = {
      "platform": cfg.platform, "device_kind": device.device_kind, "num_devices": mesh.size,
      "num_hosts": jax.process_count(), "mesh": dict(mesh.shape), "dtype": cfg.dtype, "attention": cfg.attention,
      "num_vocab_tiling": cfg.num_vocab_tiling, "num_parameters": num_parameters,
      "rows_per_step": cfg.global_batch_size, "row_tokens": cfg.max_target_length,
      "warmup_steps": warmup, "steps": steps, "steps_in_flight": 1 + in_flight,
      "median_step_seconds": median, "p90_step_seconds": percentile(step_seconds, 0.9),
      "mean_step_seconds": statistics.fmean(step_seconds), "host_cpu_seconds_per_step": cpu_seconds / steps,
      "tokens_per_second": tokens, "per_device_tokens_per_second": tokens / mesh.size,
  }
  peak = topology.peak_flops(device.device_kind, cfg.dtype)
  for count, flops in (("reference", metrics.train_flops_per_token(cfg, num_parameters)),
                       ("model", metrics.model_flops_per_token(cfg, causal=False)),
                       ("causal", metrics.model_flops_per_token(cfg, causal=True))):
    speed = flops * tokens / mesh.size
    result |= {f"{count}_gflop_per_token": flops / 1e9, f"{count}_tflops_per_device": speed / 1e12,
               f"{count}_mfu": speed / peak if peak else None}
  return result | {
      "peak_device_bytes": metrics.peak_device_bytes(), "peak_host_bytes": metrics.peak_host_bytes(),
      "compile_seconds": compile_seconds, "data_wait_fraction": wait_seconds / sum(step_seconds),
      "loss_start": loss_start, "loss_end": loss_end, "load_average_start": load_before,
      "load_average_end": os.getloadavg()[0],
  }


def time_steps(cfg, train_step, state, batches, numbers, in_flight):
  """(first loss, last loss, seconds of each step, state) of the steps of these numbers, all of them waited for.

  in_flight: steps dispatched before the one waited for. Raises NumericsError.
  """
  from MaxText import optim, train

  losses, seconds, pending = [], [], collections.deque()
  end = time.perf_counter()
  for number in numbers:
    state, step_metrics = train_step(state, next(batches), optim.hyper(cfg, number))
    pending.append(step_metrics)
    while len(pending) > (0 if number == numbers[-1] else in_flight):
      values = train.scalars(pending.popleft())
      seconds.append(time.perf_counter() - end)
      end += seconds[-1]
      losses.append(values["loss"])
      if values["skipped"] or not math.isfinite(values["loss"]):
        raise errors.NumericsError(f"loss {values['loss']}, gradient norm {values['raw_grad_norm']} after "
                                   f"{numbers[0] + len(losses)} steps. Lower learning_rate={cfg.learning_rate}.")
  return losses[0], losses[-1], seconds, state


def check_fits(abstract, device):
  """Raises DoesNotFit when a device has no room for state and gradient, so that nobody waits for the compilation."""
  import jax

  def size(tree):
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))

  # Clipping by the global norm needs all of the gradient before the first update.
  needed, there = size(abstract) + size(abstract["params"]), (device.memory_stats() or {}).get("bytes_limit")
  if there and needed > there:
    raise errors.DoesNotFit(
        f"parameters, moments and gradients take {needed / 1e9:.1f} GB per device; {device.device_kind} gives "
        f"{there / 1e9:.1f} GB. Shard them further, or see XLA_PYTHON_CLIENT_MEM_FRACTION.")


def percentile(values, fraction):
  """The smallest of the values that at least `fraction` of them do not exceed."""
  return sorted(values)[math.ceil(fraction * len(values)) - 1]


def surroundings():
  """{fact: value}: date, commit ("+": and changes), machine, versions, and the environment's flags."""
  def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

  changed = git("diff", "--name-only", "HEAD", "--", "MaxText", "configs", "end_to_end/*.py")
  commit = git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
  versions = {"python": platform.python_version()}
  for package in PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      pass
  return {
      "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S"), "commit": commit or None,
      "cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
      "versions": versions, "environment": {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)},
  }


def cpu_model():
  """What the processor calls itself."""
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
  except (OSError, StopIteration):
    return platform.processor() or platform.machine()


def append(path, row):
  """Adds a line of JSON to the file at `path`, relative to the repository."""
  path = os.path.join(ROOT, path)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, "a", encoding="utf-8") as file:
    file.write(json.dumps(row) + "\n")


def table(row):
  """Lines of two columns: what was measured of one run."""
  def counted(count):
    return f"{row[f'{count}_tflops_per_device']:.3f} TFLOP/s, MFU {percent(row[f'{count}_mfu'])}"

  memory = f"{row['peak_host_bytes'] / 2**30:.2f} GiB of host memory"
  if row["peak_device_bytes"]:
    memory = f"{row['peak_device_bytes'] / 2**30:.2f} GiB on a device, {memory}"
  pairs = {
      "run": row["name"],
      "devices": f"{row['num_devices']} x {row['device_kind']}, {row['dtype']}, attention {row['attention']}",
      "parameters": f"{row['num_parameters']:,}",
      "tokens per step": f"{row['rows_per_step']} x {row['row_tokens']}",
      "step, median": f"{row['median_step_seconds']:.4f} s over {row['steps']} steps",
      "step, 90th percentile": f"{row['p90_step_seconds']:.4f} s",
      "step, CPU time of the host, mean": f"{row['host_cpu_seconds_per_step']:.4f} s",
      "tokens/s": f"{row['tokens_per_second']:,.0f}, per device {row['per_device_tokens_per_second']:,.0f}",
      "per device, 6 N + 12 L H d S (step line)": counted("reference"),
      "per device, matrix products + 12 L H d S": counted("model"),
      "per device, matrix products, causal": counted("causal"),
      "peak memory": memory,
      "compilation": f"{row['compile_seconds']:.1f} s",
      "waiting for data": percent(row["data_wait_fraction"]),
      "loss": f"{row['loss_start']:.4f} -> {row['loss_end']:.4f}",
      "machine's load": f"{row['load_average_start']:.1f} -> {row['load_average_end']:.1f} on {row['cores']} cores",
  }
  return [f"{name:<42}{value}" for name, value in pairs.items()]


def percent(fraction):
  return "-" if fraction is None else f"{fraction:.1%}"


def bench(options, arguments):
  """One run: prints its table and appends its line."""
  files = list(itertools.takewhile(lambda argument: "=" not in argument, arguments))
  with tempfile.TemporaryDirectory(prefix="maxtext-bench-") as scratch:  # a corpus that is read leaves its snapshot
    defaults = ["dataset_type=synthetic", "run_name=bench", f"base_output_directory={scratch}", "jax_cache_dir="]
    cfg = pyconfig.load([*files, *defaults, *arguments[len(files):]], need_run_name=False)
    topology.set_environment(cfg)
    figures = measure(cfg, options.steps, options.warmup)
  name = options.name or os.path.splitext(os.path.basename(files[-1] if files else "base"))[0]
  command = shlex.join(["python3", "end_to_end/bench.py", *arguments, f"--steps={options.steps}",
                        f"--warmup={options.warmup}"])
  row = {"name": name, "command": command} | surroundings() | figures
  print("\n".join(table(row)), flush=True)
  append(options.out, row)


# --- A set of runs -------------------------------------------------------------------------------------------------


def bench_set(options, arguments):
  """Every member of the set in a process of its own, then one table of them all. Returns 1 if one failed."""
  # Found by jax when a member starts; its default leaves a quarter of a card unused.
  environment = ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} if options.set == "gpu" else {}) | os.environ
  deadline = time.monotonic() + options.limit
  ends = []

  def run(name, given, member):
    left = min(deadline - time.monotonic(), options.member_limit)
    print(f"--- {name}: {given}", flush=True)
    if left <= 0:
      ends.append((name, member, f"not run: --limit={options.limit:.0f} seconds are over", None))
      return None
    with tempfile.TemporaryDirectory(prefix="maxtext-bench-") as scratch:
      out, complaints = os.path.join(scratch, "out.jsonl"), os.path.join(scratch, "stderr")
      command = [sys.executable, os.path.abspath(__file__), *given.split(), *arguments, f"--steps={options.steps}",
                 f"--warmup={options.warmup}", f"--name={name}", f"--out={out}"]
      code = None
      with open(complaints, "wb") as stderr:
        try:
          code = subprocess.run(command, cwd=ROOT, env=environment, stderr=stderr, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
          pass
      if code == 0:
        with open(out, encoding="utf-8") as file:
          row = json.load(file)
        append(options.out, row)
        ends.append((name, member, "", row))
      else:
        with open(complaints, encoding="utf-8", errors="replace") as file:
          lines = file.read().strip().splitlines() or [""]
        why = f"took more than {left:.0f} s" if code is None else f"exit code {code}: {lines[-1][:200]}"
        print(why, flush=True)
        ends.append((name, member, why, None))
    return code

  for member in SETS[options.set]:
    if run(member.name, member.arguments, member) == errors.DOES_NOT_FIT and member.smaller:
      name, _, why, _ = ends.pop()
      print(f"{name} does not fit here ({why}); with {member.smaller} instead:", flush=True)
      run(f"{name} {member.smaller}", f"{member.arguments} {member.smaller}",
          member if "layers" not in member.smaller else member._replace(tokens_per_second=None))

  print("\n".join(summary(ends)))
  return 1 if any(row is None for *_, row in ends) else None


def summary(ends):
  """Lines of a table: one for each (name, Member, why it failed, measured row or None)."""
  def number(value, form):
    return "-" if value is None else format(value, form)

  lines = [("run", "step s", "p90 s", "tok/s/device", "published", "TFLOP/s", "published", "MFU", "causal", "compile s",
            "GiB")]
  for name, member, why, row in ends:
    if row is None:
      lines.append((name, why))
      continue
    lines.append((
        name, f"{row['median_step_seconds']:.4f}", f"{row['p90_step_seconds']:.4f}",
        f"{row['per_device_tokens_per_second']:,.0f}", number(member.tokens_per_second, ",.0f"),
        f"{row['model_tflops_per_device']:.3f}", number(member.tflops, ".1f"), percent(row["model_mfu"]),
        percent(row["causal_mfu"]), f"{row['compile_seconds']:.1f}",
        f"{(row['peak_device_bytes'] or row['peak_host_bytes']) / 2**30:.2f}"))
  widths = [max(len(line[i]) for line in lines if len(line) > 2) for i in range(len(lines[0]))]
  widths[0] = max(len(line[0]) for line in lines)
  return ["", *("  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                       zip(line[1:], widths[1:], strict=False))]) for line in lines)]


def main(argv):
  """Exit code or None."""
  parser = argparse.ArgumentParser(
      prog="bench.py", allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=20, help="timed steps")
  parser.add_argument("--warmup", type=int, default=3, help="steps before them")
  parser.add_argument("--name", default="", help="what to call the run; the recipe's name otherwise")
  parser.add_argument("--out", default=RESULTS, help="file to append the results to")
  parser.add_argument("--set", choices=SETS, help="measure a set of runs; key=value arguments override all of them")
  parser.add_argument("--limit", type=float, default=480.0, help="seconds for the whole set")
  parser.add_argument("--member_limit", type=float, default=150.0, help="seconds for one run of the set")
  options, arguments = parser.parse_known_args(argv)
  if options.steps < 1 or options.warmup < 1:
    parser.error("--steps and --warmup must be at least 1")
  if unknown := [argument for argument in arguments if argument.startswith("-")]:
    parser.error(f"unknown option {unknown[0]}")
  if options.set:
    return bench_set(options, arguments)
  if not arguments:
    parser.error("name a recipe, such as configs/base.yml, or a --set")
  return bench(options, arguments)


if __name__ == "__main__":
  with errors.as_exit_codes():
    sys.exit(main(sys.argv[1:]))
