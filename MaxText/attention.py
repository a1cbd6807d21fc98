# SPDX-License-Identifier: Apache-2.0
"""Attention: one contract, attend(), and a table of kernels that keep it."""

import functools
import math

import jax
import jax.numpy as jnp

from MaxText import errors
from MaxText.sharding import mesh_axes, on_cpu, spec

_MASKED = -1e30  # added to scores; exp() of it is 0, and unlike -inf it leaves every sum finite


def attend(q_btnh, k_bskh, v_bskh, q_segments_bt, kv_segments_bs, *, kernel, soft_cap=0.0, bias_nd=None, first=None):
  """Causal attention within segments: softmax(cap(q . k) + bias) . v, the softmax in float32.

  Query i sees key j when j <= i and both are of one segment. Segment 0 (padding) is treated as any other: finite, and
  ignored by the loss. Query head i reads key/value head i // (n / k). All kernels give the same result; "dot" is the
  reference. The platform is that of the devices in the mesh (sharding.use), which need not be those of this process.

  Args:
    q_btnh: queries, already scaled.
    k_bskh, v_bskh: keys and values, s = t unless `first` is given, n a multiple of k.
    q_segments_bt, kv_segments_bs: int32 segment of each position; segments are contiguous.
    kernel: name of a kernel in KERNELS.
    soft_cap: c > 0 turns scores x into c tanh(x / c), before bias and mask.
    bias_nd: added to the scores of head n at distance d = i - j. At least s distances.
    first: index of the first query among the keys (int32 scalar), where the queries are a part of the row: with a KV
      cache. For kernel "dot", and a length that is not sharded.

  Returns:
    out_btnh in the type of q. Under a mesh it is sharded as q: over batch, length and heads; keys and values are
    gathered over length.

  Raises:
    ConfigError: what the kernel cannot do, or heads that the mesh does not divide.
  """
  mesh = jax.sharding.get_abstract_mesh()
  local = functools.partial(KERNELS[kernel], soft_cap=soft_cap, on_cpu=on_cpu())
  if mesh.size <= 1:  # 0: no mesh at all
    return local(q_btnh, k_bskh, v_bskh, q_segments_bt, kv_segments_bs, bias_nd, first=0 if first is None else first)

  n, k = q_btnh.shape[2], k_bskh.shape[2]
  _, length_axes, head_axes, _ = mesh_axes("batch", "length", "act_heads", None)
  kv_head_axes = mesh_axes("batch", None, "act_kv_heads", None)[2]
  shards = math.prod(mesh.shape[axis] for axis in head_axes)
  if n % shards or head_axes != kv_head_axes:
    raise errors.ConfigError(
        f"{n} query heads over {'x'.join(head_axes)}={shards} devices: the heads must divide evenly, and act_heads and "
        "act_kv_heads must have the same rule. Change the mesh or logical_axis_rules.")
  if k % shards:  # too few key/value heads for the mesh: each repeated until every device has those it reads
    copies = next(c for c in range(1, n // k + 1) if k * c % shards == 0 and n % (k * c) == 0)
    k_bskh, v_bskh = jnp.repeat(k_bskh, copies, axis=2), jnp.repeat(v_bskh, copies, axis=2)

  def on_shard(first, q_btnh, *others):
    if first is None:
      first = jax.lax.axis_index(length_axes) * q_btnh.shape[1] if q_btnh.shape[1] < others[0].shape[1] else 0
    return local(q_btnh, *others, first=first)

  queries, keys = spec("batch", "length", "act_heads", None), spec("batch", None, "act_kv_heads", None)
  specs = (spec(), queries, keys, keys, spec("batch", "length"), spec("batch", None), spec("act_heads", None))
  # Pallas calls do not say over which axes their results vary, so that check is off.
  return jax.shard_map(on_shard, in_specs=specs, out_specs=queries, check_vma=False)(
      first, q_btnh, k_bskh, v_bskh, q_segments_bt, kv_segments_bs, bias_nd)


def bias_matrix(bias_nd, t, s, first):
  """bias[n, i - j] for queries i = first ... first + t and keys j < s, as [n, t, s]; 0 where j > i.

  Rows shifted by one each are made by tiling and folding, so that the gradient is a dense sum and not a scatter.
  """
  n, period = bias_nd.shape[0], t + s
  bias_nd = bias_nd[:, :s]
  wheel = jnp.concatenate([bias_nd[:, :1], jnp.zeros((n, period - s), bias_nd.dtype), bias_nd[:, :0:-1]], axis=1)
  wheel = jnp.roll(wheel, first, axis=1)
  return jnp.tile(wheel, (1, t))[:, :t * (period - 1)].reshape(n, t, period - 1)[:, :, :s]


def visible(q_segments_bt, kv_segments_bs, first):
  """Which keys each query sees, bool [b, t, s]."""
  i = first + jnp.arange(q_segments_bt.shape[1])
  j = jnp.arange(kv_segments_bs.shape[1])
  return (q_segments_bt[:, :, None] == kv_segments_bs[:, None, :]) & (j <= i[:, None])


@jax.custom_vjp
def scores(q_bkgth, k_bksh):
  """Float32 products [b, k, g, t, s]; the gradient's products run in the type of q and k, and not in float32."""
  return jnp.einsum("bkgth,bksh->bkgts", q_bkgth, k_bksh, preferred_element_type=jnp.float32)


def _scores_backward(factors, d_bkgts):
  q_bkgth, k_bksh = factors
  d_bkgts = d_bkgts.astype(q_bkgth.dtype)
  return jnp.einsum("bkgts,bksh->bkgth", d_bkgts, k_bksh), jnp.einsum("bkgts,bkgth->bksh", d_bkgts, q_bkgth)


scores.defvjp(lambda q_bkgth, k_bksh: (scores(q_bkgth, k_bksh), (q_bkgth, k_bksh)), _scores_backward)


# --- Kernels: attend() on one device ---------------------------------------------------------------------------------
# When length is sharded the queries are a part of the row: query 0 has index `first` in it, 0 or (when t < s) a traced
# scalar. on_cpu: the device that will run this is a CPU.


def dot(q_btnh, k_bskh, v_bskh, q_segments_bt, kv_segments_bs, bias_nd, *, first, soft_cap, on_cpu):
  """The reference: plain matrix products, any device. The scores stand in memory, in float32."""
  b, t, n, h = q_btnh.shape
  s, k = k_bskh.shape[1:3]
  q_bkgth = q_btnh.reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4)
  k_bksh, v_bksh = k_bskh.swapaxes(1, 2), v_bskh.swapaxes(1, 2)
  add_bkgts = jnp.where(visible(q_segments_bt, kv_segments_bs, first), 0.0, _MASKED)[:, None, None]
  if bias_nd is not None:
    add_bkgts += bias_matrix(bias_nd, t, s, first).reshape(k, n // k, t, s)

  def rows(start, stop, keys):
    scores_bkgts = scores(q_bkgth[:, :, :, start:stop], k_bksh[:, :, :keys])
    if soft_cap:
      scores_bkgts = soft_cap * jnp.tanh(scores_bkgts / soft_cap)
    probs_bkgts = jax.nn.softmax(scores_bkgts + add_bkgts[..., start:stop, :keys], axis=-1).astype(v_bskh.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", probs_bkgts, v_bksh[:, :, :keys])

  # On CPU four blocks of queries, each with the keys up to its end, cost 5/8 of the work and stay in cache: forward and
  # backward take half the time. On accelerators XLA fuses the one product better.
  if on_cpu and t == s and t % 4 == 0:
    out_bkgth = jnp.concatenate([rows(i * t // 4, (i + 1) * t // 4, (i + 1) * t // 4) for i in range(4)], axis=3)
  else:
    out_bkgth = rows(0, t, s)
  return out_bkgth.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def flash(q_btnh, k_bskh, v_bskh, q_segments_bt, kv_segments_bs, bias_nd, *, first, soft_cap, on_cpu):
  """TPU: Pallas splash attention, which skips blocks above the diagonal and keeps no scores. Emulated on CPU, slowly.

  Any head size compiles; below 128 it fills a part of the 128 lanes of the matrix unit.
  """
  # Here, because Pallas takes 0.25 s to import.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

  _, t, n, _ = q_btnh.shape
  s = k_bskh.shape[1]
  if t % 128:
    raise errors.ConfigError(
        f"attention=flash needs a multiple of 128 positions per device, found {t}. Change max_target_length or "
        "ici_sequence_parallelism, or use attention=dot.")
  if bias_nd is not None:
    raise errors.ConfigError("attention=flash has no position_embedding=relative_bias. Use attention=dot.")
  block = next(size for size in (512, 256, 128) if t % size == 0)
  block_kv = next(size for size in (512, 256, 128) if s % size == 0)
  kernel = splash.make_splash_mha(
      splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((s, s))] * n),
      block_sizes=splash.BlockSizes(
          block_q=block, block_kv=block_kv, block_kv_compute=block_kv,
          block_q_dkv=block, block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv,
          block_q_dq=block, block_kv_dq=block_kv),
      head_shards=1, q_seq_shards=s // t, attn_logits_soft_cap=soft_cap or None, interpret=on_cpu)
  if t < s:  # the plan is made for the whole row, blocks of queries before last or alone; take this device's part

    def part(x):
      axis = max(x.ndim - 2, 0)
      size = x.shape[axis] // (s // t)
      return jax.lax.dynamic_slice_in_dim(x, first // t * size, size, axis)

    kernel = jax.tree.map(part, kernel)
  q_bnth, k_bksh, v_bksh = (x.swapaxes(1, 2) for x in (q_btnh, k_bskh, v_bskh))
  segments = splash.SegmentIds(q_segments_bt, kv_segments_bs)
  return jax.vmap(kernel)(q_bnth, k_bksh, v_bksh, segments).swapaxes(1, 2)


def cudnn(q_btnh, k_bskh, v_bskh, q_segments_bt, kv_segments_bs, bias_nd, *, first, soft_cap, on_cpu):
  """NVIDIA: cuDNN flash attention, Ampere or newer. On CPU the same call runs as plain products.

  Segments become a mask [b, 1, t, s] shared by the heads, 2 bytes an entry: exact for any number of documents in a row.
  With is_causal alone the documents of a row would see each other. cuDNN's packed form (offsets of documents) needs
  their largest number at compile time, is wrong without a word beyond it, and so it is with grouped heads before
  https://github.com/jax-ml/jax/pull/39521.
  """
  t, s = q_btnh.shape[1], k_bskh.shape[1]
  if soft_cap:
    raise errors.ConfigError(f"attention=cudnn has no attn_logits_soft_cap={soft_cap}. Use attention=dot.")
  if q_btnh.dtype == jnp.float32 and not on_cpu:
    raise errors.ConfigError("attention=cudnn computes in 16 bits, not in dtype=float32. Use bfloat16, or dot.")
  mask_b1ts = visible(q_segments_bt, kv_segments_bs, first)[:, None]
  bias_1nts = None if bias_nd is None else bias_matrix(bias_nd, t, s, first)[None].astype(q_btnh.dtype)
  # With t == s the kernel also gets to know that it is causal, and skips what lies above the diagonal.
  return jax.nn.dot_product_attention(q_btnh, k_bskh, v_bskh, bias_1nts, mask_b1ts, scale=1.0, is_causal=t == s,
                                      implementation="xla" if on_cpu else "cudnn")


KERNELS = {"dot": dot, "flash": flash, "cudnn": cudnn}
