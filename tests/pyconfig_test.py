# SPDX-License-Identifier: Apache-2.0
"""Config: what is read as what, what is refused and how, and what follows from it on which devices."""

import dataclasses
import os
import pickle
import re
import resource
import subprocess
import sys

import pytest
import yaml

from MaxText import pyconfig
from MaxText.errors import ConfigError

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass
class Device:
  platform: str = "cpu"
  device_kind: str = "cpu"
  slice_index: int | None = None


H100 = [Device("gpu", "NVIDIA H100 80GB HBM3", 0)] * 8
A100 = [Device("gpu", "NVIDIA A100-SXM4-80GB", 0)] * 8
MI300 = [Device("gpu", "AMD Instinct MI300X", 0)] * 8


def cpus(count):
  return [Device()] * count


def tpus(count, slices=1):
  return [Device("tpu", "TPU v4", index) for index in range(slices) for _ in range(count // slices)]


def load(*argv):
  return pyconfig.load(["configs/base.yml", "run_name=x", *argv])


def resolved(devices, *argv):
  return pyconfig.resolve(load(*argv), devices)


def refusal(argv, devices=()):
  """The message that `argv` is refused with: one line."""
  with pytest.raises(ConfigError) as caught:
    cfg = pyconfig.load(argv)
    if devices:
      pyconfig.resolve(cfg, devices)
  message = str(caught.value)
  assert message and len(message.splitlines()) == 1 and message.isprintable() and len(message) < 500, message
  return message


def file(tmp_path, text, name="mine.yml"):
  path = tmp_path / name
  path.write_text(text)
  return str(path)


# --- Scalars -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, written, value", [
    ("learning_rate", "1e-3", 1e-3), ("learning_rate", "1.e-3", 1e-3), ("learning_rate", "3", 3.0),
    ("learning_rate", "+.5", 0.5), ("learning_rate", "0", 0.0), ("steps", "1e3", 1000), ("steps", "010", 10),
    ("steps", "1_000", 1000), ("steps", "2.0", 2), ("steps", "-1", -1), ("enable_checkpointing", "False", False),
    ("enable_checkpointing", "true", True), ("metrics_file", "12:30", "12:30"), ("metrics_file", "010", "010"),
    ("metrics_file", "on", "on"), ("metrics_file", "2026-01-01", "2026-01-01"), ("metrics_file", "null", "null"),
    ("metrics_file", '""', ""), ("metrics_file", "'a b'", "a b"), ("xla_flags", "--a=1 --b=c=d", "--a=1 --b=c=d"),
    ("mlp_activations", "[gelu]", ("gelu",)), ("mlp_activations", '["silu", "linear"]', ("silu", "linear")),
])
def test_a_scalar_is_read_the_same_way_in_files_and_arguments(tmp_path, key, written, value):
  more = ["learning_rate_schedule_steps=9"] if written == "-1" else []
  for cfg in (load(f"{key}={written}", *more), load(file(tmp_path, f"{key}: {written}\n"), *more)):
    assert cfg.given[key] == value and type(cfg.given[key]) is type(value)


def test_a_list_may_be_given_without_brackets():
  assert load("mlp_activations=gelu,linear").mlp_activations == ("gelu", "linear")
  assert load("mlp_activations=gelu").mlp_activations == ("gelu",)


def test_every_default_is_what_yaml_reads_where_yaml_is_right():
  with open(pyconfig.BASE) as base:
    plain = yaml.safe_load(base)
  as_lists = yaml.safe_load(pyconfig.as_yaml(pyconfig.load([], need_run_name=False)))
  assert as_lists == plain


def test_logical_axis_rules_are_merged_by_name():
  base = dict(load().logical_axis_rules)
  cfg = dict(load("logical_axis_rules=[[embed,[]],[mlp,tensor]]").logical_axis_rules)
  assert cfg == base | {"embed": (), "mlp": ("tensor",)} and list(cfg) == list(base)


def test_every_number_has_a_range_and_every_table_names_real_keys():
  base = pyconfig.base()
  numbers = {key for key, value in base.items() if type(value) in (int, float)} - set(pyconfig.CHOICES)
  assert numbers == set(pyconfig.RANGES)
  assert set(pyconfig.CHOICES) <= set(base)
  assert {name for names in pyconfig.OLD_KEYS.values() for name in names} <= set(base)
  assert not (set(pyconfig.OLD_KEYS) | set(pyconfig.GONE_KEYS) | set(pyconfig.OLD_PARTS)) & set(base)
  assert set(pyconfig.OLD_PARTS.values()) <= set(base)


# --- Files ---------------------------------------------------------------------------------------------------------


def test_a_recipe_is_the_same_alone_and_after_its_parent(tmp_path):
  recipe = file(tmp_path, f"base_config: {pyconfig.BASE}\nsteps: 7\n")
  assert pyconfig.load([recipe, "run_name=x"]) == load(recipe) == load("steps=7")


