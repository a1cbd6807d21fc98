# SPDX-License-Identifier: Apache-2.0
"""Recipes: each configs/*.yml builds and is the model, the batch and the mesh that were published."""

import dataclasses
import glob
import math
import os
import re
import subprocess
import sys

import jax
import pytest

from MaxText import model, pyconfig
from MaxText.errors import ConfigError

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass(frozen=True)
class Published:
  """What is published of a recipe: parameters (billions, as printed), its hardware and rows per step."""

  parameters: str
  platform: str
  slices: int
  chips_per_slice: int
  rows: int
  gflop_per_token: str = ""  # 6 N without look-ups + 12 L H d S, where published


RECIPES = {
    "llama2_7b": Published("6.738", "gpu", 2, 8, 32, "46.09"),
    "llama2_13b": Published("13.016", "gpu", 1, 8, 64, "87.18"),
    "llama2_70b": Published("68.98", "gpu", 2, 8, 64, "444.5"),
    "maxtext_1b": Published("1.091", "tpu", 1, 256, 3072),
    "maxtext_16b": Published("16.5", "tpu", 2, 256, 3072),
    "maxtext_22b": Published("21.9", "tpu", 8, 64, 8192),
    "maxtext_32b": Published("32.5", "tpu", 2, 256, 2048),
    "maxtext_52b": Published("51.9", "tpu", 2, 192, 3840),
    "pax_c4_1b": Published("1.105", "tpu", 1, 4, 128, "7.04"),
    "pax_c4_2b": Published("2.137", "tpu", 1, 4, 128, "13.50"),
    "pax_c4_16b": Published("16.51", "tpu", 1, 32, 512, "101.7"),
    "pax_c4_32b": Published("32.48", "tpu", 1, 64, 512, "198.9"),
    "pax_c4_22b": Published("21.95", "tpu", 4, 64, 4096, "135.3"),
    "pax_c4_22b_v4_384": Published("24.77", "tpu", 2, 192, 3840, "151.3"),
    "pax_gpt3_xl": Published("2.93", "tpu", 1, 8, 512, "19.06"),
    "rosetta_gpt_126m": Published("0.1253", "gpu", 8, 8, 256, "0.968"),
    "rosetta_gpt_5b": Published("5.048", "gpu", 32, 8, 2048, "32.64"),
    "rosetta_gpt_175b": Published("174.6", "gpu", 32, 8, 1536, "1076.4"),
}
LADDER = {1: "1.091", 2: "2.097", 4: "4.194", 8: "8.221", 16: "16.27", 32: "32.55", 64: "64.76", 128: "129.2"}


@dataclasses.dataclass
class Device:
  platform: str
  device_kind: str
  slice_index: int


def load(*argv):
  return pyconfig.load([*argv, "run_name=x"])


def recipe(name):
  return load(f"configs/{name}.yml")


def matmul_parameters(cfg):
  """Parameters of the matrices of layers and logits."""
  E, N, K, H, M = cfg.emb_dim, cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim
  layer = 2 * E * N * H + 2 * E * K * H + (1 + len(cfg.mlp_activations)) * E * M
  return cfg.num_decoder_layers * layer + cfg.vocab_size * E


def counted_by_hand(cfg):
  """All parameters, by the formulas of the papers and independent of model.py."""
  E, N, K, H, M = cfg.emb_dim, cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim
  norm = {"layer": 2 * E, "rms": E}[cfg.normalization]
  layer = norm * {"sequential": 2, "parallel": 1}[cfg.block_layout]
  layer += {"": 0, "qkv": (N + 2 * K) * H, "all": (N + 2 * K) * H + E}[cfg.attention_bias]
  layer += (len(cfg.mlp_activations) * M + E) * cfg.mlp_bias
  layer += 2 * H * cfg.use_qk_norm + H * (cfg.query_scaling == "per_dim")
  total = matmul_parameters(cfg) + cfg.num_decoder_layers * layer + norm
  total += cfg.vocab_size * E * (not cfg.logits_via_embedding) + cfg.vocab_size * cfg.logits_bias
  total += cfg.trainable_position_size * E * (cfg.position_embedding == "learned")
  return total + cfg.relative_bias_buckets * N * (cfg.position_embedding == "relative_bias")


