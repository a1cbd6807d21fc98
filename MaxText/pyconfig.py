# SPDX-License-Identifier: Apache-2.0
"""Files and key=value arguments -> one frozen, hashable Config: derived, validated, resolved once devices are known."""

import functools
import glob
import json
import math
import os
import re
import sys
from typing import NamedTuple

import yaml

from MaxText.errors import ConfigError

MESH_AXES = ("data", "fsdp", "sequence", "tensor", "expert", "stage")
REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BASE = os.path.join(REPO, "configs", "base.yml")
MAX_FILE_BYTES = 100_000  # the parser is pure Python: this much takes it about 0.2 s
MAX_NESTING = 4  # logical_axis_rules: mapping, rules, rule, axes

# Names that other versions and documents use -> ours.
OLD_KEYS = {
    "base_num_heads": ("base_num_query_heads", "base_num_kv_heads"),
    "checkpoint_interval": ("checkpoint_period",),
    "cosine_learning_rate_final_fraction": ("learning_rate_final_fraction",),
    "dcn_context_parallelism": ("dcn_sequence_parallelism",),
    "dcn_pipeline_parallelism": ("dcn_stage_parallelism",),
    "enable_flash_attention": ("attention",),
    "enable_profiler": ("profiler",),
    "grain_eval_files": ("eval_dataset_path",),
    "grain_train_files": ("dataset_path",),
    "grain_worker_count": ("data_workers",),
    "hf_eval_split": ("eval_split",),
    "hf_path": ("dataset_path",),
    "ici_context_parallelism": ("ici_sequence_parallelism",),
    "ici_pipeline_parallelism": ("ici_stage_parallelism",),
    "load_from_other_directory": ("load_full_state_path",),
    "logging_period": ("log_period",),
    "max_sequence_length": ("max_target_length",),
    "normalization_layer_epsilon": ("norm_epsilon",),
    "per_device_batch": ("per_device_batch_size",),
    "sampling_temperature": ("decode_sampling_temperature",),
    "sampling_top_k": ("decode_sampling_top_k",),
    "save_period": ("checkpoint_period",),
}
# Two old keys that make one of ours; join_old_keys() says how.
OLD_PARTS = {
    "assets_path": "tokenizer_path",
    "vocab_relative_path": "tokenizer_path",
    "load_from_other_directory_step": "load_full_state_path",
}
# The same for values: (key as given, value) -> ours.
OLD_VALUES = {
    ("attention", "cudnn_flash_jax"): "cudnn",
    ("attention", "cudnn_flash_te"): "cudnn",
    ("attention", "dot_product"): "dot",
    ("attention", "gpu_flash"): "cudnn",
    ("attention", "mha"): "dot",
    ("compile_topology_num_slices", "-1"): "1",
    ("dataset_type", "c4"): "tfds",
    ("enable_flash_attention", "false"): "dot",
    ("enable_flash_attention", "true"): "auto",
    ("enable_profiler", "false"): "",
    ("enable_profiler", "true"): "xplane",
    ("packing", "true"): "concat",
    ("record_internal_nn_metrics", "0"): "false",
    ("record_internal_nn_metrics", "1"): "true",
    ("remat_policy", "proj"): "save_qkv_proj",
    ("reuse_example_batch", "0"): "false",
    ("reuse_example_batch", "1"): "true",
    ("tokenizer_type", "sentence_piece"): "sentencepiece",
}
# Names of other versions that set nothing here: (values that ask for what happens anyway, what to do instead).
_INT8 = "training is not quantized"
GONE_KEYS = {
    "aqt_rng_type": (("jax.uniform",), _INT8),
    "aqt_use_dummy_static_bound": (("false",), _INT8),
    "aqt_use_fwd_quant": (("false",), _INT8),
    "data_sharding": ((), 'the "batch" rule of logical_axis_rules shards the data'),
    "decoder_block": ((), "each part of the block has its own key, see Model in configs/base.yml"),
    "dcn_autoregressive_parallelism": (("1",), "the mesh axes are " + ", ".join(MESH_AXES)),
    "dcn_fsdp_transpose_parallelism": (("1",), "the mesh axes are " + ", ".join(MESH_AXES)),
    "dlhs_int8": (("true", "false"), _INT8),
    "dlhs_int8_pv": (("true", "false"), _INT8),
    "dlhs_int8_qk": (("true", "false"), _INT8),
    "drhs_int8": (("true", "false"), _INT8),
    "drhs_int8_pv": (("true", "false"), _INT8),
    "drhs_int8_qk": (("true", "false"), _INT8),
    "eos_id": ((), "the tokenizer knows its EOS"),
    "fused_mlp": (("false",), "gate and up projections are two weights"),
    "fused_qkv": (("false",), "query, key and value are three weights"),
    "fwd_int8": (("true", "false"), _INT8),
    "fwd_int8_pv": (("true", "false"), _INT8),
    "fwd_int8_qk": (("true", "false"), _INT8),
    "hardware": ((), "the devices found are used; JAX_PLATFORMS=cpu in the environment chooses"),
    "ici_autoregressive_parallelism": (("1",), "the mesh axes are " + ", ".join(MESH_AXES)),
    "ici_fsdp_transpose_parallelism": (("1",), "the mesh axes are " + ", ".join(MESH_AXES)),
    "int8_training": (("false",), _INT8),
    "max_eval_target_length": ((), "evaluation rows have max_target_length"),
    "mesh_axes": ((), "the mesh axes are " + ", ".join(MESH_AXES)),
    "model_name": (("default",), "give the model's recipe instead, such as configs/llama2_7b.yml"),
    "opt_type": (("adamw",), "the optimizer is AdamW; update_rms_cap caps updates"),
    "param_scan_axis": (("0",), "the layers are always the first dimension of stacked weights"),
    "quantization": (("",), _INT8),
    "use_dqdg": (("false",), _INT8),
}

CHOICES = {
    "attention": ("auto", "dot", "flash", "cudnn"),
    "attention_bias": ("", "qkv", "all"),
    "block_layout": ("sequential", "parallel"),
    "compile_mode": ("full", "fast"),
    "data_errors": ("raise", "skip"),
    "dataset_type": ("stdlib", "text", "tokens", "tfds", "grain", "hf", "mixture", "synthetic"),
    "decode_sampling_strategy": ("greedy", "weighted", "topk", "nucleus"),
    "dtype": ("auto", "float32", "bfloat16"),
    "global_parameter_scale": (0, 1, 2, 4, 8, 16, 32, 64, 128),
    "learning_rate_after_schedule": ("zero", "floor"),
    "lr_schedule_type": ("cosine", "exponential", "constant"),
    "matmul_precision": ("default", "high", "highest"),
    "mlp_activations": ("gelu", "relu", "silu", "linear"),
    "normalization": ("rms", "layer"),
    "packing": ("concat", "best_fit"),
    "plan": ("batch", "remat", "mesh"),
    "position_embedding": ("rope", "rope_interleaved", "learned", "sinusoidal", "relative_bias", "none"),
    "profiler": ("", "xplane"),
    "query_scaling": ("rsqrt", "per_dim", "none"),
    "remat_names": ("query", "key", "value", "context", "out_proj", "mlp_gate", "mlp_up", "mlp_down"),
    "remat_policy": ("none", "full", "minimal", "save_qkv_proj", "save_out_proj", "save_dot_except_mlp", "names"),
    "rope_scaling": ("", "linear", "llama3"),
    "tokenizer_type": ("bpe", "byte", "sentencepiece", "huggingface"),
    "weight_decay_mask": ("matrices", "all"),
    "weight_dtype": ("float32", "bfloat16"),
    "weight_init": ("fan_in", "xavier", "normal"),
}

