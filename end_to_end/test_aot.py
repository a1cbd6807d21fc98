# SPDX-License-Identifier: Apache-2.0
"""Claim: every published recipe, compiled ahead of time for the machines of its publication, fits.

  python3 end_to_end/test_aot.py [--table=end_to_end/results/aot.md] [--processes=2] [--only=16b]

Needs libtpu or jax's CUDA plugin and no device; 1 to 3 minutes for each line of the table on two cores. The table has
each estimate beside the figure that its authors measured, and two small models beside a bare one (bare_aot.py).
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import concurrent.futures
import importlib.util
import json
import re
import subprocess
from typing import NamedTuple

from end_to_end import runs


class Case(NamedTuple):
  """A line of a table: what is compiled, what was published of it, what its estimate must reach."""

  name: str
  command: tuple  # without compile_report_file=
  environment: dict
  published: tuple = ()  # (TFLOP/s of one chip, MFU in %)
  mfu: float = 0.0  # at least, in %
  peak: float = 100.0  # at most, in % of the usable memory


def script(name, file, target, slices, published, **least):
  """A Case that a script of configs/ compiles as its head says."""
  command = ("bash", f"configs/{file}", f"compile_topology={target}", f"compile_topology_num_slices={slices}")
  return Case(name, command, {"PROGRAM": "train_compile.py"}, published, **least)


def keys(name, *arguments, published=(), **least):
  return Case(name, (sys.executable, "train_compile.py", *arguments), {}, published, **least)


RECIPES = (
    script("MaxText 22B, 1 x v4-128", "1xv4-128.sh", "v4-128", 1, (156, 56.7)),
    script("MaxText 22B, 2 x v4-128", "2xv4-128.sh", "v4-128", 2, (152, 55.2)),
    script("MaxText 22B, 4 x v4-128", "4xv4-128.sh", "v4-128", 4, (149, 54.3)),
    script("MaxText 22B, 8 x v4-128", "8xv4-128.sh", "v4-128", 8, (146, 53.2)),
    script("MaxText 52B, 1 x v4-384", "1xv4-384.sh", "v4-384", 1, (154, 56.0)),
    script("MaxText 52B, 2 x v4-384", "2xv4-384.sh", "v4-384", 2, (162, 58.9)),
    script("MaxText 16B, 2 x v5e-256", "16b.sh", "v5e-256", 2, (114, 57.8), mfu=57.8, peak=90.0),
    script("MaxText 32B, 2 x v5e-256", "32b.sh", "v5e-256", 2, (113, 57.3)),
    keys("Pax 1B, v4-8", "configs/pax_c4_1b.yml", "compile_topology=v4-8"),
    keys("Pax 16B, v4-64", "configs/pax_c4_16b.yml", "compile_topology=v4-64", published=(117, 42.5)),
    keys("Pax 32B, v4-128", "configs/pax_c4_32b.yml", "compile_topology=v4-128", published=(116, 42.3)),
)
GPUS = (
    keys("LLaMA-2 7B, 2 x 8 H100", "configs/llama2_7b.yml", "compile_topology=h100-16", published=(510.1, 51.6)),
    keys("Rosetta 126M, 8 x 8 A100", "configs/rosetta_gpt_126m.yml", "compile_topology=a100-64",
         published=(65.0, 20.8)),
    keys("Rosetta 5B, 32 x 8 A100", "configs/rosetta_gpt_5b.yml", "compile_topology=a100-256", published=(155.2, 49.7)),
)
# What XLA does to the products of a sharded layer is a choice of flags, and so is the room for a kernel's operands.
TUNED = ("--xla_tpu_enable_windowed_einsum_for_reduce_scatter=false "
         "--xla_tpu_enable_windowed_einsum_for_all_gather=false --xla_tpu_scoped_vmem_limit_kib=65536")
SIZES = {"1b": ("1.1B, v5e-4", "v5e-4", 4, 2048, 16, 7168, 16),
         "7b": ("6.7B, v5e-16", "v5e-16", 2, 4096, 32, 11008, 32)}  # fmt: skip


def yardsticks():
  """Cases of base.yml with the SIZES, and of the bare model with the same, each without flags and with TUNED."""
  for size, (name, target, rows, E, N, M, L) in SIZES.items():
    for flags in ("", TUNED):
      tuned = ", tuned" if flags else ""
      yield keys(
          name + tuned, "configs/base.yml", f"compile_topology={target}", f"per_device_batch_size={rows}",
          f"base_emb_dim={E}", f"base_num_query_heads={N}", f"base_num_kv_heads={N}", "head_dim=128",
          f"base_mlp_dim={M}", f"base_num_decoder_layers={L}", "vocab_size=32000", "max_target_length=2048",
          "remat_policy=full", f"libtpu_init_args={flags}")  # fmt: skip
      yield Case(f"{name}{tuned}, bare", (sys.executable, "end_to_end/bare_aot.py", size), {"LIBTPU_INIT_ARGS": flags})


def compiled(place, case):
  """The report of a Case, as train_compile.py writes it. Raises Failed where it does not compile or fit."""
  path = os.path.join(place.logs, re.sub(r"\W+", "_", case.name) + ".json")
  done = subprocess.run(
      [*case.command, f"compile_report_file={path}"], cwd=runs.ROOT, env={**os.environ, **case.environment},
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
  runs.check(done.returncode == 0, f"{case.name}: exit code {done.returncode}, {done.stdout.strip()[-600:]}")
  with open(path, encoding="utf-8") as file:
    r = json.load(file)
  print(f"  {row(case, r)}", flush=True)
  return r


def row(case, r):
  """A line of a table in Markdown."""
  e, m = r["estimate"], r["memory"]
  measured = "{} | {}".format(*case.published) if case.published else " | "
  has_range = not e.get("is_roofline", True)  # no roofline, not the bare model
  spread = f" ({100 * e['mfu_low']:.0f} to {100 * e['mfu_high']:.0f})" if has_range else ""
  return (f"| {case.name} | {r['rows_per_step'] / r['devices']:g} | {m['peak_bytes'] / 2**30:.2f} "
          f"({m['peak_bytes'] / m['capacity_bytes']:.0%}) | {e['seconds']:.3f} | "
          f"{e['flops_per_second_per_device'] / 1e12:.1f} | {100 * e['mfu']:.1f}{spread} | {measured} | "
          f"{r['compile_seconds']:.0f} |")


HEAD = ("| what | rows per device | peak GiB | step, s | TFLOP/s | MFU, % | measured TFLOP/s | measured MFU, % |"
        " compiled in, s |\n|---|---|---|---|---|---|---|---|---|")


def page(cases, found):
  """results/aot.md: tables of the Cases that were compiled."""
  text = [ABOUT]
  for title, group in cases.items():
    if lines := [row(case, found[case.name]) for case in group if case.name in found]:
      versions = next(found[case.name]["versions"] for case in group if "versions" in found.get(case.name, {}))
      text += [f"## {title}", ", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
      text += ["\n".join([HEAD, *lines])]
  return "\n\n".join(text) + "\n"


ABOUT = """\
# Estimates of published runs, ahead of time

