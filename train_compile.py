# SPDX-License-Identifier: Apache-2.0
"""Compiles the train step for devices that need not be here, and says whether it fits and how long it should take.

  python3 train_compile.py configs/base.yml [recipe.yml ...] compile_topology=v5e-256 [key=value ...]

Without compile_topology it compiles for the devices found, as train.py would.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.realpath(__file__))
  from MaxText import interpreter

  CONFIG = interpreter.start(need_run_name=False)

import importlib.metadata
import importlib.util
import json
import math
import re
import time

import jax

from MaxText import errors, executable, hlo_cost, metrics, planner, pyconfig, sharding, topology, train

# How far off each part of the estimate may be, as factors: the compiler's own cycles, the assumed 45 % of peak of the
# attention kernels, links that reach half of their published speed.
UNCERTAINTY = {"compute": (0.95, 1.15), "kernels": (0.75, 1.5), "collectives": (0.9, 2.0), "exposed": (0.0, 3.0),
               "network": (0.5, 3.0)}  # fmt: skip
FAST_PEAK = 1.2  # a full compilation needs up to so many times the memory of a fast one (16B on v5e-256: 1.12, 1.19)
MARGIN = 0.9  # what advice aims at, as a share of the memory


class OutOfMemory(Exception):
  """The compiler found no way to place the step in memory; its message."""


def compile_step(cfg, mesh):
  """(compiled, recorded config): the step of train.py for `mesh`. Call within sharding.use(). Raises OutOfMemory."""
  recorded = pyconfig.Recorded(cfg)
  lowered = train.lower_train_step(recorded, mesh)
  options = {"optimization_level": 9} if cfg.compile_mode == "fast" else None  # O0, in a form that all jax understand
  compile_it = executable.compile if cfg.compiled_trainstep_file else type(lowered).compile
  try:
    return compile_it(lowered, options), recorded
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise OutOfMemory(str(error)) from None


def out_of_memory_bytes(message):
  """(needed, capacity) in bytes that the compiler's message names, or None."""
  units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
  found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message) or re.search(
      r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm", message)
  return found and (float(found[1]) * units[found[2]], float(found[3]) * units[found[4]])


def capacity(cfg, device_kind):
  """Bytes of one device that a program may use, or None where they are unknown (CPU)."""
  kind = topology.kind(device_kind)
  if kind:
    return kind.usable_hbm_bytes
  limit = jax.devices()[0].memory_stats() if not cfg.compile_topology else None
  return limit and limit.get("bytes_limit")


def hardware(cfg, mesh):
  """hlo_cost.Hardware of the mesh, or None for devices that are not in topology's tables."""
  devices = mesh.devices.flatten().tolist()
  kind = topology.kind(devices[0].device_kind)
  peak = kind and topology.peak_flops(devices[0].device_kind, cfg.dtype)
  if not peak or not kind.link_bandwidth:
    return None
  torus = ()
  if cfg.platform == "tpu":
    where = [tuple(d.coords) for d in devices]
    if cfg.compile_topology:
      torus = tuple(zip(*topology.torus(cfg.compile_topology), strict=True))
    else:  # the devices found: whether their rings close is not asked
      torus = tuple((len({at[axis] for at in where}), False) for axis in range(len(where[0])))
    places = tuple((getattr(d, "slice_index", 0) or 0, *at) for d, at in zip(devices, where, strict=True))
  else:
    places = tuple((d.process_index,) for d in devices)
  return hlo_cost.Hardware(peak, kind.hbm_bandwidth, kind.link_bandwidth, kind.network_bandwidth, kind.clock_hz,
                           places, torus)


def state_bytes(abstract):
  """{"weights", "optimizer"}: bytes of one device, from shapes and shardings."""

  def local(tree):
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))

  return {"weights": local(abstract["params"]), "optimizer": local(abstract["opt_state"])}


def memory(cfg, state, peak, limit):
  """The memory section of a report. `peak` is None where the compiler gave up without a figure."""
  least = most = peak
  if peak and cfg.compile_mode == "fast":
    most = peak * FAST_PEAK
  fits = None if limit is None or peak is None else True if most <= limit else False if least > limit else "unknown"
  return {
      "weights_bytes": state["weights"], "optimizer_bytes": state["optimizer"],
      "activations_bytes": peak and max(peak - state["weights"] - state["optimizer"], 0),
      "peak_bytes": peak, "capacity_bytes": limit, "fits": fits,
      "spare_bytes": None if limit is None or peak is None else limit - peak,
  }


