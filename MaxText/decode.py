# SPDX-License-Identifier: Apache-2.0
"""Continues texts with a trained model: prefill, then one compiled loop over a KV cache.

  python3 MaxText/decode.py configs/base.yml run_name=NAME prompt="def " [key=value ...]
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  CONFIG = interpreter.start(need_run_name=False, reopen=True)

import concurrent.futures
import contextlib
import dataclasses
import functools
import glob
import json
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding

from MaxText import checkpoint, data, diagnostics, errors, model, pyconfig, sharding, tokenizer

CHUNK = 64  # tokens that one call of prefill appends: prompts of any length run the same compiled step
FIRST_LOOK = 8  # tokens until what has been decoded is looked at, and then as many as take so long:
LOOK_SECONDS = {"watched": 0.05, "not watched": 0.5}
UNSTACK_BYTES = 1 << 30
NO_PIECE = -1e30


class Opened(NamedTuple):
  """A model to look into: config resolved on the devices, mesh, graph and parameters (nnx.merge makes the Transformer),
  tokenizer (None: unknown), and the checkpoint they are from (None: random)."""

  cfg: object
  mesh: object
  graph: object
  params: dict
  tokenizer: object
  checkpoint: object


def open_run(cfg):
  """The Opened of a config that pyconfig.load(reopen=True) gave; what it has to say goes to stderr.

  Parameters: load_parameters_path, else the newest sound checkpoint of run_name, else, when neither is given, random
  ones with a warning. Matrices are held in `dtype`, in which products are computed anyway.
  Raises ConfigError, CheckpointError, DataError.
  """
  with contextlib.redirect_stdout(sys.stderr):
    cfg, mesh = sharding.start(cfg, log=sys.stderr)
    # One row of tokens at a time cannot be spread over devices by length.
    cfg = cfg.replace(logical_axis_rules=[["length", []]])
    words = data.open_tokenizer(cfg)
    with sharding.use(mesh, cfg.logical_axis_rules):
      graph, abstract = model.abstract_parameters(cfg, mesh)
      abstract = jax.tree.map_with_path(functools.partial(compute_type, cfg), abstract)
      found = None
      if cfg.load_parameters_path:
        path = cfg.load_parameters_path
        found = checkpoint.sound_checkpoint(path, f"load_parameters_path={path}")
      elif cfg.run_name:
        near = pyconfig.nearest(cfg.run_name, runs_in(cfg.base_output_directory))
        hint = f"Train it first, or name another run.{near}"
        what = f"run_name={cfg.run_name}: {cfg.run_directory}"
        found = checkpoint.sound_checkpoint(cfg.run_directory, what, hint)
      if found:
        params = checkpoint.read_parameters(found, abstract)
      else:
        print("warning: these are random weights. Give run_name or load_parameters_path for trained ones.")
        words = words or tokenizer.Byte()
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        params = jax.jit(functools.partial(model.initialize, cfg), out_shardings=shardings)(
            jax.random.key(cfg.init_weights_seed))
        params = jax.tree.map(lambda x, shape: x.astype(shape.dtype), params, abstract)
    if words and words.vocab_size > cfg.vocab_size:
      raise errors.ConfigError(f"vocab_size={cfg.vocab_size}: the tokenizer has {words.vocab_size} pieces. Give the "
                               "tokenizer that the model was trained with as tokenizer_path.")
  return Opened(cfg, mesh, graph, params, words, found)


def runs_in(directory):
  """Names of the runs with checkpoints in a local directory."""
  return [os.path.basename(os.path.dirname(path)) for path in glob.glob(f"{glob.escape(directory)}/*/checkpoints")]


def compute_type(cfg, path, shape):
  """`shape` of a parameter in the type to which every step would cast it, if it is such a one: matrices and tables."""
  return shape.update(dtype=cfg.dtype) if path[-1].key.startswith(("w", "embedding", "position")) else shape


# --- On device: pure functions of (params, state) --------------------------------------------------------------------


def extend(cfg, graph, params, cache, tokens_bt, positions_bt, segments_bt, unstacked=None):
  """(float32 logits [b, v] after the last token, cache with these tokens appended)."""
  transformer = nnx.merge(graph, params)
  hidden_bte, cache = transformer(tokens_bt, positions_bt, segments_bt, cache=cache, unstacked=unstacked)
  logits_btv = transformer.logits(hidden_bte[:, -1:])
  return sharding.shard(logits_btv[:, 0], "batch", None), cache


def sample(cfg, pieces, logits_bv, seeds_b, step):
  """(tokens [b], natural log-probabilities [b]) chosen by decode_sampling_strategy from ids below `pieces`.

  The log-probability is that of the model's whole distribution, whatever the strategy leaves of it.
  """
  logprobs_bv = jax.nn.log_softmax(logits_bv)
  if pieces < cfg.vocab_size:  # rows of the table that are no piece
    logits_bv = jnp.where(jnp.arange(cfg.vocab_size) < pieces, logits_bv, NO_PIECE)
  strategy = cfg.decode_sampling_strategy
  if strategy == "greedy":
    token_b = jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)
  else:
    root = jax.random.key(cfg.decode_seed)
    keys_b = jax.vmap(lambda seed: jax.random.fold_in(jax.random.fold_in(root, seed), step))(seeds_b)
    kept_bv = logits_bv / cfg.decode_sampling_temperature
    if strategy == "topk":
      lowest_b1 = jax.lax.top_k(kept_bv, min(cfg.decode_sampling_top_k, pieces))[0][:, -1:]
      kept_bv = jnp.where(kept_bv >= lowest_b1, kept_bv, NO_PIECE)
    elif strategy == "nucleus":
      kept_bv = jnp.where(kept_bv >= nucleus_edge(kept_bv, cfg.decode_sampling_nucleus_p), kept_bv, NO_PIECE)
    token_b = jax.vmap(jax.random.categorical)(keys_b, kept_bv).astype(jnp.int32)
  return token_b, jnp.take_along_axis(logprobs_bv, token_b[:, None], axis=1)[:, 0]


def nucleus_edge(logits_bv, p):
  """The lowest logit [b, 1] of the fewest likeliest tokens that together reach probability p (Holtzman et al. 2020)."""
  falling_bv = -jnp.sort(-logits_bv, axis=-1)
  probs_bv = jax.nn.softmax(falling_bv)
  before_bv = jnp.cumsum(probs_bv, axis=-1) - probs_bv  # of the likelier ones: 0 for the first, which so always stays
  return jnp.min(jnp.where(before_bv < p, falling_bv, jnp.inf), axis=-1, keepdims=True)


def choose(cfg, pieces, eos, width, cache, logits_bv, positions_b, seeds_b, done_b):
  """The state after the first new token. positions_b: its position; done_b: rows that hold no prompt."""
  token_b, logprob_b = sample(cfg, pieces, logits_bv, seeds_b, 0)
  rows = token_b.shape[0]
  return {
      "cache": cache, "step": jnp.int32(1), "token_b": token_b, "position_b": positions_b, "seeds_b": seeds_b,
      "done_b": done_b | (token_b == eos), "lengths_b": jnp.where(done_b, 0, 1),
      "tokens_bt": jnp.zeros((rows, width), jnp.int32).at[:, 0].set(token_b),
      "logprobs_bt": jnp.zeros((rows, width), jnp.float32).at[:, 0].set(logprob_b),
  }


def advance(cfg, graph, pieces, eos, params, state, stop):
  """The state after `stop` new tokens, or fewer when every row is done: each step feeds the last token of each row."""
  small = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) <= UNSTACK_BYTES
  # Once for all steps of this call. On CPU half the time of a step of a small model goes into such copies otherwise.
  unstacked = model.unstack(params) if small and sharding.on_cpu() else None

  def step(state):
    token_b1, position_b1 = state["token_b"][:, None], state["position_b"][:, None]
    logits_bv, cache = extend(cfg, graph, params, state["cache"], token_b1, position_b1, jnp.ones_like(token_b1),
                              unstacked)
    token_b, logprob_b = sample(cfg, pieces, logits_bv, state["seeds_b"], state["step"])
    at = (0, state["step"])
    return state | {
        "cache": cache, "step": state["step"] + 1, "token_b": token_b, "position_b": state["position_b"] + 1,
        "done_b": state["done_b"] | (token_b == eos), "lengths_b": state["lengths_b"] + ~state["done_b"],
        "tokens_bt": jax.lax.dynamic_update_slice(state["tokens_bt"], token_b[:, None], at),
        "logprobs_bt": jax.lax.dynamic_update_slice(state["logprobs_bt"], logprob_b[:, None], at),
    }

  return jax.lax.while_loop(lambda state: (state["step"] < stop) & ~jnp.all(state["done_b"]), step, state)


# --- On the host -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Continuation:
  """Tokens that follow a prompt, the natural log-probability that the model gave each, and whether EOS ended them."""

  tokens: np.ndarray
  logprobs: np.ndarray
  ended: bool


class Decoder:
  """Decodes batches of prompts on an Opened model. Compiles once for each (rows, slots), whatever the prompts.

  All rows grow at the same slot of the cache: shorter prompts are padded in front, with segment 0 and their own
  positions, so that batching changes no row's result. `seconds` and `counts` add up what prefill and decode did.
  """

  def __init__(self, opened):
    self.opened = opened
    self.compiled = {}
    self.seconds = {"compile": 0.0, "prefill": 0.0, "decode": 0.0}
    self.counts = {"prefill": 0, "decode": 0, "steps": 0}

  def generate(self, prompts, *, max_predict_length=None, seeds=None, watch=None):
    """Yields a Continuation for each prompt, in their order, as soon as its batch is done.

    Args:
      prompts: arrays of token ids, BOS included, none of them empty.
      max_predict_length: most new tokens; None takes that of the config.
      seeds: an int for each prompt: with decode_seed it decides what is drawn, whatever else is in the batch.
      watch: called with (index of a prompt, its new tokens so far) from time to time, and at its end.

    Raises ConfigError when a prompt and its new tokens together are longer than max_target_length.
    """
    cfg = self.opened.cfg
    most = max_predict_length or cfg.max_predict_length
    longest = max(map(len, prompts))
    if longest + most > cfg.max_target_length:
      raise errors.ConfigError(
          f"max_predict_length={most}: with a prompt of {longest} tokens that is more than max_target_length="
          f"{cfg.max_target_length}. Lower it, shorten the prompt, or raise max_target_length.")
    shards = math.prod(self.opened.mesh.shape[axis] for axis in dict(cfg.logical_axis_rules)["batch"])
    rows = min(-(-len(prompts) // shards) * shards, cfg.eval_batch_size)
    chunks = 1 << (-(-longest // CHUNK) - 1).bit_length()
    seeds = range(len(prompts)) if seeds is None else seeds
    for first in range(0, len(prompts), rows):
      part = slice(first, first + rows)
      yield from self._batch(rows, chunks * CHUNK, most, prompts[part], seeds[part],
                             watch and (lambda row, tokens, first=first: watch(first + row, tokens)))

  def summary(self):
    """One line: tokens and tokens/s of prefill and decode, and the time that compiling took."""
    seconds, counts = self.seconds, self.counts
    prefill, decode = (f"{counts[name]} tokens in {seconds[name]:.3f} s" + (
        f" ({counts[name] / seconds[name]:,.0f} tokens/s" if counts[name] else "") for name in ("prefill", "decode"))
    each = f", {1e3 * seconds['decode'] / counts['steps']:.2f} ms per step)" if counts["steps"] else ""
    return f"decode: prefill {prefill}), then {decode}{each}; compiled in {seconds['compile']:.1f} s"

  def _batch(self, rows, room, most, prompts, seeds, watch):
    """Continuations of at most `rows` prompts of at most `room` tokens."""
    with sharding.use(self.opened.mesh, self.opened.cfg.logical_axis_rules):
      steps, params = self.compile(rows, room, -(-most // CHUNK) * CHUNK), self.opened.params
      clock = time.perf_counter()
      count, width = len(prompts), -(-max(map(len, prompts)) // CHUNK) * CHUNK
      inputs = np.zeros((3, rows, width), np.int32)  # tokens, positions, segments
      for row, prompt in enumerate(prompts):
        inputs[:, row, width - len(prompt):] = prompt, np.arange(len(prompt)), np.ones(len(prompt))
      cache = steps["begin"]()
      for start in range(0, width, CHUNK):
        logits_bv, cache = steps["extend"](params, cache, *inputs[:, :, start:start + CHUNK])
      spare = rows - count
      state = steps["choose"](
          cache, logits_bv, inputs[2].sum(axis=1, dtype=np.int32), np.array([*seeds] + [0] * spare, np.uint32),
          np.arange(rows) >= count)
      step, lengths, tokens, logprobs = look(state)
      self.seconds["prefill"] += time.perf_counter() - clock
      self.counts["prefill"] += sum(map(len, prompts))

      clock, finished, look_steps = time.perf_counter(), most == 1, FIRST_LOOK
      while not finished:
        for row in range(count if watch else 0):
          watch(row, tokens[row, :lengths[row]])
        before, stop = step, min(step + look_steps, most)
        state = steps["advance"](params, state, np.int32(stop))
        step, lengths, tokens, logprobs = look(state)
        finished = step < stop or step == most
        self.counts["steps"] += int(step - before)
        look_seconds = LOOK_SECONDS["watched" if watch else "not watched"]
        look_steps = max(1, int(look_seconds * (step - 1) / (time.perf_counter() - clock)))
      self.seconds["decode"] += time.perf_counter() - clock
      self.counts["decode"] += int(lengths[:count].sum()) - count
    for row in range(count if watch else 0):
      watch(row, tokens[row, :lengths[row]])
    eos = end_of(self.opened)
    return [Continuation(tokens[row, :n], logprobs[row, :n], bool(tokens[row, n - 1] == eos))
            for row, n in enumerate(lengths[:count])]

  def compile(self, rows, room, width):
    """{name: compiled step} for `rows` rows, prompts of at most `room` and continuations of at most `width` tokens."""
    if (rows, room, width) in self.compiled:
      return self.compiled[rows, room, width]
    clock = time.perf_counter()
    cfg, mesh, graph, params, words, _ = self.opened
    pieces, eos = words.vocab_size if words else cfg.vocab_size, end_of(self.opened)

    def place(*axes):
      return NamedSharding(mesh, sharding.spec(*axes))

    head_axis = "act_kv_heads"
    if cfg.num_kv_heads % math.prod(mesh.shape[axis] for axis in sharding.mesh_axes(head_axis)[0]):
      head_axis = None  # fewer heads than devices along them: attention repeats them
    heads = place(None, "batch", head_axis, None, None)
    whole, row, by_row = place(), place("batch"), place("batch", None)
    where = {"cache": {"k_lbkhs": heads, "v_lbksh": heads, "segments_bs": by_row, "length": whole}, "step": whole,
             "token_b": row, "position_b": row, "seeds_b": row, "done_b": row, "lengths_b": whole, "tokens_bt": whole,
             "logprobs_bt": whole}
    params_where = jax.tree.map(lambda x: x.sharding, params)

    def shape(dtype, *sizes):
      return jax.ShapeDtypeStruct(sizes, dtype)

    begin = jax.jit(lambda: model.empty_cache(cfg, rows, room + width), out_shardings=where["cache"])
    cache, ids = jax.eval_shape(begin), shape(jnp.int32, rows, CHUNK)
    first = jax.jit(functools.partial(choose, cfg, pieces, eos, width), donate_argnums=0,
                    in_shardings=(where["cache"], by_row, row, row, row), out_shardings=where)
    first_inputs = (cache, shape(jnp.float32, rows, cfg.vocab_size), shape(jnp.int32, rows), shape(jnp.uint32, rows),
                    shape(jnp.bool_, rows))
    lowered = {
        "begin": begin.lower(),
        "extend": jax.jit(
            functools.partial(extend, cfg, graph), donate_argnums=1,
            in_shardings=(params_where, where["cache"], by_row, by_row, by_row), out_shardings=(by_row, where["cache"]),
        ).lower(params, cache, ids, ids, ids),
        "choose": first.lower(*first_inputs),
        "advance": jax.jit(
            functools.partial(advance, cfg, graph, pieces, eos), donate_argnums=1,
            in_shardings=(params_where, where, whole), out_shardings=where,
        ).lower(params, jax.eval_shape(first, *first_inputs), shape(jnp.int32)),
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
      compiled = dict(zip(lowered, pool.map(lambda step: step.compile(), lowered.values()), strict=True))
    self.compiled[rows, room, width] = compiled
    self.seconds["compile"] += time.perf_counter() - clock
    return compiled


def look(state):
  """(steps done, new tokens of each row [rows], the tokens and their log-probabilities [rows, width]) on the host."""
  return jax.device_get([state[name] for name in ("step", "lengths_b", "tokens_bt", "logprobs_bt")])


def end_of(opened):
  """The id that ends a text, -1 where there is none."""
  return opened.tokenizer.eos_id if opened.tokenizer else -1


def encode(opened, text):
  """Token ids [n] of a prompt, after BOS where documents had one in training. Raises ConfigError."""
  cfg, words = opened.cfg, opened.tokenizer
  if words is None:
    raise errors.ConfigError(f"tokenizer_path=: the run has no tokenizer (dataset_type={cfg.dataset_type}). "
                             "Give tokenizer_path, or tokenizer_type=byte.")
  bos = [words.bos_id] if cfg.add_bos and words.bos_id >= 0 else []
  ids = np.array([*bos, *words.encode(text)], np.int32)
  if not len(ids):
    raise errors.ConfigError("prompt= has no token, and the model no BOS to begin with. Give some text.")
  return ids


def read_prompts(cfg):
  """The texts to continue: those of prompt_file, else the one in prompt. Raises DataError.

  Half a surrogate pair, which JSON and command lines can spell and no encoder takes, becomes U+FFFD.
  """
  if not cfg.prompt_file:
    return [whole(cfg.prompt)]
  path, prompts = cfg.prompt_file, []
  try:
    lines = epath.Path(path).read_text().split("\n")
  except (OSError, UnicodeDecodeError) as error:
    raise errors.DataError(f"prompt_file={path} cannot be read as UTF-8 text ({error}). Check the file.") from error
  for number, line in enumerate(lines, 1):
    line = line.removesuffix("\r")
    if not line.strip():
      continue
    if path.endswith(".jsonl"):
      try:
        line = json.loads(line)["prompt"]
      except (ValueError, KeyError, TypeError):
        line = None
      if not isinstance(line, str):
        raise errors.DataError(f'{path} line {number} is no {{"prompt": "text"}}. Correct it.')
    prompts.append(whole(line))
  if not prompts:
    raise errors.DataError(f"prompt_file={path} has no text in it. Write one prompt a line.")
  return prompts


def whole(text):
  return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def continuation_text(words, prompt, tokens):
  """The text that `tokens` add to `prompt`: decoded with it, because pieces join, and cut off behind it."""
  return words.decode([*prompt, *tokens])[len(words.decode(prompt)):]


@contextlib.contextmanager
def output(path):
  """write(record) -> one line of JSON at `path`; writes nothing when that is "". Raises StorageError."""
  if not path:
    yield lambda record: None
    return
  try:
    with open(path, "w", encoding="utf-8") as file:
      yield lambda record: print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
  except OSError as error:
    reason = error.strerror or error
    raise errors.StorageError(f"decode_output_file={path} cannot be written: {reason}. Check the path.") from error


def main(cfg):
  """Decodes as `cfg` (loaded, not yet resolved) says. Raises errors.RunError for what a user can mend."""
  texts = [text for text in read_prompts(cfg) for _ in range(cfg.decode_num_samples)]
  hint = "eval_per_device_batch_size and max_target_length decide the memory: lower them, or use more devices."
  with diagnostics.memory_errors_explained(hint):
    opened = open_run(cfg)
    decode(opened, texts)


def decode(opened, texts):
  """Prints the texts with what follows them; one alone grows as it is decoded."""
  words, prompts = opened.tokenizer, [encode(opened, text) for text in texts]
  chief = jax.process_index() == 0
  alone = len(texts) == 1 and chief
  written = 0

  def grow(_, tokens):
    nonlocal written
    text = continuation_text(words, prompts[0], tokens).rstrip("\ufffd")  # a character not all of whose bytes are there
    print(text[written:], end="", flush=True)
    written = max(written, len(text))

  decoder = Decoder(opened)
  with output(opened.cfg.decode_output_file if chief else "") as write:
    if alone:
      print(texts[0], end="", flush=True)
    for i, found in enumerate(decoder.generate(prompts, watch=grow if alone else None)):
      text = continuation_text(words, prompts[i], found.tokens)
      if alone:
        print(text[written:], flush=True)
      elif chief:
        print(f"--- {i + 1} of {len(texts)}\n{texts[i]}{text}", flush=True)
      write({"prompt": texts[i], "text": text, "ended": found.ended, "tokens": found.tokens.tolist(),
             "logprobs": [round(float(x), 6) for x in found.logprobs]})
  if chief:
    print(decoder.summary(), file=sys.stderr)


if __name__ == "__main__":
  with errors.as_exit_codes():
    main(CONFIG)
