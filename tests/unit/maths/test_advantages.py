import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_klx.maths import _scans
from trl_klx.maths.advantages import (
    center_kl_advantages,
    discount_kl,
    discounted_suffix_sum,
    group_means,
    kl_adjustment,
    masked_mean,
    masked_moments,
    sequence_means,
    split_group_advantages,
    whiten_with_moments,
)


NAN = math.nan


def random_case(seed, batch=4, length=9, keep=0.7):
    generator = torch.Generator().manual_seed(seed)
    kl = torch.randn(batch, length, generator=generator)
    mask = torch.rand(batch, length, generator=generator) < keep
    return kl, mask


def brute_force(values, discount):
    values = values.double()
    result = torch.zeros_like(values)
    running = torch.zeros(len(values), dtype=torch.float64)
    for t in reversed(range(values.shape[1])):
        running = values[:, t] + discount * running
        result[:, t] = running
    return result


class TestDiscountedSuffixSum:
    def test_golden(self):
        # 4; 2 + 4/2 = 4; 1 + 4/2 = 3
        assert discounted_suffix_sum(torch.tensor([[1.0, 2.0, 4.0]]), 0.5).tolist() == [[3.0, 4.0, 4.0]]

    def test_special_discounts(self):
        values = torch.tensor([[1.0, 2.0, 4.0]])
        assert discounted_suffix_sum(values, 1.0).tolist() == [[7.0, 6.0, 4.0]]
        assert discounted_suffix_sum(values, 0.0).tolist() == [[1.0, 2.0, 4.0]]

    @pytest.mark.parametrize("discount", [0.0, 1e-20, 0.1, 0.5, 0.95, 0.999, 1 - 1e-9, 1.0])
    # Around the block size and its square, where a level of the recursion begins.
    @pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097])
    def test_matches_a_loop(self, length, discount):
        values = torch.rand(3, length, generator=torch.Generator().manual_seed(length))
        expected = brute_force(values, discount)
        torch.testing.assert_close(discounted_suffix_sum(values, discount).double(), expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("discount", [0.3, 0.97])
    def test_matches_a_loop_with_signs(self, discount):
        values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
        error = discounted_suffix_sum(values, discount).double() - brute_force(values, discount)
        assert error.abs().max() < 1e-5

    def test_fp64_stays_fp64(self):
        values = torch.randn(2, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(
            discounted_suffix_sum(values, 0.9), brute_force(values, 0.9), rtol=1e-12, atol=1e-12
        )

    def test_half_precision_is_summed_in_fp32(self):
        result = discounted_suffix_sum(torch.ones(1, 4000, dtype=torch.bfloat16), 1.0)
        assert result.dtype == torch.float32 and result[0, 0] == 4000

    def test_autocast_does_not_cost_digits(self):
        values = torch.rand(2, 100, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = discounted_suffix_sum(values, 0.9)
        torch.testing.assert_close(result.double(), brute_force(values, 0.9), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
    def test_gradient_and_untouched_input(self, discount):
        values = torch.rand(2, 70, dtype=torch.float64, requires_grad=True)
        before = values.detach().clone()
        assert torch.autograd.gradcheck(lambda x: discounted_suffix_sum(x, discount), (values,))
        assert torch.equal(values, before)

    def test_empty(self):
        assert discounted_suffix_sum(torch.zeros(2, 0), 0.5).shape == (2, 0)
        assert discounted_suffix_sum(torch.zeros(0, 40), 0.5).shape == (0, 40)

    @pytest.mark.parametrize("discount", [-0.1, 1.1, NAN])
    def test_bad_discount(self, discount):
        with pytest.raises(ValueError, match=f"`discount`.*{discount}"):
            discounted_suffix_sum(torch.zeros(1, 1), discount)


class TestDiscountKL:
    def test_golden_with_a_hole(self):
        # Positions count: the last token is two positions after the first, 1 + 4 / 2^2 = 2, and one after the hole.
        kl, mask = torch.tensor([[1.0, NAN, 4.0, NAN]]), torch.tensor([[1, 0, 1, 0]])
        assert discount_kl(kl, mask, 0.5).tolist() == [[2.0, 0.0, 4.0, 0.0]]

    def test_zero_is_the_masked_kl(self):
        kl, mask = torch.tensor([[1.0, NAN, 4.0]]), torch.tensor([[1, 0, 1]])
        assert discount_kl(kl, mask, 0.0).tolist() == [[1.0, 0.0, 4.0]]

    def test_a_few_rows_at_a_time(self, monkeypatch):
        monkeypatch.setattr(_scans, "_CHUNK", 2 * 40 // torch.get_num_threads())
        kl, mask = random_case(0, batch=7, length=40)
        mask[:2], mask[2:4] = True, torch.arange(40) < 9
        result = discount_kl(torch.where(mask, kl, NAN), mask, 0.9)
        expected = brute_force(torch.where(mask, kl, 0.0), 0.9) * mask
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)

    def test_the_same_with_and_without_gradients(self):
        kl, mask = random_case(0)
        with_gradients = discount_kl(kl.clone().requires_grad_(), mask, 0.9)
        assert with_gradients.requires_grad
        assert torch.equal(discount_kl(kl, mask, 0.9), with_gradients)


class TestMeans:
    def test_masked_mean(self):
        assert masked_mean(torch.tensor([[1.0, NAN], [3.0, 5.0]]), torch.tensor([[1, 0], [1, 1]])).item() == 3.0
        assert masked_mean(torch.tensor([NAN]), torch.zeros(1)).item() == 0.0

    def test_sequence_means(self):
        values = torch.tensor([[1.0, 3.0], [4.0, NAN], [NAN, NAN]])
        mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
        assert sequence_means(values, mask).tolist() == [[2.0], [4.0], [0.0]]

    def test_group_means_weight_by_tokens(self):
        # Group 7: (2 + 10) / (1 + 5) = 2, not the mean of 2 and 2. Group -1: (3 + 0) / (1 + 2) = 1. Group 3 is empty.
        sums = torch.tensor([2.0, 3.0, 10.0, 0.0, 0.0])
        counts = torch.tensor([1, 1, 5, 2, 0])
        group_ids = torch.tensor([7, -1, 7, -1, 3])
        assert group_means(sums, counts, group_ids).tolist() == [2.0, 1.0, 2.0, 1.0, 0.0]

    @settings(deadline=None)
    @given(st.integers(0, 1000))
    def test_group_means_of_one_group_is_the_masked_mean(self, seed):
        kl, mask = random_case(seed)
        means = group_means((kl * mask).sum(1), mask.sum(1), torch.zeros(4, dtype=torch.long))
        torch.testing.assert_close(means, masked_mean(kl, mask).expand(4), rtol=1e-5, atol=1e-6)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`sums` \(2,\), `counts` \(2,\), `group_ids` \(3,\)"):
            group_means(torch.zeros(2), torch.zeros(2), torch.zeros(3))


class TestAdjustment:
    def test_golden(self):
        # 0.5 * (2 - kl) on the mask.
        kl, mask = torch.tensor([[1.0, NAN, 5.0]]), torch.tensor([[1, 0, 1]])
        assert kl_adjustment(kl, mask, 0.5, 2.0).tolist() == [[0.5, 0.0, -1.5]]

    def test_mean_per_sequence_and_tensor_coefficient(self):
        kl, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.ones(2, 2)
        result = kl_adjustment(kl, mask, torch.tensor(2.0), torch.tensor([[2.0], [7.0]]))
        assert result.tolist() == [[2.0, -2.0], [4.0, -4.0]]

    def test_gradients_stop(self):
        kl = torch.ones(1, 2, requires_grad=True)
        assert not kl_adjustment(kl, torch.ones(1, 2), torch.tensor(0.1, requires_grad=True), kl.mean()).requires_grad

    @pytest.mark.parametrize("coef", [0.0, torch.tensor(0.0)])
    def test_coefficient_zero_does_not_read_the_kl(self, coef):
        assert kl_adjustment(torch.tensor([[NAN, math.inf]]), torch.ones(1, 2), coef, NAN).tolist() == [[0.0, 0.0]]

    def test_errors(self):
        kl = torch.zeros(2, 3)
        with pytest.raises(ValueError, match=r"`mean`.*\(2, 1\).*got shape \(2,\)"):
            kl_adjustment(kl, torch.ones(2, 3), 0.1, torch.zeros(2))
        with pytest.raises(ValueError, match=r"`coef`.*\(2,\)"):
            kl_adjustment(kl, torch.ones(2, 3), torch.zeros(2), 0.0)


class TestCenterKLAdvantages:
    def test_golden(self):
        # Mean KL (1 + 3 + 5) / 3 = 3. Row 0: 1 + 0.1 * (3 - 1), 1 + 0.1 * (3 - 3).
        # Row 1: -1 + 0.1 * (3 - 5), and -1 where it is masked.
        kl = torch.tensor([[1.0, 3.0], [5.0, NAN]])
        mask = torch.tensor([[1, 1], [1, 0]])
        result = center_kl_advantages(torch.tensor([1.0, -1.0]), kl, mask, 0.1)
        torch.testing.assert_close(result, torch.tensor([[1.2, 1.0], [-1.2, -1.0]]))

    def test_golden_discounted(self):
        # KL-to-go at 0.5: 1 + 3/2 = 2.5, 3; 5. Mean 3.5. Adjustment at coefficient 1: 1.0, 0.5; -1.5.
        kl = torch.tensor([[1.0, 3.0], [5.0, NAN]])
        mask = torch.tensor([[1, 1], [1, 0]])
        result = center_kl_advantages(torch.zeros(2), kl, mask, 1.0, discount=0.5)
        torch.testing.assert_close(result, torch.tensor([[1.0, 0.5], [-1.5, 0.0]]))

    @pytest.mark.parametrize("seed", range(5))
    def test_equals_the_published_formula(self, seed):
        # The formula as ART publishes it; the 1e-6 in its denominator is the only difference.
        kl, mask = random_case(seed)
        advantages = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed + 100))
        kl_t = kl * mask
        average = kl_t.sum() / (mask.sum() + 1e-6)
        expected = advantages + 0.3 * (average - kl_t) * mask
        torch.testing.assert_close(center_kl_advantages(advantages, kl, mask, 0.3), expected, atol=1e-5, rtol=0)

    @settings(deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0.0, 10.0))
    def test_adjustment_sums_to_zero(self, seed, discount, coef):
        kl, mask = random_case(seed)
        adjustment = center_kl_advantages(torch.zeros(4), kl, mask, coef, discount)
        # Rounding only: at most 36 terms of at most a few tens times the coefficient.
        assert abs(adjustment.double().sum().item()) < 1e-4 * max(coef, 1.0)
        assert (adjustment[~mask] == 0).all()

    @settings(deadline=None)
    @given(st.integers(0, 10_000))
    def test_masking_equals_deleting(self, seed):
        kl, mask = random_case(seed, batch=1)
        advantages = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed))
        whole = center_kl_advantages(advantages, torch.where(mask, kl, NAN), mask, 0.7)
        kept_kl, kept_advantages = kl[mask][None], advantages[mask][None]
        deleted = center_kl_advantages(kept_advantages, kept_kl, torch.ones_like(kept_kl), 0.7)
        torch.testing.assert_close(whole[mask][None], deleted)
        assert torch.equal(whole[~mask], advantages[~mask])

    def test_direction(self):
        kl = torch.tensor([[0.1, 0.5, 2.0]])
        result = center_kl_advantages(torch.zeros(1), kl, torch.ones(1, 3), 1.0)[0]
        assert result[0] > result[1] > 0 > result[2]

    @pytest.mark.parametrize("coef", [0.0, torch.tensor(0.0)])
    def test_coefficient_zero_changes_nothing(self, coef):
        kl, mask = random_case(0)
        kl[:] = NAN
        advantages = torch.randn(4, generator=torch.Generator().manual_seed(1))
        result = center_kl_advantages(advantages, kl, mask, coef)
        assert torch.equal(result, advantages[:, None].expand(4, 9))
        per_token = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
        assert torch.equal(center_kl_advantages(per_token, kl, mask, coef), per_token)

    def test_empty_mask_changes_nothing(self):
        advantages = torch.tensor([[1.0, 2.0]])
        result = center_kl_advantages(advantages, torch.full((1, 2), NAN), torch.zeros(1, 2), 0.5)
        assert torch.equal(result, advantages)

    def test_gradients_flow_to_advantages_only(self):
        kl, mask = random_case(0)
        kl.requires_grad_()
        advantages = torch.zeros(4, requires_grad=True)
        center_kl_advantages(advantages, kl, mask, 0.5, 0.5).sum().backward()
        assert kl.grad is None
        assert advantages.grad.tolist() == [9.0] * 4

    def test_inputs_are_unchanged(self):
        kl, mask = random_case(0)
        advantages = torch.ones(4, 9)
        copies = kl.clone(), mask.clone(), advantages.clone()
        center_kl_advantages(advantages, kl, mask, 0.5, 0.5)
        assert all(torch.equal(a, b) for a, b in zip((kl, mask, advantages), copies, strict=True))

    def test_errors_show_shapes(self):
        with pytest.raises(ValueError, match=r"`advantages`.*\(2,\) or \(2, 3\), but got \(3,\)"):
            center_kl_advantages(torch.zeros(3), torch.zeros(2, 3), torch.ones(2, 3), 0.1)
        with pytest.raises(ValueError, match=r"`per_token_kl` \(2, 3\), `mask` \(2, 4\)"):
            center_kl_advantages(torch.zeros(2), torch.zeros(2, 3), torch.ones(2, 4), 0.1)


