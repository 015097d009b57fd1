import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_klx.maths.estimators import (
    KL_ESTIMATORS,
    MAX_ABS_LOG_RATIO,
    MAX_LOG_RATIO,
    center_log_ratio,
    estimate_full_kl,
    estimate_kl,
    kl_totals,
    sum_kl_per_sequence,
)


SAMPLED = tuple(kind for kind in KL_ESTIMATORS if kind != "full")
INF = math.inf
NAN = math.nan

# A policy and a reference over four tokens, enumerated so that expectations are sums.
POLICY = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
REFERENCE = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=torch.float64)
# 0.5 ln 2 + 0.25 ln 1 + 0.125 ln 0.3125 + 0.125 ln 1.25 = 0.346574 + 0 - 0.145394 + 0.027893
EXACT_KL = 0.229073


def identity(logits):
    return logits


def per_token(kind):
    """The estimator's value at each of the four tokens."""
    return estimate_kl(POLICY.log()[None], REFERENCE.log()[None], kind)[0].double()


class TestValues:
    # lr = ln 2 (policy twice as likely) and lr = -ln 2 (half as likely); ln 2 = 0.693147
    @pytest.mark.parametrize(
        "kind, twice, half",
        [
            ("k1", 0.693147, -0.693147),
            ("k2", 0.240227, 0.240227),  # 0.693147^2 / 2
            ("k3", 0.193147, 0.306853),  # 1/2 - 1 + 0.693147; 2 - 1 - 0.693147
            ("abs", 0.693147, 0.693147),
            ("trlx", 0.306853, 0.193147),  # 2 - 1 - 0.693147; 1/2 - 1 + 0.693147
            ("importance", 1.386294, -0.346574),  # 2 * 0.693147; 1/2 * -0.693147
        ],
    )
    def test_golden(self, kind, twice, half):
        logps = torch.tensor([[math.log(0.5), math.log(0.25)]])
        ref_logps = torch.tensor([[math.log(0.25), math.log(0.5)]])
        torch.testing.assert_close(
            estimate_kl(logps, ref_logps, kind), torch.tensor([[twice, half]]), atol=1e-6, rtol=0
        )

    def test_every_name_is_covered(self):
        assert tuple(KL_ESTIMATORS) == ("k1", "k2", "k3", "abs", "full", "trlx", "importance")

    def test_default_is_k1_policy_minus_reference(self):
        assert estimate_kl(torch.tensor([[-1.0]]), torch.tensor([[-3.0]])).item() == 2.0

    @pytest.mark.parametrize("kind", SAMPLED)
    def test_equal_models_have_no_kl(self, kind):
        logps = torch.tensor([[-0.5, -3.0, -20.0]])
        assert estimate_kl(logps, logps, kind).tolist() == [[0.0, 0.0, 0.0]]

    @settings(deadline=None)
    @given(st.floats(-19.0, 19.0, width=32))
    def test_k2_and_k3_are_never_negative(self, log_ratio):
        logps, zero = torch.tensor([[log_ratio]]), torch.zeros(1, 1)
        assert estimate_kl(logps, zero, "k2").item() >= 0.0
        assert estimate_kl(logps, zero, "k3").item() >= 0.0

    @settings(deadline=None)
    @given(st.floats(-19.0, 19.0, width=32))
    def test_exact_inside_the_limits(self, log_ratio):
        logps, zero = torch.tensor([[log_ratio]]), torch.zeros(1, 1)
        expected = {
            "k1": log_ratio,
            "k2": log_ratio**2 / 2,
            "k3": math.expm1(-log_ratio) + log_ratio,
            "abs": abs(log_ratio),
            "trlx": math.expm1(log_ratio) - log_ratio,
            "importance": math.exp(log_ratio) * log_ratio,
        }
        for kind, value in expected.items():
            # 1e-7 * |lr| is the rounding of the two terms of order lr that cancel in k3 and trlx.
            tolerance = 1e-6 * abs(value) + 1.2e-7 * abs(log_ratio)
            assert abs(estimate_kl(logps, zero, kind).item() - value) <= tolerance, kind

    def test_small_log_ratio_keeps_its_digits(self):
        # k3 = lr^2/2 - lr^3/6 + ...: at 1e-3 it is 5e-7 - 1.667e-10. Without `expm1` fp32 gives 4.77e-7.
        value = estimate_kl(torch.tensor([[1e-3]]), torch.zeros(1, 1), "k3").item()
        assert value == pytest.approx(4.99833e-7, rel=1e-3)


