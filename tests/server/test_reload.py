"""SIGHUP: it may come at any time, and ends nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from support.server_process import ServerProcess

from radixkv.server.access.keys import hash_of
from radixkv.server.reload import ReloadSignal

# While the model is loaded, the file of keys is replaced, and the process gets SIGHUP.
REPLACED = """
import os, signal
from pathlib import Path
from radixkv.llm import LLM
get_tokenizer = LLM.get_tokenizer
def replace_keys(self):
    Path({path!r}).write_text({text!r})
    os.kill(os.getpid(), signal.SIGHUP)
    return get_tokenizer(self)
LLM.get_tokenizer = replace_keys
"""


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def test_what_comes_before_there_is_a_reload_reloads_once() -> None:
    reloads: list[int] = []

    async def main() -> None:
        reload_signal.set_handler(lambda: reloads.append(1))
        assert len(reloads) == 1
        reload_signal.set_handler(lambda: reloads.append(2))
        assert len(reloads) == 1
        hang_up()
        while len(reloads) < 2:
            await asyncio.sleep(0)

    earlier = signal.getsignal(signal.SIGHUP)
    with ReloadSignal() as reload_signal:
        hang_up()
        hang_up()
        asyncio.run(main())
    assert reloads == [1, 2]
    assert signal.getsignal(signal.SIGHUP) == earlier


def test_without_anything_to_reload_it_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Sent out of habit, SIGHUP used to end a server in the middle of its answers."""

    async def main() -> None:
        reload_signal.set_handler(None)
        hang_up()
        while not caplog.messages:
            await asyncio.sleep(0)

    with caplog.at_level(logging.INFO, "radixkv"), ReloadSignal() as reload_signal:
        asyncio.run(main())
    assert caplog.messages == ["SIGHUP: there is no file to read again"]


def test_keys_are_reread_after_a_signal_that_came_while_the_model_was_loaded(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """SIGHUP used to end it."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.ann]\nsha256 = "{hash_of("key-of-ann")}"\n')
    prelude = REPLACED.format(path=f"{keys}", text=f'[keys.bob]\nsha256 = "{hash_of("key-of-bob")}"\n')
    with ServerProcess(str(tiny_model_folder), "--keys-file", f"{keys}", prelude=prelude) as server:
        with server.client("key-of-ann") as ann, server.client("key-of-bob") as bob:
            assert (ann.get("/v1/models").status_code, bob.get("/v1/models").status_code) == (401, 200)
        assert server.terminate() == 0
