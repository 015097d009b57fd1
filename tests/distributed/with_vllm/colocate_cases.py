"""The cases trained with vLLM. Nothing heavy is imported, because the tests are also collected without vLLM."""

STEPS = 4
# `trainer-policy-reference`, then, after another dash, what is special about the case. `{}` stands for its folder.
CASES = {
    "grpo-lora-adapter": {"kl_ref_adapter_path": "{}/policy_adapter"},
    "grpo-lora-adapter-modules": {"kl_ref_adapter_path": "{}/other_adapter"},
    "rloo-lora-start": {"kl_penalty_reference_step": 0},
    "ppo-lora-start-modules": {"kl_penalty_reference_step": 0},
    "ppo-full-base": {},
}
# The reference is the policy before the first step.
FROM_THE_START = [name for name in CASES if name != "grpo-lora-adapter-modules"]