class TestExactDistributions:
    def exact(self):
        return (POLICY * (POLICY / REFERENCE).log()).sum().item()

    def test_golden_kl(self):
        assert self.exact() == pytest.approx(EXACT_KL, abs=1e-6)

    @pytest.mark.parametrize("kind", ["k1", "k3"])
    def test_unbiased_on_policy_samples(self, kind):
        assert (POLICY * per_token(kind)).sum().item() == pytest.approx(self.exact(), abs=1e-6)

    @pytest.mark.parametrize("kind", ["k2", "abs", "trlx", "importance"])
    def test_biased_on_policy_samples(self, kind):
        assert abs((POLICY * per_token(kind)).sum().item() - self.exact()) > 0.01

    def test_trlx_mean_is_chi_square_minus_kl(self):
        chi_square = ((POLICY - REFERENCE).square() / REFERENCE).sum().item()
        assert (POLICY * per_token("trlx")).sum().item() == pytest.approx(chi_square - self.exact(), abs=1e-6)

    def test_trlx_on_reference_samples_is_the_reverse_kl(self):
        reverse = (REFERENCE * (REFERENCE / POLICY).log()).sum().item()
        assert (REFERENCE * per_token("trlx")).sum().item() == pytest.approx(reverse, abs=1e-6)

    def test_importance_is_unbiased_on_reference_samples(self):
        assert (REFERENCE * per_token("importance")).sum().item() == pytest.approx(self.exact(), abs=1e-6)

    def test_full_is_exact(self):
        value = estimate_full_kl(POLICY.log()[None], REFERENCE.log()[None], identity, identity)
        assert value.item() == pytest.approx(self.exact(), abs=1e-6)


class TestCenteredLogRatio:
    def test_its_mean_on_policy_samples_is_zero(self):
        assert (POLICY * center_log_ratio((POLICY / REFERENCE).log())).sum().item() == pytest.approx(0.0, abs=1e-12)

    def test_golden(self):
        # 1 - exp(-ln 2) = 1/2; 1 - exp(ln 2) = -1; from -2 on 1 - exp(2) = -6.389056
        values = center_log_ratio(torch.tensor([math.log(2), -math.log(2), 0.0, -2.0, -30.0]))
        torch.testing.assert_close(values, torch.tensor([0.5, -1.0, 0.0, -6.389056, -6.389056]))

    def test_is_the_log_ratio_near_the_reference(self):
        ratios = torch.tensor([-1e-4, 1e-6, 1e-4])
        torch.testing.assert_close(center_log_ratio(ratios), ratios, rtol=1e-4, atol=0.0)


