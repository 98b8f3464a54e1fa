"""Credentials in addresses, hidden wherever an address becomes text.

`s3://KEY:SECRET@bucket/cache` and `https://host/cache?token=…` are addresses that drivers take, and addresses are what
messages, `config.yaml` and results name. Asking every message to think of it would fail at the first that does not, so
text is redacted where it leaves: in the constructor of our errors, in status lines, in what commands print and in files
of settings. Better is to give credentials by the environment, as the drivers' own tools do.
"""

from __future__ import annotations

import re

HIDDEN = "***"
# A secret of AWS may hold slashes; a path that went through pathlib has one slash left of two.
_USER = re.compile(r"(?<=[\w+.-]:/)(/?)([^/\s@:'\"]*:[^\s@'\"]+|[^/\s@'\"]+)(?=@)")
_PARAMETER = re.compile(r"([?&][\w.-]*(?:token|secret|key|sig|pass|credential|auth)[\w.-]*=)[^&\s'\"]+", re.IGNORECASE)


def redact(text: str, address: str = "") -> str:
    """Return a text with `***` in place of credentials in its addresses.

    Args:
        text: any.
        address: its credentials are hidden where they stand alone too, as drivers quote them.
    """
    for found in _USER.finditer(address):
        text = text.replace(found[2], HIDDEN)
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", _USER.sub(rf"\g<1>{HIDDEN}", text))
