# SPDX-License-Identifier: Apache-2.0
"""The model: equivalences of its switches, causality, the loss."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny

from MaxText import model, sharding


def batch_of(cfg, rows=2, seed=0):
  """Random tokens in two segments a row, as the data contract has them."""
  rng = np.random.default_rng(seed)
  length, cut = cfg.max_target_length, cfg.max_target_length // 3
  positions = np.concatenate([np.arange(cut), np.arange(length - cut)])
  segments = np.concatenate([np.ones(cut), np.full(length - cut, 2)])
  return {
      "inputs": rng.integers(0, cfg.vocab_size, (rows, length)).astype(np.int32),
      "targets": rng.integers(0, cfg.vocab_size, (rows, length)).astype(np.int32),
      "positions": np.tile(positions, (rows, 1)).astype(np.int32),
      "segmentations": np.tile(segments, (rows, 1)).astype(np.int32),
      "loss_weights": rng.integers(0, 2, (rows, length)).astype(np.float32),
  }


@pytest.fixture
def one_device():
  cfg = tiny()
  with sharding.use(sharding.make_mesh(cfg, jax.devices()[:1]), cfg.logical_axis_rules):
    yield


def initialize(cfg, seed=0):
  """Random parameters made by NumPy: nothing to compile."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda s: rng.normal(0.0, 0.2, s.shape).astype(s.dtype), model.abstract(cfg)[1])


def hidden(cfg, params, batch, dropout_key=None):
  transformer = nnx.merge(model.abstract(cfg)[0], params)
  return transformer(batch["inputs"], batch["positions"], batch["segmentations"], dropout_key)[0]


def objective(cfg, params, batch):
  """The loss by cross_entropy()."""
  transformer = nnx.merge(model.abstract(cfg)[0], params)
  x_bte, _ = transformer(batch["inputs"], batch["positions"], batch["segmentations"])
  return model.cross_entropy(cfg, transformer.head(), x_bte, batch["targets"], batch["loss_weights"])[0]


def head_objective(cfg, params, x_bte, batch):
  """The loss of hidden states by cross_entropy(): what stands before the head need not be compiled."""
  head = nnx.merge(model.abstract(cfg)[0], params).head()
  return model.cross_entropy(cfg, head, x_bte, batch["targets"], batch["loss_weights"])[0]


def naive_head_objective(cfg, params, x_bte, batch):
  """The same from the logits of the whole batch, by JAX's log_softmax."""
  z_btv = nnx.merge(model.abstract(cfg)[0], params).logits(x_bte)
  nll_bt = -jnp.take_along_axis(jax.nn.log_softmax(z_btv), batch["targets"][..., None], axis=-1)[..., 0]
  z_loss_bt = cfg.z_loss_multiplier * jnp.square(jax.nn.logsumexp(z_btv, axis=-1))
  return jnp.sum((nll_bt + z_loss_bt) * batch["loss_weights"])


def hidden_states(cfg, rows=2, seed=1):
  """Random hidden states [rows, length, embed]."""
  shape = (rows, cfg.max_target_length, cfg.emb_dim)
  return np.random.default_rng(seed).normal(0.0, 1.0, shape).astype(np.float32)


HEADS = {
    "tied": {"logits_via_embedding": True},
    "untied, bias": {"logits_via_embedding": False, "logits_bias": True},
    "soft cap": {"final_logits_soft_cap": 3.0},
    "scaled, z-loss": {"logits_via_embedding": True, "normalize_embedding_logits": True, "z_loss_multiplier": 0.1},
}


@pytest.mark.parametrize(("head", "tiling"), [("tied", 1), *((head, 4) for head in HEADS)])
def test_loss_in_pieces_and_its_gradient_are_those_of_the_whole_logits(one_device, head, tiling):
  cfg = tiny(base_num_decoder_layers=1, num_vocab_tiling=tiling, **HEADS[head])
  inputs = initialize(cfg), hidden_states(cfg), batch_of(cfg)
  loss, grads, expected, expected_grads = (
      x for function in (head_objective, naive_head_objective)
      for x in jax.jit(jax.value_and_grad(functools.partial(function, cfg), argnums=(0, 1)))(*inputs))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), grads, expected_grads)


