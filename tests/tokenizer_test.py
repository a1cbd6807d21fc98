# SPDX-License-Identifier: Apache-2.0
"""Tokenizers give back what they were given, fast ones and slow ones alike."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from MaxText import corpus, sources, tokenizer
from MaxText.errors import ConfigError

SHARED = Path(__file__).parents[1] / "../shared/data"
HARD = [
    "", " ", "\n", "\0", "a\0b\0", "\t\tx\t \ty\t", "\r\n\r", "  lead and trail  ", "\n\n   \n\t", "\u2581", "a\u2581b",
    "\u2581\u2581 \u2581x \u2581", "\u2585 \u2047", "\ufeff\ufffd\uffff\U0010ffff", "<s></s><unk><pad><0x41>",
    "😀🏳️‍🌈 e\u0301 é ａＡﬁ 漢字", " " * 1000, "x" * 10_000, " " * 300 + "x" * 300, "0123456789 12.5e-3",
    "def f(self):\n\treturn self.x  # \u2581 \0 😀\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def library():
  return list(sources.documents(sources.stdlib(""), 1_500_000))


@pytest.fixture(scope="module")
def trained(library):
  return tokenizer.train(library[::2], 2048)


def test_a_trained_bpe_round_trips_hard_texts_and_the_library_exactly(trained, library):
  for text in HARD + library:
    assert trained.decode(trained.encode(text)) == text


def test_bytes_round_trip_hard_texts_exactly():
  byte = tokenizer.Byte()
  for text in HARD:
    ids = byte.encode(text)
    assert len(ids) == len(text.encode())
    assert byte.decode(ids) == text
    assert not len(ids) or ids.max() < byte.vocab_size


def test_encoding_by_distinct_words_equals_sentencepiece_on_the_whole_document(trained, library):
  import sentencepiece
  oracle = sentencepiece.SentencePieceProcessor(model_proto=trained.model)
  plain = [text for text in HARD + library if tokenizer.SPACE not in text and
           max(map(len, tokenizer.WORD.findall(text)), default=0) < tokenizer.WORD_CHARS]
  assert len(plain) > len(library)
  for ids, text in zip(trained.encode_documents(plain), plain, strict=True):
    assert ids.tolist() == oracle.encode(text)
    assert ids.dtype == np.uint16


def test_documents_encode_as_they_do_alone_whatever_their_grouping(trained, monkeypatch):
  together = trained.encode_documents(HARD)
  monkeypatch.setattr(tokenizer, "GROUP_CHARS", 7)
  for one, other, text in zip(together, trained.encode_documents(HARD), HARD, strict=True):
    assert one.tolist() == other.tolist() == trained.encode(text).tolist()


def test_training_is_the_same_in_another_process(trained, tmp_path):
  code = ("import sys; from MaxText import sources, tokenizer;"
          "texts = list(sources.documents(sources.stdlib(''), 1_500_000));"
          "sys.stdout.write(tokenizer.train(texts[::2], 2048).fingerprint)")
  root = Path(__file__).parents[1]
  found = subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
                         capture_output=True, text=True, check=True).stdout
  assert found == trained.fingerprint


def test_unseen_source_code_takes_under_half_a_token_per_character(trained, library):
  held_out = library[1::2]
  tokens = sum(map(len, trained.encode_documents(held_out)))
  assert sum(map(len, held_out)) / tokens > 2  # measured 2.9 to 3.1 with 2,048 pieces, by the Python version


def test_a_tiny_or_strange_corpus_trains_all_the_same():
  han = [chr(0x4e00 + i) for i in range(5000)]
  for texts, size in ((["a"], 4096), (["\u2581\u2585"], 300), (han, 1000), (HARD, 261), (["x" * 100_000], 300)):
    trained = tokenizer.train(texts, size)
    assert trained.vocab_size <= size
    assert all(trained.decode(trained.encode(text)) == text for text in [*texts[:10], *HARD])


def test_a_megabyte_without_spaces_encodes_in_a_second(trained):
  import time
  text, begin = "YWJjZGVmZ2hpamts" * (1 << 16), time.perf_counter()
  assert trained.decode(trained.encode(text)) == text
  assert time.perf_counter() - begin < 5  # measured 0.3 s; room for a busy machine


def test_saved_is_loaded_with_its_fingerprint(trained, tmp_path):
  for one in (trained, tokenizer.Byte()):
    one.save(tmp_path / "tokenizer.model")
    other = tokenizer.load(one.kind, tmp_path / "tokenizer.model")
    assert (other.kind, other.fingerprint, other.vocab_size) == (one.kind, one.fingerprint, one.vocab_size)
    assert other.encode(HARD[-1]).tolist() == one.encode(HARD[-1]).tolist()
  assert trained.fingerprint != tokenizer.Byte.fingerprint


def test_the_cache_gives_the_tokenizer_that_training_gives(tmp_path, monkeypatch):
  fresh = tokenizer.train(HARD, 400, tmp_path / "new")
  monkeypatch.setattr(tokenizer, "Trained", None)  # a second training would fail
  assert tokenizer.train(HARD, 400, tmp_path / "new").model == fresh.model
  assert len(list((tmp_path / "new").iterdir())) == 1


def test_special_pieces_never_come_from_text_and_decode_to_nothing(trained):
  for one in (trained, tokenizer.Byte()):
    special = [one.pad_id, one.bos_id, one.eos_id]
    assert not set(special) & set(one.encode("<s></s><pad>").tolist())
    assert one.decode([*special, *one.encode("x"), one.vocab_size, 10**6]) == "x"


def test_a_vocabulary_too_small_is_explained_in_one_line():
  with pytest.raises(ConfigError, match=r"^vocab_size=200: .* tokenizer_type=byte.*$") as error:
    tokenizer.train(["a"], 200)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_an_unusable_model_file_is_explained_in_one_line(tmp_path, content):
  path = tmp_path / "x.model"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ConfigError, match="^tokenizer_path=") as error:
    tokenizer.load_given(str(path))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mistral-v1.model", "maxtext_tokenizer.default.model"])
def test_a_given_model_encodes_as_sentencepiece_does(name, library):
  if not (SHARED / "tok" / name).exists():
    pytest.skip(f"../shared/data/tok/{name} is absent")
  import sentencepiece
  given = tokenizer.load_given(str(SHARED / "tok" / name))
  oracle = sentencepiece.SentencePieceProcessor(model_file=str(SHARED / "tok" / name))
  for ids, text in zip(given.encode_documents(HARD + library[:5]), HARD + library[:5], strict=True):
    assert ids.tolist() == oracle.encode(text)
  assert (given.vocab_size, given.bos_id, given.eos_id) == (oracle.vocab_size(), oracle.bos_id(), oracle.eos_id())
  if name.startswith("mistral"):
    assert given.decode(given.encode(library[0])) == library[0]


# --- Hugging Face ----------------------------------------------------------------------------------------------------

NAMES = '{"bos_token": "<|start|>", "eos_token": {"content": "<|stop|>", "lstrip": false}, "pad_token": null}'


def byte_level_bpe(text, special):
  """A byte-level BPE of 400 pieces as the `tokenizers` library trains it; `special` tokens have the first ids."""
  import tokenizers

  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=400, special_tokens=special, show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
  made.train_from_iterator([text], trainer)
  return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder as the hub has them: tokenizer.json, saved with truncation and adding BOS, and tokenizer_config.json."""
  import tokenizers

  made = byte_level_bpe(Path(__file__).read_text(), ["<pad>", "<|start|>", "<|stop|>"])
  made.post_processor = tokenizers.processors.TemplateProcessing(
      single="<|start|> $A", special_tokens=[("<|start|>", 1)])
  made.enable_truncation(5)
  made.enable_padding(length=9)
  path = tmp_path_factory.mktemp("folder")
  made.save(str(path / "tokenizer.json"))
  (path / "tokenizer_config.json").write_text(NAMES)
  return path


