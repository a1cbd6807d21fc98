# SPDX-License-Identifier: Apache-2.0
"""The steps of training and decoding compile for TPUs that are not there: what a CPU cannot run stays honest."""

import importlib.util
import os
import subprocess
import sys

import pytest

# Prints, for the target and keys of the command line: attention kernel, compute type, sizes of the mesh axes data and
# fsdp, bytes per device of the state and of what is donated, and whether the compiled step calls a Pallas kernel.
COMPILE = """
import math
import sys
import jax
from MaxText import pyconfig, sharding, topology, train
target, slices, *keys = sys.argv[1:]
devices = topology.topology_devices(target, int(slices))
cfg = pyconfig.load(["configs/base.yml", *keys], need_run_name=False)
cfg = pyconfig.resolve(cfg, devices)
mesh = sharding.make_mesh(cfg, devices)
with sharding.use(mesh, cfg.logical_axis_rules):
  _, state = train.abstract_state(cfg, mesh)
  compiled = train.lower_train_step(cfg, mesh).compile({"optimization_level": 9})
shard_bytes = lambda x: x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
print(cfg.attention, cfg.dtype, mesh.shape["data"], mesh.shape["fsdp"],
      sum(shard_bytes(x) for x in jax.tree.leaves(state)), compiled.memory_analysis().alias_size_in_bytes,
      "tpu_custom_call" in compiled.as_text())
"""


def run_script(script, *arguments):
  repo = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  path = os.pathsep.join([repo, os.environ.get("PYTHONPATH", "")])
  env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=repo, env=env, capture_output=True, text=True,
                        check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  assert "Involuntary full rematerialization" not in done.stderr
  return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(("target", "slices", "keys", "data", "fsdp"), [
    ("v5e-4", 1, ["remat_policy=minimal"], 1, 4),
    ("v5e-8", 2, ["remat_policy=full", "ici_tensor_parallelism=2", "gradient_accumulation_steps=2"], 2, 4),
    ("v4-8", 1, ["global_parameter_scale=1", "per_device_batch_size=4", "remat_policy=full"], 1, 4),
])  # fmt: skip
def test_the_train_step_compiles_for_tpus_with_flash_attention_and_a_donated_state(target, slices, keys, data, fsdp):
  kernel, dtype, *mesh, state_bytes, donated_bytes, pallas = run_script(
      COMPILE, target, str(slices), "head_dim=128", *keys)
  assert (kernel, dtype, pallas) == ("flash", "bfloat16", "True")
  assert [int(size) for size in mesh] == [data, fsdp]
  assert int(donated_bytes) >= 0.99 * int(state_bytes)


# Prints the attention kernel, and whether the compiled steps of decoding keep the cache in place.
DECODE = """
import sys
import jax
from MaxText import decode, model, pyconfig, sharding, topology
target, *keys = sys.argv[1:]
devices = topology.topology_devices(target, 1)
cfg = pyconfig.resolve(pyconfig.load(["configs/base.yml", *keys], need_run_name=False), devices)
cfg = cfg.replace(logical_axis_rules=[["length", []]])
mesh = sharding.make_mesh(cfg, devices)
with sharding.use(mesh, cfg.logical_axis_rules):
  graph, params = model.abstract_parameters(cfg, mesh)
  opened = decode.Opened(cfg, mesh, graph, params, None, None)
  steps = decode.Decoder(opened).compile(8, 128, 64)
donated = steps["advance"].memory_analysis().alias_size_in_bytes
cache = steps["begin"].memory_analysis().output_size_in_bytes
print(cfg.attention, donated >= cache > 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_decoding_compiles_for_tpus_with_the_cache_in_place():
  keys = ["head_dim=128", "ici_tensor_parallelism=2", "decode_sampling_strategy=nucleus", "max_target_length=256"]
  assert run_script(DECODE, "v5e-4", *keys) == ["flash", "True"]
