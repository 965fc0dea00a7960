"""`python trl_worker.py SPEC.json`: TRL's trainer of one workload, taking turns with another worker.

Runs in an environment of `peers.py` and imports nothing of this project but `turns` and `token_rewards` beside it. The
keys of SPEC are those of `workloads.py`; four more are read here:

trl_args      settings of TRL's config that replace the ones below, for finding its best.
dump          a file: gradients before clipping, token log-probs and more of the first step, with torch.save.
value_model   for PPO: the folder its critic starts from.
kl_estimator  for GRPO and GDPO: k3, or k3_is, which is TRL's default and differentiates the ratio before it.

What both sides must have alike, and where it stands in TRL:
optimizer  AdamW of torch, betas (0.9, 0.999), eps 1e-8, decay of matrices only, constant rate, clipping by the norm of
           the whole step. TRL's default is the fused kernel. PPOTrainer never clips, whatever `max_grad_norm` is.
order      rows as they come: a sequential sampler; `shuffle_dataset` false for GRPO; PPOTrainer's shuffling loader is
           replaced.
tokens     prompt and completion are tokenised as one text, so a blank goes between them. SFT, DPO and reward trainers
           append the end token; a prompt of an online trainer gets none. `max_length` is null: nothing is cut.
losses     SFT: mean over the completion tokens of the step. DPO: sigmoid. GRPO: `dapo`, the token mean over the step,
           clipped at 0.2, deviation in the group + 1e-4. GDPO: `normalize_then_sum`, 1e-4 under both deviations.
           PPO: gamma 1, lambda 0.95, 4 epochs of one minibatch, value loss 0.1, clipping 0.2; a completion that ends
           early has its score one token behind its last.
dtype      bf16: weights and arithmetic in bfloat16; bf16-mixed: weights in fp32 under autocast, TRL's default.

Tokens of a step count a prompt once per row, whatever the number of its completions, and no padding.
"""

# ruff: noqa: E402, I001 - what the environment says must stand before the imports that read it
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")) if __name__ == "__main__" else {}
if SPEC:
    os.environ["OMP_NUM_THREADS"] = str(SPEC.get("threads") or 1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}

import datasets
import torch
import transformers
import trl
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from token_rewards import REWARDS
from turns import Turn

datasets.disable_progress_bars()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-mixed": torch.float32}
KINDS: dict[str, Callable[[Run], Any]] = {}


class StopTraining(Exception):
    """The parent wants no further step. PPOTrainer asks nobody whether to go on."""