STREAMS = ("tfds", "grain", "hf")  # types of datasets that are read and tokenized while training
EVAL_KINDS = ("perplexity", "lambada", "boolq", "choice", "lm_eval")
_BELOW_ONE = 0.9999999999
_PARALLELISM = {f"{net}_{axis}_parallelism": (1, 1_000_000, -1) for net in ("ici", "dcn") for axis in MESH_AXES}
# Lowest and highest value of every number, and one more that is allowed.
RANGES = _PARALLELISM | {
    "adam_b1": (0, _BELOW_ONE),
    "adam_b2": (0, _BELOW_ONE),
    "adam_eps": (0, 1),
    "adam_eps_root": (0, 1),
    "adam_weight_decay": (0, 10),
    "attn_logits_soft_cap": (0, 1e6),
    "base_emb_dim": (1, 10**6),
    "base_mlp_dim": (1, 10**7),
    "base_num_decoder_layers": (1, 10_000),
    "base_num_kv_heads": (1, 10_000),
    "base_num_query_heads": (1, 10_000),
    "checkpoint_keep_period": (0, 10**9),
    "checkpoint_period": (1, 10**9),
    "compile_topology_num_slices": (1, 10_000),
    "data_shuffle_seed": (0, 2**32 - 1),
    "data_workers": (0, 1000),
    "decode_num_samples": (1, 10_000),
    "decode_sampling_nucleus_p": (1e-6, 1),
    "decode_sampling_temperature": (1e-6, 1e6),
    "decode_sampling_top_k": (1, 10**6),
    "decode_seed": (0, 2**32 - 1),
    "dropout_rate": (0, 0.99),
    "embedding_init_std": (0, 100),
    "eval_fraction": (0, 0.9),
    "eval_interval": (1, 10**9, -1),
    "eval_per_device_batch_size": (0, 10**6),
    "eval_steps": (1, 10**9, -1),
    "final_logits_soft_cap": (0, 1e6),
    "gradient_accumulation_steps": (1, 10**6),
    "gradient_clipping_threshold": (0, 1e9),
    "head_dim": (1, 10_000),
    "init_weights_seed": (0, 2**32 - 1),
    "input_dropout_rate": (0, 0.99),
    "jax_initialization_timeout_seconds": (1, 10**6),
    "jax_process_count": (1, 10**6),
    "jax_process_id": (0, 10**6),
    "learning_rate": (0, 1000),
    "learning_rate_final_fraction": (0, 1),
    "learning_rate_schedule_steps": (1, 10**9, -1),
    "log_period": (1, 10**9),
    "max_corpus_chars": (1, 10**12),
    "max_dataset_chars": (0, 10**12),
    "max_eval_task_rows": (0, 10**9),
    "max_num_checkpoints_to_keep": (1, 10**6),
    "max_predict_length": (1, 10**7),
    "max_skipped_records": (0, 10**12),
    "max_skipped_steps": (1, 10**9),
    "max_target_length": (1, 10**8),
    "norm_epsilon": (0, 1),
    "num_epoch": (0, 10**6),
    "num_vocab_tiling": (0, 10**6),
    "peer_timeout_seconds": (2, 10**6),
    "per_device_batch_size": (1e-6, 10**6),
    "plan_minutes": (0.1, 10_000),
    "plan_processes": (0, 1000),
    "prefetch_batches": (1, 1000),
    "prepare_workers": (0, 1000),
    "profiler_steps": (1, 10**6),
    "relative_bias_buckets": (2, 10**5),
    "relative_bias_max_distance": (2, 10**8),
    "rope_max_timescale": (1, 1e12),
    "rope_scaling_factor": (1, 1e6),
    "rope_scaling_high_frequency_factor": (1e-3, 1e6),
    "rope_scaling_low_frequency_factor": (1e-3, 1e6),
    "rope_scaling_original_length": (1, 10**8),
    "skip_first_n_steps_for_profiler": (0, 10**9),
    "skip_step_gradient_norm": (0, 1e12),
    "stack_trace_interval_seconds": (1, 10**6),
    "standalone_first_step": (0, 10**12),
    "standalone_process_count": (1, 10**6),
    "standalone_process_index": (0, 10**6),
    "standalone_show_batches": (0, 10**9),
    "standalone_step_seconds": (0, 3600),
    "steps": (0, 10**9, -1),
    "target_eval_loss": (0, 1000),
    "trainable_position_size": (0, 10**8),
    "update_rms_cap": (0, 1e6),
    "vocab_size": (1, 10**8),
    "warmup_steps": (0, 10**9, -1),
    "warmup_steps_fraction": (0, 1),
    "weight_init_std": (0, 10),
    "z_loss_multiplier": (0, 1000),
}

# What a run's saved config says about the machine that trained and about a start from elsewhere: not what the run is.
MACHINE_KEYS = {*_PARALLELISM, "attention", "compile_mode", "compile_report_file", "compile_topology",
                "compile_topology_num_slices", "compiled_trainstep_file", "decode_output_file",
                "eval_per_device_batch_size", "eval_tasks", "jax_coordinator_address", "jax_process_count",
                "jax_process_id", "libtpu_init_args", "load_full_state_path",
                "per_device_batch_size", "plan", "plan_directory", "plan_minutes", "plan_processes",
                "prepare_directory", "prepare_verify", "prepare_workers", "prompt_file",
                "standalone_first_step", "standalone_process_count", "standalone_process_index",
                "standalone_show_batches", "standalone_step_seconds", "xla_flags"}

# Of use only with the run's own copy of its data.
DATA_KEYS = ("dataset_type", "dataset_path", "dataset_mixture", "eval_dataset_path", "eval_datasets")

# Heads and mlp, emb and layers of global_parameter_scale 1; each doubling widens the next of the three in turn.
LADDER = {"base_emb_dim": 2560, "base_num_query_heads": 8, "base_num_kv_heads": 8, "base_mlp_dim": 8192,
          "base_num_decoder_layers": 16}
LADDER_DEFAULTS = {"head_dim": 256, "vocab_size": 32768, "max_target_length": 2048, "mlp_activations": ("relu",),
                   "logits_via_embedding": True, "normalize_embedding_logits": True,
                   "remat_policy": "full"}  # fmt: skip

# Float32 logits of one piece per device that num_vocab_tiling=0 aims at. On CPU pieces of 32 MiB halve the peak memory
# and are no slower than any other number (measured from 1 to 8 pieces at 128 MiB in all).
LOGITS_BYTES = {"cpu": 32 << 20, "gpu": 1 << 30, "tpu": 512 << 20}


