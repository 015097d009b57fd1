"""Where completions end, and what they score."""

import functools
from typing import TYPE_CHECKING, Any

import torch
import trl
from torch import nn

from ..control.placements import Batch
from ..trl_versions import TRL_HAS_EOS_TOKEN_IDS
from .reward_scaling import RewardScaler
from .stop_strings import generate_until, holds_text


if TYPE_CHECKING:
    from ..trainers.grpo import KLXGRPOTrainer
    from .config import KLXPPOConfig

    # The mixin is only ever combined with that trainer, so it may use its attributes.
    _Host = KLXGRPOTrainer
else:
    _Host = object


class ScoringMixin(_Host):
    """Ends completions at the user's stop token and strings, and turns rewards into one score per completion."""

    _ppo_scaler: RewardScaler
    if TYPE_CHECKING:
        args: KLXPPOConfig

    # ---- The end of a completion ----

    def _ppo_stop_at_token(self) -> None:
        """Let `stop_token_id` end a completion, as EOS does."""
        stop = self.args.stop_token_id
        if stop is not None and stop not in self.eos_token_ids:
            if not TRL_HAS_EOS_TOKEN_IDS:
                raise ValueError(
                    f"`stop_token_id={stop}` needs TRL 1.14.2 or newer: TRL {trl.__version__} ends a completion at "
                    f"the tokenizer's EOS token alone, which is {self.eos_token_ids[0]}. Set `stop_strings`, or "
                    "make it the tokenizer's `eos_token`."
                )
            # Not in place, because the policy's own generation config may hold the same list.
            self.eos_token_ids = [*self.eos_token_ids, stop]
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids

    def _ppo_stop_at_strings(self, policy: nn.Module) -> None:
        """Let `stop_strings` end a completion, as EOS does."""
        if self.args.stop_strings:
            model: Any = policy
            model.generate = functools.partial(generate_until, model.generate, self._tokenizer, self.args.stop_strings)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        parent: Any = super()
        completion_ids, *others = parent._generate_single_turn(*args, **kwargs)
        if self.args.stop_strings:
            # After a stop string, `generate` pads up to the longest completion, and TRL cuts only after EOS.
            completion_ids = [self._ppo_unpadded(ids) for ids in completion_ids]
        return completion_ids, *others

    def _ppo_unpadded(self, ids: list[int]) -> list[int]:
        end = len(ids)
        while end > 1 and ids[end - 1] == self._tokenizer.pad_token_id:
            end -= 1
        return ids[:end] if self._ppo_stopped(ids[:end]) else ids

    def _ppo_stopped(self, ids: list[int]) -> bool:
        return holds_text(self._tokenizer, self.args.stop_strings or [], ids)

    def _ppo_ended(self, batch: Batch) -> torch.Tensor:
        """Whether each completion ended by itself. With tools, EOS ends every turn, so only the last token counts."""
        ids, lengths = batch["completion_ids"], batch["completion_mask"].sum(1)
        last = ids.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        ended = torch.isin(last, torch.tensor(self.eos_token_ids, device=ids.device))
        if self.args.stop_strings:
            rows = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
            ended = ended | torch.tensor([self._ppo_stopped(row) for row in rows], device=ids.device)
        return ended

    # ---- Scores ----

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        parent: Any = super()
        rewards: torch.Tensor = parent._calculate_rewards(*args, **kwargs)  # of all processes
        assert self._klx_rollout is not None
        self._klx_rollout.rewards = rewards
        return rewards

    def _ppo_score(self, batch: Batch, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The score of each completion on this process, and whether it has one, given the rewards of all processes."""
        unscorable = torch.isnan(rewards).all(dim=1)
        scores = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        scores = self._ppo_scaler(scores, ~unscorable, update=self._klx_mode == "train")
        size = batch["completion_ids"].size(0)
        local = slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)
        scores, scorable = scores[local], ~unscorable[local]
        if self.args.missing_eos_penalty is not None:
            scores = torch.where(self._ppo_ended(batch), scores, scores - self.args.missing_eos_penalty)
        return scores, scorable
