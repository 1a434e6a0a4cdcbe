"""What is a secret, and how it is left out of all that is shown or written.

A secret is the value of a key with such a name, at any depth; a login in an address,
`http://NAME:PASSWORD@HOST`; and what `note_secret` was called with. Errors of this package
(`adora_vl/utils/errors.py`) hide secrets by themselves.
"""

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

HIDDEN = "..."
_NAME = r"(?:token|passw(?:or)?d|secret|api[_-]?key|access[_-]?key|authorization|credentials?)"
_SECRET_KEY = re.compile(rf"(?:.*[_-])?{_NAME}", re.IGNORECASE)
_TEXT_KEY = re.compile(
    r"(?:eos|bos|pad|unk|sep|cls|mask|stop|image|video|vision|control)[_-]token", re.IGNORECASE
)
_LOGIN = re.compile(r"(?<=://)[^\s/?#'\"]+@")
_QUERY = re.compile(rf"([?&](?:[\w-]*[_-])?{_NAME}=)[^&\s'\"]+", re.IGNORECASE)
# A key and its value in JSON or YAML: in quotes, or a word that is longer than `true` and `null`.
_ENTRY = re.compile(
    rf"""(?<![\w-])((?:[\w-]*[_-])?{_NAME})(["']?\s*:\s*)("(?:[^"\\]|\\.)+"|'[^']+'|[^\s,}}"'|<]{{5,}})""",
    re.IGNORECASE,
)
_SHORTEST = 8  # characters of a secret that is looked for in all texts; a shorter one may be a word
_noted: set[str] = set()


def note_secret(value: str) -> None:
    """Hide this value from now on, wherever `masked_text` meets it."""
    if len(value) >= _SHORTEST:
        _noted.add(value)


def is_secret(key: object) -> bool:
    """Return whether a key of this name has a secret for its value.

    Names of a model's own tokens are none.
    """
    return (
        isinstance(key, str)
        and _SECRET_KEY.fullmatch(key) is not None
        and _TEXT_KEY.fullmatch(key) is None
    )


def masked(value: Any, hidden: str | None = HIDDEN) -> Any:
    """Return `value` with `hidden` for each secret in it.

    Secrets are looked for in its mappings, lists and texts, and are noted. A value of another kind
    stays as it is. Of a plain text only logins in addresses are hidden: its sentences may say
    `password: ...`.
    """
    if type(value) is str:
        return (
            masked_text(value) if value.lstrip().startswith("{") else _LOGIN.sub(_hide_login, value)
        )
    if type(value) in (list, tuple):
        return type(value)(masked(item, hidden) for item in value)
    if not isinstance(value, Mapping):
        return value
    secret = {
        key: item
        for key, item in value.items()
        if is_secret(key) and isinstance(item, str) and item
    }
    for item in secret.values():
        note_secret(item)
    return {key: hidden if key in secret else masked(item, hidden) for key, item in value.items()}


def masked_text(text: str, *secrets: str) -> str:
    """Return the text without secrets.

    They are logins in addresses, values of secret keys, `secrets` and all that was noted.
    """
    for secret in (*secrets, *_noted):
        text = _without(text, secret)

    def hide_entry(match: re.Match[str]) -> str:
        key, between, value = match.groups()
        mark = value[0] if value[0] in "\"'" else ""
        return f"{key}{between}{mark}{HIDDEN}{mark}" if is_secret(key) else match[0]

    return _ENTRY.sub(hide_entry, _QUERY.sub(rf"\g<1>{HIDDEN}", _LOGIN.sub(_hide_login, text)))


def masked_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, for someone who may read it."""
    shown_words = []
    is_value_secret = False
    for word in words:
        key, sign, _ = word.partition("=")
        hidden = key.startswith("--") and is_secret(key[2:])
        if is_value_secret:
            shown_words.append(HIDDEN)
        elif hidden and sign:
            shown_words.append(f"{key}={HIDDEN}")
        else:
            shown_words.append(masked_text(word))
        is_value_secret = hidden and not sign
    return shown_words


def without_login(address: str) -> tuple[str, tuple[str, str] | None]:
    """Return an address without its login, and name and password, which are noted as a secret."""
    parts = urlsplit(address)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return address, None
    name, _, password = login.partition(":")
    note_secret(unquote(password))
    return urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password))


def _hide_login(match: re.Match[str]) -> str:
    """Return what stands for a login in an address, whose password is noted as a secret."""
    note_secret(unquote(match[0][:-1].partition(":")[2]))
    return f"{HIDDEN}@"


def _without(text: str, secret: str) -> str:
    """Return the text without a secret, in whatever spelling it stands there.

    It may be as it is, quoted for an address, JSON or HTML, in hexadecimal or Base64, in letters of
    any size.
    """
    if not secret:
        return text
    content = secret.encode()
    escaped = json.dumps(secret)[1:-1]
    forms = {
        secret,
        quote(secret, safe=""),
        quote(secret),
        escaped,
        escaped.replace("/", "\\/"),
        html.escape(secret),
    }
    forms |= {
        content.hex(),
        "".join(f"%{byte:02x}" for byte in content),
        "".join(f"\\u{ord(c):04x}" for c in secret),
    }
    patterns = [re.escape(form) for form in sorted(forms, key=len, reverse=True)]
    if len(secret) >= _SHORTEST:
        # the letters that the bytes beside it have no part in
        for before, first in (
            (0, 0),
            (1, 2),
            (2, 3),
        ):
            encoded = base64.b64encode(b"\0" * before + content)[
                first : (before + len(content)) * 8 // 6
            ].decode()
            patterns.append(
                rf"{re.escape(encoded).replace('/', '[/_]').replace(re.escape('+'), '[+-]')}[\w+/=-]*"
            )
    return re.sub("|".join(patterns), HIDDEN, text, flags=re.IGNORECASE)
