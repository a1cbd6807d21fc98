# SPDX-License-Identifier: Apache-2.0
"""train_compile.py: what its report says of a step, for CPUs that are here and for TPUs and GPUs that are not."""

import concurrent.futures
import importlib.util
import json
import os
import subprocess
import sys

import pytest

import train_compile
from MaxText import pyconfig, topology

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GIB = 2**30
needs_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
needs_cuda_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="jax's CUDA plugin is not installed")
SMALL = ["base_emb_dim=256", "base_num_query_heads=2", "base_num_kv_heads=1", "base_mlp_dim=512", "head_dim=128",
         "base_num_decoder_layers=3", "vocab_size=512", "max_target_length=256", "per_device_batch_size=2"]  # fmt: skip


def run(*arguments, script="train_compile.py", **environment):
  """The finished process of `python3 train_compile.py configs/base.yml arguments`, as a user types it."""
  keep = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
  command = [sys.executable, os.path.join(REPO, script), os.path.join(REPO, "configs/base.yml"), *arguments]
  return subprocess.run(command, env=keep | environment, capture_output=True, text=True, check=False)


def report(tmp_path, *arguments, code=0, **environment):
  """(JSON report, printed text) of a run that ends with `code`."""
  path = tmp_path / "report.json"
  done = run(*arguments, f"compile_report_file={path}", **environment)
  assert done.returncode == code, done.stderr[-2000:]
  assert "Traceback" not in done.stderr and "Involuntary full rematerialization" not in done.stderr
  return json.loads(path.read_text()), done.stdout


def resolved(*arguments):
  return pyconfig.resolve(pyconfig.load(["configs/base.yml", *arguments], need_run_name=False), [])


# --- The report's parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "needed", "there"), [
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (32.55G) exceeds "
     "available HBM (15.75G).", 32.55, 15.75),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.68G of 15.75G hbm. Exceeded by 1.93G.",
     17.68, 15.75),
])  # fmt: skip
def test_the_compilers_figures_are_read_from_its_message(message, needed, there):
  found = train_compile.out_of_memory_bytes(message)
  assert [x / GIB for x in found] == pytest.approx([needed, there])


def test_a_message_without_figures_gives_none():
  assert train_compile.out_of_memory_bytes("RESOURCE_EXHAUSTED: out of luck") is None


def test_advice_names_a_batch_that_fits_and_keeps_the_global_one():
  cfg = resolved("compile_topology=v5e-16", "per_device_batch_size=8", "remat_policy=full", "head_dim=128",
                 "max_target_length=256")
  state = {"weights": 1 * GIB, "optimizer": 2 * GIB}
  # 29 GiB of activations for 8 rows: 3.1 rows fit beside 3 GiB in 90 % of 15.75 GiB.
  first, *_ = train_compile.advice(cfg, state, 32 * GIB, 15.75 * GIB)
  assert first == "per_device_batch_size=3 instead of 8"
  first, *_ = train_compile.advice(cfg, state, 20 * GIB, 15.75 * GIB)
  assert first.startswith("per_device_batch_size=5 ")
  first, *_ = train_compile.advice(cfg, state, 24 * GIB, 15.75 * GIB)
  assert first == "per_device_batch_size=4 instead of 8 (gradient_accumulation_steps=2 keeps the batch)"


def test_advice_for_a_state_that_does_not_fit_is_more_devices():
  cfg = resolved("compile_topology=v5e-4", "per_device_batch_size=1", "remat_policy=minimal", "head_dim=128")
  state = {"weights": 6 * GIB, "optimizer": 12 * GIB}
  lines = train_compile.advice(cfg, state, 20 * GIB, 15.75 * GIB)
  assert lines[0].startswith("remat_policy=full instead of minimal")
  assert "more devices" in lines[1] and "18.00 GiB" in lines[1]
  assert not any("batch" in line for line in lines)


def test_a_fast_compilation_says_only_what_it_can():
  full, fast = (resolved("compile_topology=v5e-4", "head_dim=128", f"compile_mode={mode}") for mode in ("full", "fast"))
  state = {"weights": GIB, "optimizer": 2 * GIB}
  assert train_compile.memory(full, state, 15 * GIB, 15.75 * GIB)["fits"] is True
  assert train_compile.memory(fast, state, 15 * GIB, 15.75 * GIB)["fits"] == "unknown"
  assert train_compile.memory(fast, state, 13 * GIB, 15.75 * GIB)["fits"] is True
  assert train_compile.memory(fast, state, 16 * GIB, 15.75 * GIB)["fits"] is False