class Config:
  """Every key of configs/base.yml and what follows from them, as attributes. Frozen, hashable, comparable by value.

  `given` holds the keys as they were given (-1 stays -1), `facts` what resolve() was told about the devices.
  """

  __slots__ = ("_hash", "_values", "facts", "given")

  def __init__(self, given, facts=None):
    validate_each(given)
    values = derive(given)
    validate_together(values)
    if facts is not None:
      values |= resolved(values, facts)
    for name, value in (("given", given), ("facts", facts), ("_values", values),
                        ("_hash", hash(tuple(sorted(values.items(), key=lambda item: item[0]))))):
      object.__setattr__(self, name, value)

  def __getattr__(self, name):
    if name.startswith("_") or name not in self._values:
      raise AttributeError(f"the config has no {name}{'' if name.startswith('_') else nearest(name, self._values)}")
    return self._values[name]

  def __setattr__(self, name, value):
    raise AttributeError(f"{name}={value!r}: a config is frozen; cfg.replace({name}=...) makes another")

  __delattr__ = __setattr__

  def __eq__(self, other):
    return isinstance(other, Config) and self._values == other._values

  def __hash__(self):
    return self._hash

  def __reduce__(self):
    return Config, (self.given, self.facts)

  def __repr__(self):
    return f"Config({', '.join(describe(self))})"

  def replace(self, **values):
    """This config with other values for some keys: derived, validated and, if this one was, resolved anew."""
    given = dict(self.given)
    for key, value in values.items():
      if key not in given:
        raise ConfigError(f"unknown key {key}={show(value)}.{nearest(key, given)} All keys: configs/base.yml")
      given[key] = typed(key, value if isinstance(value, (list, tuple)) else text(value), given[key])
    return Config(expand(given, values), self.facts)


class Recorded:
  """Stands for a Config while a step is traced, and keeps in `reads` every value that was read: what shapes the step.

  Equal only to itself, unlike a Config, so that jax takes nothing it has traced for an equal config: that would be read
  by nobody.
  """

  def __init__(self, cfg):
    self._cfg, self.reads = cfg, {}

  def __getattr__(self, name):
    value = getattr(self._cfg, name)
    self.reads[name] = value
    return value


# --- Load ----------------------------------------------------------------------------------------------------------


def load(argv, *, need_run_name=True, reopen=False):
  """The config of `argv`: YAML files and key=value arguments, left to right, over configs/base.yml.

  `reopen` puts the saved config of the run that argv names between the two: that of run_name, or where there is none
  that of load_parameters_path. What it says about the machine that trained (MACHINE_KEYS) does not count.

  Raises ConfigError, one line with key, value, rule and way out. Notes about old names go to stderr.
  """
  assignments, loaded = [], {os.path.realpath(BASE)}
  for argument in argv:
    key, equals, value = argument.partition("=")
    if equals and (re.fullmatch(r"-*\w+", key) or not argument.endswith((".yml", ".yaml"))):
      assignments.append((key, value, ""))
      continue
    path = find(argument)
    if os.path.samefile(path, BASE) and (assignments or len(loaded) > 1):
      raise ConfigError(f"{show(argument)} must come first: what follows overrides it.")
    assignments += file_assignments(path, loaded)
  given, named, parts = dict(base()), set(), {}
  if reopen:
    given |= saved_config(assignments)
  for assignment in assignments:
    assign(given, named, parts, *assignment)
  join_old_keys(given, named, parts)
  if not given["run_name"]:
    given["run_name"] = os.environ.get("JOBSET_NAME", "")
  if need_run_name and not given["run_name"]:
    raise ConfigError("run_name= is empty. Name the run, as its directory will be called: run_name=demo.")
  return Config(expand(given, named))


@functools.cache
def base():
  """Keys and defaults of configs/base.yml; a key's type is that of its default."""
  return {key: default(value) for key, (value, _) in read(BASE).items()}


def file_assignments(path, loaded):
  """The (key, value, where) of the file, after those of the file its `base_config` names unless that is `loaded`."""
  loaded.add(os.path.realpath(path))
  if os.path.realpath(path) == os.path.realpath(BASE):
    return []
  pairs, assignments = read(path), []
  if "base_config" in pairs:
    parent, where = pairs.pop("base_config")
    if not isinstance(parent, str) or not parent:
      raise ConfigError(f"base_config={show(parent)}{where} must name a file. Write base_config: base.yml")
    parent = os.path.join(os.path.dirname(os.path.realpath(path)), parent)
    if os.path.realpath(parent) not in loaded:
      if not os.path.isfile(parent):
        raise ConfigError(f"base_config={show(parent)}{where} is not a file. Write base_config: base.yml")
      if len(loaded) > 8:
        raise ConfigError(f"base_config={show(parent)}{where} is nested too deep. Name base.yml")
      assignments = file_assignments(parent, loaded)
  return assignments + [(key, value, where) for key, (value, where) in pairs.items()]


def saved_config(assignments):
  """{key: value} that the run which `assignments` name has saved and that still counts; {} when it has saved none."""
  where = {"run_name": os.environ.get("JOBSET_NAME", ""), "load_parameters_path": "",
           "base_output_directory": base()["base_output_directory"]}
  where |= {key: os.path.expanduser(typed(key, value, "")) for key, value, _ in assignments if key in where}
  parents = [f"{where['base_output_directory'].rstrip('/')}/{where['run_name']}"] if where["run_name"] else []
  path = where["load_parameters_path"].rstrip("/")
  if path:  # a run, its checkpoints or one of these
    parents += [path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))]
  for parent in parents:
    pairs = read_saved(f"{parent}/config.yml")
    if pairs is not None:
      saved, named, parts = dict(base()), set(), {}
      for key, (value, line) in pairs.items():
        assign(saved, named, parts, key, value, line)
      own = f"{parent}/tokenizer"
      if "://" not in own and os.path.isdir(own):  # the run may have been moved since
        saved |= {"tokenizer_path": own, "tokenizer_type": tokenizer_type(own)}
      gone = MACHINE_KEYS | set(where) | (set() if parent == parents[0] and where["run_name"] else
                                           {*DATA_KEYS, "gcs_metrics"})
      return {key: value for key, value in saved.items() if key not in gone}
  return {}


def read_saved(path):
  """read() of a run's saved config on a local path or gs://, None where there is none."""
  if "://" not in path:
    return read(path) if os.path.isfile(path) else None
  from etils import epath  # slow, and only for gs://

  try:
    return parse(epath.Path(path).read_text(), path)
  except FileNotFoundError:
    return None
  except Exception as error:  # a storage library may raise anything
    raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0][:200]}. Check path and access.") from error


