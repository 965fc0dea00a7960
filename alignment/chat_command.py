"""`alignment chat MODEL`: talk to a model, a run or a checkpoint in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.errors import UserError

if TYPE_CHECKING:
    from alignment.chat import Message
    from alignment.ready import Ready

HELP = "/reset forgets what was said, /quit (or end of file) ends"


def main(argv: Sequence[str]) -> int:
    """Returns 0 at the end of the conversation; raises UserError for a model that is none."""
    parser = argparse.ArgumentParser(
        prog="alignment chat", description=f"Talk to a model. {HELP}.", epilog="alignment chat last --temperature 0.7"
    )
    parser.add_argument("model", nargs="?", default="last", help="hub id, folder, GGUF, checkpoint, run, last, best")
    parser.add_argument("--system", help="a system message before the conversation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token each time")
    parser.add_argument("--top_p", type=float, default=1.0, help="likeliest tokens up to this share (default: all)")
    parser.add_argument("--max_tokens", type=int, default=256, help="most tokens of a reply (default: 256)")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder that holds `runs` (default: here)")
    given = parser.parse_args(argv)
    if given.temperature < 0 or not 0 < given.top_p <= 1 or given.max_tokens < 1:
        raise UserError("--temperature is at least 0, --top_p above 0 and at most 1, --max_tokens at least 1")
    from alignment.ready import ready  # here: mistakes come first

    loaded = ready(given.model, given.root, device=given.device)
    print(f"{given.model}: {HELP}")
    talk = Conversation(loaded, system=given.system, max_tokens=given.max_tokens, temperature=given.temperature,
                        top_p=given.top_p)  # fmt: skip
    while True:
        try:
            said = input("you> ").strip()
        except EOFError:
            print()
            return 0
        if said == "/quit":
            return 0
        if said == "/reset":
            talk.reset()
        elif said:
            print("model> ", end="", flush=True)
            try:
                talk.reply(said)
            except UserError as error:  # of this message; the conversation goes on
                print(error)


class Conversation:
    """What was said so far, and the model that answers.

    Args:
        loaded: the model. system: the first message. max_tokens, temperature, top_p: of a reply.
    """

    def __init__(
        self, loaded: Ready, *, system: str | None, max_tokens: int, temperature: float, top_p: float
    ) -> None:
        from alignment.chat import ChatEncoder, Message

        self._loaded, self._message = loaded, Message
        self._encoder = ChatEncoder(tokenizer=loaded.tokenizer)
        self._before = [Message("system", system)] if system else []
        self._sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self._sampling |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
        self._room = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.turns: list[Message] = []

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns = []

    def reply(self, text: str) -> str:
        """Print the reply while it is written, and return it. The oldest turns are forgotten where room ends.

        Raises UserError for a message that is too long by itself; nothing of it is kept then.
        """
        import torch
        from transformers import TextStreamer

        self.turns.append(self._message("user", text))
        ids = self._encoder.prompt([*self._before, *self.turns])
        while self._room is not None and len(ids) + self._sampling["max_new_tokens"] > self._room:
            if len(self.turns) == 1:
                self.turns.clear()
                raise UserError(f"the message has {len(ids)} tokens, and the model has room for {self._room} in all")
            del self.turns[:2]
            ids = self._encoder.prompt([*self._before, *self.turns])
        prompt = torch.tensor([ids], device=self._loaded.model.device)
        streamer = TextStreamer(self._loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with torch.no_grad():
            out = self._loaded.model.generate(  # type: ignore[operator]
                prompt, attention_mask=torch.ones_like(prompt), streamer=streamer, **self._sampling
            )
        said = str(self._loaded.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
        self.turns.append(self._message("assistant", said))
        return said