def test_later_wins_and_a_second_recipe_does_not_reset_the_first(tmp_path):
  first = file(tmp_path, f"base_config: {pyconfig.BASE}\nsteps: 7\nlearning_rate: 1\n", "first.yml")
  second = file(tmp_path, "base_config: first.yml\nsteps: 8\n", "second.yml")
  third = file(tmp_path, f"base_config: {pyconfig.BASE}\nlog_period: 3\n", "third.yml")
  assert (cfg := load(second)).steps == 8 and cfg.learning_rate == 1.0
  cfg = load(first, third, "steps=9", "steps=10")
  assert (cfg.steps, cfg.learning_rate, cfg.log_period) == (10, 1.0, 3)
  assert "must come first" in refusal([first, "configs/base.yml", "run_name=x"])


def test_a_saved_config_is_a_first_argument_and_gives_the_same_config(tmp_path):
  for argv in ((), ("steps=-1", "learning_rate_schedule_steps=9"), ("global_parameter_scale=16", "head_dim=64"),
               ("global_parameter_scale=2",), ("logical_axis_rules=[[embed,[]]]", 'mlp_activations=["gelu"]'),
               ("metrics_file=a b: #c 'd' \"e\" é", "xla_flags=--x={y}"),
               ("dataset_type=synthetic", "adam_eps=1e-30")):
    cfg = load(*argv)
    pyconfig.dump(pyconfig.resolve(cfg, cpus(8)), tmp_path / "config.yml")
    again = pyconfig.load([str(tmp_path / "config.yml")])
    assert again == cfg and hash(again) == hash(cfg) and again.given == cfg.given
  assert os.listdir(tmp_path) == ["config.yml"]
  assert "learning_rate_schedule_steps: -1" in pyconfig.as_yaml(load())