`python3 end_to_end/test_aot.py --table=end_to_end/results/aot.md` writes these tables: `train_compile.py` compiles
each recipe for the machines of its publication, none of which is there. Nothing is run, and nothing was fitted to the
measured columns, which are their authors'. MFU counts 12 L H D S for attention; its range is what the uncertainties
of the parts allow. Estimates know nothing of stragglers, input and a network that others use too: what 8 slices lose
to it they do not see. How the v5e figures are had: [v5e_high_performance.md](../../v5e_high_performance.md)."""


def claim(place, table, processes, only):
  tpu = importlib.util.find_spec("libtpu") is not None
  gpu = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
  cases = {
      "Recipes": RECIPES if tpu else (),
      "The same sizes as a bare model, on one compiler": tuple(yardsticks()) if tpu else (),
      "GPUs: rooflines, which no card reaches": GPUS if gpu else (),
  }
  wanted = [case for group in cases.values() for case in group if only.lower() in case.name.lower()]
  runs.check(wanted, "nothing to compile: libtpu and jax's CUDA plugin are not installed, or --only names nothing")
  print(HEAD)
  with concurrent.futures.ThreadPoolExecutor(processes) as pool:
    found = dict(zip((case.name for case in wanted), pool.map(lambda case: compiled(place, case), wanted), strict=True))
  if table:
    with open(table, "w", encoding="utf-8") as file:
      file.write(page(cases, found))
  for case in wanted:
    r = found[case.name]
    mfu, peak = 100 * r["estimate"]["mfu"], 100 * r["memory"]["peak_bytes"] / r["memory"]["capacity_bytes"]
    runs.check(mfu >= case.mfu and peak <= case.peak, f"{case.name}: MFU {mfu:.1f} %, peak {peak:.0f} % of memory")
    if "bare" not in case.name:
      flops = r["matmul_flops"]
      runs.check(flops["compiled"] == flops["expected"], f"{case.name}: products {flops}")
  return f"{len(found)} compiled, all fit"


if __name__ == "__main__":
  runs.judge(__file__, claim, table="", processes=2, only="")
