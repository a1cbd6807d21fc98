# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel keeps the one contract: forward and gradient, with segments, grouped heads, cap and bias."""

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from MaxText import errors, sharding
from MaxText.attention import attend

RULES = [("batch", ("data", "fsdp")), ("length", ("sequence",)), ("act_heads", ("tensor",)),
         ("act_kv_heads", ("tensor",))]


def inputs(b=2, t=256, n=4, k=2, h=32, seed=0):
  """q, k, v, and segments of random lengths, the last of them padding (0)."""
  rng = np.random.default_rng(seed)
  q, key, value = (rng.normal(size=(b, t, heads, h)).astype(np.float32) for heads in (n, k, k))
  segments = np.sort(rng.integers(1, 5, (b, t)), axis=1).astype(np.int32)
  segments[:, -t // 8:] = 0
  return q / np.float32(np.sqrt(h)), key, value, segments


def loop(q, key, value, segments, soft_cap=0.0, bias_nd=None):
  """The contract, one query at a time, in float64."""
  q, key, value = (x.astype(np.float64) for x in (q, key, value))
  out = np.zeros_like(q)
  group = q.shape[2] // key.shape[2]
  for b, i, n in np.ndindex(q.shape[:3]):
    sees = [j for j in range(i + 1) if segments[b, j] == segments[b, i]]
    scores = key[b, sees, n // group] @ q[b, i, n]
    if soft_cap:
      scores = soft_cap * np.tanh(scores / soft_cap)
    if bias_nd is not None:
      scores = scores + bias_nd[n, [i - j for j in sees]]
    weights = np.exp(scores - scores.max())
    out[b, i, n] = weights / weights.sum() @ value[b, sees, n // group]
  return out


def run(kernel, q, key, value, segments, bias_nd=None, mesh=None, **kwargs):
  """Output, and gradients of a random projection of it, on one device or on a mesh of eight."""

  def projection(q, key, value, bias_nd):
    out = attend(q, key, value, segments, segments, kernel=kernel, bias_nd=bias_nd, **kwargs)
    return jnp.sum(out * np.random.default_rng(1).normal(size=out.shape)), out

  where = contextlib.nullcontext()
  if mesh is not None:
    shape = [mesh.get(axis, 1) for axis in sharding.MESH_AXES]
    where = sharding.use(jax.make_mesh(shape, sharding.MESH_AXES, (AxisType.Auto,) * len(shape)), RULES)
  wanted = (0, 1, 2) if bias_nd is None else (0, 1, 2, 3)
  with where:
    grads, out = jax.jit(jax.grad(projection, wanted, has_aux=True))(q, key, value, bias_nd)
  return [np.asarray(x) for x in (out, *grads)]


def assert_same(got, expected):
  for g, e in zip(got, expected, strict=True):
    assert np.isfinite(g).all()
    np.testing.assert_allclose(g, e, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("t,k,soft_cap", [(32, 4, 0.0), (32, 2, 2.0), (17, 1, 0.0)])  # 17: one block, not four
def test_dot_is_a_loop_over_queries(t, k, soft_cap):
  q, key, value, segments = inputs(t=t, k=k, h=8)
  bias_nd = np.random.default_rng(2).normal(size=(4, t + 3)).astype(np.float32)  # more distances than needed
  for bias in (None, bias_nd):
    got = jax.jit(functools.partial(attend, kernel="dot", soft_cap=soft_cap))(
        q, key, value, segments, segments, bias_nd=bias)
    np.testing.assert_allclose(got, loop(q, key, value, segments, soft_cap, bias), atol=1e-5)


@pytest.mark.parametrize("kernel,t,k,soft_cap", [  # 384 positions: nine blocks, three of them skipped
    ("flash", 384, 2, 3.0), ("flash", 128, 4, 0.0), ("cudnn", 64, 2, 0.0)])
def test_kernel_is_dot_forward_and_gradient(kernel, t, k, soft_cap):
  arrays = inputs(t=t, k=k)
  assert_same(run(kernel, *arrays, soft_cap=soft_cap), run("dot", *arrays, soft_cap=soft_cap))


def test_cudnn_with_bias_is_dot_forward_and_gradient():
  arrays = inputs(t=64)
  bias_nd = np.random.default_rng(2).normal(size=(4, 64)).astype(np.float32)
  assert_same(run("cudnn", *arrays, bias_nd), run("dot", *arrays, bias_nd))


@pytest.mark.parametrize("kernel", ["dot", "flash", "cudnn"])
def test_gradient_reaches_only_the_past_of_the_same_document(kernel):
  q, key, value, segments = inputs(b=1, t=128, k=2)
  i = 70

  def energy(key, value):
    return jnp.sum(attend(q, key, value, segments, segments, kernel=kernel)[0, i] ** 2)

  sees = (np.arange(128) <= i) & (segments[0] == segments[0, i])
  for grad in jax.jit(jax.grad(energy, (0, 1)))(key, value):
    assert (np.any(np.asarray(grad[0]) != 0, axis=(1, 2)) == sees).all()


@pytest.mark.parametrize("mesh,k", [
    ({"data": 2, "fsdp": 2, "sequence": 2}, 4), ({"fsdp": 2, "sequence": 2, "tensor": 2}, 2),
    ({"data": 2, "tensor": 4}, 1)], ids=str)  # the last: fewer key/value heads than devices of the tensor axis
def test_dot_on_eight_devices_is_dot_on_one(mesh, k):
  arrays = inputs(b=4, t=32, k=k, h=8)
  bias_nd = np.random.default_rng(2).normal(size=(4, 32)).astype(np.float32)
  assert_same(run("dot", *arrays, bias_nd, mesh, soft_cap=5.0), run("dot", *arrays, bias_nd, soft_cap=5.0))


def test_flash_on_data_sequence_and_tensor_is_dot_on_one():
  arrays = inputs(b=2, t=256, k=2, h=16)
  assert_same(run("flash", *arrays, mesh={"data": 2, "sequence": 2, "tensor": 2}), run("dot", *arrays))


def test_cudnn_on_data_sequence_and_tensor_is_dot_on_one():
  arrays = inputs(b=2, t=64, k=2, h=16)
  assert_same(run("cudnn", *arrays, mesh={"data": 2, "sequence": 2, "tensor": 2}), run("dot", *arrays))


def test_what_a_kernel_cannot_do_is_said_in_one_line():
  q, key, value, segments = inputs(b=1, t=64, k=4, h=8)
  bias_nd = np.zeros((4, 64), np.float32)
  with pytest.raises(errors.ConfigError, match="max_target_length"):
    run("flash", q, key, value, segments)
  with pytest.raises(errors.ConfigError, match="relative_bias"):
    run("flash", *inputs(b=1, t=128), bias_nd=bias_nd)
  with pytest.raises(errors.ConfigError, match="soft_cap"):
    run("cudnn", q, key, value, segments, soft_cap=1.0)
  with pytest.raises(errors.ConfigError, match="4 query heads over tensor=8"):
    run("dot", q, key, value, segments, mesh={"tensor": 8})


COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from MaxText import sharding
from MaxText.attention import attend
from tests.attention_test import RULES

devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)
for shape in ((1, 4, 1, 1, 1, 1), (1, 1, 2, 2, 1, 1)):
  mesh = Mesh(devices.reshape(shape), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 6)
  for h, n, k in ((128, 16, 8), (64, 4, 4), (128, 4, 1)):
    with sharding.use(mesh, RULES):
      def array(*dims, axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, sharding.spec(*axes)))
      q = array(4, 2048, n, h, axes=("batch", "length", "act_heads", None))
      kv = array(4, 2048, k, h, axes=("batch", "length", None, None))
      segments = array(4, 2048, axes=("batch", "length"), dtype=jnp.int32)
      def energy(q, k, v, segments):
        return jnp.sum(attend(q, k, v, segments, segments, kernel="flash", soft_cap=30.0).astype(jnp.float32) ** 2)
      compiled = jax.jit(jax.grad(energy, (0, 1, 2))).lower(q, kv, kv, segments).compile(
          compiler_options={"optimization_level": 9})
      assert compiled.as_text().count("tpu_custom_call") >= 3  # forward, dq, dkv
      print(shape, h, n, k, compiled.memory_analysis().peak_memory_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_flash_compiles_for_tpus_that_are_not_there():
  env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_ID": "0",
                      "TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("\n") == 6, done.stdout
