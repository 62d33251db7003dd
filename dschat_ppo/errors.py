"""The exceptions of the package, and parts of their messages. `common/exit_codes.py` maps them to
exit codes."""

import base64
import difflib
import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

_JOINERS = "\u200c\u200d"  # invisible, but part of ordinary text in several scripts
HIDDEN = "***"  # in place of credentials
# The name of a setting whose value is a credential, such as `x-api-key`, `hf_token` and `pass`
_CLEAR_SECRETS = (
    r"[\w.-]*(?:api|access|account|secret|signing|subscription|private|auth)[-_]?key"
    r"|[\w.-]*(?:api|access|auth|hf|bearer)[-_]?token"
    r"|[\w.-]*(?:secret|password|passwd|passphrase|credentials?)"
)
_SECRETS = rf"{_CLEAR_SECRETS}|(?:[\w.-]*[-_.])?(?:pass|pwd)"
# Only in URLs, since `key=answer` may be any setting of a function
_URL_SECRETS = r"(?:[\w.-]*[-_.])?(?:key|token|auth|authorization|sig|signature)"
# The weight of a reward function stays, and so does another URL after a comma
_VALUE = r"=)([^&\s]*?)(?=(?::[-+.\de]+)?(?:[&\s]|,(?:\s|\w+://|$)|$))"
_SETTING = re.compile(rf"([?&](?:{_SECRETS}){_VALUE}", re.IGNORECASE)
_URL_SETTING = re.compile(rf"([?&](?:{_SECRETS}|{_URL_SECRETS}){_VALUE}", re.IGNORECASE)
# A password with a slash makes a URL invalid, and is one all the same: what follows a colon is
# taken for it up to the last @, or to the last before a host with a port. The port of a name with a
# dot, of `localhost` and of an address in brackets is no password; `alice:12/` may be one.
_PORT = r":\d{1,5}(?:[/?#]|$)"
_HOST = r"(?:localhost|[^/\s?#@:\[]*\.[^/\s?#@:\[]*|\[[\w:.%]*\])"
_USER = re.compile(
    rf"(://)(?!{_HOST}{_PORT})"
    rf"([^/\s?#@:]*:(?:(?!://|@[\w.-]+{_PORT})[^\s\"'<>])*|[^/\s?#]*)@"
)
# In texts of unknown origin: settings in JSON, Python, YAML, headers and command lines, and
# variables of an environment. `pass` is a usual word, and a credential only with a value that is
# quoted or has letters and digits, and is no number.
_OTHER_TOKENS = r"[\w.-]*(?:client|github|gitlab|refresh|session|wandb)[-_]?token"
_VARIABLES = (
    r"(?-i:(?!(?:BOS|CLS|EOS|EOT|MASK|PAD|SEP|UNK)_TOKEN)"
    r"[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|_PASS|_PWD))"
)
_ANY_NAME = rf"(?<![\w.-])(?:{_SECRETS}|{_OTHER_TOKENS}|{_VARIABLES})"
_CLEAR_NAME = rf"(?<![\w.-])(?:{_CLEAR_SECRETS}|{_OTHER_TOKENS}|{_VARIABLES})"
_END_QUOTE = r"\\*[\"']?"  # of a name; JSON in JSON has backslashes
_QUOTED = (
    r"""[bru]?(?P<quote>\\*["'])(?P<value>(?:(?!(?P=quote))(?:\\(?!["']).|\\["']|[^\\\n]))+)"""
)
_BARE = r"""(?P<value>[^\s"'\\,;&(){}<>\[\]=][^\s"'\\,;&(){}<>\[\]]*)"""
_MIXED = r"(?!/)(?=\S*[a-z])(?=\S*\d)(?![-+.\d]+(?:e[-+]?\d+)?(?:[^\w.]|$))"
_SCHEME = r"(?:(?:basic|bearer|digest|token|api-?key)\s+)?"
_IN_TEXT = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_ANY_NAME}{_END_QUOTE}\s*[:=]\s*{_QUOTED}",
        rf"{_CLEAR_NAME}{_END_QUOTE}[ \t]*[:=][ \t]*{_BARE}",
        rf"(?<![\w.-])(?:[\w.-]*[-_.])?(?:pass|pwd)={_MIXED}{_BARE}",
        rf"(?<![\w.-])--(?:{_CLEAR_SECRETS}|{_OTHER_TOKENS})[ \t]+[\"']?(?!-){_BARE}",
        rf"authorization{_END_QUOTE}\s*[:=,]\s*(?:[bru]?\\*[\"'])?{_SCHEME}{_BARE}",
        r"\bbearer\s+(?=\S*\d)(?P<value>[\w.~+/=-]{8,})",
        # whose beginning their makers have chosen
        r"\b(?P<value>(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-)[\w-]{16,})",
    )
]
_MAY_HAVE_SECRETS = re.compile(
    r"key|token|secret|pass|pwd|credential|authorization|bearer|sk-|hf_|gh|glpat|xox", re.IGNORECASE
)
# What stands behind the name of a setting in a sentence, or is no credential
_NO_SECRETS = frozenset(
    (
        "*** a an and are as at be by can cannot contains denied does empty error expected expects"
        " expired failed false field for from given had has header how if in incorrect input"
        " invalid is it may missing must needed needs no none not null of on or passed please"
        " required requires rejected scheme set should takes than that the this to token true try"
        " undefined unknown unset value value was were with wrong you your"
    ).split()
)
_SHORTEST = 4  # characters of a credential that is looked for in other text
_SHORTEST_WITHIN = 7  # characters of it in the base64 of a longer text
_KNOWN: dict[str, None] = {}  # credentials that this process was given, and how others write them
MOST_CHARACTERS = 400  # of a quoted message of another library; the log has the rest


