"""Every key name that is published, and the version of the layout."""

from dataclasses import dataclass

LAYOUT = 1


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix. An id stands in its key as it is, without braces around it."""

    prefix: str = "rec"

    def user(self, user_id: str) -> str:
        return f"{self.prefix}:user:{user_id}"

    def item(self, item_id: str) -> str:
        return f"{self.prefix}:item:{item_id}"

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
