import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_klx.maths import _scans, gae
from trl_klx.maths.gae import clipped_value_loss, compute_gae, shape_rewards


NAN = math.nan


def random_case(seed, batch=3, length=10):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, batch, length, generator=generator)
    mask = torch.rand(batch, length, generator=generator) < 0.7
    return rewards, values, mask


def brute_force(rewards, values, mask, gamma, lam):
    """Walk each sequence backwards over its unmasked tokens, one number at a time."""
    advantages = torch.zeros_like(values, dtype=torch.float64)
    for b in range(len(values)):
        next_value = next_advantage = 0.0
        for t in reversed(range(values.shape[1])):
            if not mask[b, t]:
                continue
            delta = rewards[b, t].item() + gamma * next_value - values[b, t].item()
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[b, t].item()
            advantages[b, t] = next_advantage
    return advantages


class TestComputeGAE:
    def test_golden(self):
        # gamma 1, lam 0.5. delta_1 = 2 + 0 - 1 = 1; delta_0 = 0 + 1 - 0.5 = 0.5.
        # A_1 = 1; A_0 = 0.5 + 0.5 * 1 = 1. Returns 1 + 1 = 2 and 1 + 0.5 = 1.5.
        rewards, values = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 1.0]])
        advantages, returns = compute_gae(rewards, values, torch.ones(1, 2), gamma=1.0, lam=0.5)
        assert advantages.tolist() == [[1.0, 1.0]]
        assert returns.tolist() == [[1.5, 2.0]]

    def test_golden_with_holes(self):
        # The same two tokens, with a tool output between them and padding around them.
        rewards = torch.tensor([[NAN, 0.0, NAN, NAN, 2.0, NAN]])
        values = torch.tensor([[NAN, 0.5, NAN, NAN, 1.0, NAN]])
        mask = torch.tensor([[0, 1, 0, 0, 1, 0]])
        advantages, returns = compute_gae(rewards, values, mask, gamma=1.0, lam=0.5)
        assert advantages.tolist() == [[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]]
        assert returns.tolist() == [[0.0, 1.5, 0.0, 0.0, 2.0, 0.0]]

    @settings(deadline=None)
    @given(
        st.integers(0, 10_000),
        st.sampled_from([0.0, 0.9, 0.99, 1.0]),
        st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        st.sampled_from([1, 2, 10, 70]),
    )
    def test_matches_a_loop(self, seed, gamma, lam, length):
        rewards, values, mask = random_case(seed, length=length)
        garbage = torch.where(mask, 0.0, NAN)
        advantages, returns = compute_gae(rewards + garbage, values + garbage, mask, gamma, lam)
        expected = brute_force(rewards, values, mask, gamma, lam)
        torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(returns.double(), expected + values.double() * mask, rtol=1e-5, atol=1e-5)

    @settings(deadline=None)
    @given(st.integers(0, 10_000))
    def test_masking_equals_deleting(self, seed):
        rewards, values, mask = random_case(seed, batch=1)
        advantages, returns = compute_gae(rewards, values, mask)
        kept = [tensor[mask][None] for tensor in (rewards, values)]
        deleted = compute_gae(*kept, torch.ones_like(kept[0]))
        torch.testing.assert_close(advantages[mask][None], deleted[0])
        torch.testing.assert_close(returns[mask][None], deleted[1])

    def test_a_few_rows_at_a_time(self, monkeypatch):
        # Chunks of two rows: without padding, with padding, with only padding, with holes.
        monkeypatch.setattr(_scans, "_CHUNK", 2 * 40 // torch.get_num_threads())
        rewards, values, mask = random_case(0, batch=9, length=40)
        lengths = torch.tensor([40, 40, 7, 40, 0, 0])
        mask[:6] = torch.arange(40) < lengths[:, None]
        garbage = torch.where(mask, 0.0, NAN)
        advantages, returns = compute_gae(rewards + garbage, values + garbage, mask, 0.99, 0.95)
        expected = brute_force(rewards, values, mask, 0.99, 0.95)
        torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(returns.double(), expected + values.double() * mask, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("holes", [False, True])
    @pytest.mark.parametrize(
        "make", [torch.Tensor.bool, torch.Tensor.int, torch.Tensor.float, lambda mask: 3 * mask.long()]
    )
    def test_any_mask_and_any_layout(self, make, holes):
        rewards, values, mask = random_case(1)
        mask = mask if holes else torch.arange(10).expand(3, 10) < torch.tensor([[10], [4], [0]])
        expected = compute_gae(rewards, values, mask)
        turned = [tensor.t().contiguous().t() for tensor in (rewards, values, make(mask))]
        assert not turned[0].is_contiguous()
        for result, same in zip(compute_gae(*turned), expected, strict=True):
            assert torch.equal(result, same)

    @pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 1 - 1e-9), (1.0, 1e-12), (0.999, 0.999)])
    def test_long_sequences(self, gamma, lam):
        generator = torch.Generator().manual_seed(0)
        rewards, values = torch.rand(2, 2, 5000, generator=generator)
        mask = torch.arange(5000).expand(2, 5000) < torch.tensor([[5000], [3000]])
        advantages, returns = compute_gae(rewards, values, mask, gamma, lam)
        expected = brute_force(rewards, values, mask, gamma, lam)
        # All summands of the returns are positive, so nothing cancels and every digit counts.
        torch.testing.assert_close(returns.double(), expected + values.double() * mask, rtol=1e-5, atol=1e-30)
        assert ((advantages.double() - expected).abs() <= 1e-5 * (expected + 1.0).abs()).all()

    # The last three move the tokens together: 0.81^5000 would be too small a weight for fp64, and a small lambda would
    # make the share of the values too large.
    @pytest.mark.parametrize(
        ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.999, 0.999), (0.9, 0.9), (1.0, 0.4), (1.0, 1e-12)]
    )
    def test_long_sequences_with_holes(self, gamma, lam):
        generator = torch.Generator().manual_seed(0)
        rewards, values, chances = torch.rand(3, 3, 5000, generator=generator)
        mask = chances < 0.8
        mask[1, 1000:3000] = False  # whole blocks of holes
        mask[1, 3200:] = False
        mask[2, :4999] = False
        advantages, returns = compute_gae(rewards, values, mask, gamma, lam)
        expected = brute_force(rewards, values, mask, gamma, lam)
        torch.testing.assert_close(returns.double(), expected + values.double() * mask, rtol=2e-6, atol=1e-6)
        assert ((advantages.double() - expected).abs() <= 2e-6 * (expected + 1.0).abs()).all()

    def test_holes_on_other_devices(self, monkeypatch):
        # On other devices than CPUs the tokens are moved together.
        rewards, values, mask = random_case(0, length=70)
        expected = compute_gae(rewards, values, mask)
        monkeypatch.setattr(gae, "can_scan_over_holes", lambda values, discount: False)
        for result, same in zip(compute_gae(rewards, values, mask), expected, strict=True):
            torch.testing.assert_close(result, same)

    def test_a_mask_in_the_middle_of_its_storage(self):
        rewards, values, mask = random_case(0, length=32)
        storage = torch.zeros(3 + mask.numel(), dtype=torch.bool)
        view = storage[3:].view_as(mask).copy_(mask)
        for result, same in zip(compute_gae(rewards, values, view), compute_gae(rewards, values, mask), strict=True):
            assert torch.equal(result, same)

    def test_autocast_does_not_cost_digits(self):
        rewards, values, mask = random_case(0, length=70)
        expected = compute_gae(rewards, values, mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for result, same in zip(compute_gae(rewards, values, mask), expected, strict=True):
                assert torch.equal(result, same)

    def test_lambda_one_is_reward_to_go_minus_value(self):
        rewards, values, _ = random_case(0)
        mask = torch.ones_like(values)
        advantages, returns = compute_gae(rewards, values, mask, gamma=1.0, lam=1.0)
        to_go = rewards.flip(1).cumsum(1).flip(1)
        torch.testing.assert_close(returns, to_go, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(advantages, to_go - values, rtol=1e-5, atol=1e-5)

    def test_gradients_stop_and_inputs_are_unchanged(self):
        rewards, values, mask = random_case(0)
        copies = rewards.clone(), values.clone(), mask.clone()
        advantages, returns = compute_gae(rewards, values.requires_grad_(), mask)
        assert not advantages.requires_grad and not returns.requires_grad
        assert all(torch.equal(a, b) for a, b in zip((rewards, values, mask), copies, strict=True))

    def test_nothing_unmasked_and_no_tokens(self):
        advantages, returns = compute_gae(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3))
        assert advantages.tolist() == returns.tolist() == [[0.0] * 3] * 2
        assert compute_gae(torch.ones(2, 0), torch.ones(2, 0), torch.ones(2, 0))[0].shape == (2, 0)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`rewards` \(1, 2\), `values` \(1, 3\), `mask` \(1, 2\)"):
            compute_gae(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
        for name in ("gamma", "lam"):
            with pytest.raises(ValueError, match=f"`{name}`.*1.5"):
                compute_gae(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), **{name: 1.5})


class TestShapeRewards:
    def test_golden(self):
        # -0.5 * kl; the score goes to the last unmasked token, wherever it is.
        kl = torch.tensor([[2.0, 4.0, NAN], [NAN, 2.0, -2.0], [NAN, NAN, NAN], [6.0, NAN, NAN]])
        mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 0, 0]])
        rewards = shape_rewards(torch.tensor([10.0, 20.0, NAN, 40.0]), kl, mask, 0.5)
        # -1, -2 + 10; -1, 1 + 20; nothing; -3 + 40
        assert rewards.tolist() == [[-1.0, 8.0, 0.0], [0.0, -1.0, 21.0], [0.0, 0.0, 0.0], [37.0, 0.0, 0.0]]

    @pytest.mark.parametrize("coef", [0.0, torch.tensor(0.0)])
    def test_coefficient_zero_leaves_the_score(self, coef):
        rewards = shape_rewards(torch.tensor([3.0]), torch.tensor([[NAN, math.inf]]), torch.ones(1, 2), coef)
        assert rewards.tolist() == [[0.0, 3.0]]

    @settings(deadline=None)
    @given(st.integers(0, 1000))
    def test_total_is_score_minus_penalty(self, seed):
        kl, _, mask = random_case(seed)
        scores = torch.tensor([1.0, 2.0, 3.0])
        expected = scores * mask.any(1) - 0.1 * (kl * mask).sum(1)
        torch.testing.assert_close(shape_rewards(scores, kl, mask, 0.1).sum(1), expected, rtol=1e-5, atol=1e-5)

    def test_gradients_stop(self):
        kl = torch.ones(1, 2, requires_grad=True)
        assert not shape_rewards(torch.ones(1, requires_grad=True), kl, torch.ones(1, 2), 0.1).requires_grad

    def test_no_tokens(self):
        assert shape_rewards(torch.ones(2), torch.ones(2, 0), torch.ones(2, 0), 0.1).shape == (2, 0)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`scores`.*\(2,\), but got \(3,\)"):
            shape_rewards(torch.zeros(3), torch.zeros(2, 4), torch.ones(2, 4), 0.1)


