"""The command that a run prints at its end has its flags of images."""

from dschat_ppo.config.cli import parse
from dschat_ppo.features.images.flags import ImageFlags
from dschat_ppo.run.start_and_end import words_of_features
from dschat_ppo.supervised.train_preference import ppo_words

GIVEN = "--with_images True --image_column photo --image_folder pictures".split()
OPTIONS = "--image_options do_image_splitting=false --train_projector True".split()
NEEDED = "--model_name_or_path m --data_path d --output_dir out/reward".split()


def test_step_3_reads_the_images_as_the_reward_model_did():
    words = ppo_words(parse("reward", [*NEEDED, *GIVEN, *OPTIONS]), "actor", "out/reward")
    flags = parse("ppo", words).of(ImageFlags)
    assert flags.with_images and (flags.image_column, flags.image_folder) == ("photo", "pictures")
    assert flags.image_options == ["do_image_splitting=false"]
    assert not flags.train_projector, "what trains is not a matter of the data"


def test_a_chat_has_no_columns():
    config = parse("sft", [*NEEDED, *GIVEN])
    assert words_of_features(config, "chat") == ["--with_images=True"]
    assert words_of_features(parse("sft", NEEDED), "chat") == []
