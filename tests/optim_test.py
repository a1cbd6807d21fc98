# SPDX-License-Identifier: Apache-2.0
"""The optimizer: schedules by their formulas, AdamW against NumPy and optax, the decay mask, steps that are skipped."""

import functools
import glob
import math

import jax
import numpy as np
import optax
import pytest
from tiny import tiny

from MaxText import model, optim, pyconfig

SHAPES = {
    "embedding_ve": (7, 4),
    "final_norm": {"scale_e": (4,)},
    "layers": {"attention": {"wq_enh": (3, 4, 2, 3), "bq_nh": (3, 2, 3)}, "mlp": {"wu_em": (3, 4, 8)}},
}


def tree(make):
  return jax.tree.map(make, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def gradients(step):
  """Their norm grows from about 1 to 40 over ten steps, so that clipping at 10 sets in on the way."""
  rng = np.random.default_rng(step)
  return tree(lambda shape: (0.05 * 1.6**step * rng.normal(size=shape)).astype(np.float32))


def parameters():
  rng = np.random.default_rng(99)
  return tree(lambda shape: rng.normal(size=shape).astype(np.float32))


def steps_of(cfg, count=10):
  """Parameters, optimizer state and all steps' metrics after `count` steps of apply()."""
  params, state, metrics = parameters(), optim.initialize(parameters()), []
  step = jax.jit(functools.partial(optim.apply, cfg))
  for i in range(count):
    params, state, values = step(gradients(i), state, params, optim.hyper(cfg, i))
    metrics.append(values)
  return params, state, metrics


def assert_close(actual, expected, **tolerance):
  jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), actual, expected)


# --- Schedules -------------------------------------------------------------------------------------------------------


def rates(at, **keys):
  cfg = tiny(**keys)
  return np.array([optim.learning_rate(cfg, step) for step in at])


def test_cosine_is_that_of_optax_and_zero_after_the_schedule():
  keys = {"learning_rate": 3e-3, "warmup_steps": 30, "learning_rate_schedule_steps": 200,
          "learning_rate_final_fraction": 0.1}
  oracle = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 30, 200, 3e-4)
  steps = np.arange(200)
  np.testing.assert_allclose(rates(steps, **keys), oracle(steps), rtol=2e-5, atol=1e-9)
  assert rates([0], **keys) == 0.0 and rates([30], **keys) == 3e-3
  assert (rates([200, 201, 10_000], **keys) == 0.0).all()


@pytest.mark.parametrize(("kind", "course"), [
    ("cosine", lambda p: 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * p))),
    ("exponential", lambda p: 0.2**p),
    ("constant", lambda p: 1.0),
], ids=["cosine", "exponential", "constant"])  # fmt: skip
@pytest.mark.parametrize("after", ["zero", "floor"])
def test_after_linear_warm_up_the_rate_follows_its_formula_to_zero_or_the_floor(kind, course, after):
  found = rates(range(160), learning_rate=0.5, lr_schedule_type=kind, warmup_steps=20, steps=160,
                learning_rate_schedule_steps=120, learning_rate_final_fraction=0.2, learning_rate_after_schedule=after)
  warm_up = [0.5 * step / 20 for step in range(20)]
  decay = [0.5 * course((step - 20) / 100) for step in range(20, 120)]
  rest = [0.0 if after == "zero" else 0.5 * course(1.0)] * 40
  np.testing.assert_allclose(found, warm_up + decay + rest, rtol=1e-12)


def test_warm_up_is_a_fraction_of_the_schedule_unless_given_in_steps():
  assert rates([25], steps=500, warmup_steps_fraction=0.1, learning_rate=1.0) == 0.5
  assert rates([25], steps=500, warmup_steps_fraction=0.1, warmup_steps=100, learning_rate=1.0) == 0.25
  assert rates([25], steps=500, warmup_steps_fraction=0.1, learning_rate_schedule_steps=1000, learning_rate=1.0) == 0.25
  assert rates([0], steps=500, warmup_steps=0, learning_rate=1.0) == 1.0


# --- AdamW -----------------------------------------------------------------------------------------------------------