def test_paths_are_found_from_other_working_directories(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert load() == pyconfig.load(["MaxText/configs/base.yml", "run_name=x"])
  assert "Did you mean configs/base.yml?" in refusal(["configs/bsae.yml", "run_name=x"])
  assert "is a directory" in refusal([str(tmp_path), "run_name=x"])
  assert "neither a YAML file nor key=value" in refusal(["configs/base.yml", "run_name"])


# --- Config --------------------------------------------------------------------------------------------------------


def test_a_config_is_frozen_hashable_comparable_and_picklable():
  cfg = resolved(cpus(8), "steps=7")
  assert {cfg: 1}[resolved(cpus(8), "steps=7")] == 1 and cfg != resolved(cpus(8), "steps=8") and cfg != load("steps=7")
  assert pickle.loads(pickle.dumps(cfg)) == cfg
  with pytest.raises(AttributeError, match="frozen"):
    cfg.steps = 8
  with pytest.raises(AttributeError, match="Did you mean max_target_length"):
    _ = cfg.max_target_lenght


def test_replace_derives_validates_and_resolves_anew():
  cfg = resolved(cpus(8), "base_output_directory=/tmp/out")
  assert cfg.replace(run_name="y").checkpoint_directory == "/tmp/out/y/checkpoints"
  assert cfg.replace(per_device_batch_size=2).global_batch_size == 16
  assert cfg.replace(global_parameter_scale=2).head_dim == 256
  assert cfg.replace(logical_axis_rules=cfg.logical_axis_rules, mlp_activations=["gelu"]).mlp_activations == ("gelu",)
  for wrong in ({"steps": -5}, {"sets": 5}, {"learning_rate": "x"}, {"per_device_batch_size": 0.3}):
    with pytest.raises(ConfigError):
      cfg.replace(**wrong)


def test_values_follow_from_others():
  cfg = load("steps=-1", "learning_rate_schedule_steps=50", "enable_dropout=false", "dropout_rate=0.1")
  assert (cfg.steps, cfg.warmup_steps, cfg.dropout_rate) == (50, 5, 0.0)
  assert cfg.eval_per_device_batch_size == cfg.per_device_batch_size and cfg.trainable_position_size == 256
  assert cfg.run_directory == "runs/x" and cfg.metrics_directory == "runs/x/metrics"
  assert load("base_output_directory=gs://b/c/").tensorboard_directory == "gs://b/c/x/tensorboard"
  assert load("jax_cache_dir=~/j").jax_cache_dir == os.path.expanduser("~/j")
  assert load("jax_cache_dir=").jax_cache_dir == ""
  assert load(f"tokenizer_path={__file__}").tokenizer_type == "sentencepiece"
  assert load("dataset_path=tests").dataset_type == "text"
  assert load("dataset_path=tests", "dataset_type=synthetic").dataset_type == "synthetic"
  for path, kind in (("gs://b/c4", "tfds"), ("gs://b/*.txt", "text"), ("gs://b/x,gs://b/a.jsonl", "text"),
                     ("gs://b/a.jsonl.gz", "grain"), ("gs://b/a.parquet", "grain")):
    assert load(f"dataset_path={path}").dataset_type == kind
  assert load("dataset_path=gs://b/notes", "dataset_type=text").dataset_type == "text"


def test_zero_is_a_value():
  cfg = load("gradient_clipping_threshold=0", "adam_b1=0", "learning_rate=0", "warmup_steps=0", "steps=0",
             "adam_weight_decay=0", "skip_first_n_steps_for_profiler=0", "learning_rate_final_fraction=0")
  assert cfg.gradient_clipping_threshold == cfg.adam_b1 == cfg.learning_rate == cfg.warmup_steps == cfg.steps == 0
  assert cfg.adam_weight_decay == cfg.learning_rate_final_fraction == 0


def test_run_name_falls_back_to_the_job_and_is_needed_for_training_only(monkeypatch):
  monkeypatch.delenv("JOBSET_NAME", raising=False)
  assert refusal(["configs/base.yml"]).startswith("run_name= is empty")
  assert pyconfig.load(["configs/base.yml"], need_run_name=False).run_directory == ""
  monkeypatch.setenv("JOBSET_NAME", "job-1")
  assert pyconfig.load(["configs/base.yml"]).run_name == "job-1"
  monkeypatch.setenv("JOBSET_NAME", "../job")
  assert "run_name=../job" in refusal(["configs/base.yml"])


def test_the_ladder_doubles_the_reference_sizes():
  published = {1: (2560, 8, 8192, 16), 2: (2560, 16, 16384, 16), 4: (5120, 16, 16384, 16), 8: (5120, 16, 16384, 32),
               16: (5120, 32, 32768, 32), 32: (10240, 32, 32768, 32), 64: (10240, 32, 32768, 64),
               128: (10240, 64, 65536, 64)}
  for scale, sizes in published.items():
    cfg = load(f"global_parameter_scale={scale}")
    assert (cfg.emb_dim, cfg.num_query_heads, cfg.mlp_dim, cfg.num_decoder_layers) == sizes
    assert cfg.num_kv_heads == cfg.num_query_heads
    assert (cfg.head_dim, cfg.vocab_size, cfg.max_target_length) == (256, 32768, 2048)
  assert load("global_parameter_scale=4", "head_dim=64", "max_target_length=128").head_dim == 64


def test_describe_names_overrides_and_what_was_decided():
  lines = pyconfig.describe(resolved(cpus(8), "steps=7", "jax_cache_dir=", "logical_axis_rules=[[embed,[]]]"))
  assert lines[0] == "config: run_name=x, steps=7, jax_cache_dir=, logical_axis_rules=[[embed, []]]"
  assert "8 x cpu" in lines[1] and "fsdp=8" in lines[1] and "attention: dot" in lines[1]
  assert pyconfig.describe(pyconfig.load([], need_run_name=False)) == []


# --- Reopened runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, monkeypatch):
  """A run "mine" on eight devices in tmp_path/runs, where the working directory is."""
  monkeypatch.chdir(tmp_path)
  cfg = load("run_name=mine", "base_emb_dim=64", "vocab_size=999", "steps=7", "max_target_length=64",
             "ici_tensor_parallelism=8", "ici_fsdp_parallelism=1", "per_device_batch_size=0.125", "xla_flags=--a=b",
             "dataset_type=text", f"dataset_path={REPO}/configs")
  directory = tmp_path / "runs" / "mine"
  (directory / "checkpoints" / "7").mkdir(parents=True)
  pyconfig.dump(cfg, directory / "config.yml")
  return directory


def test_a_reopened_run_has_its_saved_config_below_recipes_and_arguments(tmp_path, saved):
  recipe = file(tmp_path, "steps: 8\nvocab_size: 1000\n")
  cfg = pyconfig.load(["configs/base.yml", "run_name=mine", recipe, "steps=9"], reopen=True)
  assert (cfg.base_emb_dim, cfg.vocab_size, cfg.steps, cfg.run_directory) == (64, 1000, 9, "runs/mine")
  assert pyconfig.load(["configs/base.yml", "run_name=mine"], reopen=False).base_emb_dim == 128


def test_a_reopened_run_does_not_ask_for_the_machine_that_trained_it(saved):
  cfg = pyconfig.resolve(pyconfig.load(["configs/base.yml", "run_name=mine"], reopen=True), cpus(1))
  assert cfg.xla_flags == "" and cfg.mesh_shape == (1,) * 6 and cfg.eval_batch_size == 8


def test_a_reopened_run_does_not_miss_files_that_only_its_training_needed(saved):
  (saved / "config.yml").write_text(
      (saved / "config.yml").read_text().replace("eval_tasks: []", 'eval_tasks: ["lambada:gone.jsonl"]'))
  assert "gone.jsonl" in (saved / "config.yml").read_text()
  assert pyconfig.load(["configs/base.yml", "run_name=mine"], reopen=True).eval_tasks == ()


@pytest.mark.parametrize("inside", ["", "/checkpoints", "/checkpoints/7"])
def test_parameters_from_elsewhere_come_with_the_config_of_their_run(tmp_path, saved, inside):
  moved = tmp_path / "elsewhere"
  saved.rename(moved)
  (moved / "tokenizer").mkdir()
  (moved / "tokenizer" / "tokenizer.json").touch()
  cfg = pyconfig.load([f"load_parameters_path={moved}{inside}"], need_run_name=False, reopen=True)
  assert (cfg.run_name, cfg.base_emb_dim, cfg.vocab_size, cfg.dataset_path) == ("", 64, 999, "")
  assert (cfg.tokenizer_path, cfg.tokenizer_type) == (f"{moved}/tokenizer", "huggingface")


def test_the_type_of_a_tokenizer_follows_from_its_path(tmp_path):
  (tmp_path / "vocab.json").touch()
  (tmp_path / "a.json").touch()
  (tmp_path / "a.model").touch()
  for path, kind in ((tmp_path, "huggingface"), (tmp_path / "a.json", "huggingface"),
                     (tmp_path / "a.model", "sentencepiece")):
    assert load(f"tokenizer_path={path}").tokenizer_type == kind


# --- Old names -----------------------------------------------------------------------------------------------------

NOV_23_KEYS = """
run_name load_parameters_path load_from_other_directory load_from_other_directory_step reuse_example_batch
metrics_file gcs_metrics dtype int8_training use_dqdg fwd_int8 dlhs_int8 drhs_int8 fwd_int8_qk dlhs_int8_qk
drhs_int8_qk fwd_int8_pv dlhs_int8_pv drhs_int8_pv aqt_use_dummy_static_bound aqt_use_fwd_quant aqt_rng_type
global_parameter_scale base_emb_dim base_num_heads base_mlp_dim base_num_decoder_layers head_dim mlp_activations
dropout_rate logits_via_embedding remat_policy scan_layers param_scan_axis enable_flash_attention
record_internal_nn_metrics base_output_directory mesh_axes logical_axis_rules data_sharding dcn_data_parallelism
dcn_fsdp_parallelism dcn_tensor_parallelism ici_data_parallelism ici_fsdp_parallelism ici_tensor_parallelism
dataset_path vocab_size assets_path vocab_relative_path dataset_name eval_dataset_name eval_split
per_device_batch_size eval_per_device_batch_size max_corpus_chars dataset_type steps log_period save_period
learning_rate cosine_learning_rate_final_fraction warmup_steps_fraction learning_rate_schedule_steps
max_target_length max_eval_target_length max_predict_length sampling_temperature sampling_top_k eos_id prompt
enable_profiler enable_checkpointing async_checkpointing enable_dropout enable_data_shuffling data_shuffle_seed
init_weights_seed gradient_clipping_threshold adam_b1 adam_b2 adam_eps adam_eps_root adam_weight_decay
collect_stack_trace stack_trace_to_cloud stack_trace_interval_seconds use_iota_embed compiled_trainstep_file
compile_topology compile_topology_num_slices
""".split()


@pytest.mark.parametrize("key", NOV_23_KEYS)
def test_every_key_of_the_reference_is_ours_or_renamed_or_refused_with_a_reason(key):
  if key in pyconfig.base() or key in pyconfig.OLD_KEYS or key in pyconfig.OLD_PARTS:
    return
  message = refusal(["configs/base.yml", "run_name=x", f"{key}=something"])
  assert message.startswith(f"{key}=something") and "unknown" not in message


@pytest.mark.parametrize("argument, ours", [
    ("base_num_heads=8", {"base_num_query_heads": 8, "base_num_kv_heads": 8}),
    ("save_period=20", {"checkpoint_period": 20}), ("logging_period=20", {"log_period": 20}),
    ("max_sequence_length=64", {"max_target_length": 64}), ("per_device_batch=4", {"per_device_batch_size": 4.0}),
    ("cosine_learning_rate_final_fraction=0.2", {"learning_rate_final_fraction": 0.2}),
    ("enable_flash_attention=False", {"attention": "dot"}), ("enable_profiler=true", {"profiler": "xplane"}),
    ("attention=mha", {"attention": "dot"}), ("remat_policy=proj", {"remat_policy": "save_qkv_proj"}),
    ("reuse_example_batch=1", {"reuse_example_batch": True}), ("compile_topology_num_slices=-1", {}),
    ("record_internal_nn_metrics=0", {}), ("int8_training=False", {}), ("fwd_int8=true", {}),
    ("load_from_other_directory=tests", {"load_full_state_path": "tests"}),
    ("sampling_temperature=0.5", {"decode_sampling_temperature": 0.5}),
    ("sampling_top_k=7", {"decode_sampling_top_k": 7}),
])
def test_an_old_name_is_taken_with_a_note(capsys, monkeypatch, argument, ours):
  monkeypatch.chdir(REPO)
  assert load(argument).given == load().given | ours
  notes = capsys.readouterr().err.splitlines()
  assert len(notes) == 1 and notes[0].startswith("note: ") and argument.lower() in notes[0].lower()


def test_two_old_keys_make_one_of_ours(tmp_path):
  (tmp_path / "tokenizer").write_text("")
  (tmp_path / "100").mkdir()
  assert load(f"assets_path={tmp_path}", "vocab_relative_path=tokenizer").tokenizer_path == str(tmp_path / "tokenizer")
  assert load(f"assets_path={tmp_path}").tokenizer_type == "sentencepiece"
  cfg = load("load_from_other_directory_step=100", f"load_from_other_directory={tmp_path}")
  assert cfg.load_full_state_path == str(tmp_path / "100")
  assert load(f"load_from_other_directory={tmp_path}", "load_from_other_directory_step=-1")
  assert "load_from_other_directory_step=100" in refusal(["run_name=x", "load_from_other_directory_step=100"])


def test_commands_of_the_reference_parse():
  load("base_output_directory=gs://b", "steps=10", "enable_checkpointing=False", "dataset_type=synthetic",
       "dataset_path=gs://d", "ici_tensor_parallelism=4", "reuse_example_batch=1", "use_iota_embed=true")
  compiled = pyconfig.load(
      ["MaxText/configs/base.yml", "compile_topology=v5e-256", "compile_topology_num_slices=2",
       "global_parameter_scale=16", "per_device_batch_size=4"], need_run_name=False)
  v5e = [Device("tpu", "TPU v5 lite", index) for index in range(2) for _ in range(256)]
  cfg = pyconfig.resolve(compiled, v5e)
  assert cfg.mesh_shape == (2, 256, 1, 1, 1, 1) and cfg.global_batch_size == 2048 and cfg.attention == "flash"


# --- Devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices, argv, dcn, ici", [
    (cpus(1), (), (1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)),
    (cpus(8), (), (1, 1, 1, 1, 1, 1), (1, 8, 1, 1, 1, 1)),
    (cpus(8), ("ici_tensor_parallelism=2",), (1, 1, 1, 1, 1, 1), (1, 4, 1, 2, 1, 1)),
    (cpus(8), ("dcn_data_parallelism=2",), (2, 1, 1, 1, 1, 1), (1, 4, 1, 1, 1, 1)),
    (cpus(8), ("dcn_fsdp_parallelism=2",), (1, 2, 1, 1, 1, 1), (1, 4, 1, 1, 1, 1)),
    (H100, ("dcn_data_parallelism=4",), (4, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1)),
    (tpus(8, 2), (), (2, 1, 1, 1, 1, 1), (1, 4, 1, 1, 1, 1)),
    (tpus(8, 4), ("dcn_fsdp_parallelism=2", "ici_sequence_parallelism=2"), (2, 2, 1, 1, 1, 1), (1, 1, 2, 1, 1, 1)),
])
def test_the_mesh_is_filled_within_and_across_slices(devices, argv, dcn, ici):
  cfg = resolved(devices, *argv)
  assert (cfg.dcn_mesh_shape, cfg.ici_mesh_shape) == (dcn, ici)
  assert cfg.mesh_shape == tuple(d * i for d, i in zip(dcn, ici, strict=True))
  assert cfg.num_devices == len(devices) and cfg.num_slices == dcn[0] * dcn[1]


