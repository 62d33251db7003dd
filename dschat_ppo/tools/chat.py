"""Chat with a model in the terminal, or with two models to compare them.

    python -m dschat_ppo.tools.chat --model A [--compare B]

/help lists the commands. A and B are model folders or hub names. Messages are rendered with the
chat template of the tokenizer; without one, or with --apply_chat_template False for a model of text
prompts, the texts of the conversation are joined as they are, and the model continues them. If
input or output is not a terminal, each line of the input is a message and answers are plain lines.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from dschat_ppo.common.exit_codes import DONE
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.feature_flags import (
    FeatureFlags,
    described_features,
    feature_groups,
    flags_without_effect,
)
from dschat_ppo.config.flag_parser import FlagParser, add_groups, values_of
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.tools import exit_code_of
from dschat_ppo.tools.sampling_settings import (
    SamplingSettings,
    add_sampling_flags,
    feature_flags_of,
    sampling_settings_of,
)


def chat_parser() -> FlagParser:
    """The parser of the command line."""
    parser = FlagParser(
        prog="python -m dschat_ppo.tools.chat",
        description=f"{__doc__}{described_features('chat')}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    idle = flags_without_effect("chat")
    parser.advice = lambda name: idle.get(name, "")
    parser.add_argument("--model", required=True, metavar="A", help="folder or hub name of a model")
    parser.add_argument(
        "--compare", metavar="B", help="a second model, which answers the same messages"
    )
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="system message, for the chat template"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="number format of the weights; auto: bf16 on a GPU, the faster of bf16 and fp32 on a"
        " CPU (default: auto)",
    )
    parser.add_argument(
        "--apply_chat_template",
        **values_of(bool),
        default=True,
        help="False: join the texts as they are, as in training on prompts that are text; the"
        " tokenizer may have a chat template all the same (default: True)",
    )
    parser.add_argument(
        "--chat_template",
        metavar="NAME",
        help=(
            "a Jinja file or chatml, llama-3, zephyr or human-assistant; not given: the tokenizer's"
        ),
    )
    parser.add_argument(
        "--chat_template_kwargs", metavar="JSON", help="variables for the chat template"
    )
    add_sampling_flags(parser)
    add_groups(parser, feature_groups("chat"), without=idle)
    return parser


def read_arguments(
    argv: Sequence[str],
) -> tuple[argparse.Namespace, SamplingSettings, DataFlags, FeatureFlags]:
    """Parse the command line: the command's own flags, the sampling, the flags of the chat
    template, and those of features."""
    args = chat_parser().parse_args(argv)
    if not args.apply_chat_template:
        for name in ("system", "chat_template", "chat_template_kwargs", "tools"):
            if getattr(args, name, None):
                raise UserError(
                    f"--{name} needs the chat template: omit it, or --apply_chat_template False"
                )
    data = DataFlags(
        ["unused"],
        chat_template=args.chat_template,
        chat_template_kwargs=args.chat_template_kwargs,
    )
    return args, sampling_settings_of(args), data, feature_flags_of(args, "chat")


def chat(
    args: argparse.Namespace,
    settings: SamplingSettings,
    data: DataFlags,
    features: FeatureFlags,
) -> None:
    """Check and load the models, then chat until the input ends; see `read_arguments`."""
    # after the flags are checked: these imports take seconds
    import torch

    # else DeepSpeed searches for a device, and prints a warning to the output
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.planner.number_format import dtype_for_tool
    from dschat_ppo.tools.chat_model import ChatModel, CheckedModel, Terminal, checked_models

    quiet_libraries()
    names = [("--model", args.model)]
    if args.compare:
        names.append(("--compare", args.compare))
    checked = checked_models(names, data, features=features)
    if not args.apply_chat_template:
        checked = [replace(model, is_for_text=True) for model in checked]
    if args.system and any(model.tokenizer.chat_template is None for model in checked):
        raise UserError(
            "--system needs a chat template, but a tokenizer has none; name one with"
            " --chat_template"
        )
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  `input` then has a history and arrow keys

    with ExitStack() as at_end:
        # a model, its number format -> the model as it responds in this chat
        loaders = list[Callable[[CheckedModel, str], ChatModel]]()
        for loader_of in hooks("chat.loader_of"):
            # a feature prepares the chat before a model is loaded, and may load models in its way
            loader = loader_of(features, checked, at_end)
            if loader is not None:
                loaders.append(loader)
        load = (loaders or [ChatModel])[0]
        dtype = dtype_for_tool(args.dtype, [model.folder for model in checked])
        models = [load(model, dtype) for model in checked]
        commands = [
            command for commands_of in hooks("chat.commands_of") for command in commands_of(models)
        ]
        Terminal(models, settings, args.system, interactive, commands).run()


def main(argv: Sequence[str]) -> int:
    try:
        return exit_code_of(lambda: chat(*read_arguments(argv)))
    except KeyboardInterrupt:  # while loading
        print()
        return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
