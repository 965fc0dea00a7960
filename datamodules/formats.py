"""What a row means: the public formats, told apart once per source by the names of their columns.

A format turns a raw row into a `Row`: messages of a prompt and the texts of its completions. `columns` maps our names
to the source's, for example `{"prompt": "question", "chosen": "answer_matching_behavior"}`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from alignment.chat import Message
from alignment.errors import UserError
from datamodules.messages import conversation, instruction, messages_of, present, prompt_of, with_system
from datamodules.rows import RowError, number, text, yes_or_no

Purpose = Literal["supervised", "preference", "unpaired", "prompts"]

LABEL = "label"

NAMES = (
    *("text", "prompt", "completion", "instruction", "input", "output", "system", "messages", "conversations"),
    *("chosen", "rejected", "chosen_messages", "rejected_messages", "margin", "weight", LABEL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row understood. `prompt` is messages, or one text where `raw` says that no template applies to it.

    `completions` is one text (supervised), or chosen, rejected (preference), or either of these with `labels`, whether
    each is good (unpaired), or nothing (prompts). `columns` holds the values that the format does not use: plain ones,
    and for prompts anything JSON can hold.
    """

    prompt: tuple[Message, ...] | str
    completions: tuple[str, ...]
    raw: bool = False
    margin: float | None = None
    weight: float | None = None
    labels: tuple[bool, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


Parsed = tuple[tuple[Message, ...] | str, tuple[str, ...], bool]
Parser = Callable[[Mapping[str, Any]], Parsed]


# ---------------------------------------------------------------------- supervised formats


def _text(row: Mapping[str, Any]) -> Parsed:
    return "", (text(present(row, "text"), "text"),), True


def _prompt_completion(row: Mapping[str, Any]) -> Parsed:
    prompt = prompt_of(row)
    return prompt, (_answer(row, "completion", prompt)[1],), False


def _instruction_output(row: Mapping[str, Any]) -> Parsed:
    return instruction(row), (text(present(row, "output"), "output"),), False


def _chat(row: Mapping[str, Any]) -> Parsed:
    prompt, answer = conversation(messages_of(present(row, "messages"), "messages"), "messages")
    return prompt, (answer,), False


def _sharegpt(row: Mapping[str, Any]) -> Parsed:
    prompt, answer = conversation(messages_of(present(row, "conversations"), "conversations"), "conversations")
    return prompt, (answer,), False


# ---------------------------------------------------------------------- preference formats


def _answer(row: Mapping[str, Any], name: str, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """(prompt, completion): the completion may be a text, one message, or a conversation that repeats the prompt."""
    value = present(row, name)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return prompt, text(value, name)
    messages = messages_of(value, name)
    if messages and messages[-1].role != "assistant":
        raise RowError(f"{name} does not end with the assistant")
    if len(messages) == 1:
        return prompt, messages[0].content
    return conversation(messages, name)


def _pair(row: Mapping[str, Any], prompt: tuple[Message, ...]) -> Parsed:
    asked_chosen, chosen = _answer(row, "chosen", prompt)
    asked_rejected, rejected = _answer(row, "rejected", prompt)
    if asked_chosen != asked_rejected:
        raise RowError("chosen and rejected have different prompts")
    if not asked_chosen:
        raise RowError("chosen and rejected have no prompt")
    return asked_chosen, (chosen, rejected), False


def _prompt_pair(row: Mapping[str, Any]) -> Parsed:
    return _pair(row, prompt_of(row))


def _instruction_pair(row: Mapping[str, Any]) -> Parsed:
    return _pair(row, instruction(row))


def _sharegpt_pair(row: Mapping[str, Any]) -> Parsed:
    return _pair(row, prompt_of(row, "conversations"))


def _message_pair(row: Mapping[str, Any]) -> Parsed:
    renamed = {"chosen": present(row, "chosen_messages"), "rejected": present(row, "rejected_messages")}
    return _pair(renamed, ())


_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \n]?")


def _transcripts(row: Mapping[str, Any]) -> Parsed:
    """Two whole transcripts: message lists, `Human: / Assistant:` texts, or texts whose common start is the prompt."""
    values = [present(row, name) for name in ("chosen", "rejected")]
    if any(isinstance(value, list) for value in values):
        return _pair(row, ())
    chosen, rejected = (text(value, name) for value, name in zip(values, ("chosen", "rejected"), strict=True))
    if _TURN.match(chosen) and _TURN.match(rejected):
        return _pair({"chosen": _dialogue(chosen, "chosen"), "rejected": _dialogue(rejected, "rejected")}, ())
    if chosen == rejected:
        raise RowError("chosen equals rejected")
    common = _common_start(chosen, rejected)
    # The prompt ends before a white space, so that no word is torn apart and both completions begin alike.
    cut = max(common.rfind(" "), common.rfind("\n"))
    if cut < 1 or not common[:cut].strip():
        raise RowError("chosen and rejected have no common start to be the prompt")
    return common[:cut], (text(chosen[cut:], "chosen"), text(rejected[cut:], "rejected")), True


def _common_start(a: str, b: str) -> str:
    differ = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:differ]


