# SPDX-License-Identifier: Apache-2.0
"""Where arrays live, and that every mesh trains as one device does."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec
from tiny import tiny

from MaxText import data, errors, optim, sharding, train

RULES = {"batch": ("data", "fsdp"), "embed": ("fsdp", "expert"), "mlp": ("tensor",), "norm": ("tensor", "fsdp"),
         "head_dim": ()}  # fmt: skip

# --- Rules and meshes ------------------------------------------------------------------------------------------------


def test_a_mesh_axis_shards_the_first_dimension_that_names_it():
  with sharding.use(sharding.make_mesh(tiny(), jax.devices()[:1]), RULES):
    assert sharding.mesh_axes("batch", "embed", None) == [("data", "fsdp"), ("expert",), ()]
    assert sharding.mesh_axes("embed", "batch") == [("fsdp", "expert"), ("data",)]
    assert sharding.spec("embed", "mlp") == PartitionSpec(("fsdp", "expert"), ("tensor",))
    assert sharding.spec("mlp", "norm", "head_dim", None) == PartitionSpec(("tensor",), ("fsdp",), None, None)


def test_a_mistyped_logical_axis_is_a_key_error_on_one_device_too():
  for cfg, devices in ((tiny(), jax.devices()[:1]), (tiny(devices=8), jax.devices())):
    with sharding.use(sharding.make_mesh(cfg, devices), RULES):
      for call in (sharding.spec, sharding.mesh_axes, functools.partial(sharding.shard, jnp.zeros((8, 8)))):
        with pytest.raises(KeyError, match="embd"):
          call("batch", "embd")


def test_emulated_slices_are_outermost_on_the_mesh():
  cfg = tiny(devices=8, ici_fsdp_parallelism=2, ici_tensor_parallelism=2, dcn_fsdp_parallelism=2)
  mesh = sharding.make_mesh(cfg, jax.devices())
  assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "sequence": 1, "tensor": 2, "expert": 1, "stage": 1}
  ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
  assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]  # slice 0 is the devices 0 to 3, and the first half of fsdp
  cfg = tiny(devices=8, ici_fsdp_parallelism=4, dcn_data_parallelism=2)
  ids = np.vectorize(lambda device: device.id)(sharding.make_mesh(cfg, jax.devices()).devices).reshape(2, 4)
  assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


ALL_SWITCHES = {
    "normalization": "layer", "attention_bias": "all", "mlp_bias": True, "logits_bias": True, "use_qk_norm": True,
    "query_scaling": "per_dim", "logits_via_embedding": False, "position_embedding": "learned",
}  # fmt: skip
GOLDEN_SPECS = """
bl_v (tensor)
embedding_ve (tensor, fsdp+sequence+expert)
final_norm/bias_e (fsdp+sequence+expert)
final_norm/scale_e (fsdp+sequence+expert)
layers/attention/bk_kh (stage, tensor, -)
layers/attention/bo_e (stage, fsdp+sequence+expert)
layers/attention/bq_nh (stage, tensor, -)
layers/attention/bv_kh (stage, tensor, -)
layers/attention/key_norm/scale_e (stage, -)
layers/attention/query_norm/scale_e (stage, -)
layers/attention/scale_h (stage, -)
layers/attention/wk_ekh (stage, fsdp+sequence+expert, tensor, -)
layers/attention/wo_nhe (stage, tensor, -, fsdp+sequence+expert)
layers/attention/wq_enh (stage, fsdp+sequence+expert, tensor, -)
layers/attention/wv_ekh (stage, fsdp+sequence+expert, tensor, -)
layers/attention_norm/bias_e (stage, fsdp+sequence+expert)
layers/attention_norm/scale_e (stage, fsdp+sequence+expert)
layers/mlp/bd_e (stage, fsdp+sequence+expert)
layers/mlp/bg_m (stage, tensor)
layers/mlp/bu_m (stage, tensor)
layers/mlp/wd_me (stage, tensor, fsdp+sequence+expert)
layers/mlp/wg_em (stage, fsdp+sequence+expert, tensor)
layers/mlp/wu_em (stage, fsdp+sequence+expert, tensor)
layers/mlp_norm/bias_e (stage, fsdp+sequence+expert)
layers/mlp_norm/scale_e (stage, fsdp+sequence+expert)
position_embedding_te (-, fsdp+sequence+expert)
wl_ve (tensor, fsdp+sequence+expert)
"""


@pytest.fixture
def all_switches():
  """The state, abstract, of a model with every kind of parameter on a mesh of data 2, fsdp 2 and tensor 2."""
  cfg = tiny(devices=8, ici_data_parallelism=2, ici_fsdp_parallelism=2, ici_tensor_parallelism=2, **ALL_SWITCHES)
  mesh = sharding.make_mesh(cfg, jax.devices())
  with sharding.use(mesh, cfg.logical_axis_rules):
    yield mesh, train.abstract_state(cfg, mesh)[1]


def test_every_parameter_and_its_moments_live_where_the_golden_table_says(all_switches):
  _, state = all_switches
  table = [re.split("  +", line.strip()) for line in train.parameter_table(state)]
  assert "".join(f"{name} {spec}\n" for name, _, spec, _ in table[1:-1]) == GOLDEN_SPECS.lstrip()
  for moments in (state["opt_state"].mu, state["opt_state"].nu):
    assert moments == state["params"]


def test_the_parameter_table_says_shape_sharding_and_bytes(all_switches):
  lines = train.parameter_table(all_switches[1])
  assert lines[0].split() == ["parameter", "shape", "spec", "bytes/device"]
  assert len({len(line) for line in lines}) == 1  # in columns
  line = next(line for line in lines if line.startswith("layers/mlp/wu_em "))
  assert re.split("  +", line) == [
      "layers/mlp/wu_em", "(2, 32, 64)", "(stage, fsdp+sequence+expert, tensor)", f"{2 * 32 * 64 * 4 // 4:,}"]
  total = sum(int(line.split()[-1].replace(",", "")) for line in lines[1:-1])
  assert lines[-1].split() == ["total", f"{total:,}"]


def test_a_dimension_that_its_mesh_axes_do_not_divide_is_named_with_a_way_out(all_switches):
  mesh, _ = all_switches
  shapes = {"layers": {"wx_em": jax.ShapeDtypeStruct((30, 7), jnp.float32)}}
  with pytest.raises(errors.ConfigError) as error:
    sharding.placed(mesh, shapes, {"layers": {"wx_em": ("embed", "mlp")}})
  assert str(error.value) == (
      "parameter layers/wx_em has 7 in dimension mlp, which the mesh axes tensor 2 do not divide. "
      "Change the mesh, the size or logical_axis_rules.")


# --- Every mesh trains as one device does ----------------------------------------------------------------------------

STEPS = 10
MODEL = {
    "base_emb_dim": 32, "base_num_query_heads": 8, "base_num_kv_heads": 4, "head_dim": 4, "base_mlp_dim": 64,
    "base_num_decoder_layers": 8, "vocab_size": 64, "max_target_length": 32, "logits_via_embedding": True,
    "embedding_init_std": 0.02, "ici_fsdp_parallelism": 1,
}  # fmt: skip
LAYOUTS = {
    "data 8": {"ici_data_parallelism": 8},
    "fsdp 8": {"ici_fsdp_parallelism": 8},
    "sequence 8": {"ici_sequence_parallelism": 8},
    # Half as many key and value heads as devices: their weights are whole on each.
    "tensor 8": {"ici_tensor_parallelism": 8, "logical_axis_rules": [["kv_heads", []]]},
    "expert 8": {"ici_expert_parallelism": 8},
    "stage 8": {"ici_stage_parallelism": 8},
    "data 2, fsdp 2, tensor 2": {
        "ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    "fsdp 4, tensor 2, half a row per device, twice": {
        "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "per_device_batch_size": 0.5,
        "gradient_accumulation_steps": 2},
    "sequence 2, tensor 4": {"ici_sequence_parallelism": 2, "ici_tensor_parallelism": 4},
    "data 2 across slices, fsdp 4": {"dcn_data_parallelism": 2, "ici_fsdp_parallelism": 4},
    "fsdp 2 across slices, tensor 4": {"dcn_fsdp_parallelism": 2, "ici_tensor_parallelism": 4},
    "stage 2, expert 2, sequence 2": {
        "ici_stage_parallelism": 2, "ici_expert_parallelism": 2, "ici_sequence_parallelism": 2},
}  # fmt: skip


def losses(cfg, devices, params):
  """The losses of STEPS steps from `params` (None: the config's own), and what the first state was."""
  mesh = sharding.make_mesh(cfg, devices)
  with sharding.use(mesh, cfg.logical_axis_rules):
    _, abstract = train.abstract_state(cfg, mesh)
    if params is None:
      state = train.fresh_state(cfg, abstract)
    else:
      state = {"params": params, "opt_state": optim.initialize(params), "step": jnp.int32(0)}
      state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, abstract)
    first = jax.tree.map(jnp.copy, state)  # the step takes the state's memory
    step = train.lower_train_step(cfg, mesh).compile()
    where = train.abstract_batch(cfg, mesh, cfg.global_batch_size)["inputs"].sharding
    found = []
    with data.batches(data.open(cfg).train, 0, cfg.global_batch_size, where) as batches:
      for done in range(STEPS):
        state, metrics = step(state, next(batches), optim.hyper(cfg, done))
        found.append(float(metrics["loss"]))
  return found, first


