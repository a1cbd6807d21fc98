# SPDX-License-Identifier: Apache-2.0
"""Weights of others <-> ours: Hugging Face folders in both directions, Meta's Llama checkpoints in.

  python3 MaxText/convert.py FOLDER RUN [key=value ...]    a folder of Hugging Face's or Meta's becomes a run of ours
  python3 MaxText/convert.py RUN FOLDER [key=value ...]    a run becomes a folder that `transformers` loads

A family is a table of names; a row says what becomes what. One tensor is in memory at a time. Meta's rotary embedding
rotates neighbours; its query and key weights are reordered to rotate halves, as Hugging Face's are.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()
  os.environ["JAX_PLATFORMS"] = "cpu"

import collections
import contextlib
import json
import math
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np

from MaxText import checkpoint, errors, model, pyconfig, tokenizer

USAGE = "convert.py SOURCE DESTINATION [key=value ...]"
SHARD_BYTES = 512 << 20
LONGEST = 4096  # max_target_length of an imported model, unless it can do less or the command says otherwise
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
MODEL_KEYS = (
    "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers", "head_dim",
    "vocab_size", "mlp_activations", "normalization", "norm_epsilon", "norm_scale_plus_one", "block_layout",
    "attention_bias", "mlp_bias", "logits_bias", "position_embedding", "rope_max_timescale", "rope_scaling",
    "use_qk_norm", "query_scaling", "attn_logits_soft_cap", "final_logits_soft_cap", "logits_via_embedding",
    "normalize_embedding_logits", "scale_embedding")
SCALING = {"rope_scaling_factor": "factor", "rope_scaling_low_frequency_factor": "low_freq_factor",
           "rope_scaling_high_frequency_factor": "high_freq_factor",
           "rope_scaling_original_length": "original_max_position_embeddings"}  # fmt: skip

# --- Families: their name, ours, and the layout of theirs ------------------------------------------------------------
# "same"; "flat": one dimension; "linear": [outputs, inputs], as PyTorch's Linear; "conv": [inputs, outputs]. A fourth
# entry (i, n): ours is the i-th of n equal parts of their outputs.

LLAMA = (
    ("model.embed_tokens.weight", "embedding_ve", "same"),
    ("model.norm.weight", "final_norm/scale_e", "same"),
    ("lm_head.weight", "wl_ve", "same"),
    ("model.layers.{}.input_layernorm.weight", "layers/attention_norm/scale_e", "same"),
    ("model.layers.{}.post_attention_layernorm.weight", "layers/mlp_norm/scale_e", "same"),
    ("model.layers.{}.self_attn.q_proj.weight", "layers/attention/wq_enh", "linear"),
    ("model.layers.{}.self_attn.k_proj.weight", "layers/attention/wk_ekh", "linear"),
    ("model.layers.{}.self_attn.v_proj.weight", "layers/attention/wv_ekh", "linear"),
    ("model.layers.{}.self_attn.o_proj.weight", "layers/attention/wo_nhe", "linear"),
    ("model.layers.{}.self_attn.q_proj.bias", "layers/attention/bq_nh", "flat"),
    ("model.layers.{}.self_attn.k_proj.bias", "layers/attention/bk_kh", "flat"),
    ("model.layers.{}.self_attn.v_proj.bias", "layers/attention/bv_kh", "flat"),
    ("model.layers.{}.self_attn.o_proj.bias", "layers/attention/bo_e", "flat"),
    ("model.layers.{}.self_attn.q_norm.weight", "layers/attention/query_norm/scale_e", "same"),
    ("model.layers.{}.self_attn.k_norm.weight", "layers/attention/key_norm/scale_e", "same"),
    ("model.layers.{}.mlp.gate_proj.weight", "layers/mlp/wg_em", "linear"),
    ("model.layers.{}.mlp.up_proj.weight", "layers/mlp/wu_em", "linear"),
    ("model.layers.{}.mlp.down_proj.weight", "layers/mlp/wd_me", "linear"),
    ("model.layers.{}.mlp.gate_proj.bias", "layers/mlp/bg_m", "flat"),
    ("model.layers.{}.mlp.up_proj.bias", "layers/mlp/bu_m", "flat"),
    ("model.layers.{}.mlp.down_proj.bias", "layers/mlp/bd_e", "flat"),
)
GPT2 = (
    ("transformer.wte.weight", "embedding_ve", "same"),
    ("transformer.wpe.weight", "position_embedding_te", "same"),
    ("transformer.ln_f.weight", "final_norm/scale_e", "same"),
    ("transformer.ln_f.bias", "final_norm/bias_e", "same"),
    ("lm_head.weight", "wl_ve", "same"),
    ("transformer.h.{}.ln_1.weight", "layers/attention_norm/scale_e", "same"),
    ("transformer.h.{}.ln_1.bias", "layers/attention_norm/bias_e", "same"),
    ("transformer.h.{}.ln_2.weight", "layers/mlp_norm/scale_e", "same"),
    ("transformer.h.{}.ln_2.bias", "layers/mlp_norm/bias_e", "same"),
    ("transformer.h.{}.attn.c_attn.weight", "layers/attention/wq_enh", "conv", (0, 3)),
    ("transformer.h.{}.attn.c_attn.weight", "layers/attention/wk_ekh", "conv", (1, 3)),
    ("transformer.h.{}.attn.c_attn.weight", "layers/attention/wv_ekh", "conv", (2, 3)),
    ("transformer.h.{}.attn.c_attn.bias", "layers/attention/bq_nh", "flat", (0, 3)),
    ("transformer.h.{}.attn.c_attn.bias", "layers/attention/bk_kh", "flat", (1, 3)),
    ("transformer.h.{}.attn.c_attn.bias", "layers/attention/bv_kh", "flat", (2, 3)),
    ("transformer.h.{}.attn.c_proj.weight", "layers/attention/wo_nhe", "conv"),
    ("transformer.h.{}.attn.c_proj.bias", "layers/attention/bo_e", "flat"),
    ("transformer.h.{}.mlp.c_fc.weight", "layers/mlp/wu_em", "conv"),
    ("transformer.h.{}.mlp.c_fc.bias", "layers/mlp/bu_m", "flat"),
    ("transformer.h.{}.mlp.c_proj.weight", "layers/mlp/wd_me", "conv"),
    ("transformer.h.{}.mlp.c_proj.bias", "layers/mlp/bd_e", "flat"),
)
META = (
    ("tok_embeddings.weight", "embedding_ve", "same"),
    ("norm.weight", "final_norm/scale_e", "same"),
    ("output.weight", "wl_ve", "same"),
    ("layers.{}.attention_norm.weight", "layers/attention_norm/scale_e", "same"),
    ("layers.{}.ffn_norm.weight", "layers/mlp_norm/scale_e", "same"),
    ("layers.{}.attention.wq.weight", "layers/attention/wq_enh", "linear"),
    ("layers.{}.attention.wk.weight", "layers/attention/wk_ekh", "linear"),
    ("layers.{}.attention.wv.weight", "layers/attention/wv_ekh", "linear"),
    ("layers.{}.attention.wo.weight", "layers/attention/wo_nhe", "linear"),
    ("layers.{}.feed_forward.w1.weight", "layers/mlp/wg_em", "linear"),
    ("layers.{}.feed_forward.w3.weight", "layers/mlp/wu_em", "linear"),
    ("layers.{}.feed_forward.w2.weight", "layers/mlp/wd_me", "linear"),
)
TABLES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gemma": LLAMA, "gpt2": GPT2}
# What a run leaves as. Mistral's maths and names are Llama's.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "gemma": "GemmaForCausalLM", "gpt2": "GPT2LMHeadModel"}  # fmt: skip
# Buffers that some files hold and no computation here needs.
SURPLUS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|rope\.freqs|attn\.bias|attn\.masked_bias)")


def to_ours(theirs, shape, layout, part=(0, 1)):
  """Their tensor, or the part of its outputs, in our `shape`."""
  i, n = part
  if layout == "linear":
    theirs = theirs.T
  if n > 1:
    theirs = np.split(theirs, n, axis=-1)[i]
  return theirs.reshape(shape)


def to_theirs(ours, name, layout):
  """Our tensor (one layer's) in their layout."""
  if layout == "same":
    return ours
  if layout == "flat":
    return ours.reshape(-1)
  matrix = ours.reshape(inputs_of(ours.shape, name), -1)
  return matrix.T if layout == "linear" else matrix


def inputs_of(shape, name):
  """Number of inputs of a weight: heads and their features on the way out, else the first dimension."""
  return math.prod(shape[:-1]) if name.endswith("wo_nhe") else shape[0]


def their_shape(shape, name, layout, part=(0, 1)):
  """The shape that their tensor must have to become ours (one layer's) of `shape`."""
  if layout == "same":
    return shape
  if layout == "flat":
    return (math.prod(shape) * part[1],)
  inputs = inputs_of(shape, name)
  outputs = math.prod(shape) // inputs * part[1]
  return (outputs, inputs) if layout == "linear" else (inputs, outputs)


def halves(x, name):
  """Query and key features reordered from neighbours to halves: those of each pair get half a head's distance."""
  if not re.search(r"attention/(wq_enh|wk_ekh|bq_nh|bk_kh|query_norm/scale_e|key_norm/scale_e)$", name):
    return x
  return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


# --- Configs ---------------------------------------------------------------------------------------------------------


def from_config(config, where):
  """Our model keys of a config.json's content. Raises ConfigError naming the first key that is no maths of ours."""

  def must(key, *allowed, default=None):
    value = config.get(key, default)
    if value not in allowed:
      raise errors.ConfigError(f"{where}: {key}={json.dumps(value)} is not offered here, only "
                               f"{' or '.join(json.dumps(x) for x in allowed)}. Another model, or a fork of model.py.")

  must("model_type", *TABLES)
  must("quantization_config", None)
  family = config["model_type"]
  try:
    if family == "gpt2":
      must("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
      must("scale_attn_weights", True, default=True)
      must("scale_attn_by_inverse_layer_idx", False, default=False)
      return {
          "base_emb_dim": config["n_embd"], "base_num_query_heads": config["n_head"],
          "base_num_kv_heads": config["n_head"], "base_mlp_dim": config.get("n_inner") or 4 * config["n_embd"],
          "base_num_decoder_layers": config["n_layer"], "head_dim": config["n_embd"] // config["n_head"],
          "vocab_size": config["vocab_size"], "mlp_activations": ["gelu"], "normalization": "layer",
          "norm_epsilon": config.get("layer_norm_epsilon", 1e-5), "position_embedding": "learned",
          "trainable_position_size": config["n_positions"], "max_target_length": config["n_positions"],
          "attention_bias": "all", "mlp_bias": True, "logits_via_embedding": config.get("tie_word_embeddings", True)}
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    keys = {
        "base_emb_dim": config["hidden_size"], "base_num_query_heads": heads,
        "base_num_kv_heads": config.get("num_key_value_heads") or heads, "base_mlp_dim": config["intermediate_size"],
        "base_num_decoder_layers": config["num_hidden_layers"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads, "vocab_size": config["vocab_size"],
        "norm_epsilon": config.get("rms_norm_eps", 1e-6), "logits_via_embedding": config.get(
            "tie_word_embeddings", family == "gemma"),
        "rope_max_timescale": rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        "max_target_length": min(LONGEST, config.get("max_position_embeddings", LONGEST))}
  except KeyError as error:
    raise errors.ConfigError(f"{where} has no {error}, which a {family} config has. Get the file anew.") from error
  except (TypeError, ZeroDivisionError) as error:
    raise errors.ConfigError(f"{where} has a size that is none: {error}. Get the file anew.") from error
  partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
  if partial != 1.0:
    raise errors.ConfigError(f"{where}: partial_rotary_factor={partial} is not offered here, only 1.0. Another model, "
                             "or a fork of model.py.")
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind != "default":
    if kind not in pyconfig.CHOICES["rope_scaling"]:
      raise errors.ConfigError(f"{where}: rope_type={json.dumps(kind)} is not offered here, only linear and llama3.")
    keys |= {"rope_scaling": kind} | {ours: rope[theirs] for ours, theirs in SCALING.items() if theirs in rope}
  if family == "gemma":
    must("use_bidirectional_attention", False, None)
    must("hidden_activation", "gelu_pytorch_tanh", None)
    must("hidden_act", "gelu", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    keys |= {"norm_scale_plus_one": True, "scale_embedding": True, "mlp_activations": ["gelu", "linear"]}
  else:
    must("hidden_act", "silu", default="silu")
  if window_of(config):
    keys["max_target_length"] = min(keys["max_target_length"], window_of(config))
  if family == "qwen2":
    keys["attention_bias"] = "qkv"
  elif family == "llama":
    keys |= {"attention_bias": "all" if config.get("attention_bias") else "", "mlp_bias": bool(config.get("mlp_bias"))}
  else:
    must("attention_bias", False, default=False)
  if family == "qwen3":
    keys["use_qk_norm"] = True
  return keys


def window_of(config):
  """How many tokens the attention of a config.json sees, up to which its sliding window hides nothing; None for all."""
  windowed = config["model_type"] == "mistral" or config.get("use_sliding_window")
  return config.get("sliding_window", 4096) if windowed else None  # transformers' default


def from_params(params, shapes, where):
  """Our model keys of Meta's params.json and of the shapes of its tensors."""
  try:
    heads, width = params["n_heads"], params["dim"]
    keys = {
        "base_emb_dim": width, "base_num_query_heads": heads, "base_num_kv_heads": params.get("n_kv_heads") or heads,
        "base_mlp_dim": shapes["layers.0.feed_forward.w1.weight"][0], "base_num_decoder_layers": params["n_layers"],
        "head_dim": width // heads, "vocab_size": shapes["tok_embeddings.weight"][0],
        "norm_epsilon": params.get("norm_eps", 1e-5), "rope_max_timescale": params.get("rope_theta", 10000.0),
        "max_target_length": LONGEST, "logits_via_embedding": "output.weight" not in shapes}
  except KeyError as error:
    raise errors.ConfigError(f"{where} or its tensors have no {error}: no Llama of Meta. Check the folder.") from error
  except (TypeError, ZeroDivisionError) as error:
    raise errors.ConfigError(f"{where} has a size that is none: {error}. Get the file anew.") from error
  if params.get("use_scaled_rope"):
    keys |= {"rope_scaling": "llama3", "rope_scaling_factor": params.get("rope_scaling_factor", 8.0)}
  return keys


def to_config(cfg, family, dtype):
  """config.json of our config as this family; what the family cannot say is found by reading it back."""
  if family == "gpt2":
    config = {
        "n_embd": cfg.emb_dim, "n_head": cfg.num_query_heads, "n_layer": cfg.num_decoder_layers, "n_inner": cfg.mlp_dim,
        "vocab_size": cfg.vocab_size, "n_positions": cfg.trainable_position_size,
        "layer_norm_epsilon": cfg.norm_epsilon, "activation_function": "gelu_new"}
  else:
    rope = {"rope_type": cfg.rope_scaling or "default", "rope_theta": cfg.rope_max_timescale}
    if cfg.rope_scaling:
      used = ("factor",) if cfg.rope_scaling == "linear" else SCALING.values()
      rope |= {theirs: getattr(cfg, ours) for ours, theirs in SCALING.items() if theirs in used}
    config = {
        "hidden_size": cfg.emb_dim, "num_attention_heads": cfg.num_query_heads,
        "num_key_value_heads": cfg.num_kv_heads, "head_dim": cfg.head_dim, "intermediate_size": cfg.mlp_dim,
        "num_hidden_layers": cfg.num_decoder_layers, "vocab_size": cfg.vocab_size, "rms_norm_eps": cfg.norm_epsilon,
        "max_position_embeddings": cfg.max_target_length,
        "rope_theta": cfg.rope_max_timescale, "rope_parameters": rope,  # transformers before 5 reads the first
        "hidden_act": "gelu_pytorch_tanh" if family == "gemma" else "silu"}
    if cfg.rope_scaling:
      config["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if family == "gemma":
      config["hidden_activation"] = "gelu_pytorch_tanh"
    if family == "llama":
      config |= {"attention_bias": cfg.attention_bias == "all", "mlp_bias": cfg.mlp_bias}
  return config | {"architectures": [ARCHITECTURES[family]], "model_type": family,
                   "tie_word_embeddings": cfg.logits_via_embedding, "dtype": dtype, "torch_dtype": dtype}


def family_of(cfg):
  """The family whose config says all that ours does. Raises ConfigError naming the first key that none can express."""
  ours = {key: getattr(cfg, key) for key in MODEL_KEYS}
  ours["position_embedding"] = cfg.position_embedding.replace("rope_interleaved", "rope")
  best = (-1, "")
  for family in ARCHITECTURES:
    base = pyconfig.base()
    said = {key: base[key] for key in MODEL_KEYS} | from_config(to_config(cfg, family, ""), family)
    same = [key for key in MODEL_KEYS if pyconfig.text(said[key]) == pyconfig.text(ours[key])]
    if len(same) == len(MODEL_KEYS):
      return family
    missing = next(key for key in MODEL_KEYS if key not in same)
    best = max(best, (len(same), f"{missing}={pyconfig.text(ours[missing])}, which {family} has as "
                                 f"{pyconfig.text(said[missing])}"))
  raise errors.ConfigError(f"no Hugging Face family is this model; the nearest one fails at {best[1]}. Keep it a run.")


# --- Readers: shapes {name: shape}, read(name) -> array --------------------------------------------------------------


class SafeTensors:
  """The tensors of a folder of .safetensors files, read one by one. Raises DataError."""

  def __init__(self, folder):
    self.folder, self.shapes, self._files = folder, {}, {}
    index = folder / "model.safetensors.index.json"
    with _readable(index):
      files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [
          file.name for file in sorted(folder.glob("*.safetensors"))]
    if not files:
      raise errors.DataError(f"{folder} has no .safetensors file. Other formats of Hugging Face are not read: let "
                             "transformers save it anew.")
    for name in files:
      with _readable(folder / name), self._open(name) as file:
        for tensor in file.keys():
          self.shapes[tensor] = tuple(file.get_slice(tensor).get_shape())
          self._files[tensor] = name

  def _open(self, name):
    import safetensors

    return safetensors.safe_open(self.folder / name, framework="numpy")

  def read(self, tensor):
    with _readable(self.folder / self._files[tensor]), self._open(self._files[tensor]) as file:
      x = file.get_tensor(tensor)
    if x.dtype not in (np.float16, ml_dtypes.bfloat16, np.float32):
      raise errors.DataError(f"{self.folder / self._files[tensor]}: tensor {tensor} is of {x.dtype}, and only float16, "
                             "bfloat16 and float32 are read. Get the model unquantized.")
    return x


class MetaTensors:
  """The tensors of consolidated.*.pth, the parts of model-parallel ones joined. Raises DataError."""

  def __init__(self, folder, width):
    self._shards = [read_pickle(file) for file in sorted(folder.glob("consolidated.*.pth"))]
    if not self._shards:
      raise errors.DataError(f"{folder} has no consolidated.*.pth beside its params.json. Get them anew.")
    self._width = width
    self.shapes = {}
    for i, shard in enumerate(self._shards):
      odd = [name for name, tensor in self._shards[0].items() if name not in shard or shard[name].shape != tensor.shape]
      if odd:
        raise errors.DataError(f"{folder}: part {i} of {len(self._shards)} has not the {odd[0]} of the first, with "
                               f"shape {self._shards[0][odd[0]].shape}. Get the files anew.")
    for name, tensor in self._shards[0].items():
      shape = list(tensor.shape)
      if len(shape) == 2 and len(self._shards) > 1:
        shape[self._axis(name)] *= len(self._shards)
      self.shapes[name] = tuple(shape)

  def _axis(self, name):
    """The dimension along which a matrix is cut: inputs of what sums over heads or mlp, outputs of all else."""
    if name == "tok_embeddings.weight":  # by width in Llama 1 and 2, by vocabulary in Llama 3
      return 1 if self._shards[0][name].shape[1] < self._width else 0
    return 1 if re.search(r"\.(wo|w2)\.weight$", name) else 0

  def read(self, name):
    parts = [shard[name].read() for shard in self._shards]
    if len(parts) == 1 or parts[0].ndim == 1:
      return parts[0]
    return np.concatenate(parts, axis=self._axis(name))


class StoredTensor:
  """A tensor in a zip file of torch.save: where its numbers lie, not yet read."""

  def __init__(self, file, dtype, start, shape, stride):
    self.file, self.dtype, self.start, self.shape, self.stride = file, dtype, start, shape, stride

  def read(self):
    wanted = tuple(math.prod(self.shape[i + 1:]) for i in range(len(self.shape)))
    if self.stride != wanted:
      raise errors.DataError(f"{self.file}: a tensor of strides {self.stride} is not stored row by row. Save it anew.")
    return np.memmap(self.file, self.dtype, "r", self.start, self.shape)


def read_pickle(file):
  """{name: StoredTensor} of a file that torch.save wrote. Nothing in it is run: a name but those below is refused.

  Raises DataError.
  """
  with _readable(file), zipfile.ZipFile(file) as archive:
    root = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")
    starts = {}
    for entry in archive.infolist():
      if entry.filename.startswith(f"{root}data/"):
        if entry.compress_type != zipfile.ZIP_STORED:
          raise errors.DataError(f"{file}: {entry.filename} is compressed, which torch.save does not do. Get it anew.")
        with open(file, "rb") as raw:  # the data stand behind a header that has its own idea of the extra field's size
          raw.seek(entry.header_offset + 26)
          sizes = int.from_bytes(raw.read(2), "little") + int.from_bytes(raw.read(2), "little")
        starts[entry.filename.removeprefix(f"{root}data/")] = entry.header_offset + 30 + sizes
    dtypes = {"HalfStorage": np.dtype("<f2"), "FloatStorage": np.dtype("<f4"),
              "BFloat16Storage": np.dtype(ml_dtypes.bfloat16)}

    def rebuild(storage, offset, shape, stride, *_):
      dtype, key = storage
      return StoredTensor(file, dtype, starts[key] + offset * dtype.itemsize, tuple(shape), tuple(stride))

    class Unpickler(pickle.Unpickler):
      def find_class(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
          return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
          return rebuild
        if module == "torch" and name in dtypes:
          return dtypes[name]
        raise errors.DataError(f"{file}: holds {module}.{name}, which is no tensor of 16 or 32 bits. Nothing was run.")

      def persistent_load(self, pid):
        return pid[1], pid[2]

    with archive.open(f"{root}data.pkl") as stream:
      found = Unpickler(stream).load()
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, StoredTensor)}


@contextlib.contextmanager
def _readable(file):
  """Whatever a reader raises about a file, as one line."""
  try:
    yield
  except errors.RunError:
    raise
  except zipfile.BadZipFile as error:
    raise errors.DataError(f"{file}: no zip file, so damaged or of torch before 1.6. Save it anew.") from error
  except Exception as error:
    reason = (str(error) or type(error).__name__).splitlines()[0][:200]
    raise errors.DataError(f"{file} cannot be read: {reason}. Get it anew.") from error


# --- In --------------------------------------------------------------------------------------------------------------


def read_json(path):
  with _readable(path):
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
      raise TypeError("no JSON object")
    return content


def import_run(source, destination, arguments):
  """Makes the run directory `destination` of a folder of Hugging Face's or Meta's; returns a line that says what it is.

  arguments: key=value, over what the folder says. Raises ConfigError, DataError, StorageError.
  """
  if (source / "params.json").exists():
    params = read_json(source / "params.json")
    reader, table, family = MetaTensors(source, params.get("dim", 0)), META, "Meta's Llama"
    keys = from_params(params, reader.shapes, source / "params.json")
  else:
    config = read_json(source / "config.json")
    keys = from_config(config, source / "config.json")
    reader, family = SafeTensors(source), config["model_type"]
    table = TABLES[family]
  longest = None if table is META else window_of(config)
  partial = destination.with_name(f"{destination.name}.converting")
  shutil.rmtree(partial, ignore_errors=True)
  try:
    (partial / "tokenizer").mkdir(parents=True)
    for name in TOKENIZER_FILES:
      if (source / name).exists():
        shutil.copyfile(source / name, partial / "tokenizer" / name)
    cfg = run_config(partial, destination, keys, arguments)
    if longest and cfg.max_target_length > longest:
      raise errors.ConfigError(f"max_target_length={cfg.max_target_length}: the model's sliding_window={longest} hides "
                               f"what is further back, which is not offered here. Give at most {longest}.")
    write_parameters(cfg, partial / "checkpoints", reader, table, permute=table is META)
    text = pyconfig.as_yaml(cfg).replace(str(partial / "tokenizer"), str(destination / "tokenizer"))
    (partial / "config.yml").write_text(text)
    partial.rename(destination)
  except OSError as error:
    raise errors.StorageError(f"{destination} cannot be written: {error.strerror}. Make room or allow it.") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  count = sum(math.prod(shape) for shape in reader.shapes.values())
  return f"{destination}: a run of {family}, {count:,} numbers"


def run_config(partial, destination, keys, arguments):
  """The Config of the run to be; its tokenizer is the one in partial/tokenizer, if that is one."""
  given = {"run_name": destination.name, "base_output_directory": str(destination.parent), "learning_rate": 1e-5} | keys
  folder = partial / "tokenizer"
  try:
    words = tokenizer.load_given(str(folder))
  except errors.ConfigError as error:
    if any(folder.iterdir()):
      print(f"warning: {error}", file=sys.stderr)
    shutil.rmtree(folder)
    print("warning: a run without a tokenizer. Give tokenizer_path= to decode and train.", file=sys.stderr)
  else:
    given |= {"tokenizer_path": str(folder), "add_bos": words.bos_id >= 0, "add_eos": words.eos_id >= 0}
    if words.vocab_size > keys["vocab_size"]:
      raise errors.ConfigError(f"vocab_size={keys['vocab_size']}: the folder's tokenizer has {words.vocab_size} pieces,"
                               " so it is another model's. Take it out of the folder.")
  given = [f"{key}={pyconfig.text(value)}" for key, value in given.items()]
  return pyconfig.load(["configs/base.yml", *given, *arguments])


def write_parameters(cfg, directory, reader, table, permute):
  """The checkpoint of all tensors of `reader`. Raises ConfigError naming the first that is missing, odd or too many."""
  _, shapes, _ = model.abstract(cfg)
  ours = dict(checkpoint.named(shapes))
  rows = [row for row in table if row[1] in ours]
  left = set(reader.shapes)
  if not any(name in left for name, *_ in rows):  # GPT-2's first files have no prefix
    rows = [(name.removeprefix("transformer."), *row) for name, *row in rows]
  said = {row[1] for row in rows}
  unsaid = next((name for name in ours if name not in said), None)
  if unsaid:
    raise errors.ConfigError(f"parameter {unsaid} of this config has no place in that family. Take the key back.")
  with checkpoint.ParameterWriter(directory, shapes) as writer:
    for theirs, name, layout, *part in rows:
      stacked = name.startswith("layers/")
      shape = ours[name].shape[1:] if stacked else ours[name].shape
      for layer in range(cfg.num_decoder_layers) if stacked else [None]:
        tensor = theirs.format(layer)
        if tensor not in reader.shapes:
          raise errors.ConfigError(f"tensor {tensor} is missing, of which {name} with shape {shape} would be made. "
                                   "The folder is incomplete, or its config another model's.")
        wanted = their_shape(shape, name, layout, *part)
        if reader.shapes[tensor] != wanted:
          raise errors.ConfigError(f"tensor {tensor} has shape {reader.shapes[tensor]}, and {wanted} is wanted, to "
                                   f"make {name} with shape {shape}. The config is another model's.")
        x = to_ours(reader.read(tensor), shape, layout, *part)
        left.discard(tensor)
        writer.write(name, layer, (halves(x, name) if permute else x).astype(ours[name].dtype, copy=False))
    if cfg.logits_via_embedding:
      left -= {"lm_head.weight", "output.weight"}  # some files hold the tied weights twice
    surplus = sorted(name for name in left if not SURPLUS.fullmatch(name))
    if surplus:
      raise errors.ConfigError(f"tensor {surplus[0]} with shape {reader.shapes[surplus[0]]} has no place in this "
                               "model. The config is another model's.")


# --- Out -------------------------------------------------------------------------------------------------------------


def export_folder(source, destination, arguments):
  """Makes the Hugging Face folder `destination` of a run, its checkpoints or one of them; returns a line about it.

  arguments: key=value; weight_dtype chooses the type. Raises ConfigError, CheckpointError, StorageError.
  """
  cfg = pyconfig.load([f"load_parameters_path={source}", *arguments], need_run_name=False, reopen=True)
  step = checkpoint.sound_checkpoint(str(source), str(source))
  tensors, family = checkpoint.open_parameters(step), family_of(cfg)
  _, shapes, _ = model.abstract(cfg)
  for name, shape in checkpoint.named(shapes):
    found = tuple(tensors[name].shape) if name in tensors else None
    if found != shape.shape:
      raise errors.ConfigError(f"{step} has {name} with shape {found}, this config with {shape.shape}. "
                               "Give the config of that run.")
  dtype = np.dtype(ml_dtypes.bfloat16 if cfg.weight_dtype == "bfloat16" else np.float32)
  permute = cfg.position_embedding == "rope_interleaved"
  sources = collections.defaultdict(list)  # their tensor -> ours it is made of
  for theirs, name, layout, *_ in TABLES[family]:
    if name in tensors:
      for layer in range(cfg.num_decoder_layers) if name.startswith("layers/") else [None]:
        sources[theirs.format(layer)].append((name, layer, layout))

  def size(tensor):
    return sum(tensors[name].size // (1 if layer is None else cfg.num_decoder_layers)
               for name, layer, _ in sources[tensor]) * dtype.itemsize

  def make(tensor):
    parts = []
    for name, layer, layout in sources[tensor]:
      x = (tensors[name] if layer is None else tensors[name][layer]).read().result()
      parts.append(to_theirs(halves(x, name) if permute else x, name, layout))
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return np.ascontiguousarray(whole.astype(dtype))

  shards, filled = [[]], 0
  for tensor in sources:
    if shards[-1] and filled + size(tensor) > SHARD_BYTES:
      shards.append([])
      filled = 0
    shards[-1].append(tensor)
    filled += size(tensor)
  names = ["model.safetensors"] if len(shards) == 1 else [
      f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
  partial = destination.with_name(f"{destination.name}.converting")
  shutil.rmtree(partial, ignore_errors=True)
  from safetensors import SafetensorError
  from safetensors.numpy import save_file

  try:
    partial.mkdir(parents=True)
    for name, shard in zip(names, shards, strict=True):
      save_file({tensor: make(tensor) for tensor in shard}, partial / name, metadata={"format": "pt"})
    if len(shards) > 1:
      index = {"metadata": {"total_size": sum(map(size, sources))},
               "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}}
      (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    words = export_tokenizer(cfg, step, partial)
    edges = {f"{name}_token_id": getattr(words, f"{name}_id") for name in ("bos", "eos") if words
             and getattr(words, f"{name}_id") >= 0}
    config = to_config(cfg, family, dtype.name) | edges
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    (partial / "generation_config.json").write_text(json.dumps(edges, indent=1))
    partial.rename(destination)
  except (OSError, SafetensorError) as error:
    reason = getattr(error, "strerror", error)
    raise errors.StorageError(f"{destination} cannot be written: {reason}. Make room or allow it.") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return f"{destination}: {family}, {sum(map(size, sources)) / 1e6:,.1f} MB of {dtype.name} in {len(shards)} files"


def export_tokenizer(cfg, step, folder):
  """Writes the files of the run's tokenizer; returns it, or None where it has none that Hugging Face's classes read."""
  run = Path(step).parent.parent
  if (run / "tokenizer").is_dir():
    for file in (run / "tokenizer").iterdir():
      shutil.copyfile(file, folder / file.name)
    return tokenizer.load_given(str(run / "tokenizer"))
  manifest = run / "data" / "manifest.json"
  kind = read_json(manifest)["tokenizer"] if manifest.exists() else ""
  if kind not in ("bpe", "sentencepiece", "huggingface"):
    print("warning: the run's tokenizer is none that Hugging Face's classes read: the folder has none", file=sys.stderr)
    return None
  words = tokenizer.load(kind, run / "data" / "tokenizer.model")
  names = {"add_bos_token": cfg.add_bos, "add_eos_token": False}
  if kind == "sentencepiece":
    words.save(folder / "tokenizer.model")
    names |= {"tokenizer_class": "LlamaTokenizer", "legacy": False}
  else:
    made = words.backend if kind == "huggingface" else bpe_of(words)
    (folder / "tokenizer.json").write_text(made.to_str(pretty=True))
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names |= {f"{edge}_token": made.id_to_token(getattr(words, f"{edge}_id")) for edge in ("bos", "eos", "pad")
              if getattr(words, f"{edge}_id") >= 0}
  (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1))
  return words


def bpe_of(words):
  """A tokenizer of the `tokenizers` library with the pieces, ids and merges of a tokenizer.Trained."""
  import tokenizers

  pieces = words.pieces()
  rank = {piece: i for i, piece in enumerate(pieces)}
  merges = [(piece[:cut], piece[cut:]) for piece in pieces[tokenizer.META_PIECES:] for cut in range(1, len(piece))
            if piece[:cut] in rank and piece[cut:] in rank]
  made = tokenizers.Tokenizer(tokenizers.models.BPE(rank, merges, unk_token=pieces[3], byte_fallback=True))
  made.normalizer = tokenizers.normalizers.Replace(" ", tokenizer.SPACE)
  decoders = tokenizers.decoders
  made.decoder = decoders.Sequence([decoders.Replace(tokenizer.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
  made.add_special_tokens(pieces[:4])
  return made


def main(argv):
  """Converts in the direction that the source says. Raises errors.RunError for what a user can mend."""
  paths = [x for x in argv if not re.fullmatch(r"-*\w+=.*", x, re.DOTALL)]
  arguments = [x for x in argv if x not in paths]
  if len(paths) != 2:
    raise errors.ConfigError(f"{len(paths)} paths given. Usage: {USAGE}")
  source, destination = (Path(path).expanduser().absolute() for path in paths)
  if not source.is_dir():
    raise errors.ConfigError(f"SOURCE={paths[0]} is no folder. Usage: {USAGE}")
  if destination.exists():
    raise errors.ConfigError(f"DESTINATION={paths[1]} exists, and is left as it is. Name another.")
  foreign = (source / "config.json").exists() or (source / "params.json").exists()
  print((import_run if foreign else export_folder)(source, destination, arguments))


if __name__ == "__main__":
  with errors.as_exit_codes():
    main(sys.argv[1:])
