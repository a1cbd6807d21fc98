# SPDX-License-Identifier: Apache-2.0
"""A yardstick for estimates: the plainest gated transformer with flash attention, compiled for a target.

  [LIBTPU_INIT_ARGS=...] python3 end_to_end/bare_aot.py 1b|7b [compile_report_file=FILE]

Nothing of MaxText's model, step or sharding is in it; test_aot.py sets it beside ours.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter, topology

  interpreter.ensure()
  topology.prepare_compiler()

import functools
import json
import time
import types

import jax
import jax.numpy as jnp
import optax
from jax.experimental import mesh_utils
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import train_compile
from MaxText import hlo_cost, topology

LENGTH, VOCABULARY, HEAD = 2048, 32000, 128
SIZES = {"1b": ("v5e-4", 4, 2048, 16, 7168, 16), "7b": ("v5e-16", 2, 4096, 32, 11008, 32)}  # target, rows, E, N, M, L


def norm(x, scale):
  y = x.astype(jnp.float32)
  return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rope(x, positions):
  angles = positions[:, None] * 10_000.0 ** -(jnp.arange(0, HEAD, 2) / HEAD)
  cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
  a, b = jnp.split(x, 2, -1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attend(mesh, q, k, v):
  heads = q.shape[2]
  kernel = splash.make_splash_mha(
      splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((LENGTH, LENGTH))] * heads),
      head_shards=1, q_seq_shards=1, block_sizes=splash.BlockSizes(**dict.fromkeys(
          ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute",
           "block_q_dq", "block_kv_dq"), 512)))
  local = lambda q, k, v: jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)  # noqa: E731
  rows = PartitionSpec("fsdp")
  return jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows, check_vma=False)(q, k, v)


def loss(mesh, params, tokens):
  weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])
  x, positions = params["embedding"].astype(jnp.bfloat16)[tokens], jnp.arange(LENGTH)
  x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("fsdp")))

  def layer(x, w):
    y = norm(x, w["attention_norm"])
    q, k, v = (jnp.einsum("bte,enh->btnh", y, w[name]) for name in "qkv")
    out = attend(mesh, rope(q, positions) * HEAD**-0.5, rope(k, positions), v)
    x += jnp.einsum("btnh,nhe->bte", out, w["o"])
    y = norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

  x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, weights)
  logits = jnp.einsum("bte,ev->btv", norm(x, params["norm"]), params["head"].astype(jnp.bfloat16),
                      preferred_element_type=jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def main(name, report_file=""):
  """Compiles the step for the sizes of that name and prints the part of a report that train_compile.py writes too."""
  target, rows, E, N, M, L = SIZES[name]
  devices = topology.topology_devices(target)
  devices = mesh_utils.create_device_mesh((len(devices),), devices, allow_split_physical_axes=True)
  mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))

  def weight(*shape, along):
    spec = PartitionSpec(*("fsdp" if axis == along else None for axis in range(len(shape))))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

  layers = {key: weight(L, E, N, HEAD, along=1) for key in "qkv"} | {
      "o": weight(L, N, HEAD, E, along=3), "gate": weight(L, E, M, along=1), "up": weight(L, E, M, along=1),
      "down": weight(L, M, E, along=2), "attention_norm": weight(L, E, along=1), "mlp_norm": weight(L, E, along=1)}
  params = {"embedding": weight(VOCABULARY, E, along=1), "head": weight(E, VOCABULARY, along=0),
            "norm": weight(E, along=0), "layers": layers}
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  placed = lambda tree: jax.tree.map(  # noqa: E731
      lambda x: x if hasattr(x, "sharding") and x.sharding else jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())), tree)
  moments = optax.ScaleByAdamState(jax.ShapeDtypeStruct((), jnp.int32), params, params)
  state = placed((params, jax.tree.map(
      lambda x: moments if isinstance(x, optax.ScaleByAdamState) else x, jax.eval_shape(optimizer.init, params),
      is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))))

  def step(state, tokens):
    params, moments = state
    value, gradient = jax.value_and_grad(functools.partial(loss, mesh))(params, tokens)
    updates, moments = optimizer.update(gradient, moments, params)
    return (optax.apply_updates(params, updates), moments), value

  tokens = jax.ShapeDtypeStruct((rows * len(devices), LENGTH), jnp.int32,
                                sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
  start = time.perf_counter()
  with jax.set_mesh(mesh):
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(
        jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, PartitionSpec()))).lower(state, tokens).compile()
  cfg = types.SimpleNamespace(platform="tpu", dtype="bfloat16", compile_topology=target)
  hardware, kind = train_compile.hardware(cfg, mesh), topology.kind(devices[0].device_kind)
  seconds = hlo_cost.estimate(compiled.as_text(), hardware).seconds
  # As metrics.model_flops_per_token counts: no look-up, all of the square of scores.
  flops = 6 * (L * (4 * E * N * HEAD + 3 * E * M) + VOCABULARY * E) + 12 * L * N * HEAD * LENGTH
  speed = flops * rows * LENGTH / seconds
  report = {
      "devices": len(devices), "rows_per_step": rows * len(devices), "compile_seconds": time.perf_counter() - start,
      "memory": {"peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
                 "capacity_bytes": kind.usable_hbm_bytes},
      "estimate": {"seconds": seconds, "flops_per_second_per_device": speed, "mfu": speed / hardware.peak_flops},
  }  # fmt: skip
  print(json.dumps(report))
  if report_file:
    with open(report_file, "w", encoding="utf-8") as file:
      json.dump(report, file)


if __name__ == "__main__":
  main(sys.argv[1], *(argument.removeprefix("compile_report_file=") for argument in sys.argv[2:]))
