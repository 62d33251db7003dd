"""What tells two models apart that lay in the same folder, without reading all of their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from dschat_ppo.common.heartbeat import heartbeat

BLOCKS, BLOCK_BYTES = 64, 2**16
_WEIGHTS = ("*.safetensors", "*.bin")
_READ_WHOLE = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model",
    "*.jinja",
)  # fmt: skip


def model_fingerprint(folder: str | Path) -> str:
    """SHA-256 of a model folder, as 64 hex digits: of its settings and tokenizer, and of a sample of its weights.

    Of each file of weights it takes the name, the size and `BLOCKS` blocks of `BLOCK_BYTES`, spread evenly from the
    first byte to the last; smaller files are read whole. Training moves nearly every weight, so that another model
    shows in any block; a change of a few weights in a large file may lie between two.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for patterns, blocks_of in ((_READ_WHOLE, _whole), (_WEIGHTS, _sample)):
        for path in sorted({path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            for block in blocks_of(path):
                digest.update(block)
                heartbeat()
    return digest.hexdigest()


def _whole(path: Path) -> Iterator[bytes]:
    yield path.read_bytes()


def _sample(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    if size <= BLOCKS * BLOCK_BYTES:
        yield path.read_bytes()
        return
    with path.open("rb", buffering=0) as file:
        for number in range(BLOCKS):
            file.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
            yield file.read(BLOCK_BYTES)