def find(path):
  """The file at `path`, relative to the working directory or else to the repository. Raises ConfigError."""
  for candidate in (path, os.path.join(REPO, path)):
    if os.path.isfile(candidate):
      return candidate
  if os.path.isdir(path):
    raise ConfigError(f"{show(path)} is a directory. Name a YAML file in it, such as configs/base.yml.")
  if not path.endswith((".yml", ".yaml")):
    raise ConfigError(f"argument {show(path)} is neither a YAML file nor key=value. "
                      "Usage: train.py configs/base.yml [recipe.yml ...] key=value ...")
  known = [os.path.relpath(name, REPO) for name in glob.glob(os.path.join(REPO, "configs", "*.yml"))]
  raise ConfigError(f"config file {show(path)} not found.{nearest(path, known)} Recipes: {os.path.dirname(BASE)}")


def assign(given, named, parts, key, value, where):
  """Sets one key to a value as written, in today's name, and notes old names."""
  todays = OLD_VALUES.get((key, value.lower()), value) if isinstance(value, str) else value
  if key in OLD_PARTS:
    parts[key] = unquoted(value) if isinstance(value, str) else show(value)
    note(f"note: {key}={show(value)}{where} is read as part of {OLD_PARTS[key]}.")
    return
  if key in GONE_KEYS:
    harmless, reason = GONE_KEYS[key]
    if text(value).lower() not in harmless:
      raise ConfigError(f"{key}={show(value)}{where} is no key here: {reason}.")
    return note(f"note: {key}={show(value)}{where} is ignored: {reason}.")
  keys = OLD_KEYS.get(key, (key,))
  for name in keys:
    if name not in given:
      bare = name.lstrip("-").replace("-", "_")
      if bare in given:
        raise ConfigError(f"unknown key {key}={show(value)}{where}. Write {bare}={show(value)}")
      hint = nearest(key, given)
      raise ConfigError(f"unknown key {show(key)}={show(value)}{where}.{hint} All keys: configs/base.yml")
    given[name] = typed(name, todays, given[name], where)
    named.add(name)
  if keys != (key,) or todays is not value:
    note(f"note: {key}={show(value)}{where} is now " + ", ".join(f"{name}={show(given[name])}" for name in keys) + ".")


def join_old_keys(given, named, parts):
  """Old names that make one key of ours together."""
  if "assets_path" in parts or "vocab_relative_path" in parts:
    given["tokenizer_path"] = os.path.join(
        parts.get("assets_path", "assets"), parts.get("vocab_relative_path", "tokenizer"))
    named.add("tokenizer_path")
  step = parts.get("load_from_other_directory_step", "-1")
  if step != "-1":
    need(given["load_full_state_path"] and step.isdecimal(),
         f"load_from_other_directory_step={show(step)} is no step of load_full_state_path="
         f"{show(given['load_full_state_path'])}. Give load_full_state_path=<checkpoints>/<step>.")
    given["load_full_state_path"] = os.path.join(given["load_full_state_path"], step)


def dataset_type(path, name):
  """What dataset_path implies. Folders on gs:// are taken for TensorFlow Datasets, as everywhere before."""
  local = os.path.expanduser(path)
  if os.path.isfile(os.path.join(local, "manifest.json")) and os.path.isfile(os.path.join(local, "offsets")):
    return "tokens"
  if path.endswith((".parquet", ".gz", ".zst")) or ".array_record" in path or ".arrayrecord" in path:
    return "grain"
  if path.startswith("gs://") and path.endswith((".txt", ".md", ".py", ".jsonl")):
    return "text"
  folder = os.path.join(local, *name.partition(":")[0].split("/"))
  return "tfds" if path.startswith("gs://") or os.path.isdir(folder) else "text"


class Dataset(NamedTuple):
  """An entry of dataset_mixture or eval_datasets: its weight or name, dataset_type, dataset_path and dataset_name."""

  label: str
  kind: str
  path: str
  name: str


def dataset(key, entry):
  """The Dataset that an entry of `key` says. Raises ConfigError."""
  label, kind, path, name = (*entry.split("@", 3), "", "", "")[:4]
  form = f"{'WEIGHT' if key == 'dataset_mixture' else 'NAME'}@TYPE@PATH or with @NAME behind it"
  need(label and path, f"{key}={show(entry)} must be {form}.")
  need(kind in (*STREAMS, "tokens"), f"{key}={show(entry)}: {show(kind)} must be one of tfds, grain, hf and tokens."
       f"{nearest(kind, (*STREAMS, 'tokens'))}")
  return Dataset(label, kind, os.path.expanduser(path), name)


def expand(given, named):
  """Writes out what one key says about others: sizes of global_parameter_scale, the types that paths imply.

  Done where keys are given, because only there "given" and "default" differ. A saved config has the result.
  """
  given = dict(given)
  if given["tokenizer_path"] and "tokenizer_type" not in named:
    given["tokenizer_type"] = tokenizer_type(given["tokenizer_path"])
  if given["dataset_mixture"] and "dataset_mixture" in named and "dataset_type" not in named:
    given["dataset_type"] = "mixture"
  elif given["dataset_path"] and "dataset_path" in named and "dataset_type" not in named:
    given["dataset_type"] = dataset_type(given["dataset_path"], given["dataset_name"])
  scale = given["global_parameter_scale"]
  if scale and scale in CHOICES["global_parameter_scale"]:
    clash = sorted(set(named) & set(LADDER))
    if clash:
      raise ConfigError(f"{clash[0]}={given[clash[0]]} and global_parameter_scale={scale} both set the model's size. "
                        "Give one of them; global_parameter_scale=0 takes the base_* sizes.")
    rounds, rest = divmod(scale.bit_length() - 1, 3)
    doublings = {"base_emb_dim": rounds + (rest > 1), "base_num_decoder_layers": rounds}
    given |= {key: size << doublings.get(key, rounds + (rest > 0)) for key, size in LADDER.items()}
    given |= {key: size for key, size in LADDER_DEFAULTS.items() if key not in named}
    given["global_parameter_scale"] = 0
  return given


def tokenizer_type(path):
  """The kind of tokenizer that is at `path`, by its name; of a folder by what is in it."""
  path = os.path.expanduser(path)
  if path.endswith(".json"):
    return "huggingface"
  inside = ("tokenizer.json", "tokenizer.model", "vocab.json")
  first = next((name for name in inside if os.path.isfile(os.path.join(path, name))), "tokenizer.model")
  return "huggingface" if first.endswith(".json") else "sentencepiece"


# --- Read: YAML without YAML's scalar rules ------------------------------------------------------------------------


class Quoted(str):
  """A scalar that stood in quotes."""


