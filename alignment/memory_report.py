"""The estimate of `alignment.memory` for people, and what to change when it is more than there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from alignment.critic import CriticConfig
from alignment.memory import Estimator, Plan, ResolvedReference, estimate
from alignment.policy import LoRAConfig, load_architecture

SMALLEST_MICRO_BATCH = 256


def remedies(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Settings that need less memory, the least costly first, each with the plan it leads to."""
    policy = plan.policy
    if plan.optim is None:
        training: list[tuple[str, Plan]] = []
    else:
        micro = plan.micro_batch_tokens // 2
        training = []
        while micro >= SMALLEST_MICRO_BATCH:
            training.append((f"micro_batch_tokens={micro}", replace(plan, micro_batch_tokens=micro)))
            micro //= 2
        if not policy.gradient_checkpointing:
            changed = replace(policy, gradient_checkpointing=True)
            training.append(("policy.gradient_checkpointing=true", replace(plan, policy=changed)))
        if plan.optim.optimizer == "adamw":
            training.append(
                ("optim.optimizer=adamw_8bit", replace(plan, optim=replace(plan.optim, optimizer="adamw_8bit")))
            )
    yield from training
    if plan.reference == "copy" and plan.reference_alpha is None:
        yield "reference=cached", replace(plan, reference="cached")
        if policy.lora is None:
            yield "reference=fp8", replace(plan, reference="fp8")
    if plan.critic is not None and plan.critic.kind != "head":
        yield "critic.kind=head", replace(plan, critic=CriticConfig())
    if policy.dtype == "float32":
        yield "policy.dtype=bfloat16", replace(plan, policy=replace(policy, dtype="bfloat16"))
    cheapest: ResolvedReference = "adapter_off" if plan.reference_alpha is None else "frozen_adapter"
    reference: ResolvedReference = "none" if plan.reference == "none" else cheapest
    lora = policy.lora or LoRAConfig()
    if policy.lora is None:
        yield "policy.lora.r=16", replace(plan, policy=replace(policy, lora=lora), reference=reference)
    if policy.quantization == "none":
        name = "policy.quantization=4bit" if policy.lora else "policy.lora.r=16 policy.quantization=4bit"
        quantised = replace(policy, lora=lora, quantization="4bit")
        yield name, replace(plan, policy=quantised, reference=reference if policy.lora is None else plan.reference)


def advice(plan: Plan, limit: int) -> list[tuple[str, int]]:
    """Settings that bring the plan under `limit` bytes, with the bytes each leads to.

    One change at a time where one is enough; otherwise changes are added, the one that saves most first, until it fits.
    The last entry is above the limit when nothing is enough.
    """
    measure = Estimator(load_architecture(plan.policy))
    singles = [(name, measure(changed).total) for name, changed in remedies(plan)]
    fitting = [(name, total) for name, total in singles if total <= limit]
    if fitting:
        largest = next((f for f in fitting if f[0].startswith("micro_batch")), None)
        return [f for f in fitting if f == largest or not f[0].startswith("micro_batch")]
    names: list[str] = []
    total = measure(plan).total
    while total > limit:
        smallest = min(((measure(p).total, n, p) for n, p in remedies(plan)), key=lambda entry: entry[0], default=None)
        if smallest is None or smallest[0] >= total:
            break
        total, name, plan = smallest
        names.append(name)
    return [(" ".join(names), total)] if names else []


# -------------------------------------------------------------------------------------------------------------- report


def report(plan: Plan, limit: int, where: str = "this machine") -> str:
    """The table printed before a model is built, and what to change when it will not fit into `limit` bytes."""
    found = estimate(plan)
    policy, optim = plan.policy, plan.optim
    form = policy.dtype if policy.quantization == "none" else f"{policy.quantization} base"
    checkpointing = ", checkpointed" if policy.gradient_checkpointing else ""
    rows = [
        ("weights", found.weights, f"{found.parameters:,} parameters, {form}"),
        ("gradients", found.gradients, f"{found.trainable:,} trainable"),
        ("optimizer", found.optimizer, optim.optimizer if optim else "none"),
        ("reference", found.reference, plan.reference),
        *([("critic", found.critic, plan.critic.kind)] if plan.critic is not None else []),
        ("activations", found.activations, f"up to {plan.micro_batch_tokens:,} tokens at a time{checkpointing}"),
        *([("logits", found.logits, "kept for the LM head's backward pass")] if found.logits else []),
        ("total", found.total, ""),
        ("free", limit, where),
    ]
    lines = ["estimated memory of each process"]
    lines += [f"  {name:<12}{size(count):>10}  {note}".rstrip() for name, count, note in rows]
    if found.total > limit:
        options = advice(plan, limit)
        lines.append("it will probably not fit; settings that need less:" if options else "it will probably not fit")
        lines += [
            f"  {name}: {size(total)}" + ("" if total <= limit else ", still too much") for name, total in options
        ]
    return "\n".join(lines)


def size(count: int) -> str:
    """Bytes for people: 1.5 GiB, 300 MiB, 12 KiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