@pytest.mark.parametrize("devices, argv, dtype, attention", [
    (cpus(1), (), "float32", "dot"), (tpus(1), (), "bfloat16", "flash"), (H100, (), "bfloat16", "cudnn"),
    (MI300, (), "bfloat16", "dot"), (cpus(1), ("attention=flash",), "float32", "flash"),
    (tpus(1), ("max_target_length=200",), "bfloat16", "dot"),
    (tpus(8), ("ici_sequence_parallelism=4",), "bfloat16", "dot"),
    (tpus(1), ("position_embedding=relative_bias",), "bfloat16", "dot"),
    (tpus(1), ("attn_logits_soft_cap=50",), "bfloat16", "flash"),
    (H100, ("attn_logits_soft_cap=50",), "bfloat16", "dot"), (H100, ("dtype=float32",), "float32", "dot"),
    (H100, ("position_embedding=relative_bias",), "bfloat16", "dot"),
    (H100, ("head_dim=256",), "bfloat16", "cudnn"), (A100, ("head_dim=256",), "bfloat16", "dot"),
    (H100, ("head_dim=36",), "bfloat16", "dot"),
])
def test_auto_takes_what_the_platform_and_the_model_allow(devices, argv, dtype, attention):
  cfg = resolved(devices, *argv)
  assert (cfg.dtype, cfg.attention) == (dtype, attention)


