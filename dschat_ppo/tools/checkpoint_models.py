"""The models of a checkpoint, written as Hugging Face or peft folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.engine_state import common_state, master_weights, rank_file
from dschat_ppo.checkpoint.identity import is_fingerprinted_model
from dschat_ppo.checkpoint.manager import SHARED
from dschat_ppo.checkpoint.state_files import load_state
from dschat_ppo.checkpoint.store import MANIFEST, CheckpointFolder, Manifest, damage
from dschat_ppo.common.atomic_files import PARTIAL, empty_folder, remove_folder, replace_folder
from dschat_ppo.config.cli import STEPS, parse
from dschat_ppo.config.step_config import defaults_of
from dschat_ppo.data.templates import answer_ends, with_template_flags
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.models.loading import (
    DTYPES,
    changes_to_train,
    load_causal_lm,
    load_sequence_classifier,
)
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.saving import (
    SavedForm,
    cast_weights,
    is_saved_without_base,
    parts_beside,
    saved_dtype,
    saves_whole_model,
    write_model,
)
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.ppo.followers import following_models
from dschat_ppo.rewards.learned_reward import STATISTICS, saved_entries
from dschat_ppo.run.model_card import model_card

ROLES = ("model", "actor", "critic")
FLAG_PREFIXES = {"model": "", "actor": "actor_", "critic": "critic_"}  # of roles that train


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint: its folder and manifest, and the flags of the run that saved it."""

    folder: Path
    manifest: Manifest
    config: Any

    def shards(self, state_name: str) -> Iterator[dict[str, Tensor]]:
        """Each rank's shards of the weights that follow the actor, by the entry of their state; {}
        if the run has none."""
        for rank in range(self.manifest.world_size):
            yield load_state(self.folder / rank_file(rank), mapped=True).get(state_name) or {}

    def roles(self) -> list[str]:
        """The models that the checkpoint holds: those of `ROLES`, and those that follow the
        actor."""
        roles = [role for role in ROLES if (self.folder / role).is_dir()]
        if "actor" in roles:
            for role, model in following_models().items():
                if any(self.shards(model.state_name)):
                    roles.append(role)
        return roles


def open_checkpoint(path: Path) -> SavedRun:
    """The intact checkpoint that `path` names, a checkpoint or an output folder."""
    folder = path
    if not (path / MANIFEST).exists() and (path / "checkpoints").is_dir():
        checkpoints = CheckpointFolder(path)
        name, complaints = checkpoints.newest_intact()
        for complaint in complaints:
            print(f"note: {complaint}", file=sys.stderr)
        if name is None:
            raise UserError(
                f"{path}: has no intact checkpoint (a finished run has none without"
                " --keep_final_checkpoint, but its models)"
            )
        folder = checkpoints.root / name
    elif not path.is_dir():
        raise UserError(
            f"{path}: there is no such folder; name one such as OUTPUT/checkpoints/step_000012, or"
            " OUTPUT"
        )
    else:
        fault = damage(path)
        if fault:
            raise UserError(
                f"{path}: {fault}; name an intact checkpoint such as"
                " OUTPUT/checkpoints/step_000012, or OUTPUT"
            )
    manifest = Manifest.read(folder)
    flag_names = defaults_of(STEPS[manifest.kind]).keys() - {"local_rank", "config"}
    flags = {name: value for name, value in manifest.config.items() if name in flag_names}
    return SavedRun(folder.resolve(), manifest, parse(manifest.kind, [], flags))


