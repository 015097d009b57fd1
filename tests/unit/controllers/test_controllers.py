import json
import math
import random
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trl_klx.controllers.registry
from trl_klx.controllers.base import KLController
from trl_klx.controllers.pid import PIDKLController
from trl_klx.controllers.registry import (
    get_kl_controller,
    get_kl_controller_class,
    list_kl_controllers,
    register_kl_controller,
)
from trl_klx.controllers.rules import AdaptiveKLController, ExponentialKLController, FixedKLController
from trl_klx.controllers.tracking_error import relative_rms_error


NAN, INF = math.nan, math.inf
BUILT_IN = {
    "fixed": FixedKLController,
    "adaptive": AdaptiveKLController,
    "exponential": ExponentialKLController,
    "pid": PIDKLController,
}
ADAPTIVE = tuple(name for name in BUILT_IN if name != "fixed")


def build(name, **kwargs):
    return get_kl_controller(name, **{"init_coef": 0.1, "target": 6.0, **kwargs})


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry, so that a test's registrations do not outlive it."""
    monkeypatch.setattr(trl_klx.controllers.registry, "_REGISTRY", dict(trl_klx.controllers.registry._REGISTRY))


class TestFixed:
    def test_never_moves(self):
        controller = FixedKLController(0.3)
        assert [controller.update(kl, 64) for kl in (0.0, 6.0, 1e9)] == [0.3] * 3
        assert not controller.saturated

    def test_zero_and_values_outside_the_bounds_are_allowed(self):
        assert FixedKLController(0.0).update(5.0, 64) == 0.0
        assert FixedKLController(100.0).value == 100.0


class TestAdaptive:
    def test_trace(self):
        controller = AdaptiveKLController(0.1, target=6.0, horizon=1000)
        # kl 6.6: error 0.1, factor 1 + 0.1 * 100 / 1000 = 1.01
        assert controller.update(6.6, 100) == pytest.approx(0.101)
        # kl 12: error 1 clipped to 0.2, factor 1.02: 0.10302
        assert controller.update(12.0, 100) == pytest.approx(0.10302)
        # kl 0: error -1 clipped to -0.2, twice the episodes, factor 1 - 0.2 * 0.2 = 0.96: 0.0988992
        assert controller.update(0.0, 200) == pytest.approx(0.0988992)
        # kl at the target: no change
        assert controller.update(6.0, 100) == pytest.approx(0.0988992)
        assert controller.value == pytest.approx(0.0988992)

    def test_own_clip(self):
        # kl 9: error 0.5, not clipped, factor 1.5
        assert AdaptiveKLController(0.1, target=6.0, horizon=64, clip=0.5).update(9.0, 64) == pytest.approx(0.15)

    def test_batch_far_beyond_the_horizon_stops_at_the_bound(self):
        # factor 1 - 0.2 * 1000 / 10 = -19
        controller = AdaptiveKLController(0.1, target=6.0, horizon=10)
        assert controller.update(0.0, 1000) == 1e-4
        assert controller.saturated


class TestExponential:
    def test_trace(self):
        controller = ExponentialKLController(0.1, target=6.0)
        # exp(0.1 * (8 - 6)) = 1.221403; exp(0.1 * (1 - 6)) = 0.606531: 0.0740818
        assert controller.update(8.0, 64) == pytest.approx(0.1221403, rel=1e-6)
        assert controller.update(1.0, 64) == pytest.approx(0.0740818, rel=1e-6)

    def test_clamped_without_overflow(self):
        controller = ExponentialKLController(0.1, target=6.0)
        assert controller.update(1e300, 64) == 10.0
        assert controller.saturated
        # exp(-0.6) leaves the bound at once: there was no wind-up.
        assert controller.update(0.0, 64) == pytest.approx(5.488116, rel=1e-6)
        assert not controller.saturated
        # exp(0.1 * -2000) = 1e-87
        assert ExponentialKLController(0.1, target=2000.0).update(0.0, 64) == 1e-4


