"""The models of a checkpoint, written as Hugging Face or peft folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
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
from dschat_ppo.engine.averages import whole_averages
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.models.adapters import AdapterSettings, adapter_settings
from dschat_ppo.models.loading import DTYPES, load_causal_lm, load_sequence_classifier
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.saving import (
    SavedForm,
    in_format,
    is_in_adapter_folder,
    saved_dtype,
    write_model,
)
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.rewards.learned_reward import SEPARATOR, STATISTICS
from dschat_ppo.run.model_card import model_card

ROLES = ("model", "actor", "critic", "actor_ema")


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint: its folder and manifest, and the flags of the run that saved it."""

    folder: Path
    manifest: Manifest
    config: Any

    def averages(self) -> Iterator[dict[str, Tensor]]:
        for rank in range(self.manifest.world_size):
            yield load_state(self.folder / rank_file(rank), mapped=True).get("actor_average") or {}

    def roles(self) -> list[str]:
        trained = [role for role in ROLES if (self.folder / role).is_dir()]
        return trained + (["actor_ema"] if "actor" in trained and any(self.averages()) else [])


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
    elif fault := damage(path):
        raise UserError(
            f"{path}: {fault}; name an intact checkpoint such as OUTPUT/checkpoints/step_000012, or"
            " OUTPUT"
        )
    manifest = Manifest.read(folder)
    known = defaults_of(STEPS[manifest.kind])
    flags = {
        name: value
        for name, value in manifest.config.items()
        if name in known.keys() - {"local_rank", "config"}
    }
    return SavedRun(folder.resolve(), manifest, parse(manifest.kind, [], flags))


def export(words: argparse.Namespace) -> None:
    """Write the models of a checkpoint to `out`, all or none."""
    run = open_checkpoint(words.checkpoint)
    out = words.out
    role = words.role
    roles = run.roles()
    if role is not None and role not in roles:
        raise UserError(f"--role {role}: {run.folder} holds {', '.join(roles)}")
    if out.exists() and not words.overwrite:
        raise UserError(f"{out} exists; name another folder, or add --overwrite")
    wanted = roles if role is None else [role]
    given = {name: words.critic_model if name == "critic" else words.model for name in wanted}
    models = [given[name] or started_from(run, name)[1] for name in wanted]
    for read in (run.folder, *(Path(name).expanduser() for name in models)):
        if read.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"{out} would be written over {read}, which is read; name another folder"
            )
    main_role = "actor" if run.manifest.kind == "ppo" else "model"
    tokenizer_folder = base_folder(run, main_role, words.model, needs_weights=False)
    tokenizer = with_template_flags(
        load_tokenizer(tokenizer_folder, started_from(run, main_role)[0]), run.config.data
    )
    try:
        partial = empty_folder(out.with_name(f"{out.name}{PARTIAL}"))
        try:
            for name in wanted:
                if role is None and run.manifest.kind == "ppo":
                    place = partial / name
                else:
                    place = partial
                export_role(run, name, place, words.dtype, given[name], tokenizer)
        except UserError:
            remove_folder(partial)
            raise
        replace_folder(out, partial)
    except OSError as problem:
        raise StorageError(f"{out}: cannot be written ({problem.strerror})") from None
    if role or wanted == ["model"]:
        where = f"{out}"
    else:
        where = f"{out}/{{{','.join(wanted)}}}"
    print(f"{run.folder.name}, saved by {run.manifest.world_size} rank(s): exported to {where}")


