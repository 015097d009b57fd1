"""
How well PPO learns: KLXPPO against the PPOTrainer of TRL 1.12, TRL's last one, and KLXPPO at several KL coefficients.

Policy, reward model, prompts, KL coefficient, seeds, epochs, learning rate and lengths are the same on both sides. The
reward model is the policy's backbone with a fixed random projection as its score; it reads the same token ids on both
sides. TRL 1.12 runs in its own virtual environment, and its value model starts as a copy of the reward model, as in
TRL's scripts. KLXPPO uses its default value function. Every completion has the full length.

The policy is any small causal language model. The figures in the docs come from `stories260K`, which
`benchmarks/fetch_stories.py` fetches.

```bash
python benchmarks/ppo_learning.py --model stories260K --json learning.json        # about an hour; can be stopped
python benchmarks/ppo_learning.py --model stories260K --json sweep.json --sweep   # KL by coefficient and epochs
```
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
from pathlib import Path

from measuring import MARK, PLAIN_RUN, Results, stoppable, take_turns
from ppo import OLD_TRL, old_environment


TOKENS = 32
REWARD_SEED = 0
NAMES = ("Lily", "Tom", "Sue", "Ben", "Anna", "Max", "Mia", "Tim")
OPENINGS = (
    "Once upon a time, there was a little child named {}.",
    "One day, {} went to the park with a friend.",
    "{} had a big red ball and wanted to play.",
    "It was a sunny day and {} was very happy.",
    "{} saw a small dog in the garden.",
    "Mom told {} to clean the room.",
    "{} found a shiny box under the tree.",
    "There was a loud noise, and {} was scared.",
)


# ---- One run ----


def run_once(case: dict) -> None:
    """Train once in this process, and print score, KL and explained variance of every rollout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)
    fields = dict(case)
    side, model, epochs, seed = fields.pop("side"), fields.pop("model"), fields.pop("epochs"), fields.pop("seed")
    rollouts, batch, coef = fields.pop("rollouts"), fields.pop("batch"), fields.pop("coef")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reward_model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).eval()
    width = reward_model.score.weight.shape[1]
    with torch.no_grad():
        projection = torch.randn(1, width, generator=torch.Generator().manual_seed(REWARD_SEED))
        reward_model.score.weight.copy_(projection / width**0.5)
    prompts = [opening.format(name) for opening in OPENINGS for name in NAMES]
    with tempfile.TemporaryDirectory() as folder:
        common = {
            **PLAIN_RUN,
            "output_dir": folder,
            "seed": seed,
            "per_device_train_batch_size": batch,
            "num_ppo_epochs": epochs,
            "num_mini_batches": 1,
            "learning_rate": 2e-4,
            "temperature": 0.7,
            "total_episodes": rollouts * batch,
        }
        run = run_klx if side == "klx" else run_trl
        curves = run(common, coef, fields, policy, reward_model, tokenizer, prompts)
    print(MARK + json.dumps(curves), flush=True)


def run_klx(common, coef, fields, policy, reward_model, tokenizer, prompts) -> dict:
    from datasets import Dataset
    from stories import vader

    from trl_klx import KLXPPOConfig, KLXPPOTrainer

    fields = dict(fields)
    by_model = fields.pop("reward", "projection") == "projection"
    reward = {"reward_model": reward_model} if by_model else {"reward_funcs": [vader]}
    extras = {"value_model": copy.deepcopy(reward_model)} if fields.pop("value_model", False) else {}
    args = KLXPPOConfig(
        **common,
        max_completion_length=TOKENS,
        generation_kwargs={"eos_token_id": policy.config.vocab_size},  # cannot be sampled
        kl_penalty_coef=coef,
        **fields,
    )
    trainer = KLXPPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **reward,
        **extras,
    )
    trainer.train()
    # One entry per rollout: its measurements are logged with its first step.
    history = [entry for entry in trainer.state.log_history if "ppo/score" in entry]
    names = {"score": "ppo/score", "kl": "klx/kl_k1", "explained": "ppo/explained_variance"}
    return {name: [entry[key] for entry in history] for name, key in names.items()}


def run_trl(common, coef, fields, policy, reward_model, tokenizer, prompts) -> dict:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    # TRL 1.12 logs no explained variance, so its parts are intercepted.
    get_reward, whiten, seen, explained = ppo_trainer.get_reward, ppo_trainer.masked_whiten, {}, []

    def get_reward_and_remember(model, ids, pad, context_length):
        output = get_reward(model, ids, pad, context_length)
        if model is not reward_model:
            seen["values"] = output[0][:, context_length - 1 : -1].squeeze(-1)
        return output

    def whiten_and_remember(values, mask, shift_mean=True):
        returns = values + seen["values"]
        explained.append(float(1 - values.var() / returns.var()))
        return whiten(values, mask, shift_mean)

    ppo_trainer.get_reward, ppo_trainer.masked_whiten = get_reward_and_remember, whiten_and_remember
    tokenized = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    trainer = PPOTrainer(
        # Without a stop token every completion has the full length.
        args=PPOConfig(**common, response_length=TOKENS, kl_coef=coef, num_sample_generations=0, **fields),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=reward_model,
        value_model=copy.deepcopy(reward_model).train(),
        train_dataset=tokenized,
        eval_dataset=tokenized.select(range(8)),
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "objective/scores" in entry]
    names = {"score": "objective/scores", "kl": "objective/kl"}
    return {name: [entry[key] for entry in history] for name, key in names.items()} | {"explained": explained}


