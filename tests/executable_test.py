# SPDX-License-Identifier: Apache-2.0
"""Compiled steps in files: the same run without compiling, and one line for every file that is not for this run."""

import ast
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiny import TINY, tiny

from MaxText import errors, executable, pyconfig, sharding, train

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = jax.devices()
KEYS = TINY | {"steps": 4, "enable_checkpointing": False}


@pytest.fixture(scope="module", autouse=True)
def started():
  """jax as sharding.start() sets it; trainers in this process take the signals, which are given back."""
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  before = jax.config.jax_default_matmul_precision
  jax.config.update("jax_default_matmul_precision", tiny().matmul_precision)
  yield
  jax.config.update("jax_default_matmul_precision", before)
  for number, handler in handlers.items():
    signal.signal(number, handler)


def placed(count, **keys):
  """(config, mesh) of the tiny model on `count` devices."""
  cfg = tiny(count, **KEYS | {"per_device_batch_size": 8.0 / count} | keys)
  return cfg, sharding.make_mesh(cfg, DEVICES[:count])


def compiled_to(path, count, **keys):
  """The file at `path`, with the train step compiled for `count` devices: what train_compile.py does."""
  cfg, mesh = placed(count, **keys)
  with sharding.use(mesh, cfg.logical_axis_rules):
    recorded = pyconfig.Recorded(cfg)
    compiled = executable.compile(train.lower_train_step(recorded, mesh))
    _, arguments = train.step_arguments(cfg, mesh)
    executable.save(str(path), compiled, executable.header(recorded, mesh, arguments))
  return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """{number of devices: file with the tiny model's step}."""
  folder = tmp_path_factory.mktemp("compiled")
  return {count: compiled_to(folder / f"step{count}", count) for count in (1, 8)}


@pytest.fixture
def copied(files, tmp_path):
  """A copy of the step for one device, to be spoiled."""
  return pathlib.Path(shutil.copy2(files[1], tmp_path / "copied"))


def read(path, count, **keys):
  cfg, mesh = placed(count, **keys)
  with sharding.use(mesh, cfg.logical_axis_rules):
    _, arguments = train.step_arguments(cfg, mesh)
    return executable.read(str(path), cfg, mesh, arguments)


def load(path, count, **keys):
  """The step in the file at `path`, loaded for a run with these keys."""
  cfg, mesh = placed(count, **keys)
  with sharding.use(mesh, cfg.logical_axis_rules):
    _, arguments = train.step_arguments(cfg, mesh)
    return executable.load(str(path), *executable.read(str(path), cfg, mesh, arguments), mesh, arguments)


def refused(path, count, act=read, **keys):
  """The one line with which a run with these keys does not take the file."""
  with pytest.raises(errors.ConfigError) as error:
    act(path, count, **keys)
  assert "\n" not in str(error.value) and str(error.value).startswith(f"compiled_trainstep_file={pyconfig.show(path)} ")
  assert "python3 train_compile.py" in str(error.value)
  return str(error.value)


def rewrite(path, change):
  """Changes the header in the file at `path`, the checksum with it."""
  _, header, payload = path.read_bytes().split(b"\n", 2)
  header = json.loads(header)
  change(header)
  seal(path, json.dumps(header).encode() + b"\n" + payload)


def seal(path, content):
  path.write_bytes(executable.MAGIC + executable.checksum(content) + b"\n" + content)


def arguments(directory, count, **keys):
  keys = KEYS | {"per_device_batch_size": 8.0 / count} | keys
  keys |= {"base_output_directory": str(directory.parent), "run_name": directory.name}
  return ["configs/base.yml", *(f"{key}={pyconfig.text(value)}" for key, value in keys.items())]