@dataclasses.dataclass
class Run:
    """One run: its settings, data, and what the step under way has shown so far."""

    spec: dict[str, Any]

    def __post_init__(self) -> None:
        self.model, self.steps = self.spec["model"], int(self.spec["steps"])
        self.per_step, self.group = int(self.spec["rows_per_step"]), int(self.spec.get("completions") or 1)
        self.dtype, self.tuned = DTYPES[self.spec.get("dtype") or "fp32"], not self.spec.get("as_it_comes")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
        self.rows = _lines(self.spec["data"])
        self.replay = _lines(self.spec["replay"]) if self.spec.get("replay") else None
        self.losses: list[Tensor] = []
        self.generating, self.prompt_tokens, self.completion_tokens = 0.0, 0, 0
        self.found: dict[str, Any] = {}
        self.more: dict[str, float] = {}
        self.position = 0

    @property
    def load(self) -> dict[str, Any]:
        """How models are loaded."""
        return {"dtype": self.dtype, "attn_implementation": "sdpa"}

    def config(self, kind: type, batch: int, **settings: Any) -> Any:
        """TRL's config. batch: rows of a step as TRL counts them; `micro_batch` of them at a time."""
        micro = min(self.spec.get("micro_batch") or batch, batch)
        if batch % micro:
            raise ValueError(f"a step has {batch} rows, which micro_batch {micro} does not divide")
        given = {
            "output_dir": str(Path(self.spec["work"]) / "trl"),
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": batch // micro,
            "max_steps": self.steps,
            "learning_rate": self.spec["lr"],
            "lr_scheduler_type": "constant",
            "weight_decay": self.spec.get("weight_decay", 0.0),
            "max_grad_norm": self.spec.get("clip_norm") or 0.0,
            "seed": self.spec.get("seed", 0),
            "save_strategy": "no",
            "report_to": "none",
            "dataloader_pin_memory": False,
            "use_cpu": not torch.cuda.is_available(),
            **settings,
        }
        if self.tuned:
            given |= {"gradient_checkpointing": False, "disable_tqdm": True, "logging_strategy": "no"}
            given |= {"bf16": self.spec.get("dtype") == "bf16-mixed"}
        given |= self.spec.get("trl_args") or {}
        known = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in given.items() if name in known})

    def dataset(self, *columns: str, repeat: int = 1) -> datasets.Dataset:
        """The rows with these columns. A blank goes before every completion."""
        rows = [
            {name: _blank(row[name]) if name in COMPLETIONS else row[name] for name in columns} for row in self.rows
        ]
        return datasets.Dataset.from_list([row for row in rows for _ in range(repeat)])

    def count(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        """Tokens of prompts (each given once per completion) and completions of an online step."""
        self.prompt_tokens += sum(map(len, prompts[:: self.group]))
        self.completion_tokens += sum(map(len, completions))

    def offline_tokens(self, step: int) -> tuple[int, int]:
        """Tokens of prompts and completions of a step, the end tokens included."""
        prompts = completions = 0
        for i in range(step * self.per_step, (step + 1) * self.per_step):
            row = self.rows[i % len(self.rows)]
            texts = [row[name] for name in COMPLETIONS if name in row]
            prompts += len(self.tokenizer(row["prompt"])["input_ids"])
            completions += sum(len(self.tokenizer(t, add_special_tokens=False)["input_ids"]) + 1 for t in texts)
        return prompts, completions

    def replayed(self, count: int) -> list[list[int]]:
        """The next `count` completions of the file."""
        assert self.replay is not None
        rows = range(self.position, self.position + count // self.group)
        self.position += count // self.group
        return [ids for i in rows for ids in self.replay[i % len(self.replay)]["completions"]]

    @contextlib.contextmanager
    def generation(self) -> Any:
        """Within, time counts as generation."""
        begun = time.perf_counter()
        yield
        self.generating += time.perf_counter() - begun

    def result(self, step: int) -> dict[str, Any]:
        """What is reported of a step; the next one begins with nothing."""
        prompts, completions = self.prompt_tokens, self.completion_tokens
        if not prompts:
            prompts, completions = self.offline_tokens(step)
        found = {
            "loss": float(sum(self.losses)),
            "tokens": prompts + completions,
            "prompt_tokens": prompts,
            "completion_tokens": completions,
            "generation_seconds": self.generating,
            **self.more,
        }
        if torch.cuda.is_available():
            found["vram_peak"] = torch.cuda.max_memory_allocated()
        self.losses, self.generating, self.prompt_tokens, self.completion_tokens = [], 0.0, 0, 0
        return found

    def dump(self, model: torch.nn.Module) -> None:
        """Once: gradients and what else was found of the first step."""
        if (path := self.spec.get("dump")) and "gradients" not in self.found:
            self.found["gradients"] = gradients(model)
            torch.save(self.found, path)


COMPLETIONS = ("completion", "chosen", "rejected")


def _blank(text: str) -> str:
    return text if text[:1].isspace() else " " + text


def _lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


class Turns(transformers.TrainerCallback):
    """Ready before the first step, done after each."""

    def __init__(self, run: Run, turn: Turn) -> None:
        self.run, self.turn = run, turn

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
        if not self.turn.ready(**versions):
            raise StopTraining

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.turn.done(**self.run.result(state.global_step - 1)):
            raise StopTraining


def stepped(run: Run, kind: type) -> type:
    """The trainer class with its losses kept, its rows in order, and the first step's gradients dumped if asked."""

    class Stepped(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *given: Any) -> Any:
            online = run.spec["kind"] in ("grpo", "gdpo")  # its sampler repeats prompts, in order when told so
            return super()._get_train_sampler(*given) if online else SequentialSampler(self.train_dataset)

        def training_step(self, *given: Any, **named: Any) -> Tensor:
            loss = super().training_step(*given, **named)
            run.losses.append(loss)
            if run.spec.get("dump") and len(run.losses) == self.args.gradient_accumulation_steps:
                run.found["loss"] = float(sum(run.losses))
                run.dump(self.model)
            return loss

        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any:
            with run.generation():
                if run.replay is None:
                    found = super()._generate_single_turn(prompt_ids, *given, **named)
                else:
                    found = run.replayed(len(prompt_ids)), None
            run.count(prompt_ids, found[0])
            return found

    return Stepped


def keep_logps(run: Run, model: torch.nn.Module) -> None:
    """Keep token log-probs of the first step: for each row its ids without padding, and the values at scored ones."""

    def hook(_: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        logps, labels = getattr(output, "log_probs", None), named.get("labels")
        if logps is not None and labels is not None and "gradients" not in run.found:
            scored, mask = labels[:, 1:] != -100, named["attention_mask"].bool()
            for i, ids in enumerate(named["input_ids"]):
                row = {"ids": ids[mask[i]].tolist(), "logps": logps[i][scored[i]].detach()}
                run.found.setdefault("logps", []).append(row)

    if run.spec.get("dump"):
        model.register_forward_hook(hook, with_kwargs=True)


def kind(*names: str) -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:
    def register(build: Callable[[Run], Any]) -> Callable[[Run], Any]:
        KINDS.update(dict.fromkeys(names, build))
        return build

    return register


# ---------------------------------------------------------------------------------------------- offline


@kind("sft")
def sft(run: Run) -> Any:
    config = run.config(trl.SFTConfig, run.per_step, max_length=None, packing=False, model_init_kwargs=run.load)
    return stepped(run, trl.SFTTrainer)(
        model=run.model, args=config, processing_class=run.tokenizer, train_dataset=run.dataset("prompt", "completion")
    )


@kind("rm")
def reward_model(run: Run) -> Any:
    """The model of `reward_model` if there is one, else the trunk of `model` with a new score head."""
    config = run.config(trl.RewardConfig, run.per_step, max_length=None, model_init_kwargs=run.load)
    return stepped(run, trl.RewardTrainer)(
        model=run.spec.get("reward_model") or run.model,
        args=config,
        processing_class=run.tokenizer,
        train_dataset=run.dataset("prompt", "chosen", "rejected"),
    )


@kind("dpo")
def dpo(run: Run) -> Any:
    config = run.config(
        trl.DPOConfig,
        run.per_step,
        beta=run.spec["beta"],
        max_length=None,
        precompute_ref_log_probs=bool(run.spec.get("precompute_reference")),
        model_init_kwargs=run.load,
    )
    return stepped(run, trl.DPOTrainer)(
        model=run.model,
        args=config,
        processing_class=run.tokenizer,
        train_dataset=run.dataset("prompt", "chosen", "rejected"),
    )


# ---------------------------------------------------------------------------------------------- online


def reward_function(name: str, caught: bool) -> Callable[..., list[float | None]]:
    """A reward as TRL calls it. An error is None where it is caught, and the run's end where it is not."""

    def call(completion_ids: list[list[int]], flat: list[bool] | None = None, **_: Any) -> list[float | None]:
        found: list[float | None] = []
        for ids, is_flat in zip(completion_ids, flat or [False] * len(completion_ids), strict=True):
            try:
                found.append(REWARDS[name](ids, is_flat))
            except ValueError:
                if not caught:
                    raise
                found.append(None)
        return found

    call.__name__ = name
    return call


@kind("grpo", "gdpo")
def grpo(run: Run) -> Any:
    """One rollout for each optimizer step: `steps_per_generation` is the number of micro-batches, TRL's default."""
    several = run.spec["kind"] == "gdpo"
    config = run.config(
        trl.GRPOConfig,
        run.per_step * run.group,
        num_generations=run.group,
        num_iterations=1,
        max_completion_length=run.spec["max_tokens"],
        temperature=run.spec.get("temperature", 1.0),
        beta=run.spec.get("kl") or 0.0,
        use_bias_correction_kl=run.spec.get("kl_estimator") == "k3_is",
        loss_type="dapo",
        shuffle_dataset=False,
        multi_objective_aggregation="normalize_then_sum" if several else "sum_then_normalize",
        max_prompt_length=None,
        model_init_kwargs=run.load,
    )
    columns = ("prompt", "flat") if "flat" in run.rows[0] else ("prompt",)
    return stepped(run, trl.GRPOTrainer)(
        model=run.model,
        reward_funcs=[reward_function(name, run.spec.get("raise_caught", True)) for name in run.spec["rewards"]],
        args=config,
        processing_class=run.tokenizer,
        train_dataset=run.dataset(*columns),
    )


@kind("ppo")
def ppo(run: Run) -> Any:
    """The scores come from `reward_model`, else from the reward `cheap`. The critic is a model of its own, begun from
    the reward model, else from the policy with a new head."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    config = run.config(
        PPOConfig,
        run.per_step * run.group,
        total_episodes=run.steps * run.per_step * run.group,
        response_length=run.spec["max_tokens"],
        temperature=run.spec.get("temperature", 1.0),
        stop_token="eos",
        kl_coef=run.spec["kl"],
        num_sample_generations=0,
        local_rollout_forward_batch_size=run.per_step * run.group,
    )
    scores = run.spec.get("reward_model")
    load_causal = transformers.AutoModelForCausalLM.from_pretrained
    load_scorer = transformers.AutoModelForSequenceClassification.from_pretrained
    run.tokenizer.padding_side = "left"
    rows = run.dataset("prompt", repeat=run.group)
    rows = rows.map(lambda row: {"input_ids": run.tokenizer(row["prompt"])["input_ids"]}, remove_columns=["prompt"])
    trainer = PPOTrainer(
        args=config,
        processing_class=run.tokenizer,
        model=load_causal(run.model, **run.load),
        ref_model=load_causal(run.model, **run.load),
        reward_model=load_scorer(scores, num_labels=1, **run.load) if scores else CheapReward(),
        value_model=load_scorer(run.spec.get("value_model") or scores or run.model, num_labels=1, **run.load),
        train_dataset=rows,
    )
    trainer.dataloader = DataLoader(
        trainer.train_dataset,
        batch_size=trainer.local_dataloader_batch_size,
        sampler=SequentialSampler(trainer.train_dataset),
        collate_fn=trainer.data_collator,
        drop_last=True,
    )
    _watch_ppo(run, ppo_trainer, trainer)
    return trainer


class CheapReward(torch.nn.Module):
    """Stands for a reward model; `_watch_ppo` scores with it."""


def _watch_ppo(run: Run, module: Any, trainer: Any) -> None:
    """Have the functions of TRL's module tell what they do: time of generation, lengths, losses, the first step."""
    generate, get_reward, whiten = module.batch_generation, module.get_reward, module.masked_whiten
    pad, end = run.tokenizer.pad_token_id, run.tokenizer.eos_token_id

    def batch_generation(model: Any, queries: Tensor, batch: int, pad_id: int, config: Any) -> tuple[Tensor, Tensor]:
        with run.generation():
            if run.replay is None:
                found = generate(model, queries, batch, pad_id, config)
            else:
                found = _replay_ppo(run, module, model, queries, trainer.args.temperature)
        completions = found[0][:, queries.shape[1] :].tolist()
        ended = [ids[: ids.index(end) + 1] if end in ids else ids for ids in completions]
        run.count([ids[ids != pad].tolist() for ids in queries], ended)
        return found

    def scored(model: Any, ids: Tensor, pad_id: int, context: int) -> tuple[Any, Tensor, Any]:
        if not isinstance(model, CheapReward):
            found = get_reward(model, ids, pad_id, context)
            if model is trainer.value_model:
                run.found.setdefault("values", found[0][:, context - 1 : -1, 0].clone())
            return found
        completions = [[i for i in row if i != pad_id] for row in ids[:, context:].tolist()]
        return None, torch.tensor([REWARDS["cheap"](row, False) for row in completions], device=ids.device), None

    def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        whitened = whiten(values, mask, shift_mean)
        run.found.setdefault("advantages", values.clone())
        run.found.setdefault("whitened", whitened.clone())
        return whitened

    module.batch_generation, module.get_reward, module.masked_whiten = batch_generation, scored, masked_whiten
    backward, log = trainer.accelerator.backward, trainer.log

    def backward_and_dump(loss: Tensor, **named: Any) -> None:
        backward(loss, **named)
        run.found.setdefault("loss", float(loss))
        run.dump(trainer.model)

    def keep(metrics: dict[str, float], *given: Any) -> None:
        loss = metrics["loss/policy_avg"] + trainer.args.vf_coef * metrics["loss/value_avg"]
        run.losses.append(torch.tensor(loss))
        run.more = {"policy_loss": metrics["loss/policy_avg"], "value_loss": metrics["loss/value_avg"]}
        if not run.tuned:
            log(metrics, *given)

    trainer.accelerator.backward, trainer.log = backward_and_dump, keep


def _replay_ppo(run: Run, module: Any, model: Any, queries: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Prompts with the given completions, and the logits at these, as `batch_generation` returns them."""
    completions, pad = run.replayed(len(queries)), run.tokenizer.pad_token_id
    longest = max(map(len, completions))
    padded = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in completions], device=queries.device)
    both = torch.cat([queries, padded], dim=1)
    logits = module.forward(model, both, pad).logits[:, queries.shape[1] - 1 : -1]
    return both, logits / (temperature + 1e-7)


# ---------------------------------------------------------------------------------------------- main


def main(run: Run) -> None:
    torch.set_num_threads(int(run.spec.get("threads") or 1))
    transformers.set_seed(run.spec.get("seed", 0))
    turn = Turn()
    trainer = KINDS[run.spec["kind"]](run)
    trainer.add_callback(Turns(run, turn))
    keep_logps(run, trainer.model)
    with contextlib.suppress(StopTraining):
        trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # within accelerate's
    turn.end(optimizer=type(optimizer).__name__, fused=bool(optimizer.defaults.get("fused")))


if __name__ == "__main__":
    main(Run(SPEC))
