# SPDX-License-Identifier: Apache-2.0
"""A model small enough to test with: two layers on eight rows of 32 tokens."""

import jax

from MaxText import pyconfig

TINY = {
    "run_name": "tiny", "dataset_type": "synthetic", "tokenizer_type": "byte", "jax_cache_dir": "",
    "data_cache_dir": "", "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 8,
    "base_mlp_dim": 64, "base_num_decoder_layers": 2, "vocab_size": 320, "max_target_length": 32,
    "per_device_batch_size": 8.0, "steps": 10, "eval_interval": -1, "learning_rate": 1e-2, "enable_tensorboard": False,
}  # fmt: skip


def tiny(devices=1, **overrides):
  """A resolved Config of the tiny model on `devices` of the fake devices, 8 rows in all unless overridden."""
  keys = TINY | {"per_device_batch_size": 8.0 / devices} | overrides
  cfg = pyconfig.load(["configs/base.yml"] + [f"{key}={pyconfig.text(value)}" for key, value in keys.items()])
  return pyconfig.resolve(cfg, jax.devices()[:devices])
