"""What is a secret, and how it is left out of all that is shown or written.

A secret is the value of a key with such a name, at any depth; a login in an address,
`http://NAME:PASSWORD@HOST`; and what `register_secret` was called with. Errors of this package
(`adora_vl/utils/errors.py`) hide secrets by themselves.
"""

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

HIDDEN_MARK = "..."
# What a key is called whose value is a secret; names of a model's own tokens are not meant
_KEY_NAME_REGEX = (
    r"(?:token|passw(?:or)?d|secret|api[_-]?key|access[_-]?key|authorization|credentials?)"
)
_SECRET_KEY_PATTERN = re.compile(rf"(?:.*[_-])?{_KEY_NAME_REGEX}", re.IGNORECASE)
_MODEL_TOKEN_KEY_PATTERN = re.compile(
    r"(?:eos|bos|pad|unk|sep|cls|mask|stop|image|video|vision|control)[_-]token", re.IGNORECASE
)
_LOGIN_PATTERN = re.compile(r"(?<=://)[^\s/?#'\"]+@")
_SECRET_IN_QUERY_PATTERN = re.compile(
    rf"([?&](?:[\w-]*[_-])?{_KEY_NAME_REGEX}=)[^&\s'\"]+", re.IGNORECASE
)
# A key and its value in JSON or YAML: in quotes, or a word that is longer than `true` and `null`.
_SECRET_ENTRY_PATTERN = re.compile(
    rf"""(?<![\w-])((?:[\w-]*[_-])?{_KEY_NAME_REGEX})(["']?\s*:\s*)("(?:[^"\\]|\\.)+"|'[^']+'|[^\s,}}"'|<]{{5,}})""",
    re.IGNORECASE,
)
# characters of a secret that is looked for in all texts; a shorter one may be a word
_MIN_SECRET_CHARACTERS = 8
_registered_secrets: set[str] = set()


def register_secret(value: str) -> None:
    """Let `redact_secrets` hide this value from now on, wherever it stands in a text."""
    if len(value) >= _MIN_SECRET_CHARACTERS:
        _registered_secrets.add(value)


def is_secret(key: object) -> bool:
    """Return whether the value of a key with this name is a secret, such as `api_key`.

    A model's own tokens, such as `eos_token`, are not.
    """
    return (
        isinstance(key, str)
        and _SECRET_KEY_PATTERN.fullmatch(key) is not None
        and _MODEL_TOKEN_KEY_PATTERN.fullmatch(key) is None
    )


def without_secrets(value: Any, hidden_as: str | None = HIDDEN_MARK) -> Any:
    """Return a value in which `hidden_as` stands for each secret, before it is shown or written.

    For example, `{"api_key": "k1", "url": "http://me:pw@host"}` becomes
    `{"api_key": "...", "url": "http://...@host"}`. Nested mappings and lists are searched too. The
    secrets are registered (`register_secret`), so that they are hidden elsewhere too. A value of
    another type is returned as it is.

    In a text that is no JSON object only logins in addresses are hidden: a sentence may well say
    `password: ...`.
    """
    if type(value) is str:
        is_json_object = value.lstrip().startswith("{")
        return redact_secrets(value) if is_json_object else _LOGIN_PATTERN.sub(_hide_login, value)
    if type(value) in (list, tuple):
        return type(value)(without_secrets(item, hidden_as) for item in value)
    if not isinstance(value, Mapping):
        return value
    # All secrets are registered first, since the other values may contain them too.
    secret_by_key = {
        key: item
        for key, item in value.items()
        if is_secret(key) and isinstance(item, str) and item
    }
    for secret in secret_by_key.values():
        register_secret(secret)
    return {
        key: hidden_as if key in secret_by_key else without_secrets(item, hidden_as)
        for key, item in value.items()
    }


def redact_secrets(text: str, *secrets: str) -> str:
    """Return a text with `...` in place of each secret.

    Secrets are the texts in `secrets`, those that `register_secret` has stored, logins in
    addresses, and the values of keys such as `api_key`, in an address or in JSON or YAML.
    """
    for secret in (*secrets, *_registered_secrets):
        text = _without_secret(text, secret)

    def hide_entry(match: re.Match[str]) -> str:
        """Hide the value of a key in JSON or YAML, inside its quotation marks if it has some."""
        key, separator, value = match.groups()
        if not is_secret(key):
            return match[0]
        quotation_mark = value[0] if value[0] in "\"'" else ""
        return f"{key}{separator}{quotation_mark}{HIDDEN_MARK}{quotation_mark}"

    text = _LOGIN_PATTERN.sub(_hide_login, text)
    text = _SECRET_IN_QUERY_PATTERN.sub(rf"\g<1>{HIDDEN_MARK}", text)
    return _SECRET_ENTRY_PATTERN.sub(hide_entry, text)