def export(args: argparse.Namespace) -> None:
    """Write the models of a checkpoint to `out`, all or none."""
    run = open_checkpoint(args.checkpoint)
    out = args.out
    roles = run.roles()
    if args.role is not None and args.role not in roles:
        raise UserError(f"--role {args.role}: {run.folder} holds {', '.join(roles)}")
    if out.exists() and not args.overwrite:
        raise UserError(f"{out} exists; name another folder, or add --overwrite")
    if args.role is not None:
        roles = [args.role]
    # folder or hub name of the model from which a role started, where the user names it
    moved_models: dict[str, str | None] = {}
    read_folders = [run.folder]
    for role in roles:
        moved_models[role] = args.critic_model if role == "critic" else args.model
        _, recorded_name = recorded_start_model(run, role)
        read_folders.append(Path(moved_models[role] or recorded_name).expanduser())
    for folder in read_folders:
        if folder.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"{out} would be written over {folder}, which is read; name another folder"
            )
    is_ppo = run.manifest.kind == "ppo"
    main_role = "actor" if is_ppo else "model"
    tokenizer_folder = start_model_folder(run, main_role, args.model, needs_weights=False)
    main_flag, _ = recorded_start_model(run, main_role)
    tokenizer = with_template_flags(load_tokenizer(tokenizer_folder, main_flag), run.config.data)
    try:
        partial = empty_folder(out.with_name(f"{out.name}{PARTIAL}"))
        try:
            for role in roles:
                role_folder = partial
                if is_ppo and args.role is None:
                    role_folder = partial / role
                export_role(run, role, role_folder, args.dtype, moved_models[role], tokenizer)
        except UserError:
            remove_folder(partial)
            raise
        replace_folder(out, partial)
    except OSError as problem:
        raise StorageError(f"{out}: cannot be written ({problem.strerror})") from None
    where = str(out)
    if is_ppo and args.role is None:
        where = f"{out}/{{{','.join(roles)}}}"
    print(f"{run.folder.name}, saved by {run.manifest.world_size} rank(s): exported to {where}")


