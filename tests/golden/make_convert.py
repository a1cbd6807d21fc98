# SPDX-License-Identifier: Apache-2.0
"""Makes convert/: tiny random models as Hugging Face's transformers and torch save them, and their logits.

  python3 -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers==5.23.0 numpy
  /tmp/oracle/bin/python tests/golden/make_convert.py

One is cut into shards, one is in bfloat16, one lies in Meta's layout, cut for two devices.
"""

import json
import math
import pathlib
import shutil

import numpy as np
import torch
import transformers
from make import randomize

HERE = pathlib.Path(__file__).with_name("convert")
EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, VOCAB, LENGTH = 16, 4, 2, 8, 24, 2, 48, 24
COMMON = {"hidden_size": EMBED, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
          "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": LENGTH,
          "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 12}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "llama3": transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "llama_linear": transformers.LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}),
    "mistral": transformers.MistralConfig(**COMMON, sliding_window=None, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**COMMON, tie_word_embeddings=True),
    "gemma": transformers.GemmaConfig(**COMMON, hidden_activation="gelu_pytorch_tanh"),
    "gpt2": transformers.GPT2Config(n_embd=32, n_head=4, n_inner=MLP, n_layer=LAYERS, vocab_size=VOCAB,
                                    n_positions=LENGTH, bos_token_id=1, eos_token_id=2),
}  # fmt: skip


def pairs(weight, heads):
  """Rows of a query or key weight from Hugging Face's order (halves) to Meta's (neighbours)."""
  return weight.view(heads, 2, -1, EMBED).transpose(1, 2).reshape(weight.shape).clone()


def save_meta(model, folder):
  """The Llama as Meta's own code saves it, cut for two devices."""
  w = model.state_dict()
  both = {"norm.weight": w["model.norm.weight"]}
  parts = [{}, {}]

  def cut(name, weight, axis):
    for part, piece in zip(parts, weight.chunk(2, dim=axis), strict=True):
      part[name] = piece.half().clone()

  cut("tok_embeddings.weight", w["model.embed_tokens.weight"], 1)
  cut("output.weight", w["lm_head.weight"], 0)
  for i in range(LAYERS):
    ours, at = f"layers.{i}.", f"model.layers.{i}."
    both[ours + "attention_norm.weight"] = w[at + "input_layernorm.weight"]
    both[ours + "ffn_norm.weight"] = w[at + "post_attention_layernorm.weight"]
    cut(ours + "attention.wq.weight", pairs(w[at + "self_attn.q_proj.weight"], HEADS), 0)
    cut(ours + "attention.wk.weight", pairs(w[at + "self_attn.k_proj.weight"], KV_HEADS), 0)
    cut(ours + "attention.wv.weight", w[at + "self_attn.v_proj.weight"], 0)
    cut(ours + "attention.wo.weight", w[at + "self_attn.o_proj.weight"], 1)
    cut(ours + "feed_forward.w1.weight", w[at + "mlp.gate_proj.weight"], 0)
    cut(ours + "feed_forward.w3.weight", w[at + "mlp.up_proj.weight"], 0)
    cut(ours + "feed_forward.w2.weight", w[at + "mlp.down_proj.weight"], 1)
  folder.mkdir()
  for i, part in enumerate(parts):
    rest = {name: x.half() for name, x in both.items()} | {"rope.freqs": torch.ones(HEAD_DIM // 2).half()}
    torch.save(part | rest, folder / f"consolidated.{i:02d}.pth")
  (folder / "params.json").write_text(json.dumps({
      "dim": EMBED, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "norm_eps": 1e-5, "vocab_size": -1}))


def main():
  torch.manual_seed(0)
  shutil.rmtree(HERE, ignore_errors=True)
  HERE.mkdir()
  inputs = torch.randint(3, VOCAB, (2, LENGTH))
  arrays = {"inputs": inputs.int().numpy()}
  for name, config in CONFIGS.items():
    config._attn_implementation = "eager"
    model = randomize(transformers.AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
      arrays[name] = model(inputs).logits.numpy()
    if name == "mistral":  # the weights are rounded so already; the rotary angles were not
      model = model.bfloat16()
    model.save_pretrained(HERE / name, max_shard_size="8KB" if name == "qwen3" else "1GB")
    (HERE / name / "generation_config.json").unlink(missing_ok=True)
  # Meta's heads are as wide as their number makes them: a Llama of its own.
  config = transformers.LlamaConfig(**(COMMON | {"head_dim": EMBED // HEADS}), rms_norm_eps=1e-5,
                                    tie_word_embeddings=False, attn_implementation="eager")
  model = randomize(transformers.AutoModelForCausalLM.from_config(config))
  save_meta(model, HERE / "meta")
  with torch.no_grad():
    arrays["meta"] = model(inputs).logits.numpy()
  assert all(np.isfinite(x).all() and x.std() > 0.1 for name, x in arrays.items() if name != "inputs")
  np.savez_compressed(HERE / "logits.npz", **arrays)
  size = sum(file.stat().st_size for file in HERE.rglob("*") if file.is_file())
  print(f"{HERE}: {math.ceil(size / 1000)} kB")


if __name__ == "__main__":
  main()
