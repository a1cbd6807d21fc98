# SPDX-License-Identifier: Apache-2.0
"""Claims about decoding a trained run on CPU: token by token through the cache its evaluation set costs what training
logged; greedy text is the full forward pass's; and a step of one row is at least --at_least times as fast as its limit:
the matrix products of such a step alone (every weight and the cache read once, in as few products as there can be), and
for each other operation that it runs the time of the smallest one there is.

  python3 end_to_end/test_decode.py [recipe.yml] [key=value ...] [--at_least=0.6]
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()
  os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import math
import re
import time

from end_to_end import runs

ROWS, LENGTH = 8, 192


def product_seconds(cfg, slots):
  """Seconds of the matrix products of one step of one row: all weights, and queries with a cache of `slots`."""
  import jax
  import jax.numpy as jnp

  E, M, V, L = cfg.emb_dim, cfg.mlp_dim, cfg.vocab_size, cfg.num_decoder_layers
  N, K, H = cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim
  shapes = [(E, (N + 2 * K) * H), (N * H, E), (E, 2 * M), (M, E)]
  layers = [[jnp.full(shape, 1e-3) for shape in shapes] for _ in range(L)]
  table, keys, values = jnp.full((E, V), 1e-3), jnp.full((K, H, slots), 1e-3), jnp.full((K, slots, H), 1e-3)

  def loop(layers, table, keys, values):
    def step(_, x):
      for wqkv, wo, wgu, wd in layers:
        q = (x @ wqkv)[:, :N * H].reshape(K, N // K, H)
        x = x + ((q @ keys) @ values).reshape(1, N * H) @ wo
        x = x + (x @ wgu)[:, :M] @ wd
      return x + (x @ table)[:, :1]

    return jax.lax.fori_loop(0, 100, step, jnp.ones((1, E)))

  return best_seconds(loop, layers, table, keys, values) / 100


def dispatch_seconds():
  """Seconds of one operation that computes next to nothing, a product of 16 x 16 that cannot be fused with others."""
  import jax
  import jax.numpy as jnp

  def loop(x, w):
    def step(_, x):
      for _ in range(40):
        x = x @ w
      return x

    return jax.lax.fori_loop(0, 100, step, x)

  return best_seconds(loop, jnp.ones((1, 16)), jnp.eye(16)) / 4000


def best_seconds(function, *arguments):
  """Least wall time in seven calls of a function compiled for these arguments."""
  import jax

  compiled, found = jax.jit(function).lower(*arguments).compile(), []
  for _ in range(20):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    found.append(time.perf_counter() - start)
  return min(found)


def count_operations(program):
  """Operations but for products in the largest loop's body of a compiled program: those of one step."""
  bodies, most = set(re.findall(r"body=%([\w.\-]+)", program)), 0
  for text in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", program):
    name = re.match(r"%([\w.\-]+) ", text)
    if name and name[1] in bodies:
      kinds = re.findall(r"^ +(?:ROOT )?%[\w.\-]+ = (?:\([^=]*\)|\S+) ([\w\-]+)\(", text, re.MULTILINE)
      free = ("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "dot")
      most = max(most, sum(kind not in free for kind in kinds))
  return most


def claim(place, at_least):
  import jax
  import numpy as np
  from flax import nnx

  from MaxText import data, decode, model, pyconfig, sharding, topology

  place.train("demo")
  logged = place.rows("demo", "eval.jsonl")[-1]["eval/loss"]
  cfg = pyconfig.load([*place.arguments, "run_name=demo", "eval_per_device_batch_size=8"], reopen=True)
  topology.set_environment(cfg)
  run = decode.open_run(cfg)
  cfg = run.cfg

  held_out = data.open(cfg).eval  # token by token: the first ROWS rows, against one pass over the same
  with sharding.use(run.mesh, cfg.logical_axis_rules):
    extend = jax.jit(functools.partial(decode.extend, cfg, run.graph), donate_argnums=1)
    transformer, nll, weights, whole = nnx.merge(run.graph, run.params), 0.0, 0.0, 0.0
    score = jax.jit(lambda batch: model.cross_entropy(
        cfg, transformer.head(), transformer(batch["inputs"], batch["positions"], batch["segmentations"])[0],
        batch["targets"], batch["loss_weights"])[1]["nll"])
    for first in range(0, held_out.num_rows, ROWS):
      batch = held_out.rows(first, first + ROWS)
      whole, weights = whole + float(score(batch)), weights + batch["loss_weights"].sum()
      if first == 0:
        cache = model.empty_cache(cfg, ROWS, held_out.length)
        for at in range(held_out.length):
          now = [batch[name][:, at:at + 1] for name in ("inputs", "positions", "segmentations")]
          logits_bv, cache = extend(run.params, cache, *now)
          chosen = np.asarray(jax.nn.log_softmax(logits_bv))[np.arange(ROWS), batch["targets"][:, at]]
          nll -= float((chosen * batch["loss_weights"][:, at]).sum())
        runs.check(math.isclose(nll, whole, rel_tol=1e-5), f"token by token {nll}, in one pass {whole}")
  runs.check(math.isclose(whole / weights, logged, rel_tol=1e-5), f"loss {whole / weights}, training logged {logged}")

  decoder, prompt = decode.Decoder(run), decode.encode(run, "def ")
  new = min(LENGTH, cfg.max_target_length - len(prompt))
  steps = []
  for _ in range(20):
    decoder.seconds, decoder.counts = dict.fromkeys(decoder.seconds, 0.0), dict.fromkeys(decoder.counts, 0)
    found = next(decoder.generate([prompt], max_predict_length=new))
    steps.append(decoder.seconds["decode"] / max(decoder.counts["steps"], 1))
  text = np.concatenate([prompt, found.tokens])
  with sharding.use(run.mesh, cfg.logical_axis_rules):
    ones = np.ones((1, len(text)), np.int32)
    full = jax.jit(lambda x: transformer.logits(transformer(x, ones.cumsum(axis=1) - 1, ones)[0]))
    likeliest = np.asarray(full(text[None].astype(np.int32)))[0].argmax(axis=1)[len(prompt) - 1:-1]
  runs.check((likeliest == found.tokens).all(), "greedy text is not that of the full forward pass")

  ((_, room, width), compiled), = decoder.compiled.items()
  operations, dispatch = count_operations(compiled["advance"].as_text()), dispatch_seconds()
  products, step = product_seconds(cfg, room + width), min(steps)
  limit = products + operations * dispatch
  figures = (f"{1 / step:,.0f} tokens/s, {1e3 * step:.3f} ms a step, {limit / step:.2f} of the limit {1e3 * limit:.3f} "
             f"(products {1e3 * products:.3f}, {operations} other operations of {1e6 * dispatch:.2f} us)")
  runs.check(limit / step >= at_least, f"{figures}: less than {at_least}")
  return (f"{figures}; {len(found.tokens)} greedy tokens as by the full pass; evaluation loss {whole / weights:.6f}, "
          f"logged {logged:.6f}; {ROWS} rows token by token the same")


if __name__ == "__main__":
  runs.judge(__file__, claim, ["configs/base.yml"], at_least=0.6)
