"""Where an event's item stands among the items that its user could have been shown."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model.batch import Int32, Int64, PastEvents


class RankListener(Protocol):
    """Is told of every event that was ranked, before the model learns from it; evaluation looks on through it."""

    top: int  # how many of the best items it wants to see for each event; 0 = none

    def ranked(self, events: PastEvents, ranks: Int64, popularity_ranks: Int64, top: Int32) -> None:
        """Ranks (n,) of the events' items by the full score and by popularity, 0-based, -1 = a miss.

        top (n, self.top): item rows by the full score, best first, among the same candidates; 0 where there are no
        more.
        """
        ...


def rank(
    scores: Tensor, events: PastEvents, first_seen: Tensor, seen: tuple[Int32, Int64], top: int = 0
) -> tuple[Int64, Int32]:
    """0-based ranks (B,) of the events' items and the `top` best item rows (B, top), 0 where there are no more.

    A rank of -1 is a miss: an item that was new, or already clicked by the user.

    scores (B, rows): of all items, written over. first_seen (rows,): number of the event an item appeared with.
    seen: items each user had clicked before the event (flat) and where each event's part ends (B,). Candidates
    are the items that appeared before the event and that the user had not clicked; a tie goes to the item that
    appeared earlier.
    """
    device = scores.device
    mask_seen(scores, seen)
    appeared = first_seen.unsqueeze(0) < torch.from_numpy(events.sequence).to(device).unsqueeze(1)
    scores.masked_fill_(~appeared, float("-inf"))
    own = torch.from_numpy(events.items).to(device, torch.int64).unsqueeze(1)
    target = scores.gather(1, own)  # (B, 1)
    tied_before = (scores == target) & (first_seen.unsqueeze(0) < first_seen[own])
    ranks = (scores > target).sum(1) + tied_before.sum(1)
    missed = ~torch.isfinite(target.squeeze(1)) | (own.squeeze(1) == 0)
    return torch.where(missed, -1, ranks).cpu().numpy().astype(np.int64), best_rows(scores, first_seen, top)


def mask_seen(scores: Tensor, seen: tuple[Int32, Int64]) -> None:
    """Set `scores` (B, rows) of seen items to minus infinity; seen: item rows (flat), where each user's end (B,)."""
    ends = torch.from_numpy(seen[1])
    of_user = torch.repeat_interleave(torch.arange(len(ends)), torch.diff(ends, prepend=ends.new_zeros(1)))
    scores[of_user.to(scores.device), torch.from_numpy(seen[0]).to(scores.device)] = float("-inf")


def best_rows(scores: Tensor, first_seen: Tensor, top: int) -> Int32:
    """Item rows (B, top) by `scores` (B, rows), best first, a tie in the order of appearance; 0 for minus infinity.

    Which of several with the very same score come last into the list is left open.
    """
    values, rows = scores.topk(min(top, scores.shape[1]), dim=1)
    by_age = first_seen[rows].argsort(dim=1, stable=True)
    order = by_age.gather(1, values.gather(1, by_age).argsort(dim=1, descending=True, stable=True))
    found = torch.where(torch.isfinite(values), rows, 0).gather(1, order)
    return torch.nn.functional.pad(found, (0, top - found.shape[1])).cpu().numpy().astype(np.int32)