def start(directory, count, **keys):
  """train.py in a process of its own that has `count` devices."""
  flags = os.environ["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={count}"  # of two the last counts
  return subprocess.Popen([sys.executable, "MaxText/train.py", *arguments(directory, count, **keys)], cwd=ROOT,
                          env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)


def train_here(directory, count, **keys):
  """Trains in this process; the metrics that do not tell of time."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: DEVICES[:count])
    train.main(pyconfig.load(arguments(directory, count, **keys)))
  return learned(directory)


def learned(directory):
  rows = [json.loads(line) for line in (directory / "metrics" / "metrics.jsonl").read_text().splitlines()]
  return [{key: value for key, value in row.items() if key.startswith("learning/")} for row in rows]


# --- Loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
def test_another_process_trains_on_the_loaded_step_as_one_that_compiles_bit_for_bit(files, tmp_path, count):
  processes = [start(tmp_path / "loaded", count, compiled_trainstep_file=str(files[count])),
               start(tmp_path / "compiled", count)]
  for process, loads in zip(processes, (True, False), strict=True):
    said, complaint = process.communicate()
    assert process.returncode == 0, complaint
    assert (f"loaded the compiled train step from {files[count]} in " in said) == loads
  assert learned(tmp_path / "loaded") == learned(tmp_path / "compiled") and len(learned(tmp_path / "loaded")) == 4


def test_schedule_optimizer_constants_and_names_change_after_compiling_and_take_effect(files, tmp_path):
  keys = {"learning_rate": 3e-3, "steps": 5, "lr_schedule_type": "constant", "warmup_steps": 2, "adam_b1": 0.8,
          "adam_b2": 0.9, "adam_eps": 1e-5, "adam_eps_root": 1e-9, "adam_weight_decay": 0.3, "init_weights_seed": 7,
          "gradient_clipping_threshold": 0.5, "skip_step_gradient_norm": 100.0, "data_shuffle_seed": 3,
          "metrics_file": str(tmp_path / "copy.jsonl"), "log_period": 7, "checkpoint_period": 9}  # fmt: skip
  same = train_here(tmp_path / "loaded", 1, compiled_trainstep_file=str(files[1]))
  found = train_here(tmp_path / "changed", 1, compiled_trainstep_file=str(files[1]), **keys)
  assert found == train_here(tmp_path / "compiled", 1, **keys)
  assert len(found) == 5 and found[-1] != same[-1]


def test_the_loaded_step_takes_its_state_over(files):
  cfg, mesh = placed(1)
  step = load(files[1], 1)
  with sharding.use(mesh, cfg.logical_axis_rules):
    _, (state, batch, _) = train.step_arguments(cfg, mesh)
    state = train.fresh_state(cfg, state)
    batch = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), batch)
    new, metrics = step(state, batch, train.optim.hyper(cfg, 0))
  assert all(x.is_deleted() for x in jax.tree.leaves(state["params"]))
  assert jax.tree.structure(new) == jax.tree.structure(state) and metrics["layer_stats"] == {}


def test_a_step_with_statistics_of_its_layers_keeps_the_names_of_its_metrics(tmp_path):
  path = compiled_to(tmp_path / "step", 1, record_internal_nn_metrics=True)
  step = load(path, 1, record_internal_nn_metrics=True)
  _, metrics = jax.tree.unflatten(step.out_tree, [0] * step.out_tree.num_leaves)
  assert {"loss", "grad_norm", "skipped"} <= set(metrics) and len(metrics["layer_stats"]) == 3


def test_a_step_is_compiled_anew_where_jax_has_it_in_its_cache(tmp_path):
  """XLA's CPU executables do not survive being loaded and saved again."""
  names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
  before, hits = {name: getattr(jax.config, name) for name in names}, []

  def lowered():
    return jax.jit(lambda x: x * 2.0).lower(1.0)

  jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
  try:
    for name, value in zip(names, (str(tmp_path / "cache"), 0.0), strict=True):
      jax.config.update(name, value)
    executable.compilation_cache.reset_cache()
    lowered().compile()
    lowered().compile()
    assert len(hits) == 1
    executable.compile(lowered())
    assert len(hits) == 1
    lowered().compile()
    assert len(hits) == 2  # and the cache is as it was
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    executable.compilation_cache.reset_cache()


# --- The keys that count ---------------------------------------------------------------------------------------------


def reads(cfg, mesh):
  recorded = pyconfig.Recorded(cfg)
  with sharding.use(mesh, cfg.logical_axis_rules):
    train.lower_train_step(recorded, mesh)
  return recorded.reads


def test_what_jax_has_traced_for_an_equal_config_hides_no_key():
  script = """
import jax, json, sys
from tiny import tiny
from MaxText import pyconfig, sharding, train
cfg = tiny(1, **json.loads(sys.argv[1]))
mesh = sharding.make_mesh(cfg, jax.devices()[:1])
recorded = pyconfig.Recorded(cfg)
with sharding.use(mesh, cfg.logical_axis_rules):
  train.lower_train_step(recorded, mesh)
print(json.dumps(recorded.reads))
"""
  keys = KEYS | {"dropout_rate": 0.1, "remat_policy": "full", "num_vocab_tiling": 2}
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  alone = subprocess.run([sys.executable, "-c", script, json.dumps(keys)], cwd=ROOT, text=True, check=True,
                         capture_output=True, env=os.environ | {"PYTHONPATH": path}).stdout
  cfg, mesh = placed(1, **keys)
  with sharding.use(mesh, cfg.logical_axis_rules):
    train.lower_train_step(cfg, mesh)
  assert json.loads(json.dumps(reads(cfg, mesh))) == json.loads(alone)


def test_keys_of_the_run_around_the_step_are_not_read_and_the_seed_only_for_dropout():
  found = reads(*placed(1, gradient_accumulation_steps=2, update_rms_cap=1.0))
  assert {"emb_dim", "dtype", "remat_policy", "global_batch_size", "gradient_accumulation_steps", "attention",
          "has_update_rms_cap"} <= set(found)
  around = {"run_name", "steps", "init_weights_seed", "update_rms_cap", "run_directory", "jax_cache_dir",
            "compile_topology", "compiled_trainstep_file", "given", "facts"}  # fmt: skip
  around |= {key for key in found if key.startswith(("adam_", "learning_rate", "lr_", "warmup", "eval_", "dataset_"))}
  assert not around & set(found)
  assert "init_weights_seed" in reads(*placed(1, dropout_rate=0.1))


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "then", "here"), [
    ({"base_emb_dim": 64}, "base_emb_dim=32,", "base_emb_dim=64."),
    ({"norm_epsilon": 1e-5}, "norm_epsilon=1e-06,", "norm_epsilon=1e-05."),
    ({"per_device_batch_size": 4.0}, "global_batch_size=8,", "global_batch_size=4."),
    ({"gradient_accumulation_steps": 2}, "global_batch_size=8,", "global_batch_size=16."),
    ({"remat_policy": "full"}, "remat_policy=none,", "remat_policy=full."),
    ({"matmul_precision": "highest"}, "matmul_precision=default,", "matmul_precision=highest."),
    ({"update_rms_cap": 1.0}, "has_update_rms_cap=false,", "has_update_rms_cap=true."),
    ({"logical_axis_rules": [["mlp", []]]}, "logical_axis_rules=[[mlp, [tensor]]],", "=[[mlp, []]]."),
])  # fmt: skip
def test_another_model_or_batch_is_refused_with_both_values(files, keys, then, here):
  before, _, after = refused(files[1], 1, **keys).partition(" and this run has ")
  assert before.endswith(then) and here in after


