# SPDX-License-Identifier: Apache-2.0
"""Makes transformers.npz: tiny random models of Hugging Face transformers, their logits and losses, for oracle_test.py.

  python3 -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers==5.23.0 numpy
  /tmp/oracle/bin/python tests/golden/make.py

Each model's weights are stored by the names and in the shapes of our own parameters, rounded to bfloat16 (small files;
the mathematics stays float32). The sizes are those of oracle_test.SIZES.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, VOCAB, LENGTH = 16, 4, 2, 4, 24, 2, 48, 20
COMMON = {"hidden_size": EMBED, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
          "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
          "max_position_embeddings": LENGTH, "attn_implementation": "eager"}  # fmt: skip
GPT = {"n_embd": EMBED, "n_head": HEADS, "n_inner": MLP, "n_layer": LAYERS, "vocab_size": VOCAB, "n_positions": LENGTH,
       "attn_implementation": "eager"}  # fmt: skip


def randomize(model):
  """Weights large enough that every part of the model shows in the logits."""
  for name, p in model.named_parameters():
    noise = torch.randn(p.shape)
    if p.ndim == 1:
      p.data = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
    else:
      p.data = noise / (2.0 if "embed" in name or "wte" in name or "shared" in name else p.shape[-1] ** 0.5)
    p.data = p.data.bfloat16().float()
  return model.eval()


def heads(weight, count):
  """[features, embed] of a Linear -> [embed, heads, head_dim]."""
  return weight.T.reshape(EMBED, count, HEAD_DIM)


def stack(layers):
  """A list of parameter dicts as one whose arrays have a leading dimension."""
  return {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}


def llama(model):
  """Llama, Qwen2, Qwen3, Gemma: one naming."""
  w, layers = dict(model.state_dict()), []
  for i in range(LAYERS):
    at = f"model.layers.{i}."
    layer = {
        "attention_norm/scale_e": w[at + "input_layernorm.weight"],
        "mlp_norm/scale_e": w[at + "post_attention_layernorm.weight"],
        "attention/wq_enh": heads(w[at + "self_attn.q_proj.weight"], HEADS),
        "attention/wk_ekh": heads(w[at + "self_attn.k_proj.weight"], KV_HEADS),
        "attention/wv_ekh": heads(w[at + "self_attn.v_proj.weight"], KV_HEADS),
        "attention/wo_nhe": w[at + "self_attn.o_proj.weight"].T.reshape(HEADS, HEAD_DIM, EMBED),
        "mlp/wg_em": w[at + "mlp.gate_proj.weight"].T,
        "mlp/wu_em": w[at + "mlp.up_proj.weight"].T,
        "mlp/wd_me": w[at + "mlp.down_proj.weight"].T,
    }
    if at + "self_attn.q_proj.bias" in w:
      layer["attention/bq_nh"] = w[at + "self_attn.q_proj.bias"].reshape(HEADS, HEAD_DIM)
      layer["attention/bk_kh"] = w[at + "self_attn.k_proj.bias"].reshape(KV_HEADS, HEAD_DIM)
      layer["attention/bv_kh"] = w[at + "self_attn.v_proj.bias"].reshape(KV_HEADS, HEAD_DIM)
    if at + "self_attn.q_norm.weight" in w:
      layer["attention/query_norm/scale_e"] = w[at + "self_attn.q_norm.weight"]
      layer["attention/key_norm/scale_e"] = w[at + "self_attn.k_norm.weight"]
    layers.append(layer)
  params = {"embedding_ve": w["model.embed_tokens.weight"], "final_norm/scale_e": w["model.norm.weight"]}
  if not model.config.tie_word_embeddings:
    params["wl_ve"] = w["lm_head.weight"]
  return params, layers


def gpt2(model):
  w, layers = model.state_dict(), []
  for i in range(LAYERS):
    at = f"transformer.h.{i}."
    q, k, v = (part.reshape(EMBED, HEADS, HEAD_DIM) for part in w[at + "attn.c_attn.weight"].split(EMBED, dim=1))
    bq, bk, bv = (part.reshape(HEADS, HEAD_DIM) for part in w[at + "attn.c_attn.bias"].split(EMBED))
    layers.append({
        "attention_norm/scale_e": w[at + "ln_1.weight"], "attention_norm/bias_e": w[at + "ln_1.bias"],
        "mlp_norm/scale_e": w[at + "ln_2.weight"], "mlp_norm/bias_e": w[at + "ln_2.bias"],
        "attention/wq_enh": q, "attention/wk_ekh": k, "attention/wv_ekh": v,
        "attention/bq_nh": bq, "attention/bk_kh": bk, "attention/bv_kh": bv,
        "attention/wo_nhe": w[at + "attn.c_proj.weight"].reshape(HEADS, HEAD_DIM, EMBED),
        "attention/bo_e": w[at + "attn.c_proj.bias"],
        "mlp/wu_em": w[at + "mlp.c_fc.weight"], "mlp/bu_m": w[at + "mlp.c_fc.bias"],
        "mlp/wd_me": w[at + "mlp.c_proj.weight"], "mlp/bd_e": w[at + "mlp.c_proj.bias"],
    })  # fmt: skip
  return {
      "embedding_ve": w["transformer.wte.weight"], "position_embedding_te": w["transformer.wpe.weight"],
      "final_norm/scale_e": w["transformer.ln_f.weight"], "final_norm/bias_e": w["transformer.ln_f.bias"],
  }, layers


def gptj(model):
  w, layers = model.state_dict(), []
  for i in range(LAYERS):
    at = f"transformer.h.{i}."
    layers.append({
        "attention_norm/scale_e": w[at + "ln_1.weight"], "attention_norm/bias_e": w[at + "ln_1.bias"],
        "attention/wq_enh": heads(w[at + "attn.q_proj.weight"], HEADS),
        "attention/wk_ekh": heads(w[at + "attn.k_proj.weight"], HEADS),
        "attention/wv_ekh": heads(w[at + "attn.v_proj.weight"], HEADS),
        "attention/wo_nhe": w[at + "attn.out_proj.weight"].T.reshape(HEADS, HEAD_DIM, EMBED),
        "mlp/wu_em": w[at + "mlp.fc_in.weight"].T, "mlp/bu_m": w[at + "mlp.fc_in.bias"],
        "mlp/wd_me": w[at + "mlp.fc_out.weight"].T, "mlp/bd_e": w[at + "mlp.fc_out.bias"],
    })  # fmt: skip
  return {
      "embedding_ve": w["transformer.wte.weight"], "wl_ve": w["lm_head.weight"], "bl_v": w["lm_head.bias"],
      "final_norm/scale_e": w["transformer.ln_f.weight"], "final_norm/bias_e": w["transformer.ln_f.bias"],
  }, layers


class T5Decoder(torch.nn.Module):
  """T5's decoder on its own, with the tied output of T5ForConditionalGeneration."""

  def __init__(self, config):
    super().__init__()
    self.config = config
    self.shared = torch.nn.Embedding(VOCAB, EMBED)
    self.stack = T5Stack(config)

  def forward(self, ids):
    hidden = self.stack(inputs_embeds=self.shared(ids), use_cache=False).last_hidden_state
    return torch.nn.functional.linear(hidden * EMBED**-0.5, self.shared.weight)