def advice(cfg, state, needed, limit):
  """Changes, the cheapest first, that make a step which needs `needed` bytes fit into `limit`."""
  fixed, lines = state["weights"] + state["optimizer"], []
  free = MARGIN * limit - fixed
  if cfg.remat_policy != "full":
    lines.append(f"remat_policy=full instead of {cfg.remat_policy}: activations are recomputed")
  if free > 0 and needed > fixed:
    rows = cfg.per_device_batch_size * free / (needed - fixed)
    shards = cfg.num_devices // math.gcd(cfg.num_devices, cfg.micro_batch_size)
    step = 1.0 if rows >= 1 else 1.0 / shards
    rows = math.floor(rows / step) * step
    if 0 < rows < cfg.per_device_batch_size:
      keep = cfg.per_device_batch_size / rows
      same = f" (gradient_accumulation_steps={cfg.gradient_accumulation_steps * round(keep)} keeps the batch)" if (
          abs(keep - round(keep)) < 1e-9) else ""
      lines.append(f"per_device_batch_size={rows:g} instead of {cfg.per_device_batch_size:g}{same}")
  if cfg.attention == "dot" and cfg.platform != "cpu":
    lines.append("a fused kernel instead of attention=dot: scores then do not stand in memory")
  if free <= 0:
    lines.append(f"more devices to shard the state over: weights and optimizer take {gib(fixed)} GiB of each "
                 f"(ici_fsdp_parallelism, ici_tensor_parallelism; mesh now {mesh_text(cfg)})")
  elif math.prod(cfg.mesh_shape[pyconfig.MESH_AXES.index(axis)] for axis in ("data", "stage")) > 1:
    lines.append("weights sharded over more devices: ici_data_parallelism=1 ici_fsdp_parallelism=-1")
  if cfg.weight_dtype == "float32" and fixed > 0.5 * limit:
    lines.append("weight_dtype=bfloat16: half of weights and optimizer, and less exact")
  return lines


def report(cfg, mesh, compiled, message, seconds):
  """What is known of the compiled step, or of the attempt that ended with the compiler's `message`, as plain data."""
  _, abstract = train.abstract_state(cfg, mesh)
  kind = mesh.devices.flat[0].device_kind
  limit, needed, state = capacity(cfg, kind), None, state_bytes(abstract)
  tokens = cfg.global_batch_size * cfg.max_target_length
  r = {
      "target": cfg.compile_topology or "the devices found", "device_kind": kind, "devices": cfg.num_devices,
      "slices": cfg.num_slices, "mesh": {a: n for a, n in zip(mesh.axis_names, mesh.devices.shape, strict=True)},
      "attention": cfg.attention, "remat_policy": cfg.remat_policy, "dtype": cfg.dtype,
      "parameters": sum(x.size for x in jax.tree.leaves(abstract["params"])),
      "rows_per_step": cfg.global_batch_size, "tokens_per_step": tokens, "compile_mode": cfg.compile_mode,
      "compile_seconds": seconds,
      "flags": {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
      "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")
                   if importlib.util.find_spec(name)},
  }  # fmt: skip
  if compiled is None:
    needed, limit = out_of_memory_bytes(message) or (None, limit)
    r["memory"] = memory(cfg, state, None, limit) | {"peak_bytes": needed, "fits": False}
    r["memory"]["spare_bytes"] = needed and limit - needed
  else:
    analysis = compiled.memory_analysis()
    needed = analysis.peak_memory_in_bytes
    if cfg.platform == "cpu":  # whose peak leaves out temporaries
      needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    r["memory"] = memory(cfg, state, needed, limit)
  r["advice"] = [] if r["memory"]["fits"] in (True, None) or not needed else advice(cfg, state, needed, limit)
  r["compiler_message"] = message
  target = hardware(cfg, mesh)
  if compiled is None or target is None:
    return r
  cost = hlo_cost.estimate(compiled.as_text(), target)
  r["matmul_flops"] = {"compiled": cost.matmul_flops, "expected": metrics.matmul_flops(cfg)}
  r["collectives"] = [call._asdict() for call in cost.exchanges]
  if cfg.compile_mode == "full":
    r["estimate"] = estimate(cfg, cost, tokens, target.peak_flops)
  return r