def test_fewer_and_more_devices_are_refused_before_xla_would_abort(files, tmp_path):
  assert "with devices=8, and this run has devices=4." in refused(files[8], 4)
  process = start(tmp_path / "more", 16, compiled_trainstep_file=str(files[8]), per_device_batch_size=1.0)
  _, complaint = process.communicate()
  assert process.returncode == 2, complaint
  assert "with devices=8, and this run has devices=16." in complaint and complaint.count("\n") == 1
  assert not (tmp_path / "more").exists()


def test_another_mesh_of_as_many_devices_is_refused(files):
  message = refused(files[8], 8, ici_tensor_parallelism=2)
  assert "fsdp 8" in message and "fsdp 4 x sequence 1 x tensor 2" in message


@pytest.mark.parametrize(("name", "then"), [
    ("jax", "0.9.0"), ("jaxlib", "0.9.0"), ("platform", "tpu"), ("device_kind", "TPU v4"), ("processes", 2),
    ("platform_version", "Built on Jan 1 2026"), ("jax_enable_x64", True), ("cpu_features", ["arm64", "sve"]),
])  # fmt: skip
def test_other_versions_and_devices_are_refused_with_both_values(copied, name, then):
  rewrite(copied, lambda header: header["surroundings"].update({name: then}))
  before, _, after = refused(copied, 1).partition(f", and this run has {name}=")
  assert f"was compiled with {name}={pyconfig.text(then)}" in before and after


def test_other_flags_are_refused_and_flags_that_change_no_program_are_not(files, monkeypatch):
  given = os.environ["XLA_FLAGS"]
  monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/nowhere {' '.join(reversed(given.split()))}")
  read(files[1], 1)
  monkeypatch.setenv("XLA_FLAGS", f"{given} --xla_cpu_enable_fast_math=true")
  message = refused(files[1], 1)
  assert "XLA_FLAGS=[" in message and "--xla_cpu_enable_fast_math=true" in message


def test_other_shapes_of_the_state_are_refused(copied):
  rewrite(copied, lambda header: header["arguments"].update({"state/step": "int64[] P()"}))
  assert "with state/step=int64[] P(), and this run has state/step=int32[] P" in refused(copied, 1)


