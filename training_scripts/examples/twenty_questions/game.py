"""Twenty questions as an environment in the form of Gymnasium: it thinks of a thing, the model asks
and guesses."""

import random
import re

QUESTIONS = {  # question -> the things for which the answer is yes
    "Is it alive?": "horse mouse whale frog",
    "Is it big?": "horse whale piano ship",
    "Is it found in water?": "whale frog ship shell",
    "Is it made of glass?": "lamp",
    "Does it fly?": "",
}
THINGS = sorted({*" ".join(QUESTIONS.values()).split()})
COST = 0.05  # of a question


class TwentyQuestions:
    """A right guess scores 1 less `COST` for each question before it, a wrong one 0; both end the
    game."""

    def reset(self, *, seed=None, options=None):
        self.thing, self.asked = random.Random(seed).choice(THINGS), 0
        return "I think of something.", {}

    def step(self, action):
        if guess := re.fullmatch(r"It is the (\w+)\.", action):
            right = guess[1] == self.thing
            return (
                "",
                right * (1 - COST * self.asked),
                True,
                False,
                {"right": right, "questions": self.asked},
            )
        self.asked += 1
        if action not in QUESTIONS:
            return "I do not understand.", 0.0, False, False, {}
        return "yes" if self.thing in QUESTIONS[action].split() else "no", 0.0, False, False, {}
