"""Rows of the shape that data sets have, one set for each form, and what each use reads in them."""

from typing import Any

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.examples import Example
from dschat_ppo.data.form_choice import detect_form
from dschat_ppo.data.forms import Form


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def form_of(
    rows: list[dict],
    has_template: bool = True,
    name: str = "d.jsonl",
    paths: int = 1,
    use: str | None = None,
    **flags: Any,
) -> Form:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    filled = [{column: row.get(column) for column in columns} for row in rows]
    settings = DataFlags(data_path=[name, *["other"] * (paths - 1)], **flags)
    return detect_form(name, columns, filled, has_template, settings, paths == 1, use)


def read(rows: list[dict], use: str, **settings: Any) -> list[Example]:
    """The examples of all rows by the form that is detected."""
    form = form_of(rows, use=use, **settings)
    return [example for row in rows for example in form.read(row, use)]


ASK = user("Where is the lamp?")
HALL, ROOF = assistant("In the hall."), assistant("On the roof.")
HH = "\n\nHuman: Where is the lamp?\n\nAssistant: Which one?\n\nHuman: The red one.\n\nAssistant:"
GSM = "48 / 2 = 24 clips.\n#### 24"
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"thing": "lamp"}}}


class Fixture:
    """Rows of one form; the examples that SFT, preference and PPO read (None: the form does not
    serve the use)."""

    def __init__(
        self,
        form: str,
        rendering: str,
        rows: list[dict],
        sft: list[Example] | None,
        preference: list[Example] | None,
        prompt: list[Example] | None,
        has_template: bool = True,
    ):
        self.form, self.rendering, self.rows, self.has_template = (
            form,
            rendering,
            rows,
            has_template,
        )
        self.expected = {"sft": sft, "preference": preference, "prompt": prompt}


def pair(
    prompt: Any, chosen: Any, rejected: Any, **keys: Any
) -> tuple[list[Example], list[Example], list[Example]]:
    """SFT, preference and PPO examples of one row with a pair."""
    answers = ([chosen], [chosen, rejected], [])
    sft, preference, asked = ([Example(prompt, some, **keys)] for some in answers)
    return sft, preference, asked


def single(prompt: Any, answer: Any, **keys: Any) -> tuple[list[Example], None, list[Example]]:
    """SFT, preference and PPO examples of one row with one answer."""
    return [Example(prompt, [answer], **keys)], None, [Example(prompt, [], **keys)]


