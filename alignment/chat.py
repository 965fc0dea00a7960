"""From messages to token ids: the one place where text meets the tokenizer.

Three promises, kept by construction:

* a prompt's ids are a prefix of prompt + completion: the two are tokenised apart, never across the boundary;
* a prompt starts with exactly one BOS where the tokenizer or its template writes one;
* text of a user or of a completion never turns into control tokens (`<|im_end|>`, `</s>`, ...) unless asked.

A completion is its text plus the token that ends a turn, once, so that a model learns to stop. Which tokens count is
known from lengths and from `scored`: pad may equal EOS. Prompts are cut on the left, completions on the right (and then
do not end).
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from alignment.errors import UserError

Template = Literal["auto", "chat", "plain", "raw"]
TrainOn = Literal["last", "all"]

# For tokenizers without a chat template. Line breaks separate, because every tokenizer keeps them apart from words.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% else %}{{ message['role'] | capitalize + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
_ANCHOR = "\n"
# A private-use character: stands around a message's number while a template is rendered without the message's text.
_MARK = "\ue0f0"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: role is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One row as token ids. `scored` is None where every completion token counts.

    `cut_prompt` and `cut_completions` say what the limits removed; `empty` that a completion lost all of its tokens.
    """

    prompt: list[int]
    completions: list[list[int]]
    scored: list[list[bool]] | None = None
    cut_prompt: bool = False
    cut_completions: int = 0
    empty: bool = False


_NO_VARIABLES = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools", "documents"}
"""What `apply_chat_template` takes for itself; a template may know the others."""


class TemplateRefused(UserError):
    """The chat template raised on these messages (for example on two user turns in a row)."""


