# SPDX-License-Identifier: Apache-2.0
"""Claims: a folder of Llama-2-7B's shape (but --layers layers, 32 in full, and a vocabulary of --vocab, which makes the
largest tensor) comes in and goes out byte for byte in less memory than twice its largest tensor and 1 GB; and, where
--oracle names a Python with torch and transformers, these load what goes out of every family and of a trained run, with
the logits it had and the run's token ids.

  python3 end_to_end/test_convert.py [recipe.yml] [key=value ...] [--layers=2] [--vocab=32000] [--oracle=path/to/python]

Needs three times the folder's size on disk: 0.4 GB for each layer and 16 kB for each row of the vocabulary.
"""

import os
import sys

if __name__ == "__main__":
  sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  from MaxText import interpreter

  interpreter.ensure()

import json
import pathlib
import shutil
import subprocess

from end_to_end import runs

SHAPES = {"q_proj": (4096, 4096), "k_proj": (4096, 4096), "v_proj": (4096, 4096), "o_proj": (4096, 4096),
          "gate_proj": (11008, 4096), "up_proj": (11008, 4096), "down_proj": (4096, 11008)}  # fmt: skip
WIDTH = 4096
TEXT = pathlib.Path(__file__).read_text(encoding="utf-8") + " \u00e9\U0001f600\t2026 "
ORACLE = """
import json, sys
import numpy as np, torch, transformers
inputs = torch.tensor(np.load(sys.argv[1]))
found = {}
for folder in sys.argv[3:]:
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
  with torch.no_grad():
    np.save(folder + "/logits.npy", model.eval()(inputs % model.config.vocab_size).logits.numpy())
words = transformers.AutoTokenizer.from_pretrained(sys.argv[-1])
print(json.dumps(words(sys.argv[2], add_special_tokens=False)["input_ids"]))
"""


def make_llama(folder, layers, vocab):
  """A folder in bfloat16 of Llama-2-7B's shape, each layer a file."""
  import ml_dtypes
  import numpy as np
  from safetensors.numpy import save_file

  random, weight_map = np.random.default_rng(0), {}

  def tensor(*shape):
    return random.integers(0, 1 << 16, shape, np.uint16).view(ml_dtypes.bfloat16)

  def save(name, tensors):
    save_file(tensors, folder / name)
    weight_map.update(dict.fromkeys(tensors, name))

  folder.mkdir()
  save("ends.safetensors", {"model.embed_tokens.weight": tensor(vocab, WIDTH), "lm_head.weight": tensor(vocab, WIDTH),
                            "model.norm.weight": tensor(WIDTH)})
  for layer in range(layers):
    at = f"model.layers.{layer}."
    parts = {f"{at}{'mlp' if shape.count(11008) else 'self_attn'}.{name}.weight": tensor(*shape)
             for name, shape in SHAPES.items()}
    norms = {f"{at}{name}_layernorm.weight": tensor(WIDTH) for name in ("input", "post_attention")}
    save(f"layer-{layer:02d}.safetensors", parts | norms)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
  (folder / "config.json").write_text(json.dumps({
      "model_type": "llama", "hidden_size": WIDTH, "num_attention_heads": 32, "num_key_value_heads": 32,
      "intermediate_size": 11008, "num_hidden_layers": layers, "vocab_size": vocab, "rms_norm_eps": 1e-5,
      "max_position_embeddings": 4096}))


