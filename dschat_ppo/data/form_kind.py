"""What a form of data sets is; `form_kinds.py` has the table of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.cells import Cells, PromptAndAnswers


@dataclass(frozen=True)
class Kind:
    """One form. Names are separated by spaces."""

    name: str
    roles: dict[str, str]  # role -> names of columns that have it; the first one that exists counts
    # (uses, roles that must be there); "preference" serves "unpaired" too
    needs: tuple[tuple[str, str], ...]
    read: Callable[[Cells, Use], PromptAndAnswers]
    # column flags may name columns of all its roles; `--data_format` allows it of any form
    by_flag: bool = False
    # "as given" (text prompts stay text, messages are chat), "chat", "text", or "chat if possible"
    # (if there is a template)
    rendering: str = "as given"
    # the prompt is part of a longer text, so that `--input_template` does not apply
    inside: bool = False
    labelled: bool = False  # each answer is good or bad by itself, so that SFT takes all good ones
    alone: bool = False  # it also holds prompts alone
    signs: tuple[str, ...] = ()  # roles by which the form is known, and which hold no content
    is_known_set: bool = False  # a data set of DeepSpeed-Chat

    def choices(self) -> list[tuple[Use, set[str]]]:
        """Each use with a set of roles by which it is served."""
        return [(use, set(roles.split())) for uses, roles in self.needs for use in uses.split()]

    def uses(self, columns: dict[str, str]) -> tuple[Use, ...]:
        """The uses that these roles serve."""
        uses = dict[Use, None]()
        for use, roles in self.choices():
            if roles <= set(columns):
                uses[use] = None
        if "preference" in uses:
            uses["unpaired"] = None
        return tuple(uses)