def _dialogue(transcript: str, name: str) -> list[dict[str, str]]:
    parts = _TURN.split(transcript.strip())
    if parts[0].strip():
        raise RowError(f"{name} does not begin with a turn")
    turns = [
        {"role": "user" if role == "Human" else "assistant", "content": content.strip()}
        for role, content in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if turns and not turns[-1]["content"]:
        raise RowError(f"{name} is empty")
    return turns


# ---------------------------------------------------------------------- prompt formats


def _asked(row: Mapping[str, Any]) -> Parsed:
    return prompt_of(row), (), False


def _asked_in(name: str) -> Parser:
    """The prompt of a conversation: all of it, without the answer where it ends with one."""

    def parse(row: Mapping[str, Any]) -> Parsed:
        messages = messages_of(present(row, name), name)
        while messages and messages[-1].role == "assistant":
            messages = messages[:-1]
        if all(m.role != "user" for m in messages):
            raise RowError(f"{name} has no user turn")
        return messages, (), False

    return parse


def _asked_instruction(row: Mapping[str, Any]) -> Parsed:
    return instruction(row), (), False


def _asked_question(row: Mapping[str, Any]) -> Parsed:
    return prompt_of(row, "question"), (), False


def _begun(row: Mapping[str, Any]) -> Parsed:
    return text(present(row, "text"), "text"), (), True


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_is_json(v) for v in value)
    return value is None or isinstance(value, str | int | float | bool)


# ---------------------------------------------------------------------- formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format: its name for people, the columns that it needs, the reader of a row, and the user's mapping."""

    name: str
    needs: tuple[str, ...]
    parser: Parser
    columns: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns.get(name, name) for name in self.needs)})"

    def parse(self, values: object, purpose: Purpose, keys: frozenset[str] = frozenset()) -> Row:
        """The row behind raw values. Raises RowError with the reason when it cannot be used.

        `keys` are the columns most rows have: margin and weight are needed where they are among them.
        """
        if not isinstance(values, dict):
            raise wrong_type(values)
        row = renamed(values, self.columns)
        prompt, completions, raw = self.parser(row)
        if purpose == "supervised":
            completions = completions[:1]
        elif len(completions) == 2 and completions[0] == completions[1]:
            raise RowError("chosen equals rejected")
        if not raw:
            prompt = with_system(row, prompt)  # type: ignore[arg-type]
        if purpose == "prompts":
            used = {*self.needs, *_PROMPT_PARTS, *self.columns.values()}
            columns = {k: v for k, v in row.items() if k not in used and _is_json(v)}
            return Row(prompt=prompt, completions=(), raw=raw, columns=columns)
        taken = {*NAMES, *self.columns.values()} - (set() if purpose == "unpaired" else {LABEL})
        margin = number(row.get("margin"), "margin") if "margin" in keys and purpose == "preference" else None
        return Row(
            prompt=prompt,
            completions=completions,
            raw=raw,
            margin=margin,
            weight=number(row.get("weight"), "weight", minimum=0.0) if "weight" in keys else None,
            labels=self._labels(row) if purpose == "unpaired" else None,
            columns={k: v for k, v in row.items() if k not in taken and isinstance(v, str | int | float | bool)},
        )

    def _labels(self, row: Mapping[str, Any]) -> tuple[bool, ...]:
        """Whether each completion is good: as the row says, else those of a pair."""
        return (yes_or_no(row.get(LABEL), LABEL),) if LABEL in self.needs else (True, False)