class TestExtremes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("kind", SAMPLED)
    def test_values_and_gradients_are_finite(self, kind, dtype):
        numbers = [0.0, 1.0, -1.0, 15.0, -15.0, 19.9, -19.9, 100.0, -100.0, 1e4, -1e4, INF, -INF]
        grid = torch.tensor(numbers, dtype=dtype)
        logps, ref_logps = (
            t.flatten()[None].clone().requires_grad_() for t in torch.meshgrid(grid, grid, indexing="ij")
        )
        kl = estimate_kl(logps, ref_logps, kind)
        assert kl.dtype == torch.float32
        assert kl.isfinite().all()
        kl.sum().backward()
        assert logps.grad.isfinite().all() and ref_logps.grad.isfinite().all()

    @pytest.mark.parametrize("kind", SAMPLED)
    def test_inf_minus_inf_is_no_drift(self, kind):
        infinite = torch.tensor([[-INF, INF]])
        assert estimate_kl(infinite, infinite, kind).tolist() == [[0.0, 0.0]]

    @pytest.mark.parametrize("kind", SAMPLED)
    def test_nan_stays_visible(self, kind):
        kl = estimate_kl(torch.tensor([[NAN, -1.0, NAN, 0.0]]), torch.tensor([[-1.0, NAN, NAN, 0.0]]), kind)
        assert kl.isnan().tolist() == [[True, True, True, False]]

    def test_log_ratio_of_large_finite_inputs_is_exact(self):
        assert estimate_kl(torch.tensor([[1e4]]), torch.tensor([[-1e4]]), "k1").item() == 2e4

    def test_values_at_the_limits(self):
        logps, zero = torch.tensor([[INF, -INF]]), torch.zeros(1, 2)
        large, most = MAX_ABS_LOG_RATIO, math.exp(MAX_LOG_RATIO)
        assert estimate_kl(logps, zero, "k1").tolist() == [[large, -large]]
        # Only the side on which the exponential grows is limited to MAX_LOG_RATIO.
        assert estimate_kl(logps, zero, "k3").tolist() == [pytest.approx([large - 1, most - 1 - MAX_LOG_RATIO])]
        assert estimate_kl(logps, zero, "trlx").tolist() == [pytest.approx([most - 1 - MAX_LOG_RATIO, large - 1])]

    @pytest.mark.parametrize("kind, log_ratio", [("k3", -30.0), ("trlx", 30.0), ("importance", 30.0), ("k1", 1e6)])
    def test_gradient_beyond_the_limit_is_zero(self, kind, log_ratio):
        # In particular it never has the sign that would drive the policy further away.
        logps = torch.tensor([[log_ratio]], requires_grad=True)
        estimate_kl(logps, torch.zeros(1, 1), kind).sum().backward()
        assert logps.grad.item() == 0.0


class TestGradients:
    @pytest.mark.parametrize(
        "kind, derivative",
        [
            ("k1", lambda lr: torch.ones_like(lr)),
            ("k2", lambda lr: lr),
            ("k3", lambda lr: 1 - torch.exp(-lr)),
            ("abs", lambda lr: torch.sign(lr)),
            ("trlx", lambda lr: torch.exp(lr) - 1),
            ("importance", lambda lr: torch.exp(lr) * (1 + lr)),
        ],
    )
    def test_analytic(self, kind, derivative):
        logps = torch.tensor([[-3.0, -1.5, -0.25, 0.5, 2.0]], requires_grad=True)
        ref_logps = torch.tensor([[-1.0, -2.0, -0.5, 0.75, -4.0]], requires_grad=True)
        estimate_kl(logps, ref_logps, kind).sum().backward()
        expected = derivative((logps - ref_logps).detach())
        torch.testing.assert_close(logps.grad, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ref_logps.grad, -expected, rtol=1e-5, atol=1e-6)

    def test_inputs_are_unchanged(self):
        logps, ref_logps = torch.tensor([[-INF, 1e4]]), torch.tensor([[-INF, -1e4]])
        for kind in SAMPLED:
            estimate_kl(logps, ref_logps, kind)
        assert logps.tolist() == [[-INF, 1e4]] and ref_logps.tolist() == [[-INF, -1e4]]


class TestErrors:
    def test_unknown_kind_lists_the_valid_ones(self):
        with pytest.raises(ValueError, match="'k9'.*k1, k2, k3, abs, full, trlx, importance"):
            estimate_kl(torch.zeros(1, 1), torch.zeros(1, 1), "k9")

    def test_full_points_to_its_function(self):
        with pytest.raises(ValueError, match="estimate_full_kl"):
            estimate_kl(torch.zeros(1, 1), torch.zeros(1, 1), "full")

    def test_shapes_are_shown_and_not_broadcast(self):
        with pytest.raises(ValueError, match=r"`logps` \(2, 3\), `ref_logps` \(2, 1\)"):
            estimate_kl(torch.zeros(2, 3), torch.zeros(2, 1))