# --- For the devices found --------------------------------------------------------------------------------------------


def test_without_a_target_it_compiles_for_the_devices_found(tmp_path):
  r, text = report(tmp_path, *SMALL, "xla_flags=--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
  assert (r["target"], r["devices"], r["mesh"]["fsdp"]) == ("the devices found", 2, 2)
  assert r["memory"]["fits"] is None and "estimate" not in r
  assert "1,049,600 parameters" not in text and f"{r['parameters']:,} parameters" in text
  weights = r["memory"]["weights_bytes"]
  assert weights == pytest.approx(4 * r["parameters"] / 2, rel=1e-3)
  assert r["memory"]["optimizer_bytes"] == pytest.approx(2 * weights, rel=1e-3)


def test_both_ways_of_calling_it_work():
  done = run("steps=nonsense", script="MaxText/train_compile.py")
  assert (done.returncode, done.stderr.count("\n")) == (2, 1)
  assert done.stderr.startswith("ConfigError: steps=nonsense")


@pytest.mark.parametrize(("arguments", "says"), [
    (["compile_topology=v5e-255"], "compile_topology=v5e-255"),
    (["compile_topology=v5e-4", "ici_fsdp_parallelism=3"], "ici_fsdp_parallelism=3"),
    (["plan=[batch]"], "plan needs a target"),
    (["plan=[bacth]"], "Did you mean batch"),
    (["compile_mode=fast", "compiled_trainstep_file=x"], "compile_mode=fast makes a slow program"),
    (["compile_mode=quick"], "compile_mode=quick must be one of"),
])
def test_a_wrong_target_or_key_is_one_line_and_exit_code_2(arguments, says):
  done = run(*arguments, JAX_PLATFORMS="cpu")
  assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
  assert says in done.stderr


# --- For targets ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("keys", [
    ["remat_policy=full"],
    ["remat_policy=full", "block_layout=parallel", "use_qk_norm=true", "position_embedding=rope_interleaved"],
    ["remat_policy=minimal", "attention=dot", "logits_via_embedding=true"],
    ["remat_policy=save_qkv_proj", "ici_tensor_parallelism=2", "base_num_kv_heads=2", "use_iota_embed=true"],
    ["remat_policy=save_out_proj", "use_qk_norm=true", "mlp_activations=[gelu]"],
    ["remat_policy=save_dot_except_mlp", "attention=dot"],
    ["remat_policy=names", "remat_names=[mlp_up,mlp_gate]", "query_scaling=per_dim", "gradient_accumulation_steps=2"],
    ["remat_policy=none", "scan_layers=false"],
], ids=" ".join)  # fmt: skip
def test_the_products_in_the_compiled_step_are_exactly_those_that_the_sizes_ask_for(tmp_path, keys):
  r, text = report(tmp_path, "compile_topology=v5e-4", "compile_mode=fast", *SMALL, *keys)
  assert r["matmul_flops"]["compiled"] == r["matmul_flops"]["expected"] > 0
  assert "estimate" not in r and "compile_mode=fast makes a slower program" in text


@pytest.mark.slow
@needs_tpu_compiler
def test_a_step_that_does_not_fit_says_by_how_much_and_what_to_change(tmp_path):
  keys = ["global_parameter_scale=1", "per_device_batch_size=48", "compile_mode=fast"]
  r, text = report(tmp_path, "compile_topology=v5e-4", *keys, code=6)
  assert r["memory"]["fits"] is False and r["memory"]["peak_bytes"] > r["memory"]["capacity_bytes"] == 15.75 * GIB
  assert f"does not fit by {-r['memory']['spare_bytes'] / GIB:.2f} GiB" in text
  assert "RESOURCE_EXHAUSTED" in text[text.index("the compiler says:"):]
  change = next(line for line in r["advice"] if line.startswith("per_device_batch_size="))
  keys[1] = change.split()[0]
  assert report(tmp_path, "compile_topology=v5e-4", *keys)[0]["memory"]["fits"] in (True, "unknown")


