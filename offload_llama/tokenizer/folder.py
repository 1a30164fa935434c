"""What a model folder says about its vocabulary beside the vocabulary itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from offload_llama.errors import TokenizerError
from offload_llama.tokenizer.vocabulary import AddedToken, Codec, Vocabulary

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class FolderCodec(Codec, Protocol):
    """A codec that can look a piece up."""

    def find(self, piece: str) -> int | None:
        """Return the id of a piece, if there is one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSettings:
    """Settings from `tokenizer_config.json` and the files around it; None where they are silent.

    `special` are spellings that are control tokens whatever the vocabulary's own file says.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None
    chat_template: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    special: frozenset[str] = frozenset()
    added: tuple[AddedToken, ...] = field(default=())


def read_settings(folder: Path) -> FolderSettings:
    """Return what the folder's files say; every file may be missing.

    A template in `chat_template.jinja` goes before one in `tokenizer_config.json`. Of several
    named templates the one named "default" is taken, else the first.

    Raises:
        TokenizerError: a file is there but damaged.
    """
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    model = _read_json(folder / "config.json")
    named = {
        name: _spelling(tokenizer_config.get(name)) or _spelling(special_map.get(name))
        for name in _SPECIAL_NAMES
    }
    extra = [
        _spelling(token)
        for source in (tokenizer_config, special_map)
        for token in source.get("additional_special_tokens") or ()
    ]
    special = frozenset(s for s in [*named.values(), *extra] if s)
    add_bos = tokenizer_config.get("add_bos_token")
    return FolderSettings(
        bos_token=named["bos_token"],
        eos_token=named["eos_token"],
        add_bos_token=None if add_bos is None else bool(add_bos),
        chat_template=_template(folder, tokenizer_config),
        bos_id=_first_int(model.get("bos_token_id")),
        eos_id=_first_int(model.get("eos_token_id")),
        special=special,
        added=tuple(_added_tokens(folder, tokenizer_config, special)),
    )


def folder_vocabulary(
    codec: FolderCodec,
    settings: FolderSettings,
    *,
    own_added: Iterable[AddedToken],
    bos_id: int | None,
    eos_id: int | None,
    adds_bos: bool,
    model_stop_ids: Sequence[int],
) -> Vocabulary:
    """Return the tokenizer of a codec under a folder's settings.

    `own_added`, `bos_id`, `eos_id` and `adds_bos` are what the vocabulary's own file says; the
    folder's settings go before them.
    """
    tokens = {token.token_id: token for token in own_added}
    for token in settings.added:
        known = token.token_id in tokens
        fits = token.token_id >= codec.n_ids or codec.token(token.token_id) == token.content
        if fits and not known:
            tokens[token.token_id] = token
    by_spelling = {token.content: token for token in tokens.values()}
    for spelling in settings.special:
        found = by_spelling.get(spelling)
        token_id = found.token_id if found else codec.find(spelling)
        if found:
            tokens[found.token_id] = replace(found, control=True)
        elif token_id is not None:
            tokens[token_id] = AddedToken(content=spelling, token_id=token_id, control=True)
    control = {token.content: token.token_id for token in tokens.values() if token.control}
    bos = control.get(settings.bos_token or "")
    eos = control.get(settings.eos_token or "")
    bos_id = next((i for i in (bos, bos_id, settings.bos_id) if i is not None), None)
    eos_id = next((i for i in (eos, eos_id, settings.eos_id) if i is not None), None)
    return Vocabulary(
        codec,
        added=list(tokens.values()),
        bos_id=bos_id,
        eos_id=eos_id,
        adds_bos=adds_bos if settings.add_bos_token is None else settings.add_bos_token,
        chat_template=settings.chat_template,
        model_stop_ids=model_stop_ids,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is damaged ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is damaged (no JSON object); fetch the file again")
    return content


def _spelling(token: object) -> str | None:
    """Return a token's text; files write it bare or inside an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _first_int(value: object) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else None


def _template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8-sig")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{file} cannot be read ({error})") from error
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _added_tokens(
    folder: Path, tokenizer_config: Mapping[str, Any], special: frozenset[str]
) -> list[AddedToken]:
    """Return the tokens added to the vocabulary; `added_tokens.json` is the older way."""
    older = _read_json(folder / "added_tokens.json")
    added = tokenizer_config.get("added_tokens_decoder") or {}
    try:
        tokens = {
            int(token_id): AddedToken(
                content=content, token_id=int(token_id), control=content in special
            )
            for content, token_id in older.items()
        }
        for key, token in added.items():
            tokens[int(key)] = AddedToken(
                content=token["content"],
                token_id=int(key),
                control=bool(token.get("special", False)),
                lstrip=bool(token.get("lstrip", False)),
                rstrip=bool(token.get("rstrip", False)),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"the added tokens in {folder / 'tokenizer_config.json'} or added_tokens.json are "
            "damaged; fetch the files again"
        ) from error
    return list(tokens.values())
