# SPDX-License-Identifier: Apache-2.0
"""LAMBADA, BoolQ and multiple choice scored by a plain loop over transformers, for test_evals.py, which starts this.

  PYTHON_WITH_TRANSFORMERS end_to_end/plain_evals.py FOLDER

FOLDER holds params.npz (our parameters), config.json and tasks.json (kind -> rows). Nothing is shared with MaxText/:
bytes as tokens, prompts and rules are written down here once more. Writes plain.json: for each task its accuracies, and
the log-probability of each answer and whether each of its tokens was the likeliest.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(sys.argv[1])
CONFIG = json.loads((FOLDER / "config.json").read_text())
BOS, FIRST_BYTE = 1, 3


def load():
  """Our parameters as a LlamaForCausalLM."""
  w = {name: torch.tensor(value) for name, value in np.load(FOLDER / "params.npz").items()}
  embed, heads = CONFIG["emb_dim"], CONFIG["num_query_heads"]
  model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
      hidden_size=embed, num_attention_heads=heads, num_key_value_heads=CONFIG["num_kv_heads"],
      head_dim=CONFIG["head_dim"], intermediate_size=CONFIG["mlp_dim"], num_hidden_layers=CONFIG["num_decoder_layers"],
      vocab_size=CONFIG["vocab_size"], max_position_embeddings=CONFIG["max_target_length"], rms_norm_eps=1e-6,
      tie_word_embeddings=False, attn_implementation="eager"))
  state = {"model.embed_tokens.weight": w["embedding_ve"], "model.norm.weight": w["final_norm/scale_e"],
           "lm_head.weight": w["wl_ve"]}
  for layer in range(CONFIG["num_decoder_layers"]):
    at, part = f"model.layers.{layer}.", {name.removeprefix("layers/"): value[layer] for name, value in w.items()
                                          if name.startswith("layers/")}
    state |= {
        f"{at}input_layernorm.weight": part["attention_norm/scale_e"],
        f"{at}post_attention_layernorm.weight": part["mlp_norm/scale_e"],
        f"{at}self_attn.q_proj.weight": part["attention/wq_enh"].reshape(embed, -1).T,
        f"{at}self_attn.k_proj.weight": part["attention/wk_ekh"].reshape(embed, -1).T,
        f"{at}self_attn.v_proj.weight": part["attention/wv_ekh"].reshape(embed, -1).T,
        f"{at}self_attn.o_proj.weight": part["attention/wo_nhe"].reshape(-1, embed).T,
        f"{at}mlp.gate_proj.weight": part["mlp/wg_em"].T, f"{at}mlp.up_proj.weight": part["mlp/wu_em"].T,
        f"{at}mlp.down_proj.weight": part["mlp/wd_me"].T,
    }  # fmt: skip
  model.load_state_dict(state)
  return model.eval()


@torch.no_grad()
def score(model, context, target):
  """(log-probability of target after context, whether each of its bytes was the likeliest)."""
  target = [byte + FIRST_BYTE for byte in target.encode()]
  ids = [BOS, *(byte + FIRST_BYTE for byte in context.encode()), *target][-CONFIG["max_target_length"] - 1:]
  logprobs = model(torch.tensor([ids[:-1]])).logits[0, -len(target):].log_softmax(-1)
  return (logprobs[range(len(target)), target].double().sum().item(),
          logprobs.argmax(-1).tolist() == target)


def lambada(model, rows):
  found = []
  for row in rows:
    text = row["text"]
    for curly, plain in ("\u2018'", "\u2019'", '\u201c"', '\u201d"'):
      text = text.replace(curly, plain)
    last = text.split()[-1]
    found.append(score(model, text[:text.rindex(last)].strip(), " " + last))
  return {"accuracy": np.mean([greedy for _, greedy in found])}, found


def boolq(model, rows):
  found, right = [], []
  for row in rows:
    prompt = f"{row['passage']}\nquestion: {row['question']}?\nanswer:"
    label, other = (" yes", " no") if row["answer"] else (" no", " yes")
    found += [score(model, prompt, other), score(model, prompt, label)]
    right.append(found[-1][0] > found[-2][0])
  return {"accuracy": np.mean(right)}, found


def choice(model, rows):
  found, right, right_norm = [], [], []
  for row in rows:
    query, between = row["query"], ""
    if query.endswith("\n"):
      query, between = query[:-1], "\n"
    elif not row["choices"][0].startswith(" "):
      between = " "
    scores = [score(model, query, between + option) for option in row["choices"]]
    found += scores
    sums = [logprob for logprob, _ in scores]
    means = [total / len(option) for total, option in zip(sums, row["choices"], strict=True)]
    right.append(sums.index(max(sums)) == row["gold"])
    right_norm.append(means.index(max(means)) == row["gold"])
  return {"accuracy": np.mean(right), "accuracy_norm": np.mean(right_norm)}, found


found, llama = {}, load()
for name, rows in json.loads((FOLDER / "tasks.json").read_text()).items():
  values, scores = {"lambada": lambada, "boolq": boolq, "choice": choice}[name.split("/")[0]](llama, rows)
  found[name] = {"values": values, "scores": scores}
(FOLDER / "plain.json").write_text(json.dumps(found))