def adamw_in_numpy(cfg, params, count):
  """AdamW as in Loshchilov & Hutter 2019 in float64, with clipping, and each layer's update capped by its own RMS."""
  params = jax.tree.map(np.float64, params)
  first, second = jax.tree.map(np.zeros_like, params), jax.tree.map(np.zeros_like, params)
  for i in range(count):
    grads = jax.tree.map(np.float64, gradients(i))
    norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * min(1.0, cfg.gradient_clipping_threshold / norm), grads)  # noqa: B023
    b1, b2, t = cfg.adam_b1, cfg.adam_b2, i + 1
    first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, grads)  # noqa: B023
    second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, second, grads)  # noqa: B023

    def new(path, p, m, v):
      m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)  # noqa: B023
      update = m_hat / (np.sqrt(v_hat + cfg.adam_eps_root) + cfg.adam_eps)
      if cfg.update_rms_cap:
        parts = update if path[0].key == "layers" else [update]
        parts = [u * min(1.0, cfg.update_rms_cap / math.sqrt((u**2).mean())) for u in parts]
        update = np.stack(parts) if path[0].key == "layers" else parts[0]
      if cfg.weight_decay_mask == "all" or path[-1].key in ("wq_enh", "wu_em"):
        update = update + cfg.adam_weight_decay * p
      return p - optim.learning_rate(cfg, i) * update  # noqa: B023

    params = jax.tree.map_with_path(new, params, first, second)
  return params, first, second


@pytest.mark.parametrize("keys", [
    {"gradient_clipping_threshold": 10.0},
    {"gradient_clipping_threshold": 10.0, "weight_decay_mask": "all", "adam_eps_root": 1e-3, "adam_eps": 1e-3},
    {"gradient_clipping_threshold": 10.0, "update_rms_cap": 0.7},
], ids=["clipped", "all decayed, eps", "updates capped"])  # fmt: skip
def test_ten_steps_are_those_of_numpy(keys):
  cfg = tiny(learning_rate=0.1, adam_weight_decay=0.3, **keys)
  params, state, metrics = steps_of(cfg)
  expected, first, second = adamw_in_numpy(cfg, parameters(), 10)
  assert_close(params, expected, rtol=1e-5, atol=1e-6)
  assert_close((state.mu, state.nu), (first, second), rtol=1e-5, atol=1e-7)
  raw, clipped = (np.array([m[name] for m in metrics]) for name in ("raw_grad_norm", "grad_norm"))
  assert raw[0] < 10.0 < raw[-1]
  np.testing.assert_allclose(clipped, np.minimum(raw, 10.0), rtol=1e-6)
  np.testing.assert_allclose(raw, [optax.tree.norm(gradients(i)) for i in range(10)], rtol=1e-6)
  np.testing.assert_allclose(metrics[-1]["param_norm"], optax.tree.norm(params), rtol=1e-6)


def test_ten_steps_are_those_of_optax():
  cfg = tiny(learning_rate=0.1, adam_weight_decay=0.3, gradient_clipping_threshold=10.0)
  mask = {"embedding_ve": False, "final_norm": {"scale_e": False},
          "layers": {"attention": {"wq_enh": True, "bq_nh": False}, "mlp": {"wu_em": True}}}
  oracle = optax.chain(
      optax.clip_by_global_norm(10.0),
      optax.adamw(lambda step: jax.numpy.array([optim.learning_rate(cfg, i) for i in range(10)])[step],
                  cfg.adam_b1, cfg.adam_b2, cfg.adam_eps, weight_decay=0.3, mask=mask))
  expected, state = parameters(), oracle.init(parameters())

  @jax.jit
  def step(grads, state, params):
    updates, state = oracle.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for i in range(10):
    expected, state = step(gradients(i), state, expected)
  assert_close(steps_of(cfg)[0], expected, rtol=1e-5, atol=1e-6)


def test_the_cap_of_one_layer_is_not_that_of_another():
  """Layer 1 alone has gradients that its moments have not seen the like of."""
  cfg = tiny(learning_rate=1.0, update_rms_cap=0.5, adam_weight_decay=0.0, gradient_clipping_threshold=0.0,
             warmup_steps=0, lr_schedule_type="constant", adam_eps=1.0)
  grads = tree(np.zeros)
  grads["layers"]["mlp"]["wu_em"][:] = 0.1  # with eps 1 an update of 0.1 / 1.1
  grads["layers"]["mlp"]["wu_em"][1] = 1e6  # one of 1, capped to 0.5
  params, _, _ = jax.jit(functools.partial(optim.apply, cfg))(
      grads, optim.initialize(parameters()), parameters(), optim.hyper(cfg, 0))
  moved = parameters()["layers"]["mlp"]["wu_em"] - params["layers"]["mlp"]["wu_em"]
  np.testing.assert_allclose(moved.mean((1, 2)), [0.1 / 1.1, 0.5, 0.1 / 1.1], rtol=1e-5)