ALPACA = {"instruction": "Name the colour.", "input": "a lemon", "output": "Yellow."}
ALPACA_TEXT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.\n\n### Instruction:\nName"
    " the colour.\n\n### Input:\na lemon\n\n### Response:\n"
)
FIXTURES = {
    "prompt/completion": Fixture(
        "prompt_response",
        "text",
        [{"prompt": "The sky is", "completion": " blue."}],
        *single("The sky is", " blue."),
    ),
    "prompt/response": Fixture(
        "prompt_response",
        "text",
        [{"prompt": "2+2=", "response": "4", "id": 7}],
        *single("2+2=", "4"),
    ),
    "prompt alone": Fixture(
        "prompt_response", "text", [{"prompt": "a b"}], None, None, [Example("a b", [])]
    ),
    "prompt/completion as messages": Fixture(
        "prompt_response",
        "chat",
        [{"prompt": [ASK], "completion": [HALL]}],
        *single([ASK], "In the hall."),
    ),
    "messages": Fixture(
        "messages",
        "chat",
        [{"messages": [system("Be kind."), ASK, HALL], "source": "x"}],
        *single([system("Be kind."), ASK], "In the hall."),
    ),
    "messages without an answer": Fixture(
        "messages",
        "chat",
        [{"messages": [ASK]}, {"messages": [ASK, HALL, ASK]}],
        None,
        None,
        [Example([ASK], []), Example([ASK, HALL, ASK], [])],
    ),
    "preference": Fixture(
        "preference",
        "text",
        [{"prompt": "Q: a\nA:", "chosen": " yes", "rejected": " no", "margin": 2}],
        *pair("Q: a\nA:", " yes", " no", margin=2.0),
    ),
    "preference as messages (TRL)": Fixture(
        "preference",
        "chat",
        [{"prompt": [ASK], "chosen": [HALL], "rejected": [ROOF]}],
        *pair([ASK], "In the hall.", "On the roof."),
    ),
    "binarized UltraFeedback": Fixture(
        "preference",
        "chat",
        [
            {
                "prompt": ASK["content"],
                "prompt_id": "f0",
                "chosen": [ASK, HALL],
                "rejected": [ASK, ROOF],
                "messages": [ASK, HALL],
                "score_chosen": 8.5,
                "score_rejected": 2.0,
            }
        ],
        *pair([ASK], "In the hall.", "On the roof."),
    ),
    "implicit preference as messages": Fixture(
        "implicit_preference",
        "chat",
        [
            {
                "chosen": [ASK, ROOF, user("Sure?"), HALL],
                "rejected": [ASK, ROOF, user("Sure?"), assistant("Yes.")],
            }
        ],
        *pair([ASK, ROOF, user("Sure?")], "In the hall.", "Yes."),
    ),
    "implicit preference as text": Fixture(
        "implicit_preference",
        "text",
        [{"chosen": "The sky is blue.", "rejected": "The sky is green."}],
        *pair("The sky is", " blue.", " green."),
    ),
    "ShareGPT": Fixture(
        "sharegpt",
        "chat",
        [
            {
                "id": "1",
                "system": "Be kind.",
                "conversations": [
                    {"from": "human", "value": "Where?"},
                    {"from": "gpt", "value": "Here."},
                    {"from": "human", "value": "Sure?"},
                    {"from": "gpt", "value": "Yes."},
                ],
            }
        ],
        *single([system("Be kind."), user("Where?"), assistant("Here."), user("Sure?")], "Yes."),
    ),
    "ShareGPT with role and content": Fixture(
        "sharegpt", "chat", [{"conversations": [ASK, HALL]}], *single([ASK], "In the hall.")
    ),
    "ShareGPT with a tool": Fixture(
        "sharegpt",
        "chat",
        [
            {
                "tools": (
                    '[{"type": "function", "function": {"name": "find", "parameters": {"type":'
                    ' "object", "properties": {}}}}]'
                ),
                "conversations": [
                    {"from": "human", "value": "Where?"},
                    {
                        "from": "function_call",
                        "value": '{"name": "find", "arguments": {"thing": "lamp"}}',
                    },
                    {"from": "observation", "value": "hall"},
                    {"from": "gpt", "value": "In the hall."},
                ],
            }
        ],
        *single(
            [user("Where?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "hall"}],
            "In the hall.",
            tools=[TOOL],
        ),
    ),
    "ShareGPT preference": Fixture(
        "sharegpt",
        "chat",
        [
            {
                "conversations": [{"from": "human", "value": "Where?"}],
                "chosen": {"from": "gpt", "value": "Here."},
                "rejected": {"from": "gpt", "value": "There."},
            }
        ],
        *pair([user("Where?")], "Here.", "There."),
    ),
    "Alpaca": Fixture(
        "alpaca",
        "chat",
        [ALPACA, {"instruction": "Sing.", "input": "", "output": "La."}],
        [
            Example([user("Name the colour.\n\na lemon")], ["Yellow."]),
            Example([user("Sing.")], ["La."]),
        ],
        None,
        [Example([user("Name the colour.\n\na lemon")], []), Example([user("Sing.")], [])],
    ),
    "Alpaca without a chat template": Fixture(
        "alpaca", "text", [ALPACA], *single(ALPACA_TEXT, "Yellow."), has_template=False
    ),
    "Alpaca with its text": Fixture(
        "alpaca",
        "chat",
        [{**ALPACA, "text": ALPACA_TEXT + "Yellow."}],
        *single([user("Name the colour.\n\na lemon")], "Yellow."),
    ),
    "Alpaca of LLaMA-Factory": Fixture(
        "alpaca",
        "chat",
        [
            {
                **ALPACA,
                "input": None,
                "system": "Be brief.",
                "history": [["Hello", "Hi."], ["Well?", "Well."]],
            }
        ],
        *single(
            [
                system("Be brief."),
                user("Hello"),
                assistant("Hi."),
                user("Well?"),
                assistant("Well."),
                user("Name the colour."),
            ],
            "Yellow.",
        ),
    ),
    "Alpaca preference": Fixture(
        "alpaca",
        "chat",
        [{"instruction": "Sing.", "input": "", "chosen": "La.", "rejected": "No."}],
        *pair([user("Sing.")], "La.", "No."),
    ),
    "Anthropic HH": Fixture(
        "hh",
        "text",
        [{"chosen": f"{HH} In the hall.", "rejected": f"{HH} Find it yourself."}],
        *pair(HH, " In the hall.", " Find it yourself."),
    ),
    "HH transcripts in one column": Fixture(
        "hh", "text", [{"text": f"{HH} In the hall."}], *single(HH, " In the hall.")
    ),
    "ranked texts with scores": Fixture(
        "ranked",
        "text",
        [{"prompt": "Q:", "responses": ["a", "b", "c"], "scores": [1, 3.5, 1]}],
        [Example("Q:", ["b"])],
        [
            Example("Q:", ["b", "a"], suffix=", answer 2 and answer 1"),
            Example("Q:", ["b", "c"], suffix=", answer 2 and answer 3"),
        ],
        [Example("Q:", [])],
    ),
    "ranked answers with ranks (Nectar)": Fixture(
        "ranked",
        "text",
        [
            {
                "prompt": "\n\nHuman: Q \n\nAssistant: ",
                "answers": [
                    {"answer": "worst", "model": "m", "rank": 3.0},
                    {"answer": "best", "model": "n", "rank": 1.0},
                    {"answer": "fair", "model": "o", "rank": 2.0},
                ],
            }
        ],
        [Example("\n\nHuman: Q \n\nAssistant: ", ["best"])],
        [
            Example("\n\nHuman: Q \n\nAssistant: ", [better, worse], suffix=suffix)
            for better, worse, suffix in (
                ("best", "fair", ", answer 2 and answer 3"),
                ("best", "worst", ", answer 2 and answer 1"),
                ("fair", "worst", ", answer 3 and answer 1"),
            )
        ],
        [Example("\n\nHuman: Q \n\nAssistant: ", [])],
    ),
    "question/answer (GSM8K)": Fixture(
        "question_answer",
        "chat",
        [{"question": "How many clips?", "answer": GSM}],
        *single([user("How many clips?")], GSM, truth="24"),
    ),
    "question/answer without a chat template": Fixture(
        "question_answer",
        "text",
        [{"question": "How many?", "answer": "24"}],
        *single("How many?", "24", truth="24"),
        has_template=False,
    ),
    "verl": Fixture(
        "verl",
        "chat",
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": [ASK],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "72"},
                "extra_info": {"index": 0, "split": "train"},
            }
        ],
        None,
        None,
        [Example([ASK], [], truth="72")],
    ),
    "verl with an answer": Fixture(
        "verl",
        "chat",
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": [ASK],
                "reward_model": {"ground_truth": "72"},
                "extra_info": {"index": 0, "answer": "It is 72."},
            }
        ],
        *single([ASK], "It is 72.", truth="72"),
    ),
    "plain text": Fixture(
        "text",
        "text",
        [{"text": "Once upon a time."}],
        [Example("", ["Once upon a time."])],
        None,
        None,
    ),
    "text parts, tool calls and keys that Arrow adds": Fixture(
        "messages",
        "chat",
        [
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "Where "},
                            {"type": "text", "text": "is it?"},
                        ],
                        "tool_calls": None,
                        "name": None,
                    },
                    {
                        "role": "assistant",
                        "content": None,
                        "name": None,
                        "tool_calls": [
                            {
                                "id": None,
                                "type": "function",
                                "function": {"name": "find", "arguments": '{"thing": "lamp"}'},
                            }
                        ],
                    },
                    {
                        "role": "tool",
                        "content": "hall",
                        "name": "find",
                        "tool_call_id": "c1",
                        "tool_calls": None,
                    },
                    {
                        "role": "assistant",
                        "content": "In the hall.",
                        "reasoning_content": "So.",
                        "tool_calls": None,
                    },
                ],
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "find",
                            "strict": None,
                            "parameters": {"type": "object", "properties": {}},
                        },
                    }
                ],
            }
        ],
        *single(
            [
                user("Where is it?"),
                assistant("", tool_calls=[CALL]),
                {"role": "tool", "content": "hall", "name": "find", "tool_call_id": "c1"},
            ],
            assistant("In the hall.", reasoning_content="So."),
            tools=[TOOL],
        ),
    ),
}
KTO = [
    {"prompt": "Q1:", "completion": " good", "label": True},
    {"prompt": "Q2:", "completion": " fine", "label": True},
    {"prompt": "Q1:", "completion": " bad", "label": False},
    {"prompt": "Q1:", "completion": " worse", "label": False},
    {"prompt": "Q2:", "completion": " best", "label": True},
]