class TestFullKL:
    def heads(self, size=5, ref_size=3, vocabulary=11):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(size, vocabulary, generator=generator)
        ref_weight = torch.randn(ref_size, vocabulary, generator=generator)
        hidden = torch.randn(2, 7, size, generator=generator)
        ref_hidden = torch.randn(2, 7, ref_size, generator=generator)
        return hidden, ref_hidden, weight, ref_weight

    @pytest.mark.parametrize("chunk_size", [1, 3, 14, 1000])
    def test_matches_the_definition_in_fp64(self, chunk_size):
        hidden, ref_hidden, weight, ref_weight = self.heads()
        value = estimate_full_kl(hidden, ref_hidden, lambda x: x @ weight, lambda x: x @ ref_weight, chunk_size)
        logps = (hidden.double() @ weight.double()).log_softmax(-1)
        ref_logps = (ref_hidden.double() @ ref_weight.double()).log_softmax(-1)
        expected = (logps.exp() * (logps - ref_logps)).sum(-1)
        assert value.shape == (2, 7) and value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)

    def test_no_more_than_a_chunk_of_logits_at_once(self):
        hidden, ref_hidden, weight, ref_weight = self.heads()
        seen = []

        def head(x):
            seen.append(len(x))
            return x @ weight

        with torch.no_grad():
            estimate_full_kl(hidden, ref_hidden, head, lambda x: x @ ref_weight, chunk_size=4)
        assert seen == [4, 4, 4, 2]

    @pytest.mark.parametrize("chunk_size", [2, 100])
    def test_gradient_matches_the_definition(self, chunk_size):
        hidden, ref_hidden, weight, ref_weight = self.heads()
        hidden.requires_grad_()
        kl = estimate_full_kl(hidden, ref_hidden, lambda x: x @ weight, lambda x: x @ ref_weight, chunk_size)
        (gradient,) = torch.autograd.grad(kl.sum(), hidden)
        logps, ref_logps = (hidden @ weight).log_softmax(-1), (ref_hidden @ ref_weight).log_softmax(-1)
        (expected,) = torch.autograd.grad((logps.exp() * (logps - ref_logps)).sum(), hidden)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)

    def test_suppressed_tokens(self):
        # Policy (1/2, 1/2, 0), reference (1/4, 3/4, 0): 1/2 ln 2 + 1/2 ln(2/3) = 0.346574 - 0.202733
        logits = torch.tensor([[0.0, 0.0, -INF]], requires_grad=True)
        ref_logits = torch.tensor([[0.0, math.log(3.0), -INF]])
        value = estimate_full_kl(logits, ref_logits, identity, identity)
        assert value.item() == pytest.approx(0.143841, abs=1e-6)
        value.sum().backward()
        assert logits.grad.isfinite().all()

    def test_token_suppressed_in_the_policy_alone(self):
        # Policy (1, 0), reference (1/2, 1/2): ln 2.
        value = estimate_full_kl(torch.tensor([[0.0, -INF]]), torch.zeros(1, 2), identity, identity)
        assert value.item() == pytest.approx(math.log(2.0), abs=1e-6)

    def test_token_suppressed_in_the_reference_alone_is_large_and_finite(self):
        logits = torch.zeros(1, 2, requires_grad=True)
        value = estimate_full_kl(logits, torch.tensor([[0.0, -INF]]), identity, identity)
        # Half the mass has the limiting log-ratio, the other half ln(1/2).
        assert value.item() == pytest.approx(0.5 * MAX_ABS_LOG_RATIO - 0.5 * math.log(2.0))
        value.sum().backward()
        assert logits.grad.isfinite().all()

    def test_never_negative_and_zero_for_equal_models(self):
        logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1)) * 5
        assert estimate_full_kl(logits, logits, identity, identity).tolist() == [0.0] * 200
        nearly = logits + 1e-6 * torch.randn(200, 50, generator=torch.Generator().manual_seed(2))
        assert (estimate_full_kl(logits, nearly, identity, identity) >= 0).all()

    def test_half_precision_logits(self):
        logits, ref_logits = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]])
        # Softmax of (1, 2) is (0.268941, 0.731059): KL = (0.731059 - 0.268941) * 1.
        for dtype in (torch.float16, torch.bfloat16):
            value = estimate_full_kl(logits.to(dtype), ref_logits.to(dtype), identity, identity)
            assert value.dtype == torch.float32 and value.item() == pytest.approx(0.462117, abs=1e-6)

    def test_no_positions(self):
        assert estimate_full_kl(torch.zeros(2, 0, 3), torch.zeros(2, 0, 3), identity, identity).shape == (2, 0)

    def test_errors_show_shapes(self):
        with pytest.raises(ValueError, match=r"`hidden` \(2, 3, 4\), `ref_hidden` \(2, 5, 4\)"):
            estimate_full_kl(torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), identity, identity)
        with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 5\)"):
            estimate_full_kl(torch.zeros(1, 4), torch.zeros(1, 5), identity, identity)
        with pytest.raises(ValueError, match="chunk_size.*0"):
            estimate_full_kl(torch.zeros(1, 4), torch.zeros(1, 4), identity, identity, chunk_size=0)