def whiten(values, mask, shift_mean=True):
    return whiten_with_moments(values, mask, masked_moments(values, mask), shift_mean)


class TestWhitening:
    def test_golden(self):
        # Values 1, 3, 5: mean 3, biased variance 8/3, so +-2 / 1.632993 = +-1.224745.
        values, mask = torch.tensor([[1.0, 3.0], [5.0, NAN]]), torch.tensor([[1, 1], [1, 0]])
        assert masked_moments(values, mask).tolist() == [3.0, 9.0, 35.0]
        torch.testing.assert_close(whiten(values, mask), torch.tensor([[-1.224745, 0.0], [1.224745, 0.0]]))
        kept = whiten(values, mask, shift_mean=False)
        torch.testing.assert_close(kept, torch.tensor([[1.775255, 3.0], [4.224745, 0.0]]))

    @settings(deadline=None)
    @given(st.integers(0, 10_000))
    def test_matches_numpy(self, seed):
        values, mask = random_case(seed, keep=0.8)
        kept = values[mask].double().numpy()
        expected = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
        np.testing.assert_allclose(whiten(values, mask)[mask].numpy(), expected, rtol=1e-5, atol=1e-6)

    def test_large_offset(self):
        values = 1e4 + torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        mask = torch.ones(64, 128)
        exact = values.double()
        expected = (exact - exact.mean()) / exact.std(correction=0)
        assert (whiten(values, mask).double() - expected).abs().max() < 1e-6

    def test_moments_of_parts_add_up(self):
        values, mask = random_case(3)
        moments = masked_moments(values[:2], mask[:2]) + masked_moments(values[2:], mask[2:])
        parts = [whiten_with_moments(values[i : i + 2], mask[i : i + 2], moments) for i in (0, 2)]
        torch.testing.assert_close(torch.cat(parts), whiten(values, mask))

    def test_too_few_values(self):
        values = torch.tensor([[5.0, NAN]])
        assert whiten(values, torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
        assert whiten(values, torch.tensor([[1, 0]]), shift_mean=False).tolist() == [[5.0, 0.0]]
        assert whiten(values, torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`moments`.*\(2,\)"):
            whiten_with_moments(torch.zeros(2), torch.ones(2), torch.zeros(2))
        with pytest.raises(ValueError, match=r"`values` \(2,\), `mask` \(3,\)"):
            whiten(torch.zeros(2), torch.ones(3))


# ---- Advantages of groups whose rewards had the penalty subtracted ----

NAN = float("nan")


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_split_group_advantages(scale):
    rewards = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5, 0.5, NAN, 3.5])
    kls = torch.tensor([3.0, 1.0, 0.0, 4.0, 2.0, 6.0, 5.0, 1.0])
    compared = rewards - 0.3 * kls
    centered = compared.view(2, 4) - compared.view(2, 4).nanmean(dim=1, keepdim=True)
    advantages = scale * centered.nan_to_num(nan=0.0).view(-1)
    given, charged = split_group_advantages(advantages, rewards, kls, 0.3, 4)
    torch.testing.assert_close((given - 0.3 * charged).float(), advantages)
    # The completion without a reward is no part of the means, and is given nothing.
    torch.testing.assert_close(given.float(), scale * torch.tensor([0.0, -1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 2.0]))
    torch.testing.assert_close(charged.float(), scale * torch.tensor([1.0, -1.0, -2.0, 2.0, -1.0, 3.0, 0.0, -2.0]))


