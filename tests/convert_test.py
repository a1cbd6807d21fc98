# SPDX-License-Identifier: Apache-2.0
"""Weights of others give the logits of others, and come back byte for byte.

golden/convert holds tiny models as transformers and torch save them, and their logits; golden/make_convert.py made it.
"""

import json
import pathlib
import pickle
import shutil
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx
from safetensors.numpy import load_file, save_file

from MaxText import checkpoint, convert, decode, errors, model, optim, pyconfig, sharding, train

GOLDEN = pathlib.Path(__file__).with_name("golden") / "convert"
LOGITS = np.load(GOLDEN / "logits.npz")
HUGGING_FACE = ("llama", "llama3", "llama_linear", "mistral", "qwen2", "qwen3", "gemma", "gpt2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """name -> run directory of that golden model, imported once."""
  directory, made = tmp_path_factory.mktemp("runs"), {}

  def imported(name):
    if name not in made:
      convert.main([str(GOLDEN / name), str(directory / name), "jax_cache_dir=", "matmul_precision=highest",
                    *(["weight_dtype=bfloat16"] if name == "mistral" else [])])
      made[name] = directory / name
    return made[name]

  return imported


def reopened(run, *arguments):
  """(config resolved on one device, graph, parameters) of an imported run."""
  cfg = pyconfig.load([f"load_parameters_path={run}", *arguments], need_run_name=False, reopen=True)
  cfg = pyconfig.resolve(cfg, jax.devices()[:1])
  mesh = sharding.make_mesh(cfg, jax.devices()[:1])
  with sharding.use(mesh, cfg.logical_axis_rules):
    graph, abstract = model.abstract_parameters(cfg, mesh)
    return cfg, mesh, graph, checkpoint.load_parameters(str(run), abstract)


@pytest.mark.parametrize("name", [*HUGGING_FACE, "meta"])
def test_an_imported_model_has_the_logits_of_the_one_it_comes_from(name, runs):
  cfg, mesh, graph, params = reopened(runs(name))
  inputs = LOGITS["inputs"]

  @jax.jit
  def forward(params, inputs):
    transformer = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    hidden_bte, _ = transformer(inputs, positions, jnp.ones_like(inputs))
    return transformer.logits(hidden_bte)

  with sharding.use(mesh, cfg.logical_axis_rules):
    logits = forward(jax.tree.map(lambda x: x.astype(jnp.float32), params), inputs)
  np.testing.assert_allclose(logits, LOGITS[name], atol=5e-5, rtol=1e-5)


def tensors_of(folder):
  return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_model_comes_back_byte_for_byte_and_with_its_config(name, runs, tmp_path):
  convert.main([str(runs(name)), str(tmp_path / "out")])
  before, after = tensors_of(GOLDEN / name), tensors_of(tmp_path / "out")
  assert before.keys() == after.keys()
  for tensor, x in before.items():
    assert x.dtype == after[tensor].dtype and x.shape == after[tensor].shape and x.tobytes() == after[tensor].tobytes()
  theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, tmp_path / "out"))
  keys = convert.from_config(theirs, "")
  assert convert.from_config(ours, "") | keys == convert.from_config(ours, "")
  assert ours["model_type"] == ("llama" if name == "mistral" else theirs["model_type"])  # the same maths and names


def test_metas_llama_leaves_as_hugging_faces(runs, tmp_path):
  convert.main([str(runs("meta")), str(tmp_path / "out")])
  convert.main([str(tmp_path / "out"), str(tmp_path / "again")])
  ours, again = (reopened(run)[3] for run in (runs("meta"), tmp_path / "again"))
  jax.tree.map(np.testing.assert_array_equal, ours, again)


def test_interleaved_rope_leaves_in_halves(runs, tmp_path):
  """A run with rope_interleaved whose query and key features are in that order is the same model."""
  run = tmp_path / "run"
  shutil.copytree(runs("llama"), run)
  config = (run / "config.yml").read_text().replace('embedding: "rope"', 'embedding: "rope_interleaved"')
  (run / "config.yml").write_text(config)
  convert.main([str(run), str(tmp_path / "out")])
  was, now = tensors_of(GOLDEN / "llama"), tensors_of(tmp_path / "out")
  for tensor in was:
    moved = any(part in tensor for part in ("q_proj", "k_proj"))
    assert (was[tensor].tobytes() != now[tensor].tobytes()) == moved
  x = was["model.layers.0.self_attn.q_proj.weight"].reshape(4, 4, 2, 16)  # heads, pairs, neighbours
  np.testing.assert_array_equal(
      now["model.layers.0.self_attn.q_proj.weight"], x.transpose(0, 2, 1, 3).reshape(32, 16))


def test_large_models_are_cut_into_files_with_an_index(runs, tmp_path, monkeypatch):
  monkeypatch.setattr(convert, "SHARD_BYTES", 8000)
  convert.main([str(runs("qwen2")), str(tmp_path / "out")])
  files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
  assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
  index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
  assert set(index["weight_map"].values()) == set(files) and index["metadata"]["total_size"] == sum(
      x.nbytes for x in tensors_of(GOLDEN / "qwen2").values())
  convert.main([str(tmp_path / "out"), str(tmp_path / "again")])


def test_three_fine_tuning_steps_from_imported_weights_lower_the_loss(runs):
  cfg, mesh, graph, params = reopened(
      runs("llama"), "learning_rate=1e-3", "lr_schedule_type=constant", "warmup_steps=0", "per_device_batch_size=2",
      "attention=dot")
  inputs = jnp.asarray(LOGITS["inputs"])
  batch = {"inputs": inputs, "targets": jnp.roll(inputs, -1, axis=1), "segmentations": jnp.ones_like(inputs),
           "positions": jnp.broadcast_to(jnp.arange(24), (2, 24)),
           "loss_weights": jnp.ones(inputs.shape).at[:, -1].set(0.0)}
  with sharding.use(mesh, cfg.logical_axis_rules):
    state = train.fresh_state(cfg, train.abstract_state(cfg, mesh)[1], params)
    step = jax.jit(lambda state, batch, hyper: train.train_step(cfg, graph, state, batch, hyper))
    found = []
    for done in range(4):
      state, metrics = step(state, batch, optim.hyper(cfg, done))
      found.append(float(metrics["loss"]))
  assert np.isfinite(found).all() and found == sorted(found, reverse=True) and found[0] - found[-1] > 0.05


def test_a_run_is_decoded_by_its_name_with_the_tokenizer_that_came_with_it(tmp_path, capsys):
  import tokenizers

  source = tmp_path / "source"
  shutil.copytree(GOLDEN / "llama", source)
  vocabulary = {chr(97 + i): i + 3 for i in range(26)} | {"<s>": 1, "</s>": 2}
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  made.decoder = tokenizers.decoders.Fuse()
  made.add_special_tokens(["<s>", "</s>"])
  made.save(str(source / "tokenizer.json"))
  convert.main([str(source), str(tmp_path / "runs" / "mine")])
  assert capsys.readouterr().out == f"{tmp_path}/runs/mine: a run of llama, 6,992 numbers\n"
  arguments = [f"base_output_directory={tmp_path}/runs", "run_name=mine", "prompt=abc", "max_predict_length=3"]
  decode.main(pyconfig.load(
      ["configs/base.yml", *arguments, "jax_cache_dir=", "eval_per_device_batch_size=1.0"], reopen=True))
  out, err = capsys.readouterr()
  assert out.startswith("abc") and "mine/checkpoints/0" in err
  convert.main([str(tmp_path / "runs" / "mine"), str(tmp_path / "out")])
  assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
  assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}


# --- What is refused -------------------------------------------------------------------------------------------------


def change(folder, **tensors):
  """Other tensors (None: none) in a folder's one file."""
  found = load_file(folder / "model.safetensors")
  for name, x in tensors.items():
    found.pop(name, None)
    if x is not None:
      found[name] = x
  save_file(found, folder / "model.safetensors")


def write_config(folder, **keys):
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | keys))