def without_credentials(value: Any) -> Any:
    """A flag's text with `***` for the user name and password of each URL in it, and for passwords
    and keys after `?` or `&`; the items of a list likewise; another value as it is. The flags that
    a run saves pass through here; messages pass through `safe_text`."""
    if isinstance(value, list | tuple):
        return type(value)(map(without_credentials, value))
    if not isinstance(value, str) or not ("@" in value or "=" in value):
        return value
    setting = _SETTING
    if "://" in value:
        setting = _URL_SETTING
    without_users = _USER.sub(rf"\1{HIDDEN}@", value)
    return setting.sub(rf"\1{HIDDEN}", without_users)


def remember_credentials(flag: str) -> None:
    """Hide what `without_credentials` hides in this flag in every later message too, wherever it
    stands: a service or a function may quote it, as it is, percent-encoded, in base64 or in hex."""
    secrets = [value for _, value in _URL_SETTING.findall(flag) if "://" in flag]
    secrets += [value for _, value in _SETTING.findall(flag) if "://" not in flag]
    for _, user in _USER.findall(flag):
        secrets += [user, user.partition(":")[2]]
    for secret in secrets:
        remember_secret(secret)
        remember_secret(unquote(secret))


def remember_secret(secret: str) -> None:
    """Hide this text in every later message of this process, if it is long enough to mean it."""
    if len(secret) < _SHORTEST or secret == HIDDEN:
        return
    content = secret.encode(errors="surrogatepass")
    texts = [secret, quote(secret, safe="", errors="surrogatepass"), content.hex()]
    for code in (base64.b64encode(content), base64.urlsafe_b64encode(content)):
        texts.append(code.decode().rstrip("="))
    for offset in range(3):
        texts += _within_base64(content, offset)
    for text in texts:
        _KNOWN[text] = None


