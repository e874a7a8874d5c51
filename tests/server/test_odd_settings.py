"""Settings that are nearly right: flags for numbers, comments behind keys, keys of TLS, two adapters of one model."""

from __future__ import annotations

from pathlib import Path

import pytest

from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.load_settings import load_settings
from hamburger.server.operation.rotation import certificate_of

TLS = Path(__file__).parents[1] / "data" / "tls"


@pytest.mark.parametrize("name", ["port", "max_num_seqs", "confidence", "client_seconds", "target_tpot_ms"])
def test_a_flag_is_no_number(name: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{name}: yes\n")
    with pytest.raises(SettingsError, match=name):
        load_settings({}, str(file))


def test_a_size_beyond_all_measure_is_refused() -> None:
    with pytest.raises(SettingsError, match="kv-cache-memory"):
        load_settings({"kv_cache_memory": "9" * 400}, None)


def test_a_comment_behind_a_key_is_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# all of them\naaa111222\nbbb111222 # second team\n\t#x\nccc#1\n")
    assert ServeSettings(api_key_file=file).api_keys() == ["aaa111222", "bbb111222", "ccc#1"]


def test_an_additional_model_has_as_many_adapters_as_are_written() -> None:
    settings = load_settings({"also": "b=builtin,lora=x=y,lora=z=w,max_num_seqs=3"}, None)
    [model] = settings.also
    assert str(model) == "b=builtin,lora=x=y,lora=z=w,max_num_seqs=3"
    assert [str(adapter) for adapter in settings.models()[1].lora] == ["x=y", "z=w"]


def test_the_file_of_tls_that_is_wrong_is_named(tmp_path: Path) -> None:
    cert, key, locked = TLS / "cert.pem", TLS / "key.pem", TLS / "locked.pem"  # with the password "secret"
    certificate_of(ServeSettings(ssl_certfile=cert, ssl_keyfile=key))
    for wrong, says in (
        (tmp_path / "nope.pem", "ssl_keyfile .*nope.pem cannot be read: No such file"),
        (tmp_path, "ssl_keyfile .* cannot be read: Is a directory"),
        (locked, "ssl_keyfile .*locked.pem holds an encrypted key"),
        (None, "with the key of ssl_certfile"),
    ):
        with pytest.raises(SettingsError, match=says):
            certificate_of(ServeSettings(ssl_certfile=cert, ssl_keyfile=wrong))