def read(path):
  """{key: (value, where)} of a flat YAML file; values are strings or nested lists of them. Raises ConfigError."""
  name = os.path.relpath(path) if not os.path.relpath(path).startswith("..") else path
  try:
    with open(path, "rb") as file:
      data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
      raise ConfigError(f"{show(name)} has more than {MAX_FILE_BYTES} bytes: no config. Name a YAML file of keys.")
    return parse(data.decode(), name)
  except OSError as error:
    raise ConfigError(f"config file {show(name)} cannot be read: {error.strerror}. Check its permissions.") from None
  except UnicodeDecodeError as error:
    raise ConfigError(f"config file {show(name)} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None


def parse(source, name):
  """The mapping in YAML text `source`. Tags, anchors, aliases, duplicate keys and deep nesting are refused."""

  def where(event):
    return f" ({show(name)} line {event.start_mark.line + 1})"

  def refuse(event, what):
    raise ConfigError(f"{what}{where(event)}: configs are flat, `key: value` or `key: [a, b]`, like configs/base.yml.")

  def value(event, depth):
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
      refuse(event, f"YAML anchor or alias {show(event.anchor)} is not allowed")
    if event.tag is not None:
      refuse(event, f"YAML tag {show(event.tag)} is not allowed")
    if depth > MAX_NESTING:
      refuse(event, f"lists nested deeper than {MAX_NESTING} are not allowed")
    if isinstance(event, yaml.ScalarEvent):
      return event.value if event.implicit[0] else Quoted(event.value)
    if isinstance(event, yaml.MappingStartEvent):
      refuse(event, "a mapping inside a value is not allowed")
    items = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
      items.append(value(event, depth + 1))
    return items

  pairs = {}
  try:
    events = (e for e in yaml.parse(source, Loader=yaml.SafeLoader)
              if not isinstance(e, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)))
    if next(events, None) is None:
      return {}
    start = next(events)
    if not isinstance(start, yaml.MappingStartEvent) or start.tag or start.anchor:
      refuse(start, "the file is not a list of `key: value` lines")
    while not isinstance(event := next(events), yaml.MappingEndEvent):
      if not isinstance(event, yaml.ScalarEvent):
        refuse(event, "a key must be a plain name")
      key = str(value(event, 1))
      item = value(next(events), 1)
      if key in pairs:
        raise ConfigError(f"duplicate key {show(key)}={show(item)}{where(event)}, first{pairs[key][1]}. Delete one.")
      pairs[key] = (item, where(event))
    if (event := next(events, None)) is not None:
      refuse(event, "a second YAML document is not allowed")
  except yaml.MarkedYAMLError as error:
    line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
    raise ConfigError(f"{show(name)}{line} is not YAML: {show(error.problem)}. Write `key: value` lines.") from None
  except yaml.YAMLError as error:
    reason = show(getattr(error, "reason", error))
    raise ConfigError(f"{show(name)} is not YAML: {reason}. Write `key: value` lines.") from None
  return pairs


def default(value):
  """The typed default that stands in base.yml as `value`."""
  if isinstance(value, list):
    return tuple(default(item) for item in value)
  if isinstance(value, Quoted):
    return str(value)
  if value in ("true", "false"):
    return value == "true"
  return int(value) if re.fullmatch(r"-?[\d_]+", value) else float(value)


def typed(key, value, like, where=""):
  """A value as written, in files or arguments, in the type of `like`: the one rule for scalars and lists."""

  def wrong(rule):
    raise ConfigError(f"{key}={show(value)}{where} {rule}")

  if isinstance(like, tuple):
    items = value
    if isinstance(value, str):
      source = unquoted(value).strip()
      if source.startswith("["):
        try:
          items = parse(f"{key}: {source}", "")[key][0]
        except ConfigError:
          wrong("must be a list of names, such as [a, b].")
      else:
        items = [item.strip() for item in source.split(",")] if source else []
    if key == "logical_axis_rules":
      return merged_rules(items, like, wrong)
    if any(not isinstance(item, str) for item in items):
      wrong("must be a list of names, such as [a, b].")
    return tuple(str(item) for item in items)
  if not isinstance(value, str):
    wrong("is a list, and this key takes one value.")
  source = unquoted(value)
  if isinstance(like, bool):
    if source not in ("true", "True", "false", "False"):
      wrong("must be true or false.")
    return source in ("true", "True")
  if isinstance(like, str):
    if not source.isprintable() and key != "prompt":
      wrong("contains a line break or control character. Take it out.")
    return source
  kind = "a whole number" if isinstance(like, int) else "a number"
  try:
    number = int(source) if isinstance(like, int) and re.fullmatch(r"[+-]?[\d_]{1,300}", source) else float(source)
  except ValueError:
    wrong(f"must be {kind}{', such as ' + text(like) if source else ', and is empty'}.")
  if not math.isfinite(number):
    wrong(f"must be {kind}, and is not finite.")
  if isinstance(like, int) and number != int(number):
    wrong("must be a whole number.")
  return int(number) if isinstance(like, int) else float(number)


def merged_rules(items, rules, wrong):
  """logical_axis_rules `rules` with those that `items`, [[name, [mesh axis, ...]], ...], names replaced."""
  merged = dict(rules)
  for item in items:
    if not isinstance(item, (list, tuple)) or len(item) != 2 or not isinstance(item[0], str):
      wrong("must be a list of [name, [mesh axis, ...]], such as [[embed, [fsdp]]].")
    name, axes = str(item[0]), item[1]
    axes = ([axes] if axes else []) if isinstance(axes, str) else axes
    if name not in merged:
      wrong(f"names {show(name)}, which is no logical axis.{nearest(name, merged)} They are: {', '.join(merged)}.")
    for axis in axes:
      if not isinstance(axis, str) or axis not in MESH_AXES or list(axes).count(axis) > 1:
        wrong(f"gives {show(name)} {show(axis)}. Mesh axes, each once: {', '.join(MESH_AXES)}.")
    merged[name] = tuple(str(axis) for axis in axes)
  return tuple(merged.items())


def unquoted(source):
  """`source` without the quotes around it, if it has some: key="" on a command line."""
  return source[1:-1] if len(source) > 1 and source[0] == source[-1] and source[0] in "'\"" else str(source)


def text(value):
  """A typed value as it is written in files and arguments."""
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, (list, tuple)):
    return "[" + ", ".join(text(item) for item in value) + "]"
  return str(value)


def show(value):
  """`value` for a message: one line of at most 80 characters, both ends kept (a path's name is at its end)."""
  line = "".join(c if c.isprintable() else "?" for c in " ".join(text(value).split()))
  return line if len(line) <= 80 else line[:38] + "..." + line[-39:]


def nearest(name, names):
  """` Did you mean ...?` or nothing."""
  import difflib  # here: 5 ms that only a mistake should cost

  found = difflib.get_close_matches(name.lower(), names, n=1) or [n for n in names if name and name in n][:1]
  return f" Did you mean {found[0]}?" if found else ""


def note(line):
  print(line, file=sys.stderr)


# --- Derive and validate -------------------------------------------------------------------------------------------