def test_a_fraction_of_a_row_per_device_is_fine_when_the_rows_are_whole():
  cfg = resolved(cpus(8), "per_device_batch_size=0.5", "ici_tensor_parallelism=2", "gradient_accumulation_steps=3")
  assert (cfg.micro_batch_size, cfg.global_batch_size, cfg.eval_batch_size) == (4, 12, 4)
  assert resolved(cpus(3), "per_device_batch_size=0.333333333", "ici_fsdp_parallelism=1", "ici_tensor_parallelism=3",
                  "base_num_query_heads=3", "base_num_kv_heads=3", "base_mlp_dim=705", "vocab_size=4098",
                  "base_emb_dim=255").micro_batch_size == 1


def test_logits_are_computed_in_pieces_that_divide_the_row_when_they_are_large():
  assert resolved(cpus(1)).num_vocab_tiling == 1
  cfg = resolved(cpus(1), "vocab_size=32768", "max_target_length=2048")
  assert 4 * 8 * 2048 * 32768 / cfg.num_vocab_tiling <= pyconfig.LOGITS_BYTES["cpu"]
  assert 2048 % cfg.num_vocab_tiling == 0
  assert resolved(cpus(1), "num_vocab_tiling=2").num_vocab_tiling == 2


# --- Refusals ------------------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [  # (arguments, what the message has to name)
    *[([f"{key}=1"], f"unknown key {key}=1") for key in
      ("bad_key", "per_device_batchsize", "LEARNING_RATE", "learning-rate", "--steps", "emb_dim", "MICROBATCH_SIAZE",
       "é")],
    *[([f"{key}={value}"], f"{key}={value}") for key, value in (
        ("steps", "abc"), ("steps", ""), ("steps", "1.5"), ("steps", "nan"), ("steps", "inf"), ("steps", "-2"),
        ("steps", "1e30"), ("steps", "0x10"), ("steps", "12:30"), ("steps", "[1]"), ("steps", "true"), ("steps", "-1"),
        ("learning_rate", "fast"), ("learning_rate", "-1e-3"), ("learning_rate", "nan"), ("learning_rate", ".inf"),
        ("learning_rate", "1e999"), ("learning_rate", "1,5"), ("learning_rate", "[0.1]"),
        ("enable_checkpointing", "yes"), ("enable_checkpointing", "2"), ("enable_checkpointing", ""),
        ("base_num_decoder_layers", "1e30"), ("base_num_decoder_layers", "0"), ("base_num_decoder_layers", "9" * 70),
        ("base_emb_dim", "0"), ("base_emb_dim", "-8"), ("base_mlp_dim", "0"), ("head_dim", "0"), ("vocab_size", "0"),
        ("base_num_kv_heads", "3"), ("base_num_query_heads", "6"), ("head_dim", "7"), ("max_target_length", "0"),
        ("per_device_batch_size", "0"), ("per_device_batch_size", "-1"), ("dropout_rate", "1"),
        ("dropout_rate", "-0.1"),
        ("adam_b1", "1"), ("adam_b2", "1.5"), ("adam_eps", "0"), ("warmup_steps_fraction", "1.1"),
        ("warmup_steps", "400"), ("learning_rate_final_fraction", "2"), ("eval_fraction", "1"), ("eval_fraction", "0"),
        ("eval_interval", "0"), ("eval_steps", "0"), ("log_period", "0"), ("checkpoint_period", "0"),
        ("max_num_checkpoints_to_keep", "0"), ("init_weights_seed", "-1"), ("data_shuffle_seed", "5e9"),
        ("gradient_accumulation_steps", "0"), ("ici_fsdp_parallelism", "0"), ("ici_tensor_parallelism", "-2"),
        ("dcn_data_parallelism", "0"), ("ici_data_parallelism", "-1"), ("global_parameter_scale", "3"),
        ("dtype", "bf16"), ("attention", "flsh"), ("remat_policy", "all"),
        ("mlp_activations", "[]"), ("mlp_activations", "[silu,linear,relu]"), ("mlp_activations", "[silu"),
        ("mlp_activations", "[[silu]]"), ("mlp_activations", "swish"), ("position_embedding", "alibi"),
        ("dataset_type", "c5"), ("dataset_type", "text"), ("dataset_path", "/nowhere"), ("tokenizer_path", "/nowhere"),
        ("tokenizer_type", "sentencepiece"), ("load_parameters_path", "/nowhere"),
        ("load_full_state_path", "/no/where"),
        ("profiler", "nsys"), ("compile_topology", "v5e 256"), ("target_eval_loss", "-1"),
        ("logical_axis_rules", "[[embd,[fsdp]]]"), ("logical_axis_rules", "[[embed,[fdsp]]]"),
        ("logical_axis_rules", "[embed]"), ("logical_axis_rules", "[[embed,[fsdp,fsdp]]]"),
        ("logical_axis_rules", "[" * 30), ("base_output_directory", ""), ("base_output_directory", "s3://b"),
        ("metrics_file", "gs://b/m"), ("stack_trace_interval_seconds", "0"), ("gcs_metrics", "true"),
        ("trainable_position_size", "64,"), ("int8_training", "true"), ("model_name", "llama2-7b"),
        ("mesh_axes", "[data]"), ("decoder_block", "gpt3"), ("normalize_embedding_logits", "1"),
    )],
    *[([f"run_name={name}"], "run_name=") for name in
      ("../../x; rm -rf", "a/b", "-x", ".x", "a b", "x" * 200, "é", "a\nb", "$(x)", "a\x00b")],
    (["base_emb_dim=64", "global_parameter_scale=2"], "base_emb_dim=64 and global_parameter_scale=2"),
    (["load_parameters_path=tests", "load_full_state_path=tests"], "exclude each other"),
    (["tokenizer_type=byte", "tokenizer_path=tests"], "tokenizer_type=byte does not read tokenizer_path=tests"),
    (["dataset_type=stdlib", "dataset_path=tests"], "dataset_path=tests is not read with dataset_type=stdlib"),
    (["dataset_type=text", "dataset_path=tests,/nowhere/*.txt"], "dataset_path=/nowhere/*.txt"),
    (["position_embedding=learned", "trainable_position_size=64"], "trainable_position_size=64"),
    (["position_embedding=relative_bias", "attention=flash"], "attention=flash"),
    (["position_embedding=relative_bias", "attention=cudnn"], "attention=cudnn"),
    (["attn_logits_soft_cap=30", "attention=cudnn"], "attn_logits_soft_cap=30.0"),
    (["dtype=float32", "attention=cudnn"], "dtype=float32"),
    (["logits_via_embedding=false", "normalize_embedding_logits=true"], "normalize_embedding_logits=true"),
    (["remat_policy=names", "remat_names=[]"], "remat_names=[]"),
    (["remat_names=[query,qwery]"], "remat_names=qwery"),
    (["stack_trace_to_cloud=true"], "stack_trace_to_cloud=true"),
    (["target_eval_loss=2", "eval_interval=-1"], "target_eval_loss=2.0"),
    (["base_output_directory=tests/pyconfig_test.py"], "base_output_directory=tests/pyconfig_test.py"),
]
BAD_FILES = [  # (file, what the message has to name)
    ("steps: 1\nsteps: 2\n", "duplicate key steps=2"), ("stpes: 1\n", "unknown key stpes=1"),
    ("steps: !!python/object/apply:os.system [echo]\n", "YAML tag"), ("steps: !!int 3\n", "YAML tag"),
    ("!!map\nsteps: 3\n", "`key: value`"), ("a: &a [x, x]\nb: [*a, *a]\n", "anchor"), ("steps: *x\n", "alias"),
    ("run_name: &n x\n", "anchor"), ("mlp_activations: " + "[" * 5000 + "]" * 5000 + "\n", "nested deeper"),
    ("- steps\n", "`key: value`"), ("just words\n", "`key: value`"), ("steps: {a: 1}\n", "mapping inside"),
    ("? [a, b]\n: 3\n", "a key must be"), ("steps: 3\n---\nsteps: 4\n", "second YAML document"),
    ("steps: 3\n\tlog_period: 4\n", "is not YAML"), ("steps: 'open\n", "is not YAML"), ("steps: \x01\n", "is not YAML"),
    ("steps:\n", "steps="), ("steps: ~\n", "steps=~"), ("steps: .nan\n", "steps=.nan"),
    ("steps: [1, 2]\n", "steps=[1, 2]"),
    ("run_name: |\n  two\n  lines\n", "run_name=two lines"), ("<<: {steps: 3}\n", "mapping"),
    ("base_config: nothing.yml\n", "base_config="), ("base_config: [a]\n", "base_config=[a]"),
    ("base_config: mine.yml\nstpes: 1\n", "unknown key stpes=1"), ("# " + "x" * 200_000 + "\n", "more than"),
    ("steps: 3 4\n", "steps=3 4"), ("mlp_activations: silu: linear\n", "is not YAML"), ("\ufeffstpes: 1\n", "stpes=1"),
]
BAD_MESHES = [  # (arguments, devices, what the message has to name)
    (["ici_fsdp_parallelism=3", "ici_tensor_parallelism=4"], cpus(8),
     "ici_fsdp_parallelism=3 x ici_tensor_parallelism=4 needs 12 devices per slice, found 8. "
     "Set one ici_* to -1 to fill it."),
    (["ici_tensor_parallelism=3"], cpus(8), "ici_tensor_parallelism=3 must divide the 8 devices per slice found"),
    (["ici_fsdp_parallelism=1"], cpus(8), "ici_*_parallelism=1 needs 1 devices per slice, found 8"),
    (["dcn_data_parallelism=3"], cpus(8), "dcn_data_parallelism=3 must divide the 8 devices"),
    (["dcn_data_parallelism=2"], tpus(8), "dcn_data_parallelism=2 needs 2 slices, found 1"),
    (["dcn_data_parallelism=1"], tpus(8, 2), "needs 1 slices, found 2"),
    (["ici_fsdp_parallelism=1000000"], cpus(8), "ici_fsdp_parallelism=1000000"),
    (["per_device_batch_size=0.3"], cpus(8),
     "per_device_batch_size=0.3 x 8 devices makes 2.4 rows, not a whole number. Set "
     "per_device_batch_size=1."),
    (["per_device_batch_size=0.5"], cpus(8), "not a multiple of 8: \"batch\" is sharded over fsdp=8"),
    (["eval_per_device_batch_size=0.5"], cpus(8), "eval_per_device_batch_size=0.5"),
    (["base_emb_dim=260"], cpus(8), "base_emb_dim=260 must be a multiple of 8"),
    (["base_num_kv_heads=2", "ici_tensor_parallelism=4"], cpus(8), "base_num_kv_heads=2 must be a multiple of 4"),
    (["ici_tensor_parallelism=8"], cpus(8), "base_num_query_heads=4 must be a multiple of 8"),
    (["base_mlp_dim=703", "ici_tensor_parallelism=2"], cpus(8), "base_mlp_dim=703"),
    (["vocab_size=4097", "ici_tensor_parallelism=2"], cpus(8), "vocab_size=4097"),
    (["max_target_length=250", "ici_sequence_parallelism=4"], cpus(8), "max_target_length=250"),
    (["base_num_decoder_layers=3", "ici_stage_parallelism=2"], cpus(8), "base_num_decoder_layers=3"),
    (["num_vocab_tiling=7"], cpus(8), "num_vocab_tiling=7"),
    (["attention=cudnn"], cpus(8), "attention=cudnn: it needs an NVIDIA GPU"),
    (["attention=cudnn"], MI300, "attention=cudnn: it needs an NVIDIA GPU"),
    (["attention=cudnn", "head_dim=256"], A100, "head_dim=256"),
    (["attention=flash"], H100, "attention=flash: it needs TPUs"),
    (["attention=flash", "max_target_length=200"], tpus(8), "max_target_length=200"),
]


