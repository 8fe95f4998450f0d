"""ServerConfig: what the server does beyond the engine. ``scripts/serve.py`` flags are made from these fields."""

from __future__ import annotations

import dataclasses

from jaxsqueeze.config import flag

# Limits that hold before anything is allocated for a request; far above what clients of the OpenAI API send.
MAX_BODY_DEPTH = 64  # nested lists and objects
MAX_CHOICES_PER_CALL = 1024  # prompts x n
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024  # in one stop string
MAX_BAD_WORD_CHARS = 256
MAX_MESSAGE_CHARS = 600  # of an error message


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = flag(8000, "port; 0 picks a free one")
    api_key: tuple[str, ...] = flag((), "key that clients must send; repeat for several; also JAXSQUEEZE_API_KEY")
    served_model_name: tuple[str, ...] = flag((), "name clients may use; repeat for several; default: from MODEL")
    drain_seconds: float = flag(60.0, "after SIGTERM, longest wait for running requests")
    max_body_bytes: int = flag(8 << 20, "largest request body")
    allowed_origin: tuple[str, ...] = flag((), "browser origin that may call (CORS); repeat for several")
    profile_dir: str | None = flag(None, "where /start_profile writes traces; default: the user's cache folder")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if not self.drain_seconds >= 0:
            raise ValueError(f"drain_seconds must be >= 0, got {self.drain_seconds}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be positive, got {self.max_body_bytes}")
        if not all(self.api_key):
            raise ValueError("api_key must not be empty")
