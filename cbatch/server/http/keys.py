"""API keys, and the number of requests that each key may have open."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cbatch.core.request.errors import FieldError
from cbatch.server.serving.admission_queue import MAX_RETRY_AFTER_S

_NUM_DURATIONS = 16  # durations of a key's last requests, kept to estimate Retry-After


class KeyBusyError(RuntimeError):
    """The key has its maximum of open requests. `retry_after_s` estimates when one will end."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ApiKey:
    """One API key. `id` identifies it without revealing it; log lines show the beginning only.
    `salt` keeps its prompts apart in the prefix cache; None: it shares them with other keys."""

    salt: str | None = None

    def __init__(self, secret: bytes, max_open: int | None, clock: Callable[[], float]) -> None:
        self.digest = digest(secret)
        self.id = self.digest.hex()
        self._max_open, self._clock = max_open, clock
        self._num_open = 0
        self._durations_s: deque[float] = deque(maxlen=_NUM_DURATIONS)

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request as open while the block runs. Raises `KeyBusyError`."""
        if self._max_open is not None and self._num_open >= self._max_open:
            raise KeyBusyError(
                f"the key has {self._num_open} of {self._max_open} calls open",
                self._retry_after_s(),
            )
        self._num_open += 1
        began_s = self._clock()
        try:
            yield
        finally:
            self._num_open -= 1
            self._durations_s.append(self._clock() - began_s)

    def _retry_after_s(self) -> int:
        if not self._durations_s:
            return 1
        mean_s = sum(self._durations_s) / len(self._durations_s)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(mean_s / self._num_open)))


class KeyRing:
    """The accepted keys. Without keys every request is accepted. Several keys have a salt each,
    unless they `share_prefix_cache`. Keys are stored as digests and compared in constant time.
    Raises `FieldError` for an empty key, or a key that no header can hold, for an invalid limit,
    and for a limit without keys."""

    def __init__(
        self,
        secrets: Sequence[str] = (),
        *,
        max_requests_per_key: int | None = None,
        share_prefix_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limit = max_requests_per_key
        if limit is not None and limit < 1:
            raise FieldError("max_requests_per_key", f"{limit} is not allowed", "give 1 or more")
        if limit is not None and not secrets:
            raise FieldError("max_requests_per_key", "there are no keys", "give API keys as well")
        checked = dict.fromkeys(map(_checked, secrets))
        self.accepted = [ApiKey(secret, limit, clock) for secret in checked]
        if len(self.accepted) > 1 and not share_prefix_cache:
            for key in self.accepted:  # the same salt in every replica, and no key's id in events
                key.salt = digest(b"prefix cache" + key.digest).hex()

    def find(self, authorization: bytes) -> ApiKey | None:
        kind, _, secret = authorization.partition(b" ")
        secret_digest = digest(secret.strip())
        matches = [key for key in self.accepted if hmac.compare_digest(secret_digest, key.digest)]
        return matches[0] if matches and kind.lower() == b"bearer" else None


def digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _checked(secret: str) -> bytes:
    stripped = secret.strip()
    if not stripped:
        raise FieldError("api_key", "is empty", "give a key, or leave it out to need none")
    if any(unicodedata.category(char) == "Cc" for char in stripped):
        raise FieldError("api_key", "has a control character", "give a key that a header can hold")
    return stripped.encode(errors="surrogateescape")


def configured_keys(secrets: Sequence[str] | None, file: str | None) -> list[str]:
    """Return the keys of the options; None: not given. Raises `FieldError` for a list without keys,
    so that an unset variable does not open the server."""
    if secrets is not None and not secrets:
        raise FieldError("api_key", "has no key", "give a key, or leave it out to need none")
    return [*(secrets or ()), *([] if file is None else read_keys(Path(file)))]


def read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "name a file with a key on each line"
        raise FieldError("api_key_file", f"{path} cannot be read ({error})", remedy) from error
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise FieldError("api_key_file", f"{path} has no key", "write one on each line")
    return keys
