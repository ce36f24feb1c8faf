"""Tables, negatives, replay and losses against their formulas."""

import numpy as np
import pytest
import torch

from model.adam import Adam
from model.batch import PastEvents
from model.decay import decayed_means, decayed_means_by_bags
from model.kernels import compacted
from model.losses import sampled_softmax, weighted
from model.sampling import NegativeSampler, ReplayBuffer, block_seen, generator
from model.tables import EmbeddingTable

CPU = torch.device("cpu")


def table(**changes: object) -> EmbeddingTable:
    settings = {"name": "t", "width": 4, "init_std": 0.1, "learning_rate": 0.5, "seed": 1, "device": CPU}
    return EmbeddingTable(**(settings | changes))  # type: ignore[arg-type]


def test_rows_step_by_row_wise_adagrad() -> None:
    one = table()
    one.grow(10)
    before, rows = one.weight.clone(), torch.tensor([2, 7])
    squares = torch.zeros(2)
    for gradient in (torch.randn(2, 4), torch.randn(2, 4)):
        one.apply(rows, gradient, torch.tensor(True))
        squares += gradient.square().mean(1)
        before[rows] -= 0.5 * gradient / (squares + 1e-10).sqrt().unsqueeze(1)
    torch.testing.assert_close(one.weight, before)


def test_new_rows_do_not_depend_on_how_a_table_grew() -> None:
    a, b = table(), table()
    a.grow(5000)
    for rows in (3, 1100, 2049, 5000):
        b.grow(rows)
    assert torch.equal(a.weight, b.weight)
    assert not torch.equal(a.weight[1:100], table(seed=2).weight[1:100]) or len(table(seed=2).weight) == 1


def test_a_reset_row_is_drawn_anew_without_optimizer_state() -> None:
    one = table()
    one.grow(10)
    one.apply(torch.tensor([3]), torch.ones(1, 4), torch.tensor(True))
    old = one.weight[3].clone()
    one.reset(np.array([3], np.int32))
    assert one.squares[3] == 0
    assert not torch.equal(one.weight[3], old)
    assert one.weight[3].abs().max() < 1


def test_a_table_of_another_width_is_not_loaded() -> None:
    one = table(width=8)
    one.grow(10)
    with pytest.raises(ValueError, match="width 8"):
        table(width=4).load(one.state(10))


def test_negatives_are_drawn_by_clicks_to_a_power() -> None:
    sampler = NegativeSampler(0.75)
    sampler.grow(4)
    sampler.count(np.array([1] * 1 + [2] * 16 + [3] * 81, np.int32))
    drawn = np.bincount(sampler.draw(40_000, np.random.default_rng(0)), minlength=4) / 40_000
    share = np.array([0, 1, 8, 27]) / 36
    np.testing.assert_allclose(drawn[:4], share, atol=0.01)
    np.testing.assert_allclose(
        sampler.log_expected(np.array([1, 2, 3], np.int32), 72), np.log(2 * np.array([1, 8, 27])), rtol=1e-5
    )
    sampler.forget(np.array([3], np.int32))
    assert set(sampler.draw(1000, np.random.default_rng(0)).tolist()) == {1, 2}


def test_without_clicks_nothing_is_drawn() -> None:
    assert NegativeSampler(0.75).draw(5, np.random.default_rng(0)).tolist() == [0] * 5


def test_own_and_seen_items_are_no_negatives() -> None:
    negatives = np.array([5, 3, 5, 9, 0], np.int32)
    positives = np.array([3, 9], np.int32)
    blocked = np.zeros((2, 5), np.bool_)
    block_seen(negatives, positives, np.array([5, 1, 2], np.int32), np.array([2, 3]), 10, blocked)
    assert blocked.tolist() == [[True, True, True, False, False], [False, False, False, True, False]]


def test_replay_prefers_recent_events_by_an_exponential_age() -> None:
    buffer = ReplayBuffer(mean_age=100)
    for start in range(0, 1000, 50):
        n = np.arange(start, start + 50)
        buffer.add(PastEvents(n.astype(np.int32), n.astype(np.int32), n, np.ones(50, np.float32), n))
    ages = 999 - buffer.draw(20_000, np.random.default_rng(0)).sequence
    assert ages.min() >= 0
    assert ages.max() < 400  # four mean ages are kept
    expected = 100 * (1 - 4 * np.exp(-4) / (1 - np.exp(-4)))  # of an exponential that is cut there
    assert ages.mean() == pytest.approx(expected, rel=0.05)
    assert len(ReplayBuffer(10).draw(5, np.random.default_rng(0))) == 0


