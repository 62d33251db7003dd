"""A PPO step as one program of plain PyTorch, for the flags of a run.

Each formula is the text of the function that the loop calls, without the branches that the flags
switch off. `step_program.py` reads a record, calls them in the order of the loop, and compares.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import dschat_ppo
from dschat_ppo.algorithms import actor_critic_losses, advantage_estimators, step
from dschat_ppo.common.own_functions import file_named
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.schema import is_own_function
from dschat_ppo.errors import UserError
from dschat_ppo.features.explain import step_program
from dschat_ppo.features.explain.source_texts import (
    Reached,
    import_lines,
    in_order_of_execution,
    names_read,
    package_file,
    replaced_words,
    source_file,
    with_fields,
    without_dead_branches,
    without_details,
)
from dschat_ppo.ppo.advantages import advantage_settings, advantage_terms, early_rewards_of
from dschat_ppo.ppo.loss_terms import loss_terms
from dschat_ppo.ppo.token_losses import loss_settings

HEAD = '''"""A PPO step of dschat_ppo {version}, with the flags

{flags}

and the defaults of all others.

    python FILE RUN/record/step_000001.safetensors

computes a recorded step from its scores to the gradients of log-probs and values, and prints them
beside those of the run. It needs the record of a whole step (--record_steps 1).