def agrees(value, printed):
  """Whether `value` rounds (or is cut) to the printed decimal."""
  digits = len(printed.partition(".")[2])
  return abs(value - float(printed)) <= 10**-digits


def test_every_recipe_is_in_the_table_of_what_is_published():
  names = {os.path.basename(path)[:-4] for path in glob.glob(os.path.join(REPO, "configs", "*.yml"))}
  assert names - {"base"} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_opens_with_its_command_its_parent_and_only_what_differs(name):
  path = os.path.join(REPO, "configs", f"{name}.yml")
  with open(path) as file:
    lines = file.read().splitlines()
  assert lines[0] == f"# python3 MaxText/train.py configs/{name}.yml run_name=NAME"
  keys = list(pyconfig.read(path))
  assert keys[0] == "base_config"
  cfg, base = recipe(name), pyconfig.base()
  sizes = {"head_dim", "per_device_batch_size"}  # written out, though some are those of base.yml
  assert [key for key in keys[1:] if cfg.given[key] == base[key] and key not in sizes] == []
  assert keys[1:] == [key for key in base if key in keys], "in the order of base.yml"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_published_number_of_parameters(name):
  cfg = recipe(name)
  assert agrees(counted_by_hand(cfg) / 1e9, RECIPES[name].parameters)
  assert count_of_model(cfg) == counted_by_hand(cfg)


@pytest.mark.parametrize("scale", LADDER)
def test_the_ladder_has_the_published_numbers_of_parameters(scale):
  cfg = load("configs/base.yml", f"global_parameter_scale={scale}")
  assert agrees(counted_by_hand(cfg) / 1e9, LADDER[scale])
  assert count_of_model(cfg) == counted_by_hand(cfg)


@pytest.mark.parametrize("name", [name for name, published in RECIPES.items() if published.gflop_per_token])
def test_a_recipe_costs_its_published_flops_per_token(name):
  cfg = recipe(name)
  attention = 12 * cfg.num_decoder_layers * cfg.num_query_heads * cfg.head_dim * cfg.max_target_length
  printed = RECIPES[name].gflop_per_token
  assert (6 * matmul_parameters(cfg) + attention) / 1e9 == pytest.approx(float(printed), rel=2e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resolves_to_its_published_batch_on_its_published_hardware(name):
  published = RECIPES[name]
  kind = {"tpu": "TPU v4", "gpu": "NVIDIA H100 80GB HBM3"}[published.platform]
  devices = [Device(published.platform, kind, index)
             for index in range(published.slices) for _ in range(published.chips_per_slice)]
  cfg = pyconfig.resolve(recipe(name), devices)
  assert cfg.global_batch_size == published.rows and cfg.dtype == "bfloat16"
  assert math.prod(cfg.dcn_mesh_shape) == published.slices
  assert math.prod(cfg.ici_mesh_shape) == published.chips_per_slice


def test_what_recipes_hand_to_xla_is_known_to_it():
  flags = {cfg.xla_flags for cfg in map(recipe, RECIPES) if cfg.xla_flags}
  run = subprocess.run(
      [sys.executable, "-c", "import jax; jax.devices()"], capture_output=True, text=True,
      env=os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"})
  assert flags and run.returncode == 0, run.stderr


@pytest.mark.parametrize("argument", [
    "PER_CORE_BATCH_SIZE=64", "per_core_batch_size=64", "microbatch_siaze=8", "r_cos_min_ratio=0.1",
    "checkpoint_save_max_to_keep=3",
])
def test_the_misspelt_settings_of_published_recipes_would_not_pass(argument):
  with pytest.raises(ConfigError, match=f"unknown key {argument}"):
    load("configs/pax_gpt3_xl.yml", argument)


def test_every_recipe_that_a_document_names_exists():
  for path in glob.glob(os.path.join(REPO, "*.md")) + glob.glob(os.path.join(REPO, "end_to_end", "*")):
    if os.path.isfile(path):
      with open(path, errors="replace") as file:
        for named in re.findall(r"\bconfigs/\w+\.yml", file.read()):
          assert os.path.isfile(os.path.join(REPO, named)), f"{path} names {named}"


def count_of_model(cfg):
  """Parameters of model.py, by shape alone."""
  _, shapes, _ = model.abstract(cfg)
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