def estimate(cfg, cost, tokens, peak):
  """The estimate section of a report: components, range, tokens/s and MFU."""
  parts = {name: getattr(cost, name) for name in UNCERTAINTY}
  rest = cost.seconds - sum(parts.values())
  low, high = (rest + sum(parts[name] * UNCERTAINTY[name][side] for name in parts) for side in (0, 1))
  flops = metrics.model_flops_per_token(cfg, causal=False) * tokens / cfg.num_devices
  return {
      "is_roofline": cost.is_roofline, "seconds": cost.seconds, "low_seconds": low, "high_seconds": high,
      "parts_seconds": parts, "tokens_per_second": tokens / cost.seconds,
      "tokens_per_second_per_device": tokens / cost.seconds / cfg.num_devices,
      "flops_per_second_per_device": flops / cost.seconds, "mfu": flops / cost.seconds / peak,
      "mfu_low": flops / high / peak, "mfu_high": flops / low / peak, "not_counted": list(cost.unknown),
  }


# --- Text ------------------------------------------------------------------------------------------------------------


def gib(nbytes):
  return f"{nbytes / 2**30:.2f}"


def mesh_text(cfg):
  return " x ".join(f"{axis}={size}" for axis, size in zip(pyconfig.MESH_AXES, cfg.mesh_shape, strict=True)
                    if size > 1) or "one device"  # fmt: skip


def lines(cfg, r):
  """The report as text."""
  m, out = r["memory"], []
  out.append(f"{r['parameters']:,} parameters, {r['rows_per_step']:,} rows x {cfg.max_target_length} = "
             f"{r['tokens_per_step']:,} tokens a step, remat_policy={cfg.remat_policy}")
  for name, value in r["flags"].items():
    if value:
      out.append(f"{name}={value}")
  of = f" of {gib(m['capacity_bytes'])} usable" if m["capacity_bytes"] else ""
  out += ["", f"memory of one device, GiB{of}"]
  for name in ("weights", "optimizer", "activations", "peak"):
    if m[f"{name}_bytes"] is not None:
      share = f"  {m[f'{name}_bytes'] / m['capacity_bytes']:4.0%}" if m["capacity_bytes"] else ""
      out.append(f"  {name:12} {gib(m[f'{name}_bytes']):>9}{share}")
  out.append(f"verdict: {verdict(cfg, m)}")
  out += [f"  {'or' if i else 'change'}: {line}" for i, line in enumerate(r["advice"])]
  if r["compiler_message"]:
    return [*out, "", "the compiler says:", r["compiler_message"]]
  if "matmul_flops" in r:
    compiled, expected = r["matmul_flops"]["compiled"], r["matmul_flops"]["expected"]
    same = "as the sizes ask for" if compiled == expected else (
        f"{compiled / expected - 1:+.2%} against the {expected / 1e12:,.3f} that the sizes ask for")
    out += ["", f"matrix products of one device and step, no attention kernels: {compiled / 1e12:,.3f} TFLOP, {same}"]
    out += exchange_lines(r["collectives"])
  if "estimate" in r:
    out += estimate_lines(r["estimate"])
  elif cfg.compile_mode == "fast":
    out += ["", "no estimate of the time: compile_mode=fast makes a slower program than compile_mode=full does"]
  return out


def exchange_lines(collectives):
  """A table of those exchanges that take more than a thousandth of the longest one's time."""
  if not collectives:
    return []
  head = ("exchanges of one device and step", "devices", "link", "MiB", "times", "where", "overlapped", "ms each")
  row = "{:32}  {:>7}  {:7}  {:>8}  {:>7}  {:16}  {:10}  {:>7}".format
  out = ["", row(*head)]
  for c in collectives:
    if c["calls"] * c["seconds"] > 1e-3 * collectives[0]["calls"] * collectives[0]["seconds"]:
      out.append(row(
          f"  {c['kind']}", c["group"], c["link"], f"{c['nbytes'] / 2**20:.1f}", c["calls"],
          "in a loop" if c["in_loop"] else "outside of loops", "yes" if c["is_async"] else "no",
          f"{1e3 * c['seconds']:.3f}"))
  return out