class TestPID:
    def test_trace(self):
        controller = PIDKLController(0.1, target=4.0, kp=1.0, ki=0.1, kd=10.0)
        # x = sqrt(4 / 4) = 1: nothing left to go, no speed yet.
        assert controller.update(4.0, 64) == pytest.approx(0.1)
        # x = 1.2, surprise 0.2: distance 1.1, speed 0.06 (the greatest so far). Wanted: 1 / 10 * -0.1 = -0.01.
        # Scatter 0.9 * (0.9 * 0.04) + 0.1 * 0.2 = 0.0524, so the gain is 10, below 1 / 0.0524 and 3 / 0.06.
        # e = 10 * 0.07 = 0.7. Trend: 0.03 * 2 * 0.1 * 0.7 = 0.0042.
        # Integral: 0.1 * (1 + 3 * 0.1) * 0.7 + 0.0042 = 0.0952.
        assert controller.update(5.76, 64) == pytest.approx(0.1 * math.exp(0.7952))
        # x = 0.96, predicted 1.16, surprise -0.2: distance 1.06, speed 0, greatest 0.0594. Wanted -0.006, e = 0.06.
        # Trend: 0.97 * 0.0042 + 0.03 * 2 * 0.1 * 0.06 = 0.004434.
        # Integral: 0.0952 + 0.1 * (1 + 3 * 0.06) * 0.06 + 0.004434 = 0.106714.
        assert controller.update(4 * 0.96**2, 64) == pytest.approx(0.1 * math.exp(0.166714))

    @pytest.mark.parametrize(
        "kl, error",
        [
            # Far off: x is clipped to 3, distance 2, speed 0.3 * 2 = 0.6; gain 1 / (0.9 * 0.036 + 0.2) = 4.3;
            # wanted 0.075 * -1; 4.3 * 0.675 = 2.9 exceeds the limit.
            (4e8, 1.5),
            # At 0: distance 0.5, speed -0.3; gain 1 / (0.0324 + 0.1) = 7.55; wanted 0.0375; 7.55 * -0.3375 = -2.5.
            (0.0, -1.5),
        ],
    )
    def test_error_is_limited(self, kl, error):
        controller = PIDKLController(0.1, target=4.0, ki=0.0)
        controller.update(4.0, 64)
        assert controller.update(kl, 64) == pytest.approx(0.1 * math.exp(error))

    def test_integral_stands_still_at_a_bound(self):
        controller = PIDKLController(0.1, target=4.0)
        for _ in range(200):
            controller.update(16.0, 64)
        assert controller.saturated and controller.value == 10.0
        # No more than it takes to move 0.1 to the bound.
        assert 0.0 < controller.state_dict()["integral"] <= math.log(100)
        released = [controller.update(1.0, 64) for _ in range(3)]
        assert released[-1] < 10.0

    @staticmethod
    def run(controller, steps, drive=1.0, speed=0.05, kl=0.1, noise=0.0):
        """A policy whose KL covers a share `speed` of the way to `drive / coef` at each step."""
        rng, kls = random.Random(0), []
        for _ in range(steps):
            kl += speed * (drive / controller.value - kl)
            kls.append(kl)
            controller.update(kl * (1 + noise * rng.gauss(0, 1)), 64)
        return kls

    @pytest.mark.parametrize("init_coef", [0.01, 0.1, 1.0])
    @pytest.mark.parametrize("speed", [0.01, 0.05, 0.2, 0.5])
    def test_closed_loop_converges_to_the_target(self, init_coef, speed):
        kls = self.run(PIDKLController(init_coef, target=4.0), 1500, speed=speed)
        assert kls[-50:] == pytest.approx([4.0] * 50, rel=0.02)

    @pytest.mark.parametrize("unit", [1.0, 0.02], ids=["sequence", "token"])
    @pytest.mark.parametrize("noise", [0.02, 0.1])
    @pytest.mark.parametrize("speed", [0.02, 0.1, 0.3])
    def test_noise_is_not_amplified(self, speed, noise, unit):
        # The unit of the KL does not matter, because the target has the same unit.
        kls = self.run(
            PIDKLController(0.1, target=4.0 * unit), 800, drive=unit, speed=speed, kl=0.1 * unit, noise=noise
        )
        assert relative_rms_error(kls[300:], 4.0 * unit) < 1.5 * noise + 0.03

    @pytest.mark.parametrize("learning_rate", [0.03, 0.1, 0.2])
    @pytest.mark.parametrize("init_coef", [0.02, 0.1, 0.5])
    def test_a_policy_with_momentum_arrives_without_overshoot(self, init_coef, learning_rate):
        """Distance x driven at `learning_rate * (1 - coef / 0.2 * x)`, through a momentum of 0.9 as in Adam."""
        controller, x, momentum, kls = PIDKLController(init_coef, target=4.0), 0.0, 0.0, []
        for _ in range(300):
            force = max(-2.0, 1.0 - controller.value / 0.2 * x)
            momentum = 0.9 * momentum + 0.1 * force
            x = max(x + learning_rate * momentum, 0.0)
            kls.append(4.0 * x * x)
            controller.update(kls[-1], 64)
        assert max(kls) < 1.3 * 4.0
        assert relative_rms_error(kls[150:], 4.0) < 0.1

    @pytest.mark.parametrize("weight", [PIDKLController.TREND_WEIGHT, 0.0])
    def test_a_coefficient_that_must_keep_rising_is_followed(self, weight, monkeypatch):
        """The same policy, whose pull away from the reference doubles every 35 steps."""
        monkeypatch.setattr(PIDKLController, "TREND_WEIGHT", weight)
        controller, x, momentum, kls = PIDKLController(0.1, target=4.0), 0.0, 0.0, []
        for step in range(200):
            force = max(-2.0, 1.0 - controller.value / (0.1 * 1.02**step) * x)
            momentum = 0.9 * momentum + 0.1 * force
            x = max(x + 0.1 * momentum, 0.0)
            kls.append(4.0 * x * x)
            controller.update(kls[-1], 64)
        # The trend makes the difference.
        assert (relative_rms_error(kls[100:], 4.0) < 0.08) == (weight > 0)

    def test_closed_loop_recovers_from_saturation(self):
        # A target out of reach (the KL stays below 0.01 / 1e-4 = 100) holds the coefficient at its lower bound.
        controller = PIDKLController(0.1, target=1000.0)
        self.run(controller, 5000, drive=0.01)
        assert controller.saturated and controller.value == 1e-4
        # Then the policy is driven hard. An integral that had wound up would take thousands of steps to unwind.
        kls = self.run(controller, 600, drive=1000.0, kl=100.0)
        assert kls[-50:] == pytest.approx([1000.0] * 50, rel=0.02)

    def test_state(self):
        state = {"value": 0.1, "distance": None, "speed": 0.0, "top_speed": 0.0, "scatter": 0.04, "integral": 0.0}
        state["trend"] = 0.0
        assert build("pid").state_dict() == state