DECAYED = {
    "layers/attention/wk_ekh", "layers/attention/wo_nhe", "layers/attention/wq_enh", "layers/attention/wv_ekh",
    "layers/mlp/wd_me", "layers/mlp/wg_em", "layers/mlp/wu_em", "wl_ve",
}  # fmt: skip
SPARED = {
    "bl_v", "embedding_ve", "final_norm/bias_e", "final_norm/scale_e", "position_embedding_te", "relative_bias_dn",
    "layers/attention/bk_kh", "layers/attention/bo_e", "layers/attention/bq_nh", "layers/attention/bv_kh",
    "layers/attention/key_norm/scale_e", "layers/attention/query_norm/scale_e", "layers/attention/scale_h",
    "layers/attention_norm/bias_e", "layers/attention_norm/scale_e", "layers/mlp/bd_e", "layers/mlp/bg_m",
    "layers/mlp/bu_m", "layers/mlp_norm/bias_e", "layers/mlp_norm/scale_e",
}  # fmt: skip


def test_matrices_decay_and_norms_biases_and_embeddings_do_not_in_every_recipe():
  """A parameter new to the model has to be sorted into one of the two lists above."""
  configs = [pyconfig.load([path], need_run_name=False) for path in glob.glob(f"{pyconfig.REPO}/configs/*.yml")]
  configs.append(tiny(position_embedding="relative_bias", mlp_bias=True, logits_bias=True))
  switches = ("normalization", "position_embedding", "attention_bias", "mlp_bias", "logits_bias", "use_qk_norm",
              "query_scaling", "block_layout", "mlp_activations", "logits_via_embedding")
  families = {tuple(getattr(cfg, key) for key in switches): cfg for cfg in configs}
  names = {True: set(), False: set()}
  for cfg in families.values():
    for path, _ in jax.tree.leaves_with_path(model.abstract(cfg.replace(weight_decay_mask="matrices"))[1]):
      path = [key.key for key in path]
      names[optim.decays(cfg.replace(weight_decay_mask="matrices"), path)].add("/".join(path))
      assert optim.decays(cfg.replace(weight_decay_mask="all"), path)
  assert names == {True: DECAYED, False: SPARED}


# --- Steps that are skipped, scalars that are inputs -----------------------------------------------------------------


def bits(tree):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_bad_gradient_changes_not_a_bit_and_is_counted():
  cfg = tiny(skip_step_gradient_norm=1.9)
  params, state, metrics = steps_of(cfg, count=3)
  assert [int(m["skipped"]) for m in metrics] == [0, 0, 0]
  step = jax.jit(functools.partial(optim.apply, cfg))
  for value in (math.nan, math.inf, -math.inf, 1e30, 2.0):  # 1e30 is finite, its square is not; 2.0 is above 1.9
    grads = tree(lambda shape: np.zeros(shape, np.float32))
    grads["layers"]["mlp"]["wu_em"][1, 2, 3] = value
    new_params, new_state, values = step(grads, state, params, optim.hyper(cfg, 3))
    assert bits((new_params, new_state)) == bits((params, state)), value
    assert values["skipped"] == 1
  grads["layers"]["mlp"]["wu_em"][1, 2, 3] = 1.8
  new_params, new_state, values = step(grads, state, params, optim.hyper(cfg, 3))
  assert values["skipped"] == 0 and new_state.count == state.count + 1
  assert all(a != b for a, b in zip(bits((new_params, new_state)), bits((params, state)), strict=True))


def test_one_compiled_step_serves_every_schedule_and_optimizer_constant():
  first, second = tiny(), tiny(learning_rate=0.5, adam_b1=0.5, adam_b2=0.6, adam_eps=0.1, adam_weight_decay=0.7,
                               gradient_clipping_threshold=0.0, skip_step_gradient_norm=3.0)  # fmt: skip
  step = jax.jit(functools.partial(optim.apply, first))
  results = [step(gradients(5), optim.initialize(parameters()), parameters(), optim.hyper(cfg, at))[0]
             for cfg, at in ((first, 1), (first, 9), (second, 1))]
  assert step._cache_size() == 1
  alone = jax.jit(functools.partial(optim.apply, second))
  expected = alone(gradients(5), optim.initialize(parameters()), parameters(), optim.hyper(second, 1))[0]
  assert bits(results[2]) == bits(expected)
  assert len({bits(result)[0] for result in results}) == 3