def verdict(cfg, m):
  if m["fits"] is None:
    return "no limit is known for these devices"
  if m["fits"] == "unknown":
    return f"may fit: compile_mode=full needs up to {FAST_PEAK} times as much. Ask it."
  if m["fits"]:
    return f"fits, {gib(m['spare_bytes'])} GiB are left"
  by = f" by {gib(-m['spare_bytes'])} GiB" if m["spare_bytes"] is not None else ""
  return f"does not fit{by}"


def estimate_lines(e):
  names = {
      "compute": "schedule, in the compiler's own cycles", "kernels": "attention kernels, taken at 45 % of peak",
      "collectives": "collectives that run alone", "exposed": "waits for overlapped collectives",
      "network": "between slices or hosts",
  }
  if e["is_roofline"]:
    names["compute"] = "every kernel at the card's peak or its memory's speed"
    head = "roofline: no such card is faster than this, real steps are slower"
  else:
    head = "static estimate (nothing was run)"
  out = ["", f"{head}, seconds"]
  for name, text in names.items():
    if e["is_roofline"] and not e["parts_seconds"][name]:
      continue
    low, high = UNCERTAINTY[name]
    spread = "" if e["is_roofline"] else f"   x {low} to {high}"
    out.append(f"  {text:54} {e['parts_seconds'][name]:9.4f}{spread}")
  between = "" if e["is_roofline"] else f"   {e['low_seconds']:.4f} to {e['high_seconds']:.4f}"
  out.append(f"  {'step':54} {e['seconds']:9.4f}{between}")
  spread = "" if e["is_roofline"] else f" ({e['mfu_low']:.1%} to {e['mfu_high']:.1%})"
  out.append(f"predicted: {e['tokens_per_second']:,.0f} tokens/s, {e['tokens_per_second_per_device']:,.0f} per device, "
             f"{e['flops_per_second_per_device'] / 1e12:.1f} TFLOP/s per device, MFU {e['mfu']:.1%}{spread}")
  if e["not_counted"]:
    out.append(f"not counted, their time is unknown: {', '.join(e['not_counted'][:8])}")
  return out


def main(cfg):
  """Compiles as `cfg` says, prints and writes the report. Raises DoesNotFit after printing it."""
  if cfg.plan:
    planner.plan(cfg, [a for a in sys.argv[1:] if not a.startswith(("plan", "compile_report_file="))])
    return
  if cfg.compiled_trainstep_file and cfg.compile_mode == "fast":
    raise errors.ConfigError("compile_mode=fast makes a slow program: not for compiled_trainstep_file. Leave it out.")
  if cfg.compile_topology:
    jax.config.update("jax_default_matmul_precision", cfg.matmul_precision)
    cfg = pyconfig.resolve(cfg, [])
    print("\n".join(pyconfig.describe(cfg)), flush=True)
    devices = topology.topology_devices(cfg.compile_topology, cfg.compile_topology_num_slices)
    mesh = sharding.make_mesh(cfg, devices)
  else:
    cfg, mesh = sharding.start(cfg)
  compiled, message, start = None, "", time.perf_counter()
  with sharding.use(mesh, cfg.logical_axis_rules):
    try:
      compiled, recorded = compile_step(cfg, mesh)
    except OutOfMemory as error:
      message = str(error)
    seconds = time.perf_counter() - start
    r = report(cfg, mesh, compiled, message, seconds)
    print(f"compiled in {seconds:.1f} s" if compiled else f"given up after {seconds:.1f} s")
    print("\n".join(lines(cfg, r)), flush=True)
    if cfg.compile_report_file:
      with open(cfg.compile_report_file, "w", encoding="utf-8") as file:
        json.dump(r, file, indent=1)
    if r["memory"]["fits"] is False:
      raise errors.DoesNotFit(f"{r['target']}: {verdict(cfg, r['memory'])}.")
    if cfg.compiled_trainstep_file:
      _, arguments = train.step_arguments(cfg, mesh)
      executable.save(cfg.compiled_trainstep_file, compiled, executable.header(recorded, mesh, arguments))
      size = os.path.getsize(cfg.compiled_trainstep_file) / 2**20
      print(f"wrote {cfg.compiled_trainstep_file}, {size:.1f} MiB: the same config and train.py "
            f"compiled_trainstep_file={cfg.compiled_trainstep_file} start with it")


if __name__ == "__main__":
  with errors.as_exit_codes():
    main(CONFIG)