class TestReductions:
    KL = torch.tensor([[1.0, 2.0, NAN], [4.0, INF, NAN], [NAN, NAN, NAN]])
    MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])

    def test_golden(self):
        # Sequences: 1 + 2 = 3; 4; nothing. Totals: 7 nats, 3 tokens, 2 sequences with a token.
        assert sum_kl_per_sequence(self.KL, self.MASK).tolist() == [3.0, 4.0, 0.0]
        totals = kl_totals(self.KL, self.MASK)
        assert totals.dtype == torch.float64 and totals.tolist() == [7.0, 3.0, 2.0]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
    def test_any_mask_dtype(self, dtype):
        assert kl_totals(self.KL, self.MASK.to(dtype)).tolist() == [7.0, 3.0, 2.0]

    def test_totals_of_parts_add_up(self):
        parts = sum(kl_totals(self.KL[i : i + 1], self.MASK[i : i + 1]) for i in range(3))
        assert parts.tolist() == kl_totals(self.KL, self.MASK).tolist()

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.booleans(), st.floats(-5, 5, width=32)), min_size=1, max_size=12))
    def test_masking_equals_deleting(self, tokens):
        kl = torch.tensor([[value if keep else NAN for keep, value in tokens]])
        mask = torch.tensor([[keep for keep, _ in tokens]])
        deleted = kl[mask][None]
        everything = torch.ones_like(deleted)
        torch.testing.assert_close(sum_kl_per_sequence(kl, mask), sum_kl_per_sequence(deleted, everything))
        torch.testing.assert_close(kl_totals(kl, mask), kl_totals(deleted, everything))

    def test_real_nan_shows(self):
        assert kl_totals(torch.tensor([[NAN]]), torch.ones(1, 1))[0].isnan()

    def test_gradient_of_masked_positions_is_zero(self):
        kl = self.KL.clone().requires_grad_()
        sum_kl_per_sequence(kl, self.MASK).sum().backward()
        assert kl.grad.tolist() == self.MASK.float().tolist()

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`per_token_kl` \(2, 3\), `mask` \(2, 2\)"):
            kl_totals(torch.zeros(2, 3), torch.zeros(2, 2))
        with pytest.raises(ValueError, match=r"2 dimensions.*\(3,\)"):
            sum_kl_per_sequence(torch.zeros(3), torch.zeros(3))