# ---- Reading the runs ----


def first(values: list[float]) -> float:
    return statistics.fmean(values[:3])


def last_fifth(values: list[float]) -> float:
    return statistics.fmean(values[-max(1, len(values) // 5) :])


def smoothed(values: list[float], width: int = 5) -> list[float]:
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def gain_at(run: dict, kl: float) -> float:
    """Gain in score when the KL first reached `kl`, interpolated between rollouts; NaN if it never did."""
    points = list(zip(smoothed(run["kl"]), smoothed(run["score"]), strict=True))
    for (kl0, score0), (kl1, score1) in zip(points, points[1:], strict=False):
        if kl0 <= kl < kl1:
            return score0 + (score1 - score0) * (kl - kl0) / (kl1 - kl0) - first(run["score"])
    return float("nan")


def show_learning(cases: list[dict], results: Results, curves: bool) -> None:
    levels = (5.0, 10.0, 15.0, 20.0)
    at_levels = "".join(f"{f'at {level:g}':>8}" for level in levels)
    print(f"{'':6}{'epochs':>7}{'seed':>5}{'start':>8}{'gain':>8}{'KL':>7}{'explained':>11}  gain{at_levels} nats")
    for case in cases:
        if not results.count(case):
            continue
        (run, *_) = results.runs[results.key(case)]
        gain = last_fifth(run["score"]) - first(run["score"])
        gains = "".join(f"{gain_at(run, level):>8.2f}" for level in levels)
        print(
            f"{case['side']:6}{case['epochs']:>7}{case['seed']:>5}{first(run['score']):>8.2f}{gain:>8.2f}"
            f"{last_fifth(run['kl']):>7.1f}{last_fifth(run['explained']):>11.2f}      {gains}"
        )
        for end in range(10, len(run["kl"]) + 1, 10) if curves else ():
            part = {name: statistics.fmean(values[end - 10 : end]) for name, values in run.items()}
            print(
                f"{end * case['batch']:>18} episodes: score {part['score']:.2f}, KL {part['kl']:.1f}, "
                f"explained {part['explained']:.2f}"
            )


def show_sweep(cases: list[dict], results: Results) -> None:
    coefs = sorted({case["coef"] for case in cases})
    print("KL over the last fifth of the run, by coefficient")
    print(f"{'epochs':>6}{'seed':>5}{''.join(f'{coef:>9g}' for coef in coefs)}  falls   explained at most")
    for epochs, seed in sorted({(case["epochs"], case["seed"]) for case in cases}):
        row = [case for case in cases if (case["epochs"], case["seed"]) == (epochs, seed) and results.count(case)]
        runs = {case["coef"]: results.runs[results.key(case)][0] for case in row}
        if not runs:
            continue
        kls = {coef: last_fifth(run["kl"]) for coef, run in runs.items()}
        shown = "".join(f"{kls[coef]:>9.2f}" if coef in kls else f"{'':9}" for coef in coefs)
        ordered = [kls[coef] for coef in sorted(kls)]
        falls = all(before > after for before, after in zip(ordered, ordered[1:], strict=False))
        explained = max(last_fifth(run["explained"]) for run in runs.values())
        print(f"{epochs:>6}{seed:>5}{shown}  {'yes' if falls else 'no':5}{explained:>20.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="policy: a folder or a Hub id")
    parser.add_argument("--sweep", action="store_true", help="KL by fixed coefficient and epochs, KLXPPO only")
    parser.add_argument("--reward", choices=["projection", "vader"], default="projection", help="reward of the sweep")
    parser.add_argument("--json", type=Path, help="keep the results in this file, and continue from it")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", nargs="+", type=int, help="(default 1 4, with --sweep 1 2 4 8)")
    parser.add_argument("--coefs", nargs="+", type=float, help="(default 0.05, with --sweep 0.03 0.1 0.3 1 3 10)")
    parser.add_argument("--rollouts", type=int, help="(default 60, with --sweep 30)")
    parser.add_argument("--batch", type=int, help="completions per rollout (default 32, with --sweep 16)")
    parser.add_argument("--curves", action="store_true", help="also print score and KL over episodes")
    parser.add_argument("--environment", type=Path, default=Path(sys.prefix) / f"ppo-trl-{OLD_TRL}")
    options = parser.parse_args()
    if options.run:
        run_once(json.loads(options.run))
        return
    if options.model is None:
        parser.error("--model is required")
    size = {
        "rollouts": options.rollouts or (30 if options.sweep else 60),
        "batch": options.batch or (16 if options.sweep else 32),
    }
    epochs = options.epochs or ([1, 2, 4, 8] if options.sweep else [1, 4])
    coefs = options.coefs or ([0.03, 0.1, 0.3, 1.0, 3.0, 10.0] if options.sweep else [0.05])
    sides = ["klx"] if options.sweep else ["trl", "klx"]
    cases = [
        {"side": side, "model": options.model, "epochs": n, "seed": seed, "coef": coef} | size
        for n in epochs
        for seed in options.seeds
        for coef in coefs
        for side in sides
    ]
    if options.sweep:
        cases = [case | {"reward": options.reward} for case in cases]
    python = None if options.sweep else old_environment(options.environment.resolve())
    results = Results(options.json)
    with stoppable():
        take_turns(__file__, [cases], results, 1, lambda case: sys.executable if case["side"] == "klx" else python)
    if options.sweep:
        show_sweep(cases, results)
    else:
        show_learning(cases, results, options.curves)


if __name__ == "__main__":
    main()
