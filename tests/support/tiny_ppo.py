"""PPO for the tests: tiny trainers that record what they do, and an independent PPO in plain loops."""

import copy
import math
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from support.oracle import plain_model, sampled_logps
from support.tiny import (
    SPECIALS,
    WORDS,
    build_dataset,
    build_tokenizer,
    build_trainer,
    history,
    lora,
    trained_lora,
    weights,
)
from trl_klx import KLXPPOTrainer


EOS = 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_ppo(output_dir, trainer_class=KLXPPOTrainer, *, num_generations=1, **settings):
    """A PPO trainer on the tiny model, by default with one completion per prompt; see [`build_trainer`]."""
    return build_trainer(trainer_class, output_dir, num_generations=num_generations, **settings)


def train_ppo(output_dir, trainer_class=KLXPPOTrainer, **settings):
    trainer = build_ppo(output_dir, trainer_class, **settings)
    trainer.train()
    return trainer


def build_scorer(seed: int = 0, **overrides) -> LlamaForSequenceClassification:
    """A reward or value model: one number per token. As a reward model it is read at the last token."""
    settings = {
        "vocab_size": len(WORDS) + len(SPECIALS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "num_labels": 1,
        "initializer_range": 0.3,
    } | overrides
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForSequenceClassification(LlamaConfig(**settings)).eval()


def tokenizer_with_bos():
    """A tokenizer that puts BOS before every text, as Llama's does."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: texts can be cut anywhere, as with a real tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(SPECIALS + alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


# ---- Rollouts that depend only on the prompt ----


def completion_of(prompt: str) -> list[int]:
    draw = random.Random(prompt)
    tokens = [draw.randrange(len(SPECIALS), len(SPECIALS) + len(WORDS)) for _ in range(draw.randrange(3, 7))]
    return [*tokens[:-1], EOS] if draw.random() < 0.6 else tokens


def rollout_with_tools(prompts: list[str], trainer) -> dict:
    """Completions with tokens written by an environment: at the start, in the middle, at the end, or none."""
    completions = [completion_of(prompt) for prompt in prompts]
    masks = []
    for prompt, ids in zip(prompts, completions, strict=True):
        mask = [1] * len(ids)
        place = random.Random(f"tools|{prompt}").randrange(4)
        if place < 3:
            mask[(0, len(ids) // 2, len(ids) - 1)[place]] = 0
        masks.append(mask)
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": masks,
    }


# ---- A trainer that records ----


class RecordingPPOTrainer(KLXPPOTrainer):
    """Keeps every rollout, and every micro-batch of the loss, each with the weights at that moment."""

    def __init__(self, *args, **kwargs):
        self.rollouts: list[dict] = []
        self.losses: list[dict] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._snapshot = None
        super().__init__(*args, **kwargs)

    def now(self) -> dict:
        if self._snapshot is None or self._snapshot[0] != self.state.global_step:
            policy = self.accelerator.unwrap_model(self.model)
            with self.value_function.hidden():
                plain = plain_model(policy)
            value = {name: weight.detach().clone() for name, weight in self.value_function.module.state_dict().items()}
            self._snapshot = self.state.global_step, {"policy": plain, "value": value}
        return self._snapshot[1] | {"coef": 0.0 if self.kl_controller is None else self.kl_controller.value}

    def scaled(self, value: dict[str, torch.Tensor]) -> dict:
        """The weights of the value function, and the units of its values."""
        return value | {"mean": float(self.value_function.scale.mean), "std": float(self.value_function.scale.std)}

    def _generate_and_score_completions(self, inputs):
        now = self.now() | {"mode": "train" if self.model.training else "eval"}
        self.rollouts.append(now)
        batch = super()._generate_and_score_completions(inputs)
        batch["row"] = torch.arange(len(batch["completion_ids"]))
        self.rollouts[-1] |= batch
        # The units change when a rollout begins.
        self.rollouts[-1]["value"] = self.scaled(now["value"])
        return batch

    def _ppo_score(self, batch, rewards):
        self.rollouts[-1]["rewards"] = rewards.clone()
        return super()._ppo_score(batch, rewards)

    def _ppo_estimate(self, batch, values):
        super()._ppo_estimate(batch, values)
        if "row" in batch:  # in the loss, where the rows have been shuffled
            order = batch["row"].argsort()
            estimated = {name: batch[name] for name in ("advantages", "ppo_values", "ppo_returns", "ppo_mask")}
            self.rollouts[-1] |= {name: tensor[order] for name, tensor in estimated.items()}

    def _compute_loss(self, model, inputs):
        now = self.now()
        now["value"] = self.scaled(now["value"])
        loss = super()._compute_loss(model, inputs)
        self.losses.append(now | {"loss": loss.detach().clone(), "rollout": len(self.rollouts) - 1} | inputs)
        return loss

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        named = self.accelerator.unwrap_model(self.model).named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        return loss


# ---- PPO by hand ----


def branch_by_hand(state: dict, policy):
    """The policy with the value head's top layers and, if there are any, without the final norm."""
    layers = {name.removeprefix("layers."): state[name] for name in state if name.startswith("layers.")}
    count = len({name.split(".")[0] for name in layers})
    if not count:
        return policy
    branch = copy.deepcopy(policy)
    branch.model.norm = torch.nn.Identity()
    top = branch.model.layers[len(branch.model.layers) - count :]
    for name, weight in layers.items():
        owner, _, last = name.rpartition(".")
        module = top.get_submodule(owner)
        # No longer a parameter, so that gradients reach the given weights.
        del module._parameters[last]
        setattr(module, last, weight)
    return branch


@torch.no_grad()
def values_by_hand(state: dict, policy, batch: dict, value_model=None) -> torch.Tensor:
    """Value before each completion token, `(B, T)`, from the weights of the head or of a value model."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].size(1)
    if value_model is None:
        hidden = branch_by_hand(state, policy)(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        hidden = hidden.hidden_states[-1]
        centred = hidden - hidden.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        inner = (normed * state["norm.weight"] + state["norm.bias"]) @ state["inner.weight"].T + state["inner.bias"]
        outer = inner.clamp(min=0) @ state["outer.weight"].T + state["outer.bias"]
        values = state["mean"] + state["std"] * outer
    else:
        weights = {name.removeprefix("model."): weight for name, weight in state.items() if name.startswith("model.")}
        value_model.load_state_dict(weights)
        values = value_model.model(input_ids=ids, attention_mask=mask).last_hidden_state @ value_model.score.weight.T
    return values[:, -length - 1 : -1, 0]


def counting(batch: dict) -> list[list[int]]:
    """Positions of the tokens that the policy produced, for each completion."""
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    return [[t for t, counts in enumerate(row) if counts] for row in mask.tolist()]


def kl_by_hand(batch: dict, reference, temperature: float) -> torch.Tensor:
    """Log-ratio of each completion token, `(B, T)`."""
    with torch.no_grad():
        return sampled_logps(batch["policy"], batch, temperature) - sampled_logps(reference, batch, temperature)


def advantages_by_hand(batch, kl, values, scores, *, coef, gamma, lam) -> tuple[list[dict], list[dict]]:
    """Advantages and returns of each completion, by position. A completion whose score is `None` does not train."""
    advantages, returns = [], []
    for row, positions in enumerate(counting(batch)):
        positions = positions if scores[row] is not None else []
        rewards = {t: -coef * float(kl[row][t]) for t in positions}
        if positions:
            rewards[positions[-1]] += scores[row]
        estimate, following, advantage, outcome = 0.0, 0.0, {}, {}
        for t in reversed(positions):
            value = float(values[row][t])
            estimate = rewards[t] + gamma * following - value + gamma * lam * estimate
            advantage[t], outcome[t], following = estimate, estimate + value, value
        advantages.append(advantage)
        returns.append(outcome)
    return advantages, returns


def whitened(rows: list[dict]) -> list[dict]:
    numbers = [number for row in rows for number in row.values()]
    mean = sum(numbers) / max(1, len(numbers))
    variance = sum((number - mean) ** 2 for number in numbers) / max(1, len(numbers))
    return [{t: (number - mean) / math.sqrt(variance + 1e-8) for t, number in row.items()} for row in rows]


def as_tensor(rows: list[dict], length: int) -> torch.Tensor:
    """Rows by position as a `(B, T)` tensor, 0 where a row has no entry."""
    return torch.tensor([[row.get(t, 0.0) for t in range(length)] for row in rows], dtype=torch.float64)


def losses_by_hand(
    micro, rollout, advantages, returns, values, *, temperature, clip, value_clip
) -> tuple[float, float]:
    """
    PPO's clipped policy loss, and half its clipped value loss in units of the returns, each summed over the tokens of
    a micro-batch.
    """
    with torch.no_grad():
        logps = sampled_logps(micro["policy"], micro, temperature)
        old_logps = sampled_logps(rollout["policy"], micro, temperature)
    policy_loss = value_loss = 0.0
    unit = micro["value"]["std"]
    for row, source in enumerate(micro["row"].tolist()):
        for t, advantage in advantages[source].items():
            ratio = math.exp(float(logps[row, t] - old_logps[row, t]))
            policy_loss += -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
        for t, outcome in returns[source].items():
            value, old = float(values[row][t]), float(rollout["ppo_values"][source][t])
            clipped = min(max(value, old - unit * value_clip), old + unit * value_clip)
            value_loss += 0.5 * max((value - outcome) ** 2, (clipped - outcome) ** 2) / unit**2
    return policy_loss, value_loss


# ---- Runs that can be killed, resumed, and split over processes ----


# By name: what is trained, and its reference. `{adapter}` stands for a saved adapter.
RESUMED_RUNS = {
    "head": {},
    "value_model": {"value_model": True, "reward_scaling": "ref"},
    "frozen": {"num_layers_unfrozen": 1, "kl_placement": "advantage"},
    "lora": {"lora": True},
    "lora-adapter": {"lora": True, "kl_ref_adapter_path": "{adapter}"},
    "lora-value_model": {"lora": True, "value_model": True},
}


def build_resumed_run(name: str, output_dir: str, adapter: str, **overrides):
    """Three rollouts of four steps with a checkpoint after each, and a lot of state."""
    fields = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "max_steps": 12,
        "save_strategy": "steps",
        "save_steps": 4,
        "learning_rate": 5e-3,
        "reward_scaling": "running",
        "cliprange_reward": 5.0,
        "kl_penalty_coef": 0.2,
        "kl_controller": "pid",
        "kl_target": 0.2,
        "kl_warn_window": 3,
        **RESUMED_RUNS[name],
        **overrides,
    }
    if fields.get("kl_ref_adapter_path") == "{adapter}":
        fields["kl_ref_adapter_path"] = adapter
    extras = {"peft_config": lora()} if fields.pop("lora", False) else {}
    if fields.pop("value_model", False):
        extras["value_model"] = build_scorer(seed=3)
    # Longer than the run; test_epochs.py resumes over several epochs.
    return build_ppo(output_dir, dataset=build_dataset(64), extras=extras, **fields)


def ppo_outcome(trainer) -> dict:
    """All logs since the first step, the final weights, and the state of the reward scaling."""
    return {
        # The last entry summarises only the part of the run in this process.
        "history": history(trainer)[:-1],
        "weights": weights(trainer),
        "scaling": trainer._ppo_scaler.state_dict(),
        "coef": trainer.kl_controller.value,
    }


# Runs on one global batch of completions, however many processes share it.
SPREAD_RUNS = {
    "head": {},
    "value_model": {"value_model": True},
    "lora": {"lora": True},
    "frozen": {"num_layers_unfrozen": 1},
    "loss": {"kl_placement": "loss", "kl_penalty_coef": 0.05},
    "hold": {"kl_penalty_coef": None, "kl_target": 2.0, "kl_horizon": 10000},
    "advantage": {"kl_placement": "advantage", "whiten_rewards": True, "missing_eos_penalty": 0.5},
}


def spread_rollout(prompts: list[str], trainer) -> dict:
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": [completion_of(prompt) for prompt in prompts],
        "logprobs": None,
    }


def length_reward(completion_ids, **kwargs) -> list[float | None]:
    """A reward that differs between completions and between processes."""
    return [None if ids[0] % 7 == 0 else len(ids) + ids[0] / 10.0 for ids in completion_ids]


def run_spread(name: str, output_dir: str, processes: int) -> dict:
    fields = {"kl_penalty_coef": 0.2, "kl_target": 0.2, "kl_horizon": 50, **SPREAD_RUNS[name]}
    extras = {"rollout_func": spread_rollout}
    if fields.pop("lora", False):
        # Not zero at the start, or one of the two factors would get no gradient.
        fields["model"] = trained_lora(seed=1, scale=0.03)
    if fields.pop("value_model", False):
        extras["value_model"] = build_scorer(seed=3)
    trainer = build_ppo(
        output_dir,
        per_device_train_batch_size=8 // processes,
        num_ppo_epochs=2,
        max_steps=6,
        # Adam would turn the rounding of a gradient near zero into a step.
        optim="sgd",
        # A policy that moves further would amplify the rounding in the KL of its updates.
        learning_rate=0.05,
        vf_coef=0.5,
        reward_scaling="running",
        logging_steps=2,
        rewards=length_reward,
        dataset=build_dataset(24),
        extras=extras,
        **fields,
    )
    start = {name: weight.clone() for name, weight in weights(trainer).items()}
    trainer.train()
    return ppo_outcome(trainer) | {
        "start": start,
        "controller": trainer.kl_controller.state_dict(),
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": str(trainer.accelerator.distributed_type),
    }


def padded_tokenizer(build=build_tokenizer):
    """A tokenizer with an added padding token that no model embeds."""
    tokenizer = build()
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == rows
    return tokenizer
