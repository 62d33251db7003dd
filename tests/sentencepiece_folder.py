"""`python tests/sentencepiece_folder.py FOLDER`: write a small Llama tokenizer with its
SentencePiece file. The package sentencepiece must be importable."""

import json
import sys
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer, LlamaConfig

folder = Path(sys.argv[1])
folder.mkdir()
(folder / "text").write_text("Where is the lamp? It is in the hall.\nuser assistant system\n" * 20)
sentencepiece.SentencePieceTrainer.train(
    input=str(folder / "text"),
    model_prefix=str(folder / "tokenizer"),
    vocab_size=310,
    model_type="bpe",
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
)
settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
(folder / "tokenizer_config.json").write_text(
    json.dumps({"tokenizer_class": "LlamaTokenizer", **settings})
)
LlamaConfig().save_pretrained(folder)  # names the class of the tokenizer
AutoTokenizer.from_pretrained(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))
