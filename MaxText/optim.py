# SPDX-License-Identifier: Apache-2.0
"""The optimizer: learning-rate schedule, clipping, AdamW with a decay mask, and skipping of bad steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax


def learning_rate(cfg, step):
  """Learning rate of the step numbered `step` (from 0), a float.

  Linear warm-up from 0 to the peak, then by lr_schedule_type to learning_rate_final_fraction of it at the end of the
  schedule. "exponential" falls by the same factor each step, as in Pax's LinearRampupExponentialDecay.
  """
  length, warmup, final = cfg.learning_rate_schedule_steps, cfg.warmup_steps, cfg.learning_rate_final_fraction
  if step < warmup:
    return cfg.learning_rate * step / warmup
  if step >= length and cfg.learning_rate_after_schedule == "zero":
    return 0.0
  progress = min((step - warmup) / max(length - warmup, 1), 1.0)
  if cfg.lr_schedule_type == "constant":
    return cfg.learning_rate
  if cfg.lr_schedule_type == "exponential":
    return cfg.learning_rate * final**progress
  return cfg.learning_rate * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


HYPER = ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay", "update_rms_cap", "clip_norm", "skip_norm")


def abstract_hyper():
  """Shapes and types of hyper(), which are those of every config."""
  return {name: jax.ShapeDtypeStruct((), np.float32) for name in HYPER}


def hyper(cfg, step):
  """The step's scalars, inputs of the compiled step: a changed schedule or optimizer constant compiles nothing anew."""
  return jax.tree.map(np.float32, {
      "learning_rate": learning_rate(cfg, step),
      "b1": cfg.adam_b1,
      "b2": cfg.adam_b2,
      "eps": cfg.adam_eps,
      "eps_root": cfg.adam_eps_root,
      "weight_decay": cfg.adam_weight_decay,
      "update_rms_cap": cfg.update_rms_cap or math.inf,
      "clip_norm": cfg.gradient_clipping_threshold or math.inf,
      "skip_norm": cfg.skip_step_gradient_norm or math.inf,
  })


def initialize(params):
  """Optimizer state of `params`: optax's ScaleByAdamState (count, mu, nu)."""
  return optax.scale_by_adam().init(params)


def decays(cfg, path):
  """Whether weight decay applies to the parameter at `path` (names, outermost first).

  By our naming, matrices are the weights whose name starts with "w"; norms, biases and embeddings have other names.
  """
  return cfg.weight_decay_mask == "all" or path[-1].startswith("w")


def apply(cfg, grads, opt_state, params, hyper):
  """One step of AdamW: (params, opt_state, metrics).

  In this order: norm of the raw gradient; clip; moments; cap of each update's root mean square; decay; learning rate.
  When the norm is not finite or above skip_norm, params and opt_state come back bitwise unchanged.
  """
  raw_norm = optax.tree.norm(grads)
  ok = jnp.isfinite(raw_norm) & (raw_norm <= hyper["skip_norm"])
  scale = jnp.minimum(1.0, hyper["clip_norm"] / jnp.maximum(raw_norm, 1e-30))
  adam = optax.scale_by_adam(hyper["b1"], hyper["b2"], hyper["eps"], hyper["eps_root"])
  updates, new_state = adam.update(jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), opt_state)

  def new_param(path, param, update):
    names = [key.key for key in path]
    if cfg.has_update_rms_cap:  # layers are stacked, but each is a parameter of its own
      axes = tuple(range(1 if names[0] == "layers" else 0, update.ndim))
      rms = jnp.sqrt(jnp.mean(jnp.square(update), axis=axes, keepdims=True))
      update = update / jnp.maximum(1.0, rms / hyper["update_rms_cap"])
    if decays(cfg, names):
      update = update + hyper["weight_decay"] * param
    return jnp.where(ok, param - hyper["learning_rate"] * update, param)

  new_params = jax.tree.map_with_path(new_param, params, updates)
  new_state = jax.tree.map(lambda new, old: jnp.where(ok, new, old), new_state, opt_state)
  metrics = {
      "grad_norm": raw_norm * scale,
      "raw_grad_norm": raw_norm,
      "param_norm": optax.tree.norm(new_params),
      "skipped": 1 - ok.astype(jnp.int32),
  }
  return new_params, new_state, metrics
