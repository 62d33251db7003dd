"""Mutations for `fuzz.py`: of bytes, of JSON values, and of files on the disk."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Values in the place of any other value of a configuration.
STRANGE_VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320, float("nan"),
    float("inf"), "", " ", "0", "true", "none", "NaN", "../../etc/passwd", "/dev/zero", "é\u0000\u202e", "\ud800",
    "𝔘" * 50, "{{ 1 }}", "{% for i in range(10**9) %}x{% endfor %}", "x" * 100_000, [], [[]], [None], [1, "a", {}], {},
    {"a": 1},
    {"": {"": {"": None}}}, list(range(1000)), "org/model", "https://example.org/x", "torch.float64", "gpt2",
    "bfloat16",
)  # fmt: skip
STRANGE_WORDS = (
    "", " ", "-", "--", "0", "-1", "1", "2", "0.5", "1e400", "nan", "inf", "-inf", "1e-40", "99999999999999999999",
    "2147483648", "0x10", "1_000", "true", "no", "None", "null", "[]", "{}", '{"a": 1}', "[1, 2", "a,b,,c", ",",
    "1,2,3", "é", "\u202e", "\x07", "\udcff", "a\nb", "x" * 5000, "/" * 300, "/dev/null", "/dev/zero",
    "/proc/self/mem", "~", "..", "%s%n", "$(id)", "data/*", "=1", "@5", "a@b@c", "[:10]", "model",
)  # fmt: skip
_INSERTED = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r", b'"', b"{", b"}", b"[", b",",
    b"\\u0000", b"\\ud800", b"9" * 5000, b"-", b"NaN", b"1e999", b"\xe2\x80\xa8", b"../", b"\t", b"'",
)  # fmt: skip
_STARTS = (
    b"\xef\xbb\xbf", b"\xff\xfe", b"PK\x03\x04", b"\x80\x04", b"\x1f\x8b\x08\x00", b"\n\n", b"#!",
    b"version https://git-lfs.github.com/spec/v1\n",
)  # fmt: skip
_DEPTH = 100_000
_PLACES = ("missing", "folder", "loop", "dangling", "empty", "locked")


def mutate_bytes(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Changed bytes, and what was done to them."""
    place = rng.randrange(len(content) + 1)
    end = min(len(content), place + rng.choice((1, 4, 50)))
    kind = rng.choice(("flip", "flip", "cut", "insert", "insert", "remove", "double", "nest", "long", "start", "noise"))
    if kind == "flip":
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 3, 30)) if content else 0):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed), "bits flipped"
    if kind == "cut":
        return content[:place], f"cut after {place} bytes"
    if kind == "insert":
        added = rng.choice(_INSERTED)
        return content[:place] + added + content[place:], f"{added[:10]!r} inserted at {place}"
    if kind == "remove":
        return content[:place] + content[end:], f"{end - place} bytes removed at {place}"
    if kind == "double":
        return content + content, "doubled"
    if kind == "nest":
        return content[:place] + rng.choice((b"[", b'{"a":', b"{")) * _DEPTH + content[place:], f"nested at {place}"
    if kind == "long":
        size = rng.choice((300_000, 3_000_000))
        return content[:place] + b"a" * size + content[place:], f"{size} bytes inserted at {place}"
    if kind == "start":
        start = rng.choice(_STARTS)
        return start + content, f"starts with {start[:4]!r}"
    return rng.randbytes(rng.choice((1, 8, 300))), "noise"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of a JSON value's parts."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in _places(part, (*path, key)))]


def mutate_json(rng: random.Random, value: Any) -> tuple[Any, str]:
    """A changed copy of a JSON value, and what was changed."""
    changed = copy.deepcopy(value)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = [place for place in _places(changed) if place]
        if not places:
            return rng.choice(STRANGE_VALUES), "replaced"
        shallow = [place for place in places if len(place) == 1]
        place = rng.choice(shallow if rng.random() < 0.7 else places)
        holder = changed
        for key in place[:-1]:
            holder = holder[key]
        name = ".".join(map(str, place))[:80]
        act = rng.choice(("replace", "replace", "replace", "remove", "wrap", "add", "near", "rename"))
        if act == "replace":
            holder[place[-1]] = copy.deepcopy(rng.choice(STRANGE_VALUES))
        elif act == "remove":
            del holder[place[-1]]
        elif act == "wrap":
            holder[place[-1]] = rng.choice(([holder[place[-1]]], {"value": holder[place[-1]]}, str(holder[place[-1]])))
        elif act == "near":
            old = holder[place[-1]]
            number = isinstance(old, int | float) and not isinstance(old, bool)
            holder[place[-1]] = rng.choice((old + 1, old * 2, -old, float(old), old // 2)) if number else old
        elif isinstance(holder, dict):
            new = rng.choice(("", "auto_map", "_name_or_path", "dtype", "rope_scaling", f"{place[-1]} ", "é"))
            holder[new] = holder.pop(place[-1]) if act == "rename" else copy.deepcopy(rng.choice(STRANGE_VALUES))
            name = f"{name} -> {new!r}"
        else:
            holder.append(copy.deepcopy(rng.choice(STRANGE_VALUES)))
        done.append(f"{act} {name}")
    return changed, ", ".join(done)


def _mutated_content(rng: random.Random, path: Path) -> tuple[bytes, str]:
    """The changed content of a file: by its form if it is JSON or safetensors, else by its bytes."""
    content = path.read_bytes()
    if path.suffix == ".safetensors" and rng.random() < 0.7:
        length = int.from_bytes(content[:8], "little")
        if rng.random() < 0.15:
            length = rng.choice((0, 1, 2**63, 2**64 - 1, len(content), length + 1))
            return length.to_bytes(8, "little") + content[8:], f"header of {length} bytes"
        header, done = mutate_json(rng, json.loads(content[8 : 8 + length]))
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :], f"header: {done}"
    if path.suffix == ".json" and rng.random() < 0.7:
        value, done = mutate_json(rng, json.loads(content))
        return json.dumps(value).encode(), done
    if path.suffix == ".jsonl" and content and rng.random() < 0.6:
        lines = content.splitlines()
        for number in rng.sample(range(len(lines)), min(len(lines), rng.choice((1, 2, 100)))):
            value, done = mutate_json(rng, json.loads(lines[number]))
            lines[number] = json.dumps(value).encode()
        return b"\n".join(lines) + b"\n", f"rows: {done}"
    return mutate_bytes(rng, content)


def mutate_file(rng: random.Random, path: Path) -> str:
    """Change a file, or put something else in its place; returns what was done."""
    kind = "content" if rng.random() < 0.65 else rng.choice(_PLACES)
    if kind == "content":
        content, done = _mutated_content(rng, path)
        path.write_bytes(content)
        return f"{path.name}: {done}"
    if kind == "locked":
        path.chmod(0)
        return f"{path.name}: no permissions"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "empty":
        path.touch()
    return f"{path.name}: {kind}"


def copy_of(source: Path, place: Path) -> Path:
    """A copy of a file or folder, to be mutated."""
    if source.is_dir():
        shutil.copytree(source, place)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    return place
