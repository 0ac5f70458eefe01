"""What can be configured of the server: every option once (see `radixkv.config`)."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from radixkv.config import Config

# An origin as browsers send it. "null" is the origin of a file, and of a page in a sandbox.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")


class ServerConfig(Config):
    """What is served, where, to whom, and within which limits."""

    model: str | None = None
    """Hub id, folder or GGUF file; by default SmolLM2-135M-Instruct."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: reachable from other machines, which needs API keys (or allow_unauthenticated)."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    api_keys: tuple[str, ...] = Field(default=(), strict=False, repr=False)
    """Keys that requests must send, each a tenant of its own; without any, every request is accepted."""
    keys_file: str | Path | None = None
    """TOML file with keys, their weights, limits and expiry, read again at SIGHUP; see `radixkv keys new`."""
    admin_key: str | None = Field(default=None, repr=False)
    """Key for /admin; without it, administration is off."""
    metrics_key: str | None = Field(default=None, repr=False)
    """Key for /metrics, and for /live where there are no API keys. Without it, /metrics needs the admin key where there are
    API keys, and no key elsewhere."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Serve /metrics, /live and the page on this port instead of the other one; 0: any free one. There, /metrics needs only
    the metrics_key, if there is one."""
    metrics_host: str = "127.0.0.1"
    """Address of metrics_port; 0.0.0.0: reachable from other machines."""
    allow_unauthenticated: bool = False
    """Serve clients of other machines even without API keys: whoever reaches the port may use the model."""
    uds: str | Path | None = None
    """Listen on a Unix socket at this path instead of a host and a port."""
    ssl_certfile: str | Path | None = None
    """Serve HTTPS with this certificate (PEM, with its chain)."""
    ssl_keyfile: str | Path | None = None
    """Private key of ssl_certfile, if it is not in the same file."""
    ssl_keyfile_password: str | None = Field(default=None, repr=False)
    """Password of the private key."""
    ssl_ca_certs: str | Path | None = None
    """Require client certificates signed by one of these (PEM)."""
    ssl_ciphers: str | None = None
    """TLS 1.2 ciphers in OpenSSL's notation; by default Python's."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Origins, such as https://app.example, whose pages may call the server from a browser; *: any. None by default."""
    served_model_name: tuple[str, ...] = Field(default=(), strict=False)
    """Names by which requests select the model; by default its own. Of several, answers contain the first."""
    max_queue: int = Field(default=256, ge=0)
    """Most unfinished requests beyond those that run at the same time (max_num_seqs); more are answered 429."""
    max_seqs_per_request: int | None = Field(default=None, ge=1)
    """Most sequences of one request (n, beam_width); by default half of max_num_seqs."""
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    """A longer request body is answered 413."""
    receive_timeout: float = Field(default=60.0, gt=0)
    """Seconds for a request to arrive, headers and body; a slower one is answered 408 and disconnected."""
    send_timeout: float = Field(default=60.0, gt=0)
    """Seconds after which a client that reads nothing of its answer is disconnected, and its request aborted."""
    queue_timeout: float | None = Field(default=None, gt=0)
    """Seconds after which a request that still waits to be scheduled is answered 504. By default no limit."""
    first_token_timeout: float | None = Field(default=None, gt=0)
    """Seconds after which a request without a first token ends with a 504. By default no limit."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an unfinished request ends with a 504. By default no limit; requests can also set a timeout."""
    step_timeout: float = Field(default=300.0, gt=0, le=1e9, allow_inf_nan=False)
    """Seconds after which a step of the engine counts as stuck: /health is 503, and the process ends with status 1."""
    access_log: str | Path | None = None
    """Write one line of JSON per request to this file; -: to standard error."""
    otlp_traces_endpoint: str | None = None
    """Send OpenTelemetry traces over HTTP to this address, such as http://localhost:4318/v1/traces (radixkv[otel])."""
    grace_seconds: float = Field(default=30.0, ge=0)
    """Seconds after SIGTERM to finish running and queued requests."""

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for origin in given:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    "cors_origins: expected origins such as https://app.example, in lower case and without a path or "
                    f"a slash at the end; or *; got {origin!r:.80}"
                )
        return given

    @field_validator("served_model_name")
    @classmethod
    def _are_names(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if "" in given:  # perhaps from a variable that is not set
            raise ValueError("served_model_name: expected names, got ''")
        return given

    def _check_together(self) -> None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ValueError(f"{name}: expected an ssl_certfile with it")
        for name in ("host", "metrics_host"):
            if not getattr(self, name):  # perhaps from a variable that is not set; for the system, it is any address
                raise ValueError(f"{name}: expected an address, got ''")
        if self.metrics_port is None and self.metrics_host != type(self).model_fields["metrics_host"].default:
            raise ValueError(f"metrics_host: expected a metrics_port with it, got {self.metrics_host!r:.80} alone")
        for name in ("host", "port"):
            value = getattr(self, name)
            if self.uds is not None and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}: expected none beside uds, got {value!r:.80}")
