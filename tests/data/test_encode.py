"""Batched encoding equals encoding one by one, and both equal the rendered conversation, on many tokenizers."""

import random
from functools import lru_cache

import pytest
from tiny_tokenizers import KINDS, encode_answer, tokenizer_of
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dschat_ppo.data import encode
from dschat_ppo.data.encode import encode_example, encode_finished, encode_prompt
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import NAMED, named_template, render, turn_end
from dschat_ppo.errors import UserError
from dschat_ppo.tools import addition

WORDS = [
    "Where", " lamp", "hall.", "\n", "\n\n", "  ", " ", "😀", "é", "☕", "Human:", " Assistant:", "<|im_end|>",
    "<|eot_id|>", "</s>", "<|im_start|>", "<|user|>", "user", ":",
]  # fmt: skip
EACH = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    **dict.fromkeys(NAMED),
    "BOS by the template": "<s>" + EACH + OPENED,
    "space before answers": (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role != 'assistant' else ' ' + m.content + "
        "'</s>' }}{% endfor %}"
    ),
    "opening ends with a token": EACH + "{% if add_generation_prompt %}<|im_start|>{% endif %}",
    "no marker": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
}
CASES = [(kind, name) for kind in KINDS for name in TEMPLATES]


def chat_tokenizer(kind: str, name: str):
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = TEMPLATES[name] or named_template(name, tokenizer)
    return tokenizer


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 7)))


def random_chat(rng: random.Random) -> list[dict]:
    roles = rng.choice(
        (["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"])
    )
    return [{"role": role, "content": random_text(rng)} for role in roles]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_prompt_and_answer_equal_the_rendered_conversation(kind, name):
    """Unless a token would span the end of the prompt: in step 3 the prompt ends there."""
    tokenizer, equal = chat_tokenizer(kind, name), 0
    end = turn_end(tokenizer)
    rng = random.Random(1)
    for _ in range(20):
        chat, answer = random_chat(rng), f"{random_text(rng)}lamp{rng.choice(('', ' ', '😀'))}"
        prompt = encode_prompt(tokenizer, chat)
        found = prompt + encode_answer(tokenizer, chat, answer)
        text = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": answer}], tokenize=False)
        whole = tokenizer.encode(text.removesuffix(end.dropped), add_special_tokens=False)
        whole += [end.token] * (not end.kept)
        equal += found == whole
        assert found == whole or whole[: len(prompt)] != prompt or name == "opening ends with a token"
    assert equal > 10 or name == "opening ends with a token"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_bos_and_the_final_token_occur_once(kind, name):
    tokenizer = chat_tokenizer(kind, name)
    has_bos = tokenizer.encode("a")[0] == tokenizer.bos_token_id
    for prompt in ("Where?", "<s>Where?", [{"role": "user", "content": "Where?"}]):
        ids = encode_prompt(tokenizer, prompt)
        is_chat = isinstance(prompt, list)
        expected = has_bos if is_chat and name in NAMED else name.startswith("BOS") if is_chat else None
        count = int(has_bos or prompt.startswith("<s>")) if expected is None else int(expected)
        assert ids.count(tokenizer.bos_token_id) == count
        for answer in ("lamp", "lamp</s>", ""):
            found = encode_answer(tokenizer, prompt, answer)
            end = turn_end(tokenizer).token if is_chat else tokenizer.eos_token_id
            assert (found.count(end), found[-1]) == (1, end)
            assert tokenizer.bos_token_id not in found


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_reward_server_reads_the_same_ids_as_training(kind, name):
    tokenizer = chat_tokenizer(kind, name)
    for prompt in ("Where is it?", [{"role": "user", "content": "Where is it?"}]):
        answer = encode_answer(tokenizer, prompt, "lamp")
        text = prompt if isinstance(prompt, str) else render(tokenizer, prompt, open_answer=True)
        whole = encode_finished(tokenizer, f"{text}{tokenizer.decode(answer[:-1]).removeprefix(' ')}")
        if name in ("chatml", "zephyr") and kind.startswith("bytes"):
            assert whole == encode_prompt(tokenizer, prompt) + answer
        assert whole.count(tokenizer.bos_token_id) <= 1


def test_an_answer_whose_first_token_would_span_the_end_of_the_prompt_is_encoded_alone():
    backend = Tokenizer(models.BPE({"a": 0, "\n": 1, "\n\n": 2, ":": 3}, [("\n", "\n")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ':\\n' }}"
    found = encode_example(tokenizer, Example([{"role": "user", "content": "a"}], ["\na"]))
    assert (found.prompt, found.answers) == ([0, 3, 1], [[1, 0, tokenizer.eos_token_id]])


@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A </s>"])
def test_what_a_tokenizer_adds_to_every_text_is_no_part_of_answers(single):
    tokenizer = tokenizer_of("bytes")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single, special_tokens=[("<s>", 1), ("</s>", 2)])
    for answer in ("In the hall.", "In the hall.</s>", "In the hall.</s></s>"):
        ids = encode_answer(tokenizer, "Where?", answer)
        assert (tokenizer.decode(ids[:-1]), ids[-1], ids.count(2), ids.count(1)) == ("In the hall.", 2, 1, 0)
    assert 2 not in encode_prompt(tokenizer, "Where is it?")
    assert encode_finished(tokenizer, "Where?</s>") == [*encode_prompt(tokenizer, "Where?"), 2]


