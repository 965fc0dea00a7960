"""A client for chat endpoints that speak OpenAI's protocol, made for judges: bounded in time, size, tries and at once.

The key comes from an environment variable and goes into one header, nowhere else: no message of an error holds it or
anything that the server says, and no redirect, which could lead it elsewhere, is followed.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from alignment.errors import UserError
from alignment.settings import as_config

Messages = list[dict[str, str]]

LARGEST = 1 << 20
"""Bytes of an answer; a chat completion of a judge has a few hundred."""
LONGEST_PAUSE_S = 30.0
"""Of a server's Retry-After."""
BUSY = (408, 409, 425, 429)
"""Status codes besides 5xx after which asking again makes sense."""


class NoAnswer(Exception):
    """The endpoint gave no answer that can be used, and why."""


class _Again(Exception):
    """As NoAnswer, but another try may do better, after `pause_s` or longer."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


@dataclass(kw_only=True, frozen=True)
class EndpointConfig:
    """Where a judge is, and how it is asked.

    Args:
        url: base URL, `https://api.openai.com/v1` or `http://127.0.0.1:8000/v1`.
        model: name that the server knows the judge by.
        key_env: name of the environment variable that holds the key. Null: no key is sent.
        request_s: seconds a single request may take.
        retries: further tries after a time-out, a connection that fails, HTTP 408, 409, 425, 429 or 5xx.
        backoff_s: seconds before the second try, doubled before each further one; a longer Retry-After of the server's
            counts, up to half a minute.
        concurrency: requests under way at once, of each process that asks.
        temperature: of the judge's own sampling.
        max_tokens: length of its answer; more for a model that reasons before it answers.
    """

    url: str
    model: str
    key_env: str | None = None
    request_s: float = 20.0
    retries: int = 3
    backoff_s: float = 0.5
    concurrency: int = 8
    temperature: float = 0.0
    max_tokens: int = 64


def endpoint_config(given: Mapping[str, Any] | EndpointConfig) -> EndpointConfig:
    """From settings as they are given. Raises UserError for what is missing or unknown."""
    if isinstance(given, Mapping) and (missing := sorted({"url", "model"} - set(given))):
        raise UserError(f"endpoint lacks {' and '.join(missing)}")
    return as_config(EndpointConfig, given)


class ChatEndpoint:
    """Asks an endpoint. Raises UserError for settings that cannot work and for a key that is not there."""

    def __init__(self, config: EndpointConfig) -> None:
        host = _host(config.url)
        limits = (config.request_s, config.concurrency, config.max_tokens)
        if not all(limit > 0 for limit in limits) or config.retries < 0 or config.backoff_s < 0:
            raise UserError("request_s, concurrency and max_tokens are positive, retries and backoff_s not negative")
        self.config = config
        self._target = config.url.rstrip("/") + "/chat/completions"
        self._place = host
        self._headers = {"Content-Type": "application/json", "User-Agent": "lightning-alignment"}
        self._headers |= _authorization(config.key_env)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask_all(self, requests: Sequence[Messages], within_s: float) -> list[str | Exception]:
        """The answer to each request, or why there is none; returns after `within_s` seconds at the latest."""
        deadline = time.monotonic() + within_s
        answers: list[str | Exception] = [NoAnswer(f"{self._place}: no answer within {within_s:g} s") for _ in requests]
        left = iter(list(enumerate(requests)))  # a list's iterator gives each request to one thread

        def work() -> None:
            for i, messages in left:
                if time.monotonic() >= deadline:
                    return
                try:
                    answers[i] = self.ask(messages, deadline)
                except Exception as error:  # a thread's error reaches nobody; here it reaches the one who waits
                    answers[i] = error

        count = min(self.config.concurrency, len(requests))
        # Daemons: a process that leaves, or a call whose time is up, does not wait for the server.
        threads = [threading.Thread(target=work, name="judge-request", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return list(answers)

    def ask(self, messages: Messages, deadline: float) -> str:
        """The text of the answer. Raises NoAnswer after all tries, or at `deadline` (of time.monotonic)."""
        body = {
            "model": self.config.model,
            "messages": messages,
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        data, tries = json.dumps(body).encode(), 0
        while True:
            tries += 1
            try:
                return _content(self._post(data, min(deadline, time.monotonic() + self.config.request_s)))
            except _Again as again:
                pause = max(again.pause_s, self.config.backoff_s * 2 ** (tries - 1))
                if tries > self.config.retries or time.monotonic() + pause >= deadline:
                    raise NoAnswer(f"{self._place}: {again} ({tries} {'try' if tries == 1 else 'tries'})") from None
                time.sleep(pause)

    def _post(self, data: bytes, until: float) -> bytes:
        """Body of the answer to one request. Raises _Again or NoAnswer."""
        request = urllib.request.Request(self._target, data, self._headers)
        seconds = max(0.001, until - time.monotonic())
        try:
            with self._opener.open(request, timeout=seconds) as response:
                return _read(response, until)
        except urllib.error.HTTPError as error:
            with error:
                status, pause = error.code, _pause(error.headers.get("Retry-After"))
            if status in BUSY or status >= 500:
                raise _Again(_named(status), pause) from None
            raise NoAnswer(f"{self._place}: {_named(status)}") from None
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            slow = isinstance(cause, TimeoutError)
            why = f"no answer within {round(seconds, 1):g} s" if slow else f"the connection failed: {_kind(cause)}"
            raise _Again(why) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None: the redirect is an error of its status."""


def _authorization(key_env: str | None) -> dict[str, str]:
    if key_env is None:
        return {}
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise UserError(f"the environment variable {key_env}, which key_env names, holds no key")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"the environment variable {key_env} holds what cannot be a key: spaces or special characters")
    return {"Authorization": f"Bearer {key}"}


def _read(response: http.client.HTTPResponse, until: float) -> bytes:
    """The body, however slowly it comes, until `until`."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise _Again(f"the answer is larger than {LARGEST} bytes")
        if time.monotonic() >= until:
            raise TimeoutError
    return b"".join(parts)


def _content(body: bytes) -> str:
    """The text of a chat completion. Raises _Again for a body that is none."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Again("the answer is no chat completion") from None
    if not isinstance(text, str):
        raise _Again("the answer has no text")
    return text


def _pause(retry_after: str | None) -> float:
    """Seconds that a server asks to wait; 0 for none, or a date."""
    try:
        return min(LONGEST_PAUSE_S, max(0.0, float(retry_after or 0)))
    except ValueError:
        return 0.0


def _named(status: int) -> str:
    names = {code.value: code.phrase for code in HTTPStatus}
    redirect = "; redirects are not followed" if 300 <= status < 400 else ""
    return f"HTTP {status} {names.get(status, '')}".strip() + redirect


def _kind(cause: BaseException | str) -> str:
    """What failed, without anything that came from the server."""
    number = f" ({os.strerror(cause.errno)})" if isinstance(cause, OSError) and isinstance(cause.errno, int) else ""
    return f"{type(cause).__name__}{number}"


def _host(url: str) -> str:
    """Host and port of a base URL, which may be shown. Raises UserError for what is none."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise UserError("url holds a user name or password; put the key into an environment variable: key_env")
    try:
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError as error:
        raise UserError(f"url '{url}': {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UserError(f"url is '{url}'; it is a base URL such as http://127.0.0.1:8000/v1")
    return f"{parts.hostname}{port}"