class TestCommonBehaviour:
    @pytest.mark.parametrize("name", ADAPTIVE)
    def test_direction(self, name):
        assert build(name).update(12.0, 64) > 0.1
        assert build(name).update(1.0, 64) < 0.1
        assert build(name).update(6.0, 64) == pytest.approx(0.1)

    @pytest.mark.parametrize("name", ADAPTIVE)
    @settings(deadline=None)
    @given(
        kls=st.lists(st.floats(0.0, 1e308), max_size=20),
        n_steps=st.integers(0, 10**9),
        target=st.floats(1e-6, 1e6),
    )
    def test_bounds(self, name, kls, n_steps, target):
        controller = build(name, target=target, min_coef=0.01, max_coef=2.0)
        for kl in kls:
            value = controller.update(kl, n_steps)
            assert 0.01 <= value <= 2.0
            assert value == controller.value
            assert controller.saturated == (value in (0.01, 2.0))

    @pytest.mark.parametrize("bad", [NAN, INF, -INF, -0.5])
    @pytest.mark.parametrize("name", BUILT_IN)
    def test_bad_kl_changes_nothing_and_warns_once(self, name, bad):
        controller = build(name)
        controller.update(7.0, 64)
        before = controller.state_dict()
        with pytest.warns(RuntimeWarning, match=f"KL of {bad}") as caught:
            assert controller.update(bad, 64) == before["value"]
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            controller.update(bad, 64)
        assert controller.state_dict() == before

    def test_each_instance_warns(self):
        for _ in range(2):
            with pytest.warns(RuntimeWarning):
                build("adaptive").update(NAN, 64)

    @pytest.mark.parametrize("bad", [-1, NAN, INF])
    def test_bad_n_steps(self, bad):
        with pytest.raises(ValueError, match="n_steps"):
            build("adaptive").update(6.0, bad)

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_json_round_trip_goes_on_as_if_nothing_happened(self, name):
        kls = [3.0, 9.0, 20.0, 0.0, 7.0, 6.5]
        whole, first, second = build(name), build(name), build(name)
        expected = [whole.update(kl, 64) for kl in kls]
        for kl in kls[:3]:
            first.update(kl, 64)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [second.update(kl, 64) for kl in kls[3:]] == expected[3:]
        assert second.state_dict() == whole.state_dict()

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_state_before_the_first_update_can_be_loaded(self, name):
        controller = build(name)
        controller.load_state_dict(json.loads(json.dumps(build(name).state_dict())))
        assert controller.value == 0.1

    def test_loaded_value_is_moved_into_the_present_bounds(self):
        controller = build("adaptive", max_coef=0.5)
        controller.load_state_dict({"value": 3.0})
        assert controller.value == 0.5

    @pytest.mark.parametrize(
        "name, change, message",
        [
            ("adaptive", {"value": NAN}, "'value' is nan"),
            ("adaptive", {"value": "0.1"}, "'value' is '0.1'"),
            ("adaptive", {"value": True}, "'value' is True"),
            ("adaptive", {"value": None}, "'value' is None"),
            ("adaptive", {"value": 0.0}, "'value' is 0.0.*positive"),
            ("fixed", {"value": -0.1}, "'value' is -0.1"),
            ("pid", {"integral": INF}, "'integral' is inf"),
            ("pid", {"integral": None}, "'integral' is None"),
            ("adaptive", {"integral": 1.0}, "unknown key 'integral'.*1.0"),
        ],
    )
    def test_invalid_state_is_refused_whole(self, name, change, message):
        controller = build(name)
        before = controller.state_dict()
        with pytest.raises(ValueError, match=message):
            controller.load_state_dict({**before, "value": 0.2, **change})
        assert controller.state_dict() == before

    def test_missing_key_and_wrong_type(self):
        with pytest.raises(ValueError, match="lacks the key 'distance'"):
            build("pid").load_state_dict({"value": 0.1})
        with pytest.raises(ValueError, match="must be a dict"):
            build("pid").load_state_dict([0.1])

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_description(self, name):
        cls = BUILT_IN[name]
        assert cls.needs_target == (name != "fixed")
        assert cls.formula and cls.formula != KLController.formula
        uses = {"fixed": set(), "adaptive": {"target", "horizon", "min_coef", "max_coef"}}
        assert cls.uses == uses.get(name, {"target", "min_coef", "max_coef"})