@pytest.mark.slow
@needs_tpu_compiler
def test_a_full_report_has_an_estimate_with_its_parts(tmp_path):
  r, text = report(tmp_path, "compile_topology=v5e-4", "compile_topology_num_slices=2", *SMALL, "remat_policy=full")
  e = r["estimate"]
  assert sum(e["parts_seconds"].values()) == pytest.approx(e["seconds"], rel=1e-6)
  assert 0 < e["low_seconds"] < e["seconds"] < e["high_seconds"]
  assert e["parts_seconds"]["compute"] > 0 and e["parts_seconds"]["kernels"] > 0
  assert e["not_counted"] == []
  assert e["tokens_per_second"] == pytest.approx(r["tokens_per_step"] / e["seconds"])
  assert {c["link"] for c in r["collectives"]} == {"ici", "network"}
  assert "static estimate (nothing was run)" in text and "fits" in text


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(("length", "mesh"), [(2048, "ici_tensor_parallelism=1"), (8192, "ici_tensor_parallelism=2")])
def test_splash_attention_compiles_in_scan_remat_fsdp_and_tensor_parallelism(tmp_path, length, mesh):
  keys = [*SMALL, f"max_target_length={length}", "base_num_kv_heads=2", "remat_policy=full", mesh, "compile_mode=fast"]
  r, _ = report(tmp_path, "compile_topology=v5e-4", *keys)
  assert r["attention"] == "flash" and r["memory"]["fits"] is True
  # No scores stand in memory: in float32 those of two rows and a device's heads would take this much.
  assert r["memory"]["activations_bytes"] < 4 * length * length * 2 * 2 / r["mesh"]["tensor"]


@pytest.mark.slow
@needs_tpu_compiler
def test_two_of_them_run_at_once_and_leave_what_the_environment_names_alone(tmp_path):
  def one(number):
    (tmp_path / str(number)).mkdir()
    return report(tmp_path / str(number), "compile_topology=v5e-4", "compile_mode=fast", *SMALL,
                  JAX_PLATFORMS="tpu", TPU_ACCELERATOR_TYPE="v4-8")[0]

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first, second = pool.map(one, range(2))
  assert first["devices"] == second["devices"] == 4
  assert first["memory"] == second["memory"]


# Prints how many parameters there are, and the names of those that 256-way fsdp does not shard as the rules say.
SHARDINGS = """
import math
import jax
from MaxText import model, pyconfig, sharding, topology
devices = topology.topology_devices("v5e-256")
cfg = pyconfig.load(["configs/maxtext_16b.yml", "dcn_data_parallelism=1"], need_run_name=False)
cfg = pyconfig.resolve(cfg, devices)
mesh = sharding.make_mesh(cfg, devices)
with sharding.use(mesh, cfg.logical_axis_rules):
  _, params = model.abstract_parameters(cfg, mesh)
leaves = jax.tree.leaves_with_path(params)
wrong = [jax.tree_util.keystr(path) for path, x in leaves
         if math.prod(x.sharding.shard_shape(x.shape)) * 256 != x.size]
print(len(leaves), *wrong)
"""


@needs_tpu_compiler
def test_256_way_fsdp_shards_every_parameter_but_those_of_a_single_head():
  keep = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
  keep["PYTHONPATH"] = os.pathsep.join([REPO, keep.get("PYTHONPATH", "")])
  code = "from MaxText import topology\ntopology.prepare_compiler()\n" + SHARDINGS
  done = subprocess.run([sys.executable, "-c", code], env=keep, cwd=REPO, capture_output=True, text=True, check=True)
  count, *wrong = done.stdout.split()
  assert int(count) == 11
  assert sorted(wrong) == ["['layers']['attention']['key_norm']['scale_e']",
                           "['layers']['attention']['query_norm']['scale_e']"]  # head_dim is never sharded


@pytest.mark.slow
@needs_cuda_plugin
@pytest.mark.parametrize("target", ["h100-8", "a100-16"])
def test_a_gpu_target_gets_a_roofline_and_a_verdict(tmp_path, target):
  r, text = report(tmp_path, f"compile_topology={target}", *SMALL, "remat_policy=full", "head_dim=64")
  e = r["estimate"]
  assert r["attention"] == "cudnn" and r["devices"] == int(target.split("-")[1])
  assert e["is_roofline"] and e["seconds"] > 0 and "roofline" in text and "fits" in text
  assert r["matmul_flops"]["compiled"] == r["matmul_flops"]["expected"]
  assert r["memory"]["capacity_bytes"] == topology.kind(r["device_kind"]).usable_hbm_bytes
