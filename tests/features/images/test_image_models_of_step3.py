"""The models of step 3 that see images: their towers, their checks, and what is saved of them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import flags_of_prompts, write_pictures, write_rows
from one_rank import one_rank  # noqa: F401
from safetensors.torch import load_file, save_file
from tiny_vlms import save_tiny_vlm

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.checks import check_readers
from dschat_ppo.features.images.given_embeddings import sources_of_roles
from dschat_ppo.features.images.lm_kinds import OF_IMAGES
from dschat_ppo.features.images.step_data import read_by_model
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.loading import (
    ModelChanges,
    load_causal_lm,
    load_sequence_classifier,
)
from dschat_ppo.models.saving import SavedForm, parts_beside, save_model
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.ppo.begin_ppo import readers_of
from dschat_ppo.ppo.train_ppo import given_sources, saved_forms

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS = [
    {"image": "a.png", "prompt": "what is the colour ?", "data_source": "pictures"},
    {"image": None, "prompt": "what is red ?", "data_source": "texts"},
]
CPU = torch.device("cpu")
TOWER = "model.vision_model.embeddings.patch_embedding.weight"
LORA = ["--actor_lora_dim", "2", "--critic_lora_dim", "2", "--only_optimize_lora", "True"]


def save_reward(folder, start, config, tokenizer, changes):
    """A reward model from the folder `start`, as step 2 saves it."""
    torch.manual_seed(3)
    classifier = load_sequence_classifier(str(start), "fp32", None, True, changes)
    form = SavedForm(merge=changes.adapter is None, beside=parts_beside(config))
    save_model(SimpleNamespace(module=ScalarModel(classifier)), tokenizer, folder, form=form)


@pytest.fixture(scope="module")
def step3(tmp_path_factory):
    """The folders of an actor, of reward models over the same tower and over another one, and of an
    adapter; the prompts of a run as tokens."""
    folder = tmp_path_factory.mktemp("step3")
    actor = save_tiny_vlm(folder / "actor", "idefics3")
    write_pictures(folder)
    data = write_rows(folder, ROWS)
    config = config_of(actor, data)
    tokenizer = load_tokenizer(str(actor), "model")
    kinds = ModelChanges(kinds=(OF_IMAGES,))
    adapter = AdapterSettings(2, 4.0, 0.0, None, False, False, freeze_base=True)
    save_reward(folder / "reward", actor, config, tokenizer, kinds)
    save_reward(folder / "adapter", actor, config, tokenizer, replace(kinds, adapter=adapter))
    save_reward(folder / "other", actor, config, tokenizer, kinds)
    weights = load_file(folder / "other/model.safetensors")
    weights[TOWER] = weights[TOWER] * 2
    save_file(weights, folder / "other/model.safetensors", {"format": "pt"})
    rows = prepare(read_by_model(config, config.step_data, str(actor), tokenizer), tokenizer)
    return SimpleNamespace(folder=folder, data=data, rows=rows, tokenizer=tokenizer)


def config_of(actor, data, *further):
    words = flags_of_prompts(actor, data, *further)
    if "--critic_model_name_or_path" not in words:
        words += ["--use_reward_model", "False", "--reward_function", "numbers:value"]
    return parse("ppo", words)


def with_critic(step3, name, *further):
    """(flags, folders) of a run whose critic and reward model start from the folder `name`."""
    actor = step3.folder / "actor"
    scalar = str(step3.folder / name)
    words = ["--critic_model_name_or_path", scalar, *further]
    return config_of(actor, step3.data, *words), ModelFolders(str(actor), scalar, scalar)


def check_models_that_read(step3, config, folders):
    """The check of step 3 of the models that read the prompts beside the actor."""
    readers = readers_of(config, folders)
    check_readers(config, folders.actor, readers, [step3.rows.at_hand], step3.tokenizer)


@pytest.mark.parametrize(
    ("name", "towers"), [("reward", 1), ("other", 2), ("adapter", 1), ("actor", 1)]
)
def test_towers_with_equal_bits_are_one(step3, name, towers):
    config, folders = with_critic(step3, name)
    sources = given_sources(config, folders, step3.tokenizer)
    assert sources.keys() == {"actor", "reference", "critic", "reward"}
    assert sources["reference"] is sources["actor"]
    assert sources["critic"] is sources["reward"]
    assert len(set(map(id, sources.values()))) == towers
    if towers == 2:
        assert not sources["actor"].tower.has_bits_of(sources["critic"].tower)
        # a prompt has the same number for both, also if it gets it later
        prompts = step3.rows.train
        numbers = sources["actor"].prompt_columns(prompts, [0, 1])["images"]
        assert torch.equal(numbers, sources["critic"].prompt_columns(prompts, [0, 1])["images"])


@pytest.mark.parametrize("name", ["reward", "adapter"])
def test_all_models_are_decoders_with_the_images_of_their_tower(step3, name, tmp_path):
    """Whole, and as adapters over one base; the saved actor and critic hold tower and processor."""
    further = []
    if name == "adapter":
        further = [*LORA, "--share_base", "True", "--lora_merge", "True"]
    config, folders = with_critic(step3, name, *further)
    sources = given_sources(config, folders, step3.tokenizer)
    engines = RLHFEngine(config, plan_ppo(config.ppo, 40, 1, 0), folders, sources)
    before = load_file(step3.folder / "actor/model.safetensors")
    for role in ("actor", "reference", "critic", "reward"):
        module = getattr(engines, role).module
        assert module.given_source is sources[role]
        names = [weight for weight, _ in module.pretrained.named_parameters()]
        assert not any("vision" in weight or "connector" in weight for weight in names)
        assert module.layout.packed and module.layout.shares
    if name == "adapter":
        shared = engines.actor.module.lm.get_input_embeddings().weight
        for role in ("critic", "reward"):
            embeddings = getattr(engines, role).module.pretrained.get_input_embeddings()
            assert embeddings.weight is shared
    forms = saved_forms(config, engines, step3.tokenizer)
    for role, engine in engines.trained.items():
        save_model(engine, step3.tokenizer, tmp_path / role, form=forms[role])
        saved = load_file(tmp_path / role / "model.safetensors")
        assert torch.equal(saved[TOWER], before[TOWER])
        assert (tmp_path / role / "preprocessor_config.json").exists()
    kinds = ModelChanges(kinds=(OF_IMAGES,))
    load_causal_lm(str(tmp_path / "actor"), "fp32", None, kinds)
    load_sequence_classifier(str(tmp_path / "critic"), "fp32", None, False, kinds)


def test_models_that_train_hold_their_towers(step3, tmp_path):
    """Actor and critic get pixels; reference and reward model get features of frozen towers."""
    further = ["--train_vision_tower", "True"]
    config, folders = with_critic(step3, "other", *further)
    sources = given_sources(config, folders, step3.tokenizer)
    assert sources["actor"] is sources["critic"]
    of_frozen = [sources["reference"].tower, sources["reward"].tower]
    assert not of_frozen[0].has_bits_of(of_frozen[1])
    prompts = step3.rows.train
    numbers = [store.prompt_columns(prompts, [0, 1])["images"] for store in sources.values()]
    assert all(torch.equal(numbers[0], of_store) for of_store in numbers)
    engines = RLHFEngine(config, plan_ppo(config.ppo, 40, 1, 0), folders, sources)
    for role in ("actor", "reference", "critic", "reward"):
        weights = dict(getattr(engines, role).module.pretrained.named_parameters())
        of_parts = {name for name in weights if "vision" in name or "connector" in name}
        assert bool(of_parts) == (role in ("actor", "critic"))
        trained = {name for name in of_parts if weights[name].requires_grad}
        assert trained == {name for name in of_parts if "vision" in name}
    forms = saved_forms(config, engines, step3.tokenizer)
    for role, engine in engines.trained.items():
        weight = engine.module.pretrained.get_parameter(TOWER)
        with torch.no_grad():
            weight.add_(1)
        save_model(engine, step3.tokenizer, tmp_path / role, form=forms[role])
        assert torch.equal(load_file(tmp_path / role / "model.safetensors")[TOWER], weight)


@pytest.mark.parametrize(
    "words",
    [
        ["--ref_sync_interval", "1"],
        ["--unpin_actor_parameters", "True", "--actor_zero_stage", "3"],
        ["--unsupervised_dataset_name", "texts.jsonl"],
        [*LORA],
        [*LORA, "--share_base", "True"],
    ],
)
def test_what_a_tower_in_training_does_not_go_with(step3, words):
    with pytest.raises(UserError, match="--train_vision_tower does not go with --.*; omit one"):
        with_critic(step3, "reward", "--train_vision_tower", "True", *words)


def test_a_model_of_text_does_not_score_pictures_blind(step3, assets):
    actor, text = str(step3.folder / "actor"), str(assets / "reward")

    def check(folders, *further):
        words = ["--critic_model_name_or_path", text, *further]
        config = config_of(actor, step3.data, *words)
        check_models_that_read(step3, config, folders)

    with pytest.raises(UserError, match="reads text alone, but prompts have images; train one"):
        check(ModelFolders(actor, None, text))
    with pytest.raises(UserError, match="images; give one that sees them .--critic_model"):
        check(ModelFolders(actor, text, None))
    with pytest.raises(UserError, match="prompts have images; omit the flag"):
        check(ModelFolders(actor, None, None, text), "--ref_model_name_or_path", text)
    # it may score prompts of text
    check(ModelFolders(actor, None, text), "--reward_model_sources", "texts")
    with pytest.raises(UserError, match="images"):
        check(ModelFolders(actor, None, text), "--reward_model_sources", "pictures")


def test_a_reward_model_with_other_image_settings_is_refused(step3, tmp_path):
    config, folders = with_critic(step3, "reward")
    check_models_that_read(step3, config, folders)
    for file in (step3.folder / "reward").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings["do_image_splitting"] = False
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    folders = replace(folders, critic=None, reward=str(tmp_path))
    with pytest.raises(UserError, match="do_image_splitting is False, not True"):
        check_models_that_read(step3, config, folders)


def test_an_actor_of_text_has_no_images(step3, assets):
    config, _ = with_critic(step3, "reward")
    folders = {"actor": str(assets / "lm"), "reward": str(step3.folder / "reward")}
    assert sources_of_roles(config, folders, "fp32", step3.tokenizer, CPU) == {}
