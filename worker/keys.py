"""Every key name that is published, and the version of the layout."""

from dataclasses import dataclass

LAYOUT = 1


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix. An id stands in its key as it is, without braces around it."""

    prefix: str = "rec"

    @property
    def users(self) -> str:
        """What comes before a user's id."""
        return f"{self.prefix}:user:"

    @property
    def items(self) -> str:
        """What comes before an item's id."""
        return f"{self.prefix}:item:"

    @property
    def tops(self) -> str:
        """What comes before the id of a user, for its best items."""
        return f"{self.prefix}:top:"

    def user(self, user_id: str) -> str:
        return self.users + user_id

    def item(self, item_id: str) -> str:
        return self.items + item_id

    @property
    def meta(self) -> str:
        return f"{self.prefix}:meta"

    @property
    def popular(self) -> str:
        return f"{self.prefix}:popular"

    @property
    def worker(self) -> str:
        return f"{self.prefix}:worker"

    @property
    def stats(self) -> str:
        return f"{self.prefix}:stats"

    @property
    def claim(self) -> str:
        """The newest worker that waits to claim again, after the claim itself was lost; short-lived."""
        return f"{self.prefix}:claim"

    @property
    def pattern(self) -> str:
        """Glob of every key under the prefix, for SCAN."""
        escaped = "".join(f"\\{char}" if char in r"*?[]\^" else char for char in self.prefix)
        return f"{escaped}:*"