def export_role(
    run: SavedRun,
    role: str,
    folder: Path,
    dtype: str | None,
    moved_model: str | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write one model to `folder`. `dtype` None: as the run would save it. `moved_model` is the
    folder or hub name that the user gives for the model from which the role started, or None."""
    trained_role = role_that_trains(role)
    states = run.folder / trained_role
    common = common_state(states)
    # weights that the checkpoint does not hold
    frozen = common["frozen"]
    merge = saves_whole_model(run.config, FLAG_PREFIXES[trained_role])
    needs_base = bool(frozen) and merge
    base = start_model_folder(run, trained_role, moved_model, needs_base)
    module = build_module(run, trained_role, base, None if needs_base else "meta")
    # The run rounds its fp32 weights in the same way after each update.
    number_format = DTYPES[dtype or run.config.run.dtype]
    state = {name: weight.to(number_format) for name, weight in master_weights(states, common)}
    _check_same_weights(states, state, frozen, base, module)
    # under which `module` holds the transformers model
    prefix = f"{next(name for name, _ in module.named_children())}."
    if role != trained_role:
        following = following_models()[role]
        shapes = {name.removeprefix(prefix): weight.shape for name, weight in state.items()}
        weights = following.whole_weights(run.shards(following.state_name), shapes)
        for name, weight in weights.items():
            state[f"{prefix}{name}"] = weight.to(number_format)
    if needs_base:
        for name, weight in module.named_parameters():
            if name in frozen:
                state[name] = weight.detach().to(number_format)
    buffers = common["buffers"]
    if dtype is not None and dtype != run.config.run.dtype:
        _check_finite(state, dtype, role)
        buffers = {name: _in_float_format(value, number_format) for name, value in buffers.items()}
    state = {name.removeprefix(prefix): value for name, value in {**state, **buffers}.items()}
    config_entries = reward_statistics(run, role)
    if not merge:
        state = {name: weight for name, weight in state.items() if is_saved_without_base(name)}
    module = module.to(number_format)
    if dtype is None:
        state = cast_weights(state, saved_dtype(module, run.config.run.save_dtype), folder)
    form = _export_form(run, trained_role, answer_ends(tokenizer), merge)
    problem = write_model(module, state, tokenizer, folder, config_entries, form)
    if problem is not None:
        raise StorageError(problem)


def _check_same_weights(
    states: Path,
    trained: Mapping[str, Tensor],
    frozen: Collection[str],
    base: str,
    module: nn.Module,
) -> None:
    """Refuse a model of the folder `base` whose weights differ in name or shape from those of the
    checkpoint: the `trained` ones that it holds, and the `frozen` ones that it only names."""
    shapes = {name: weight.shape for name, weight in module.named_parameters()}
    differing = [name for name, weight in trained.items() if shapes.get(name) != weight.shape]
    differing += sorted(shapes.keys() ^ {*trained, *frozen})
    if differing:
        raise UserError(
            f"{states}: holds the weights of another model than {base} (the first that differs:"
            f" {differing[0]}); name the model from which the run started by --model or"
            " --critic_model"
        )


def _export_form(run: SavedRun, role: str, ends: Sequence[int], merge: bool) -> SavedForm:
    """How the model of a role is written; arguments as `SavedForm`."""
    card = partial(model_card, run.config, role)
    return SavedForm(ends, merge, card, beside=parts_beside(run.config))


def _check_finite(state: Mapping[str, Tensor], dtype: str, role: str) -> None:
    """Refuse a number format that cannot hold the weights."""
    for name, weight in state.items():
        if not weight.isfinite().all():
            raise UserError(
                f"--dtype {dtype}: {name} of {role} has numbers beyond its range; use another one"
            )


def _in_float_format(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer in a number format; integers stay."""
    if value.is_floating_point():
        return value.to(dtype)
    return value


def build_module(
    run: SavedRun, role: str, folder: str, device: str | None
) -> PolicyModel | ScalarModel:
    """The model as the run builds it from `folder`; `device` "meta": without weights."""
    config = run.config
    is_classifier = role == "critic"
    if run.manifest.kind == "reward":
        is_classifier = config.reward.trains_classifier
    if role == "critic":
        dropout = config.ppo.critic_dropout or 0.0
    elif role == "actor":
        dropout = config.ppo.actor_dropout or 0.0
    else:
        dropout = config.fit.dropout
        if run.manifest.kind == "reward" and not is_classifier:  # DPO and related losses
            dropout = dropout or 0.0
    dtype = config.run.dtype
    changes = changes_to_train(config, FLAG_PREFIXES[role], dropout, quantises=False)
    if is_classifier:
        return ScalarModel(load_sequence_classifier(folder, dtype, None, True, changes, device))
    return PolicyModel(load_causal_lm(folder, dtype, None, changes, device))


def role_that_trains(role: str) -> str:
    """The role itself, or that of the model which it follows."""
    if role in following_models():
        return "actor"
    return role


def recorded_start_model(run: SavedRun, role: str) -> tuple[str, str]:
    """(flag, folder or hub name) of the model from which a role started, as the run recorded it."""
    flag, name = run.config.models[role_that_trains(role)]
    return flag, name


def start_model_folder(
    run: SavedRun, role: str, moved_model: str | None, needs_weights: bool
) -> str:
    """The folder from which a role started, for its configuration and tokenizer:
    `moved_model`, which the user names, or as the run recorded it. If `needs_weights`, weights are
    read from it too, and no other model will do."""
    way_out = "--critic_model" if role == "critic" else "--model"
    recorded_flag, recorded_name = recorded_start_model(run, role)
    try:
        if moved_model:
            folder = model_folder(moved_model, way_out)
        else:
            folder = model_folder(recorded_name, recorded_flag)
    except UserError as problem:
        raise UserError(
            f"{problem}; name the model from which the run started by {way_out} FOLDER"
        ) from None
    if not is_fingerprinted_model(run.manifest.config, recorded_flag, folder):
        changed = (
            f"{folder}: is not, or no longer, the model from which the run started"
            f" ({recorded_flag})"
        )
        if needs_weights:
            raise UserError(f"{changed}, whose frozen weights are needed; name that by {way_out}")
        print(f"note: {changed}; only its configuration and tokenizer are used", file=sys.stderr)
    return folder


def reward_statistics(run: SavedRun, role: str) -> dict[str, float | str | None]:
    """The entries that step 2 adds to the config of a reward model; None removes an old one."""
    if run.manifest.kind == "sft" or role_that_trains(role) == "actor":
        return {}
    removals: dict[str, float | str | None] = dict.fromkeys(saved_entries())
    if role == "critic":
        return removals
    if not run.config.reward.trains_classifier:
        return {}
    statistics = load_state(run.folder / SHARED).get("described")
    if statistics is None:
        print(
            f"note: no {' and '.join(STATISTICS)} (--normalize_rewards model): a run measures them"
            " where it saves",
            file=sys.stderr,
        )
        return removals
    return removals | statistics