# Work


class Counting:
    """Counts the renderings of a tokenizer, and the characters that it encodes."""

    def __init__(self, tokenizer, monkeypatch):
        self.characters = self.renderings = 0
        encode_text, render = encode._encode.__wrapped__, type(tokenizer).apply_chat_template

        def count(tokenizer, text, *others):
            self.characters += len(text)
            return encode_text(tokenizer, text, *others)

        def rendering(tokenizer, *others, **settings):
            self.renderings += 1
            return render(tokenizer, *others, **settings)

        monkeypatch.setattr(encode, "_encode", lru_cache(8)(count))
        monkeypatch.setattr(type(tokenizer), "apply_chat_template", rendering)


def test_prompts_are_encoded_and_rendered_once(monkeypatch):
    tokenizer = chat_tokenizer("bytes", "chatml")
    turn_end(tokenizer)
    encode_prompt(tokenizer, "a prompt")
    counting = Counting(tokenizer, monkeypatch)
    chats = [[{"role": "user", "content": f"{number} " * 500}] for number in range(8)]
    for chat in chats:
        encode_example(tokenizer, Example(chat, ["lamp", "hall"]))
    assert counting.renderings == 3 * 8
    assert counting.characters < 8 * (1000 + 300)  # for each answer the end of the prompt too
    counting.characters = 0
    pairs = [(" one", " two"), (" one", " three"), (" two", " three")]  # of one ranked list
    for pair in pairs:
        encode_example(tokenizer, Example("lamp " * 99, pair))
    assert counting.characters == len("lamp " * 99 + " one two three")


def test_a_fast_tokenizer_that_encodes_in_its_own_way_is_called():
    class Lower(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **more):
            return super()._encode_plus(text.lower(), **more)

    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer = Lower(tokenizer_object=backend, eos_token="</s>")
    assert encode_prompt(tokenizer, "aB") == [0, 1]


def test_a_row_of_200_000_characters_is_encoded():
    tokenizer = chat_tokenizer("bytes", "chatml")
    ask = [{"role": "user", "content": "one lamp " * 22_222}]
    found = encode_example(tokenizer, Example(ask, ["yes " * 50_000]))
    assert found.prompt == encode_prompt(tokenizer, ask) and len(found.prompt) > 50_000
    assert tokenizer.decode(found.answers[0]) == "yes " * 50_000 + "<|im_end|>"


def test_a_vocabulary_of_a_few_characters_encodes_its_rows():
    tokenizer = addition.make_tokenizer()  # rejects line breaks and letters
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("\n")
    example = encode_example(tokenizer, Example("93+21=", ["411"]))
    ids = tokenizer.convert_tokens_to_ids
    assert example.prompt == ids(list("93+21=")) and example.answers == [[*ids(list("411")), tokenizer.eos_token_id]]
    assert encode_answer(tokenizer, "93+21=", "411") == example.answers[0]


# What cannot be encoded


@pytest.mark.parametrize(
    "example",
    [
        Example("half a pair: \ud83d", ["lamp"]),
        Example("Where?", ["\ud83d"]),
        Example([{"role": "user", "content": "\ud83d"}], ["lamp"]),
    ],
)
def test_a_text_that_the_tokenizer_rejects(example):
    with pytest.raises(UserError, match="^the tokenizer rejects this text"):
        encode_example(chat_tokenizer("bytes", "chatml"), example)


def test_messages_without_a_template():
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(tokenizer_of("bytes"), [{"role": "user", "content": "Where?"}])


def test_a_role_that_the_template_rejects():
    with pytest.raises(UserError, match="no form for the role 'tool'"):
        encode_example(chat_tokenizer("bytes", "chatml"), Example([{"role": "tool", "content": "4"}], []))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [" In the hall.", "lamp", "  two", "\nA line.", "\n\nHuman"])
def test_a_text_answer_continues_its_prompt_character_for_character(kind, answer):
    tokenizer = tokenizer_of(kind)
    for prompt in ("Where is it? Answer:", "Where is it? Answer: "):
        found = encode_example(tokenizer, Example(prompt, [answer]))
        text = tokenizer.decode([*found.prompt, *found.answers[0]], skip_special_tokens=True)
        assert text == tokenizer.decode(tokenizer.encode(prompt + answer), skip_special_tokens=True)


def test_a_text_of_more_than_16_mib_is_refused(monkeypatch):
    tokenizer = tokenizer_of("bytes")
    for text in ("a" * (2**24 + 1), "é" * 2**23 + "a"):
        with pytest.raises(UserError, match=f"^a text of {len(text):,} characters is too long for the tokenizer"):
            encode_prompt(tokenizer, text)
    monkeypatch.setattr(encode, "MOST_BYTES", 10)
    assert encode_prompt(tokenizer, "é" * 5)
    with pytest.raises(UserError, match="too long for the tokenizer"):
        encode_prompt(tokenizer, "é" * 5 + "a")