Not in it:
{left_out}
"""'''
NEVER_IN_IT = [
    "sampling, scores and forward passes, whose results a record has",
    "losses of the whole optimizer step, such as that of further data (PTX); the optimizer",
]
# what the loop's rows are called -> the rows of the program
ROWS = dict.fromkeys(("ScoredRollout", "RewardedRollout", "Experience"), "Rows")
# classes of settings: module, the name of its constant
SETTINGS = {
    "AdvantageSettings": (step, "ADVANTAGE_SETTINGS"),
    "PolicyLossSettings": (actor_critic_losses, None),
    "LossSettings": (step, "LOSS_SETTINGS"),
    "UpdateSettings": (step_program, "UPDATE_SETTINGS"),
}
WRITTEN = (
    "Rows",
    *SETTINGS,
    "ADVANTAGE_SETTINGS",
    "LOSS_SETTINGS",
    "UPDATE_SETTINGS",
    "FLAGS",
    "LEFT_OUT",
)
FROM_A_RECORD = ("kl_coef", "score_divisor", "source_weights", "entropy_coef")


def algorithm_program(config: PPOConfig) -> str:
    """The program of these flags, as Python.

    Raises:
        UserError: a feature computes token rewards or advantages, or an estimator or a policy loss
            of one's own cannot stand in the program.
    """
    _refuse_features(config)
    constants = _run_constants(config)
    functions = _chosen_functions(config.algorithm)
    reached = Reached(
        transform=lambda name, text: _text_of_run(name, text, constants, functions),
        known=frozenset(WRITTEN),
        placed={function.name_here: (function.name, function.file) for function in functions},
    )
    file = package_file(step_program.__name__)
    reached.add(["experience", "loss_of_actor"], file)
    if config.algorithm.has_critic:
        reached.add(["loss_of_critic"], file)
    reached.add(["main"], file)
    rows = _definition("Rows", step_program.__name__)
    settings = _settings_texts(constants, list(reached.texts.values()))
    for text in [rows, *settings]:
        reached.add_imports_of(text, file)

    head = HEAD.format(
        version=dschat_ppo.__version__,
        flags="\n".join(f"    --{flag} {value}" for flag, value in constants.flags.items()),
        left_out="\n".join(f"- {text}" for text in [*constants.left_out, *NEVER_IN_IT]),
    )
    imports = ["from __future__ import annotations", "", *import_lines(reached.imports)]
    top = "\n".join([head, "", *imports])
    end = 'if __name__ == "__main__":\n    main()'
    plain, functions_and_classes, last = in_order_of_execution(reached.texts)
    sections = [top, rows, *settings, *plain, *functions_and_classes, *last, end]
    return "\n\n\n".join(sections) + "\n"


def _refuse_features(config: PPOConfig) -> None:
    """Raise `UserError` if a feature computes token rewards or advantages."""
    if early_rewards_of(config) is not None:
        raise UserError(
            "the program gives the whole score to the last token: with these flags a feature gives"
            " earlier tokens a part of it"
        )
    if advantage_terms(config):
        raise UserError(
            "the program has no terms of the advantages: with these flags a feature adds one"
        )


@dataclass(frozen=True)
class _Constants:
    """The constants of a run.

    Attributes:
        flags: flag -> value, those that a record must have been written with.
        left_out: terms of the actor's loss that the program does not compute.
        settings: class -> its fields with their values.
        adapting: fields whose values change in the run.
        columns: columns of the rows that are known, with their values.
    """

    flags: dict[str, Any]
    left_out: list[str]
    settings: dict[str, dict[str, Any]]
    adapting: set[str]
    columns: dict[str, Any]


def _run_constants(config: PPOConfig) -> _Constants:
    """The constants of a run's flags."""
    flags = config.algorithm
    given_flags = {}
    for field in fields(AlgorithmFlags):
        value = getattr(flags, field.name)
        if value != field.default or field.name in ("advantage_estimator", "policy_loss"):
            given_flags[field.name] = value
    left_out = []
    for term in loss_terms(config, lambda role: None, None):  # type: ignore[arg-type, return-value]
        if term.metric != "policy/kl_loss" or flags.full_kl_loss:
            left_out.append(f"the term {term.name} of the actor's loss")
    kl_loss_coef = flags.kl_loss_coef
    if flags.full_kl_loss:
        kl_loss_coef = 0.0
    weights = [1.0]  # a record has those of its run
    advantages = advantage_settings(
        flags, config.ppo.max_answer_seq_len, config.score_clip, weights
    )
    losses = loss_settings(flags)
    update = step_program.UpdateSettings(
        has_policy_loss=config.has_policy_loss,
        kl_loss_coef=kl_loss_coef,
        kl_loss_estimator=flags.kl_loss_estimator,
        kl_straight_through=flags.kl_straight_through,
        has_critic=flags.has_critic,
        value_clip_eps=flags.value_clip_eps,
    )
    adapting = set()
    if flags.normalize_rewards == "running":
        adapting.add("score_divisor")
    if flags.entropy_target is not None:
        adapting.add("entropy_coef")
    columns: dict[str, Any] = {}
    if flags.advantage_estimator != "remax":
        columns["baselines"] = None
    return _Constants(
        flags=given_flags,
        left_out=left_out,
        settings={
            "AdvantageSettings": vars(advantages),
            "PolicyLossSettings": vars(losses.policy_loss_settings),
            "LossSettings": vars(losses),
            "UpdateSettings": vars(update),
        },
        adapting=adapting,
        columns=columns,
    )


@dataclass(frozen=True)
class _Function:
    """The estimator or the policy loss: what the loop calls it, the name and file of its
    definition, and its name in the program."""

    in_loop: str
    name: str
    file: Path
    name_here: str


def _chosen_functions(flags: AlgorithmFlags) -> list[_Function]:
    """The estimator and the policy loss of a run."""
    functions = []
    for in_loop, flag, module, name_here in (
        ("settings.estimate", "advantage_estimator", advantage_estimators, "own_estimator"),
        ("settings.policy_loss", "policy_loss", actor_critic_losses, "own_policy_loss"),
    ):
        name = getattr(flags, flag)
        file = package_file(module.__name__)
        if is_own_function(name):
            file = Path(file_named(name))
            name = name.rpartition(":")[2]
            _require_source(f"--{flag} {getattr(flags, flag)}", name, file)
        else:
            name_here = name
        functions.append(_Function(in_loop, name, file, name_here))
    return functions


def _require_source(flag: str, name: str, file: Path) -> None:
    """Raise `UserError` if a function of one's own is not written in its file."""
    module = source_file(file)
    if name not in module.definitions and name not in module.imports:
        raise UserError(
            f"{flag}: its source cannot be read: {file} neither defines nor imports {name} at its"
            " top level"
        )


