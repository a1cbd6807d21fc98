# SPDX-License-Identifier: Apache-2.0
"""THE model: one decoder-only transformer.

  tokens -> embedding (x sqrt(emb_dim)) (+ learned or sinusoidal positions) (dropout)
         -> layers: x += attention(norm(x)); x += mlp(norm(x))   or parallel: x += attention(norm(x)) + mlp(norm(x))
         -> norm -> logits = hidden . embedding table or own weight (/ sqrt(emb_dim)) (+ bias) (soft cap)

Each switch of the config is one line below. A tensor's suffix names its dimensions: b batch, t and s position, e embed,
n query heads, k key/value heads, h head dim, m mlp, v vocab, l layers. Weights are float32 (`weight_dtype`), products
are computed in `dtype`; norms, softmax and the loss in float32.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from MaxText import attention
from MaxText.sharding import on_cpu, placed, shard, stacked, weight

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "linear": lambda x: x,
}

_QKV = ("query", "key", "value")
REMAT_NAMES = {  # remat_policy -> the named points the backward pass finds saved
    "minimal": (*_QKV, "out_proj", "mlp_up", "mlp_gate", "mlp_down"),  # on CPU, where product() hides its dots
    "save_qkv_proj": _QKV,
    "save_out_proj": (*_QKV, "out_proj"),
    "save_dot_except_mlp": (*_QKV, "context", "out_proj"),
}


def einsum(spec, x, w):
  """jnp.einsum of activation x and weight w (an nnx.Param or an array), in the type of x."""
  return (product if on_cpu() else jnp.einsum)(spec, x, w[...].astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(spec, x, w):
  """jnp.einsum whose weight gradient transposes the narrower of its two factors: a quarter less CPU time per step.

  XLA's CPU matrix product needs its left factor untransposed. Autodiff puts the cotangent left, and XLA then recomputes
  what made it (the derivative of the activation) inside a strided copy.
  """
  return jnp.einsum(spec, x, w)


def _product_backward(spec, factors, dy):
  x, w = factors
  inputs, out = spec.split("->")
  inward, weight_axes = inputs.split(",")
  summed = "".join(c for c in weight_axes if c in inward)
  free = "".join(c for c in weight_axes if c not in inward)
  size = dict(zip(weight_axes, w.shape, strict=True))
  if math.prod(size[c] for c in summed) <= math.prod(size[c] for c in free):
    dw, axes = jnp.einsum(f"{inward},{out}->{summed}{free}", x, dy), summed + free
  else:
    dw, axes = jnp.einsum(f"{out},{inward}->{free}{summed}", dy, x), free + summed
  return jnp.einsum(f"{out},{weight_axes}->{inward}", dy, w), jnp.einsum(f"{axes}->{weight_axes}", dw)


product.defvjp(lambda spec, x, w: (jnp.einsum(spec, x, w), (x, w)), _product_backward)


# Activations whole over the embed dimension before a product with a weight and after one, each step spelled out. Left
# to itself XLA's partitioner (jax 0.10 and 0.11) exchanges rows between "data" and "fsdp" for the product, where these
# and "tensor" are larger than 1 and tokens few for the width, and forgets to exchange them back: wrong results.


def gathered(x_bte):
  """Input of a product; its gradient is scattered()."""
  return shard(x_bte, "batch", "length", None)


def scattered(y_bte):
  """Output of a product that sums over a sharded dimension."""
  return shard(shard(y_bte, "batch", "length", None), "batch", "length", "act_embed")


def dense_init(cfg, fan_in, fan_out, scale=1.0):
  """Initializer of a matrix from fan_in to fan_out features: `weight_init`, times scale."""

  def init(key, shape, dtype):
    if cfg.weight_init == "xavier":
      limit = scale * math.sqrt(6.0 / (fan_in + fan_out))
      return jax.random.uniform(key, shape, dtype, -limit, limit)
    std = cfg.weight_init_std if cfg.weight_init == "normal" else 1.0 / math.sqrt(fan_in)
    return scale * std * jax.random.normal(key, shape, dtype)

  return init


def normal_init(std):
  return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def constant_init(value):
  return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def dropout(x, rate, key):
  """Zeroes a fraction `rate` of x and scales up the rest; key None or rate 0 changes nothing."""
  if key is None or rate == 0.0:
    return x
  return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0).astype(x.dtype)


class Norm(nnx.Module):
  """RMS or layer normalization over the last dimension, computed in float32."""

  def __init__(self, cfg, rngs, kind, size, axis="norm"):
    self.kind, self.epsilon, self.plus_one = kind, cfg.norm_epsilon, cfg.norm_scale_plus_one
    self.scale_e = weight(rngs, (size,), (axis,), constant_init(0.0 if self.plus_one else 1.0), cfg.weight_dtype)
    if kind == "layer":
      self.bias_e = weight(rngs, (size,), (axis,), constant_init(0.0), cfg.weight_dtype)

  def __call__(self, x, reorder=lambda w: w):
    y = x.astype(jnp.float32)
    scale_e = reorder(self.scale_e)[...]
    if self.kind == "layer":
      y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
    y = y * (scale_e + 1.0 if self.plus_one else scale_e)
    if self.kind == "layer":
      y = y + self.bias_e[...]
    return y.astype(x.dtype)


def rope_frequencies(cfg):
  """Radians per position [head_dim / 2] of the rotary angles (Su et al. 2021, section 3.4.2), scaled by rope_scaling.

  "llama3" is the scaling of Llama 3.1: by wavelength, with a linear blend between the two limits.
  """
  frequency_h = cfg.rope_max_timescale ** -(np.arange(0, cfg.head_dim, 2) / cfg.head_dim)
  if cfg.rope_scaling == "linear":
    frequency_h /= cfg.rope_scaling_factor
  elif cfg.rope_scaling == "llama3":
    low, high = cfg.rope_scaling_low_frequency_factor, cfg.rope_scaling_high_frequency_factor
    turns_h = cfg.rope_scaling_original_length * frequency_h / (2 * math.pi)
    kept_h = np.clip((turns_h - low) / (high - low), 0.0, 1.0)
    frequency_h *= kept_h + (1.0 - kept_h) / cfg.rope_scaling_factor
  return frequency_h


def rope_angles(cfg, positions_bt):
  """Cosine and sine [b, t, 1, head_dim / 2] of the rotary angles."""
  frequency_h = rope_frequencies(cfg)
  angle_bth = positions_bt[:, :, None].astype(jnp.float32) * frequency_h.astype(np.float32)
  return jnp.cos(angle_bth)[:, :, None, :], jnp.sin(angle_bth)[:, :, None, :]


def rotate(x_btnh, angles):
  """Rotates the feature pairs (i, i + h/2) by the position's angles."""
  cos, sin = angles
  first, second = (half.astype(jnp.float32) for half in jnp.split(x_btnh, 2, axis=-1))
  halves = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate([half.astype(x_btnh.dtype) for half in halves], axis=-1)