class TestClippedValueLoss:
    VALUES = torch.tensor([[1.0, 2.0, 0.5, NAN]])
    OLD_VALUES = torch.tensor([[0.0, 2.1, 0.0, NAN]])
    RETURNS = torch.tensor([[2.0, 1.0, -1.0, NAN]])
    MASK = torch.tensor([[1, 1, 1, 0]])

    def test_golden(self):
        # c = 0.2. Token 0: (1 - 2)^2 = 1, clipped to 0.2: 1.8^2 = 3.24, which is larger.
        # Token 1: (2 - 1)^2 = 1, inside [1.9, 2.3], so equal. Token 2: 1.5^2 = 2.25, clipped to 0.2: 1.2^2 = 1.44.
        # Loss 0.5 * (3.24 + 1 + 2.25) / 3 = 1.081667; one of three is clipped.
        loss, clip_fraction = clipped_value_loss(self.VALUES, self.OLD_VALUES, self.RETURNS, self.MASK, 0.2)
        assert loss.item() == pytest.approx(1.081667, abs=1e-6)
        assert clip_fraction.item() == pytest.approx(1 / 3)

    def test_gradient(self):
        # d/dV of 0.5 * (V - R)^2 / 3 = (V - R) / 3 where the plain term decides; 0 where the clipped one does.
        # Where both are equal, the two halves of the gradient add up to the same (V - R) / 3.
        values = self.VALUES.clone().requires_grad_()
        clipped_value_loss(values, self.OLD_VALUES, self.RETURNS, self.MASK, 0.2)[0].backward()
        torch.testing.assert_close(values.grad, torch.tensor([[0.0, 1 / 3, 0.5, 0.0]]))

    def test_wide_clip_is_the_plain_loss(self):
        loss, clip_fraction = clipped_value_loss(self.VALUES, self.OLD_VALUES, self.RETURNS, self.MASK, 1e6)
        # 0.5 * (1 + 1 + 2.25) / 3
        assert loss.item() == pytest.approx(0.708333, abs=1e-6)
        assert clip_fraction.item() == 0.0

    def test_empty_mask(self):
        loss, clip_fraction = clipped_value_loss(self.VALUES, self.OLD_VALUES, self.RETURNS, self.MASK * 0, 0.2)
        assert loss.item() == clip_fraction.item() == 0.0

    def test_errors(self):
        with pytest.raises(ValueError, match="`cliprange`.*0.0"):
            clipped_value_loss(self.VALUES, self.OLD_VALUES, self.RETURNS, self.MASK, 0.0)
        with pytest.raises(ValueError, match=r"`values` \(1, 4\), `old_values` \(1, 4\), `returns` \(1, 3\)"):
            clipped_value_loss(self.VALUES, self.OLD_VALUES, self.RETURNS[:, :3], self.MASK, 0.2)
