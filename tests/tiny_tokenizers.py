"""Small tokenizers of different kinds, with the tokens of the named chat templates where asked."""

from functools import cache
from string import ascii_letters

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example

TEXTS = [
    "Where is the lamp? It is in the hall. Human: Assistant: System: user assistant system",
    "Café ☕ and naïve 😀 emoji, line\nbreaks\n\nand   spaces.",
] * 4
MARKERS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class Letters(PreTrainedTokenizer):
    """A tokenizer without a Rust backend: one token per character."""

    model_input_names = ["input_ids"]  # noqa: RUF012

    def __init__(self, **settings):
        self.letters = {
            letter: number
            for number, letter in enumerate(
                sorted(set("".join(TEXTS)) | set(f"<|>_{ascii_letters}"))
            )
        }
        super().__init__(**settings)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return self.letters | self.added_tokens_encoder

    def _tokenize(self, text, **settings):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.get(token, 0)

    def _convert_id_to_token(self, index):
        return sorted(self.letters)[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def _bytes() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(TEXTS, trainer)
    return found


def _pieces(first_only: bool) -> Tokenizer:
    """As Llama: a space before the text ("first", new tokenizers) or before every part between
    special tokens."""
    found = Tokenizer(models.BPE(unk_token="<unk>"))
    # no token has an inner space
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    special = ["<unk>", "<s>", "</s>"]
    found.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    )
    if first_only:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        found.pre_tokenizer = None
        found.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return found


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt, answer, tools=None) -> list[int]:
    """Token ids of an answer to a text or chat messages."""
    return encode_example(tokenizer, Example(prompt, [answer], tools=tools)).answers[0]


KINDS = (
    "bytes",
    "bytes without markers",
    "bytes with BOS",
    "pieces",
    "pieces, space everywhere",
    "letters",
)


@cache
def _backend(kind: str) -> str:
    return (_bytes() if kind.startswith("bytes") else _pieces(kind == "pieces")).to_str()


def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    """A new tokenizer of one of `KINDS`, without a chat template. Those of pieces put BOS before
    plain text."""
    markers = [] if kind == "bytes without markers" else list(MARKERS)
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "additional_special_tokens": markers,
    }
    if kind == "letters":
        return Letters(**names)
    backend = Tokenizer.from_str(_backend(kind))
    if kind == "bytes with BOS" or kind.startswith("pieces"):
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names
    )
