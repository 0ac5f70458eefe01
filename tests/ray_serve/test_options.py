"""The options of an application come as text from `serve run` and as values from YAML, and means the same."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.ray.options import ApplicationOptions, PlacementConfig, cpus_per_replica


def test_text_means_what_values_mean() -> None:
    text = {
        "model": "some/model",
        "replicas": "2",
        "port": "8001",
        "num_gpus": "0.5",
        "enable_prefix_caching": "False",
        "api_keys": "one two",
        "request_timeout": "2.5",
    }
    values: dict[str, Any] = {
        "model": "some/model",
        "replicas": 2,
        "port": 8001,
        "num_gpus": 0.5,
        "enable_prefix_caching": False,
        "api_keys": ["one", "two"],
        "request_timeout": 2.5,
    }
    options = ApplicationOptions.of(text)
    assert options == ApplicationOptions.of(values)
    assert (options.server.port, options.server.request_timeout) == (8001, 2.5)
    assert options.server.api_keys == ("one", "two")
    assert options.llm == {"enable_prefix_caching": False}
    assert (options.placement.most_replicas, options.placement.num_gpus) == (2, 0.5)


def test_ingresses_listen_themselves_where_the_address_is_given() -> None:
    assert ApplicationOptions.of({"port": 8001}).own_socket
    assert ApplicationOptions.of({"host": "127.0.0.1"}).own_socket
    assert not ApplicationOptions.of({"replicas": 2, "api_keys": ["one"]}).own_socket


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica": 2}, r"unexpected keyword argument 'replica'. Did you mean 'replicas'\?"),
        ({"replicas": "two"}, "replicas: expected a whole number of at least 1 or None, got 'two'"),
        ({"replicas": 0}, "replicas: expected a whole number of at least 1 or None, got 0"),
        ({"block_size": "0"}, "block_size: expected a whole number of at least 1 or None, got 0"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas: expected at least as many as replicas, 3, got 2"),
        ({"requests_per_replica": 2}, "requests_per_replica: expected a max_replicas with it"),
        ({"ray_address": "1.2.3.4"}, "ray_address: expected auto or HOST:PORT, got '1.2.3.4'"),
        ({"ray_address": ":6379"}, "ray_address: expected auto or HOST:PORT, got ':6379'"),
        ({"ray_address": ""}, "ray_address: expected auto or HOST:PORT, got ''"),
        ({"scale_up_delay": 3.0}, "scale_up_delay: expected a max_replicas with it"),
        ({"scale_down_delay": 3.0}, "scale_down_delay: expected a max_replicas with it"),
        ({"uds": "/run/x"}, "uds: expected None where Ray places replicas, got '/run/x'"),
        ({"ssl_certfile": "cert.pem"}, "ssl_certfile: expected host or port with it"),
        ({"send_timeout": 9.0}, "send_timeout: expected host or port with it"),
        ({"queue_timeout": "2"}, "queue_timeout: expected None where Ray places replicas, got 2"),
        ({"record_trace": "t"}, "record_trace: expected None where Ray places replicas, got 't'"),
        ({"replicas": 2, "seed": "7"}, "seed: expected 0 where Ray places replicas: ingresses draw one .*, got 7"),
        ({"disk_cache": "/cache"}, "disk_cache: expected None, or disk_cache_read_only with it"),
        ({"replicas": 2}, "api_keys: whoever can reach Ray Serve's proxy could use the server"),
    ],
)
def test_what_is_impossible_is_refused_before_anything_starts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ApplicationOptions.of(arguments)


def test_replicas_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert cpus_per_replica(PlacementConfig(replicas=2)) == 4
    assert cpus_per_replica(PlacementConfig(replicas=1, max_replicas=4)) == 2
    assert cpus_per_replica(PlacementConfig(replicas=16)) == 1
    assert cpus_per_replica(PlacementConfig(replicas=2, num_cpus=3)) == 3