def test_logits_of_the_whole_batch_never_stand_in_memory_when_tiled(one_device):
  def temporary_bytes(tiling):
    cfg = tiny(base_num_decoder_layers=1, vocab_size=8192, num_vocab_tiling=tiling)
    params = jax.eval_shape(functools.partial(model.initialize, cfg), jax.random.key(0))
    step = jax.jit(jax.grad(functools.partial(head_objective, cfg), argnums=(0, 1)))
    compiled = step.lower(params, hidden_states(cfg, rows=8), batch_of(cfg, rows=8)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  whole = 8 * 32 * 8192 * 4
  assert temporary_bytes(1) > whole
  assert temporary_bytes(8) < whole / 2


SWITCHES = {
    "base": {},
    "GPT": {"normalization": "layer", "position_embedding": "learned", "attention_bias": "all", "mlp_bias": True,
            "mlp_activations": ["gelu"]},
    "Pax C4": {"normalization": "layer", "norm_scale_plus_one": True, "position_embedding": "sinusoidal",
               "query_scaling": "per_dim", "attn_logits_soft_cap": 50.0, "final_logits_soft_cap": 30.0,
               "scale_embedding": True, "mlp_bias": True, "logits_bias": True, "mlp_activations": ["gelu"]},
    "MaxText": {"block_layout": "parallel", "use_qk_norm": True, "query_scaling": "none",
                "position_embedding": "rope_interleaved", "mlp_activations": ["relu"], "use_iota_embed": True,
                "logits_via_embedding": True, "normalize_embedding_logits": True},
    "T5 positions": {"position_embedding": "relative_bias"},
    "no positions": {"position_embedding": "none", "attention_bias": "qkv"},
}  # fmt: skip


@pytest.mark.parametrize("switches", SWITCHES)
def test_no_position_hears_of_later_ones_or_other_segments(one_device, switches):
  cfg = tiny(**SWITCHES[switches])
  params, batch = initialize(cfg), batch_of(cfg)
  graph = model.abstract(cfg)[0]
  embed = jax.jit(lambda params: nnx.merge(graph, params).embed(batch["inputs"], batch["positions"]))(params)
  at = 20  # in the second segment, which starts at 10

  def feature(x_bte):
    transformer = nnx.merge(graph, params)
    transformer.embed = lambda *_: x_bte
    return jnp.sum(jnp.sin(transformer(batch["inputs"], batch["positions"], batch["segmentations"])[0][:, at]))

  influence = np.abs(jax.jit(jax.grad(feature))(embed)).max(axis=(0, 2))
  assert np.isfinite(influence).all()
  assert (influence[10:at + 1] > 0).all()
  assert (influence[:10] == 0).all() and (influence[at + 1:] == 0).all()


def test_unrolled_layers_and_remat_give_the_gradients_of_the_plain_scan(one_device):
  cfg = tiny()
  params, batch = initialize(cfg), batch_of(cfg)

  def gradients(**keys):
    return jax.jit(jax.grad(functools.partial(objective, tiny(**keys))))(params, batch)

  plain = gradients()
  for keys in ({"scan_layers": False}, {"remat_policy": "full"},
               {"remat_policy": "names", "remat_names": ["mlp_up", "context"]}):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6, err_msg=str(keys)),
                 gradients(**keys), plain)


def test_remat_policies_save_what_they_say(one_device):
  def saved_bytes(**keys):
    cfg = tiny(base_num_decoder_layers=1, max_target_length=64, **keys)
    params = jax.eval_shape(functools.partial(model.initialize, cfg), jax.random.key(0))
    residuals = jax.ad_checkpoint.saved_residuals if hasattr(jax.ad_checkpoint, "saved_residuals") else None
    if residuals is None:
      from jax._src.ad_checkpoint import saved_residuals as residuals
    loss = lambda params: jnp.sum(hidden(cfg, params, batch_of(cfg)))  # noqa: E731
    return sum(np.prod(aval.shape) for aval, _ in residuals(loss, params))

  full, named, dots, everything = (saved_bytes(remat_policy=p) for p in ("full", "save_qkv_proj", "minimal", "none"))
  assert full < named < dots < everything


def test_dropout_is_reproducible_by_key_and_off_without_one(one_device):
  cfg = tiny(dropout_rate=0.5, input_dropout_rate=0.5)
  params, batch = initialize(cfg), batch_of(cfg)
  forward = jax.jit(functools.partial(hidden, cfg))
  first, again, other = (forward(params, batch, jax.random.key(seed)) for seed in (1, 1, 2))
  assert (first == again).all() and (first != other).any()
  off = jax.jit(functools.partial(hidden, tiny()))(params, batch)
  assert (forward(params, batch) == off).all()
  disabled = tiny(dropout_rate=0.5, input_dropout_rate=0.5, enable_dropout=False)
  assert (jax.jit(functools.partial(hidden, disabled))(params, batch, jax.random.key(1)) == off).all()


def test_one_hot_lookup_is_the_gather(one_device):
  cfg = tiny()
  params, batch = initialize(cfg), batch_of(cfg)
  onehot, gathered = (jax.jit(functools.partial(hidden, c))(params, batch) for c in (tiny(use_iota_embed=True), cfg))
  np.testing.assert_allclose(onehot, gathered, rtol=1e-5, atol=1e-6)


def test_matrix_products_run_in_dtype_and_norms_and_softmax_in_float32(one_device):
  cfg = tiny(dtype="bfloat16", num_vocab_tiling=4)
  params, batch = initialize(cfg), batch_of(cfg)
  seen = {"dot_general": set(), "exp": set(), "rsqrt": set()}

  def visit(jaxpr):
    for eqn in jaxpr.eqns:
      if eqn.primitive.name in seen:
        seen[eqn.primitive.name] |= {str(v.aval.dtype) for v in eqn.invars}
      for inner in jax.extend.core.jaxprs_in_params(eqn.params):
        visit(inner)

  visit(jax.make_jaxpr(jax.grad(functools.partial(objective, cfg)))(params, batch).jaxpr)
  assert seen == {"dot_general": {"bfloat16"}, "exp": {"float32"}, "rsqrt": {"float32"}}
