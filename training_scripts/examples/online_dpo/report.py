"""The share of kind answers by round: python report.py OUT_DIR SEED ROUNDS"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def rule_share(file: Path) -> float:
    """Share of sampled answers that follow the true rule, of a file of the evaluation."""
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    share: float = results[0]["metrics"]["score"]
    return share


def main() -> None:
    out, seed, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    runs = out / f"online_dpo_{seed}"
    files = [out / "sft.rule.json"]
    files += [runs / f"round_{index}.rule.json" for index in range(1, rounds + 1)]
    numbers = range(rounds + 1)
    shares = [rule_share(file) for file in files]
    print(f"| round | {' | '.join(map(str, numbers))} |\n|---|{'---|' * len(files)}")
    print(f"| seed {seed} | {' | '.join(f'{share:.2f}' for share in shares)} |")


if __name__ == "__main__":
    main()