def export_role(
    run: SavedRun,
    role: str,
    place: Path,
    dtype: str | None,
    given: str | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write one model to the folder `place`. `dtype` None: as the run would save it. `given` is the
    model folder that the user names, or None."""
    trained = role.removesuffix("_ema")  # the average is one of the actor's weights
    states = run.folder / trained
    number_format = DTYPES[dtype or run.config.run.dtype]
    common = common_state(states)
    # weights that the checkpoint does not hold
    frozen = common["frozen"]
    merge = saves_merged(run, trained)
    needs_base = bool(frozen) and merge
    base = base_folder(run, trained, given, needs_base)
    module = build_module(run, trained, base, None if needs_base else "meta")
    # The run rounds its fp32 weights in the same way after each update.
    state = {name: weight.to(number_format) for name, weight in master_weights(states, common)}
    own = {name: weight.shape for name, weight in module.named_parameters()}
    differing = [name for name, weight in state.items() if own.get(name) != weight.shape]
    differing += sorted(own.keys() ^ {*state, *frozen})
    if differing:
        raise UserError(
            f"{states}: holds the weights of another model than {base} (the first that differs:"
            f" {differing[0]}); name the model from which the run started by --model or"
            " --critic_model"
        )
    inside = f"{next(name for name, _ in module.named_children())}."
    if role == "actor_ema":
        shapes = {name.removeprefix(inside): weight.shape for name, weight in state.items()}
        averages = whole_averages(run.averages(), shapes)
        state |= {
            f"{inside}{name}": average.to(number_format) for name, average in averages.items()
        }
    if needs_base:
        weights = {
            name: weight.detach() for name, weight in module.named_parameters() if name in frozen
        }
        state |= {name: weight.to(number_format) for name, weight in weights.items()}
    buffers = common["buffers"]
    if dtype not in (None, run.config.run.dtype):
        bad = [name for name, weight in state.items() if not weight.isfinite().all()]
        if bad:
            raise UserError(
                f"--dtype {dtype}: {bad[0]} of {role} has numbers beyond its range; use another one"
            )
        buffers = {
            n: value.to(number_format) if value.is_floating_point() else value
            for n, value in buffers.items()
        }
    state = {name.removeprefix(inside): value for name, value in {**state, **buffers}.items()}
    described = statistics_of(run, role)
    if not merge:
        state = {name: weight for name, weight in state.items() if is_in_adapter_folder(name)}
    module = module.to(number_format)
    ends = answer_ends(tokenizer)
    card = partial(model_card, run.config, trained)
    if dtype is None:
        state = in_format(state, saved_dtype(module, run.config.run.save_dtype), place)
    form = SavedForm(ends, merge, card)
    problem = write_model(module, state, tokenizer, place, described, form)
    if problem is not None:
        raise StorageError(problem)


def build_module(
    run: SavedRun, role: str, folder: str, device: str | None
) -> PolicyModel | ScalarModel:
    """The model as the run builds it from `folder`; `device` "meta": without weights."""
    config = run.config
    dtype = run.config.run.dtype
    resize = run.config.run.resize_vocabulary
    if role == "model":
        dropout = config.fit.dropout
    else:
        dropout = (
            config.ppo.critic_dropout if role == "critic" else config.ppo.actor_dropout
        ) or 0.0
    adapter = adapter_of(run, role)
    if role == "critic" or (run.manifest.kind == "reward" and config.reward.trains_classifier):
        return ScalarModel(
            load_sequence_classifier(folder, dtype, None, True, dropout, resize, adapter, device)
        )
    if run.manifest.kind == "reward":
        dropout = dropout or 0.0
    return PolicyModel(load_causal_lm(folder, dtype, None, dropout, resize, adapter, device))


def adapter_of(run: SavedRun, role: str) -> AdapterSettings | None:
    """The LoRA adapter of a role, over weights that are not quantised; None without LoRA."""
    flags = replace(run.config.adapters, load_in_4bit=False, load_in_8bit=False)
    return adapter_settings(run.config.lora, flags, "" if role == "model" else f"{role}_")


def saves_merged(run: SavedRun, role: str) -> bool:
    """Whether the run saves a whole model, and not an adapter folder."""
    adapters = run.config.adapters
    return adapter_of(run, role) is None or adapters.lora_merge or not adapters.only_optimize_lora


def started_from(run: SavedRun, role: str) -> tuple[str, str]:
    """(flag, folder or hub name) of the model from which a role started."""
    flag, name = run.config.models["actor" if role == "actor_ema" else role]
    return flag, name


def base_folder(run: SavedRun, role: str, given: str | None, needs_weights: bool) -> str:
    """The model or adapter folder from which a role started, for its configuration and tokenizer:
    `given` by the user, or as the run recorded it. If `needs_weights`, weights are read from it
    too, and no other model will do."""
    way_out = "--critic_model" if role == "critic" else "--model"
    flag, name = started_from(run, role)
    try:
        folder = model_folder(given or name, way_out if given else flag)
    except UserError as problem:
        raise UserError(
            f"{problem}; name the model from which the run started by {way_out} FOLDER"
        ) from None
    if not is_fingerprinted_model(run.manifest.config, flag, folder):
        changed = f"{folder}: is not, or no longer, the model from which the run started ({flag})"
        if needs_weights:
            raise UserError(f"{changed}, whose frozen weights are needed; name that by {way_out}")
        print(f"note: {changed}; only its configuration and tokenizer are used", file=sys.stderr)
    return folder


def statistics_of(run: SavedRun, role: str) -> dict[str, float | str | None]:
    """The entries that step 2 adds to the config of a reward model; None removes an old one."""
    if run.manifest.kind == "sft" or role in ("actor", "actor_ema"):
        return {}
    nothing: dict[str, float | str | None] = dict.fromkeys((*STATISTICS, SEPARATOR))
    if role == "critic" or not run.config.reward.trains_classifier:
        return nothing if role == "critic" else {}
    found = load_state(run.folder / SHARED).get("described")
    if found is None:
        named = " and ".join(STATISTICS)
        print(
            f"note: no {named} (--normalize_rewards model): a run measures them where it saves",
            file=sys.stderr,
        )
    return nothing | (found or {})
