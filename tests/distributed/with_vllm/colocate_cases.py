"""What is trained with vLLM; nothing heavy is imported here, because the tests are collected without vLLM too."""

STEPS = 4
# `trainer-policy-reference`, and after a further dash what is special about it. `{}` stands for the case's folder.
CASES = {
    "grpo-lora-adapter": {"kl_ref_adapter_path": "{}/policy_adapter"},
    "grpo-lora-adapter-modules": {"kl_ref_adapter_path": "{}/other_adapter"},
    "rloo-lora-start": {"kl_penalty_reference_step": 0},
    "ppo-lora-start-modules": {"kl_penalty_reference_step": 0},
    "ppo-full-base": {},
}
# The reference is what the policy is before the first step.
FROM_THE_START = [name for name in CASES if name != "grpo-lora-adapter-modules"]