@pytest.mark.parametrize("where", ["", "tokenizer.json"])
def test_a_hugging_face_tokenizer_round_trips_hard_texts_and_is_loaded_with_its_fingerprint(folder, tmp_path, where):
  words = tokenizer.load_given(str(folder / where))
  assert (words.kind, words.vocab_size, words.dtype) == ("huggingface", 400, np.uint16)
  assert (words.bos_id, words.eos_id, words.pad_id) == (1, 2, 0)
  for text, ids in zip(HARD, words.encode_documents(HARD), strict=True):
    assert words.decode(ids) == text.replace("<pad>", "")
    assert words.encode(text).tolist() == ids.tolist()
    assert 1 not in ids and 2 not in ids, "BOS and EOS are the data room's to add"
  words.save(tmp_path / "tokenizer.model")
  again = tokenizer.load("huggingface", tmp_path / "tokenizer.model")
  assert vars(again).keys() == vars(words).keys()
  assert [again.bos_id, again.eos_id, again.pad_id, again.vocab_size, again.fingerprint] == [
      words.bos_id, words.eos_id, words.pad_id, words.vocab_size, words.fingerprint]
  assert again.encode(HARD[-1]).tolist() == words.encode(HARD[-1]).tolist()


def test_special_tokens_are_found_in_text_and_decode_to_nothing_with_ids_that_are_no_piece(folder):
  words = tokenizer.load_given(str(folder))
  (a,), (b,) = words.encode("a").tolist(), words.encode("b").tolist()
  assert words.encode("a<|stop|>b").tolist() == [a, 2, b]
  assert words.decode([1, a, 2, b, 0, 400, 10**6, -1]) == "ab"