def derive(given):
  """All values: those given, with -1, 0.0 and "~" replaced by what they stand for, and those that follow from them."""
  v = dict(given)
  for key in ("base_output_directory", "jax_cache_dir", "data_cache_dir", "compiled_trainstep_file",
              "compile_report_file", "plan_directory", "metrics_file", "tokenizer_path", "prompt_file",
              "decode_output_file", "load_parameters_path", "load_full_state_path", "prepare_directory"):
    v[key] = os.path.expanduser(v[key])
  for key in ("dataset_path", "eval_dataset_path"):
    v[key] = ",".join(os.path.expanduser(part.strip()) for part in v[key].split(","))
  for size in ("emb_dim", "num_query_heads", "num_kv_heads", "mlp_dim", "num_decoder_layers"):
    v[size] = v[f"base_{size}"]
  run = f"{v['base_output_directory'].rstrip('/')}/{v['run_name']}" if v["run_name"] else ""
  v["run_directory"] = run
  for name, folder in (("checkpoint", "checkpoints"), ("tensorboard", "tensorboard"), ("metrics", "metrics")):
    v[f"{name}_directory"] = f"{run}/{folder}" if run else ""
  if v["steps"] == -1:
    v["steps"] = v["learning_rate_schedule_steps"]
  if v["learning_rate_schedule_steps"] == -1:
    v["learning_rate_schedule_steps"] = max(v["steps"], 1)
  if v["warmup_steps"] == -1:
    v["warmup_steps"] = int(v["learning_rate_schedule_steps"] * v["warmup_steps_fraction"])
  if v["eval_per_device_batch_size"] == 0.0:
    v["eval_per_device_batch_size"] = v["per_device_batch_size"]
  if v["trainable_position_size"] == 0:
    v["trainable_position_size"] = v["max_target_length"]
  if not v["enable_dropout"]:
    v["dropout_rate"] = v["input_dropout_rate"] = 0.0
  v["has_update_rms_cap"] = bool(v["update_rms_cap"])  # the compiled step has the cap or not; its size is an input
  return v


def need(holds, message):
  if not holds:
    raise ConfigError(message)


def validate_each(given):
  """Raises ConfigError for the first value that is none of its key's choices or out of its range."""
  for key, allowed in CHOICES.items():
    for value in given[key] if isinstance(given[key], tuple) else (given[key],):
      if value not in allowed:
        names = ", ".join(json.dumps(choice) for choice in allowed)
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise ConfigError(f"{key}={show(value)} must be one of {names}.{hint}")
  for key, (low, high, *extra) in RANGES.items():
    also = f" or {extra[0]}" if extra else ""
    need(low <= given[key] <= high or given[key] in extra,
         f"{key}={show(given[key])} must be from {low:_} to {high:_}{also}.")


def validate_together(v):
  """Raises ConfigError for the first rule broken about derived and combined values, of those that need no device."""

  def these(*keys):
    return " and ".join(f"{key}={show(v[key])}" for key in keys)

  # Steps.
  need(v["steps"] != -1, "steps=-1 takes learning_rate_schedule_steps, which is -1 too. Give one of them.")
  need(v["warmup_steps"] <= v["learning_rate_schedule_steps"], f"{these('warmup_steps')} must not be more than "
       f"{these('learning_rate_schedule_steps')}. Lower it, or give warmup_steps_fraction instead.")
  need(v["adam_eps"] or v["adam_eps_root"],
       f"{these('adam_eps', 'adam_eps_root')} divide by zero where a gradient is 0. Set adam_eps=1e-8.")
  need(v["target_eval_loss"] == 0 or v["eval_interval"] != -1,
       f"{these('target_eval_loss')} is never reached with eval_interval=-1. Set eval_interval=100.")

  # Run and paths.
  need(not v["run_name"] or re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", v["run_name"]),
       f"{these('run_name')} must be at most 128 letters, digits, dots, underscores and dashes, and not start with "
       "a dot or dash. Where runs go is base_output_directory.")
  out = v["base_output_directory"]
  need(out, "base_output_directory= is empty. Give a directory or gs://bucket/path; . is the working directory.")
  for key in ("base_output_directory", "load_parameters_path", "load_full_state_path", "dataset_path",
              "eval_dataset_path", "tokenizer_path", "jax_cache_dir"):
    need("://" not in v[key].replace("gs://", ""), f"{these(key)} must be a local path or gs://bucket/path.")
  for key in ("metrics_file", "data_cache_dir"):
    need("://" not in v[key], f"{these(key)} must be a local path.")
  need(not v["gcs_metrics"] or out.startswith("gs://"),
       f"gcs_metrics=true needs a run on gs://, not {these('base_output_directory')}. Set gcs_metrics=false.")
  need(not v["load_parameters_path"] or not v["load_full_state_path"],
       f"{these('load_parameters_path', 'load_full_state_path')} exclude each other. Give one.")
  need(not v["stack_trace_to_cloud"] or v["collect_stack_trace"],
       "stack_trace_to_cloud=true needs collect_stack_trace=true.")
  need(re.fullmatch(r"([A-Za-z0-9]+([-:][A-Za-z0-9]+)*)?", v["compile_topology"]),
       f"{these('compile_topology')} must be a name such as v5e-256, v5e:16x16 or h100-8.")
  if not os.path.isdir(v["run_directory"]):  # an existing run has stored what it read
    keys = ["load_parameters_path", "load_full_state_path", "tokenizer_path"]
    inputs = [(key, v[key]) for key in keys]
    if v["dataset_type"] not in ("synthetic", "hf"):
      inputs += [(key, path) for key in ("dataset_path", "eval_dataset_path") for path in v[key].split(",")]
    for key, path in inputs:
      if path and not path.startswith("gs://"):
        exists = os.path.exists(path)
        need(exists or any(glob.iglob(path, recursive=True)),
             f"{key}={show(path)} does not exist (seen from {show(os.getcwd())}). Check the path.")
        need(not exists or os.access(path, os.R_OK), f"{key}={show(path)} is not readable. Check its permissions.")
  if not out.startswith("gs://"):
    parent = os.path.abspath(v["run_directory"] or out)
    while not os.path.exists(parent):
      parent = os.path.dirname(parent)
    need(os.path.isdir(parent), f"{these('base_output_directory')} cannot hold runs: {show(parent)} is a file.")

  # Model.
  heads, kv_heads, position = v["num_query_heads"], v["num_kv_heads"], v["position_embedding"]
  need(heads % kv_heads == 0, f"{these('base_num_query_heads')} must be a multiple of {these('base_num_kv_heads')}. "
       f"Set base_num_kv_heads={math.gcd(heads, kv_heads)}.")
  need(1 <= len(v["mlp_activations"]) <= 2,
       f"{these('mlp_activations')} must be one name, or two for a gated layer: [silu, linear].")
  need(not position.startswith("rope") or v["head_dim"] % 2 == 0,
       f"{these('head_dim')} must be even for {these('position_embedding')}.")
  need(position != "sinusoidal" or v["emb_dim"] % 2 == 0,
       f"{these('base_emb_dim')} must be even for {these('position_embedding')}.")
  need(position != "learned" or v["trainable_position_size"] >= v["max_target_length"],
       f"{these('trainable_position_size')} must be at least {these('max_target_length')}, which 0 takes.")
  need(position != "relative_bias" or v["attention"] in ("auto", "dot"),
       f"{these('attention')} cannot add {these('position_embedding')}. Set attention=dot.")
  need(v["attn_logits_soft_cap"] == 0 or v["attention"] != "cudnn",
       f"attention=cudnn cannot apply {these('attn_logits_soft_cap')}. Set attention=dot.")
  need(v["dtype"] != "float32" or v["attention"] != "cudnn",
       "attention=cudnn cannot compute in dtype=float32. Set dtype=bfloat16 or attention=dot.")
  need(not v["normalize_embedding_logits"] or v["logits_via_embedding"],
       "normalize_embedding_logits=true needs logits_via_embedding=true.")
  need(not v["rope_scaling"] or position.startswith("rope"),
       f"{these('rope_scaling', 'position_embedding')} do not go together. Set rope_scaling=\"\".")
  need(v["rope_scaling_low_frequency_factor"] < v["rope_scaling_high_frequency_factor"],
       f"{these('rope_scaling_low_frequency_factor')} must be less than {these('rope_scaling_high_frequency_factor')}.")
  need(v["remat_policy"] != "names" or v["remat_names"],
       f"remat_policy=names saves nothing with remat_names=[]. Name some of {', '.join(CHOICES['remat_names'])}.")

  # Data.
  kind, reads_path = v["dataset_type"], v["tokenizer_type"] in ("sentencepiece", "huggingface")
  need(kind not in ("text", "tokens", *STREAMS) or v["dataset_path"],
       f"{these('dataset_type')} needs dataset_path. See Data in configs/base.yml for what it is.")
  need(kind not in ("stdlib", "mixture") or not v["dataset_path"],
       f"{these('dataset_path')} is not read with {these('dataset_type')}. Add dataset_type=text or another.")
  need((kind == "mixture") == bool(v["dataset_mixture"]) or kind == "synthetic",
       f"{these('dataset_type', 'dataset_mixture')} do not go together. Give dataset_mixture alone.")
  need(kind not in ("stdlib", "text") or v["eval_fraction"] or v["eval_interval"] == -1 or v["eval_dataset_path"],
       "eval_fraction=0.0 leaves nothing to evaluate on. Raise it, give eval_dataset_path, or set eval_interval=-1.")
  need(kind in (*STREAMS, "mixture") or v["packing"] == "concat",
       f"{these('packing')} is for {', '.join(STREAMS)}, and {these('dataset_type')}. Set packing=concat.")
  need(not v["num_epoch"] or kind not in ("mixture", "synthetic"),
       f"{these('num_epoch', 'dataset_type')}: mixtures and random rows have no epochs. Set num_epoch=0 and steps.")
  for entry in v["dataset_mixture"]:
    weight = dataset("dataset_mixture", entry).label
    need(re.fullmatch(r"\d*\.?\d+", weight) and float(weight) > 0,
         f"dataset_mixture={show(entry)}: the weight must be a number above 0.")
  names = [dataset("eval_datasets", entry).label for entry in v["eval_datasets"]]
  for name in names:
    need(re.fullmatch(r"[A-Za-z0-9_.-]+", name) and names.count(name) == 1,
         f"eval_datasets: the name {show(name)} must be letters, digits, dots, dashes, and not come twice.")
  need(not v["eval_rolling"] or v["eval_steps"] != -1,
       "eval_rolling=true needs eval_steps: so many batches, and the next evaluation goes on behind them.")
  need(v["tokenizer_path"] or not reads_path,
       f"{these('tokenizer_type')} needs tokenizer_path, the file or folder of the tokenizer.")
  need(reads_path or not v["tokenizer_path"], f"{these('tokenizer_type')} does not read {these('tokenizer_path')}. "
       "Leave one of the two out.")

  # Decode and evals.
  need(not v["prompt_file"] or "://" in v["prompt_file"] or os.path.isfile(v["prompt_file"]),
       f"{these('prompt_file')} is no file (seen from {show(os.getcwd())}). Check the path.")

  for task in v["eval_tasks"]:
    kind, _, path = task.partition(":")
    need(kind in EVAL_KINDS, f"eval_tasks={show(task)} must begin with one of {', '.join(EVAL_KINDS)}, then :path."
         f"{nearest(kind, EVAL_KINDS)}")
    need(path or kind == "perplexity", f"eval_tasks={show(task)} needs a path: {kind}:file.jsonl.")
    need(kind == "lm_eval" or "://" in path or not path or any(glob.iglob(os.path.expanduser(path))),
         f"eval_tasks={show(task)}: the file does not exist (seen from {show(os.getcwd())}). Check the path.")

  # Processes and mesh.
  need(not v["jax_coordinator_address"] or re.fullmatch(r"[^\s:]+:\d+|\[[^\s]+\]:\d+", v["jax_coordinator_address"]),
       f"{these('jax_coordinator_address')} must be host:port.")
  need(v["jax_process_id"] < v["jax_process_count"],
       f"{these('jax_process_id')} must be less than {these('jax_process_count')}.")
  for net in ("ici", "dcn"):
    free = [f"{net}_{axis}_parallelism=-1" for axis in MESH_AXES if v[f"{net}_{axis}_parallelism"] == -1]
    need(len(free) <= 1, f"{' and '.join(free)}: only one {net}_* key can take what is left. Set the others to 1.")