def _within_base64(content: bytes, offset: int) -> list[str]:
    """How these bytes look in the base64 of a longer text, such as `user:password`, in which
    `offset` bytes, or 3 or 6 more, precede them: the characters that nothing else decides. []
    if they are too few to mean this text."""
    first = -(-8 * offset // 6)
    last = 8 * (offset + len(content)) // 6
    if last - first < _SHORTEST_WITHIN:
        return []
    padded = bytes(offset) + content
    codes = (base64.b64encode(padded), base64.urlsafe_b64encode(padded))
    return [code.decode()[first:last] for code in codes]


def is_secret_name(name: str) -> bool:
    """Whether the value of the setting `name` of a function is a credential."""
    return re.fullmatch(_SECRETS, name, re.IGNORECASE) is not None


def safe_text(text: str) -> str:
    """`text` without the credentials in its URLs and settings, without those that this process was
    given, and without what looks like one in a text of somebody else, such as `Authorization:
    Bearer ...`, `--api_key ...`, `HF_TOKEN=...` and `{"password": "..."}`. What a run prints or
    logs passes through here."""
    for secret in sorted(_KNOWN, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = str(without_credentials(text))
    if _MAY_HAVE_SECRETS.search(text):
        for pattern in _IN_TEXT:
            text = pattern.sub(_hide_value, text)
    return text


def _hide_value(setting: re.Match[str]) -> str:
    """A setting with `***` in place of its `value`, unless that is a word of a sentence."""
    value = setting["value"]
    is_word = value.lower().rstrip(".:!?") in _NO_SECRETS
    if is_word or value.startswith((HIDDEN, "<", "[", "$")):
        return setting[0]
    start = setting.start("value") - setting.start()
    return f"{setting[0][:start]}{HIDDEN}{setting[0][start + len(value) :]}"


class UserError(ValueError):
    """Bad input: a flag, file, row or model that cannot be used.

    The message names the flag, file or row and says what to do. The entry points print it without a
    traceback and exit with code 2. Every other exception propagates. It may quote data, so its text
    is `escaped`.
    """

    def __str__(self) -> str:
        return safe_text(escaped(super().__str__()))


class StorageError(UserError):
    """The outputs cannot be written: the disk is full, the folder is not writable, or the hub takes
    no upload. The message names the path and the cause, and for a checkpoint the one from which the
    run can resume."""


class NonFiniteError(FloatingPointError):
    """NaN or infinity in the training."""


class UnhealthyRun(Exception):  # noqa: N818  a decision of the user, by a flag
    """The run ends because of a health event (`--stop_on_health`), with its state saved; raised on
    every rank. The entry points print the message without a traceback and exit with code 6."""


class StopRequested(Exception):  # noqa: N818  nothing went wrong
    """The run stops here on every rank: a stop was requested and the state is saved, or the run was
    already finished. The message says how to continue. The entry points print it on rank 0 and exit
    with code 0."""


class RolloutCancelled(Exception):  # noqa: N818  nothing went wrong
    """A stop was requested during a rollout, whose answers are discarded; raised on every rank."""


def escaped(text: str) -> str:
    """`text` with escapes such as `\\x1b` for characters that a terminal obeys or does not show;
    line breaks and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    characters = []
    for character in text:
        is_hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        if is_hidden and character not in "\n\t" + _JOINERS:
            characters.append(ascii(character)[1:-1])
        else:
            characters.append(character)
    return "".join(characters)


def printable_line(text: str) -> str:
    """`text` in one line: white space is one space each, and characters that a terminal obeys or
    hides are escaped."""
    return escaped(" ".join(text.split()))


def in_one_line(problem: BaseException) -> str:
    """The message of an exception in one line of at most `MOST_CHARACTERS`, to be quoted in another
    message. A message of one word, such as the key of a `KeyError`, is preceded by the name of the
    exception."""
    message = printable_line(str(problem))
    if " " not in message:
        message = f"{type(problem).__name__}: {message}".rstrip(": ")
    if len(message) > MOST_CHARACTERS:
        message = f"{message[:MOST_CHARACTERS]}..."
    return message


def counted(count: int, what: str, several: str | None = None) -> str:
    """A number and what it counts: "1 row", "2 rows"; `several` if the plural is not formed by an
    s."""
    if count == 1:
        return f"{count} {what}"
    if several is None:
        several = f"{what}s"
    return f"{count} {several}"


def nearest_path(path: str | Path) -> str:
    """`; did you mean PATH?`, with the existing path that is most similar to the first part of
    `path` that does not exist; "" if none is similar."""
    with suppress(OSError):  # a folder that is not readable
        for ancestor in (*reversed(Path(path).parents), Path(path)):
            folder = ancestor.parent
            if folder.is_dir() and not ancestor.exists():
                near = difflib.get_close_matches(
                    ancestor.name, os.listdir(folder), n=1, cutoff=0.65
                )
                if near:
                    return f"; did you mean {folder / near[0]}?"
                return ""
    return ""


class Attempt:
    """What ended the block of `attempt`, if anything did."""

    problem: BaseException | None = None


@contextmanager
def attempt(also_exits: bool = False) -> Iterator[Attempt]:
    """Run code that may raise anything: a library that reads a file of the user, a way that a model
    may not fit, or a function of one's own. The package's only handler of every exception, besides
    the top level of a rank: whoever uses it looks at `problem`, and raises those that are not of
    that code.

    `KeyboardInterrupt` and `SystemExit` pass, unless `also_exits`, for the top level of a process.
    A panic in Rust code derives from `BaseException` and can be recognised only by its name.
    """
    tried = Attempt()
    try:
        yield tried
    except BaseException as problem:  # noqa: BLE001  see above
        if not (
            isinstance(problem, Exception)
            or type(problem).__name__ == "PanicException"
            or also_exits
        ):
            raise
        tried.problem = problem


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn the exceptions of a library that reads a file or value of the user into a `UserError`.
    `what` is the flag, file or row and what is wrong with it; the message of the library follows.

    The block must do nothing but read. Libraries raise almost any exception for a malformed file:
    tokenizers raises plain `Exception`; transformers raises KeyError, AttributeError,
    ZeroDivisionError and more. Those of this module pass.
    """
    with attempt() as tried:
        yield
    if isinstance(tried.problem, (UserError, NonFiniteError, StopRequested, RolloutCancelled)):
        raise tried.problem
    if tried.problem is not None:
        raise UserError(f"{what}: {in_one_line(tried.problem)}") from tried.problem