class TestConstruction:
    @pytest.mark.parametrize("value", [-0.1, NAN, INF, None, "0.1", True])
    @pytest.mark.parametrize("name", BUILT_IN)
    def test_bad_init_coef(self, name, value):
        with pytest.raises(ValueError, match=f"`init_coef`.*{value!r}"):
            build(name, init_coef=value)

    @pytest.mark.parametrize("name", ADAPTIVE)
    def test_adaptive_rules_cannot_start_from_zero(self, name):
        with pytest.raises(ValueError, match="a multiplicative rule cannot leave 0.*'fixed'"):
            build(name, init_coef=0.0)

    @pytest.mark.parametrize("name", ADAPTIVE)
    @pytest.mark.parametrize("value", [1e-5, 11.0])
    def test_init_coef_outside_the_bounds(self, name, value):
        with pytest.raises(ValueError, match=f"`init_coef={value}`.*outside"):
            build(name, init_coef=value)

    @pytest.mark.parametrize("name", ADAPTIVE)
    def test_target_is_needed(self, name):
        with pytest.raises(ValueError, match="needs `target`, got None.*hold"):
            build(name, target=None)

    @pytest.mark.parametrize("setting", ["target", "horizon", "min_coef", "max_coef"])
    @pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, "1"])
    @pytest.mark.parametrize("name", ADAPTIVE)
    def test_bad_settings(self, name, setting, value):
        with pytest.raises(ValueError, match=f"`{setting}` must be a finite number > 0.*{value!r}"):
            build(name, **{setting: value})

    def test_swapped_bounds(self):
        with pytest.raises(ValueError, match=r"`min_coef` \(1.0\) must not exceed `max_coef` \(0.01\)"):
            build("adaptive", min_coef=1.0, max_coef=0.01)

    @pytest.mark.parametrize(
        "name, setting",
        [
            ("adaptive", "clip"),
            ("exponential", "rate"),
            ("pid", "kp"),
            ("pid", "ki"),
            ("pid", "kd"),
            ("pid", "error_clip"),
        ],
    )
    @pytest.mark.parametrize("value", [-1.0, NAN, INF])
    def test_bad_gains(self, name, setting, value):
        with pytest.raises(ValueError, match=f"`{setting}`.*{value!r}"):
            build(name, **{setting: value})