@pytest.fixture(scope="module")
def no_compile_cache():
  """A step that came from a cache would have no compile log to look into."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", before)
  compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def one_device():
  """(losses, parameters) of one device with 8 rows a step."""
  found, state = losses(tiny(**MODEL), jax.devices()[:1], None)
  assert found[-1] < found[0] - 0.1  # a model that learns nothing would be equal on every mesh
  return found, jax.device_get(state["params"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_on_this_mesh_have_the_losses_of_one_device(layout, one_device, no_compile_cache, capfd):
  expected, params = one_device
  cfg = tiny(devices=8, **(MODEL | LAYOUTS[layout]))
  assert cfg.global_batch_size == 8 and math.prod(cfg.mesh_shape) == 8
  found, state = losses(cfg, jax.devices(), params)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert "rematerialization" not in capfd.readouterr().err  # XLA: a tensor made whole on every device on the way
  sizes = dict(zip(sharding.MESH_AXES, cfg.mesh_shape, strict=True))
  for x in jax.tree.leaves((state["params"], state["opt_state"].mu)):
    used = [axis for axes in x.sharding.spec for axis in ((axes,) if isinstance(axes, str) else axes or ())]
    shards = math.prod(sizes[axis] for axis in used)
    assert {shard.data.nbytes for shard in x.addressable_shards} == {x.nbytes // shards}
    assert len(x.addressable_shards) == 8


@pytest.mark.parametrize("axes", [("data", "fsdp", "tensor"), ("data", "tensor", "expert")])
def test_few_tokens_for_the_width_train_on_three_axes_as_on_one_device(axes):
  """XLA's partitioner, left to itself, mixes up the rows of such a batch: model.scattered()."""
  keys = MODEL | {"max_target_length": 4}
  expected, state = losses(tiny(**keys), jax.devices()[:1], None)
  cfg = tiny(devices=8, **(keys | {f"ici_{axis}_parallelism": 2 for axis in axes}))
  found, _ = losses(cfg, jax.devices(), jax.device_get(state["params"]))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_each_device_has_its_share_of_all_parameters_on_every_axis_of_the_embed_dimension(one_device):
  _, params = one_device
  total = sum(x.nbytes for x in jax.tree.leaves(params))
  for layout, shards in (("data 8", 1), ("fsdp 8", 8), ("sequence 8", 8), ("expert 8", 8),
                         ("data 2 across slices, fsdp 4", 4)):
    cfg = tiny(devices=8, **(MODEL | LAYOUTS[layout]))
    mesh = sharding.make_mesh(cfg, jax.devices())
    with sharding.use(mesh, cfg.logical_axis_rules):
      _, state = train.abstract_state(cfg, mesh)
    per_device = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state["params"]))
    assert per_device * shards == total, layout