DAMAGE = {
    "another vocabulary": (
        lambda f: write_config(f, vocab_size=64), errors.ConfigError,
        r"tensor model.embed_tokens.weight has shape \(48, 16\), and \(64, 16\) is wanted"),
    "another shape": (
        lambda f: change(f, **{"model.layers.1.mlp.up_proj.weight": np.ones((16, 24), np.float32)}), errors.ConfigError,
        r"model.layers.1.mlp.up_proj.weight has shape \(16, 24\), and \(24, 16\) is wanted, to make layers/mlp/wu_em"),
    "a tensor too few": (
        lambda f: change(f, **{"model.norm.weight": None}), errors.ConfigError, "tensor model.norm.weight is missing"),
    "a tensor too many": (
        lambda f: change(f, **{"model.extra.weight": np.ones(3, np.float32)}), errors.ConfigError,
        r"tensor model.extra.weight with shape \(3,\) has no place"),
    "another family": (lambda f: write_config(f, model_type="mixtral"), errors.ConfigError, 'model_type="mixtral"'),
    "another activation": (lambda f: write_config(f, hidden_act="relu"), errors.ConfigError, 'hidden_act="relu"'),
    "another scaling": (
        lambda f: write_config(f, rope_parameters={"rope_type": "yarn", "factor": 2.0}), errors.ConfigError, "yarn"),
    "no sizes": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), errors.ConfigError, "has no"),
    "sizes of nothing": (
        lambda f: write_config(f, num_attention_heads=0, head_dim=None), errors.ConfigError, "has a size that is none"),
    "quantized weights": (
        lambda f: change(f, **{"model.norm.weight": np.ones(16, np.int8)}), errors.DataError,
        "model.norm.weight is of int8, and only float16, bfloat16 and float32 are read"),
    "another format": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), errors.DataError, "no .safetensors file"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), errors.DataError, "config.json cannot be read"),
    "a file cut short": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        errors.DataError, "model.safetensors cannot be read"),
}