@dataclass(kw_only=True)
class ChatEncoder:
    """Turns prompts and completions into ids with one tokenizer.

    Args:
        tokenizer: any transformers tokenizer.
        template: "chat" the tokenizer's own chat template; "plain" a built-in `User: / Assistant:` layout; "raw" the
            text as it is, for prompts that are one string; "auto" chat where the tokenizer has a template, else plain.
        template_kwargs: variables for the template, for example `{"enable_thinking": False}`.
        max_prompt_tokens: longer prompts lose tokens on the left (BOS stays). None: no limit.
        max_completion_tokens: longer completions lose tokens on the right, their end of turn first. None: no limit.
        max_tokens: prompt + completion together; the completion is cut. None: no limit.
        allow_special: let control tokens written in the text be control tokens. For trusted data only.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    allow_special: bool = False

    def __post_init__(self) -> None:
        tok = self.tokenizer
        if self.template == "chat" and not tok.chat_template:
            raise UserError("template 'chat' needs a tokenizer that has one; use 'plain', or set policy.chat_template")
        taken = sorted(_NO_VARIABLES & self.template_kwargs.keys())
        if taken:
            raise UserError(f"template_kwargs are variables of the chat template; '{taken[0]}' is set by the data")
        for name in ("max_prompt_tokens", "max_completion_tokens", "max_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise UserError(f"{name} must be at least 1 token, got {limit}")
        self._control = _control_tokens(tok)
        strings = sorted(self._control, key=len, reverse=True)
        self._control_re = re.compile("|".join(re.escape(s) for s in strings)) if strings else None
        self._bos: int | None = tok.bos_token_id
        with_specials = _ids(tok, "a", special=True)
        self._adds_bos = self._bos is not None and with_specials[:1] == [self._bos]
        if tok.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token; set its eos_token so that completions can end")
        self._eos: int = tok.eos_token_id
        # Tokenizers of the SentencePiece kind put a space before every text; a completion must not get one.
        spaced = tok.convert_ids_to_tokens(_ids(tok, "a"))[0].startswith("\u2581")
        self._anchor = _ids(tok, _ANCHOR) if spaced else []
        raw = self.template == "raw"
        turn: tuple[int, bool, str] = (self._eos, False, "") if raw else self._probe_turn()
        self._end, self._trims, self._lead = turn

    # ------------------------------------------------------------------ public

    @property
    def end_id(self) -> int:
        """The token that ends an assistant turn (for a chat template often not the tokenizer's EOS)."""
        return self._end

    def prompt(self, prompt: Sequence[Message] | str, *, raw: bool = False) -> list[int]:
        """Ids of a prompt, up to where the assistant starts to write; at least one token, one BOS, no limit applied.

        A string is one user message, or with `raw` (or `template="raw"`) the text itself.
        Raises TemplateRefused when the template rejects the messages, UserError for messages under "raw".
        """
        if raw or self.template == "raw":
            if not isinstance(prompt, str):
                raise UserError("template 'raw' takes prompts that are one text; use 'chat' or 'plain' for messages")
            return self._one_bos(self._encode([(prompt, True)]), fallback=True)
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        return self._one_bos(self._encode(self._render(messages, generation=True)))

    def completion(self, text: str, *, end: bool = True, raw: bool = False) -> list[int]:
        """Ids of a completion: its text, then (with `end`) the end of the turn, once. What the template writes between
        the generation prompt and the assistant's text (a space, an empty block of thoughts) belongs to it."""
        if not raw:
            text = text.strip() if self._trims else text
        ids = self._encode([("" if raw else self._lead, False), (text, True)], after=True) if text else []
        stop = self._eos if raw else self._end
        return [*ids, stop] if end and ids and ids[-1] != stop else ids

    def encode(
        self,
        prompt: Sequence[Message] | str,
        completions: Sequence[str],
        *,
        raw: bool = False,
        train_on: TrainOn = "last",
    ) -> Encoded:
        """A row within the limits. With `train_on="all"` the earlier assistant turns are scored too: then the prompt
        ends before the first of them, and user turns stand unscored inside the one completion."""
        scored: list[list[bool]] | None = None
        turns = [] if isinstance(prompt, str) else [m.role for m in prompt]
        if train_on == "all" and "assistant" in turns:
            (text,) = completions
            prompt_ids, ids, mask = self._all_turns([*cast(Sequence[Message], prompt), Message("assistant", text)])
            rows, scored = [ids], [mask]
        else:
            prompt_ids = self.prompt(prompt, raw=raw)
            rows = [self.completion(c, raw=raw) for c in completions]
        kept = self._cut_prompt(prompt_ids)
        cut = [self._cut_completion(row, len(kept)) for row in rows]
        if scored is not None:
            scored = [mask[: len(row)] for mask, row in zip(scored, cut, strict=True)]
        return Encoded(
            prompt=kept,
            completions=cut,
            scored=scored,
            cut_prompt=len(kept) < len(prompt_ids),
            cut_completions=sum(len(a) < len(b) for a, b in zip(cut, rows, strict=True)),
            empty=any(not row for row in cut),
        )

    # ------------------------------------------------------------------ limits

    def _cut_prompt(self, ids: list[int]) -> list[int]:
        limit = self.max_prompt_tokens
        if limit is None or len(ids) <= limit:
            return ids
        if self._bos is not None and ids[0] == self._bos:
            return [self._bos, *ids[len(ids) - (limit - 1) :]]
        return ids[-limit:]

    def _cut_completion(self, ids: list[int], prompt_length: int) -> list[int]:
        limits = [self.max_completion_tokens, None if self.max_tokens is None else self.max_tokens - prompt_length]
        room = min((limit for limit in limits if limit is not None), default=len(ids))
        return ids[: max(room, 0)]

    # ------------------------------------------------------------------ templates

    def _apply(self, messages: Sequence[Message], generation: bool) -> str:
        options = dict(self.template_kwargs)
        if self.template == "plain" or (self.template == "auto" and not self.tokenizer.chat_template):
            options["chat_template"] = PLAIN_TEMPLATE
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation, **options
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template is code: it fails on purpose (`raise_exception`) or as code does.
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error
        return cast(str, text)

    def _render(self, messages: Sequence[Message], generation: bool) -> list[tuple[str, bool]]:
        """(text, is_content) segments. Text without control strings goes through the template as it is, so that its
        logic sees it; otherwise marks stand in for it and the template's own control tokens stay the only ones."""
        control = None if self.allow_special else self._control_re
        if control is None or not any(control.search(m.content) for m in messages):
            return [(self._apply(messages, generation), False)]
        return [(text, number is not None) for text, number in self._render_marked(messages, generation)]

    def _render_marked(self, messages: Sequence[Message], generation: bool) -> list[tuple[str, int | None]]:
        """(text, message number or None for the template's own text) segments. A message's outer white space goes
        through the template, which may trim it; that of an assistant belongs to the turn, as in `completion`."""
        mark = _MARK
        while any(mark in m.content for m in messages):
            mark += _MARK
        cores = [m.content if m.role == "assistant" and not self._trims else m.content.strip() for m in messages]
        hidden = [
            Message(m.role, m.content.replace(core, f"{mark}{i}{mark}") if core else m.content)
            for i, (m, core) in enumerate(zip(messages, cores, strict=True))
        ]
        parts = re.split(f"{mark}(\\d+){mark}", self._apply(hidden, generation))
        segments: list[tuple[str, int | None]] = []
        for i, part in enumerate(parts):
            segments.append((cores[int(part)], int(part)) if i % 2 else (part, None))
        return segments

    def _probe_turn(self) -> tuple[int, bool, str]:
        """(the token that ends an assistant turn, whether the template trims the turn, what it writes between the
        generation prompt and the turn), read off a rendered turn."""
        asked = Message("user", "x")
        text = self._apply([asked, Message("assistant", f"\t{_MARK}\t")], generation=False)
        before, found, after = text.rpartition(_MARK)
        if not found:
            raise UserError("the chat template does not show the assistant's text; use template 'plain'")
        trims = not (before.endswith("\t") and after.startswith("\t"))
        match = self._control_re.search(after) if self._control_re else None
        before, prompt = before.removesuffix("\t"), self._apply([asked], generation=True)
        lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        return (self._control[match.group()] if match else self._eos), trims, lead

    def _all_turns(self, messages: Sequence[Message]) -> tuple[list[int], list[int], list[bool]]:
        """(prompt, completion, scored) of a whole conversation: every assistant turn with its end is scored."""
        segments = self._render_marked(messages, generation=False)
        shown = [i for _, i in segments if i is not None]
        replies = [i for i, m in enumerate(messages) if m.role == "assistant"]
        if [i for i in shown if i in replies] != replies:
            raise UserError("the chat template rewrites earlier turns; train_on 'all' needs one that shows all of them")
        first = next(s for s, (_, i) in enumerate(segments) if i in replies)
        asked = [(text, i is not None) for text, i in segments[:first]]
        if not asked[-1][1]:
            asked[-1] = (asked[-1][0].removesuffix(self._lead), False)
        prompt = self._one_bos(self._encode(asked))
        ids: list[int] = []
        scored: list[bool] = []
        between: list[tuple[str, bool]] = []
        for text, i in segments[first:]:
            if i not in replies:
                between.append((text, i is not None))
                continue
            text_before, content = between[-1] if between else ("", False)
            if not content and text_before.endswith(self._lead):  # the completion adds it itself
                between[-1:] = [(text_before.removesuffix(self._lead), False)]
            filler = self._encode(between, after=True)
            # The turn's end belongs to the turn before; the completion adds it once itself.
            filler = filler[filler.index(self._end) + 1 :] if ids and self._end in filler else filler
            turn = self.completion(text)
            ids += [*filler, *turn]
            scored += [False] * len(filler) + [True] * len(turn)
            between = []
        return prompt, ids, scored

    # ------------------------------------------------------------------ tokenising

    def _encode(self, segments: Sequence[tuple[str, bool]], *, after: bool = False) -> list[int]:
        """Ids of the joined segments. Control strings count in template text, not in content. `after`: other text
        stands before, so nothing is put in front."""
        control = None if self.allow_special else self._control_re
        if control is None or not any(content and control.search(text) for text, content in segments):
            return self._tokens("".join(text for text, _ in segments), after=after)
        ids: list[int] = []
        stretch = ""
        for text, content in segments:
            if content:
                stretch += text
                continue
            end = 0
            for match in control.finditer(text):
                ids += self._neutral(stretch + text[end : match.start()], after and not ids)
                ids.append(self._control[match.group()])
                stretch, end = "", match.end()
            stretch += text[end:]
        return ids + self._neutral(stretch, after and not ids)

    def _tokens(self, text: str, *, split: bool = False, after: bool = False) -> list[int]:
        if after and self._anchor:
            ids = _ids(self.tokenizer, _ANCHOR + text, split=split)
            if ids[: len(self._anchor)] == self._anchor:
                return ids[len(self._anchor) :]
        return _ids(self.tokenizer, text, split=split)

    def _neutral(self, text: str, after: bool = False) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        if not text:
            return []
        ids = self._tokens(text, split=True, after=after)
        if self._control_re is None or not set(ids) & set(self._control.values()):
            return ids
        # Added tokens that are not flagged as special ignore `split_special_tokens`: break their strings in two.
        cuts = [0, *(match.start() + 1 for match in self._control_re.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        return [i for n, piece in enumerate(pieces) for i in self._tokens(piece, split=True, after=after or n > 0)]

    def _one_bos(self, ids: list[int], fallback: bool = False) -> list[int]:
        """Exactly one BOS in front where the tokenizer or the template writes one. With `fallback` an empty prompt gets
        BOS (else EOS), since the first completion token needs a predecessor."""
        bos = self._bos
        if bos is not None and (self._adds_bos or ids[:1] == [bos]):
            while ids[:1] == [bos]:
                ids = ids[1:]
            return [bos, *ids]
        if not ids and fallback:
            return [self._eos if bos is None else bos]
        return ids


def end_ids(tokenizer: PreTrainedTokenizerBase, *given: int | Sequence[int] | None) -> list[int]:
    """Every id that ends a reply, ascending: the tokenizer's end of text, the chat template's end of turn, and what the
    model's own settings name (`given`)."""
    ends = {tokenizer.eos_token_id, ChatEncoder(tokenizer=tokenizer).end_id}
    for ids in given:
        ends |= {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(cast(set[int], ends))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of everything that decides how this tokenizer turns text into ids: vocabulary, rules, chat template."""
    parts: dict[str, Any] = {
        "template": tokenizer.chat_template,
        "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        "added": sorted((i, str(t), t.special) for i, t in tokenizer.added_tokens_decoder.items()),
        "specials_added": _ids(tokenizer, "a", special=True),
    }
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        # Padding and truncation are settings of the last call, not of the tokenizer.
        parts["core"] = {k: v for k, v in core.items() if k not in ("padding", "truncation")}
    else:
        parts["vocabulary"] = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False, split: bool = False) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=special, split_special_tokens=split, verbose=False)
    return cast(list[int], encoded["input_ids"])


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Strings that mean something to the model: special tokens, and added tokens that the chat template writes."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    found = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special or str(t) in template}
    for token in tokenizer.all_special_tokens:
        found.setdefault(token, cast(int, tokenizer.convert_tokens_to_ids(token)))
    return {text: i for text, i in found.items() if text}
