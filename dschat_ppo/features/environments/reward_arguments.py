"""Arguments of reward functions that have no value here."""

REFUSED = {
    "environments": (
        "its argument 'environments' are TRL's environment objects, which live in processes of"
        " their own here; compute the score in the environment's get_reward(), which"
        " --environment_reward_weight weighs, and omit this function"
    ),
}
