"""Secrets are kept out of everything that people read."""

import re
from collections.abc import Iterable, Iterator
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import BaseModel, SecretStr

MASK = "***"
# user:password@ of any URL, also of one whose password holds characters that should have been escaped
_USERINFO = re.compile(r"(?<=://)\S*@")
_PASSWORD_ARGUMENT = re.compile(r"([?&]\w*password=)[^&\s]*", re.IGNORECASE)


class Redactor:
    """Replaces known secrets, and whatever stands before the host in a URL, by ***."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        # the longest first: one secret may be a part of another
        known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return mask_url(text)


def mask_url(text: str) -> str:
    """`text` without the user and password of any URL in it."""
    if "://" not in text:
        return text
    return _PASSWORD_ARGUMENT.sub(rf"\1{MASK}", _USERINFO.sub(f"{MASK}@", text))


def secrets_of(settings: BaseModel) -> list[str]:
    """Every secret in `settings`; of a URL its password, as it is written and as it is meant."""
    return list(_secrets(settings))


def _secrets(settings: BaseModel) -> Iterator[str]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _secrets(value)
        elif isinstance(value, SecretStr):
            text = value.get_secret_value()
            yield from _passwords(text) if "://" in text else (text,)


def _passwords(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    if parts.password:
        yield parts.password
        yield unquote(parts.password)
    for name, values in parse_qs(parts.query).items():
        if name.lower().endswith("password"):
            yield from values
