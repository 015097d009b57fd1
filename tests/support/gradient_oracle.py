"""
A policy small enough to enumerate: every completion, its probability, and the exact gradient that a penalty promises.

The policy is a Llama without layers, so the next token depends only on the last one, through a table of logits:
`lm_head.weight`, the only weight that trains. Its probabilities are multiples of a quarter, so one batch can hold each
completion exactly as often as the policy samples it. The loss of that batch is then the expected loss, and its
gradient, which the real trainer computes, can be compared with the gradient of an objective in closed form.
"""

import math
from dataclasses import dataclass

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_klx import KLXRLOOTrainer


SYMBOLS = ["<eos>", "a", "b", "<pad>", "<prompt>"]
EOS, PROMPT = 0, 4
SAMPLED = 3  # the policy samples the first three symbols
LENGTH = 3
ROWS = 4**LENGTH
# Tokens that can be sampled have at least this logit; the others have one so low that their probability is exactly 0.
NEVER = -1e4

# For each last token, the probabilities of "<eos>", "a", "b".
POLICY = {PROMPT: (0.25, 0.5, 0.25), 1: (0.25, 0.25, 0.5), 2: (0.5, 0.25, 0.25), EOS: (0.5, 0.25, 0.25)}
REFERENCE = {PROMPT: (0.3, 0.2, 0.5), 1: (0.2, 0.65, 0.15), 2: (0.1, 0.3, 0.6), EOS: (0.5, 0.25, 0.25)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(SYMBOLS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def build_policy(probabilities=POLICY) -> LlamaForCausalLM:
    size = 8
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=0,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=3,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
        rms_norm_eps=0.0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        for token in range(len(SYMBOLS)):
            # One direction per token. The norm scales it to the square root of the width.
            model.model.embed_tokens.weight[token, token] = 1.0
            logits = torch.full((len(SYMBOLS),), NEVER, dtype=torch.float64)
            logits[:SAMPLED] = torch.tensor(probabilities.get(token, POLICY[EOS]), dtype=torch.float64).log()
            model.lm_head.weight[:, token] = (logits / size**0.5).float()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    return model


def completions() -> list[list[int]]:
    """Every completion. Each ends with EOS or has the maximum length."""
    done, open_ = [], [[]]
    for _ in range(LENGTH):
        longer = [[*start, token] for start in open_ for token in range(SAMPLED)]
        done += [ids for ids in longer if ids[-1] == EOS]
        open_ = [ids for ids in longer if ids[-1] != EOS]
    return done + open_


def population(prompts: list[str], trainer) -> dict:
    """Every completion, as often as the initial policy samples it."""
    batch = []
    for ids in completions():
        probability = 1.0
        for last, token in zip([PROMPT, *ids[:-1]], ids, strict=True):
            probability *= POLICY[last][token]
        batch += [ids] * round(ROWS * probability)
    assert len(batch) == len(prompts) == ROWS
    return {"prompt_ids": [[PROMPT]] * ROWS, "completion_ids": batch, "logprobs": None}


class WithPopulation:
    """[`population`] for a trainer that takes no `rollout_func`."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return population(prompt_ids, self)["completion_ids"]


@dataclass
class Step:
    """One optimizer step: the table of logits before it, and the gradient that the trainer computed."""

    weight: torch.Tensor
    gradient: torch.Tensor


def no_reward(completions, **kwargs) -> list[float]:
    """The same reward for all, so that only the penalty trains."""
    return [0.0] * len(completions)


def recorded_steps(trainer_class, output_dir, *, rewards=no_reward, extras=None, prepare=None, **fields) -> list[Step]:
    """
    Train on populations and return every optimizer step. `extras` goes to the trainer, and `prepare` is called with
    the trainer before it trains.
    """
    steps: list[Step] = []

    class Recording(*([WithPopulation] if issubclass(trainer_class, KLXRLOOTrainer) else []), trainer_class):
        def training_step(self, model, *args, **kwargs):
            weight = self.accelerator.unwrap_model(model).lm_head.weight
            before = weight.detach().clone()
            loss = super().training_step(model, *args, **kwargs)
            steps.append(Step(before.double(), weight.grad.detach().double().clone()))
            return loss

    ppo = "PPO" in trainer_class.__name__
    args = trainer_class._config_class(
        output_dir=str(output_dir),
        **{
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "per_device_train_batch_size": ROWS,
            "num_generations": 1 if ppo else ROWS,
            "max_completion_length": LENGTH,
            "temperature": 1.0,
            "max_steps": 1,
            "max_grad_norm": 0.0,
            "optim": "sgd",
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
        }
        # Disable what PPO does besides the penalty: baselines, whitening, and the value loss.
        | ({"whiten_advantages": False, "vf_coef": 0.0, "lam": 1.0} if ppo else {})
        | fields,
    )
    rows = ROWS if ppo else 1
    trainer = Recording(
        model=build_policy(),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["<prompt>"] * rows}),
        processing_class=build_tokenizer(),
        **({} if issubclass(trainer_class, KLXRLOOTrainer) else {"rollout_func": population}) | (extras or {}),
    )
    with torch.no_grad():
        trainer.kl_reference.model.lm_head.weight.copy_(build_policy(REFERENCE).lm_head.weight)
    if prepare is not None:
        prepare(trainer)
    trainer.train()
    return steps


# ---- Exact objectives ----


def k1(drift: float) -> float:
    return drift


def importance(drift: float) -> float:
    return math.exp(drift) * drift


class Exact:
    """
    Objectives of a table of logits, summed over every completion, in fp64.

    Args:
        weight (`torch.Tensor`):
            The current table. Objectives are differentiated with respect to it.
        rollout (`torch.Tensor`):
            The table that the batch was sampled with.
    """

    def __init__(self, weight: torch.Tensor, rollout: torch.Tensor):
        self.weight = weight.clone().requires_grad_(True)
        self.logps = self._table(self.weight)
        self.old = self._table(rollout)
        self.ref = self._table(build_policy(REFERENCE).lm_head.weight.detach().double())
        self.paths = self.all_paths()

    @staticmethod
    def all_paths() -> list[list[tuple[int, int]]]:
        """Every completion as pairs of last token and next token."""
        return [list(zip([PROMPT, *ids[:-1]], ids, strict=True)) for ids in completions()]

    @staticmethod
    def _table(weight: torch.Tensor) -> torch.Tensor:
        logits = weight.T[: len(SYMBOLS)] * weight.shape[1] ** 0.5  # (last token, next token)
        return torch.log_softmax(logits[:, :SAMPLED], dim=-1)

    def _sum(self, table: torch.Tensor, path) -> torch.Tensor:
        return torch.stack([table[step] for step in path]).sum()

    def gradient(self, objective: torch.Tensor) -> torch.Tensor:
        gradient = torch.autograd.grad(objective, self.weight, allow_unused=True, retain_graph=True)[0]
        return torch.zeros_like(self.weight) if gradient is None else gradient

    def expected(self, value) -> torch.Tensor:
        """Mean of `value` over the completions of the rollout."""
        return sum(self._sum(self.old, path).exp() * value(path) for path in self.paths)

    def _ratio(self, step) -> torch.Tensor:
        return (self.logps[step] - self.old[step]).exp()

    def _drift(self, step) -> float:
        """Log-ratio of the rollout's policy to the reference."""
        return (self.old[step] - self.ref[step]).item()

    # ---- Objectives of the current policy ----

    def reverse_kl(self) -> torch.Tensor:
        """KL(policy || reference) of whole completions."""
        return sum(self._sum(self.logps, p).exp() * self._sum(self.logps - self.ref, p) for p in self.paths)

    def token_kl(self) -> torch.Tensor:
        """KL(policy || reference) of the next token, summed over the states visited by the rollout."""
        kl = (self.logps.exp() * (self.logps - self.ref)).sum(-1)
        return self.expected(lambda path: sum(kl[last] for last, _ in path))

    def forward_token_kl(self) -> torch.Tensor:
        """KL(reference || policy) of the next token, summed over the states visited by the rollout."""
        kl = (self.ref.exp() * (self.ref - self.logps)).sum(-1)
        return self.expected(lambda path: sum(kl[last] for last, _ in path))

    # ---- Objectives that charge the KL measured at the rollout: the policy gradient of a constant ----

    def charged(self, weights) -> torch.Tensor:
        """Sum of the ratio times `weights(path, place)` over a completion's tokens. The weights are constants."""
        return self.expected(lambda path: sum(self._ratio(s) * weights(path, t) for t, s in enumerate(path)))

    def charged_by_token(self, charge=k1) -> torch.Tensor:
        """Each token is charged for its own KL."""
        return self.charged(lambda path, t: charge(self._drift(path[t])))

    def charged_to_go(self, discount: float, charge=k1) -> torch.Tensor:
        """Each token is charged for its discounted KL-to-go."""
        return self.charged(
            lambda path, t: sum(discount**i * charge(self._drift(step)) for i, step in enumerate(path[t:]))
        )

    def charged_within(self, charge=k1) -> torch.Tensor:
        """Each token is charged for its own KL minus the mean over its completion."""
        return self.charged(
            lambda path, t: charge(self._drift(path[t])) - sum(charge(self._drift(s)) for s in path) / len(path)
        )

    def charged_by_sequence(self, charge=k1) -> torch.Tensor:
        """Each completion is charged for its KL, through the ratio of the whole completion."""
        return self.expected(lambda path: self._sum(self.logps - self.old, path).exp() * self._charge_of(path, charge))

    def charged_by_mean_ratio(self, centered_over: str, charge=k1) -> torch.Tensor:
        """
        All tokens of a completion are charged alike, through the mean ratio of the completion: for its KL minus the
        mean over completions, or for the mean KL of its tokens, with or without the mean over all tokens subtracted.
        The mean matters off policy, where this ratio is biased.
        """
        kl, length = (self.expected(f).item() for f in (lambda path: self._charge_of(path, charge), len))

        def value(path):
            own = self._charge_of(path, charge)
            charges = {
                "completions": (own - kl) * len(path),
                "tokens": own - len(path) * kl / length,
                "nothing": own,
            }
            return (self._sum(self.logps - self.old, path) / len(path)).exp() * charges[centered_over]

        return self.expected(value)

    def _charge_of(self, path, charge) -> float:
        return sum(charge(self._drift(step)) for step in path)


def cosine_and_scale(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Cosine of the angle between two gradients, and the ratio of their lengths."""
    if wanted.norm() == 0 or found.norm() == 0:
        return float(found.norm() == wanted.norm()), 1.0
    cosine = (found * wanted).sum() / (found.norm() * wanted.norm())
    return cosine.item(), (found.norm() / wanted.norm()).item()