def convert(*arguments):
  """(peak resident bytes, seconds of CPU) of convert.py."""
  process = subprocess.Popen([sys.executable, "MaxText/convert.py", *map(str, arguments)], cwd=runs.ROOT,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
  errors = process.stderr.read().decode()
  _, status, usage = os.wait4(process.pid, 0)
  runs.check(status == 0, f"convert.py {arguments} ended with {os.waitstatus_to_exitcode(status)}: {errors[-600:]}")
  return usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def bits(folder):
  """{tensor: its bits}, one at a time."""
  from safetensors import safe_open

  for file in sorted(folder.glob("*.safetensors")):
    with safe_open(file, framework="numpy") as opened:
      for name in opened.keys():
        yield name, opened.get_tensor(name)


def claim_memory(place, layers, vocab):
  folder = pathlib.Path(place.logs)
  make_llama(folder / "llama", layers, vocab)
  largest = max(vocab, 11008) * WIDTH * 2
  came, _ = convert(folder / "llama", folder / "run", "weight_dtype=bfloat16")
  went, _ = convert(folder / "run", folder / "out")
  before = {name: hash(x.tobytes()) for name, x in bits(folder / "llama")}
  after = {name: hash(x.tobytes()) for name, x in bits(folder / "out")}
  runs.check(before == after, "tensors that came back differ from those that came in")
  for name in ("llama", "run", "out"):
    shutil.rmtree(folder / name)
  limit = 2 * largest + 1e9
  runs.check(max(came, went) < limit, f"peak memory {came / 1e9:.2f} GB in, {went / 1e9:.2f} out: over the limit")
  return (f"{layers} layers of Llama-2-7B, vocabulary {vocab:,}: peak memory {came / 1e9:.2f} GB in and "
          f"{went / 1e9:.2f} GB out (largest tensor {largest / 1e9:.2f} GB, so under {limit / 1e9:.2f}), every byte "
          "back")


def claim_transformers(place, oracle):
  import jax
  import numpy as np
  from flax import nnx

  from MaxText import checkpoint, data, model, pyconfig, sharding

  folder, golden = pathlib.Path(place.logs), pathlib.Path(runs.ROOT) / "tests" / "golden" / "convert"
  inputs = np.random.default_rng(0).integers(3, 1 << 15, (2, 24))
  np.save(folder / "inputs.npy", inputs)
  place.train("trained", "steps=20", "eval_interval=-1")
  names = [path.name for path in sorted(golden.iterdir()) if path.is_dir()]
  for name in names:
    convert(golden / name, folder / f"{name}-run")
  sources = {name: folder / f"{name}-run" for name in names} | {
      "trained": pathlib.Path(place.directory) / "trained"}
  for name, run in sources.items():
    convert(run, folder / f"{name}-out", "weight_dtype=float32")
  command = [oracle, "-c", ORACLE, folder / "inputs.npy", TEXT, *(folder / f"{name}-out" for name in sources)]
  text = subprocess.run(command, capture_output=True, text=True, check=False)
  runs.check(text.returncode == 0, f"transformers: {text.stderr[-600:]}")
  worst = 0.0
  for name, run in sources.items():
    cfg = pyconfig.load([f"load_parameters_path={run}", "matmul_precision=highest"], need_run_name=False, reopen=True)
    cfg = pyconfig.resolve(cfg, jax.devices())
    with sharding.use(sharding.make_mesh(cfg, jax.devices()), cfg.logical_axis_rules) as mesh:
      graph, abstract = model.abstract_parameters(cfg, mesh)
      transformer = nnx.merge(graph, checkpoint.load_parameters(str(run), abstract))
      tokens = (inputs % cfg.vocab_size).astype(np.int32)
      hidden, _ = transformer(tokens, np.broadcast_to(np.arange(24), tokens.shape), np.ones_like(tokens))
      ours = np.asarray(transformer.logits(hidden))
    theirs = np.load(folder / f"{name}-out" / "logits.npy")
    worst = max(worst, float(np.abs(ours - theirs).max()))
  runs.check(worst < 1e-4, f"logits differ by {worst}")
  words = data.open_tokenizer(pyconfig.load([f"load_parameters_path={sources['trained']}"], need_run_name=False,
                                            reopen=True))
  ids = json.loads(text.stdout.splitlines()[-1])
  runs.check(ids == words.encode(TEXT).tolist(), f"AutoTokenizer gives {ids}, the run {words.encode(TEXT).tolist()}")
  return f"transformers loads {', '.join(sources)}: logits within {worst:.1e}, token ids of the run equal"


def claim(place, layers, vocab, oracle):
  found = [claim_memory(place, layers, vocab)]
  if oracle:
    os.environ["JAX_PLATFORMS"] = "cpu"
    found.append(claim_transformers(place, oracle))
  return "; ".join(found)


if __name__ == "__main__":
  runs.judge(__file__, claim, [*runs.SMALL, "dropout_rate=0.0"], layers=2, vocab=32000, oracle="")