def test_there_are_a_hundred_bad_configs_and_more():
  assert len(BAD_ARGUMENTS) + len(BAD_FILES) + len(BAD_MESHES) >= 150


@pytest.mark.parametrize("argv, names", BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_a_bad_argument_is_one_line_that_names_it(monkeypatch, argv, names):
  monkeypatch.chdir(REPO)
  message = refusal(["configs/base.yml", "run_name=x", *argv])
  if names.replace(" ", "") not in message.replace(" ", ""):  # numbers are shown as understood: -1e-3 is -0.001
    key, _, value = names.partition("=")
    shown = re.search(rf"\b{key}=([^ ]+)", message)
    assert shown and float(shown[1]) == float(value), message


@pytest.mark.parametrize("text, names", BAD_FILES, ids=lambda value: str(value)[:40])
def test_a_bad_file_is_one_line_that_names_it(tmp_path, text, names):
  message = refusal(["configs/base.yml", "run_name=x", file(tmp_path, text)])
  assert names in message and "mine.yml" in message


def test_bytes_that_are_no_text_and_files_that_cannot_be_read_are_one_line(tmp_path):
  (tmp_path / "binary.yml").write_bytes(b"steps: \xff\xfe\n")
  assert "not UTF-8" in refusal(["run_name=x", str(tmp_path / "binary.yml")])
  secret = tmp_path / "secret.yml"
  secret.write_text("steps: 1\n")
  secret.chmod(0)
  if not os.access(secret, os.R_OK):  # root reads everything
    assert "secret.yml cannot be read" in refusal(["run_name=x", str(secret)])


@pytest.mark.parametrize("argv, devices, names", BAD_MESHES, ids=lambda value: str(value)[:40])
def test_a_mesh_that_does_not_fit_is_one_line_that_names_it(argv, devices, names):
  assert names in refusal(["configs/base.yml", "run_name=x", *argv], devices)


def test_an_unknown_key_hints_at_the_nearest_one():
  assert refusal(["configs/base.yml", "run_name=x", "per_device_batchsize=8"]) == (
      "unknown key per_device_batchsize=8. Did you mean per_device_batch_size? All keys: configs/base.yml")
  assert "Write steps=5" in refusal(["configs/base.yml", "run_name=x", "--steps=5"])


def test_what_an_existing_run_has_read_need_not_be_there_any_more(tmp_path):
  gone = ["dataset_type=text", f"dataset_path={tmp_path / 'gone.txt'}", f"base_output_directory={tmp_path}"]
  assert "gone.txt does not exist" in refusal(["run_name=x", *gone])
  (tmp_path / "x").mkdir()
  assert load(*gone).dataset_type == "text"


@pytest.mark.parametrize("argv, names", [
    (["bad_key=1"], "bad_key=1"), (["steps=nan"], "steps=nan"),
    (["run_name=../../x; touch pwned"], "run_name=../../x;"),
    (["base_num_kv_heads=3"], "base_num_kv_heads=3"), (["nothing.yml"], "nothing.yml"), (["run_name="], "run_name="),
])
def test_the_trainer_answers_a_wrong_command_in_half_a_second_without_jax(tmp_path, argv, names):
  def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

  seconds = []
  for _ in range(3):
    before = cpu_seconds()
    run = subprocess.run(
        [sys.executable, "-X", "importtime", os.path.join(REPO, "MaxText", "train.py"), "configs/base.yml",
         "run_name=x", *argv], cwd=tmp_path, capture_output=True, text=True)
    seconds.append(cpu_seconds() - before)
    lines = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert run.returncode == 2 and len(lines) == 1 and names in lines[0] and run.stdout == ""
    assert "| jax" not in run.stderr
  assert min(seconds) < 0.5  # processor time: the machine may be busy
  assert not os.listdir(tmp_path)