def sinusoid(positions_bt, size):
  """Position signal [b, t, size]: sines, then cosines, of wavelengths 2 pi to 10,000 x 2 pi (Vaswani et al. 2017)."""
  count = size // 2
  frequency = 10_000.0 ** -(np.arange(count) / max(count - 1, 1))
  angle = positions_bt[:, :, None].astype(jnp.float32) * frequency.astype(np.float32)
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def relative_buckets(cfg, count):
  """Bucket of each distance 0 .. count - 1: exact for the near half, logarithmic beyond (T5)."""
  distance = np.arange(count)
  exact = cfg.relative_bias_buckets // 2
  ratio = np.log(np.maximum(distance, 1) / exact) / np.log(cfg.relative_bias_max_distance / exact)
  far = exact + (ratio * (cfg.relative_bias_buckets - exact)).astype(np.int32)
  return np.where(distance < exact, distance, np.minimum(far, cfg.relative_bias_buckets - 1))


class Attention(nnx.Module):
  """Causal self-attention with grouped key/value heads, within segments."""

  def __init__(self, cfg, rngs):
    self.cfg = cfg
    E, N, K, H = cfg.emb_dim, cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim
    make = functools.partial(weight, rngs, dtype=cfg.weight_dtype)
    query_scale = 1.0 / math.sqrt(H) if cfg.query_scaling == "none" else 1.0
    self.wq_enh = make((E, N, H), ("embed", "heads", "head_dim"), dense_init(cfg, E, N * H, query_scale))
    self.wk_ekh = make((E, K, H), ("embed", "kv_heads", "head_dim"), dense_init(cfg, E, K * H))
    self.wv_ekh = make((E, K, H), ("embed", "kv_heads", "head_dim"), dense_init(cfg, E, K * H))
    self.wo_nhe = make((N, H, E), ("heads", "head_dim", "embed"), dense_init(cfg, N * H, E))
    if cfg.attention_bias:
      self.bq_nh = make((N, H), ("heads", "head_dim"), constant_init(0.0))
      self.bk_kh = make((K, H), ("kv_heads", "head_dim"), constant_init(0.0))
      self.bv_kh = make((K, H), ("kv_heads", "head_dim"), constant_init(0.0))
    if cfg.attention_bias == "all":
      self.bo_e = make((E,), ("norm",), constant_init(0.0))
    if cfg.use_qk_norm:
      self.query_norm = Norm(cfg, rngs, "rms", H, "head_dim")
      self.key_norm = Norm(cfg, rngs, "rms", H, "head_dim")
    if cfg.query_scaling == "per_dim":
      self.scale_h = make((H,), ("head_dim",), constant_init(0.0))

  def pairs(self, weight):
    """`weight` with the head dimension in the order that rotate() pairs: for "rope_interleaved" even ones, then odd.

    Scores do not change where queries and keys are reordered alike, and weights are smaller than activations.
    """
    if self.cfg.position_embedding != "rope_interleaved":
      return weight
    w = weight[...]
    return w.reshape(*w.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(w.shape)

  def __call__(self, x_bte, segments_bt, angles, bias_nd, cache=None, layer=None):
    """Attention output [b, t, e], and `cache` with the keys and values of this `layer` appended."""
    cfg, pairs = self.cfg, self.pairs
    q_btnh = einsum("bte,enh->btnh", x_bte, pairs(self.wq_enh))
    k_btkh = einsum("bte,ekh->btkh", x_bte, pairs(self.wk_ekh))
    v_btkh = einsum("bte,ekh->btkh", x_bte, self.wv_ekh)
    if cfg.attention_bias:
      q_btnh += pairs(self.bq_nh)[...].astype(x_bte.dtype)
      k_btkh += pairs(self.bk_kh)[...].astype(x_bte.dtype)
      v_btkh += self.bv_kh[...].astype(x_bte.dtype)
    if cfg.use_qk_norm:
      q_btnh, k_btkh = self.query_norm(q_btnh, pairs), self.key_norm(k_btkh, pairs)
    if angles is not None:
      q_btnh, k_btkh = rotate(q_btnh, angles), rotate(k_btkh, angles)
    if cfg.query_scaling == "per_dim":  # softplus(0) = log 2, so that the scale starts at 1
      q_btnh *= (jax.nn.softplus(pairs(self.scale_h)[...]) / math.log(2.0)).astype(x_bte.dtype)
    if cfg.query_scaling != "none":
      q_btnh *= jnp.asarray(1.0 / math.sqrt(cfg.head_dim), x_bte.dtype)
    q_btnh = checkpoint_name(shard(q_btnh, "batch", "length", "act_heads", None), "query")
    k_btkh = checkpoint_name(shard(k_btkh, "batch", "length", "act_kv_heads", None), "key")
    v_btkh = checkpoint_name(shard(v_btkh, "batch", "length", "act_kv_heads", None), "value")
    attend = functools.partial(attention.attend, soft_cap=cfg.attn_logits_soft_cap, bias_nd=bias_nd)
    if cache is None:
      out_btnh = attend(q_btnh, k_btkh, v_btkh, segments_bt, segments_bt, kernel=cfg.attention)
    else:
      cache, k_bskh, v_bskh = append(cache, layer, k_btkh, v_btkh)
      out_btnh = attend(q_btnh, k_bskh, v_bskh, segments_bt, cache["segments_bs"], kernel="dot", first=cache["length"])
    out_btnh = checkpoint_name(out_btnh, "context")
    y_bte = einsum("btnh,nhe->bte", out_btnh, self.wo_nhe)
    if cfg.attention_bias == "all":
      y_bte += self.bo_e[...].astype(x_bte.dtype)
    return checkpoint_name(scattered(y_bte), "out_proj"), cache


class Mlp(nnx.Module):
  """Feed-forward layer: gated when `mlp_activations` names two functions (Shazeer 2020)."""

  def __init__(self, cfg, rngs):
    self.cfg = cfg
    E, M = cfg.emb_dim, cfg.mlp_dim
    make = functools.partial(weight, rngs, dtype=cfg.weight_dtype)
    self.wu_em = make((E, M), ("embed", "mlp"), dense_init(cfg, E, M))
    self.wd_me = make((M, E), ("mlp", "embed"), dense_init(cfg, M, E))
    if len(cfg.mlp_activations) == 2:
      self.wg_em = make((E, M), ("embed", "mlp"), dense_init(cfg, E, M))
    if cfg.mlp_bias:
      self.bu_m = make((M,), ("mlp",), constant_init(0.0))
      self.bd_e = make((E,), ("norm",), constant_init(0.0))
      if len(cfg.mlp_activations) == 2:
        self.bg_m = make((M,), ("mlp",), constant_init(0.0))

  def __call__(self, x_bte):
    bias = self.cfg.mlp_bias
    gated = len(self.cfg.mlp_activations) == 2
    up_btm = checkpoint_name(einsum("bte,em->btm", x_bte, self.wu_em), "mlp_up")
    if bias:
      up_btm += self.bu_m[...].astype(x_bte.dtype)
    hidden_btm = ACTIVATIONS[self.cfg.mlp_activations[-1]](up_btm)
    if gated:
      gate_btm = checkpoint_name(einsum("bte,em->btm", x_bte, self.wg_em), "mlp_gate")
      if bias:
        gate_btm += self.bg_m[...].astype(x_bte.dtype)
      hidden_btm *= ACTIVATIONS[self.cfg.mlp_activations[0]](gate_btm)
    hidden_btm = shard(hidden_btm, "batch", "length", "act_mlp")
    y_bte = einsum("btm,me->bte", hidden_btm, self.wd_me)
    if bias:
      y_bte += self.bd_e[...].astype(x_bte.dtype)
    return checkpoint_name(scattered(y_bte), "mlp_down")


class Block(nnx.Module):
  """One layer."""

  def __init__(self, cfg, rngs):
    self.cfg = cfg
    self.attention_norm = Norm(cfg, rngs, cfg.normalization, cfg.emb_dim)
    self.attention = Attention(cfg, rngs)
    if cfg.block_layout == "sequential":
      self.mlp_norm = Norm(cfg, rngs, cfg.normalization, cfg.emb_dim)
    self.mlp = Mlp(cfg, rngs)

  def __call__(self, x_bte, segments_bt, angles, bias_nd, dropout_key, cache=None, layer=None):
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    y_bte = gathered(self.attention_norm(x_bte))
    attended_bte, cache = self.attention(y_bte, segments_bt, angles, bias_nd, cache, layer)
    x_bte += dropout(attended_bte, self.cfg.dropout_rate, keys[0])
    if self.cfg.block_layout == "sequential":
      y_bte = gathered(self.mlp_norm(x_bte))
    return x_bte + dropout(self.mlp(y_bte), self.cfg.dropout_rate, keys[1]), cache


class Transformer(nnx.Module):
  """Embedding, layers, final norm and logits. Call it for hidden states; `logits` and `cross_entropy` finish."""

  def __init__(self, cfg, rngs):
    self.cfg = cfg
    E, V = cfg.emb_dim, cfg.vocab_size
    make = functools.partial(weight, rngs, dtype=cfg.weight_dtype)
    self.embedding_ve = make((V, E), ("vocab", "embed"), normal_init(cfg.embedding_init_std))
    if cfg.position_embedding == "learned":
      rows = cfg.trainable_position_size or cfg.max_target_length
      self.position_embedding_te = make((rows, E), (None, "embed"), normal_init(cfg.embedding_init_std))
    if cfg.position_embedding == "relative_bias":
      shape = (cfg.relative_bias_buckets, cfg.num_query_heads)
      self.relative_bias_dn = make(shape, (None, "heads"), dense_init(cfg, *shape))
    self.layers = stacked(lambda rngs: Block(cfg, rngs), rngs, cfg.num_decoder_layers)
    self.final_norm = Norm(cfg, rngs, cfg.normalization, E)
    if not cfg.logits_via_embedding:
      self.wl_ve = make((V, E), ("vocab", "embed"), dense_init(cfg, E, V))
    if cfg.logits_bias:
      self.bl_v = make((V,), ("vocab",), constant_init(0.0))

  def embed(self, tokens_bt, positions_bt):
    """Hidden states [b, t, e] that enter the first layer."""
    cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
    # Gathered over the embed dimension first: the partitioner would replicate whole look-ups otherwise.
    table_ve = shard(self.embedding_ve[...].astype(dtype), "vocab", "act_embed")
    if cfg.use_iota_embed:
      onehot_btv = shard(jax.nn.one_hot(tokens_bt, cfg.vocab_size, dtype=dtype), "batch", "length", "act_vocab")
      x_bte = jnp.einsum("btv,ve->bte", onehot_btv, table_ve)
    else:
      x_bte = shard(table_ve[tokens_bt], "batch", "length", None)  # or jax 0.11 makes the table's gradient whole
    if cfg.scale_embedding:
      x_bte *= jnp.asarray(math.sqrt(cfg.emb_dim), dtype)
    if cfg.position_embedding == "learned":
      x_bte += self.position_embedding_te[...].astype(dtype)[positions_bt]
    elif cfg.position_embedding == "sinusoidal":
      x_bte += sinusoid(positions_bt, cfg.emb_dim).astype(dtype)
    return shard(x_bte, "batch", "length", "act_embed")

  def __call__(self, tokens_bt, positions_bt, segments_bt, dropout_key=None, cache=None, unstacked=None):
    """Hidden states [b, t, e] after the final norm, and statistics of the layers' outputs, or with a cache its next.

    Args:
      tokens_bt, positions_bt, segments_bt: int32. Attention stays within a segment; segment 0 is padding.
      dropout_key: None turns dropout off.
      cache: of empty_cache(), holding the tokens before these; these are appended to it, and see both.
      unstacked: with a cache, the layers' weights as unstack() gives them, to be used instead of the stacked ones.
    """
    cfg = self.cfg
    if cache is not None:
      segments_bs = jax.lax.dynamic_update_slice(cache["segments_bs"], segments_bt, (0, cache["length"]))
      cache = cache | {"segments_bs": segments_bs}
    keys = None
    if dropout_key is not None and cfg.enable_dropout and (cfg.dropout_rate or cfg.input_dropout_rate):
      dropout_key, *_ = keys = jax.random.split(dropout_key, 1 + cfg.num_decoder_layers)
      keys = keys[1:]
    else:
      dropout_key = None
    x_bte = dropout(self.embed(tokens_bt, positions_bt), cfg.input_dropout_rate, dropout_key)
    angles = rope_angles(cfg, positions_bt) if cfg.position_embedding.startswith("rope") else None
    bias_nd = None
    if cfg.position_embedding == "relative_bias":
      count = tokens_bt.shape[1] if cache is None else cache["segments_bs"].shape[1]
      bias_nd = self.relative_bias_dn[...].astype(jnp.float32)[relative_buckets(cfg, count)].T

    graph, layers = nnx.split(self.layers)

    def layer(carry, weights_key_number):
      x_bte, cache = carry
      weights, key, number = weights_key_number
      x_bte, cache = nnx.merge(graph, weights)(x_bte, segments_bt, angles, bias_nd, key, cache, number)
      stats = statistics(x_bte) if cfg.record_internal_nn_metrics else None
      return (shard(x_bte, "batch", "length", "act_embed"), cache), stats

    if unstacked is not None:
      for number, weights in enumerate(unstacked):
        (x_bte, cache), _ = layer((x_bte, cache), (weights, None, number))
      return self.final_norm(x_bte), cache | {"length": cache["length"] + tokens_bt.shape[1]}
    unroll = 1 if cfg.scan_layers else cfg.num_decoder_layers
    numbers = None if cache is None else jnp.arange(cfg.num_decoder_layers)
    (x_bte, cache), stats = jax.lax.scan(
        remat(cfg, layer), (x_bte, cache), (nnx.to_pure_dict(layers), keys, numbers), unroll=unroll)
    if cache is not None:
      return self.final_norm(x_bte), cache | {"length": cache["length"] + tokens_bt.shape[1]}
    return self.final_norm(x_bte), stats or {}

  def head(self):
    """The weights that make logits of hidden states: {"w_ve": [vocab, embed], "b_v": [vocab] or absent}."""
    w = self.embedding_ve if self.cfg.logits_via_embedding else self.wl_ve
    head = {"w_ve": shard(w[...].astype(self.cfg.dtype), "vocab", None)}
    return head | ({"b_v": self.bl_v[...]} if self.cfg.logits_bias else {})

  def logits(self, hidden_bte):
    """Float32 logits [b, t, v]."""
    head = self.head()
    return finish_logits(self.cfg, raw_logits(head, hidden_bte), head.get("b_v"))


def empty_cache(cfg, rows, length):
  """A KV cache for `rows` texts of at most `length` tokens, padding included, in `dtype`.

  {"k_lbkhs": [layers, rows, key/value heads, head_dim, length], "v_lbksh", "segments_bs": 0 where nothing is yet,
  "length": slots filled, the same in all rows}. Shorter texts are padded in front, so that all grow at the same slot.
  Dimensions are in the order that the products of one query with all keys and values take without a copy.
  """
  L, K, H = cfg.num_decoder_layers, cfg.num_kv_heads, cfg.head_dim
  return {"k_lbkhs": jnp.zeros((L, rows, K, H, length), cfg.dtype),
          "v_lbksh": jnp.zeros((L, rows, K, length, H), cfg.dtype),
          "segments_bs": jnp.zeros((rows, length), jnp.int32), "length": jnp.int32(0)}


def unstack(params):
  """A list of the weights of each layer. On CPU those that are a part of a stack would be copied for each use."""
  count = jax.tree.leaves(params["layers"])[0].shape[0]
  return [jax.tree.map(lambda w, layer=layer: w[layer], params["layers"]) for layer in range(count)]


def append(cache, layer, k_btkh, v_btkh):
  """`cache` with the next keys and values of one layer, and all that layer has then: k_bskh, v_bskh."""
  at = cache["length"]
  k_lbkht = k_btkh.transpose(0, 2, 3, 1)[None].astype(cache["k_lbkhs"].dtype)
  v_lbkth = v_btkh.swapaxes(1, 2)[None].astype(cache["v_lbksh"].dtype)
  k_lbkhs = jax.lax.dynamic_update_slice(cache["k_lbkhs"], k_lbkht, (layer, 0, 0, 0, at))
  v_lbksh = jax.lax.dynamic_update_slice(cache["v_lbksh"], v_lbkth, (layer, 0, 0, at, 0))
  k_bskh, v_bskh = k_lbkhs[layer].transpose(0, 3, 1, 2), v_lbksh[layer].swapaxes(1, 2)
  return cache | {"k_lbkhs": k_lbkhs, "v_lbksh": v_lbksh}, k_bskh, v_bskh


def remat(cfg, layer):
  """`layer` with what its backward pass finds saved chosen by remat_policy."""
  policies = jax.checkpoint_policies
  if cfg.remat_policy == "none":
    return layer
  if cfg.remat_policy == "full":
    policy = policies.nothing_saveable
  elif cfg.remat_policy == "minimal" and not on_cpu():
    policy = policies.dots_with_no_batch_dims_saveable
  else:
    policy = policies.save_only_these_names(*REMAT_NAMES.get(cfg.remat_policy, cfg.remat_names))
  return jax.checkpoint(layer, policy=policy, prevent_cse=not cfg.scan_layers)


def statistics(x_bte):
  """Mean, standard deviation and share of zeros of a layer's output."""
  x = x_bte.astype(jnp.float32)
  return {"mean": jnp.mean(x), "stdev": jnp.std(x), "fraction_zero": jnp.mean(x == 0)}


def raw_logits(head, hidden_bte):
  """Products [b, t, v] of hidden states and vocabulary, accumulated and kept in float32."""
  z_btv = jnp.einsum("bte,ve->btv", hidden_bte, head["w_ve"], preferred_element_type=jnp.float32)
  return shard(z_btv, "batch", "length", "act_vocab")


def finish_logits(cfg, z_btv, b_v):
  """Float32 logits from raw_logits: scale, bias (or None) and soft cap."""
  if cfg.logits_via_embedding and cfg.normalize_embedding_logits:
    z_btv = z_btv / math.sqrt(cfg.emb_dim)
  if b_v is not None:
    z_btv = z_btv + b_v.astype(jnp.float32)
  if cfg.final_logits_soft_cap:
    z_btv = cfg.final_logits_soft_cap * jnp.tanh(z_btv / cfg.final_logits_soft_cap)
  return z_btv


def token_losses(cfg, z_btv, b_v, targets_bt, weights_bt):
  """Weighted sums over tokens from raw logits: (objective, {"nll", "correct"}).

  The objective is the negative log-likelihood plus z_loss_multiplier * log(Z)^2 (PaLM, section 5).
  """
  z_btv = finish_logits(cfg, z_btv, b_v)
  max_bt = jax.lax.stop_gradient(jnp.max(z_btv, axis=-1))
  log_z_bt = max_bt + jnp.log(jnp.sum(jnp.exp(z_btv - max_bt[..., None]), axis=-1))
  # A comparison instead of a gather: it partitions over a sharded vocabulary and its gradient is no scatter.
  hit_btv = jax.lax.broadcasted_iota(targets_bt.dtype, z_btv.shape, 2) == targets_bt[..., None]
  target_bt = jnp.sum(jnp.where(hit_btv, z_btv, 0.0), axis=-1)
  nll = jnp.sum((log_z_bt - target_bt) * weights_bt)
  correct = jnp.sum((target_bt >= max_bt) * weights_bt)
  objective = nll
  if cfg.z_loss_multiplier:
    objective += cfg.z_loss_multiplier * jnp.sum(jnp.square(log_z_bt) * weights_bt)
  return objective, {"nll": nll, "correct": correct}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(cfg, head, hidden_bte, targets_bt, weights_bt):
  """token_losses of hidden states and head(), in `num_vocab_tiling` pieces: only one piece's logits stand at a time.

  Differentiable in head and hidden_bte. The gradient is formed together with the loss, so that no logits are kept for
  the backward pass or computed twice.
  """

  def losses(hidden_bte, targets_bt, weights_bt):
    return token_losses(cfg, raw_logits(head, hidden_bte), head.get("b_v"), targets_bt, weights_bt), None

  return in_pieces(cfg, losses, hidden_bte, targets_bt, weights_bt)[0]


def _cross_entropy_forward(cfg, head, hidden_bte, targets_bt, weights_bt):
  def losses_and_gradients(hidden_bte, targets_bt, weights_bt):
    gradient = jax.value_and_grad(functools.partial(token_losses, cfg), argnums=(0, 1), has_aux=True)
    sums, (dz_btv, db_v) = gradient(raw_logits(head, hidden_bte), head.get("b_v"), targets_bt, weights_bt)
    dz_btv = dz_btv.astype(hidden_bte.dtype)  # or the two products below would run in float32
    # In this order it is the narrow hidden_bte that is transposed, on CPU. Summed over pieces in the sharding in which
    # it is stored, it is reduce-scattered and not all-reduced.
    dw_ev = jnp.einsum("bte,btv->ev", hidden_bte, dz_btv, preferred_element_type=jnp.float32)
    dw_ev = shard(dw_ev, "embed", "vocab")
    return (sums, (dw_ev, db_v)), jnp.einsum("btv,ve->bte", dz_btv, head["w_ve"])

  (sums, (dw_ev, db_v)), dhidden_bte = in_pieces(cfg, losses_and_gradients, hidden_bte, targets_bt, weights_bt)
  # Cast before it is transposed: XLA's CPU compiler folds a transposition into the product, which it then cannot run.
  dhead = {"w_ve": dw_ev.astype(head["w_ve"].dtype).T}
  if db_v is not None:
    dhead["b_v"] = db_v
  return sums, (dhead, dhidden_bte)


def _cross_entropy_backward(cfg, gradients, cotangent):
  del cfg
  scale = cotangent[0]  # of the objective; the other sums are for reading
  dhead, dhidden_bte = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients)
  return dhead, dhidden_bte, None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def in_pieces(cfg, function, *arrays):
  """function(*arrays) -> (sums, per_token), computed in `num_vocab_tiling` pieces of the length of arrays [b, t, ...].

  A piece takes every num_vocab_tiling-th position, so that a length sharded over devices stays where it is.
  """
  count = cfg.num_vocab_tiling
  if count == 1:
    return function(*arrays)

  def split(x):
    b, t, *rest = x.shape
    x = jnp.moveaxis(x.reshape(b, t // count, count, *rest), 2, 0)
    return shard(x, None, "batch", "length", *(None,) * len(rest))

  def join(x):
    _, b, t, *rest = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(b, t * count, *rest)

  def add_piece(total, piece):
    sums, per_token = function(*piece)
    return jax.tree.map(jnp.add, total, sums), per_token

  pieces = [split(x) for x in arrays]
  sums = jax.eval_shape(function, *(p[0] for p in pieces))[0]
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
  sums, per_token = jax.lax.scan(add_piece, zeros, pieces)
  return sums, jax.tree.map(join, per_token)


def initialize(cfg, key):
  """Random parameters as a nested dict of arrays."""
  return nnx.to_pure_dict(nnx.state(Transformer(cfg, nnx.Rngs(params=key)), nnx.Param))


def abstract_parameters(cfg, mesh):
  """(graph, parameters): as abstract(), the shapes with the parameters' shardings on `mesh`. Raises ConfigError."""
  graph, shapes, axes = abstract(cfg)
  return graph, placed(mesh, shapes, axes)


def abstract(cfg):
  """(graph, shapes, axes) without allocating: `nnx.merge(graph, parameters)` is the model.

  shapes is the nested dict of jax.ShapeDtypeStruct that initialize() fills, axes the same of logical axis names.
  """
  graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(cfg, nnx.Rngs(params=jax.random.key(0)))))
  axes = jax.tree.map(lambda p: p.get_metadata("logical_axes"), state, is_leaf=lambda x: isinstance(x, nnx.Variable))
  return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)
