"""What can be configured of the server: every option once (see `radixkv.config`)."""

from __future__ import annotations

from pydantic import Field

from radixkv.config import Config


class ServerConfig(Config):
    """What is served, where, to whom, and within which limits."""

    model: str | None = None
    """Hub id, folder or GGUF file; by default SmolLM2-135M-Instruct."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: reachable from other machines."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    api_keys: tuple[str, ...] = Field(default=(), strict=False, repr=False)
    """Keys that requests must bring, each a tenant of its own; without any, every request is accepted."""
    admin_key: str | None = Field(default=None, repr=False)
    """Key for /admin; without it, administration is off."""
    served_model_name: str | None = None
    """What requests call the model; by default its own name."""
    max_queue: int = Field(default=256, ge=0)
    """Requests that may be unfinished beyond those that run side by side (max_num_seqs); more are answered 429."""
    max_seqs_per_request: int | None = Field(default=None, ge=1)
    """Sequences of one request (n, beam_width) at most; by default half of max_num_seqs."""
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    """A longer request body is answered 413."""
    grace_seconds: float = Field(default=30.0, ge=0)
    """After SIGTERM, seconds to finish what runs."""