@pytest.mark.parametrize(("room", "line", "counts"), [
    ("model", "x = 1", True), ("train", "x = 1", True), ("attention", "import os as _", True),
    ("model", "# a comment\n\n'''And a text.'''", False), ("checkpoint", "x = 1", False),
])  # fmt: skip
def test_a_step_of_other_source_is_refused_and_comments_do_not_count(
    files, tmp_path, monkeypatch, room, line, counts):
  copy = shutil.copytree(ROOT / "MaxText", tmp_path / "MaxText", symlinks=True)
  with open(copy / f"{room}.py", "a", encoding="utf-8") as file:
    file.write(f"\n{line}\n")
  monkeypatch.setattr(executable, "__file__", str(copy / "executable.py"))
  if counts:
    assert f"was compiled from another version of MaxText/{room}.py." in refused(files[1], 1)
  else:
    read(files[1], 1)


def test_every_room_that_the_model_imports_is_in_the_fingerprint():
  found = executable.fingerprints()
  assert {"MaxText/train.py", "MaxText/model.py", "MaxText/attention.py", "MaxText/optim.py",
          "MaxText/sharding.py"} <= set(found)
  assert not {f"MaxText/{room}.py" for room in executable.AROUND} & set(found)


def test_a_docstring_is_no_code_and_a_string_that_is_used_is():
  def essence(source):
    return executable.essence(ast.parse(source))

  assert essence('def f():\n  "A text."\n  return "a"') == essence('def f():\n  return "a"  # so')
  assert essence('def f():\n  return "a"') != essence('def f():\n  return "b"')
  assert essence("x = 1") != essence("x = True") and essence("x = 0") != essence("x = None")


# --- The file is code ------------------------------------------------------------------------------------------------


def test_a_file_cut_short_or_changed_is_refused(copied):
  content = copied.read_bytes()
  copied.write_bytes(content[:-1])
  assert "is damaged" in refused(copied, 1)
  for position in (len(content) // 2, content.index(b"\n") + 20, content.index(b"\n") - 5):
    copied.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1:])
    assert "is damaged" in refused(copied, 1)


def test_what_is_no_compiled_step_is_refused(copied, tmp_path):
  copied.write_bytes(b"")
  assert "is no compiled step" in refused(copied, 1)
  shutil.copy(ROOT / "README.md", copied)
  assert "is no compiled step" in refused(copied, 1)
  copied.write_bytes(executable.MAGIC.replace(b"1", b"9") + b"0\n{}\n")
  assert "is of another format" in refused(copied, 1)
  assert "does not exist" in refused(tmp_path / "nowhere", 1)
  assert "Is a directory" in refused(tmp_path, 1)
  os.mkfifo(tmp_path / "pipe")
  assert "is no file" in refused(tmp_path / "pipe", 1)


def test_a_file_that_others_may_have_written_is_refused(copied, monkeypatch):
  assert copied.stat().st_mode & 0o777 == 0o600
  for mode in (0o620, 0o602):
    copied.chmod(mode)
    assert f"has mode {mode:o}" in refused(copied, 1)
  copied.chmod(0o644)
  read(copied, 1)
  if os.geteuid() == 0:  # what belongs to root is taken from everybody, so it must not
    os.chown(copied, 12345, -1)
  monkeypatch.setattr(os, "geteuid", lambda: 54321)
  assert "neither to you (54321) nor to root" in refused(copied, 1)


def test_a_pickle_that_calls_anything_else_is_refused_before_the_call(copied, tmp_path):
  class Malicious:
    def __reduce__(self):
      return os.system, (f"touch {tmp_path}/executed",)

  _, header, _ = copied.read_bytes().split(b"\n", 2)
  payload = pickle.dumps((Malicious(), [], True))
  seal(copied, header + b"\n" + payload)
  message = refused(copied, 1, act=load)
  assert "it asks for posix.system, which no compiled step needs" in message
  assert not (tmp_path / "executed").exists()
  pickle.loads(payload)  # it would have
  assert (tmp_path / "executed").exists()


def test_a_payload_that_is_no_pickle_is_one_line(copied):
  seal(copied, copied.read_bytes().split(b"\n", 2)[1] + b"\nnothing")
  assert "cannot be loaded: " in refused(copied, 1, act=load)


def test_saving_where_nothing_can_be_written_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  compiled = jax.jit(lambda x: (x, {})).lower(1.0).compile()
  with pytest.raises(errors.ConfigError, match="cannot be written: "):
    executable.save(str(tmp_path / "file" / "step"), compiled, {})