def test_a_sliding_window_is_as_long_as_texts_may_be(tmp_path):
  source = shutil.copytree(GOLDEN / "mistral", tmp_path / "source")
  write_config(source, sliding_window=12)
  with pytest.raises(errors.ConfigError, match="max_target_length=24: the model's sliding_window=12 hides"):
    convert.main([str(source), str(tmp_path / "out"), "max_target_length=24"])
  assert not (tmp_path / "out").exists()
  assert convert.from_config(json.loads((source / "config.json").read_text()), "")["max_target_length"] == 12


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_does_not_fit_is_refused_in_one_line_and_leaves_nothing(damage, tmp_path):
  spoil, kind, message = DAMAGE[damage]
  shutil.copytree(GOLDEN / "llama", tmp_path / "source")
  spoil(tmp_path / "source")
  with pytest.raises(kind, match=message) as error:
    convert.main([str(tmp_path / "source"), str(tmp_path / "out")])
  assert len(str(error.value).splitlines()) == 1
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


def save_pickle(path, content):
  """A file as torch.save makes it, of content without tensors."""
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("archive/data.pkl", pickle.dumps(content))


def test_a_pickle_that_would_run_something_is_not_run(tmp_path):
  class Bomb:
    def __reduce__(self):
      return pathlib.Path.touch, (tmp_path / "boom",)

  shutil.copytree(GOLDEN / "meta", tmp_path / "source")
  save_pickle(tmp_path / "source" / "consolidated.00.pth", {"norm.weight": Bomb()})
  with pytest.raises(errors.DataError, match="which is no tensor of 16 or 32 bits. Nothing was run"):
    convert.main([str(tmp_path / "source"), str(tmp_path / "out")])
  assert not (tmp_path / "boom").exists() and not (tmp_path / "out").exists()


def test_an_old_pickle_is_explained(tmp_path):
  shutil.copytree(GOLDEN / "meta", tmp_path / "source")
  (tmp_path / "source" / "consolidated.01.pth").write_bytes(pickle.dumps({}))
  with pytest.raises(errors.DataError, match="consolidated.01.pth: no zip file"):
    convert.main([str(tmp_path / "source"), str(tmp_path / "out")])


def test_a_model_of_no_family_stays_a_run_and_the_reason_is_named(tmp_path):
  keys = {"attn_logits_soft_cap": 30.0, "base_emb_dim": 8, "vocab_size": 16, "base_num_decoder_layers": 1}
  cfg = pyconfig.load(["run_name=x", *(f"{key}={value}" for key, value in keys.items())])
  with pytest.raises(errors.ConfigError, match="fails at attn_logits_soft_cap=30.0"):
    convert.family_of(cfg)


@pytest.mark.parametrize("spoil, message", [
    (lambda f: [file.unlink() for file in f.glob("*.pth")], "has no consolidated"),
    (lambda f: save_pickle(f / "consolidated.01.pth", []), "consolidated.01.pth cannot be read"),
    (lambda f: save_pickle(f / "consolidated.01.pth", {}), "part 1 of 2 has not the tok_embeddings.weight of"),
])
def test_incomplete_parts_of_metas_are_one_line(spoil, message, tmp_path):
  spoil(shutil.copytree(GOLDEN / "meta", tmp_path / "source"))
  with pytest.raises(errors.DataError, match=message):
    convert.main([str(tmp_path / "source"), str(tmp_path / "out")])
  assert not (tmp_path / "out").exists()


def test_a_folder_that_finds_no_room_is_not_left_half_made(runs, tmp_path, monkeypatch):
  def full(*_, **__):
    raise safetensors.SafetensorError("No space left on device")

  monkeypatch.setattr(safetensors.numpy, "save_file", full)
  with pytest.raises(errors.StorageError, match="out cannot be written: No space left on device. Make room"):
    convert.main([str(runs("llama")), str(tmp_path / "out")])
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv, message", [
    ([], "0 paths given. Usage: convert.py SOURCE DESTINATION"), (["a", "b", "c"], "3 paths given"),
    (["nowhere", "b"], "SOURCE=nowhere is no folder"), ([str(GOLDEN), str(GOLDEN)], "exists, and is left as it is"),
])
def test_wrong_usage_is_one_line(argv, message):
  with pytest.raises(errors.ConfigError, match=message):
    convert.main(argv)


def test_the_command_ends_with_the_documented_exit_codes(tmp_path):
  def run(*argv):
    command = [sys.executable, pathlib.Path(convert.__file__), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)

  done = run(GOLDEN / "gpt2", tmp_path / "gpt2")
  assert done.returncode == 0 and done.stdout.startswith(f"{tmp_path}/gpt2: a run of gpt2, "), done.stderr
  wrong = run(GOLDEN / "gpt2", tmp_path / "gpt2")
  assert wrong.returncode == 2 and wrong.stderr.startswith("ConfigError: DESTINATION=") and not wrong.stdout
  (tmp_path / "empty").mkdir()
  empty = run(tmp_path / "empty", tmp_path / "out")
  assert empty.returncode == 3 and len(empty.stderr.splitlines()) == 1
