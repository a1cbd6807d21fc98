# SPDX-License-Identifier: Apache-2.0
"""The model's mathematics against Hugging Face transformers: same random weights, same logits.

golden/transformers.npz holds them; golden/make.py made it.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny

from MaxText import model, sharding, train

GOLDEN = np.load(pathlib.Path(__file__).with_name("golden") / "transformers.npz")
LENGTH = 20
SIZES = {
    "base_emb_dim": 16, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 4, "base_mlp_dim": 24,
    "base_num_decoder_layers": 2, "vocab_size": 48, "max_target_length": 2 * LENGTH, "per_device_batch_size": 2.0,
    "matmul_precision": "highest", "logits_via_embedding": True,
}  # fmt: skip
FAMILIES = {
    "llama": {"norm_epsilon": 1e-5, "logits_via_embedding": False},
    "qwen2": {"attention_bias": "qkv"},
    "qwen3": {"use_qk_norm": True},
    "gemma": {"norm_scale_plus_one": True, "scale_embedding": True, "mlp_activations": ["gelu", "linear"]},
    "gpt2": {"base_num_kv_heads": 4, "normalization": "layer", "norm_epsilon": 1e-5, "position_embedding": "learned",
             "attention_bias": "all", "mlp_bias": True, "mlp_activations": ["gelu"]},
    "gptj": {"base_num_kv_heads": 4, "normalization": "layer", "norm_epsilon": 1e-5, "block_layout": "parallel",
             "position_embedding": "rope_interleaved", "mlp_bias": True, "mlp_activations": ["gelu"],
             "logits_via_embedding": False, "logits_bias": True},
    "t5": {"base_num_kv_heads": 4, "position_embedding": "relative_bias", "relative_bias_buckets": 8,
           "relative_bias_max_distance": 16, "query_scaling": "none", "mlp_activations": ["relu"],
           "normalize_embedding_logits": True},
}  # fmt: skip


def parameters(family, shapes):
  """The stored parameters in the tree of `shapes`; raises KeyError or AssertionError unless they are exactly those."""
  names = {name for name in GOLDEN.files if name.startswith(f"{family}/params/")}

  def stored(path, shape):
    name = f"{family}/params/{jax.tree_util.keystr(path, simple=True, separator='/')}"
    names.remove(name)
    value = GOLDEN[name]
    if name.endswith("position_embedding_te"):  # ours has rows for two sequences
      value = np.pad(value, ((0, LENGTH), (0, 0)))
    assert value.shape == shape.shape and value.dtype == np.float32, name
    return value

  params = jax.tree.map_with_path(stored, shapes)
  assert not names
  return params


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_loss_are_those_of_transformers_also_with_two_sequences_in_a_row(family):
  """Rows "a b" and "b a" of the two sequences that transformers saw one by one."""
  cfg = tiny(**(SIZES | FAMILIES[family]))
  graph, shapes, _ = model.abstract(cfg)
  params = parameters(family, shapes)
  a, b = GOLDEN[f"{family}/inputs"]
  inputs = np.stack([np.concatenate([a, b]), np.concatenate([b, a])])
  targets = np.roll(inputs, -1, axis=1)
  segments = np.repeat([[1, 2]] * 2, LENGTH, axis=1)
  weights = np.tile(np.arange(LENGTH) < LENGTH - 1, (2, 2)).astype(np.float32)  # nothing is predicted across the cut
  batch = {"inputs": inputs, "targets": targets.astype(np.int32), "segmentations": segments.astype(np.int32),
           "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (2, 2)), "loss_weights": weights}

  @jax.jit
  def forward(params, batch):
    transformer = nnx.merge(graph, params)
    hidden_bte, _ = transformer(batch["inputs"], batch["positions"], batch["segmentations"])
    return transformer.logits(hidden_bte), train.token_sums(cfg, graph, params, batch)[1]["nll"]

  with sharding.use(sharding.make_mesh(cfg, jax.devices()[:1]), cfg.logical_axis_rules):
    logits, nll = forward(params, jax.tree.map(jnp.asarray, batch))
  of_a, of_b = GOLDEN[f"{family}/logits"]
  expected = np.stack([np.concatenate([of_a, of_b]), np.concatenate([of_b, of_a])])
  assert expected.std() > 0.3  # they say something
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=3e-5)
  np.testing.assert_allclose(nll / weights.sum(), GOLDEN[f"{family}/loss"], rtol=1e-6)


def test_relative_position_buckets_are_those_of_t5():
  found = [name.split("/")[1:] for name in GOLDEN.files if name.startswith("buckets/")]
  assert len(found) == 4
  for buckets, distance in found:
    expected = GOLDEN[f"buckets/{buckets}/{distance}"]
    cfg = tiny(position_embedding="relative_bias", relative_bias_buckets=buckets, relative_bias_max_distance=distance)
    np.testing.assert_array_equal(model.relative_buckets(cfg, len(expected)), expected)
    assert len(set(expected)) > 2  # near and far ones