_PREFERENCE = (
    Format(name="message lists", needs=("chosen_messages", "rejected_messages"), parser=_message_pair),
    Format(name="ShareGPT pairs", needs=("conversations", "chosen", "rejected"), parser=_sharegpt_pair),
    Format(name="prompt pairs", needs=("prompt", "chosen", "rejected"), parser=_prompt_pair),
    Format(name="instruction pairs", needs=("instruction", "chosen", "rejected"), parser=_instruction_pair),
    Format(name="transcript pairs", needs=("chosen", "rejected"), parser=_transcripts),
)
_SUPERVISED = (
    *_PREFERENCE,  # trained on the chosen completion
    Format(name="chat messages", needs=("messages",), parser=_chat),
    Format(name="ShareGPT", needs=("conversations",), parser=_sharegpt),
    Format(name="instructions", needs=("instruction", "output"), parser=_instruction_output),
    Format(name="prompts", needs=("prompt", "completion"), parser=_prompt_completion),
    Format(name="plain text", needs=("text",), parser=_text),
)
_LABELLED = (
    Format(name="labelled chat messages", needs=("messages", LABEL), parser=_chat),
    Format(name="labelled ShareGPT", needs=("conversations", LABEL), parser=_sharegpt),
    Format(name="labelled instructions", needs=("instruction", "output", LABEL), parser=_instruction_output),
    Format(name="labelled completions", needs=("prompt", "completion", LABEL), parser=_prompt_completion),
    *_PREFERENCE,  # two completions, one of each kind
)
_PROMPTS = (
    Format(name="prompts", needs=("prompt",), parser=_asked),
    Format(name="chat messages", needs=("messages",), parser=_asked_in("messages")),
    Format(name="ShareGPT", needs=("conversations",), parser=_asked_in("conversations")),
    Format(name="instructions", needs=("instruction",), parser=_asked_instruction),
    Format(name="questions", needs=("question",), parser=_asked_question),
    Format(name="beginnings of texts", needs=("text",), parser=_begun),
)
_PROMPT_PARTS = ("prompt", "instruction", "input", "system", "messages", "conversations")
_FORMATS: Mapping[Purpose, tuple[Format, ...]] = {
    "supervised": _SUPERVISED,
    "preference": _PREFERENCE,
    "unpaired": _LABELLED,
    "prompts": _PROMPTS,
}
_EXAMPLES: Mapping[Purpose, str] = {
    "supervised": "prompt: question, completion: answer",
    "preference": "prompt: question, chosen: good, rejected: bad",
    "unpaired": "prompt: question, completion: answer, label: liked",
    "prompts": "prompt: question",
}


def renamed(values: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names. Raises RowError when a mapped column is missing."""
    row = {k: v for k, v in values.items() if isinstance(k, str)}
    for ours, theirs in columns.items():
        if theirs not in values:
            raise RowError(f"key '{theirs}' is missing")
        row[ours] = values[theirs]
    return row


def wrong_type(values: object) -> RowError:
    """What is said of a row that has no columns."""
    return RowError("row has the wrong type", f"{type(values).__name__}, expected an object with named columns")


def common_keys(rows: Sequence[object]) -> frozenset[str]:
    """The keys that more than half of the rows have."""
    counts = Counter(key for row in rows if isinstance(row, dict) for key in row if isinstance(key, str))
    total = sum(isinstance(row, dict) for row in rows)
    return frozenset(key for key, count in counts.items() if 2 * count > total)


def check_columns(columns: Mapping[str, str], source: str) -> None:
    """Raise UserError for a mapping from names that are none of ours."""
    for ours in columns:
        if ours not in NAMES:
            near = difflib.get_close_matches(ours, NAMES, n=1)
            raise UserError(
                f"columns maps our names to those of '{source}'; '{ours}' is none of ours"
                + (f", did you mean '{near[0]}'?" if near else f" ({', '.join(NAMES)})")
            )


def detect(keys: frozenset[str], purpose: Purpose, columns: Mapping[str, str], source: str) -> Format:
    """The format of rows with these keys. Raises UserError that lists what was found and what is accepted.

    Mapped columns decide alone when they suffice, so that a mapping can choose among the formats a source offers.
    """
    check_columns(columns, source)
    absent = [theirs for theirs in columns.values() if theirs not in keys]
    if absent:
        raise UserError(f"'{source}' has no column '{absent[0]}'; it has {', '.join(sorted(keys)) or 'none'}")
    known = _FORMATS[purpose]
    for names in (frozenset(columns), keys | frozenset(columns)):
        for fmt in known:
            if names.issuperset(fmt.needs):
                return replace(fmt, columns=dict(columns))
    raise UserError(
        f"'{source}' has the columns {', '.join(sorted(keys)) or 'none'}, which is no {purpose} format; accepted are "
        f"{'; '.join(str(fmt) for fmt in known)}. Name yours with columns: {{{_EXAMPLES[purpose]}}}"
    )