class TestRegistry:
    def test_built_in_names(self):
        assert set(BUILT_IN) <= set(list_kl_controllers())
        for name, cls in BUILT_IN.items():
            assert get_kl_controller_class(name) is cls
            assert type(build(name)) is cls

    def test_unknown_name_lists_the_valid_ones(self):
        with pytest.raises(ValueError, match="'pod'.*adaptive.*exponential.*fixed.*pid"):
            build("pod")

    def test_unknown_keyword(self):
        with pytest.raises(ValueError, match=r"'pid' \(PIDKLController\).*'kpp' \(value 3\).*error_clip, kd, ki, kp"):
            build("pid", kpp=3)
        with pytest.raises(ValueError, match="'fixed'.*'clip'.*none"):
            build("fixed", clip=0.2)

    def test_settings_reach_the_controller(self):
        controller = build("adaptive", horizon=7, min_coef=0.02, max_coef=3.0, clip=0.4)
        assert isinstance(controller, AdaptiveKLController)
        settings = (controller.target, controller.horizon, controller.min_coef, controller.max_coef, controller.clip)
        assert settings == (6.0, 7.0, 0.02, 3.0, 0.4)

    def test_own_controller(self, registry):
        @register_kl_controller("step")
        class Step(KLController):
            def __init__(self, init_coef, my_arg=2.0, **kwargs):
                super().__init__(init_coef, **kwargs)
                self.my_arg = my_arg

            def _next(self, kl, n_steps):
                return self.value * (self.my_arg if kl > self.target else 1 / self.my_arg)

        assert "step" in list_kl_controllers()
        controller = build("step", my_arg=4.0)
        assert controller.update(7.0, 64) == pytest.approx(0.4)
        # Bounds, warnings and state come from the base class.
        assert [controller.update(7.0, 64) for _ in range(3)][-1] == 10.0
        assert controller.saturated and controller.state_dict() == {"value": 10.0}
        assert Step.uses == {"target", "horizon", "min_coef", "max_coef"}
        with pytest.raises(ValueError, match="'step'.*'other'.*my_arg"):
            build("step", other=1)

    def test_own_controller_with_a_narrow_constructor(self, registry):
        @register_kl_controller("narrow")
        class Narrow(KLController):
            def __init__(self, init_coef):
                super().__init__(init_coef)

            def _next(self, kl, n_steps):
                return self.value

        assert get_kl_controller("narrow", init_coef=0.1).value == 0.1
        # It would ignore the target, so the target is refused.
        with pytest.raises(ValueError, match="'narrow'.*'target'"):
            get_kl_controller("narrow", init_coef=0.1, target=6.0)

    @pytest.mark.parametrize("returned, scales", [(NAN, True), (-0.1, False), (0.0, True), (INF, False)])
    def test_rule_that_returns_no_coefficient(self, returned, scales, registry):
        @register_kl_controller("broken")
        class Broken(KLController):
            multiplicative = scales
            uses = frozenset({"target"})

            def _next(self, kl, n_steps):
                return returned

        controller = get_kl_controller("broken", init_coef=0.1)
        with pytest.raises(ValueError, match=rf"Broken._next.* returned {returned}, but a coefficient must be finite"):
            controller.update(6.0, 64)
        assert controller.value == 0.1

    def test_rule_that_ends_at_zero(self, registry):
        @register_kl_controller("ending")
        class Ending(KLController):
            multiplicative = False
            uses = frozenset()

            def _next(self, kl, n_steps):
                return max(0.0, self.value - 0.05)

        controller = get_kl_controller("ending", init_coef=0.1)
        assert [controller.update(1.0, 8) for _ in range(3)] == [0.05, 0.0, 0.0]
        again = get_kl_controller("ending", init_coef=0.1)
        again.load_state_dict(controller.state_dict())
        assert again.value == 0.0

    def test_only_controllers_can_be_registered(self, registry):
        with pytest.raises(TypeError, match="'thing'.*KLController"):
            register_kl_controller("thing")(dict)

    def test_name_conflict(self, registry):
        register_kl_controller("fixed")(FixedKLController)  # again is fine
        with pytest.raises(ValueError, match="'fixed' is taken by.*FixedKLController"):
            register_kl_controller("fixed")(PIDKLController)