def test_the_vocabulary_covers_the_largest_id_although_there_are_gaps_below(folder, tmp_path):
  held = json.loads((folder / "tokenizer.json").read_text())
  held["model"]["vocab"]["far"] = 70_000
  (tmp_path / "tokenizer.json").write_text(json.dumps(held))
  words = tokenizer.load_given(str(tmp_path))
  assert (words.vocab_size, words.dtype) == (70_001, np.uint32)
  assert words.decode([500, 70_000, 69_999]) == "far"


@pytest.mark.parametrize("files,bos,eos", [
    ({}, -1, -1),
    ({"tokenizer_config.json": '{"bos_token": null}', "config.json": '{"bos_token_id": 2}'}, -1, -1),
    ({"tokenizer_config.json": '{"model_max_length": 9}', "special_tokens_map.json": NAMES}, 1, 2),
    ({"tokenizer_config.json": '{"bos_token": "<gone>"}', "generation_config.json": '{"bos_token_id": 1}'}, 1, -1),
    ({"generation_config.json": '{"eos_token_id": [1, 0]}', "config.json": '{"eos_token_id": 0, "bos_token_id": 2}'},
     2, 1),
    ({"config.json": '{"bos_token_id": 4000, "eos_token_id": []}'}, -1, -1),
])
def test_bos_and_eos_are_those_that_the_files_beside_it_name(folder, tmp_path, files, bos, eos):
  for name, content in files.items():
    (tmp_path / name).write_text(content)
  (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
  words = tokenizer.load_given(str(tmp_path))
  assert (words.bos_id, words.eos_id, words.pad_id) == (bos, eos, 0)


@pytest.mark.parametrize("tokens,bos,eos", [
    (["<unk>", "<s>", "</s>"], 1, 2), (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 0, 0), (["<|im_end|>"], -1, 0),
    (["<|end_of_text|>", "<|begin_of_text|>"], 1, 0), (["<bos>", "<eos>", "<s>"], 2, 1),
])
def test_bos_and_eos_of_a_file_alone_are_the_usual_ones_it_has(tmp_path, tokens, bos, eos):
  byte_level_bpe("a text", tokens).save(str(tmp_path / "mine.json"))
  words = tokenizer.load_given(str(tmp_path / "mine.json"))
  assert (words.bos_id, words.eos_id) == (bos, eos)


def test_vocabulary_and_merges_make_the_tokenizer_they_were_taken_from(folder, tmp_path):
  byte_level_bpe(Path(__file__).read_text(), ["<|endoftext|>"]).model.save(str(tmp_path))
  words, lone = tokenizer.load_given(str(tmp_path)), tokenizer.load_given(str(tmp_path / "vocab.json"))
  whole = byte_level_bpe(Path(__file__).read_text(), ["<|endoftext|>"])
  assert (words.kind, words.fingerprint, words.vocab_size) == ("huggingface", lone.fingerprint, 400)
  assert (words.bos_id, words.eos_id) == (0, 0)
  for text in [*HARD, "a<|endoftext|>b"]:
    assert words.encode(text).tolist() == whole.encode(text).ids
    assert words.decode(words.encode(text)) == text.replace("<|endoftext|>", "")

  (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
  assert tokenizer.load_given(str(tmp_path)).fingerprint != words.fingerprint, "tokenizer.json goes first"


def test_a_folder_with_a_sentencepiece_model_gives_that(trained, tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(trained.model)
  (tmp_path / "vocab.json").write_text("{}")
  words = tokenizer.load_given(str(tmp_path))
  assert (words.kind, words.fingerprint) == ("sentencepiece", trained.fingerprint)


@pytest.mark.parametrize("files,message", [
    ({}, "holds no tokenizer.json, tokenizer.model or vocab.json"),
    ({"tokenizer.json": "{}"}, "is no tokenizer of Hugging Face or damaged .Model missing"),
    ({"tokenizer.json": '{"model": {"type":'}, r"tokenizer\.json: is no tokenizer of Hugging Face or damaged"),
    ({"tokenizer.json": b"\xff\xfe\n\0"}, "is no tokenizer of Hugging Face or damaged"),
    ({"tokenizer.json": "[]"}, "no JSON object"),
    ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'}, "no tokens"),
    ({"tokenizer.json": '{"model": {"type": "New", "vocab": {}}}'}, "is no tokenizer of Hugging Face or damaged"),
    ({"tokenizer.json": '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}'}, "Missing .UNK"),
    ({"tokenizer.json": '{"model": {"type": "Unigram", "vocab": [["a", -1.0]]}}'}, "`unk_id` is missing"),
    ({"tokenizer.model": ""}, r"tokenizer\.model is no SentencePiece model"),
    ({"tokenizer.model": "IQ== 0\nIg== 1\n"}, "Give one, or a tokenizer.json, which Llama 3 has too"),
    ({"vocab.json": '{"a": 0}'}, r"merges\.txt cannot be read \(No such file"),
    ({"vocab.json": '{"a": 0}', "merges.txt": "a b\n"}, "damaged .*out of vocabulary"),
    ({"vocab.json": '{"a": 0}', "merges.txt": "a\n"}, "is no tokenizer of Hugging Face or damaged"),
    ({"vocab.json": '{"a": "b"}', "merges.txt": ""}, "is no tokenizer of Hugging Face or damaged"),
    ({"vocab.json": '{"a": 0}', "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}'},
     "belongs to Qwen2Tokenizer, which does not split text as GPT-2 does"),
    ({"vocab.json": '{"a": 0}', "merges.txt": "", "config.json": "{,"}, r"config\.json: .* damaged"),
])
def test_a_folder_without_a_usable_tokenizer_is_explained_in_one_line(tmp_path, files, message):
  for name, content in files.items():
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(ConfigError, match=message) as error:
    tokenizer.load_given(str(tmp_path))
  assert str(error.value).startswith(f"tokenizer_path={tmp_path}") and "\n" not in str(error.value)


@pytest.mark.parametrize("error,message", [
    (OSError("Forbidden: bucket/o\nno"), "OSError Forbidden: bucket/o"),
    (FileNotFoundError("bucket/vocab.json"), "FileNotFoundError bucket/vocab.json"),
    (ImportError("Please install gcsfs"), "ImportError Please install gcsfs"),
])
def test_a_bucket_that_refuses_is_explained_in_one_line(monkeypatch, error, message):
  def refuse(_):
    raise error

  monkeypatch.setattr(type(tokenizer.epath.Path("gs://bucket/vocab.json")), "is_dir", refuse)
  with pytest.raises(ConfigError) as raised:
    tokenizer.load_given("gs://bucket/vocab.json")
  assert str(raised.value) == ("tokenizer_path=gs://bucket/vocab.json: gs://bucket/vocab.json cannot be read "
                               f"({message}). Check the path.")


def llama_like(path):
  """A tokenizer.json at `path` as Llama 2 has it: spaces as U+2581, one put in front, bytes as pieces."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers

  pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), tokenizer.SPACE, *"abcdefx", "ab"]
  made = Tokenizer(models.BPE(
      vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("a", "b")], unk_token="<unk>", byte_fallback=True))
  made.add_special_tokens(pieces[:3])
  made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=tokenizer.SPACE, prepend_scheme="first", split=False)
  made.decoder = decoders.Sequence([
      decoders.Replace(tokenizer.SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
  made.save(str(path))
  return tokenizer.load_given(str(path))


def test_a_llama_like_tokenizer_json_gives_bytes_for_rare_characters(tmp_path):
  words = llama_like(tmp_path / "tokenizer.json")
  assert (words.bos_id, words.eos_id, words.vocab_size) == (1, 2, 268)
  assert words.encode("ab e\u00e9").tolist() == [259, 267, 259, 264, 3 + 0xc3, 3 + 0xa9]
  assert words.decode([1, 259, 267, 259, 264, 3 + 0xc3, 3 + 0xa9, 2]) == "ab e\u00e9"


def test_decoding_fewer_ids_gives_the_beginning_of_the_text_up_to_half_a_character(trained, folder, tmp_path):
  kinds = [trained, tokenizer.Byte(), tokenizer.load_given(str(folder)), tokenizer.SentencePiece(trained.model)]
  kinds += [llama_like(tmp_path / "tokenizer.json")]
  kinds += [tokenizer.load_given(str(path)) for path in (SHARED / "tok" / "mistral-v1.model", SHARED / "tok" / "gpt2")
            if path.exists()]
  for words in kinds:
    for text in [text for text in HARD if "\ufffd" not in text and len(text) < 300]:
      ids = words.encode(text)
      for end in range(len(ids)):
        begin = words.decode(ids[:end])
        assert words.decode(ids).startswith(begin.rstrip("\ufffd")), (words.kind, text, end)


def test_a_corpus_is_kept_with_its_hugging_face_tokenizer(folder, tmp_path):
  words = tokenizer.load_given(str(folder))
  tokens = np.concatenate(words.encode_documents(["one text", "another"]))
  manifest = {"format": corpus.FORMAT, "tokenizer": words.kind, "dtype": words.dtype.str, "sha256": {}}
  corpus.Corpus(manifest, tokens, np.array([0, len(tokens)], "<i8"), words).write(tmp_path)
  for name in ("tokens", "offsets", "tokenizer.model"):
    manifest["sha256"][name] = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
  (tmp_path / "manifest.json").write_text(json.dumps(manifest))
  again = corpus.Corpus.read(tmp_path)
  assert again.tokenizer.decode(again.tokens) == "one textanother"
  assert (again.tokenizer.eos_id, again.tokenizer.fingerprint) == (2, words.fingerprint)


@pytest.mark.skipif(not (SHARED / "tok" / "gpt2").exists(), reason="../shared/data/tok/gpt2 is absent")
def test_gpt2_gives_the_ids_that_others_give():
  words = tokenizer.load_given(str(SHARED / "tok" / "gpt2"))
  assert (words.vocab_size, words.bos_id, words.eos_id, words.dtype) == (50257, 50256, 50256, np.uint16)
  # As transformers 5.23 encodes them; on 3.5 million characters it gave the same 1,200,399 ids.
  for text, ids in (("Hello world", [15496, 995]), ("a<|endoftext|>b", [64, 50256, 65]),
                    ("I don't  know\n\n3141", [40, 836, 470, 220, 760, 198, 198, 18, 23756])):  # fmt: skip
    assert words.encode(text).tolist() == ids
  for text in HARD:
    assert words.decode(words.encode(text)) == text


@pytest.mark.skipif(not (SHARED / "tok" / "torchtitan_test_tokenizer.json").exists(),
                    reason="../shared/data/tok/torchtitan_test_tokenizer.json is absent")
def test_a_tokenizer_json_encodes_as_its_library_does(library):
  import tokenizers

  path = str(SHARED / "tok" / "torchtitan_test_tokenizer.json")
  words, oracle = tokenizer.load_given(path), tokenizers.Tokenizer.from_file(path)
  assert (words.vocab_size, words.bos_id, words.eos_id) == (2020, -1, -1)
  for text, ids in zip(HARD + library[:20], words.encode_documents(HARD + library[:20]), strict=True):
    assert ids.tolist() == oracle.encode(text, add_special_tokens=False).ids
    assert words.decode(ids) == oracle.decode(ids.tolist())  # not the text: the vocabulary has no space