def _text_of_run(name: str, text: str, constants: _Constants, functions: list[_Function]) -> str:
    """The text of a definition without what the flags of a run switch off, and with the names of
    the estimator and the policy loss."""
    text = replaced_words(text, ROWS)
    [node] = ast.parse(text).body
    if isinstance(node, ast.FunctionDef):
        text = without_dead_branches(text, _conditions(node, constants))
        for function in functions:
            text = re.sub(rf"\b{re.escape(function.in_loop)}\(", f"{function.name_here}(", text)
    for function in functions:
        if name == function.name != function.name_here:
            text += f"\n\n\n{function.name_here} = {name}"
    return text


class _Known:
    """The fields of settings, or the columns of rows, whose values do not change."""

    def __init__(self, values: dict[str, Any]):
        self.__dict__.update(values)


def _conditions(
    function: ast.FunctionDef, constants: _Constants
) -> Callable[[ast.expr], bool | None]:
    """(condition of a function) -> its value in a run; None if it is not the same in all steps."""

    def known_settings(kind: str) -> _Known:
        values = constants.settings[kind]
        return _Known({name: values[name] for name in values if name not in constants.adapting})

    names: dict[str, Any] = {"LEFT_OUT": ", ".join(constants.left_out)}
    for kind, (_, constant) in SETTINGS.items():
        if constant is not None:
            names[constant] = known_settings(kind)
    known_arguments = {
        "Rows": _Known(constants.columns),
        # a step always gives the magnitudes: any value but None stands for them
        "AdvantageInputs": _Known({**constants.settings["AdvantageSettings"], "magnitudes": True}),
        "LossAggregation": constants.settings["LossSettings"]["aggregation"],
    }
    for kind in SETTINGS:
        known_arguments[kind] = known_settings(kind)
    for argument in function.args.args:
        if argument.annotation is not None:
            kind = ast.unparse(argument.annotation)
            if kind in known_arguments:
                names[argument.arg] = known_arguments[kind]

    def value_of(condition: ast.expr) -> bool | None:
        text = ast.unparse(condition)
        if not set(names_read(text)) <= set(names):
            return None
        try:
            return bool(eval(text, {"__builtins__": {}}, dict(names)))
        except AttributeError:
            return None

    return value_of


def _settings_texts(constants: _Constants, texts: list[str]) -> list[str]:
    """The classes of the settings with the fields that these texts read, and their constants."""
    everything = "\n".join(texts)
    read = set(re.findall(r"(?:settings|SETTINGS)\.(\w+)", everything))
    read |= set(re.findall(rf"^ +({'|'.join(FROM_A_RECORD)})=", everything, re.MULTILINE))
    if "replace(LOSS_SETTINGS, entropy_coef=" in everything:
        read.add("entropy_coef")
    sections = []
    values: dict[str, str] = {}
    for kind, (module, constant) in SETTINGS.items():
        used = [name for name in constants.settings[kind] if name in read]
        if constant == "UPDATE_SETTINGS" and not used:
            continue
        sections.append(with_fields(_definition(kind, module.__name__), used))
        lines = [f"{kind}("]
        for name in used:
            text = _literal(constants.settings[kind][name])
            if name == "policy_loss_settings":
                text = values["PolicyLossSettings"].replace("\n", "\n    ")
            lines.append(f"    {name}={text},")
        values[kind] = "\n".join([*lines, ")"])
        if constant is not None:
            sections.append(f"{constant} = {values[kind]}")
    sections.append(f"FLAGS = {_literal(constants.flags)}")
    sections.append(f"LEFT_OUT = {_literal(', '.join(constants.left_out))}")
    return sections


def _literal(value: Any) -> str:
    """A value as Python text."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        lines = [f"    {_literal(name)}: {_literal(of_name)},\n" for name, of_name in value.items()]
        return "{\n" + "".join(lines) + "}"
    return repr(value)


def _definition(name: str, module: str) -> str:
    """The text of a definition of a module of this package."""
    file = source_file(package_file(module))
    return without_details(file.text_of(file.definitions[name]))