def t5(model):
  w, layers = model.state_dict(), []
  for i in range(LAYERS):
    at = f"stack.block.{i}.layer."
    layers.append({
        "attention_norm/scale_e": w[at + "0.layer_norm.weight"], "mlp_norm/scale_e": w[at + "2.layer_norm.weight"],
        "attention/wq_enh": heads(w[at + "0.SelfAttention.q.weight"], HEADS),
        "attention/wk_ekh": heads(w[at + "0.SelfAttention.k.weight"], HEADS),
        "attention/wv_ekh": heads(w[at + "0.SelfAttention.v.weight"], HEADS),
        "attention/wo_nhe": w[at + "0.SelfAttention.o.weight"].T.reshape(HEADS, HEAD_DIM, EMBED),
        "mlp/wu_em": w[at + "2.DenseReluDense.wi.weight"].T, "mlp/wd_me": w[at + "2.DenseReluDense.wo.weight"].T,
    })  # fmt: skip
  return {
      "embedding_ve": w["shared.weight"], "final_norm/scale_e": w["stack.final_layer_norm.weight"],
      "relative_bias_dn": w["stack.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
  }, layers


def models():
  """(name, model, its parameters and layers by our names)."""
  auto = transformers.AutoModelForCausalLM.from_config
  yield "llama", auto(transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-5, tie_word_embeddings=False)), llama
  yield "qwen2", auto(transformers.Qwen2Config(**COMMON, rms_norm_eps=1e-6, tie_word_embeddings=True)), llama
  yield "qwen3", auto(transformers.Qwen3Config(**COMMON, rms_norm_eps=1e-6, tie_word_embeddings=True)), llama
  yield "gemma", auto(transformers.GemmaConfig(
      **COMMON, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)), llama
  yield "gpt2", auto(transformers.GPT2Config(**GPT, layer_norm_epsilon=1e-5, activation_function="gelu_new")), gpt2
  yield "gptj", auto(transformers.GPTJConfig(
      **GPT, rotary_dim=HEAD_DIM, layer_norm_epsilon=1e-5, activation_function="gelu_new",
      tie_word_embeddings=False)), gptj
  yield "t5", T5Decoder(transformers.T5Config(
      d_model=EMBED, d_kv=HEAD_DIM, d_ff=MLP, num_layers=LAYERS, num_heads=HEADS, vocab_size=VOCAB, is_decoder=True,
      relative_attention_num_buckets=8, relative_attention_max_distance=16, feed_forward_proj="relu",
      layer_norm_epsilon=1e-6, dropout_rate=0.0)), t5


def main():
  torch.manual_seed(0)
  arrays = {}
  for name, model, convert in models():
    randomize(model)
    params, layers = convert(model)
    params |= {f"layers/{key}": value for key, value in stack(layers).items()}
    inputs = torch.randint(0, VOCAB, (2, LENGTH))
    with torch.no_grad():
      output = model(inputs)
      logits = output if name == "t5" else output.logits
      loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
    arrays |= {f"{name}/params/{key}": value for key, value in params.items()}
    arrays |= {f"{name}/inputs": inputs.int(), f"{name}/logits": logits, f"{name}/loss": loss}
  for buckets, distance in ((32, 128), (8, 16), (16, 1000), (3, 50)):
    found = T5Attention._relative_position_bucket(-torch.arange(400), False, buckets, distance)
    arrays[f"buckets/{buckets}/{distance}"] = found.short()
  path = pathlib.Path(__file__).with_name("transformers.npz")
  np.savez_compressed(path, **{name: value.numpy() for name, value in arrays.items()})
  print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
  main()