def redact_arguments(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `...` in place of each secret.

    For example, `--api_key=k1` becomes `--api_key=...`, and `--api_key k1` becomes `--api_key ...`.
    """
    redacted_words = []
    is_value_secret = False  # whether the word before was an option such as `--api_key`
    for word in words:
        option, equals_sign, _ = word.partition("=")
        is_secret_option = option.startswith("--") and is_secret(option.removeprefix("--"))
        has_value = equals_sign != ""
        if is_value_secret:
            redacted_words.append(HIDDEN_MARK)
        elif is_secret_option and has_value:
            redacted_words.append(f"{option}={HIDDEN_MARK}")
        else:
            redacted_words.append(redact_secrets(word))
        is_value_secret = is_secret_option and not has_value
    return redacted_words


def without_login(address: str) -> tuple[str, tuple[str, str] | None]:
    """Divide an address such as `http://NAME:PASSWORD@HOST` into the address alone and its login.

    Returns:
        the address without the login, and name and password, or None without one. The password is
        registered as a secret.
    """
    parts = urlsplit(address)
    login, at_sign, host = parts.netloc.rpartition("@")
    if at_sign == "":
        return address, None
    name, _, password = login.partition(":")
    register_secret(unquote(password))
    return urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password))


def _hide_login(match: re.Match[str]) -> str:
    """Return what stands for `NAME:PASSWORD@` in an address, and register the password."""
    login = match[0].removesuffix("@")
    _, _, password = login.partition(":")
    register_secret(unquote(password))
    return f"{HIDDEN_MARK}@"


def _without_secret(text: str, secret: str) -> str:
    """Return a text in which `...` stands for a secret, however the secret is encoded there.

    The secret may be unchanged, quoted for an address, JSON or HTML, or in hexadecimal, each in
    upper or lower case. A long secret may also be part of a text in Base64.
    """
    if not secret:
        return text
    content = secret.encode()
    escaped = json.dumps(secret)[1:-1]
    spellings = {
        secret,
        quote(secret, safe=""),
        quote(secret),
        escaped,
        escaped.replace("/", "\\/"),
        html.escape(secret),
        content.hex(),
        "".join(f"%{byte:02x}" for byte in content),
        "".join(f"\\u{ord(character):04x}" for character in secret),
    }
    # The longest goes first, as a shorter one may be a part of it.
    patterns = [re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True)]
    if len(secret) >= _MIN_SECRET_CHARACTERS:
        patterns += _base64_patterns(content)
    return re.sub("|".join(patterns), HIDDEN_MARK, text, flags=re.IGNORECASE)


def _base64_patterns(content: bytes) -> list[str]:
    """Return regular expressions that find bytes in a Base64 text, where others may precede them.

    Base64 writes three bytes as four letters. The letters of these bytes therefore depend on how
    many bytes precede them, modulo three, and there is an expression for each case. A first or last
    letter that also depends on a neighbouring byte is left out. Each expression also matches the
    rest of the word behind the letters.

    For example, `key` is found as `a2V5`, `tle` or `rZX`, after 0, 1 or 2 bytes modulo three.
    """
    patterns = []
    # by the number of bytes before: how many letters at the beginning are theirs too
    shared_letters_by_offset = {0: 0, 1: 2, 2: 3}
    for offset, shared_letters in shared_letters_by_offset.items():
        # a letter has six bits; the last one may be made of the next byte too
        whole_letters = (offset + len(content)) * 8 // 6
        encoded = base64.b64encode(b"\0" * offset + content)[shared_letters:whole_letters].decode()
        # the spelling for addresses has - and _ in place of + and /
        pattern = re.escape(encoded).replace("/", "[/_]").replace(re.escape("+"), "[+-]")
        patterns.append(rf"{pattern}[\w+/=-]*")
    return patterns
