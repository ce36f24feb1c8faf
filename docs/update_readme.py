"""Write the README's table of settings again, from the settings themselves: `make readme`."""

import re
from pathlib import Path

from worker.config_view import settings_table_markdown

README = Path(__file__).parent.parent / "README.md"
_BETWEEN = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- /settings -->)", re.DOTALL)


def with_settings(text: str) -> str:
    """The README's text with the table that the code has now. ValueError without the two markers."""
    text, found = _BETWEEN.subn(lambda _: f"\n{settings_table_markdown()}\n", text)
    if found != 1:
        raise ValueError("README.md must have <!-- settings --> and <!-- /settings --> once, each on a line of its own")
    return text


if __name__ == "__main__":
    README.write_text(with_settings(README.read_text()))