def test_split_is_not_led_by_groups_with_equal_rewards():
    """Divided by its own deviation, their penalty has the size of a reward, however small the coefficient is."""
    rewards, kls = torch.tensor([1.0, -1.0, 0.0, 0.0]), torch.tensor([0.2, -0.2, 0.2, -0.2])
    compared = (rewards - 0.01 * kls).view(2, 2)
    advantages = (compared / compared.std(dim=1, keepdim=True)).view(-1)
    given, charged = split_group_advantages(advantages, rewards, kls, 0.01, 2)
    assert charged.abs().max() < 0.3 * given.abs().max()


@pytest.mark.parametrize("kl", [float("inf"), NAN])
def test_split_leaves_out_a_kl_that_is_not_finite(kl):
    given, charged = split_group_advantages(
        torch.tensor([0.5, -0.5, 0.0]), torch.tensor([2.0, 1.0, 9.0]), torch.tensor([1.0, 1.0, kl]), 0.3, 3
    )
    assert given.tolist() == [0.5, -0.5, 0.0] and charged.tolist() == [0.0, 0.0, 0.0]


def test_split_of_equal_completions_is_zero():
    """Neither rounding nor a division by 0 may pass for a drive."""
    given, charged = split_group_advantages(torch.zeros(6), torch.full((6,), 0.1), torch.full((6,), 0.7), 0.3, 6)
    assert given.tolist() == charged.tolist() == [0.0] * 6
