"""Where an event's item stands among the items that its user could have been shown."""

import numpy as np
import torch
from torch import Tensor

from model.batch import Int32, Int64, PastEvents


def rank(users: Tensor, items: Tensor, events: PastEvents, first_seen: Tensor, seen: tuple[Int32, Int64]) -> Int64:
    """0-based ranks (B,) of the events' items; -1 = a miss: an item that was new, or already clicked by the user.

    users (B, dim), items (rows, dim): vectors. first_seen (rows,): number of the event an item appeared with.
    seen: items each user had clicked before the event (flat) and where each event's part ends (B,). Candidates
    are the items that appeared before the event and that the user had not clicked; a tie goes to the item that
    appeared earlier.
    """
    device = users.device
    ends = torch.from_numpy(seen[1])
    of_event = torch.repeat_interleave(torch.arange(len(ends)), torch.diff(ends, prepend=ends.new_zeros(1)))
    scores = users @ items.T  # (B, rows)
    appeared = first_seen.unsqueeze(0) < torch.from_numpy(events.sequence).to(device).unsqueeze(1)
    scores.masked_fill_(~appeared, float("-inf"))
    scores[of_event.to(device), torch.from_numpy(seen[0]).to(device)] = float("-inf")
    own = torch.from_numpy(events.items).to(device, torch.int64).unsqueeze(1)
    target = scores.gather(1, own)  # (B, 1)
    tied_before = (scores == target) & (first_seen.unsqueeze(0) < first_seen[own])
    ranks = (scores > target).sum(1) + tied_before.sum(1)
    missed = ~torch.isfinite(target.squeeze(1)) | (own.squeeze(1) == 0)
    return torch.where(missed, -1, ranks).cpu().numpy().astype(np.int64)