def test_evicted_rows_are_not_replayed() -> None:
    buffer = ReplayBuffer(mean_age=100)
    n = np.arange(1, 51)
    buffer.add(PastEvents(n.astype(np.int32), n.astype(np.int32), n, np.ones(50, np.float32), n))
    gone = np.zeros(51, np.bool_)
    gone[:26] = True
    buffer.forget_users(gone)
    drawn = buffer.draw(500, np.random.default_rng(0))
    assert (drawn.weights[drawn.users == 0] == 0).all()
    assert drawn.users[drawn.weights > 0].min() == 26


def test_random_choices_depend_on_seed_purpose_and_step_alone() -> None:
    draw = generator(1, "step", 7).random(3).tolist()
    assert generator(1, "step", 7).random(3).tolist() == draw
    others = [generator(2, "step", 7), generator(1, "other", 7), generator(1, "step", 8)]
    assert all(other.random(3).tolist() != draw for other in others)


def test_the_sampled_softmax_is_the_softmax_over_unblocked_corrected_scores() -> None:
    positive, negative = torch.tensor([1.0, 2.0]), torch.tensor([[0.5, 3.0, -1.0], [0.0, 1.0, 2.0]])
    own_q, q = torch.tensor([0.1, 0.2]), torch.tensor([0.3, -0.4, 0.5])
    blocked = torch.tensor([[False, True, False], [False, False, False]])
    gradients = []
    for loss_of in (sampled_softmax, plain_sampled_softmax):
        scores = positive.clone().requires_grad_(), negative.clone().requires_grad_()
        losses = loss_of(*scores, own_q, q, blocked)
        (losses * torch.tensor([1.0, -2.0])).sum().backward()
        gradients.append((losses.detach(), scores[0].grad, scores[1].grad))
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference)
    assert gradients[0][2][0, 1] == 0  # a blocked negative


def plain_sampled_softmax(
    positive: torch.Tensor, negative: torch.Tensor, own_q: torch.Tensor, q: torch.Tensor, blocked: torch.Tensor
) -> torch.Tensor:
    """The definition, one sample at a time."""
    losses = []
    for n in range(len(positive)):
        others = [negative[n, k] - q[k] for k in range(len(q)) if not blocked[n, k]]
        losses.append(-torch.log_softmax(torch.stack([positive[n] - own_q[n], *others]), 0)[0])
    return torch.stack(losses)


def test_a_negative_weight_turns_a_loss_into_one_that_pushes_down() -> None:
    scores = torch.tensor([0.5, 0.5], requires_grad=True)
    weighted(torch.tensor([2.0, 2.0]) + 0 * scores, scores, torch.tensor([0.5, -3.0])).sum().backward()
    assert scores.grad is not None
    assert scores.grad[0] == 0
    assert scores.grad[1] == pytest.approx(3.0 / (1 + np.exp(-0.5)))


def test_rows_are_numbered_by_their_first_appearance() -> None:
    unique, local = compacted(np.array([[7, 0], [3, 7]], np.int32), 8)
    assert unique.tolist() == [7, 0, 3]
    assert local.tolist() == [[0, 1], [2, 0]]


def test_dense_weights_step_as_torch_adam_does() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    adam, reference = Adam([ours], 0.01), torch.optim.Adam([theirs], lr=0.01)
    for n in range(20):
        gradient = torch.sin(torch.arange(6.0) + n).reshape(3, 2)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        adam.step(torch.tensor(True))
        reference.step()
        if n == 9:  # a step that is not finite leaves no trace
            ours.grad = gradient * torch.nan
            adam.step(torch.tensor(False))
    torch.testing.assert_close(ours, theirs)
    again = Adam([torch.nn.Parameter(ours.detach().clone())], 0.01)
    again.load(adam.state())
    for one in (adam, again):
        one.parameters[0].grad = torch.ones(3, 2)
        one.step(torch.tensor(True))
    assert torch.equal(adam.parameters[0], again.parameters[0])


def test_decayed_means_and_their_gradient_are_the_same_by_kernel_and_by_bags() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 8, 40)
    present = torch.from_numpy(np.arange(7) < lengths[:, None])
    history = torch.from_numpy(rng.integers(0, 30, (40, 7)).astype(np.int32))
    decays = torch.tensor([0.5, 0.9, 1.0])[:, None] ** torch.arange(7)
    weight, found = torch.randn(40, 15), []
    for means_of in (decayed_means, decayed_means_by_bags):
        table = torch.linspace(-1, 1, 150).reshape(30, 5).requires_grad_()
        means = means_of(table, history, present, decays)
        (means * weight).sum().backward()
        found.append((means.detach(), table.grad))
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference)
    assert (found[0][0][torch.from_numpy(lengths == 0)] == 0).all()
