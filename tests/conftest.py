"""What many tests share: a tiny model and the default one, each loaded once."""

from __future__ import annotations

import asyncio
import gc
import gzip
import inspect
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal import charmap

if TYPE_CHECKING:
    from radixkv.llm import LLM

# Read once, when torch is loaded. On a small machine, spinning threads of several processes would only block each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# They need packages of their own: `make clients`.
collect_ignore = ["clients"]

# No test depends on how fast the machine is, or on chance: the examples are the same each time. Half as many as Hypothesis'
# own default find what is planted.
settings.register_profile(
    "any machine", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Other examples each time, for whoever searches: `pytest --hypothesis-profile=search`.
settings.register_profile("search", max_examples=100, derandomize=False)

# For mutation testing and coverage, where an example is run thousands of times or slowly: few, always the same, never shrunk.
settings.register_profile("mutation", max_examples=20, derandomize=True, database=None, phases=[Phase.generate])


# For `make quick`: a fifth of the examples, where a test does not say how many.
settings.register_profile("quick", max_examples=10)

# Asking of each of 1.1 million characters whether UTF-8 encodes it takes Hypothesis seven seconds in every process that draws
# text, until one has written this file.
UTF_8 = "[[[0, 55295], [57344, 1114111]], []]"

# The default model's, in tokens.
DEFAULT_LENGTH = 8192

# What takes half a minute or more, the longest first; "server" is the folder. Workers begin with them, so that none of them
# is left for the end, when the other workers have nothing more to do.
LONG = [
    "server",
    "ray_serve/test_cluster.py",
    "model/graphs/test_compiled_layers.py",
    "engine/test_engine.py",
    "cache/test_eviction.py",
    "docs/test_code_blocks.py",
    "cli/test_cli.py",
    "model/test_default_model.py",
    "model/test_fp8_kv_cache.py",
    "sampling/grammar/test_structured_output.py",
    "testing/test_kit.py",
    "test_examples.py",
    "engine/test_architectures.py",
    "bench/cache/test_benches.py",
    "bench/serving/test_load_test.py",
]
# It starts servers of its own, beside the one that all others of the folder share.
OWN_SERVERS = "server/test_process.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-factor", type=int, default=1, help="so many times the requests of server/test_fuzz.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: min(ranks.get(path, len(ranks)) for path in (item.path, item.path.parent)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    for item in marked:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist=loadfile``, one worker has all tests of the shared server, so that it starts and loads its model once."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFilesAndServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/server" if file.startswith("tests/server/") and not file.endswith(OWN_SERVERS) else file

    return LoadFilesAndServer(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules hold two million objects: garbage collection waits until all are imported, and ignores them from then on.

    Processes that tests start are forked from here.
    """
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    _write_what_utf_8_encodes()
    if "support.preloaded_process" in sys.modules:
        from support.preloaded_process import fork_preloaded

        fork_preloaded()
    return result


def _write_what_utf_8_encodes() -> None:
    file = charmap.charmap_file("codec-v2-utf-8")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, delete=False) as written:
            written.write(gzip.compress(UTF_8.encode()))
        Path(written.name).replace(file)


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _own_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests keep of models is theirs, also in processes that they start, and goes with their other files.

    But for the models that were converted before, above all the default one: that would take half a minute each time.
    """
    from radixkv.model.model_cache import MANIFEST, cache_folder

    own = tmp_path_factory.mktemp("model-cache")
    for manifest in cache_folder().glob(f"*/{MANIFEST}"):
        (own / manifest.parent.name).symlink_to(manifest.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RADIXKV_CACHE", str(own))
        yield


@pytest.fixture(scope="session")
def shared_llm(default_tokenizer: Any) -> LLM:
    # Only here: tests of the cache do without torch.
    from support.replica_servers import tiny_model

    from radixkv.llm import LLM

    model = tiny_model(len(default_tokenizer), length=DEFAULT_LENGTH)
    return LLM(model, tokenizer=default_tokenizer, block_size=16, num_blocks=600)


@pytest.fixture(scope="session")
def shared_default_llm() -> LLM:
    from radixkv.llm import LLM

    return LLM(dtype="float32", block_size=16, num_blocks=600)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """A tiny random model with the default model's tokenizer and an empty cache, whose rules are verified afterwards."""
    yield from _with_empty_cache(shared_llm)


@pytest.fixture
def default_llm(shared_default_llm: LLM) -> Iterator[LLM]:
    """The real default model, where it matters what it says: each of its steps takes as long as twenty of `llm`'s."""
    yield from _with_empty_cache(shared_default_llm)


def _with_empty_cache(llm: LLM) -> Iterator[LLM]:
    llm.reset_prefix_cache()
    yield llm
    llm.engine.cache.check()
    assert llm.reset_prefix_cache()


@pytest.fixture
def loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier has is loaded, even if a tiny model computes it as fast, or this machine is slow just now."""
    from radixkv.tiers.moves.rates import Rates

    monkeypatch.setattr(Rates, "compute_seconds", lambda rates, num_tokens: 1000.0)


@pytest.fixture
def handled_by() -> Iterator[Callable[[Any], None]]:
    """Sets what the program does at Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def look_ups_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that come together, all know where their prefixes are before the first of these is loaded."""
    from support.time_limit import HANGING

    from radixkv.scheduling import prefix_look_ups

    monkeypatch.setattr(prefix_look_ups, "_LOOK_UP_SECONDS", HANGING)


@pytest.fixture(scope="session")
def default_tokenizer() -> Any:
    from radixkv.model.default_model import find_default_model
    from radixkv.model.gguf.conversion import ensure_converted
    from radixkv.model.tokenizer import read_tokenizer

    return read_tokenizer(ensure_converted(find_default_model(), print))


@pytest.fixture(scope="session")
def tiny_model_folder(default_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the default model's tokenizer, for processes whose answers no test reads."""
    from support.replica_servers import tiny_model

    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model(len(default_tokenizer), length=DEFAULT_LENGTH).save_pretrained(folder)
    default_tokenizer.save_pretrained(folder)
    return folder
