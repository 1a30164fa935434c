"""Finds a model's vocabulary and opens it, whatever format it has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.api import Tokenizer
from offload_llama.tokenizer.chat_templates import LLAMA_2
from offload_llama.tokenizer.folder import FolderSettings, folder_vocabulary, read_settings

# `tokenizer.json` first: where both are there, it also has the tokens that were added later.
_IN_FOLDER = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
# Meta's download script puts one `tokenizer.model` beside the folders of all sizes.
_BESIDE_FOLDER = "../tokenizer.model"

_HEAD_BYTES = 4096
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")
_FIRST_PIECE = 0x0A  # field 1, a message: the pieces of a SentencePiece ModelProto


class _Kind(Enum):
    GGUF = "a GGUF file"
    JSON = "a tokenizer.json"
    RANKS = "a file of BPE ranks"
    SENTENCEPIECE = "a SentencePiece model"
    POINTER = "a Git LFS pointer"
    UNKNOWN = "no vocabulary"


def open_tokenizer(checkpoint_path: Path, *, model_stop_ids: tuple[int, ...] = ()) -> Tokenizer:
    """Return the tokenizer of a model.

    The format is told by a file's content: `tokenizer.model` may be a SentencePiece model or
    Llama 3's ranks.

    Args:
        checkpoint_path: a GGUF file, a model's folder, a vocabulary file, or a weights file whose
            folder holds the vocabulary.
        model_stop_ids: ids that the model's other files say end a text; they join the
            vocabulary's own `stop_ids`.

    Raises:
        TokenizerError: no usable vocabulary is there (the message lists what was looked for, and
            names a Git LFS pointer as such), or the one found is damaged or not supported.
    """
    path = Path(checkpoint_path)
    if path.is_dir():
        return _open_folder(path, model_stop_ids)
    if not path.is_file():
        raise TokenizerError(f"no such file or folder: {path}")
    kind = _kind(path)
    if kind is _Kind.UNKNOWN:
        return _open_folder(path.parent, model_stop_ids)
    if kind is _Kind.POINTER:
        raise _pointer(path)
    return _open_file(path, kind, path.parent, model_stop_ids)


def _open_folder(folder: Path, model_stop_ids: Sequence[int]) -> Tokenizer:
    pointers = []
    for path in _candidates(folder):
        kind = _kind(path)
        if kind is _Kind.POINTER:
            pointers.append(path)
        elif kind is _Kind.UNKNOWN:
            raise TokenizerError(
                f"{path} is neither a SentencePiece model, Llama-3 BPE ranks nor a "
                "tokenizer.json; fetch the file again"
            )
        else:
            return _open_file(path, kind, folder, model_stop_ids)
    if pointers:
        raise _pointer(pointers[0])
    raise TokenizerError(
        f"no vocabulary in {folder}: looked for {', '.join(_IN_FOLDER)}, *.gguf and, beside "
        f"params.json, {_BESIDE_FOLDER}; put the model's tokenizer file there"
    )


def _candidates(folder: Path) -> list[Path]:
    """Return the files that may hold the folder's vocabulary, best first."""
    paths = [folder / name for name in _IN_FOLDER]
    paths += sorted(folder.glob("*.gguf"))
    if (folder / "params.json").is_file():
        paths.append(folder / _BESIDE_FOLDER)
    return [path for path in paths if path.is_file()]


def _kind(path: Path) -> _Kind:
    """Return what the file's first bytes say it is."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
    if head.startswith(b"GGUF"):
        return _Kind.GGUF
    if head.startswith(_LFS_POINTER):
        return _Kind.POINTER
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return _Kind.JSON
    if _RANK_LINE.match(head):
        return _Kind.RANKS
    if head[:1] == bytes([_FIRST_PIECE]):
        return _Kind.SENTENCEPIECE
    return _Kind.UNKNOWN


def _open_file(path: Path, kind: _Kind, folder: Path, model_stop_ids: Sequence[int]) -> Tokenizer:
    # Each format's package is loaded only where it is needed: start-up time is shown to users.
    if kind is _Kind.GGUF:
        return _open_gguf(path, model_stop_ids)
    settings = read_settings(folder)
    if kind is _Kind.JSON:
        return _open_json(path, settings, model_stop_ids)
    if kind is _Kind.RANKS:
        return _open_ranks(path, settings, model_stop_ids)
    meta_layout = (folder / "params.json").is_file() and not (folder / "config.json").is_file()
    if meta_layout and settings.chat_template is None:
        # Meta's own layout with a SentencePiece model is Llama 2; its files hold no template.
        settings = replace(settings, chat_template=LLAMA_2)
    return _open_sentencepiece(path, settings, model_stop_ids)


def _open_gguf(path: Path, model_stop_ids: Sequence[int]) -> Tokenizer:
    from offload_llama.checkpoint.gguf_header import read_metadata
    from offload_llama.tokenizer.gguf_vocab import gguf_vocabulary

    return gguf_vocabulary(read_metadata(path), source=str(path), model_stop_ids=model_stop_ids)


def _open_json(path: Path, settings: FolderSettings, model_stop_ids: Sequence[int]) -> Tokenizer:
    from offload_llama.tokenizer.hf_json import HfJsonCodec

    try:
        text = path.read_text("utf-8-sig")
    except ValueError as error:
        raise TokenizerError(f"{path} is not UTF-8; fetch the file again") from error
    codec = HfJsonCodec(text, source=str(path))
    own = codec.added_tokens()
    leading = codec.leading_id()
    control = {token.token_id for token in own if token.control}
    named = codec.find(settings.bos_token) if settings.bos_token else None
    bos_id = named if named is not None else settings.bos_id
    if bos_id is None and leading in control:
        bos_id = leading
    return folder_vocabulary(
        codec,
        settings,
        own_added=own,
        bos_id=bos_id,
        eos_id=None,
        adds_bos=leading is not None and leading == bos_id,
        model_stop_ids=model_stop_ids,
    )


def _open_ranks(path: Path, settings: FolderSettings, model_stop_ids: Sequence[int]) -> Tokenizer:
    from offload_llama.tokenizer.tiktoken_model import TiktokenCodec

    codec = TiktokenCodec(path.read_bytes(), source=str(path))
    own = codec.control_tokens()
    ids = {token.content: token.token_id for token in own}
    return folder_vocabulary(
        codec,
        settings,
        own_added=own,
        bos_id=ids["<|begin_of_text|>"],
        eos_id=ids["<|end_of_text|>"],
        adds_bos=True,
        model_stop_ids=model_stop_ids,
    )


def _open_sentencepiece(
    path: Path, settings: FolderSettings, model_stop_ids: Sequence[int]
) -> Tokenizer:
    from offload_llama.tokenizer.sentencepiece_model import SentencePieceCodec

    codec = SentencePieceCodec(path.read_bytes(), source=str(path))
    return folder_vocabulary(
        codec,
        settings,
        own_added=codec.control_tokens(),
        bos_id=codec.special_id("bos"),
        eos_id=codec.special_id("eos"),
        adds_bos=True,
        model_stop_ids=model_stop_ids,
    )


def _pointer(path: Path) -> TokenizerError:
    return TokenizerError(
        f"{path} is a Git LFS pointer, not the vocabulary itself; fetch it with `git lfs pull`, or "
        "download the file again"
    )