# --- Resolve: rules about devices ----------------------------------------------------------------------------------


def resolve(cfg, devices):
  """`cfg` for these devices: adds platform, num_devices, num_slices, ici_mesh_shape, dcn_mesh_shape, mesh_shape (in the
  order of MESH_AXES), micro_batch_size, global_batch_size and eval_batch_size (rows over all devices), and decides
  dtype, attention and num_vocab_tiling. Raises ConfigError when mesh, batch or sizes do not fit.

  `devices` have .platform and .device_kind, and .slice_index where the platform knows slices. With compile_topology set
  they are those of that target instead, whatever machine this is.
  """
  if cfg.compile_topology:
    from MaxText import topology  # here: training has no use for it

    devices = topology.target(cfg.compile_topology, cfg.compile_topology_num_slices)
  slices = [getattr(device, "slice_index", None) or 0 for device in devices]
  platform = {"cuda": "gpu", "rocm": "gpu"}.get(devices[0].platform, devices[0].platform)
  return Config(cfg.given, (platform, devices[0].device_kind, len(devices), len(set(slices))))


def resolved(v, facts):
  """The values that resolve() adds to or decides in `v`."""
  platform, kind, num_devices, num_slices = facts
  r = {"platform": platform, "num_devices": num_devices}
  r["dtype"] = v["dtype"] if v["dtype"] != "auto" else "float32" if platform == "cpu" else "bfloat16"

  asked = math.prod(max(v[f"dcn_{axis}_parallelism"], 1) for axis in MESH_AXES)
  if num_slices == 1 and platform != "tpu":  # these devices know of no slices: the dcn_* keys make them
    if num_devices % asked:
      raise ConfigError(f"{product(v, 'dcn')} must divide the {num_devices} devices found. Lower it.")
    num_slices = asked
  r["num_slices"] = num_slices
  r["dcn_mesh_shape"] = filled(v, "dcn", num_slices, "slices")
  r["ici_mesh_shape"] = filled(v, "ici", num_devices // num_slices, "devices per slice")
  r["mesh_shape"] = tuple(d * i for d, i in zip(r["dcn_mesh_shape"], r["ici_mesh_shape"], strict=True))

  rules = dict(v["logical_axis_rules"])
  along = dict(zip(MESH_AXES, r["mesh_shape"], strict=True))
  shards = {name: math.prod(along[axis] for axis in axes) for name, axes in rules.items()}

  def sharded_over(name):
    return f'"{name}" is sharded over ' + " x ".join(f"{axis}={along[axis]}" for axis in rules[name] if along[axis] > 1)

  for name, key in (
      ("length", "max_target_length"), ("embed", "base_emb_dim"), ("norm", "base_emb_dim"),
      ("heads", "base_num_query_heads"), ("act_heads", "base_num_query_heads"), ("kv_heads", "base_num_kv_heads"),
      ("head_dim", "head_dim"), ("mlp", "base_mlp_dim"), ("vocab", "vocab_size"), ("layers", "base_num_decoder_layers"),
  ):
    if v[key] % shards[name]:
      raise ConfigError(f"{key}={v[key]} must be a multiple of {shards[name]}: {sharded_over(name)}. "
                        f"Change it or the mesh, or set logical_axis_rules=[[{name},[]]].")

  def rows(key):
    count = v[key] * num_devices
    whole = round(count)
    enough = max(1, math.ceil(count / shards["batch"] - 1e-6)) * shards["batch"] / num_devices
    makes, way_out = f"{key}={v[key]} x {num_devices} devices makes {count:g} rows", f"Set {key}={enough:.9g}"
    need(whole and abs(count - whole) <= 1e-6 * count, f"{makes}, not a whole number. {way_out}.")
    need(whole % shards["batch"] == 0, f"{makes}, not a multiple of {shards['batch']}: {sharded_over('batch')}. "
         f"{way_out} or change the mesh.")
    return whole

  r["micro_batch_size"] = rows("per_device_batch_size")
  r["global_batch_size"] = r["micro_batch_size"] * v["gradient_accumulation_steps"]
  # Evaluation takes per_device_batch_size unless it has its own.
  r["eval_batch_size"] = rows("eval_per_device_batch_size")

  r["attention"] = kernel(v, r["dtype"], platform, kind, v["max_target_length"] // shards["length"])
  local_length, local_rows = v["max_target_length"] // shards["length"], r["micro_batch_size"] // shards["batch"]
  if v["num_vocab_tiling"]:
    if local_length % v["num_vocab_tiling"]:
      raise ConfigError(f"num_vocab_tiling={v['num_vocab_tiling']} must divide the {local_length} tokens of a row that "
                        "each device has. 0 picks one.")
  else:
    logits_bytes = 4 * local_rows * local_length * v["vocab_size"] // shards["act_vocab"]
    limit = LOGITS_BYTES.get(platform, LOGITS_BYTES["cpu"])
    r["num_vocab_tiling"] = next(n for n in range(1, local_length + 1) if local_length % n == 0
                                 and (logits_bytes <= n * limit or n == local_length))
  return r


def product(v, net):
  """`a=3 x b=4` of the sizes of one group that are not 1."""
  keys = [f"{net}_{axis}_parallelism" for axis in MESH_AXES]
  return " x ".join(f"{key}={v[key]}" for key in keys if v[key] not in (1, -1)) or f"{net}_*_parallelism=1"


def filled(v, net, found, what):
  """The sizes of the mesh within ("ici") or across ("dcn") slices, -1 filled so that their product is `found`."""
  shape = [v[f"{net}_{axis}_parallelism"] for axis in MESH_AXES]
  fixed = math.prod(size for size in shape if size != -1)
  if -1 in shape and found % fixed == 0:
    return tuple(found // fixed if size == -1 else size for size in shape)
  if fixed != found:
    rule = f"must divide the {found} {what} found. Lower it." if -1 in shape else (
        f"needs {fixed} {what}, found {found}. Set one {net}_* to -1 to fill it.")
    raise ConfigError(f"{product(v, net)} {rule}")
  return tuple(shape)


def kernel(v, dtype, platform, kind, shard_length):
  """The attention kernel: the one asked for, or with "auto" the fastest one that can do this model on this platform."""
  nvidia = platform == "gpu" and not re.search("AMD|gfx|Instinct", kind)
  hopper = re.search(r"\b(H|GH|B|GB)\d{2,3}\b", kind)
  cudnn = {
      f"it needs an NVIDIA GPU, and these are {platform} devices ({kind})": nvidia,
      f"it computes in bfloat16 and dtype={dtype}": dtype == "bfloat16",
      f"it needs head_dim of at most {256 if hopper else 128} and a multiple of 8, and head_dim={v['head_dim']}":
          v["head_dim"] % 8 == 0 and v["head_dim"] <= (256 if hopper else 128),
      "it has no attn_logits_soft_cap": v["attn_logits_soft_cap"] == 0,
      "it has no relative_bias": v["position_embedding"] != "relative_bias",
  }
  flash = {
      f"it needs TPUs (or CPUs, which emulate it slowly), and these are {platform} devices ({kind})": platform != "gpu",
      f"it needs a multiple of 128 tokens per shard; max_target_length={v['max_target_length']} makes {shard_length}":
          shard_length % 128 == 0,
      "it has no relative_bias": v["position_embedding"] != "relative_bias",
  }
  table = {"dot": {}, "flash": flash, "cudnn": cudnn}
  asked = v["attention"]
  if asked == "auto":
    first = {"tpu": "flash", "gpu": "cudnn"}.get(platform, "dot")
    return first if all(table[first].values()) else "dot"
  for reason, holds in table[asked].items():
    if not holds:
      raise ConfigError(f"attention={asked}: {reason}. Set attention=auto.")
  return asked


# --- Write ---------------------------------------------------------------------------------------------------------


def as_yaml(cfg):
  """The whole config as given, as YAML text that load() takes as its first file."""

  def written(value):
    line = json.dumps(value, ensure_ascii=False)  # 1e-08, which other YAML readers take for a string
    return line.replace("e", ".0e") if isinstance(value, float) and "." not in line else line

  lines = [f"{key}: {written(value)}" for key, value in cfg.given.items()]
  return "# Every key of this run, as given.\n" + "\n".join(lines) + "\n"


def dump(cfg, path):
  """Writes as_yaml(cfg) to the local file `path`, whole or not at all."""
  with open(f"{path}.tmp", "w", encoding="utf-8") as file:
    file.write(as_yaml(cfg))
  os.replace(f"{path}.tmp", path)


def describe(cfg):
  """Lines that say what differs from base.yml, and what resolve() decided."""
  overrides = []
  for key, value in cfg.given.items():
    if key == "logical_axis_rules":
      value = tuple(rule for rule in value if rule not in base()[key])
    if value != base()[key] and (value or key != "logical_axis_rules"):
      overrides.append(f"{key}={show(value)}")
  lines = ["config: " + ", ".join(overrides)] if overrides else []
  if cfg.facts:
    mesh = [f"{axis}={size}" for axis, size in zip(MESH_AXES, cfg.mesh_shape, strict=True) if size > 1]
    lines.append(f"devices: {cfg.num_devices} x {cfg.facts[1]}, slices: {cfg.num_slices}, "
                 f"mesh: {' x '.join(mesh) or 'none'}, dtype: {cfg.dtype}, attention: {cfg.attention}, "
                 f"logits in pieces: {cfg.num_vocab_tiling}, "
                 f"tokens per step: {cfg.global_batch_size} x {cfg.max_target_length}")
  return lines