class TestEntryPoints:
    @pytest.fixture
    def install(self, tmp_path, monkeypatch, registry):
        """Create a distribution as pip would: a module and a dist-info directory with its entry points."""

        def make(name, module, source, attribute="Plugged"):
            (tmp_path / f"{module}.py").write_text(source)
            info = tmp_path / f"{module}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[trl_klx.kl_controllers]\n{name} = {module}:{attribute}\n")
            monkeypatch.syspath_prepend(str(tmp_path))

        return make

    def test_controller_of_a_package(self, install):
        install(
            "plugged",
            "klx_test_plugin",
            "from trl_klx.controllers.rules import KLController\n"
            "class Plugged(KLController):\n"
            "    def _next(self, kl, n_steps):\n"
            "        return 0.7\n",
        )
        assert "plugged" in list_kl_controllers()
        assert build("plugged").update(6.0, 64) == 0.7
        assert get_kl_controller_class("plugged").__module__ == "klx_test_plugin"

    def test_broken_package_hurts_only_when_asked_for(self, install):
        install("sick", "klx_test_sick", "raise RuntimeError('no such device')\n")
        assert "sick" in list_kl_controllers()
        assert build("adaptive").value == 0.1
        with pytest.raises(ImportError, match="'sick'.*klx_test_sick:Plugged.*no such device"):
            build("sick")

    def test_entry_point_to_something_else(self, install):
        install("odd", "klx_test_odd", "Plugged = 3\n")
        with pytest.raises(TypeError, match="'odd' must be a subclass"):
            build("odd")
