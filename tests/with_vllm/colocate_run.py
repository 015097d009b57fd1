"""
Train one case with vLLM as the sampler, in the process of the trainer, and write what vLLM was sent and what it made of
it. A process can hold one such vLLM.

    python colocate_run.py CASE FOLDER
"""

import json
import sys
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, set_seed
from trl.generation.vllm_generation import VLLMGeneration
from vllm import SamplingParams

from oracle import plain_model
from tiny import RUN, build_dataset, build_model, build_tokenizer, logged, reward_even_tokens, trained_lora
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


TRAINERS = {"grpo": KLXGRPOTrainer, "rloo": KLXRLOOTrainer, "ppo": KLXPPOTrainer}
STEPS = 4
# `trainer-policy-reference`, and after a further dash what is special about it. `{}` stands for the case's folder.
CASES = {
    "grpo-lora-adapter": {"kl_ref_adapter_path": "{}/policy_adapter"},
    "grpo-lora-adapter-modules": {"kl_ref_adapter_path": "{}/other_adapter"},
    "rloo-lora-start": {"kl_penalty_reference_step": 0},
    "ppo-lora-start-modules": {"kl_penalty_reference_step": 0},
    "ppo-full-base": {},
}


def prepare(name: str, folder: Path) -> None:
    """Save what the case starts from: vLLM reads the model from where the trainer's was loaded."""
    # The smallest head that vLLM's attention on CPUs knows is one of 32.
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    build_model(**sizes).save_pretrained(folder / "base")
    build_tokenizer().save_pretrained(folder / "base")
    modules = {"modules_to_save": ["lm_head"]} if "modules" in name else {}
    for seed, adapter in ((1, "policy_adapter"), (5, "other_adapter")):
        policy = trained_lora(seed, build_model(**sizes), scale=0.1, **modules)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, weight in policy.named_parameters():
                if ".modules_to_save." in key:
                    weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        policy.save_pretrained(folder / adapter)


def build(name: str, folder: Path):
    kind, policy, *_ = name.split("-")
    fields = {key: value.format(folder) if isinstance(value, str) else value for key, value in CASES[name].items()}
    defaults = RUN | {
        "output_dir": str(folder / "run"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        **({"num_generations": 1, "num_ppo_epochs": 1} if kind == "ppo" else {"num_generations": 4}),
        "learning_rate": 0.02 if policy == "lora" else 0.005,
        "kl_penalty_coef": 0.05,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 128,
    }
    trainer_class = TRAINERS[kind]
    args = trainer_class._config_class(**(defaults | fields))
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    if policy == "lora":
        model = PeftModel.from_pretrained(model, folder / "policy_adapter", is_trainable=True)
    return trainer_class(
        model=model,
        reward_funcs=reward_even_tokens,
        args=args,
        train_dataset=build_dataset(32),
        processing_class=build_tokenizer(),
    )


# ---- The policy and the reference as plain models, and what they say of vLLM's completions ----


def plain_policy(trainer):
    with trainer.value_function.hidden() if hasattr(trainer, "value_function") else nullcontext():
        return plain_model(trainer.accelerator.unwrap_model(trainer.model))


def plain_reference(trainer, folder: Path):
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(policy, PeftModel):
        return plain_model(policy, "klx_ref")
    return AutoModelForCausalLM.from_pretrained(folder / "base").eval()


@torch.no_grad()
def logps_of(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)


class Watch:
    """Sees what TRL hands to vLLM and what it gets back, and changes nothing of it."""

    def __init__(self, trainer):
        self.trainer = trainer
        generation = trainer.vllm_generation
        self.llm = generation.llm
        self.model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        self.sent: list[str] = []
        self.syncs = 0
        self.rollouts: list[tuple] = []
        self._load, self._sync, self._generate = self.model.load_weights, generation.sync_weights, generation.generate
        self.model.load_weights, generation.sync_weights, generation.generate = self.load, self.sync, self.generate

    def load(self, pairs):
        pairs = list(pairs)
        self.sent.extend(name for name, _ in pairs)
        return self._load(pairs)

    def sync(self):
        self.syncs += 1
        self._sync()

    def generate(self, *args, **kwargs):
        result = self._generate(*args, **kwargs)
        policy = plain_policy(self.trainer)
        for prompt, completion, logps in zip(kwargs["prompts"], result[1], result[2], strict=True):
            self.rollouts.append((policy, len(self.rollouts), prompt, completion, [found[0] for found in logps]))
        return result

    def weights(self) -> dict[str, torch.Tensor]:
        """vLLM's weights, by its own names."""
        return {name: weight.detach().float().clone() for name, weight in self.model.named_parameters()}

    def logps(self, texts: list[list[int]]) -> torch.Tensor:
        """Log-probs that vLLM gives the tokens of these texts, all but the first of each."""
        sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": text} for text in texts]
        outputs = self.llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
        found = []
        for text, output in zip(texts, outputs, strict=True):
            found += [output.prompt_logprobs[place][token].logprob for place, token in enumerate(text) if place]
        return torch.tensor(found, dtype=torch.float64)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    began = time.perf_counter()
    prepare(name, folder)
    trainer = build(name, folder)
    built = time.perf_counter()
    watch = Watch(trainer)
    print({k: tuple(v.shape) for k, v in watch.weights().items()}, next(watch.model.parameters()).dtype)
    reference = plain_reference(trainer, folder)
    trainer.train()
    print("KL", logged(trainer, "klx/kl"), watch.syncs, sorted(set(watch.sent)))
    policy = plain_policy(trainer)
    trainer.vllm_generation.sync_weights()
    texts = [p + c for _, _, p, c, _ in watch.rollouts]
    v = watch.logps(texts)
    for m in (policy, reference):
        e = torch.cat([logps_of(m, t[:1], t[1:]) for t in texts])
        print("dist", (v - e).abs().max(), (v - e).abs().mean())
    for model, _, p, c, l in watch.rollouts[::8]:
        l = torch.tensor(l).double()
        print("rollout", (l - logps_of(model, p, c)).abs().max(), (l - logps_of(reference, p, c)).abs().max())
    print(time.perf_counter() - built, built - began)