def test_initial_weights_do_not_depend_on_the_mesh(one_device):
  cfg = tiny(devices=8, **(MODEL | LAYOUTS["data 2, fsdp 2, tensor 2"]))
  mesh = sharding.make_mesh(cfg, jax.devices())
  with sharding.use(mesh, cfg.logical_axis_rules):
    params = train.fresh_state(cfg, train.abstract_state(cfg, mesh)[1])["params"]
  jax.tree.map(np.testing.assert_array_equal, params, one_device[1])


def test_bfloat16_on_eight_devices_is_that_of_one_within_a_thousandth(one_device):
  _, params = one_device
  # A calm rate: at 1e-2 the roundings of ten steps amplify each other to just above a thousandth.
  keys = MODEL | {"dtype": "bfloat16", "ici_fsdp_parallelism": -1, "learning_rate": 3e-3}
  one, eight = (losses(tiny(devices=len(devices), **keys), devices, params)[0]
                for devices in (jax.devices()[:1], jax.devices()))
  np.testing.assert_allclose(eight, one, rtol=1e-3)
  assert max(abs(np.subtract(one, one_device[0]))) > 1e-5  # it is another type


def test_four_micro_steps_of_two_rows_are_one_step_of_eight(one_device):
  expected, params = one_device
  cfg = tiny(**(MODEL | {"per_device_batch_size": 2.0, "gradient_accumulation_steps": 4}))
  np.testing.assert_allclose(losses(cfg, jax.devices()[:1], params)[0], expected, rtol=1e-5)
