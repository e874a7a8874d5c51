"""Text <-> token ids, and a chat -> its prompt. No torch and no transformers: the process that answers HTTP holds it.

It knows nothing of requests, groups or streams.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from hamburger.engine.text.added_tokens import add_named_tokens
from hamburger.engine.text.chat_template import ChatTemplate, read_chat_templates
from hamburger.engine.text.spelling import Spelling
from hamburger.engine.text.tokenizer_files import TOKENIZER, read_json, special_tokens_of
from hamburger.engine.types.errors import TokenizerError as TokenizerError

_LONG = 5_000  # characters or tokens: from here on other threads go on meanwhile


class Tokenizer:
    """A model's tokenizer and chat template.

    vocab_size: one more than the highest token id (the model's own vocabulary may be padded beyond it).
    bos_token, eos_token, pad_token: text of that special token, or None; `*_id`: its token id, or None.
    loader: `module:function` and its arguments, by which another process gets one that was loaded from files.
    streams_bytes: `decode` is exactly the UTF-8 text of the tokens' bytes joined, so text can be streamed by bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """special_tokens: transformers' name ("bos_token", ...) -> text; those that the vocabulary lacks are left out.

        chat_templates: name -> jinja source; "default" is the one used, "tool_use" where tools are given.
        """
        ids = {name: backend.token_to_id(token) for name, token in (special_tokens or {}).items()}
        self._special_tokens = {n: t for n, t in (special_tokens or {}).items() if ids[n] is not None}
        # Files made for training may pad or cut every text.
        backend.no_truncation()
        backend.no_padding()
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        backend.add_special_tokens([t for t in dict.fromkeys(self._special_tokens.values()) if t not in known])
        self._backend = backend
        self.loader: tuple[str, ...] = ()
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._special_ids |= {i for i in ids.values() if i is not None}
        sources = chat_templates or {}
        self._template_variables: Mapping[str, Any] = {}
        self._templates = {name: ChatTemplate(sources[name]) for name in ("default", "tool_use") if name in sources}
        self._spelling = Spelling.of(backend)
        self._bytes: dict[tuple[int, bool], bytes] = {}
        self.streams_bytes = self._spelling is not None
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token, self.bos_token_id = self._special("bos_token")
        self.eos_token, self.eos_token_id = self._special("eos_token")
        self.pad_token, self.pad_token_id = self._special("pad_token")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load a folder with tokenizer.json (and the files that go with it), or a GGUF file.

        A tokenizer.json beside a GGUF file is preferred to what the file says, but for its chat template and special
        tokens, where no template lies beside it. Raises TokenizerError.
        """
        loaded = cls._read(path)
        loaded.loader = f"{__name__}:{load_tokenizer.__name__}", str(path.absolute())
        return loaded

    @classmethod
    def _read(cls, path: Path) -> Tokenizer:
        folder = path.parent if path.suffix == ".gguf" else path
        if (folder / TOKENIZER).is_file():
            return cls._load_folder(folder, path if path.suffix == ".gguf" else None)
        if path.suffix == ".gguf":
            from hamburger.engine.text.gguf_tokenizer import read_gguf_tokenizer  # the library, for such files alone

            found = read_gguf_tokenizer(path)
            return cls(found.backend, special_tokens=found.special_tokens, chat_templates=found.chat_templates)
        raise TokenizerError(
            f"{path} has no tokenizer.json. A sentencepiece tokenizer.model is not read: save the tokenizer with "
            "transformers (save_pretrained) to get one."
        )

    @classmethod
    def _load_folder(cls, folder: Path, gguf: Path | None) -> Tokenizer:
        file = folder / TOKENIZER
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
            backend.encode("")  # what its parts say of each other counts only then
        except BaseException as error:  # the library raises nothing narrower than Exception, or panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                f"{file} is not a tokenizer that the installed tokenizers library reads: {error}"
            ) from error
        config = read_json(folder / "tokenizer_config.json")
        named = read_json(folder / "special_tokens_map.json") | config
        add_named_tokens(backend, config, named, read_json(folder / "added_tokens.json"))
        special_tokens = special_tokens_of(folder, backend.get_added_tokens_decoder())
        templates = read_chat_templates(folder, config)
        if gguf is not None and not templates:
            from hamburger.engine.text.gguf_tokenizer import read_gguf_chat

            of_gguf, templates = read_gguf_chat(gguf)
            special_tokens = of_gguf | special_tokens
        return cls(backend, special_tokens=special_tokens, chat_templates=templates)

    def with_chat(self, template: str | None, variables: Mapping[str, Any]) -> Tokenizer:
        """The same tokenizer, but chats are written by this jinja source (None: as before), which is given these
        variables where a chat does not set them. Raises TokenizerError when the source is not valid jinja."""
        other = copy.copy(self)
        other._template_variables = variables
        if template is not None:
            other._templates = {"default": ChatTemplate(template)}
            other.check_templates()
        return other

    def check_templates(self) -> None:
        """Raises TokenizerError for a template that is not valid jinja, as chats would."""
        for template in self._templates.values():
            template.compile()

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the chat template, None where the model has none."""
        template = self._templates.get("default")
        return None if template is None else template.source

    @property
    def tool_template(self) -> str | None:
        """The source of the template that writes chats with tools; the ordinary one where it has no other."""
        template = self._templates.get("tool_use")
        return self.chat_template if template is None else template.source

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of `text`. Special tokens written out in it are recognised.

        add_special_tokens: put the model's own (such as a leading BOS) around it.
        Raises TokenizerError when the text holds lone surrogates, which no UTF-8 has.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"The text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
                "which is not valid Unicode text."
            ) from error
        if len(text) < _LONG:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # of the library's functions only those for batches release the interpreter's lock
            ids = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids without a token nothing.

        Raises TokenizerError for an id below 0 or above 32 bits.
        """
        spelling = self._spelling
        if spelling is None or spelling.byte_level:
            try:
                if len(ids) < _LONG:
                    return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
                return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            except OverflowError as error:
                raise TokenizerError(f"A token id is outside 0..{self.vocab_size - 1}.") from error
        # The library turns a whole run of byte tokens into U+FFFD where one byte of it is wrong, so that text already
        # streamed would change. Ours replaces only what is not UTF-8; on valid UTF-8 the two are equal.
        data = bytearray()
        first = True
        for token_id in ids:
            if not (skip_special_tokens and token_id in self._special_ids):
                data += self.token_bytes(token_id, first=first)
                first = first and not self.token_bytes(token_id)  # an id without a token is no first token
        return data.decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary writes it ("Ġthe", "▁the", "<0x0A>"); "" for an id without a token."""
        try:
            return self._backend.id_to_token(token_id) or ""
        except OverflowError as error:
            raise TokenizerError(f"Token id {token_id} is outside 0..{self.vocab_size - 1}.") from error

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """The exact bytes that a token adds to a text; b"" for an id without a token.

        first: it is the text's first token (some tokenizers drop a leading space there).
        """
        data = self._bytes.get((token_id, first))
        if data is None:
            token = self.token_text(token_id)
            data = token.encode() if self._spelling is None else self._spelling.to_bytes(token, first)
            self._bytes[token_id, first] = data
        return data

    @cached_property
    def max_token_bytes(self) -> int:
        """The most bytes that one token adds to a text."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out when it skips special tokens."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a chat, as the model's template writes it; encode it without adding special tokens.

        kwargs: further variables for the template. Raises TokenizerError when there is no template, or it refuses the
        messages, or cannot render them.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TokenizerError("The model has no chat template: send a plain prompt to /v1/completions instead.")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self._special_tokens, **self._template_variables, **kwargs},
        )

    def _special(self, name: str) -> tuple[str | None, int | None]:
        token = self._special_tokens.get(name)
        return token, None if token is None else self._backend.token_to_id(token)


def load_tokenizer(path: str) -> Tokenizer:
    """As Tokenizer.load."""
    return Tokenizer.load(Path(path))
