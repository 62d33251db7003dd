"""Raw rows in memory that behave like the files of a stream, for tests."""

from collections import Counter
from dataclasses import dataclass, field

import datasets

from dschat_ppo.data.parts import Batch
from dschat_ppo.data.streaming import ALL, StreamSource, Tokens

FEATURES = datasets.Features(
    {
        "prompt_ids": datasets.List(datasets.Value("int32")),
        "answers": datasets.List(datasets.List(datasets.Value("int32"))),
        "margin": datasets.Value("float32"),
        "source": datasets.Value("int32"),
    }
)


@dataclass
class NumberFile:
    """A file with the rows {"n": first}, {"n": first + 1}, ...; `read` notes the number of each row that is read."""

    first: int
    count: int
    name: str = "numbers"
    flag: str = "--data_path"
    read: list = field(default_factory=list)

    def found(self, place):
        for number in range(place or 0, self.count):
            self.read.append(self.first + number)
            yield number + 1, {"n": self.first + number}, number + 1


def tokens_of(batch: Batch) -> Tokens:
    """A token row [n] for each row; multiples of 5 give none, multiples of 3 two."""
    kept = [n for n in (row["n"] for row in batch.rows) for _ in range(0 if n % 5 == 0 else 2 if n % 3 == 0 else 1)]
    made = [{"prompt_ids": [n], "answers": [[n, 0]], "margin": n / 2} for n in kept]
    return made, Counter({"kept whole": len(kept)}), ""


def expected(numbers) -> list[int]:
    """The token rows of these raw rows."""
    return [row["prompt_ids"][0] for row in tokens_of(Batch([], [{"n": n} for n in numbers]))[0]]


def source_of(
    *files, weight: float = 1.0, share: tuple[int, int] = ALL, name: str = "numbers", make=tokens_of, policy="error"
) -> StreamSource:
    return StreamSource(name, weight, files, share, make, policy)
